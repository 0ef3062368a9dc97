//! Calls for which there are newer ones. x86-64 has both; on aarch64 these numbers are of no call.

#![allow(non_upper_case_globals, reason = "the names that the C library gives them")]

/// The calls, with numbers beyond those of the kernel where the processor lacks them.
macro_rules! older {
    ($($name:ident)*) => {
        older!(0, $($name)*);
    };
    ($before:expr, $name:ident $($rest:ident)*) => {
        #[cfg(target_arch = "x86_64")]
        pub use libc::$name;
        /// Absent from this processor.
        #[cfg(not(target_arch = "x86_64"))]
        pub const $name: libc::c_long = ABSENT + $before;
        older!($before + 1, $($rest)*);
    };
    ($before:expr,) => {};
}

#[cfg(not(target_arch = "x86_64"))]
const ABSENT: libc::c_long = 1 << 20;

older! {
    SYS_arch_prctl SYS_dup2 SYS_epoll_wait SYS_fork SYS_open SYS_pause SYS_poll SYS_signalfd
    SYS_vfork
}
