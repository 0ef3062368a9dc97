//! The system calls of Linux up to 6.18, by their numbers on x86-64 and on aarch64: the memory that
//! each uses, and its treatment where pages may be absent. One row for each call.
//!
//! A number without a row is treated as a call whose six arguments may all refer to memory.

pub use crate::treatment::{Buffer, Treatment};

use Buffer::{Bytes, Each, Fixed, Message, Messages, Text, Typed, Vector};
use Treatment::{Absent, Left, Own, Pinned, Refused, Touched};

/// A system call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    /// Its number on x86-64.
    pub x86_64: u32,
    /// Its number on aarch64; [`X86`] if only x86-64 has it.
    pub aarch64: u32,
    /// Its name in the kernel's `unistd_64.h`.
    pub name: &'static str,
    /// Its treatment.
    pub treatment: Treatment,
}

/// In place of a number on aarch64: only x86-64 has the call. aarch64 has none of the calls for
/// which there are newer ones.
pub const X86: u32 = u32::MAX;

impl Row {
    /// Its number on this processor; [`X86`] if this processor does not have it.
    pub const fn number(&self) -> u32 {
        if cfg!(target_arch = "aarch64") { self.aarch64 } else { self.x86_64 }
    }
}

const fn row(x86_64: u32, aarch64: u32, name: &'static str, treatment: Treatment) -> Row {
    Row { x86_64, aarch64, name, treatment }
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
        if ROWS[at].number() != X86 {
            all[ROWS[at].number() as usize] = ROWS[at].treatment;
        }
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

/// All calls, by their numbers on x86-64.
pub static ROWS: &[Row] = &[
    row(0, 63, "read", Own("in parts of 4 MiB, each pinned")),
    row(1, 64, "write", Own("pinned; to a file in one call")),
    row(2, X86, "open", Touched(&[0])),
    row(3, 57, "close", Own("our descriptors stay open")),
    row(4, X86, "stat", Touched(&[0, 1])),
    row(5, 80, "fstat", Touched(&[1])),
    row(6, X86, "lstat", Touched(&[0, 1])),
    row(7, X86, "poll", Pinned(&[Each(0, 1, 8)])),
    row(8, 62, "lseek", Left),
    row(9, 222, "mmap", Own("under the lock of the layout; suitable memory is adopted")),
    row(10, 226, "mprotect", Own("under the lock of the layout; usable memory is adopted")),
    row(11, 215, "munmap", Own("under the lock of the layout")),
    row(12, 214, "brk", Own("under the lock of the layout; new memory is adopted")),
    row(
        13,
        134,
        "rt_sigaction",
        Own("SIGBUS, SIGILL and SIGSEGV stay ours; handlers begin on a stack of ours"),
    ),
    row(14, 135, "rt_sigprocmask", Own("signals of faults are never blocked")),
    row(15, 139, "rt_sigreturn", Left),
    row(16, 29, "ioctl", Own("touched: 2; memory that it hands to a device is given back")),
    row(17, 67, "pread64", Own("in parts of 4 MiB, each pinned")),
    row(18, 68, "pwrite64", Own("pinned; to a file in one call")),
    row(19, 65, "readv", Pinned(&[Vector(1, 2)])),
    row(20, 66, "writev", Pinned(&[Vector(1, 2)])),
    row(21, X86, "access", Touched(&[0])),
    row(22, X86, "pipe", Touched(&[0])),
    row(23, X86, "select", Touched(&[1, 2, 3, 4])),
    row(24, 124, "sched_yield", Left),
    row(25, 216, "mremap", Own("under the lock of the layout; its pages go along")),
    row(26, 227, "msync", Left),
    row(
        27,
        232,
        "mincore",
        Own("pinned: 2, {1} / 4096 bytes; pages that are out are not in memory"),
    ),
    row(28, 233, "madvise", Own("under the lock of the layout; MADV_PAGEOUT compresses")),
    row(29, 194, "shmget", Left),
    row(30, 196, "shmat", Own("over other maps (SHM_REMAP) under the lock of the layout")),
    row(31, 195, "shmctl", Touched(&[2])),
    row(32, 23, "dup", Left),
    row(33, X86, "dup2", Own("our descriptors stay open")),
    row(34, X86, "pause", Own(AGAIN)),
    row(35, 101, "nanosleep", Touched(&[0, 1])),
    row(36, 102, "getitimer", Touched(&[1])),
    row(37, X86, "alarm", Left),
    row(38, 103, "setitimer", Touched(&[1, 2])),
    row(39, 172, "getpid", Left),
    row(40, 71, "sendfile", Touched(&[2])),
    row(41, 198, "socket", Left),
    row(42, 203, "connect", Touched(&[1])),
    row(43, 202, "accept", Touched(&[1, 2])),
    row(44, 206, "sendto", Pinned(&[Bytes(1, 2), Bytes(4, 5)])),
    row(45, 207, "recvfrom", Pinned(&[Bytes(1, 2), Fixed(4, 128), Fixed(5, 4)])),
    row(46, 211, "sendmsg", Pinned(&[Message(1)])),
    row(47, 212, "recvmsg", Pinned(&[Message(1)])),
    row(48, 210, "shutdown", Left),
    row(49, 200, "bind", Touched(&[1])),
    row(50, 201, "listen", Left),
    row(51, 204, "getsockname", Touched(&[1, 2])),
    row(52, 205, "getpeername", Touched(&[1, 2])),
    row(53, 199, "socketpair", Touched(&[3])),
    row(54, 208, "setsockopt", Pinned(&[Bytes(3, 4)])),
    row(55, 209, "getsockopt", Touched(&[3, 4])),
    row(56, 220, "clone", Own("a child with memory of its own is made while nothing moves")),
    row(57, X86, "fork", Own("the child is made while nothing moves")),
    row(58, X86, "vfork", Own("made as it stands")),
    row(59, 221, "execve", Own("all strings are pinned")),
    row(60, 93, "exit", Own("memory of robust locks that the thread has is given back")),
    row(61, 260, "wait4", Touched(&[1, 3])),
    row(62, 129, "kill", Left),
    row(63, 160, "uname", Touched(&[0])),
    row(64, 190, "semget", Left),
    row(65, 193, "semop", Pinned(&[Each(1, 2, 6)])),
    row(66, 191, "semctl", Touched(&[3])),
    row(67, 197, "shmdt", Left),
    row(68, 186, "msgget", Left),
    row(69, 189, "msgsnd", Pinned(&[Typed(1, 2)])),
    row(70, 188, "msgrcv", Pinned(&[Typed(1, 2)])),
    row(71, 187, "msgctl", Touched(&[2])),
    row(72, 25, "fcntl", Touched(&[2])),
    row(73, 32, "flock", Left),
    row(74, 82, "fsync", Left),
    row(75, 83, "fdatasync", Left),
    row(76, 45, "truncate", Touched(&[0])),
    row(77, 46, "ftruncate", Left),
    row(78, X86, "getdents", Pinned(&[Bytes(1, 2)])),
    row(79, 17, "getcwd", Pinned(&[Bytes(0, 1)])),
    row(80, 49, "chdir", Touched(&[0])),
    row(81, 50, "fchdir", Left),
    row(82, X86, "rename", Touched(&[0, 1])),
    row(83, X86, "mkdir", Touched(&[0])),
    row(84, X86, "rmdir", Touched(&[0])),
    row(85, X86, "creat", Touched(&[0])),
    row(86, X86, "link", Touched(&[0, 1])),
    row(87, X86, "unlink", Touched(&[0])),
    row(88, X86, "symlink", Touched(&[0, 1])),
    row(89, X86, "readlink", Pinned(&[Text(0), Bytes(1, 2)])),
    row(90, X86, "chmod", Touched(&[0])),
    row(91, 52, "fchmod", Left),
    row(92, X86, "chown", Touched(&[0])),
    row(93, 55, "fchown", Left),
    row(94, X86, "lchown", Touched(&[0])),
    row(95, 166, "umask", Left),
    row(96, 169, "gettimeofday", Touched(&[0, 1])),
    row(97, 163, "getrlimit", Own("not while a fork has raised limits; hard ones are noted")),
    row(98, 165, "getrusage", Touched(&[1])),
    row(99, 179, "sysinfo", Touched(&[0])),
    row(100, 153, "times", Touched(&[0])),
    row(101, 117, "ptrace", Own("touched: 2; 3; before PTRACE_TRACEME all memory is brought in")),
    row(102, 174, "getuid", Left),
    row(103, 116, "syslog", Pinned(&[Bytes(1, 2)])),
    row(104, 176, "getgid", Left),
    row(105, 146, "setuid", Left),
    row(106, 144, "setgid", Left),
    row(107, 175, "geteuid", Left),
    row(108, 177, "getegid", Left),
    row(109, 154, "setpgid", Left),
    row(110, 173, "getppid", Left),
    row(111, X86, "getpgrp", Left),
    row(112, 157, "setsid", Left),
    row(113, 145, "setreuid", Left),
    row(114, 143, "setregid", Left),
    row(115, 158, "getgroups", Pinned(&[Each(1, 0, 4)])),
    row(116, 159, "setgroups", Pinned(&[Each(1, 0, 4)])),
    row(117, 147, "setresuid", Left),
    row(118, 148, "getresuid", Touched(&[0, 1, 2])),
    row(119, 149, "setresgid", Left),
    row(120, 150, "getresgid", Touched(&[0, 1, 2])),
    row(121, 155, "getpgid", Left),
    row(122, 151, "setfsuid", Left),
    row(123, 152, "setfsgid", Left),
    row(124, 156, "getsid", Left),
    row(125, 90, "capget", Touched(&[0, 1])),
    row(126, 91, "capset", Touched(&[0, 1])),
    row(127, 136, "rt_sigpending", Touched(&[0])),
    row(128, 137, "rt_sigtimedwait", Own("signals of faults are not waited for")),
    row(129, 138, "rt_sigqueueinfo", Touched(&[2])),
    row(130, 133, "rt_sigsuspend", Own("signals of faults are never blocked")),
    row(131, 132, "sigaltstack", Own("noted; the kernel knows one of ours")),
    row(132, X86, "utime", Touched(&[0, 1])),
    row(133, X86, "mknod", Touched(&[0])),
    row(134, X86, "uselib", Absent),
    row(135, 92, "personality", Left),
    row(136, X86, "ustat", Touched(&[1])),
    row(137, 43, "statfs", Touched(&[0, 1])),
    row(138, 44, "fstatfs", Touched(&[1])),
    row(139, X86, "sysfs", Touched(&[1, 2])),
    row(140, 141, "getpriority", Left),
    row(141, 140, "setpriority", Left),
    row(142, 118, "sched_setparam", Touched(&[1])),
    row(143, 121, "sched_getparam", Touched(&[1])),
    row(144, 119, "sched_setscheduler", Touched(&[2])),
    row(145, 120, "sched_getscheduler", Left),
    row(146, 125, "sched_get_priority_max", Left),
    row(147, 126, "sched_get_priority_min", Left),
    row(148, 127, "sched_rr_get_interval", Touched(&[1])),
    row(149, 228, "mlock", Own("locked memory is released to the program")),
    row(150, 229, "munlock", Left),
    row(151, 230, "mlockall", Refused(libc::ENOMEM)),
    row(152, 231, "munlockall", Left),
    row(153, 58, "vhangup", Left),
    row(154, X86, "modify_ldt", Touched(&[1])),
    row(155, 41, "pivot_root", Touched(&[0, 1])),
    row(156, X86, "_sysctl", Absent),
    row(157, 167, "prctl", Own("touched: 1; 2; 3; 4; a filter of calls is looked at")),
    row(158, X86, "arch_prctl", Own("touched: 1; before ARCH_SET_FS all memory is brought in")),
    row(159, 171, "adjtimex", Touched(&[0])),
    row(160, 164, "setrlimit", Own("not while a fork has raised limits; hard ones are noted")),
    row(161, 51, "chroot", Touched(&[0])),
    row(162, 81, "sync", Left),
    row(163, 89, "acct", Touched(&[0])),
    row(164, 170, "settimeofday", Touched(&[0, 1])),
    row(165, 40, "mount", Touched(&[0, 1, 2, 4])),
    row(166, 39, "umount2", Touched(&[0])),
    row(167, 224, "swapon", Touched(&[0])),
    row(168, 225, "swapoff", Touched(&[0])),
    row(169, 142, "reboot", Touched(&[3])),
    row(170, 161, "sethostname", Pinned(&[Bytes(0, 1)])),
    row(171, 162, "setdomainname", Pinned(&[Bytes(0, 1)])),
    row(172, X86, "iopl", Left),
    row(173, X86, "ioperm", Left),
    row(174, X86, "create_module", Absent),
    row(175, 105, "init_module", Pinned(&[Bytes(0, 1), Text(2)])),
    row(176, 106, "delete_module", Touched(&[0])),
    row(177, X86, "get_kernel_syms", Absent),
    row(178, X86, "query_module", Absent),
    row(179, 60, "quotactl", Touched(&[1, 3])),
    row(180, 42, "nfsservctl", Absent),
    row(181, X86, "getpmsg", Absent),
    row(182, X86, "putpmsg", Absent),
    row(183, X86, "afs_syscall", Absent),
    row(184, X86, "tuxcall", Absent),
    row(185, X86, "security", Absent),
    row(186, 178, "gettid", Left),
    row(187, 213, "readahead", Left),
    row(188, 5, "setxattr", Pinned(&[Text(0), Text(1), Bytes(2, 3)])),
    row(189, 6, "lsetxattr", Pinned(&[Text(0), Text(1), Bytes(2, 3)])),
    row(190, 7, "fsetxattr", Pinned(&[Text(1), Bytes(2, 3)])),
    row(191, 8, "getxattr", Pinned(&[Text(0), Text(1), Bytes(2, 3)])),
    row(192, 9, "lgetxattr", Pinned(&[Text(0), Text(1), Bytes(2, 3)])),
    row(193, 10, "fgetxattr", Pinned(&[Text(1), Bytes(2, 3)])),
    row(194, 11, "listxattr", Pinned(&[Text(0), Bytes(1, 2)])),
    row(195, 12, "llistxattr", Pinned(&[Text(0), Bytes(1, 2)])),
    row(196, 13, "flistxattr", Pinned(&[Bytes(1, 2)])),
    row(197, 14, "removexattr", Touched(&[0, 1])),
    row(198, 15, "lremovexattr", Touched(&[0, 1])),
    row(199, 16, "fremovexattr", Touched(&[1])),
    row(200, 130, "tkill", Left),
    row(201, X86, "time", Touched(&[0])),
    row(202, 98, "futex", Touched(&[0, 3, 4])),
    row(203, 122, "sched_setaffinity", Pinned(&[Bytes(2, 1)])),
    row(204, 123, "sched_getaffinity", Pinned(&[Bytes(2, 1)])),
    row(205, X86, "set_thread_area", Touched(&[0])),
    row(206, 0, "io_setup", Touched(&[1])),
    row(207, 1, "io_destroy", Left),
    row(208, 4, "io_getevents", Pinned(&[Each(3, 2, 32), Fixed(4, 16)])),
    row(209, 2, "io_submit", Own("its requests and their buffers are pinned")),
    row(210, 3, "io_cancel", Touched(&[1, 2])),
    row(211, X86, "get_thread_area", Touched(&[0])),
    row(212, 18, "lookup_dcookie", Absent),
    row(213, X86, "epoll_create", Left),
    row(214, X86, "epoll_ctl_old", Absent),
    row(215, X86, "epoll_wait_old", Absent),
    row(216, 234, "remap_file_pages", Left),
    row(217, 61, "getdents64", Pinned(&[Bytes(1, 2)])),
    row(
        218,
        96,
        "set_tid_address",
        Own("memory that the kernel writes later is released to the program"),
    ),
    row(219, 128, "restart_syscall", Left),
    row(220, 192, "semtimedop", Pinned(&[Each(1, 2, 6), Fixed(3, 16)])),
    row(221, 223, "fadvise64", Left),
    row(222, 107, "timer_create", Touched(&[1, 2])),
    row(223, 110, "timer_settime", Touched(&[2, 3])),
    row(224, 108, "timer_gettime", Touched(&[1])),
    row(225, 109, "timer_getoverrun", Left),
    row(226, 111, "timer_delete", Left),
    row(227, 112, "clock_settime", Touched(&[1])),
    row(228, 113, "clock_gettime", Touched(&[1])),
    row(229, 114, "clock_getres", Touched(&[1])),
    row(230, 115, "clock_nanosleep", Touched(&[2, 3])),
    row(231, 94, "exit_group", Own("segments at a store are removed")),
    row(232, X86, "epoll_wait", Pinned(&[Each(1, 2, 12)])),
    row(233, 21, "epoll_ctl", Touched(&[3])),
    row(234, 131, "tgkill", Left),
    row(235, X86, "utimes", Touched(&[0, 1])),
    row(236, X86, "vserver", Absent),
    row(237, 235, "mbind", Touched(&[3])),
    row(238, 237, "set_mempolicy", Touched(&[1])),
    row(239, 236, "get_mempolicy", Touched(&[0, 1, 3])),
    row(240, 180, "mq_open", Touched(&[0, 3])),
    row(241, 181, "mq_unlink", Touched(&[0])),
    row(242, 182, "mq_timedsend", Pinned(&[Bytes(1, 2), Fixed(4, 16)])),
    row(243, 183, "mq_timedreceive", Pinned(&[Bytes(1, 2), Fixed(3, 4), Fixed(4, 16)])),
    row(244, 184, "mq_notify", Touched(&[1])),
    row(245, 185, "mq_getsetattr", Touched(&[1, 2])),
    row(246, 104, "kexec_load", Touched(&[2])),
    row(247, 95, "waitid", Touched(&[2, 4])),
    row(248, 217, "add_key", Pinned(&[Text(0), Text(1), Bytes(2, 3)])),
    row(249, 218, "request_key", Touched(&[0, 1, 2])),
    row(250, 219, "keyctl", Touched(&[1, 2, 3, 4])),
    row(251, 30, "ioprio_set", Left),
    row(252, 31, "ioprio_get", Left),
    row(253, X86, "inotify_init", Left),
    row(254, 27, "inotify_add_watch", Touched(&[1])),
    row(255, 28, "inotify_rm_watch", Left),
    row(256, 238, "migrate_pages", Touched(&[2, 3])),
    row(257, 56, "openat", Touched(&[1])),
    row(258, 34, "mkdirat", Touched(&[1])),
    row(259, 33, "mknodat", Touched(&[1])),
    row(260, 54, "fchownat", Touched(&[1])),
    row(261, X86, "futimesat", Touched(&[1, 2])),
    row(262, 79, "newfstatat", Touched(&[1, 2])),
    row(263, 35, "unlinkat", Touched(&[1])),
    row(264, 38, "renameat", Touched(&[1, 3])),
    row(265, 37, "linkat", Touched(&[1, 3])),
    row(266, 36, "symlinkat", Touched(&[0, 2])),
    row(267, 78, "readlinkat", Pinned(&[Text(1), Bytes(2, 3)])),
    row(268, 53, "fchmodat", Touched(&[1])),
    row(269, 48, "faccessat", Touched(&[1])),
    row(270, 72, "pselect6", Own("signals of faults are never blocked")),
    row(271, 73, "ppoll", Own("signals of faults are never blocked")),
    row(272, 97, "unshare", Own("made while none of our threads is there")),
    row(
        273,
        99,
        "set_robust_list",
        Own("memory that the kernel reads later is released to the program"),
    ),
    row(274, 100, "get_robust_list", Touched(&[1, 2])),
    row(275, 76, "splice", Touched(&[1, 3])),
    row(276, 77, "tee", Left),
    row(277, 84, "sync_file_range", Left),
    row(278, 75, "vmsplice", Own("a pipe gets a copy: the kernel would go on using the pages")),
    row(279, 239, "move_pages", Pinned(&[Each(2, 1, 8), Each(3, 1, 4), Each(4, 1, 4)])),
    row(280, 88, "utimensat", Touched(&[1, 2])),
    row(281, 22, "epoll_pwait", Own("signals of faults are never blocked")),
    row(282, X86, "signalfd", Own("signals of faults are not waited for")),
    row(283, 85, "timerfd_create", Left),
    row(284, X86, "eventfd", Left),
    row(285, 47, "fallocate", Own(AGAIN)),
    row(286, 86, "timerfd_settime", Touched(&[2, 3])),
    row(287, 87, "timerfd_gettime", Touched(&[1])),
    row(288, 242, "accept4", Touched(&[1, 2])),
    row(289, 74, "signalfd4", Own("signals of faults are not waited for")),
    row(290, 19, "eventfd2", Left),
    row(291, 20, "epoll_create1", Left),
    row(292, 24, "dup3", Own("our descriptors stay open")),
    row(293, 59, "pipe2", Touched(&[0])),
    row(294, 26, "inotify_init1", Left),
    row(295, 69, "preadv", Pinned(&[Vector(1, 2)])),
    row(296, 70, "pwritev", Pinned(&[Vector(1, 2)])),
    row(297, 240, "rt_tgsigqueueinfo", Touched(&[3])),
    row(298, 241, "perf_event_open", Touched(&[0])),
    row(299, 243, "recvmmsg", Pinned(&[Messages(1, 2), Fixed(4, 16)])),
    row(300, 262, "fanotify_init", Left),
    row(301, 263, "fanotify_mark", Touched(&[4])),
    row(302, 261, "prlimit64", Own("not while a fork has raised limits; hard ones are noted")),
    row(303, 264, "name_to_handle_at", Touched(&[1, 2, 3])),
    row(304, 265, "open_by_handle_at", Touched(&[1])),
    row(305, 266, "clock_adjtime", Touched(&[1])),
    row(306, 267, "syncfs", Left),
    row(307, 269, "sendmmsg", Pinned(&[Messages(1, 2)])),
    row(308, 268, "setns", Own("made while none of our threads is there")),
    row(309, 168, "getcpu", Touched(&[0, 1])),
    row(310, 270, "process_vm_readv", Own("pinned; a process of the tree brings its pages in")),
    row(311, 271, "process_vm_writev", Own("pinned; a process of the tree brings its pages in")),
    row(312, 272, "kcmp", Touched(&[4])),
    row(313, 273, "finit_module", Touched(&[1])),
    row(314, 274, "sched_setattr", Touched(&[1])),
    row(315, 275, "sched_getattr", Touched(&[1])),
    row(316, 276, "renameat2", Touched(&[1, 3])),
    row(317, 277, "seccomp", Own("touched: 2; a filter of calls is looked at")),
    row(318, 278, "getrandom", Pinned(&[Bytes(0, 1)])),
    row(319, 279, "memfd_create", Touched(&[0])),
    row(320, 294, "kexec_file_load", Touched(&[3])),
    row(321, 280, "bpf", Touched(&[1])),
    row(322, 281, "execveat", Own("all strings are pinned")),
    row(323, 282, "userfaultfd", Left),
    row(324, 283, "membarrier", Left),
    row(325, 284, "mlock2", Own("locked memory is released to the program")),
    row(326, 285, "copy_file_range", Touched(&[1, 3])),
    row(327, 286, "preadv2", Pinned(&[Vector(1, 2)])),
    row(328, 287, "pwritev2", Pinned(&[Vector(1, 2)])),
    row(329, 288, "pkey_mprotect", Own("under the lock of the layout; usable memory is adopted")),
    row(330, 289, "pkey_alloc", Left),
    row(331, 290, "pkey_free", Left),
    row(332, 291, "statx", Touched(&[1, 4])),
    row(333, 292, "io_pgetevents", Pinned(&[Each(3, 2, 32), Fixed(4, 16), Fixed(5, 16)])),
    row(334, 293, "rseq", Own("memory that the kernel writes later is released to the program")),
    row(335, X86, "uretprobe", Left),
    row(336, X86, "uprobe", Left),
    row(424, 424, "pidfd_send_signal", Touched(&[2])),
    row(425, 425, "io_uring_setup", Refused(libc::ENOSYS)),
    row(426, 426, "io_uring_enter", Touched(&[4])),
    row(427, 427, "io_uring_register", Touched(&[2])),
    row(428, 428, "open_tree", Touched(&[1])),
    row(429, 429, "move_mount", Touched(&[1, 3])),
    row(430, 430, "fsopen", Touched(&[0])),
    row(431, 431, "fsconfig", Touched(&[2, 3])),
    row(432, 432, "fsmount", Left),
    row(433, 433, "fspick", Touched(&[1])),
    row(434, 434, "pidfd_open", Left),
    row(
        435,
        435,
        "clone3",
        Own("a child with memory of its own is made while nothing moves, with our handlers"),
    ),
    row(436, 436, "close_range", Own("our descriptors stay open")),
    row(437, 437, "openat2", Touched(&[1, 2])),
    row(438, 438, "pidfd_getfd", Left),
    row(439, 439, "faccessat2", Touched(&[1])),
    row(440, 440, "process_madvise", Own("as before Linux 6.13: advice for any process")),
    row(441, 441, "epoll_pwait2", Own("signals of faults are never blocked")),
    row(442, 442, "mount_setattr", Touched(&[1, 3])),
    row(443, 443, "quotactl_fd", Touched(&[3])),
    row(444, 444, "landlock_create_ruleset", Touched(&[0])),
    row(445, 445, "landlock_add_rule", Touched(&[2])),
    row(446, 446, "landlock_restrict_self", Left),
    row(447, 447, "memfd_secret", Left),
    row(448, 448, "process_mrelease", Left),
    row(449, 449, "futex_waitv", Touched(&[0, 3])),
    row(450, 450, "set_mempolicy_home_node", Left),
    row(451, 451, "cachestat", Touched(&[1, 2])),
    row(452, 452, "fchmodat2", Touched(&[1])),
    row(453, 453, "map_shadow_stack", Left),
    row(454, 454, "futex_wake", Touched(&[0])),
    row(455, 455, "futex_wait", Touched(&[0, 4])),
    row(456, 456, "futex_requeue", Touched(&[0])),
    row(457, 457, "statmount", Touched(&[0, 1])),
    row(458, 458, "listmount", Pinned(&[Fixed(0, 24), Each(1, 2, 8)])),
    row(459, 459, "lsm_get_self_attr", Touched(&[1, 2])),
    row(460, 460, "lsm_set_self_attr", Touched(&[1])),
    row(461, 461, "lsm_list_modules", Touched(&[0, 1])),
    row(462, 462, "mseal", Own("its memory is given back to the program")),
    row(463, 463, "setxattrat", Touched(&[1, 3, 4])),
    row(464, 464, "getxattrat", Touched(&[1, 3, 4])),
    row(465, 465, "listxattrat", Pinned(&[Text(1), Bytes(3, 4)])),
    row(466, 466, "removexattrat", Touched(&[1, 3])),
    row(467, 467, "open_tree_attr", Touched(&[1, 3])),
    row(468, 468, "file_getattr", Touched(&[1, 2])),
    row(469, 469, "file_setattr", Touched(&[1, 2])),
];

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use std::fs;

    /// Debian's libc6-dev has the numbers of x86-64 here, and those of most others, with aarch64.
    const HEADER: &str = "/usr/include/x86_64-linux-gnu/asm/unistd_64.h";
    const GENERIC: &str = "/usr/include/asm-generic/unistd.h";

    /// The calls that a header defines.
    fn defined(header: &str) -> BTreeMap<String, u32> {
        let text = fs::read_to_string(header).unwrap();
        let defined = text.lines().filter_map(|line| line.strip_prefix("#define __NR"));
        let defined = defined.filter_map(|line| line.trim().split_once(char::is_whitespace));
        let words: BTreeMap<&str, &str> = defined.map(|(name, to)| (name, to.trim())).collect();
        // Some names are defined by other names.
        let number = |first: &'_ str| {
            let other =
                |to: &str| to.strip_prefix("__NR").and_then(|name| words.get(name).copied());
            let mut all = std::iter::successors(Some(first.to_owned()), |to| {
                other(to).map(ToOwned::to_owned)
            });
            all.find_map(|to| to.parse::<u32>().ok())
        };
        let names = words.iter().filter_map(|(name, to)| Some((name.strip_prefix('_')?, *to)));
        names.filter_map(|(name, to)| Some((name.to_owned(), number(to)?))).collect()
    }

    #[test]
    fn each_call_of_the_kernels_header_has_one_row_of_its_number() {
        let rows: BTreeMap<u32, &str> = ROWS.iter().map(|row| (row.x86_64, row.name)).collect();
        assert_eq!(rows.len(), ROWS.len(), "a number has two rows");
        let mut names: Vec<&str> = rows.values().copied().collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), ROWS.len(), "a name has two rows");
        assert!(ROWS.is_sorted_by_key(|row| row.x86_64));
        let defined = defined(HEADER);
        assert!(defined.len() > 350, "{HEADER} has {} calls", defined.len());
        for (name, number) in defined {
            assert_eq!(rows.get(&number), Some(&&*name), "{name}");
        }
    }

    #[test]
    fn the_numbers_of_aarch64_are_the_generic_ones() {
        let generic = defined(GENERIC);
        assert!(generic.len() > 300, "{GENERIC} has {} calls", generic.len());
        let of_arm: Vec<&Row> = ROWS.iter().filter(|row| row.aarch64 != X86).collect();
        let numbers: BTreeMap<u32, &str> =
            of_arm.iter().map(|row| (row.aarch64, row.name)).collect();
        assert_eq!(numbers.len(), of_arm.len(), "a number has two rows");
        for row in ROWS {
            match generic.get(row.name) {
                Some(number) => assert_eq!(row.aarch64, *number, "{}", row.name),
                // The header may be older than the call. Since 424 all processors agree.
                None if row.x86_64 >= 424 => assert_eq!(row.aarch64, row.x86_64, "{}", row.name),
                None => assert_eq!(row.aarch64, X86, "{}", row.name),
            }
        }
        // The last calls before 403 to 423, which have times of 64 bits for processors of 32.
        for (name, number) in generic.iter().filter(|(_, number)| **number < 295) {
            let is_of_others = matches!(
                &**name,
                "arch_specific_syscall" | "sync_file_range2" | "mmap2" | "llseek"
            ) || name.ends_with("64")
                || name.ends_with("64_64");
            assert!(numbers.contains_key(number) || is_of_others, "{name} has no row");
        }
    }

    /// Calls each number without a row.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_call_without_a_row_is_none_of_the_kernels() {
        let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
        let mut parts = release.split(['.', '-']).map_while(|part| part.parse::<u32>().ok());
        let version = (parts.next().unwrap(), parts.next().unwrap());
        let last = ROWS.last().unwrap().number();
        for number in 0..NUMBERS as u32 {
            let has_row = ROWS.iter().any(|row| row.number() == number);
            // Newer kernels may have more calls.
            let is_newer = version > (6, 18) && number > last;
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
