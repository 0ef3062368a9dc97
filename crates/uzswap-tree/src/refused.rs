//! The reasons in the report for calls that programs get refused.

/// For `io_uring_setup`.
pub const IO_URING: &str = "io_uring is refused, since the kernel would use memory that is out";
/// For `mlockall`.
pub const LOCK_ALL: &str = "mlockall is refused, since all of its memory would have to stay";
