//! `uzswap serve`: a compressed swap device for the whole machine, until SIGTERM.

use crate::cli::ServeArguments;
use crate::doctor;
use crate::error::Failure;
use crate::leftovers;
use crate::options::{self, DaemonOptions};
use crate::session::{ProcessId, Session};
use crate::signals::{Event, Events};
use uzswap_sys::cpu;

/// Serves.
pub fn serve(arguments: &ServeArguments) -> Result<(), Failure> {
    let machine = cpu::memory_info().map_err(|e| Failure::new(format!("/proc/meminfo: {e}")))?;
    doctor::require()?;
    leftovers::clean_up_first();
    let mut session = Session::create()?;
    let folder = session.mount();
    let options = options::daemon_options(&arguments.cache, &folder, 0, arguments.size, machine);
    let outcome = options.and_then(|options| supervise(&mut session, &options));
    for trouble in session.end() {
        eprintln!("uzswap: cleaning up: {trouble}");
    }
    outcome
}

fn supervise(session: &mut Session, options: &DaemonOptions) -> Result<(), Failure> {
    let events = Events::new()?;
    session.start_daemon(options)?;
    if session.switch_zswap_off()? {
        eprintln!("uzswap: the kernel's zswap is switched off while this serves");
    }
    session.attach(options.pages)?;
    let daemon = session.daemon().and_then(|daemon| ProcessId::of(daemon.child.id()));
    if let Some(daemon) = daemon {
        events.watch_daemon(daemon);
    }
    let device = session.device().map(|path| path.display().to_string()).unwrap_or_default();
    let folder = session.mount();
    println!("serving {device}, controlled by {}; SIGTERM ends it", folder.display());
    loop {
        match events.receiver.recv() {
            // First read everything back, while the daemon serves; if that fails, go on serving.
            Ok(Event::Signal { .. }) => match session.switch_off() {
                Ok(()) => return Ok(()),
                Err(failure) => eprintln!("uzswap: {failure}"),
            },
            Ok(Event::DaemonEnded) => {
                return Err(Failure::new(
                    "the daemon died; what was swapped to it is lost, and processes that need it \
                     will get SIGBUS",
                ));
            }
            Ok(Event::CommandEnded(_)) => {}
            Err(_) => return Err(Failure::new("no signal can reach this process any more")),
        }
    }
}
