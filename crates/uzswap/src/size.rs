//! Sizes as people write them.

use parse_size::Config;
use uzswap_sys::cpu;

/// Reads `512M`, `4G`, `1.5GiB`, `1048576`; units are of 1024, with or without the i. Reads also
/// `ram`, the machine's memory, as in `ram / 2` or `ram * 1.5`, and `available`, the memory that is
/// free now. `min` and `max` take two of these, as in `min(ram / 2, 4G)`.
pub fn parse(text: &str) -> Result<u64, String> {
    let of_ram = || match cpu::memory_info() {
        Ok(memory) => Ok(memory.total),
        Err(error) => Err(format!("/proc/meminfo: {error}; give a size in bytes")),
    };
    let text = text.trim();
    if text == AVAILABLE {
        return available().map_err(|error| format!("{error}; give a size in bytes"));
    }
    for (name, pick) in [("min", u64::min as fn(u64, u64) -> u64), ("max", u64::max)] {
        let inner = text.strip_prefix(name).map(str::trim_start);
        let inner = inner.and_then(|rest| rest.strip_prefix('(')?.strip_suffix(')'));
        if let Some((first, second)) = inner.and_then(|inner| inner.split_once(',')) {
            return Ok(pick(term(first, &of_ram)?, term(second, &of_ram)?));
        }
    }
    term(text, &of_ram)
}

/// The word for the memory that a command may use now.
pub const AVAILABLE: &str = "available";

/// Bytes that a command may use: the machine's free memory, or the limit of the caller's control
/// group, less an eighth.
fn available() -> Result<u64, String> {
    let memory = cpu::memory_info().map_err(|error| format!("/proc/meminfo: {error}"))?;
    let limit = cpu::memory_of_caller().map_err(|error| format!("/proc/meminfo: {error}"))?;
    let bytes = memory.available.min(limit);
    Ok(bytes - bytes / 8)
}

/// A size, or a part or a multiple of the machine's memory.
fn term(text: &str, of_ram: &dyn Fn() -> Result<u64, String>) -> Result<u64, String> {
    let text = text.trim();
    let wrong = |why: String| {
        format!("'{text}' is not a size ({why}); write for example 512M, 2G or 'ram / 2'")
    };
    let Some(rest) = text.strip_prefix("ram").map(str::trim_start) else {
        let config = Config::new().with_binary();
        return config.parse_size(text).map_err(|error| wrong(error.to_string()));
    };
    let number = |text: &str| match text.trim().parse::<f64>() {
        Ok(number) if number.is_finite() && number > 0.0 => Ok(number),
        _ => Err(wrong(format!("'{}' is no number above 0", text.trim()))),
    };
    let factor = match (rest.strip_prefix('/'), rest.strip_prefix('*')) {
        (Some(divisor), _) => 1.0 / number(divisor)?,
        (_, Some(factor)) => number(factor)?,
        _ if rest.is_empty() => 1.0,
        _ => return Err(wrong("after ram comes / or *".into())),
    };
    // An f64 represents each whole number of bytes up to 8 PiB.
    Ok((of_ram()? as f64 * factor) as u64)
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
    fn sizes_can_be_parts_of_the_machine_s_memory() {
        let ram = cpu::memory_info().unwrap().total;
        assert_eq!(parse("ram"), Ok(ram));
        assert_eq!(parse("ram/2"), Ok(ram / 2));
        assert_eq!(parse(" ram * 1.5 "), Ok(ram + ram / 2));
        assert_eq!(parse("min(ram / 2, 1M)"), Ok(1 << 20));
        assert_eq!(parse("max (1M, ram)"), Ok(ram));
        assert!((1..ram).contains(&parse("available").unwrap()));
    }

    #[test]
    fn a_text_that_is_no_size_is_refused_with_an_example() {
        let wrong = ["10Q", "", "-5M", "M", "1..2G", "ram /", "ram / 0", "ram - 1G", "rams"];
        for text in wrong.into_iter().chain(["min(1M)", "min(1M, 2Q)", "ram * nan"]) {
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
