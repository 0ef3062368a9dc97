//! Becoming another user, for `run --user`.

use crate::error::Failure;
use std::path::Path;
use std::process::Command;
use uzers::os::unix::UserExt;
use uzswap_sys::process;

/// True if there is such a user.
pub fn check(name: &str) -> Result<(), Failure> {
    find(name).map(drop)
}

fn find(name: &str) -> Result<uzers::User, Failure> {
    let user = uzers::get_user_by_name(name);
    user.ok_or_else(|| Failure::new(format!("--user {name}: no such user; see `getent passwd`")))
}

/// Gives the calling process the user's identity, and `command` the user's environment. The process
/// must have one thread.
pub fn become_user(name: &str, command: &mut Command) -> Result<(), Failure> {
    let user = find(name)?;
    let groups = uzers::get_user_groups(name, user.primary_group_id()).unwrap_or_default();
    let groups: Vec<u32> = groups.iter().map(uzers::Group::gid).collect();
    process::become_user(user.uid(), user.primary_group_id(), &groups)
        .map_err(|error| Failure::new(format!("--user {name}: {error}; it needs root")))?;
    command.env("USER", name).env("LOGNAME", name);
    command.env("HOME", user.home_dir()).env("SHELL", user.shell());
    Ok(())
}

/// The user who called sudo, if root has made a file in the current folder since then.
pub fn sudo_user_with_root_files(since: std::time::SystemTime) -> Option<String> {
    use std::os::unix::fs::MetadataExt;
    let user = std::env::var("SUDO_USER").ok().filter(|name| name != "root")?;
    let made_by_root = |path: &Path| {
        path.symlink_metadata().is_ok_and(|file| {
            let is_new = file.modified().is_ok_and(|time| time >= since);
            file.uid() == 0 && is_new && !file.is_dir()
        })
    };
    let mut entries = std::fs::read_dir(".").ok()?.flatten();
    entries.any(|entry| made_by_root(&entry.path())).then_some(user)
}
