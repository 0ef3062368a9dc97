//! The arguments of each call, and the exempt calls with the reasons.

use super::{Answer, World, drain, fill, part, pipe, sockets};

/// A call with its memory.
pub struct Probe {
    pub name: &'static str,
    pub answer: Answer,
    pub prepare: fn(&mut World) -> Vec<u64>,
}

macro_rules! probes {
    ($($name:literal $answer:ident |$world:ident| $arguments:expr;)*) => {
        /// All compared calls.
        pub const PROBES: &[Probe] = &[$(Probe {
            name: $name,
            answer: Answer::$answer,
            prepare: |$world| { let arguments: &[u64] = &$arguments; arguments.to_vec() },
        }),*];
    };
}

/// The current folder, as the base of relative paths.
const HERE: u64 = libc::AT_FDCWD as u64;

/// The descriptor that a call has returned; none if the kernel lacks the call.
fn made(descriptor: i64) -> u64 {
    let error = std::io::Error::last_os_error();
    assert!(descriptor >= 0 || error.raw_os_error() == Some(libc::ENOSYS), "{error}");
    descriptor as u64
}

fn call(number: i64, arguments: [u64; 4]) -> u64 {
    let [a, b, c, d] = arguments;
    // SAFETY: the probe's arguments.
    made(unsafe { libc::syscall(number, a, b, c, d, 0, 0) })
}

/// An `epoll` with one pipe that can be read.
fn ready() -> u64 {
    let [reader, writer] = pipe();
    fill(writer, b"x");
    let epoll = call(libc::SYS_epoll_create1, [0; 4]);
    let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 7 };
    call(
        libc::SYS_epoll_ctl,
        [epoll, libc::EPOLL_CTL_ADD as u64, reader as u64, &raw mut event as u64],
    );
    epoll
}

/// The end of a pipe with data, always under the same number.
fn told() -> u64 {
    let [reader, writer] = pipe();
    fill(writer, b"what the pipe says");
    call(libc::SYS_dup3, [reader as u64, FIXED, 0, 0])
}

/// A descriptor number that no other code uses.
const FIXED: u64 = 900;

/// A socket that has received a datagram.
fn heard() -> u64 {
    let [reader, writer] = sockets(libc::SOCK_DGRAM);
    fill(writer, b"what the other one says");
    reader as u64
}

/// A socket whose other end is read after the call.
fn overheard(world: &mut World) -> u64 {
    let [reader, writer] = sockets(libc::SOCK_DGRAM);
    world.then(move || drain(reader));
    writer as u64
}

/// A message of one part: `msghdr`.
fn message(world: &mut World, text: &[u8]) -> u64 {
    let text = world.bytes(text);
    let vector = world.longs(&[text, 40, text + 100, 10]);
    world.longs(&[0, 0, vector, 2, 0, 0, 0])
}

/// A queue with a message. The kernel removes the queue after the process.
fn queue() -> u64 {
    let queue = call(libc::SYS_msgget, [libc::IPC_PRIVATE as u64, 0o600, 0, 0]);
    let message = [5u64, 0x1122_3344_5566_7788, 3];
    call(libc::SYS_msgsnd, [queue, message.as_ptr() as u64, 16, 0]);
    queue
}

/// Reads a queue after the call and removes it.
fn queue_end(world: &mut World, queue: u64) -> u64 {
    world.then(move || {
        let mut left = [0u64; 3];
        let read = [queue, left.as_mut_ptr() as u64, 16, 0];
        // SAFETY: room for the message; the queue is ours.
        let count = unsafe {
            libc::syscall(libc::SYS_msgrcv, read[0], read[1], read[2], 0, libc::IPC_NOWAIT)
        };
        call(libc::SYS_msgctl, [queue, libc::IPC_RMID as u64, 0, 0]);
        format!("{count} {left:?}").into_bytes()
    });
    queue
}

/// A set of two semaphores, which is read and removed after the call.
fn semaphores(world: &mut World) -> u64 {
    let set = call(libc::SYS_semget, [libc::IPC_PRIVATE as u64, 2, 0o600, 0]);
    world.then(move || {
        let value = call(libc::SYS_semctl, [set, 0, libc::GETVAL as u64, 0]);
        call(libc::SYS_semctl, [set, 0, libc::IPC_RMID as u64, 0]);
        value.to_ne_bytes().to_vec()
    });
    set
}

/// A file with an attribute: its path.
fn attributed(world: &mut World) -> u64 {
    let path = world.file("attributed");
    call(libc::SYS_setxattr, [path, c"user.one".as_ptr() as u64, c"value".as_ptr() as u64, 5]);
    path
}

/// A timer of the process.
fn timer() -> u64 {
    let mut timer = 0i32;
    let mut event = none();
    event.sigev_notify = libc::SIGEV_NONE;
    call(libc::SYS_timer_create, [1, &raw mut event as u64, &raw mut timer as u64, 0]);
    timer as u64
}

fn none() -> libc::sigevent {
    // SAFETY: all-zero bytes are a valid event.
    unsafe { std::mem::zeroed() }
}

fn clock() -> u64 {
    call(libc::SYS_timerfd_create, [1, 0, 0, 0])
}

/// A child that has ended.
fn ended() -> u64 {
    let child = std::process::Command::new("/bin/true").spawn();
    let child = child.expect("a child").id();
    let mut info = [0u64; 16];
    let wait = libc::WEXITED | libc::WNOWAIT;
    // SAFETY: space for the result.
    let done =
        unsafe { libc::syscall(libc::SYS_waitid, libc::P_PID, child, info.as_mut_ptr(), wait, 0) };
    made(done);
    u64::from(child)
}

/// `clone3` and similar calls get the size of their structure.
const ZERO_MASK: u64 = 8;

probes! {
"read" Same |w| { let at = w.room(100); [told(), at, 100] };
"write" Same |w| { let [r, t] = pipe(); w.then(move || drain(r));
    [t as u64, w.bytes(&[7; 99]), 99] };
"pread64" Same |w| { let at = w.room(9); [w.open("a"), at, 9, 3] };
"pwrite64" Same |w| { let f = w.open("a"); let p = w.folder.join("a");
    w.then(move || std::fs::read(p).unwrap_or_default()); [f, w.bytes(b"other"), 5, 3] };
"readv" Same |w| { let (a, b) = (w.room(8), w.room(9));
    let v = w.longs(&[part(a, 5), part(b, 9)].concat());
    [told(), v, 2] };
"writev" Same |w| { let (a, b) = (w.bytes(b"abc"), w.bytes(b"defg"));
    let v = w.longs(&[part(a, 3), part(b, 4)].concat()); let [r, t] = pipe();
    w.then(move || drain(r));
    [t as u64, v, 2] };
"preadv" Same |w| { let a = w.room(8); let v = w.longs(&part(a, 8)); [w.open("a"), v, 1, 2, 0] };
"pwritev" Same |w| { let a = w.bytes(b"new"); let v = w.longs(&part(a, 3)); let f = w.open("a");
    let p = w.folder.join("a"); w.then(move || std::fs::read(p).unwrap_or_default());
    [f, v, 1, 2, 0] };
"preadv2" Same |w| { let a = w.room(8); let v = w.longs(&part(a, 8));
    [w.open("a"), v, 1, 2, 0, 0] };
"pwritev2" Same |w| { let a = w.bytes(b"new"); let v = w.longs(&part(a, 3)); let f = w.open("a");
    let p = w.folder.join("a"); w.then(move || std::fs::read(p).unwrap_or_default());
    [f, v, 1, 2, 0, 0] };
"vmsplice" Same |w| { let a = w.bytes(b"abc"); let v = w.longs(&part(a, 3)); let [r, t] = pipe();
    w.then(move || drain(r)); [t as u64, v, 1, 0] };
"open" File |w| [w.file("a"), 0];
"creat" File |w| [w.gone("b"), 0o600];
"openat" File |w| [HERE, w.file("a"), 0];
"openat2" File |w| { let p = w.file("a"); [HERE, p, w.longs(&[0, 0, 0]), 24] };
"stat" Number |w| { let p = w.file("a"); [p, w.room(144)] };
"lstat" Number |w| { let p = w.file("a"); [p, w.room(144)] };
"fstat" Number |w| { let f = w.open("a"); [f, w.room(144)] };
"newfstatat" Number |w| { let p = w.file("a"); [HERE, p, w.room(144), 0] };
"statx" Number |w| { let p = w.file("a"); [HERE, p, 0, 0xfff, w.room(256)] };
"access" Same |w| [w.file("a"), 4];
"faccessat" Same |w| [HERE, w.file("a"), 4];
"faccessat2" Same |w| [HERE, w.file("a"), 4, 0];
"poll" Same |w| { let f = told(); let at = w.ints(&[f as i32, 1]); [at, 1, 0] };
"ppoll" Number |w| { let f = told(); let at = w.ints(&[f as i32, 1]); let t = w.longs(&[5, 0]);
    let mask = w.longs(&[!0]); [at, 1, t, mask, ZERO_MASK] };
"select" Number |w| { let f = told(); let s = w.longs(&bit(f)); let t = w.longs(&[5, 0]);
    [f + 1, s, 0, 0, t] };
"pselect6" Number |w| { let f = told(); let s = w.longs(&bit(f)); let t = w.longs(&[5, 0]);
    let mask = w.longs(&[!0]); let given = w.longs(&[mask, 8]); [f + 1, s, 0, 0, t, given] };
"epoll_ctl" Same |w| { let e = call(libc::SYS_epoll_create1, [0; 4]); let at = w.longs(&[1, 0]);
    [e, 1, told(), at] };
"epoll_wait" Same |w| { let at = w.room(120); [ready(), at, 10, 0] };
"epoll_pwait" Same |w| { let at = w.room(120); let m = w.longs(&[!0]); [ready(), at, 10, 0, m, 8] };
"epoll_pwait2" Same |w| { let at = w.room(120); let m = w.longs(&[!0]); let t = w.longs(&[0, 5]);
    [ready(), at, 10, t, m, 8] };
"ioctl" Same |w| [told(), libc::FIONREAD, w.room(4)];
"pipe" Success |w| [w.room(8)];
"pipe2" Success |w| [w.room(8), 0];
"mincore" Number |w| { let at = w.base as u64; [at + 60 * 4096, 3 * 4096, w.room(3)] };
"shmctl" Number |w| { let s = call(libc::SYS_shmget, [0, 4096, 0o600, 0]); let at = w.room(112);
    w.then(move || call(libc::SYS_shmctl, [s, 0, 0, 0]).to_ne_bytes().to_vec()); [s, 2, at] };
"nanosleep" Same |w| { let t = w.longs(&[0, 1000]); [t, w.room(16)] };
"clock_nanosleep" Same |w| { let t = w.longs(&[0, 1000]); [1, 0, t, w.room(16)] };
"getitimer" Same |w| [0, w.room(32)];
"setitimer" Same |w| { let t = w.longs(&[0, 0, 0, 0]); [0, t, w.room(32)] };
"sendfile" Same |w| { let [r, t] = pipe(); w.then(move || drain(r)); let at = w.longs(&[4]);
    [t as u64, w.open("a"), at, 6] };
"copy_file_range" Same |w| { let (f, t) = (w.open("a"), w.open("b")); let a = w.longs(&[1]);
    let b = w.longs(&[2]); [f, a, t, b, 5, 0] };
"splice" Same |w| { let [r, t] = pipe(); w.then(move || drain(r)); let at = w.longs(&[4]);
    [w.open("a"), at, t as u64, 0, 6, 0] };
"connect" Same |w| { let s = call(libc::SYS_socket, [1, 1, 0, 0]);
    let at = w.bytes(b"\x01\0/no/such/socket\0"); [s, at, 18] };
"bind" Same |w| { let s = call(libc::SYS_socket, [1, 1, 0, 0]); [s, w.bytes(b"\x01\0"), 2] };
"getsockname" Same |w| { let [s, _] = sockets(1); let n = w.ints(&[110]);
    [s as u64, w.room(110), n] };
"getpeername" Same |w| { let [s, _] = sockets(1); let n = w.ints(&[110]);
    [s as u64, w.room(110), n] };
"accept" File |w| { let s = listener(w); let n = w.ints(&[110]); [s, w.room(110), n] };
"accept4" File |w| { let s = listener(w); let n = w.ints(&[110]); [s, w.room(110), n, 0] };
"socketpair" Success |w| [1, 1, 0, w.room(8)];
"setsockopt" Same |w| { let [s, _] = sockets(1);
    [s as u64, 1, libc::SO_PASSCRED as u64, w.ints(&[1]), 4] };
"getsockopt" Same |w| { let [s, _] = sockets(1); let n = w.ints(&[4]);
    [s as u64, 1, 3, w.room(4), n] };
"sendto" Same |w| { let s = overheard(w); [s, w.bytes(b"hello"), 5, 0, 0, 0] };
"recvfrom" Same |w| { let at = w.room(50); let a = w.room(110); let n = w.ints(&[110]);
    [heard(), at, 50, 0, a, n] };
"sendmsg" Same |w| { let s = overheard(w); [s, message(w, &[b'm'; 200]), 0] };
"recvmsg" Same |w| { let m = message(w, &[0; 200]); [heard(), m, 0] };
"sendmmsg" Same |w| { let s = overheard(w); let a = w.bytes(b"many"); let v = w.longs(&part(a, 4));
    let m = w.longs(&[0, 0, v, 1, 0, 0, 0, 0]); [s, m, 1, 0] };
"recvmmsg" Same |w| { let a = w.room(50); let v = w.longs(&part(a, 50));
    let m = w.longs(&[0, 0, v, 1, 0, 0, 0, 0]); [heard(), m, 1, 0, 0] };
"wait4" Success |w| { let c = ended(); let s = w.room(4); [c, s, 0, w.room(144)] };
"waitid" Success |w| { let c = ended(); let i = w.room(128); [1, c, i, 4, w.room(144)] };
"uname" Same |w| [w.room(390)];
"semop" Same |w| { let s = semaphores(w); [s, w.bytes(&[0, 0, 3, 0, 0, 0]), 1] };
"semtimedop" Same |w| { let s = semaphores(w); let o = w.bytes(&[0, 0, 3, 0, 0, 0]);
    [s, o, 1, w.longs(&[1, 0])] };
"semctl" Same |w| { let s = semaphores(w); [s, 0, libc::SETALL as u64, w.bytes(&[4, 0, 5, 0])] };
"msgsnd" Same |w| { let q = call(libc::SYS_msgget, [0, 0o600, 0, 0]); let q = queue_end(w, q);
    [q, w.longs(&[5, 1, 2]), 16, 0] };
"msgrcv" Same |w| { let q = queue_end(w, queue()); [q, w.room(64), 16, 0, 0] };
"msgctl" Number |w| { let q = queue_end(w, queue()); [q, 2, w.room(120)] };
"fcntl" Same |w| { let f = w.open("a");
    [f, libc::F_GETLK as u64, w.bytes(&[1, 0, 0, 0, 0, 0, 0, 0])] };
"truncate" Same |w| [w.file("a"), 4];
"getdents" Success |w| { let d = folder(w); [d, w.room(8000), 8000] };
"getdents64" Success |w| { let d = folder(w); [d, w.room(8000), 8000] };
"getcwd" Same |w| [w.room(4096), 4096];
"chdir" Same |w| [w.text("/")];
"rename" Same |w| { let p = w.file("a"); [p, w.gone("b")] };
"renameat" Same |w| { let p = w.file("a"); [HERE, p, HERE, w.gone("b")] };
"renameat2" Same |w| { let p = w.file("a"); [HERE, p, HERE, w.gone("b"), 0] };
"mkdir" Same |w| [w.gone("d"), 0o700];
"mkdirat" Same |w| [HERE, w.gone("d"), 0o700];
"rmdir" Same |w| { let p = w.gone("d"); call(libc::SYS_mkdirat, [HERE, p, 0o700, 0]); [p] };
"link" Same |w| { let p = w.file("a"); [p, w.gone("b")] };
"linkat" Same |w| { let p = w.file("a"); [HERE, p, HERE, w.gone("b"), 0] };
"unlink" Same |w| [w.file("a")];
"unlinkat" Same |w| [HERE, w.file("a"), 0];
"symlink" Same |w| { let p = w.text("to"); [p, w.gone("b")] };
"symlinkat" Same |w| { let p = w.text("to"); [p, HERE, w.gone("b")] };
"readlink" Same |w| { let p = linked(w); [p, w.room(100), 100] };
"readlinkat" Same |w| { let p = linked(w); [HERE, p, w.room(100), 100] };
"chmod" Same |w| [w.file("a"), 0o600];
"fchmodat" Same |w| [HERE, w.file("a"), 0o600];
"fchmodat2" Same |w| [HERE, w.file("a"), 0o600, 0];
"chown" Same |w| [w.file("a"), !0, !0];
"lchown" Same |w| [w.file("a"), !0, !0];
"fchownat" Same |w| [HERE, w.file("a"), !0, !0, 0];
"mknod" Same |w| [w.gone("n"), 0o10600, 0];
"mknodat" Same |w| [HERE, w.gone("n"), 0o10600, 0];
"utime" Same |w| { let p = w.file("a"); [p, w.longs(&[5, 6])] };
"utimes" Same |w| { let p = w.file("a"); [p, w.longs(&[5, 0, 6, 0])] };
"futimesat" Same |w| { let p = w.file("a"); [HERE, p, w.longs(&[5, 0, 6, 0])] };
"utimensat" Same |w| { let p = w.file("a"); [HERE, p, w.longs(&[5, 0, 6, 0]), 0] };
"statfs" Number |w| { let p = w.text("/"); [p, w.room(120)] };
"fstatfs" Number |w| { let f = w.open("a"); [f, w.room(120)] };
"ustat" Number |w| [0, w.room(32)];
"gettimeofday" Number |w| { let t = w.room(16); [t, w.room(8)] };
"time" Success |w| [w.room(8)];
"times" Success |w| [w.room(32)];
"clock_gettime" Number |w| [1, w.room(16)];
"clock_getres" Same |w| [1, w.room(16)];
"clock_adjtime" Success |w| [0, w.room(208)];
"adjtimex" Success |w| [w.room(208)];
"getrlimit" Same |w| [7, w.room(16)];
"setrlimit" Same |w| [libc::RLIMIT_CORE.into(), w.longs(&[0, 0])];
"prlimit64" Same |w| { let n = w.longs(&[0, 0]); [0, libc::RLIMIT_CORE.into(), n, w.room(16)] };
"getrusage" Number |w| [0, w.room(144)];
"sysinfo" Number |w| [w.room(112)];
"getresuid" Same |w| { let (a, b) = (w.room(4), w.room(4)); [a, b, w.room(4)] };
"getresgid" Same |w| { let (a, b) = (w.room(4), w.room(4)); [a, b, w.room(4)] };
"getgroups" Same |w| [64, w.room(256)];
"capget" Same |w| { let h = w.ints(&[0x2008_0522, 0]); [h, w.room(24)] };
"rt_sigpending" Same |w| [w.room(8), 8];
"rt_sigprocmask" Same |w| { let s = w.longs(&[0]); [0, s, w.room(8), 8] };
"rt_sigaction" Number |w| { let a = w.longs(&[1, 0, 0, 0]); [libc::SIGURG as u64, a, w.room(32), 8] };
"rt_sigtimedwait" Same |w| { let s = w.longs(&[!0]); let i = w.room(128);
    [s, i, w.longs(&[0, 1000]), 8] };
"rt_sigqueueinfo" Same |w| [own(), 0, w.ints(&[0, 0, libc::SI_QUEUE, 0, 0, 0])];
"rt_tgsigqueueinfo" Same |w| [own(), own(), 0, w.ints(&[0, 0, libc::SI_QUEUE, 0, 0, 0])];
"signalfd" File |w| [!0, w.longs(&[!0]), 8];
"signalfd4" File |w| [!0, w.longs(&[!0]), 8, 0];
"sigaltstack" Number |w| { let s = w.longs(&[0, 2, 0]); [s, w.room(24)] };
"sched_getparam" Same |w| [0, w.room(4)];
"sched_setparam" Same |w| [0, w.ints(&[0])];
"sched_setscheduler" Same |w| [0, 0, w.ints(&[0])];
"sched_rr_get_interval" Same |w| [0, w.room(16)];
"sched_getaffinity" Same |w| [0, 128, w.room(128)];
"sched_setaffinity" Same |w| { let all = w.bytes(&[255; 128]); [0, 128, all] };
"sched_getattr" Same |w| [0, w.room(56), 56, 0];
"sched_setattr" Same |w| [0, w.ints(&[48, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]), 0];
"prctl" Same |w| [libc::PR_GET_NAME as u64, w.room(16)];
"arch_prctl" Number |w| [0x1003, w.room(8)];
"futex" Same |w| { let a = w.ints(&[7]); [a, 128, 8, w.longs(&[1, 0]), 0, 0] };
"futex_wake" Same |w| [w.ints(&[7]), 1, 1, 0x82];
"futex_wait" Same |w| { let a = w.ints(&[7]); [a, 8, 1, 0x82, w.longs(&[1, 0]), 1] };
"futex_waitv" Same |w| { let a = w.ints(&[7]); let v = w.longs(&[8, a, 0x82]);
    [v, 1, 0, w.longs(&[1, 0]), 1] };
"futex_requeue" Same |w| { let (a, b) = (w.ints(&[7]), w.ints(&[7]));
    let v = w.longs(&[7, a, 0x82, 7, b, 0x82]); [v, 0, 1, 1] };
"get_robust_list" Success |w| { let h = w.room(8); [0, h, w.room(8)] };
"timer_create" Success |w| { let e = w.ints(&[0, 0, 0, libc::SIGEV_NONE]); [1, e, w.room(4)] };
"timer_settime" Same |w| { let t = w.longs(&[0, 0, 0, 0]); [timer(), 0, t, w.room(32)] };
"timer_gettime" Same |w| [timer(), w.room(32)];
"timerfd_settime" Same |w| { let t = w.longs(&[0, 0, 0, 0]); [clock(), 0, t, w.room(32)] };
"timerfd_gettime" Same |w| [clock(), w.room(32)];
"mbind" Same |w| [w.base as u64 + 60 * 4096, 4096, 0, w.longs(&[0]), 64, 0];
"set_mempolicy" Same |w| [0, w.longs(&[0]), 64];
"get_mempolicy" Same |w| { let m = w.room(4); [m, w.room(128), 1024, 0, 0] };
"migrate_pages" Same |w| { let a = w.longs(&[1]); [0, 2, a, w.longs(&[1])] };
"mq_open" Success |w| { let n = queue_name(w);
    [n, 0o102, 0o600, w.longs(&[0, 4, 64, 0, 0, 0, 0, 0])] };
"mq_unlink" Same |w| { let n = queue_name(w); call(libc::SYS_mq_open, [n, 0o102, 0o600, 0]); [n] };
"mq_timedsend" Same |w| { let q = mail(w); let m = w.bytes(b"mail");
    [q, m, 4, 1, w.longs(&[1 << 40, 0])] };
"mq_timedreceive" Same |w| { let q = mail(w);
    call(libc::SYS_mq_timedsend, [q, c"post".as_ptr() as u64, 4, 3]);
    let m = w.room(64); let p = w.room(4); [q, m, 64, p, w.longs(&[1 << 40, 0])] };
"mq_notify" Same |w| { let q = mail(w); [q, w.ints(&[0, 0, 0, libc::SIGEV_NONE])] };
"mq_getsetattr" Same |w| { let q = mail(w); let n = w.longs(&[2048, 0, 0, 0]); [q, n, w.room(64)] };
"inotify_add_watch" Success |w| { let i = call(libc::SYS_inotify_init1, [0; 4]);
    [i, w.file("a"), 2] };
"getcpu" Number |w| { let c = w.room(4); [c, w.room(4), 0] };
"getrandom" Number |w| [w.room(64), 64, 0];
"memfd_create" File |w| [w.text("name"), 0];
"name_to_handle_at" Number |w| { let p = w.file("a"); let h = w.ints(&[128]);
    [HERE, p, h, w.room(4), 0] };
"process_vm_readv" Same |w| { let (a, b) = (w.room(9), w.bytes(b"from here"));
    let l = w.longs(&part(a, 9));
    let r = w.longs(&part(b, 9)); [own(), l, 1, r, 1, 0] };
"process_vm_writev" Same |w| { let (a, b) = (w.bytes(b"to there."), w.room(9));
    let l = w.longs(&part(a, 9));
    let r = w.longs(&part(b, 9)); [own(), l, 1, r, 1, 0] };
"process_madvise" Same |w| { let f = call(libc::SYS_pidfd_open, [own(), 0, 0, 0]);
    let v = w.longs(&part(w.base as u64, 4096)); [f, v, 1, libc::MADV_COLD as u64, 0] };
"pidfd_send_signal" Same |w| { let f = call(libc::SYS_pidfd_open, [own(), 0, 0, 0]);
    let i = w.ints(&[0, 0, libc::SI_QUEUE, 0, 0, 0]); [f, 0, i, 0] };
"move_pages" Number |w| { let p = w.longs(&[w.base as u64 + 60 * 4096]);
    [0, 1, p, 0, w.room(4), 0] };
"setxattr" Same |w| { let p = w.file("x"); let n = w.text("user.one");
    [p, n, w.bytes(b"new"), 3, 0] };
"lsetxattr" Same |w| { let p = w.file("x"); let n = w.text("user.one");
    [p, n, w.bytes(b"new"), 3, 0] };
"fsetxattr" Same |w| { let f = w.open("x"); let n = w.text("user.one");
    [f, n, w.bytes(b"new"), 3, 0] };
"getxattr" Same |w| { let p = attributed(w); let n = w.text("user.one"); [p, n, w.room(16), 16] };
"lgetxattr" Same |w| { let p = attributed(w); let n = w.text("user.one"); [p, n, w.room(16), 16] };
"fgetxattr" Same |w| { let f = opened(w); let n = w.text("user.one"); [f, n, w.room(16), 16] };
"listxattr" Same |w| { let p = attributed(w); [p, w.room(99), 99] };
"llistxattr" Same |w| { let p = attributed(w); [p, w.room(99), 99] };
"flistxattr" Same |w| { let f = opened(w); [f, w.room(99), 99] };
"removexattr" Same |w| { let p = attributed(w); [p, w.text("user.one")] };
"lremovexattr" Same |w| { let p = attributed(w); [p, w.text("user.one")] };
"fremovexattr" Same |w| { let f = opened(w); [f, w.text("user.one")] };
"setxattrat" Same |w| { let p = w.file("x"); let n = w.text("user.one"); let v = w.bytes(b"new");
    [HERE, p, 0, n, w.longs(&[v, 3]), 16] };
"getxattrat" Same |w| { let p = attributed(w); let n = w.text("user.one"); let v = w.room(16);
    [HERE, p, 0, n, w.longs(&[v, 16]), 16] };
"listxattrat" Same |w| { let p = attributed(w); [HERE, p, 0, w.room(99), 99] };
"removexattrat" Same |w| { let p = attributed(w); [HERE, p, 0, w.text("user.one")] };
"file_getattr" Number |w| { let p = w.file("a"); [HERE, p, w.room(24), 24, 0] };
"cachestat" Number |w| { let f = w.open("a"); let r = w.longs(&[0, 100]); [f, r, w.room(40), 0] };
"statmount" Number |w| { let r = w.longs(&[24, 1, 1]); [r, w.room(512), 512, 0] };
"listmount" Number |w| { let r = w.longs(&[24, !0, 0]); [r, w.room(800), 100, 0] };
"lsm_list_modules" Number |w| { let i = w.room(80); [i, w.ints(&[80]), 0] };
"kcmp" Number |w| [own(), own(), 7, 0, w.ints(&[0, 0, 0])];
"seccomp" Same |w| [2, 0, w.ints(&[0x7fff_0000])];
"landlock_create_ruleset" File |w| [w.longs(&[1]), 8, 0];
"landlock_add_rule" Same |w| { let a = 1u64; let r = call(444, [&raw const a as u64, 8, 0, 0]);
    let f = call(libc::SYS_openat, [HERE, c"/".as_ptr() as u64, libc::O_PATH as u64, 0]);
    let f = call(libc::SYS_dup3, [f, FIXED, 0, 0]);
    let mut rule = 1u64.to_ne_bytes().to_vec(); rule.extend((f as i32).to_ne_bytes());
    [r, 1, w.bytes(&rule), 0] };
"madvise" Same |w| [w.bytes(&[5; 4096]), 4096, libc::MADV_DONTNEED as u64];
"mprotect" Same |w| [w.bytes(&[5; 4096]), 4096, 3];
"pkey_mprotect" Same |w| [w.bytes(&[5; 4096]), 4096, 3, !0];
"clone3" Success |w| { [w.longs(&[0, 0, 0, 0, 0, 0, 0, 1]), 3] };
}

fn bit(file: u64) -> [u64; 16] {
    let mut set = [0; 16];
    set[file as usize / 64] = 1 << (file % 64);
    set
}

fn own() -> u64 {
    std::process::id().into()
}

fn folder(world: &World) -> u64 {
    let file = std::fs::File::open(&world.folder).expect("the folder");
    std::os::fd::IntoRawFd::into_raw_fd(file) as u64
}

/// Makes a symbolic link. Returns its path.
fn linked(world: &mut World) -> u64 {
    let path = world.gone("l");
    call(libc::SYS_symlinkat, [c"where it leads".as_ptr() as u64, HERE, path, 0]);
    path
}

/// A file with an extended attribute. Returns its descriptor.
fn opened(world: &mut World) -> u64 {
    let path = attributed(world);
    call(libc::SYS_openat, [HERE, path, libc::O_RDWR as u64, 0])
}

/// A listening socket with a waiting connection.
fn listener(world: &mut World) -> u64 {
    let path = world.folder.join("s");
    // The file may not exist.
    let _ = std::fs::remove_file(&path);
    let listener = std::os::unix::net::UnixListener::bind(&path).expect("a socket");
    let other = std::os::unix::net::UnixStream::connect(&path).expect("a connection");
    world.then(move || {
        drop(other);
        Vec::new()
    });
    std::os::fd::IntoRawFd::into_raw_fd(listener) as u64
}

/// The name of a queue that does not exist.
fn queue_name(world: &mut World) -> u64 {
    let name = format!("uzswap-absent-{}", own());
    let at = world.text(&name);
    // SAFETY: a name; it may not exist.
    unsafe { libc::syscall(libc::SYS_mq_unlink, at) };
    at
}

/// A message queue whose name was removed.
fn mail(world: &mut World) -> u64 {
    let name = queue_name(world);
    let shape = [0u64, 4, 64, 0, 0, 0, 0, 0];
    let queue = call(libc::SYS_mq_open, [name, 0o102, 0o600, shape.as_ptr() as u64]);
    call(libc::SYS_mq_unlink, [name, 0, 0, 0]);
    queue
}

/// Exempt calls with memory, with the reasons.
pub const UNTESTED: &[(&str, &str)] = &[
    (
        "they need a privilege that this program has not; before it is asked for, nothing is read",
        "setgroups sethostname setdomainname init_module finit_module delete_module settimeofday \
         clock_settime mount umount2 swapon swapoff reboot pivot_root chroot acct quotactl \
         quotactl_fd kexec_load kexec_file_load syslog open_by_handle_at bpf perf_event_open \
         open_tree move_mount fsopen fsconfig fspick mount_setattr open_tree_attr fanotify_mark \
         capset file_setattr",
    ),
    ("they need a ring of the kernel's, which is refused", "io_uring_enter io_uring_register"),
    (
        "this kernel may be built without",
        "add_key request_key keyctl sysfs modify_ldt \
      lsm_get_self_attr lsm_set_self_attr",
    ),
    ("of 32-bit programs", "set_thread_area get_thread_area"),
    ("it needs another process, whose memory it is about", "ptrace"),
    (
        "the programs of the end-to-end tests make them (`habits/mappings.c`)",
        "io_setup io_getevents io_submit io_cancel io_pgetevents mseal",
    ),
    (
        "given no memory that may be absent; the programs of the end-to-end tests make them",
        "mmap munmap brk mremap mlock mlock2 shmat close close_range dup2 dup3 clone fork vfork \
         execve execveat exit exit_group set_tid_address set_robust_list rseq rt_sigsuspend pause \
         fallocate unshare setns",
    ),
];
