//! Memory for a key: a mapping of its own, locked, left out of core dumps, and wiped when the key
//! is not needed any more. Forked processes do not get it, unless they are to use the key.

use crate::map::Mapping;
use std::fmt;
use std::io;
use std::marker::PhantomData;
use std::ops::Deref;

/// A value in memory of its own, as described above.
///
/// Invariant: the mapping begins with a valid `T`.
pub struct Secret<T> {
    memory: Mapping,
    value: PhantomData<T>,
}

impl<T> Secret<T> {
    /// Moves the result of `make` into memory of its own, and overwrites the stack that `make`
    /// used. Fails if there is no memory, if no more memory may be locked (`RLIMIT_MEMLOCK`), or if
    /// `make` fails.
    pub fn try_new(make: impl FnOnce() -> io::Result<T>) -> io::Result<Self> {
        const { assert!(!std::mem::needs_drop::<T>(), "it is forgotten, not dropped") };
        const { assert!(align_of::<T>() <= crate::map::PAGE_BYTES) };
        let memory = Mapping::populated(size_of::<T>())?;
        memory.lock()?;
        memory.keep_private()?;
        let done = write_to(&memory, make);
        overwrite_stack();
        done?;
        Ok(Self { memory, value: PhantomData })
    }

    /// Lets processes that are forked from now on have a copy.
    pub fn let_forks_inherit(&self) -> io::Result<()> {
        self.memory.keep_on_fork()
    }

    /// Called in a forked process: locks its copy, too. Errors: as of [`Self::try_new`].
    pub fn lock_again(&self) -> io::Result<()> {
        self.memory.lock()
    }

    fn clear(&mut self) {
        wipe(self.memory.as_mut_slice());
    }
}

#[inline(never)]
fn write_to<T>(memory: &Mapping, make: impl FnOnce() -> io::Result<T>) -> io::Result<()> {
    let value = make()?;
    // SAFETY: the mapping is page-aligned, large enough, new, and unknown to other code.
    unsafe { memory.as_ptr().cast::<T>().write(value) };
    Ok(())
}

/// Zeros the stack frames of [`write_to`] and of its callees.
#[inline(never)]
fn overwrite_stack() {
    let mut frames = [1; 16 << 10];
    wipe(&mut frames);
}

/// Overwrites bytes with zeros, even if they are never read again.
pub fn wipe(bytes: &mut [u8]) {
    for byte in bytes {
        // SAFETY: a valid, exclusive reference.
        unsafe { std::ptr::from_mut(byte).write_volatile(0) };
    }
}

impl<T> Deref for Secret<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: a valid `T`, by the struct's invariant; only `drop` writes to it.
        unsafe { &*self.memory.as_ptr().cast() }
    }
}

impl<T> Drop for Secret<T> {
    fn drop(&mut self) {
        self.clear();
    }
}

impl<T> fmt::Debug for Secret<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

#[cfg(all(test, not(miri)))]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    fn flags_of(address: usize) -> String {
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let start = format!("{address:x}-");
        let of_it = smaps.lines().skip_while(|line| !line.starts_with(&start));
        of_it.into_iter().find(|line| line.starts_with("VmFlags")).unwrap().to_owned()
    }

    #[test]
    fn a_secret_is_locked_and_not_dumped_and_not_forked_and_then_zeros() {
        let mut secret = Secret::try_new(|| Ok([7u8; 600])).unwrap();
        assert_eq!(*secret, [7; 600]);
        let flags = flags_of(secret.memory.as_ptr() as usize);
        for flag in [" lo", " dd", " wf"] {
            assert!(flags.contains(flag), "{flags} lacks{flag}");
        }
        secret.let_forks_inherit().unwrap();
        let flags = flags_of(secret.memory.as_ptr() as usize);
        assert!(!flags.contains(" wf") && flags.contains(" lo"), "{flags}");
        secret.clear();
        assert_eq!(*secret, [0; 600]);
        assert!(Secret::<u8>::try_new(|| Err(io::ErrorKind::Other.into())).is_err());
    }
}
