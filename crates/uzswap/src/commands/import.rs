//! `uzswap config import`: the settings of zram-generator, as those of `serve`.
//!
//! Each setting is translated, or stands in the output as a comment with the reason why not. So no
//! setting is dropped silently.

use crate::error::Failure;
use crate::size;
use crate::stdio::show;
use std::fs;
use std::path::Path;

/// The file of zram-generator.
pub const ZRAM_GENERATOR: &str = "/etc/systemd/zram-generator.conf";

/// Its default size, MiB.
const SIZE: &str = "min(ram / 2, 4096)";

/// A line of the file.
struct IniLine<'a> {
    number: usize,
    name: &'a str,
    value: &'a str,
}

/// The lines of a device.
struct IniSection<'a> {
    name: &'a str,
    lines: Vec<IniLine<'a>>,
}

/// Translates zram-generator's configuration to one of `serve`, and prints it.
pub fn import(file: Option<&Path>) -> Result<(), Failure> {
    let path = file.unwrap_or(Path::new(ZRAM_GENERATOR));
    let text = fs::read_to_string(path).map_err(|error| {
        Failure::new(format!("{}: {error}; see that it is there and may be read", path.display()))
    })?;
    let wrong = |(line, why)| Failure::new(format!("{}:{line}: {why}", path.display()));
    let settings = translate(&text).map_err(wrong)?;
    show!("# From {}. For /etc/uzswap/uzswap.conf.", path.display());
    show!("# Then switch zram off, and uzswap on:");
    show!("#   systemctl stop systemd-zram-setup@zram0.service && rm {}", path.display());
    show!("#   systemctl enable --now uzswap");
    settings.iter().for_each(|line| show!("{line}"));
    Ok(())
}

/// The lines of the new file. The error has the number of a line that is not understood, and the
/// reason.
fn translate(text: &str) -> Result<Vec<String>, (usize, String)> {
    let sections = sections(text)?;
    let is_swap = |section: &&IniSection| {
        let names = section.lines.iter().map(|line| line.name);
        section.name.starts_with("zram")
            && names.filter(|name| ["mount-point", "fs-type"].contains(name)).count() == 0
    };
    let Some(swap) = sections.iter().find(is_swap) else {
        return Err((1, "no swap device is in it; uzswap serve --size makes one".into()));
    };
    let mut settings = Vec::new();
    if !swap.lines.iter().any(|line| line.name == "zram-size") {
        settings.push(size_setting("size", SIZE));
    }
    for line in &swap.lines {
        settings.push(setting(line).map_err(|why| (line.number, why))?);
    }
    for IniSection { name, .. } in sections.iter().filter(|section| section.name != swap.name) {
        settings.push(format!("# [{name}]: uzswap is one swap device, and no file system"));
    }
    Ok(settings)
}

fn sections(text: &str) -> Result<Vec<IniSection<'_>>, (usize, String)> {
    let mut sections: Vec<IniSection> = Vec::new();
    for (index, line) in text.lines().map(str::trim).enumerate() {
        let number = index + 1;
        if line.is_empty() || line.starts_with(['#', ';']) {
            continue;
        }
        if let Some(name) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            sections.push(IniSection { name, lines: Vec::new() });
            continue;
        }
        let Some((name, value)) = line.split_once('=') else {
            return Err((number, "this is neither [DEVICE] nor NAME = VALUE; change it".into()));
        };
        let Some(section) = sections.last_mut() else {
            return Err((number, "no device is named above it; write [zram0]".into()));
        };
        let (name, value) = (name.trim(), value.trim());
        // A later line wins.
        section.lines.retain(|line| line.name != name);
        section.lines.push(IniLine { number, name, value });
    }
    Ok(sections)
}

/// The line of the new file for a setting.
fn setting(IniLine { name, value, .. }: &IniLine) -> Result<String, String> {
    let left_out = |why: &str| Ok(format!("# {name} = {value}: {why}"));
    let of_size = |to: &str| {
        let new = in_mib(value);
        size::parse(&new).map_err(|_| {
            format!(
                "{name} = {value} is none of ram / N, ram * N, a number of MiB, and min or max of \
                 two of these; write it in such a form"
            )
        })?;
        Ok(size_setting(to, value))
    };
    match *name {
        "zram-size" => of_size("size"),
        "zram-resident-limit" if *value == "0" => left_out("the pool's size follows the memory"),
        "zram-resident-limit" => of_size("pool"),
        "writeback-device" => Ok(format!("backing = {value:?}")),
        "compression-algorithm" => match compressor(value) {
            Some(compressor) => Ok(format!("compressor = {compressor:?}")),
            None => left_out("zstd, lz4, lzo and deflate are known; the default is zstd"),
        },
        "host-memory-limit" | "memory-limit" => {
            left_out("uzswap serves a machine of any size on which it is started")
        }
        "swap-priority" => left_out("uzswap's swap comes before all other"),
        "options" => left_out("uzswap needs no options of swapon"),
        _ => left_out("there is no such setting"),
    }
}

fn size_setting(name: &str, value: &str) -> String {
    format!("{name} = {:?}", in_mib(value))
}

/// A size of zram-generator in our form. Its numbers are MiB, except those behind `/` and `*`.
fn in_mib(text: &str) -> String {
    let mut new = String::new();
    let mut is_factor = false;
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
        if digits == 0 {
            new.push(first);
            is_factor = is_factor && first == ' ' || "/*".contains(first);
            rest = &rest[first.len_utf8()..];
            continue;
        }
        new += &rest[..digits];
        new += if is_factor { "" } else { "M" };
        rest = &rest[digits..];
    }
    new
}

/// Our compressor for the first algorithm of a list such as `zstd(level=3) lz4hc(type=idle)`. zram
/// uses the others to compress pages again.
fn compressor(list: &str) -> Option<String> {
    let first = list.split_whitespace().next()?;
    let (name, parameters) = first.split_once('(').unwrap_or((first, ""));
    let level = parameters.split([',', ')']).find_map(|one| one.strip_prefix("level="));
    Some(match (name, level) {
        ("zstd", Some(level)) => format!("zstd:{level}"),
        ("zstd" | "lz4" | "lzo" | "deflate", _) => name.to_owned(),
        ("lz4hc", _) => "lz4".into(),
        ("lzo-rle", _) => "lzo".into(),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_setting_is_translated_or_named() {
        let text = "# of the machine\n[zram0]\nhost-memory-limit = none\n\
                    zram-size = min(ram / 10, 2048)\nzram-resident-limit=ram/8\n\
                    compression-algorithm = zstd(level=5) lz4 (type=idle)\n\
                    writeback-device = /dev/sdb1\nswap-priority = 100\n\
                    [zram1]\nmount-point = /var/compressed\n";
        let settings = translate(text).unwrap();
        assert_eq!(
            settings.iter().filter(|line| !line.starts_with('#')).collect::<Vec<_>>(),
            [
                "size = \"min(ram / 10, 2048M)\"",
                "pool = \"ram/8\"",
                "compressor = \"zstd:5\"",
                "backing = \"/dev/sdb1\"",
            ]
        );
        let named = ["# host-memory-limit = none: ", "# swap-priority = 100: ", "# [zram1]: "];
        let is_there = |start: &str| settings.iter().any(|line| line.starts_with(start));
        assert!(named.into_iter().all(is_there), "{settings:?}");
    }

    #[test]
    fn a_device_without_settings_has_the_default_size() {
        assert_eq!(translate("[zram0]\n").unwrap(), ["size = \"min(ram / 2, 4096M)\""]);
        let again = translate("[zram0]\nzram-size = 100\nzram-size = ram * 0.5\n").unwrap();
        assert_eq!(again, ["size = \"ram * 0.5\""]);
    }

    #[test]
    fn sizes_are_those_that_zram_would_have() {
        let cases = [("4096", "4096M"), ("ram", "ram"), ("ram / 2", "ram / 2"), ("ram*2", "ram*2")];
        for (theirs, ours) in cases.into_iter().chain([("max(512, ram / 4)", "max(512M, ram / 4)")])
        {
            assert_eq!(in_mib(theirs), ours);
            assert!(size::parse(ours).is_ok());
        }
    }

    #[test]
    fn a_file_that_cannot_be_understood_is_named_by_line() {
        let wrong = [
            ("zram-size = 1\n", 1, "no device"),
            ("[zram0]\nzram-size\n", 2, "NAME = VALUE"),
            ("[zram0]\n\nzram-size = min(ram, 4096) + ram\n", 3, "is none of"),
            ("[zram0]\nfs-type = ext4\n", 1, "no swap device"),
        ];
        for (text, line, why) in wrong {
            let (number, said) = translate(text).unwrap_err();
            assert!(number == line && said.contains(why), "{text}: {number}: {said}");
        }
    }

    #[test]
    fn algorithms_of_the_kernel_have_ours() {
        for (theirs, ours) in [
            ("lzo-rle", "lzo"),
            ("lz4hc(level=9)", "lz4"),
            ("zstd", "zstd"),
            ("deflate", "deflate"),
        ] {
            assert_eq!(compressor(theirs).as_deref(), Some(ours));
        }
        assert_eq!(compressor("842"), None);
    }
}
