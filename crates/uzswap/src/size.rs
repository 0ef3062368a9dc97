//! Sizes as people write them.

use parse_size::Config;

/// Reads `512M`, `4G`, `1.5GiB`, `1048576`: units of 1024, whether or not the i is written.
pub fn parse(text: &str) -> Result<u64, String> {
    let config = Config::new().with_binary();
    match config.parse_size(text.trim()) {
        Ok(bytes) => Ok(bytes),
        Err(error) => {
            Err(format!("'{text}' is not a size ({error}); write for example 512M or 2G"))
        }
    }
}

/// Writes a size with three digits or so.
pub fn show(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    match unit {
        0 => format!("{bytes} B"),
        _ if value < 10.0 => format!("{value:.2} {}", UNITS[unit]),
        _ if value < 100.0 => format!("{value:.1} {}", UNITS[unit]),
        _ => format!("{value:.0} {}", UNITS[unit]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_binary() {
        for (text, bytes) in
            [("1K", 1024), ("512M", 512 << 20), ("4G", 4 << 30), ("2GiB", 2 << 30), ("77", 77)]
        {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn what_is_no_size_says_so() {
        for text in ["10Q", "", "-5M", "M", "1..2G"] {
            assert!(parse(text).unwrap_err().contains("512M"), "{text}");
        }
    }

    #[test]
    fn sizes_are_shown_short() {
        assert_eq!(show(0), "0 B");
        assert_eq!(show(1536), "1.50 KiB");
        assert_eq!(show(186 << 20), "186 MiB");
        assert_eq!(show(5 << 40), "5.00 TiB");
    }
}
