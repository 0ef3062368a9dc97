//! The configuration of `serve`: refused values, the order of files, reloads.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use uzswap_sys::process;
use uzswap_tests::{Machine, Served, program, wait_for};

/// Configuration files in a folder of their own.
struct Files {
    folder: tempfile::TempDir,
}

impl Files {
    fn new(text: &str) -> Self {
        let files = Self { folder: tempfile::tempdir().unwrap() };
        fs::write(files.path(), text).unwrap();
        files
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("uzswap.conf")
    }

    fn drop_in(&self, name: &str, text: &str) -> PathBuf {
        let folder = self.folder.path().join("uzswap.conf.d");
        fs::create_dir_all(&folder).unwrap();
        let path = folder.join(name);
        fs::write(&path, text).unwrap();
        path
    }
}

fn config(what: &str, file: &Path) -> Output {
    Command::new(program("uzswap")).args(["config", what]).arg(file).output().unwrap()
}

/// Name and value of each setting, from the JSON output.
fn shown(file: &Path) -> Vec<(String, String)> {
    let mut command = Command::new(program("uzswap"));
    let output = command.args(["config", "show", "--json"]).arg(file).output().unwrap();
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let text = |value: &serde_json::Value| value.as_str().unwrap().to_owned();
    let all = json.as_array().unwrap();
    all.iter().map(|setting| (text(&setting["name"]), text(&setting["value"]))).collect()
}

/// The text, the wrong line, and the message about it.
const WRONG: [(&str, usize, &str); 23] = [
    ("size = 1G", 1, "write NAME = \"VALUE\""),
    ("size = \"1G\"\nsize = \"2G\"", 2, "duplicate key"),
    ("[size", 1, "write NAME = \"VALUE\""),
    ("# pool\n\npol = \"1G\"", 3, "no setting 'pol'; there are size, pool,"),
    ("config = \"/etc/other\"", 1, "no setting 'config'"),
    ("bare = true", 1, "no setting 'bare'"),
    ("size = \"12Q\"", 1, "for example 512M, 2G or 'ram / 2'"),
    ("size = \"ram / 0\"", 1, "'0' is no number above 0"),
    ("size = \"1K\"", 1, "give between 16.0 MiB and"),
    ("size = \"9000T\"", 1, "give between 16.0 MiB and"),
    ("size = 1.5", 1, "size is of type float; give a text in quotes"),
    ("size = [\"1G\"]", 1, "size is of type array; give a text in quotes"),
    ("size = \"1G\"\npool = \"1K\"", 2, "all of this machine's memory"),
    ("pool = \"ram * 2\"", 1, "all of this machine's memory"),
    ("compressor = \"zip\"", 1, "use one of"),
    ("compressor = \"zstd:99\"", 1, "levels are"),
    ("backing = \"/no/file:12Q\"", 1, "'12Q' is not a size"),
    ("transport = \"nbd\"", 1, "[possible values: auto, ublk, fuse]"),
    ("threads = 1", 1, "2..=256"),
    ("plain-backing = \"yes\"", 1, "plain-backing is true or false, without quotes"),
    ("[parameters]\nsame_pages = true", 2, "no parameter 'same_pages'; there are enabled,"),
    ("[parameters]\n\nmax_pool_percent = 101", 3, "a whole number from 1 to 100; change it"),
    ("[parameters]\nmax_pool_bytes = 4096", 2, "is set by pool, above [parameters]"),
];

#[test]
fn a_wrong_setting_is_named_by_file_and_line_and_serve_does_not_begin() {
    for (text, line, why) in WRONG {
        let files = Files::new(text);
        let check = config("check", &files.path());
        let said = String::from_utf8(check.stderr).unwrap();
        assert_eq!(check.status.code(), Some(125), "{text}: {said}");
        assert!(
            said.starts_with(&format!("uzswap: {}:{line}: ", files.path().display())),
            "{said}"
        );
        assert!(said.contains(why) && said.lines().count() == 1, "{text}: {said}");

        let mut serve = Command::new(program("uzswap"));
        let serve = serve.args(["serve", "--config"]).arg(files.path()).output().unwrap();
        assert_eq!(serve.status.code(), Some(125), "{text}");
        assert_eq!(String::from_utf8(serve.stderr).unwrap(), said, "{text}");
    }
}

#[test]
fn a_later_file_wins_but_an_earlier_one_is_checked() {
    let files = Files::new("size = \"1G\"\npool = \"100M\"\n[parameters]\nenabled = true\n");
    files.drop_in("20-pool.conf", "pool = \"300M\"\n");
    files.drop_in("10-pool.conf", "pool = \"200M\"\n");
    files.drop_in("30-pool.conf.saved", "pool = \"400M\"\n");
    assert_eq!(config("check", &files.path()).status.code(), Some(0));
    let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    let all = [pair("size", "1G"), pair("pool", "300M"), pair("enabled", "Y")];
    assert_eq!(shown(&files.path()), all);

    let wrong = files.drop_in("10-pool.conf", "pool = \"2Q\"\n");
    let said = String::from_utf8(config("check", &files.path()).stderr).unwrap();
    assert!(said.starts_with(&format!("uzswap: {}:1: ", wrong.display())), "{said}");
}

#[test]
fn an_imported_configuration_is_right() {
    let theirs = Files::new(
        "[zram0]\nzram-size = min(ram / 2, 4096)\nzram-resident-limit = 64\n\
         compression-algorithm = lzo-rle\noptions =\n",
    );
    let imported = config("import", &theirs.path());
    assert_eq!(imported.status.code(), Some(0), "{}", String::from_utf8_lossy(&imported.stderr));
    let text = String::from_utf8(imported.stdout).unwrap();
    assert!(text.contains("\n# options = : "), "{text}");
    let ours = Files::new(&text);
    assert_eq!(config("check", &ours.path()).status.code(), Some(0), "{text}");
    let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    let size = pair("size", "min(ram / 2, 4096M)");
    let all = [pair("compressor", "lzo"), pair("pool", "64M"), size];
    assert_eq!(shown(&ours.path()), all);
}

#[test]
fn the_configuration_of_the_package_is_right() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let file = root.join("packaging/uzswap.conf");
    let check = config("check", &file);
    assert_eq!(check.status.code(), Some(0), "{}", String::from_utf8_lossy(&check.stderr));
    // Each proposed line must be valid, too.
    let text = fs::read_to_string(file).unwrap();
    let is_proposed = |rest: &str| rest.starts_with(|c: char| c.is_ascii_lowercase() || c == '[');
    let line = |line: &str| match line.strip_prefix('#') {
        Some(rest) if is_proposed(rest) => format!("{rest}\n"),
        _ => format!("{line}\n"),
    };
    let files = Files::new(&text.lines().map(line).collect::<String>());
    let check = config("check", &files.path());
    assert_eq!(check.status.code(), Some(0), "{}", String::from_utf8_lossy(&check.stderr));
    assert_eq!(shown(&files.path()).len(), 9);
}

#[test]
fn a_reload_changes_the_settings_that_can_be_changed_and_a_mistake_changes_nothing() {
    let Some(_machine) = Machine::take() else { return };
    let text = "size = \"1G\"\npool = \"64M\"\ncompressor = \"lz4\"\nbacking = \"none\"\n\
                [parameters]\nrecompress_idle_seconds = 77\n";
    let files = Files::new(text);
    // The command line overrides the files.
    let path = files.path();
    let mut served = Served::start(&["--config", path.to_str().unwrap(), "--pool", "80M"]);
    let parameter = |name: &str| {
        let text = fs::read_to_string(format!("/run/uzswap/mnt/parameters/{name}")).unwrap();
        text.trim_end().to_owned()
    };
    let values = || {
        let names = ["compressor", "max_pool_bytes", "recompress_idle_seconds"];
        names.map(parameter).join(" ")
    };
    let first = format!("lz4 {} 77", 80 << 20);
    assert_eq!(values(), first);
    let reload = |text: &str, until: &str| {
        fs::write(files.path(), text).unwrap();
        process::kill(served.child.id() as i32, libc::SIGHUP).unwrap();
        assert!(wait_for(|| served.said().contains(until)), "{}", served.said());
    };

    let changed = text.replace("lz4", "zstd:3").replace("77", "78");
    reload(&changed.replace("78", "\"never\""), "nothing was changed\n");
    let line = format!("{}:6: ", files.path().display());
    assert!(served.said().contains(&line), "{}", served.said());
    assert_eq!(values(), first);

    reload(&changed.replace("1G", "2G"), "the configuration was read again\n");
    assert_eq!(values(), format!("zstd:3 {} 78", 80 << 20));
    let restart = "size has changed: it takes effect after a restart\n";
    assert!(served.said().contains(restart), "{}", served.said());

    served.terminate();
    assert_eq!(served.child.wait().unwrap().code(), Some(0), "{}", served.said());
}
