//! CPUs that come and go.
//!
//! An array has the states of a CPU. The states are started from the first to the last, and stopped
//! from the last to the first. Each CPU has the number of its states that are up. If a state cannot
//! be started or stopped, the CPU returns to its old number.
//!
//! ```text
//! offline → codecs → slots → buffer → … states of the front end … → online
//! ```
//!
//! Pages belong to no CPU, so a CPU that goes leaves no page behind, and its slots of the backing
//! become free. Threads may run on a CPU that is not up ([`crate::percpu`]), so no thread waits for
//! this.

use super::Cache;
use crate::error::CpuError;
use crate::scratch::{Scratch, UnitScratch};
use crate::sync::lock;
use std::io;
use uzswap_sys::cpu::{self, CpuSet};

/// The resources of a CPU in a state, and their fate when the CPU goes.
pub type StateDoc = [&'static str; 2];

type HotplugStep = Box<dyn Fn(&Cache, usize) -> io::Result<()> + Send + Sync>;

/// One state of a CPU, and how it starts and stops.
pub struct CpuState {
    name: &'static str,
    doc: StateDoc,
    startup: HotplugStep,
    teardown: HotplugStep,
}

impl CpuState {
    /// A state whose steps are called with the number of a CPU, one at a time. The steps may
    /// neither wait for a request nor change the state of a CPU.
    pub fn new(
        name: &'static str,
        doc: StateDoc,
        startup: impl Fn(&Cache, usize) -> io::Result<()> + Send + Sync + 'static,
        teardown: impl Fn(&Cache, usize) -> io::Result<()> + Send + Sync + 'static,
    ) -> Self {
        Self { name, doc, startup: Box::new(startup), teardown: Box::new(teardown) }
    }
}

/// The engine's states, in order: name and documentation.
pub fn cpu_states() -> Vec<(&'static str, StateDoc)> {
    states().iter().map(|state| (state.name, state.doc)).collect()
}

/// The names for no state up, and for all states up.
const OFFLINE: &str = "offline";
const ONLINE: &str = "online";

/// The engine's states, in order.
fn states() -> Vec<CpuState> {
    vec![
        CpuState::new(
            "codecs",
            [
                "contexts of all codecs, with the compressor and the dictionary in use, and buffers \
                 of a page",
                "They are freed, when the thread that has them is done with its page.",
            ],
            Cache::start_codecs,
            |cache, cpu| {
                cache.scratch.stop(cpu, |_| {});
                Ok(())
            },
        ),
        CpuState::new(
            "slots",
            [
                "slots of the backing, taken and given back 64 at a time, and memory for the next \
                 cluster",
                "Its slots are free, before anybody looks for one again.",
            ],
            |cache, cpu| {
                cache.slots.start_cpu(cpu);
                Ok(())
            },
            |cache, cpu| {
                cache.slots.stop_cpu(cpu);
                Ok(())
            },
        ),
        CpuState::new(
            "buffer",
            [
                "a buffer of 256 KiB for a store that writes a segment; the first 16 CPUs have \
                 one, and the others share these",
                "Its content is written first.",
            ],
            |cache, cpu| cache.writeback.start_cpu(cpu),
            |cache, cpu| {
                cache.writeback.stop_cpu(cpu);
                Ok(())
            },
        ),
    ]
}

/// The state of each CPU.
pub(crate) struct Cpus {
    states: Vec<CpuState>,
    /// For each possible CPU, the number of states that are up.
    reached: Box<[usize]>,
    /// The CPUs of the process at the last [`Cache::follow_cpus`].
    allowed: CpuSet,
    /// A step that fails, for tests: a CPU and a state.
    #[cfg(any(test, feature = "testing"))]
    fault: Option<(usize, &'static str)>,
}

impl Cpus {
    pub(crate) fn new() -> Self {
        Self {
            states: states(),
            reached: vec![0; cpu::possible()].into(),
            allowed: std::iter::empty().collect(),
            #[cfg(any(test, feature = "testing"))]
            fault: None,
        }
    }

    /// The number of states that are up when `name` is the last.
    fn level(&self, name: &str) -> Option<usize> {
        match name {
            OFFLINE => Some(0),
            ONLINE => Some(self.states.len()),
            _ => self.states.iter().position(|state| state.name == name).map(|at| at + 1),
        }
    }

    fn name(&self, level: usize) -> &'static str {
        match level {
            0 => OFFLINE,
            level if level == self.states.len() => ONLINE,
            level => self.states[level - 1].name,
        }
    }

    fn is_online(&self, cpu: usize) -> bool {
        self.reached[cpu] == self.states.len()
    }

    /// Brings a CPU to a level. After an error the CPU has its old level.
    fn set(&mut self, cache: &Cache, cpu: usize, level: usize) -> Result<(), CpuError> {
        let others = (0..self.reached.len()).filter(|other| *other != cpu);
        if level < self.states.len() && !others.into_iter().any(|other| self.is_online(other)) {
            return Err(CpuError::Last { cpu });
        }
        self.change(cache, cpu, level)
    }

    fn change(&mut self, cache: &Cache, cpu: usize, level: usize) -> Result<(), CpuError> {
        let before = self.reached[cpu];
        self.walk(cache, cpu, level).map_err(|(state, why)| {
            let back = self.walk(cache, cpu, before).err().map(|(state, _)| state);
            CpuError::Step { cpu, state, why, stays: back.map(|_| self.name(self.reached[cpu])) }
        })
    }

    /// Starts or stops one state at a time. The error is that of the state that failed.
    fn walk(
        &mut self,
        cache: &Cache,
        cpu: usize,
        level: usize,
    ) -> Result<(), (&'static str, io::Error)> {
        while self.reached[cpu] != level {
            let goes_up = self.reached[cpu] < level;
            let at = if goes_up { self.reached[cpu] } else { self.reached[cpu] - 1 };
            let CpuState { name, startup, teardown, .. } = &self.states[at];
            let step = if goes_up { startup } else { teardown };
            #[cfg(any(test, feature = "testing"))]
            if self.fault.take_if(|fault| *fault == (cpu, *name)).is_some() {
                return Err((name, io::Error::other("a fault was injected")));
            }
            step(cache, cpu).map_err(|why| (*name, why))?;
            self.reached[cpu] = if goes_up { at + 1 } else { at };
            let up = self.reached.iter().filter(|reached| **reached > 0).count();
            cache.reserve.fit(up.div_ceil(cache.pool.served_count()));
        }
        Ok(())
    }
}

impl Cache {
    /// Brings up the CPUs that the process may use.
    pub(crate) fn start_cpus(&self) -> io::Result<()> {
        let mut cpus = lock(&self.cpus);
        let allowed = CpuSet::of_caller();
        for cpu in (0..cpu::possible()).filter(|cpu| allowed.has(*cpu)) {
            let level = cpus.states.len();
            cpus.walk(self, cpu, level).map_err(|(_, why)| why)?;
        }
        cpus.allowed = allowed;
        Ok(())
    }

    /// Brings up the CPUs that the process may use now and could not at the last call. Takes down
    /// the CPUs that the process may no longer use, and leaves all others. After an error this
    /// continues with the other CPUs, and returns the first error. The next call tries again.
    /// `allowed` has all CPUs on which threads store and load.
    pub fn follow_cpus(&self, allowed: &CpuSet) -> Result<(), CpuError> {
        let mut cpus = lock(&self.cpus);
        let before = &cpus.allowed;
        let is_changed = |cpu: &usize| before.has(*cpu) != allowed.has(*cpu);
        let changed: Vec<usize> = (0..cpu::possible()).filter(is_changed).collect();
        // Brings CPUs up before it takes others down, because a CPU that leaves needs another that
        // stays.
        let mut outcome = Ok(());
        for (comes, level) in [(true, cpus.states.len()), (false, 0)] {
            for cpu in changed.iter().filter(|cpu| allowed.has(**cpu) == comes) {
                match cpus.set(self, *cpu, level) {
                    Ok(()) => cpus.allowed.set(*cpu, comes),
                    failed => outcome = outcome.and(failed),
                }
            }
        }
        outcome
    }

    /// Brings a CPU to a state: `offline`, `online`, or one between. The CPU stays in that state
    /// until the process may no longer use it, or may use it again.
    pub fn set_cpu(&self, cpu: usize, state: &str) -> Result<(), CpuError> {
        let mut cpus = lock(&self.cpus);
        if cpu >= cpus.reached.len() {
            return Err(CpuError::NoCpu { cpu, last: cpus.reached.len() - 1 });
        }
        let level = cpus.level(state).ok_or_else(|| CpuError::NoState {
            state: state.into(),
            states: Self::state_names(&cpus).join(", "),
        })?;
        cpus.set(self, cpu, level)
    }

    /// The last state that is up, for each possible CPU.
    pub fn cpu_states(&self) -> Vec<&'static str> {
        let cpus = lock(&self.cpus);
        cpus.reached.iter().map(|level| cpus.name(*level)).collect()
    }

    /// The names of all states, in order.
    pub fn cpu_state_names(&self) -> Vec<&'static str> {
        Self::state_names(&lock(&self.cpus))
    }

    fn state_names(cpus: &Cpus) -> Vec<&'static str> {
        let own = cpus.states.iter().map(|state| state.name);
        std::iter::once(OFFLINE).chain(own).chain([ONLINE]).collect()
    }

    /// Adds a state after all others, and starts it for the CPUs that are online. After an error
    /// the state is not added.
    pub fn add_cpu_state(&self, state: CpuState) -> Result<(), CpuError> {
        let mut cpus = lock(&self.cpus);
        let online: Vec<_> = (0..cpus.reached.len()).filter(|cpu| cpus.is_online(*cpu)).collect();
        cpus.states.push(state);
        let level = cpus.states.len();
        for (done, cpu) in online.iter().enumerate() {
            if let Err(error) = cpus.change(self, *cpu, level) {
                for cpu in &online[..done] {
                    // The caller gets the first error, not an error of this call.
                    let _ = cpus.change(self, *cpu, level - 1);
                }
                cpus.states.pop();
                return Err(error);
            }
        }
        Ok(())
    }

    /// Makes the next step of a CPU into or out of a state fail.
    #[cfg(any(test, feature = "testing"))]
    pub fn fail_cpu_step(&self, cpu: usize, state: &'static str) {
        lock(&self.cpus).fault = Some((cpu, state));
    }

    /// Makes contexts like those of other CPUs.
    fn start_codecs(&self, cpu: usize) -> io::Result<()> {
        // The lock keeps a thread from beginning a unit that the new contexts could not read.
        let held = self.recompression.lock();
        let has_units = self.scratch.iter().any(|scratch| scratch.has_unit());
        self.scratch.start(cpu, || {
            let mut made =
                Scratch::new(self.attributes.algorithm(), self.training.dictionaries().clone());
            if has_units {
                let unit = UnitScratch::new().ok_or(io::ErrorKind::OutOfMemory)?;
                made.provide_unit(&mut Some(unit));
            }
            Ok::<_, io::Error>(made)
        })?;
        drop(held);
        // For the dictionary, and for an algorithm that was set during the start.
        self.apply_attributes();
        Ok(())
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use crate::testing::Setup;
    use std::path::Path;

    #[test]
    fn everything_that_a_cpu_has_is_a_state_and_goes_with_it() {
        let (mut made, mut left) = (0, vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("src")]);
        while let Some(path) = left.pop() {
            if path.is_dir() {
                left.extend(std::fs::read_dir(path).unwrap().map(|file| file.unwrap().path()));
            } else {
                made += std::fs::read_to_string(path).unwrap().matches(": PerCpu::new(").count();
            }
        }
        // The search itself is one of the matches.
        assert_eq!(made - 1, states().len(), "state of CPUs outside of the array");
        let (cache, ..) = Setup { backing_bytes: 8 << 20, ..Setup::default() }.make();
        let counts =
            || [cache.scratch.count(), cache.slots.cpus_count(), cache.writeback.cpus_count()];
        let online = |cache: &Cache| cache.cpu_states().iter().filter(|s| **s == ONLINE).count();
        assert_eq!(counts(), [online(&cache); 3]);
        for cpu in (0..cpu::possible()).rev().take(online(&cache) - 1) {
            cache.set_cpu(cpu, OFFLINE).unwrap();
            assert_eq!(counts(), [online(&cache); 3]);
        }
        assert_eq!(counts(), [1; 3]);
    }
}
