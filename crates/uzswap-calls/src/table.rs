//! The system calls of x86-64, up to those of Linux 6.18: the memory that each uses, and its
//! treatment where pages may be absent. One row for each call.
//!
//! A number without a row is treated as a call whose six arguments may all refer to memory.

pub use crate::treatment::{Buffer, Treatment};

use Buffer::{Bytes, Each, Fixed, Message, Messages, Text, Typed, Vector};
use Treatment::{Absent, Left, Own, Pinned, Refused, Touched};

/// A system call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    /// Its number.
    pub number: u32,
    /// Its name in the kernel's `unistd_64.h`.
    pub name: &'static str,
    /// Its treatment.
    pub treatment: Treatment,
}

const fn row(number: u32, name: &'static str, treatment: Treatment) -> Row {
    Row { number, name, treatment }
}

/// A bound above the number of the kernel's calls.
pub const NUMBERS: usize = 512;

/// The treatment of a call without a row.
pub const ANY: Treatment = Touched(&[0, 1, 2, 3, 4, 5]);

/// By number, so that no call searches the rows.
static TREATMENTS: [Treatment; NUMBERS] = {
    let mut all = [ANY; NUMBERS];
    let mut at = 0;
    while at < ROWS.len() {
        all[ROWS[at].number as usize] = ROWS[at].treatment;
        at += 1;
    }
    all
};

/// The treatment of a call.
pub fn treatment(number: u64) -> Treatment {
    TREATMENTS.get(number as usize).copied().unwrap_or(ANY)
}

/// True if a call of a number is looked at.
pub fn is_looked_at(number: u32) -> bool {
    !matches!(treatment(number.into()), Left | Absent)
}

/// A call that uses no memory. The kernel does not restart it after a signal, so we do; for that it
/// must be replaced.
const AGAIN: &str = "restarted after our signal";

/// All calls, by number.
pub static ROWS: &[Row] = &[
    row(0, "read", Own("in parts of 4 MiB, each pinned")),
    row(1, "write", Own("pinned; to a file in one call")),
    row(2, "open", Touched(&[0])),
    row(3, "close", Own("our descriptors stay open")),
    row(4, "stat", Touched(&[0, 1])),
    row(5, "fstat", Touched(&[1])),
    row(6, "lstat", Touched(&[0, 1])),
    row(7, "poll", Pinned(&[Each(0, 1, 8)])),
    row(8, "lseek", Left),
    row(9, "mmap", Own("under the lock of the layout; suitable memory is adopted")),
    row(10, "mprotect", Own("under the lock of the layout; usable memory is adopted")),
    row(11, "munmap", Own("under the lock of the layout")),
    row(12, "brk", Own("under the lock of the layout; new memory is adopted")),
    row(
        13,
        "rt_sigaction",
        Own("SIGBUS, SIGILL and SIGSEGV stay ours; handlers begin on a stack of ours"),
    ),
    row(14, "rt_sigprocmask", Own("signals of faults are never blocked")),
    row(15, "rt_sigreturn", Left),
    row(16, "ioctl", Own("touched: 2; memory that it hands to a device is given back")),
    row(17, "pread64", Own("in parts of 4 MiB, each pinned")),
    row(18, "pwrite64", Own("pinned; to a file in one call")),
    row(19, "readv", Pinned(&[Vector(1, 2)])),
    row(20, "writev", Pinned(&[Vector(1, 2)])),
    row(21, "access", Touched(&[0])),
    row(22, "pipe", Touched(&[0])),
    row(23, "select", Touched(&[1, 2, 3, 4])),
    row(24, "sched_yield", Left),
    row(25, "mremap", Own("under the lock of the layout; its pages go along")),
    row(26, "msync", Left),
    row(27, "mincore", Own("pinned: 2, {1} / 4096 bytes; pages that are out are not in memory")),
    row(28, "madvise", Own("under the lock of the layout; MADV_PAGEOUT compresses")),
    row(29, "shmget", Left),
    row(30, "shmat", Own("over other maps (SHM_REMAP) under the lock of the layout")),
    row(31, "shmctl", Touched(&[2])),
    row(32, "dup", Left),
    row(33, "dup2", Own("our descriptors stay open")),
    row(34, "pause", Own(AGAIN)),
    row(35, "nanosleep", Touched(&[0, 1])),
    row(36, "getitimer", Touched(&[1])),
    row(37, "alarm", Left),
    row(38, "setitimer", Touched(&[1, 2])),
    row(39, "getpid", Left),
    row(40, "sendfile", Touched(&[2])),
    row(41, "socket", Left),
    row(42, "connect", Touched(&[1])),
    row(43, "accept", Touched(&[1, 2])),
    row(44, "sendto", Pinned(&[Bytes(1, 2), Bytes(4, 5)])),
    row(45, "recvfrom", Pinned(&[Bytes(1, 2), Fixed(4, 128), Fixed(5, 4)])),
    row(46, "sendmsg", Pinned(&[Message(1)])),
    row(47, "recvmsg", Pinned(&[Message(1)])),
    row(48, "shutdown", Left),
    row(49, "bind", Touched(&[1])),
    row(50, "listen", Left),
    row(51, "getsockname", Touched(&[1, 2])),
    row(52, "getpeername", Touched(&[1, 2])),
    row(53, "socketpair", Touched(&[3])),
    row(54, "setsockopt", Pinned(&[Bytes(3, 4)])),
    row(55, "getsockopt", Touched(&[3, 4])),
    row(56, "clone", Own("a child with memory of its own is made while nothing moves")),
    row(57, "fork", Own("the child is made while nothing moves")),
    row(58, "vfork", Own("made as it stands")),
    row(59, "execve", Own("all strings are pinned")),
    row(60, "exit", Own("memory of robust locks that the thread has is given back")),
    row(61, "wait4", Touched(&[1, 3])),
    row(62, "kill", Left),
    row(63, "uname", Touched(&[0])),
    row(64, "semget", Left),
    row(65, "semop", Pinned(&[Each(1, 2, 6)])),
    row(66, "semctl", Touched(&[3])),
    row(67, "shmdt", Left),
    row(68, "msgget", Left),
    row(69, "msgsnd", Pinned(&[Typed(1, 2)])),
    row(70, "msgrcv", Pinned(&[Typed(1, 2)])),
    row(71, "msgctl", Touched(&[2])),
    row(72, "fcntl", Touched(&[2])),
    row(73, "flock", Left),
    row(74, "fsync", Left),
    row(75, "fdatasync", Left),
    row(76, "truncate", Touched(&[0])),
    row(77, "ftruncate", Left),
    row(78, "getdents", Pinned(&[Bytes(1, 2)])),
    row(79, "getcwd", Pinned(&[Bytes(0, 1)])),
    row(80, "chdir", Touched(&[0])),
    row(81, "fchdir", Left),
    row(82, "rename", Touched(&[0, 1])),
    row(83, "mkdir", Touched(&[0])),
    row(84, "rmdir", Touched(&[0])),
    row(85, "creat", Touched(&[0])),
    row(86, "link", Touched(&[0, 1])),
    row(87, "unlink", Touched(&[0])),
    row(88, "symlink", Touched(&[0, 1])),
    row(89, "readlink", Pinned(&[Text(0), Bytes(1, 2)])),
    row(90, "chmod", Touched(&[0])),
    row(91, "fchmod", Left),
    row(92, "chown", Touched(&[0])),
    row(93, "fchown", Left),
    row(94, "lchown", Touched(&[0])),
    row(95, "umask", Left),
    row(96, "gettimeofday", Touched(&[0, 1])),
    row(97, "getrlimit", Own("not while a fork has raised limits; hard ones are noted")),
    row(98, "getrusage", Touched(&[1])),
    row(99, "sysinfo", Touched(&[0])),
    row(100, "times", Touched(&[0])),
    row(101, "ptrace", Own("touched: 2; 3; before PTRACE_TRACEME all memory is brought in")),
    row(102, "getuid", Left),
    row(103, "syslog", Pinned(&[Bytes(1, 2)])),
    row(104, "getgid", Left),
    row(105, "setuid", Left),
    row(106, "setgid", Left),
    row(107, "geteuid", Left),
    row(108, "getegid", Left),
    row(109, "setpgid", Left),
    row(110, "getppid", Left),
    row(111, "getpgrp", Left),
    row(112, "setsid", Left),
    row(113, "setreuid", Left),
    row(114, "setregid", Left),
    row(115, "getgroups", Pinned(&[Each(1, 0, 4)])),
    row(116, "setgroups", Pinned(&[Each(1, 0, 4)])),
    row(117, "setresuid", Left),
    row(118, "getresuid", Touched(&[0, 1, 2])),
    row(119, "setresgid", Left),
    row(120, "getresgid", Touched(&[0, 1, 2])),
    row(121, "getpgid", Left),
    row(122, "setfsuid", Left),
    row(123, "setfsgid", Left),
    row(124, "getsid", Left),
    row(125, "capget", Touched(&[0, 1])),
    row(126, "capset", Touched(&[0, 1])),
    row(127, "rt_sigpending", Touched(&[0])),
    row(128, "rt_sigtimedwait", Own("signals of faults are not waited for")),
    row(129, "rt_sigqueueinfo", Touched(&[2])),
    row(130, "rt_sigsuspend", Own("signals of faults are never blocked")),
    row(131, "sigaltstack", Own("noted; the kernel knows one of ours")),
    row(132, "utime", Touched(&[0, 1])),
    row(133, "mknod", Touched(&[0])),
    row(134, "uselib", Absent),
    row(135, "personality", Left),
    row(136, "ustat", Touched(&[1])),
    row(137, "statfs", Touched(&[0, 1])),
    row(138, "fstatfs", Touched(&[1])),
    row(139, "sysfs", Touched(&[1, 2])),
    row(140, "getpriority", Left),
    row(141, "setpriority", Left),
    row(142, "sched_setparam", Touched(&[1])),
    row(143, "sched_getparam", Touched(&[1])),
    row(144, "sched_setscheduler", Touched(&[2])),
    row(145, "sched_getscheduler", Left),
    row(146, "sched_get_priority_max", Left),
    row(147, "sched_get_priority_min", Left),
    row(148, "sched_rr_get_interval", Touched(&[1])),
    row(149, "mlock", Own("locked memory is released to the program")),
    row(150, "munlock", Left),
    row(151, "mlockall", Refused(libc::ENOMEM)),
    row(152, "munlockall", Left),
    row(153, "vhangup", Left),
    row(154, "modify_ldt", Touched(&[1])),
    row(155, "pivot_root", Touched(&[0, 1])),
    row(156, "_sysctl", Absent),
    row(157, "prctl", Own("touched: 1; 2; 3; 4; a filter of calls is looked at")),
    row(158, "arch_prctl", Own("touched: 1; before ARCH_SET_FS all memory is brought in")),
    row(159, "adjtimex", Touched(&[0])),
    row(160, "setrlimit", Own("not while a fork has raised limits; hard ones are noted")),
    row(161, "chroot", Touched(&[0])),
    row(162, "sync", Left),
    row(163, "acct", Touched(&[0])),
    row(164, "settimeofday", Touched(&[0, 1])),
    row(165, "mount", Touched(&[0, 1, 2, 4])),
    row(166, "umount2", Touched(&[0])),
    row(167, "swapon", Touched(&[0])),
    row(168, "swapoff", Touched(&[0])),
    row(169, "reboot", Touched(&[3])),
    row(170, "sethostname", Pinned(&[Bytes(0, 1)])),
    row(171, "setdomainname", Pinned(&[Bytes(0, 1)])),
    row(172, "iopl", Left),
    row(173, "ioperm", Left),
    row(174, "create_module", Absent),
    row(175, "init_module", Pinned(&[Bytes(0, 1), Text(2)])),
    row(176, "delete_module", Touched(&[0])),
    row(177, "get_kernel_syms", Absent),
    row(178, "query_module", Absent),
    row(179, "quotactl", Touched(&[1, 3])),
    row(180, "nfsservctl", Absent),
    row(181, "getpmsg", Absent),
    row(182, "putpmsg", Absent),
    row(183, "afs_syscall", Absent),
    row(184, "tuxcall", Absent),
    row(185, "security", Absent),
    row(186, "gettid", Left),
    row(187, "readahead", Left),
    row(188, "setxattr", Pinned(&[Text(0), Text(1), Bytes(2, 3)])),
    row(189, "lsetxattr", Pinned(&[Text(0), Text(1), Bytes(2, 3)])),
    row(190, "fsetxattr", Pinned(&[Text(1), Bytes(2, 3)])),
    row(191, "getxattr", Pinned(&[Text(0), Text(1), Bytes(2, 3)])),
    row(192, "lgetxattr", Pinned(&[Text(0), Text(1), Bytes(2, 3)])),
    row(193, "fgetxattr", Pinned(&[Text(1), Bytes(2, 3)])),
    row(194, "listxattr", Pinned(&[Text(0), Bytes(1, 2)])),
    row(195, "llistxattr", Pinned(&[Text(0), Bytes(1, 2)])),
    row(196, "flistxattr", Pinned(&[Bytes(1, 2)])),
    row(197, "removexattr", Touched(&[0, 1])),
    row(198, "lremovexattr", Touched(&[0, 1])),
    row(199, "fremovexattr", Touched(&[1])),
    row(200, "tkill", Left),
    row(201, "time", Touched(&[0])),
    row(202, "futex", Touched(&[0, 3, 4])),
    row(203, "sched_setaffinity", Pinned(&[Bytes(2, 1)])),
    row(204, "sched_getaffinity", Pinned(&[Bytes(2, 1)])),
    row(205, "set_thread_area", Touched(&[0])),
    row(206, "io_setup", Touched(&[1])),
    row(207, "io_destroy", Left),
    row(208, "io_getevents", Pinned(&[Each(3, 2, 32), Fixed(4, 16)])),
    row(209, "io_submit", Own("its requests and their buffers are pinned")),
    row(210, "io_cancel", Touched(&[1, 2])),
    row(211, "get_thread_area", Touched(&[0])),
    row(212, "lookup_dcookie", Absent),
    row(213, "epoll_create", Left),
    row(214, "epoll_ctl_old", Absent),
    row(215, "epoll_wait_old", Absent),
    row(216, "remap_file_pages", Left),
    row(217, "getdents64", Pinned(&[Bytes(1, 2)])),
    row(
        218,
        "set_tid_address",
        Own("memory that the kernel writes later is released to the program"),
    ),
    row(219, "restart_syscall", Left),
    row(220, "semtimedop", Pinned(&[Each(1, 2, 6), Fixed(3, 16)])),
    row(221, "fadvise64", Left),
    row(222, "timer_create", Touched(&[1, 2])),
    row(223, "timer_settime", Touched(&[2, 3])),
    row(224, "timer_gettime", Touched(&[1])),
    row(225, "timer_getoverrun", Left),
    row(226, "timer_delete", Left),
    row(227, "clock_settime", Touched(&[1])),
    row(228, "clock_gettime", Touched(&[1])),
    row(229, "clock_getres", Touched(&[1])),
    row(230, "clock_nanosleep", Touched(&[2, 3])),
    row(231, "exit_group", Own("segments at a store are removed")),
    row(232, "epoll_wait", Pinned(&[Each(1, 2, 12)])),
    row(233, "epoll_ctl", Touched(&[3])),
    row(234, "tgkill", Left),
    row(235, "utimes", Touched(&[0, 1])),
    row(236, "vserver", Absent),
    row(237, "mbind", Touched(&[3])),
    row(238, "set_mempolicy", Touched(&[1])),
    row(239, "get_mempolicy", Touched(&[0, 1, 3])),
    row(240, "mq_open", Touched(&[0, 3])),
    row(241, "mq_unlink", Touched(&[0])),
    row(242, "mq_timedsend", Pinned(&[Bytes(1, 2), Fixed(4, 16)])),
    row(243, "mq_timedreceive", Pinned(&[Bytes(1, 2), Fixed(3, 4), Fixed(4, 16)])),
    row(244, "mq_notify", Touched(&[1])),
    row(245, "mq_getsetattr", Touched(&[1, 2])),
    row(246, "kexec_load", Touched(&[2])),
    row(247, "waitid", Touched(&[2, 4])),
    row(248, "add_key", Pinned(&[Text(0), Text(1), Bytes(2, 3)])),
    row(249, "request_key", Touched(&[0, 1, 2])),
    row(250, "keyctl", Touched(&[1, 2, 3, 4])),
    row(251, "ioprio_set", Left),
    row(252, "ioprio_get", Left),
    row(253, "inotify_init", Left),
    row(254, "inotify_add_watch", Touched(&[1])),
    row(255, "inotify_rm_watch", Left),
    row(256, "migrate_pages", Touched(&[2, 3])),
    row(257, "openat", Touched(&[1])),
    row(258, "mkdirat", Touched(&[1])),
    row(259, "mknodat", Touched(&[1])),
    row(260, "fchownat", Touched(&[1])),
    row(261, "futimesat", Touched(&[1, 2])),
    row(262, "newfstatat", Touched(&[1, 2])),
    row(263, "unlinkat", Touched(&[1])),
    row(264, "renameat", Touched(&[1, 3])),
    row(265, "linkat", Touched(&[1, 3])),
    row(266, "symlinkat", Touched(&[0, 2])),
    row(267, "readlinkat", Pinned(&[Text(1), Bytes(2, 3)])),
    row(268, "fchmodat", Touched(&[1])),
    row(269, "faccessat", Touched(&[1])),
    row(270, "pselect6", Own("signals of faults are never blocked")),
    row(271, "ppoll", Own("signals of faults are never blocked")),
    row(272, "unshare", Own("made while none of our threads is there")),
    row(
        273,
        "set_robust_list",
        Own("memory that the kernel reads later is released to the program"),
    ),
    row(274, "get_robust_list", Touched(&[1, 2])),
    row(275, "splice", Touched(&[1, 3])),
    row(276, "tee", Left),
    row(277, "sync_file_range", Left),
    row(278, "vmsplice", Own("a pipe gets a copy: the kernel would go on using the pages")),
    row(279, "move_pages", Pinned(&[Each(2, 1, 8), Each(3, 1, 4), Each(4, 1, 4)])),
    row(280, "utimensat", Touched(&[1, 2])),
    row(281, "epoll_pwait", Own("signals of faults are never blocked")),
    row(282, "signalfd", Own("signals of faults are not waited for")),
    row(283, "timerfd_create", Left),
    row(284, "eventfd", Left),
    row(285, "fallocate", Own(AGAIN)),
    row(286, "timerfd_settime", Touched(&[2, 3])),
    row(287, "timerfd_gettime", Touched(&[1])),
    row(288, "accept4", Touched(&[1, 2])),
    row(289, "signalfd4", Own("signals of faults are not waited for")),
    row(290, "eventfd2", Left),
    row(291, "epoll_create1", Left),
    row(292, "dup3", Own("our descriptors stay open")),
    row(293, "pipe2", Touched(&[0])),
    row(294, "inotify_init1", Left),
    row(295, "preadv", Pinned(&[Vector(1, 2)])),
    row(296, "pwritev", Pinned(&[Vector(1, 2)])),
    row(297, "rt_tgsigqueueinfo", Touched(&[3])),
    row(298, "perf_event_open", Touched(&[0])),
    row(299, "recvmmsg", Pinned(&[Messages(1, 2), Fixed(4, 16)])),
    row(300, "fanotify_init", Left),
    row(301, "fanotify_mark", Touched(&[4])),
    row(302, "prlimit64", Own("not while a fork has raised limits; hard ones are noted")),
    row(303, "name_to_handle_at", Touched(&[1, 2, 3])),
    row(304, "open_by_handle_at", Touched(&[1])),
    row(305, "clock_adjtime", Touched(&[1])),
    row(306, "syncfs", Left),
    row(307, "sendmmsg", Pinned(&[Messages(1, 2)])),
    row(308, "setns", Own("made while none of our threads is there")),
    row(309, "getcpu", Touched(&[0, 1])),
    row(310, "process_vm_readv", Own("pinned; a process of the tree brings its pages in")),
    row(311, "process_vm_writev", Own("pinned; a process of the tree brings its pages in")),
    row(312, "kcmp", Touched(&[4])),
    row(313, "finit_module", Touched(&[1])),
    row(314, "sched_setattr", Touched(&[1])),
    row(315, "sched_getattr", Touched(&[1])),
    row(316, "renameat2", Touched(&[1, 3])),
    row(317, "seccomp", Own("touched: 2; a filter of calls is looked at")),
    row(318, "getrandom", Pinned(&[Bytes(0, 1)])),
    row(319, "memfd_create", Touched(&[0])),
    row(320, "kexec_file_load", Touched(&[3])),
    row(321, "bpf", Touched(&[1])),
    row(322, "execveat", Own("all strings are pinned")),
    row(323, "userfaultfd", Left),
    row(324, "membarrier", Left),
    row(325, "mlock2", Own("locked memory is released to the program")),
    row(326, "copy_file_range", Touched(&[1, 3])),
    row(327, "preadv2", Pinned(&[Vector(1, 2)])),
    row(328, "pwritev2", Pinned(&[Vector(1, 2)])),
    row(329, "pkey_mprotect", Own("under the lock of the layout; usable memory is adopted")),
    row(330, "pkey_alloc", Left),
    row(331, "pkey_free", Left),
    row(332, "statx", Touched(&[1, 4])),
    row(333, "io_pgetevents", Pinned(&[Each(3, 2, 32), Fixed(4, 16), Fixed(5, 16)])),
    row(334, "rseq", Own("memory that the kernel writes later is released to the program")),
    row(335, "uretprobe", Left),
    row(336, "uprobe", Left),
    row(424, "pidfd_send_signal", Touched(&[2])),
    row(425, "io_uring_setup", Refused(libc::ENOSYS)),
    row(426, "io_uring_enter", Touched(&[4])),
    row(427, "io_uring_register", Touched(&[2])),
    row(428, "open_tree", Touched(&[1])),
    row(429, "move_mount", Touched(&[1, 3])),
    row(430, "fsopen", Touched(&[0])),
    row(431, "fsconfig", Touched(&[2, 3])),
    row(432, "fsmount", Left),
    row(433, "fspick", Touched(&[1])),
    row(434, "pidfd_open", Left),
    row(
        435,
        "clone3",
        Own("a child with memory of its own is made while nothing moves, with our handlers"),
    ),
    row(436, "close_range", Own("our descriptors stay open")),
    row(437, "openat2", Touched(&[1, 2])),
    row(438, "pidfd_getfd", Left),
    row(439, "faccessat2", Touched(&[1])),
    row(440, "process_madvise", Own("as before Linux 6.13: advice for any process")),
    row(441, "epoll_pwait2", Own("signals of faults are never blocked")),
    row(442, "mount_setattr", Touched(&[1, 3])),
    row(443, "quotactl_fd", Touched(&[3])),
    row(444, "landlock_create_ruleset", Touched(&[0])),
    row(445, "landlock_add_rule", Touched(&[2])),
    row(446, "landlock_restrict_self", Left),
    row(447, "memfd_secret", Left),
    row(448, "process_mrelease", Left),
    row(449, "futex_waitv", Touched(&[0, 3])),
    row(450, "set_mempolicy_home_node", Left),
    row(451, "cachestat", Touched(&[1, 2])),
    row(452, "fchmodat2", Touched(&[1])),
    row(453, "map_shadow_stack", Left),
    row(454, "futex_wake", Touched(&[0])),
    row(455, "futex_wait", Touched(&[0, 4])),
    row(456, "futex_requeue", Touched(&[0])),
    row(457, "statmount", Touched(&[0, 1])),
    row(458, "listmount", Pinned(&[Fixed(0, 24), Each(1, 2, 8)])),
    row(459, "lsm_get_self_attr", Touched(&[1, 2])),
    row(460, "lsm_set_self_attr", Touched(&[1])),
    row(461, "lsm_list_modules", Touched(&[0, 1])),
    row(462, "mseal", Own("its memory is given back to the program")),
    row(463, "setxattrat", Touched(&[1, 3, 4])),
    row(464, "getxattrat", Touched(&[1, 3, 4])),
    row(465, "listxattrat", Pinned(&[Text(1), Bytes(3, 4)])),
    row(466, "removexattrat", Touched(&[1, 3])),
    row(467, "open_tree_attr", Touched(&[1, 3])),
    row(468, "file_getattr", Touched(&[1, 2])),
    row(469, "file_setattr", Touched(&[1, 2])),
];

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use std::fs;

    /// Debian's libc6-dev has the kernel's numbers here.
    const HEADER: &str = "/usr/include/x86_64-linux-gnu/asm/unistd_64.h";

    #[test]
    fn each_call_of_the_kernels_header_has_one_row_of_its_number() {
        let rows: BTreeMap<u32, &str> = ROWS.iter().map(|row| (row.number, row.name)).collect();
        assert_eq!(rows.len(), ROWS.len(), "a number has two rows");
        let mut names: Vec<&str> = rows.values().copied().collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), ROWS.len(), "a name has two rows");
        assert!(ROWS.is_sorted_by_key(|row| row.number));
        let header = fs::read_to_string(HEADER).unwrap();
        let defined = header.lines().filter_map(|line| line.strip_prefix("#define __NR_"));
        let defined: Vec<_> = defined.filter_map(|line| line.split_once(' ')).collect();
        assert!(defined.len() > 350, "{HEADER} has {} calls", defined.len());
        for (name, number) in defined {
            assert_eq!(rows.get(&number.trim().parse().unwrap()), Some(&name), "{name}");
        }
    }

    /// Calls each number without a row.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_call_without_a_row_is_none_of_the_kernels() {
        let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
        let mut parts = release.split(['.', '-']).map_while(|part| part.parse::<u32>().ok());
        let version = (parts.next().unwrap(), parts.next().unwrap());
        for number in 0..NUMBERS as u32 {
            let has_row = ROWS.iter().any(|row| row.number == number);
            // Newer kernels may have more calls.
            let is_newer = version > (6, 18) && number > ROWS.last().unwrap().number;
            if !has_row && !is_newer {
                // SAFETY: such a call gets no valid memory.
                let answer = unsafe { crate::raw(number.into(), [u64::MAX; 6]) };
                assert_eq!(answer, -i64::from(libc::ENOSYS), "call {number} has no row");
            }
        }
    }

    #[test]
    fn arguments_of_rows_are_arguments() {
        for row in ROWS {
            let places: Vec<usize> = match row.treatment {
                Touched(arguments) => arguments.to_vec(),
                Pinned(buffers) => buffers.iter().flat_map(places).collect(),
                _ => vec![0],
            };
            assert!(!places.is_empty() && places.iter().all(|at| *at < 6), "{}", row.name);
        }
    }

    fn places(buffer: &Buffer) -> Vec<usize> {
        match *buffer {
            Bytes(at, count)
            | Each(at, count, _)
            | Buffer::Pages(at, count)
            | Typed(at, count)
            | Vector(at, count)
            | Messages(at, count) => vec![at, count],
            Fixed(at, _) | Text(at) | Message(at) => vec![at],
        }
    }
}
