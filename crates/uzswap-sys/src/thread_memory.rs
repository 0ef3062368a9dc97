//! Where the C library has a thread's own memory: its description of the thread (the *block*, whose
//! address is `pthread_self`), and the thread's variables.
//!
//! ```text
//! x86-64    … stack │ variables │ block                    the thread pointer is the block
//! aarch64   … stack │ block │ thread pointer │ variables
//! ```

use std::ops::Range;

/// More bytes than the C library's description of a thread has.
pub const BLOCK: usize = 4 << 10;

const ARE_VARIABLES_BEFORE: bool = cfg!(target_arch = "x86_64");

/// The memory of a thread by the address of its block, with that many bytes of variables.
pub fn around(block: usize, variables: usize) -> Range<usize> {
    let before = if ARE_VARIABLES_BEFORE { variables } else { 0 };
    block.saturating_sub(before)..block.saturating_add(BLOCK + variables - before)
}

/// The address of the calling thread's block.
pub fn own_block() -> usize {
    // SAFETY: asks only.
    unsafe { libc::pthread_self() as usize }
}

/// The address of the block of a thread by its thread pointer. The C library has both at the same
/// distance in each thread.
pub fn block_of(thread_pointer: usize) -> usize {
    thread_pointer.wrapping_sub(crate::processor::thread_pointer().wrapping_sub(own_block()))
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use super::*;
    use crate::processor::thread_pointer;
    use std::cell::Cell;

    thread_local! {
        static VARIABLE: Cell<u64> = const { Cell::new(1) };
    }

    #[test]
    fn a_variable_of_a_thread_is_beside_its_block() {
        let look = || {
            let at = VARIABLE.with(|variable| variable.as_ptr() as usize);
            assert!(around(own_block(), 64 << 10).contains(&at));
            assert!(around(own_block(), 0).contains(&thread_pointer()));
            assert_eq!(block_of(thread_pointer()), own_block());
        };
        look();
        std::thread::spawn(look).join().unwrap();
    }
}
