//! Folders and tools of `xtask dist`.

use crate::{Result, output};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The folders of one run.
pub struct Dist {
    pub root: PathBuf,
    pub target: PathBuf,
    /// The results.
    pub folder: PathBuf,
    /// Intermediate files.
    pub stage: PathBuf,
    pub is_quick: bool,
}

impl Dist {
    pub fn new(root: &Path, is_quick: bool) -> Result<Self> {
        let status = ["status", "--porcelain", "--untracked-files=no"];
        // A quick build is for tests and not published, so changes may be uncommitted.
        if !is_quick && !output(Command::new("git").current_dir(root).args(status))?.is_empty() {
            return Err(
                "there are changes that are not committed; commit them, so that others can \
                        get the sources of each published file"
                    .into(),
            );
        }
        let target = crate::target(root);
        let (folder, stage) = (target.join("dist"), target.join("dist/stage"));
        // An interrupted run begins again. The folder may not exist.
        let _ = fs::remove_dir_all(&stage);
        fs::create_dir_all(&stage)?;
        Ok(Self { root: root.to_owned(), target, folder, stage, is_quick })
    }

    /// A tool that makes wheels, installed in an environment of its own.
    pub fn python_tool(&self, name: &str) -> Result<Command> {
        let environment = self.target.join("maturin");
        if !environment.join("bin").join(name).exists() {
            succeed(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&environment))?;
            let pip = environment.join("bin/pip");
            let tools = ["install", "--quiet", "maturin>=1.9,<2", "wheel>=0.45,<1"];
            succeed(Command::new(pip).args(tools))?;
        }
        Ok(Command::new(environment.join("bin").join(name)))
    }

    /// Moves a file to the results, and replaces one of the same name.
    pub fn take(&self, from: &Path) -> Result<()> {
        let name = from.file_name().ok_or("a file without a name")?;
        Ok(fs::rename(from, self.folder.join(name))?)
    }
}

/// Runs a program, which reports its errors itself.
pub fn succeed(command: &mut Command) -> Result<()> {
    let status = command.status().map_err(|error| format!("{command:?}: {error}"))?;
    if !status.success() {
        return Err(format!("{command:?}: {status}").into());
    }
    Ok(())
}
