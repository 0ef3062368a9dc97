//! Pages to measure with: memory of real programs, recorded on the spot.

use crate::error::{Context, Failure};
use crate::peer::{FOLDER, uzswap};
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Parses the standard library, keeps the syntax trees, and waits.
const PYTHON: &str = "
import ast, pathlib, sys, sysconfig
kept = []
for path in sorted(pathlib.Path(sysconfig.get_paths()['stdlib']).glob('*.py')):
    try: kept.append(ast.parse(path.read_bytes()))
    except (SyntaxError, ValueError): pass
print('ready', flush=True)
sys.stdin.read()
";

/// The heap of a Python program, some 200 MiB of objects; made once.
pub fn python() -> Result<PathBuf, Failure> {
    let path = Path::new(FOLDER).join("python.pages");
    if path.exists() {
        return Ok(path);
    }
    fs::create_dir_all(FOLDER).context(FOLDER)?;
    let mut program = Command::new("python3")
        .args(["-c", PYTHON])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .context("python3, whose memory is the pages to measure with; install it")?;
    let mut line = String::new();
    let stdout = program.stdout.take().ok_or_else(|| Failure::new("no pipe from python3"))?;
    BufReader::new(stdout).read_line(&mut line).context("python3")?;
    let fresh = path.with_extension("new");
    let recorded = Command::new(uzswap()?)
        .args(["record", "--pid", &program.id().to_string(), "--out"])
        .arg(&fresh)
        .stderr(Stdio::null())
        .status()
        .context("uzswap record");
    drop(program.stdin.take());
    program.wait().context("python3")?;
    if !recorded?.success() {
        return Err(Failure::new("uzswap record failed"));
    }
    fs::rename(&fresh, &path).context("the recorded pages")?;
    Ok(path)
}
