//! The groups in which the command and the daemon run, each in its own.
//!
//! | memory controller | group |
//! |---|---|
//! | version 2, systemd | a scope that systemd makes, in the caller's slice, delegated to us |
//! | version 2, no systemd | in the caller's own group; its processes make room |
//! | version 1 | in the caller's own group |
//!
//! So the caller's limits apply to the command. The daemon has a group at the top, because it must
//! not wait for memory of a group that it serves.

use crate::device::group_change::GroupChange;
use crate::device::systemd;
use crate::error::Failure;
use std::io;
use std::path::PathBuf;
use uzswap_sys::cgroup::{Group, Hierarchy, Version};
use uzswap_sys::process;

/// In a scope, the group that holds the command: systemd owns the scope's own attributes.
const COMMAND: &str = "command";

/// The child group to which a group's processes move, so that the group may have a further child.
const REST: &str = "uzswap-rest";

/// The group of the daemon and the keeper.
const DAEMON: &str = "uzswap-daemon";

/// The hierarchy with the memory controller.
pub fn hierarchy() -> Result<Hierarchy, Failure> {
    Hierarchy::find().ok_or_else(|| {
        Failure::new(
            "no memory cgroup is mounted, so nothing can be limited; boot with the memory \
             controller (cgroup_enable=memory), or mount it",
        )
    })
}

/// Makes a group for run `pid`, and moves the waiting process `child` into it.
pub fn for_command(pid: u32, child: i32) -> Result<GroupChange, Failure> {
    let hierarchy = hierarchy()?;
    let name = format!("uzswap-{pid}");
    if hierarchy.version == Version::V2 && systemd::is_here() {
        return scope(&hierarchy, &format!("{name}.scope"), child);
    }
    let own = hierarchy.own();
    let place = match own.make_child(&name) {
        Ok(group) => place(&group),
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) => make_room(&own, &name)?,
        Err(error) => return Err(cannot_make(&own, &error)),
    };
    match place.group().enter(child) {
        Ok(()) => Ok(place),
        Err(error) => {
            // After an error the empty group stays.
            let _ = place.remove();
            Err(cannot_make(&own, &error))
        }
    }
}

fn place(group: &Group) -> GroupChange {
    let is_v2 = group.version() == Version::V2;
    GroupChange { folder: group.path().to_owned(), is_v2, ..GroupChange::default() }
}

fn cannot_make(parent: &Group, error: &io::Error) -> Failure {
    let path = parent.path().display();
    Failure::new(format!(
        "cannot make a memory cgroup in {path}: {error}; it needs root, and a hierarchy that may be \
         written (in a container: --privileged, or -v /sys/fs/cgroup:/sys/fs/cgroup:rw)"
    ))
}

/// A scope around a group for the command.
fn scope(hierarchy: &Hierarchy, unit: &str, child: i32) -> Result<GroupChange, Failure> {
    let slice = slice_of(&hierarchy.own());
    systemd::start_scope(unit, slice.as_deref(), child, &format!("uzswap run, process {child}"))?;
    let scope = hierarchy.of_process(child);
    let scope = scope.filter(|group| group.path().ends_with(unit)).ok_or_else(|| {
        Failure::new(format!("systemd made {unit} and did not move the command there"))
    })?;
    let make = || {
        let group = scope.make_plain_child(COMMAND)?;
        group.enter(child)?;
        // The kernel permits this now that the scope itself is empty.
        scope.pass_memory_on()?;
        Ok(group)
    };
    let group = make().map_err(|error: io::Error| cannot_make(&scope, &error))?;
    Ok(GroupChange { around: Some(scope.path().to_owned()), ..place(&group) })
}

fn slice_of(group: &Group) -> Option<String> {
    let mut names = group.path().iter().filter_map(|name| name.to_str());
    names.rfind(|name| name.ends_with(".slice")).map(str::to_owned)
}

/// Makes a child group of a group that has processes. Where the kernel forbids that, this first
/// moves the processes into another child group.
fn make_room(own: &Group, name: &str) -> Result<GroupChange, Failure> {
    let cannot = |error| cannot_make(own, &error);
    let rest = match own.make_plain_child(REST) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => own.child(REST),
        other => other.map_err(cannot)?,
    };
    let processes = Group::at(own.version(), own.path().to_owned()).direct_processes();
    for pid in processes {
        // An error means that the process has just ended, or is a kernel thread.
        let _ = rest.enter(pid);
    }
    let moved = Some((rest.path().to_owned(), own.path().to_owned()));
    match own.make_child(name) {
        Ok(group) => Ok(GroupChange { moved, ..place(&group) }),
        Err(error) => {
            let folder = own.path().join(name);
            let back = GroupChange { folder, is_v2: true, moved, ..GroupChange::default() };
            // After an error the processes stay there, which does no harm.
            let _ = back.remove();
            Err(cannot(error))
        }
    }
}

/// Moves this process to a group of its own, without the caller's limits. The daemon that it will
/// start inherits the group, so the daemon does not end with the caller's group. Returns the group,
/// if one was made.
pub fn for_daemon() -> Result<Option<GroupChange>, Failure> {
    let pid = std::process::id() as i32;
    // An error: CAP_SYS_RESOURCE is missing, which the daemon reports.
    let _ = process::spare_from_oom();
    let Some(hierarchy) = Hierarchy::find() else { return Ok(None) };
    if hierarchy.version == Version::V2 && systemd::is_here() {
        if systemd::is_own_service(&hierarchy.own()) {
            return Ok(None);
        }
        systemd::start_daemon_scope(pid)?;
        return Ok(None);
    }
    let top = hierarchy.top();
    let made = match top.make_plain_child(DAEMON) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(top.child(DAEMON)),
        other => other,
    };
    let entered = made.and_then(|group| group.enter(pid).map(|()| group));
    let group = entered.map_err(|error| {
        let path = PathBuf::from(top.path()).join(DAEMON);
        Failure::new(format!("the daemon stays in the caller's group: {}: {error}", path.display()))
    })?;
    Ok(Some(place(&group)))
}
