//! `uzswap serve`: a compressed swap device for the whole machine, until SIGTERM.

use crate::cli::{CONFIGURATION, ServeArguments};
use crate::commands::reload::{self, Reload};
use crate::device::folder::{self, Lock};
use crate::device::keeper::{self, Keeper};
use crate::device::{options, requirements};
use crate::error::Failure;
use crate::show::exporter::Exporter;
use crate::stdio::{say, show};
use sd_notify::NotifyState;
use uzswap_sys::cpu;

/// Serves until SIGTERM.
pub fn serve(arguments: &ServeArguments) -> Result<(), Failure> {
    let said = std::env::args_os().skip_while(|word| word != "serve").skip(1).collect();
    let (reload, configuration) = Reload::new(arguments, said)?;
    let arguments = reload.arguments();
    let size = arguments.size.ok_or_else(|| {
        Failure::new(format!("no size; give --size, or write size = \"ram\" in {CONFIGURATION}"))
    })?;
    let machine = cpu::memory_info().map_err(|e| Failure::new(format!("/proc/meminfo: {e}")))?;
    requirements::require()?;
    let mut options = options::daemon_options(&arguments.cache, 0, size, machine)?;
    // All users' pages come here. Identical ones are kept once only where same_pages_enabled is
    // set.
    options.keeps_same_once = false;
    // A mistake in the address must fail here, before anything is made that would be left behind.
    let mut exporter = arguments.cache.metrics.as_ref().map(Exporter::start).transpose()?;
    let lock = Lock::take().map_err(|error| Failure::new(keeper::cannot_lock(&error)))?;
    let lock = lock.ok_or_else(|| {
        Failure::new("a cache is running already, see `uzswap status`; end it first")
    })?;
    let mut keeper = Keeper::begin(lock, options, true)?;
    exporter.iter().for_each(Exporter::announce);
    reload::apply(&configuration);
    reload.start()?;
    keeper.remarks().for_each(|line| say!("uzswap: {line}"));
    if keeper.has_switched_zswap_off() {
        say!("uzswap: the kernel's zswap is switched off while serve runs");
    }
    let (device, folder) = (keeper.devices().join(", "), folder::mount());
    // An error means that systemd does not run, or does not wait for this message.
    let _ =
        sd_notify::notify(&[NotifyState::Status(&format!("serving {device}")), NotifyState::Ready]);
    show!("serving {device}, controlled by {}; SIGTERM ends it", folder.display());
    keeper.keep(|| exporter.iter_mut().for_each(Exporter::tend));
    for trouble in keeper.troubles() {
        say!("uzswap: cleaning up: {trouble}");
    }
    if keeper.is_lost() {
        return Err(Failure::new(
            "the daemon died; the swapped pages are lost, and processes that need one will get \
             SIGBUS",
        ));
    }
    Ok(())
}
