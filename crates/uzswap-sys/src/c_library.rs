//! The C library of this process.

/// True if the C library is glibc 2.34 or later. It contains the functions that libpthread and
/// libdl had before, and these two libraries are empty.
pub fn is_unified() -> bool {
    #[cfg(target_env = "gnu")]
    {
        // SAFETY: takes nothing, and returns a constant text.
        let version = unsafe { std::ffi::CStr::from_ptr(libc::gnu_get_libc_version()) };
        version.to_str().is_ok_and(is_unified_in)
    }
    #[cfg(not(target_env = "gnu"))]
    false
}

/// True for versions such as `2.34` or `2.41.9000`.
#[cfg(any(target_env = "gnu", test))]
fn is_unified_in(version: &str) -> bool {
    let mut numbers = version.split('.').map_while(|number| number.parse::<u32>().ok());
    let first_two = numbers.next().zip(numbers.next());
    first_two.is_some_and(|version| version >= (2, 34))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn glibc_is_unified_from_2_34_on() {
        for (version, expected) in
            [("2.28", false), ("2.33", false), ("2.34", true), ("2.41.9000", true), ("3.0", true)]
        {
            assert_eq!(is_unified_in(version), expected, "{version}");
        }
        assert!(!is_unified_in("") && !is_unified_in("2"));
    }
}
