//! The content of each control file, and the change that a write makes.

use super::{
    ALL, CPUS, FAILURE, FAULT_TIMES, Inode, MEMORY, MEMORY_FAILURE, REMOTE_TIMES, SECTIONS, TABLE,
    WRITEBACK, runs, show_states, statistics,
};
use crate::room::Room;
use crate::swapped::Swapped;
use crate::traffic::Traffic;
use fuser::{Errno, FileAttr, FileType, INodeNo};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::UNIX_EPOCH;
use uzswap_engine::times::bound_ns;
use uzswap_engine::{Cache, CpuError, PAGE_BYTES, SectionError, SectionState};

/// A figure that is not from the engine.
pub struct Figure {
    pub name: &'static str,
    pub doc: &'static str,
    value: fn(&Files) -> u64,
}

pub const FIGURES: [Figure; 12] = [
    Figure {
        name: "pages_swapped_in",
        doc: "Pages that the kernel read from the device.",
        value: |files| files.traffic.pages_read(),
    },
    Figure {
        name: "pages_swapped_out",
        doc: "Pages that the kernel wrote to the device.",
        value: |files| files.traffic.pages_written(),
    },
    Figure {
        name: "pages_discarded",
        doc: "Pages that the kernel discarded, in clusters of 2 MiB that it no longer uses.",
        value: |files| files.traffic.pages_discarded(),
    },
    Figure {
        name: "request_errors",
        doc: "Requests answered with an error.",
        value: |files| files.traffic.errors(),
    },
    Figure {
        name: "fault_ns_p50",
        doc: "Half of all reads were served in this time, ns, from taking the request to the answer.",
        value: |files| files.traffic.read_ns(0.5).unwrap_or(0),
    },
    Figure {
        name: "fault_ns_p90",
        doc: "90 % of all reads were served in this time, ns.",
        value: |files| files.traffic.read_ns(0.9).unwrap_or(0),
    },
    Figure {
        name: "fault_ns_p99",
        doc: "99 % of all reads were served in this time, ns.",
        value: |files| files.traffic.read_ns(0.99).unwrap_or(0),
    },
    Figure {
        name: "fault_ns_p999",
        doc: "99.9 % of all reads were served in this time, ns.",
        value: |files| files.traffic.read_ns(0.999).unwrap_or(0),
    },
    Figure {
        name: "swap_area_size",
        doc: "Bytes of swap space that the kernel sees; it grows as more is swapped out.",
        value: |files| files.swapped.in_use().bytes,
    },
    Figure {
        name: "swap_used_size",
        doc: "Taken bytes of swap space: by pages that are swapped out, some of them in memory too, and by uzswap itself where pool and backing are full.",
        value: |files| files.swapped.in_use().used,
    },
    Figure {
        name: "dead_pages",
        doc: "Pages held although the kernel has freed their slots: the kernel says so when a whole cluster of 2 MiB is free, or when it uses the slot again.",
        value: Files::dead_pages,
    },
    Figure {
        name: "room_size",
        doc: "Bytes of any content that pool and backing could still take, without the part of both that fragmentation may take.",
        value: |files| Room::of(&files.cache, &files.traffic).bytes,
    },
];

/// Makes the content of a file anew for each read, and the change for a write.
pub struct Files {
    pub cache: Arc<Cache>,
    pub traffic: Arc<Traffic>,
    pub swapped: Arc<Swapped>,
    pub memory_failure: Mutex<String>,
}

impl Files {
    pub fn attributes(&self, node: Inode) -> FileAttr {
        let (kind, perm) = match node {
            _ if node.is_folder() => (FileType::Directory, 0o755),
            Inode::Parameter(_) => (FileType::RegularFile, 0o644),
            _ => (FileType::RegularFile, 0o444),
        };
        FileAttr {
            ino: INodeNo(node.inode()),
            size: 0,
            blocks: 0,
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind,
            perm,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        }
    }

    pub fn content(&self, node: Inode) -> Option<String> {
        let value = match node {
            Inode::Parameter(WRITEBACK) => {
                let stopped = self.cache.statistic("writeback_stopped") == Some(1);
                if stopped { "N" } else { "Y" }.to_owned()
            }
            Inode::Parameter(CPUS) => show_states(&self.cache.cpu_states()),
            Inode::Parameter(MEMORY) => {
                let states = self.cache.section_states();
                show_states(&states.iter().map(|state| state.name()).collect::<Vec<_>>())
            }
            Inode::Parameter(name) => self.cache.attribute(name)?,
            Inode::Statistic(TABLE) => return Some(self.table()),
            Inode::Statistic(ALL) => return Some(self.all()),
            Inode::Statistic(name @ (FAULT_TIMES | REMOTE_TIMES)) => {
                return Some(self.times(name, ""));
            }
            Inode::Statistic(SECTIONS) => return Some(self.sections()),
            Inode::Statistic(MEMORY_FAILURE) => self.memory_failure().clone(),
            Inode::Statistic(FAILURE) => self.cache.writeback_failure().unwrap_or_default(),
            Inode::Statistic(name) => self.statistic(name)?.to_string(),
            Inode::Root | Inode::Parameters | Inode::Statistics => return None,
        };
        Some(value + "\n")
    }

    fn statistic(&self, name: &str) -> Option<u64> {
        match FIGURES.iter().find(|figure| figure.name == name) {
            Some(figure) => Some((figure.value)(self)),
            None => self.cache.statistic(name),
        }
    }

    fn engine(&self, name: &str) -> u64 {
        self.cache.statistic(name).unwrap_or(0)
    }

    fn dead_pages(&self) -> u64 {
        let in_use = self.swapped.in_use();
        let alive = in_use.used / PAGE_BYTES as u64 + in_use.areas;
        self.engine("stored_pages").saturating_sub(alive)
    }

    fn all(&self) -> String {
        let value = |name| Some(format!("{name} {}\n", self.statistic(name)?));
        let times = [FAULT_TIMES, REMOTE_TIMES];
        let times = times.map(|name| self.times(name, &format!("{name} "))).concat();
        statistics().filter_map(|(name, _)| value(name)).collect::<String>() + &times
    }

    /// The lines of a file of times, each after `prefix`.
    fn times(&self, name: &str, prefix: &str) -> String {
        let times = match name {
            FAULT_TIMES => self.traffic.read_times(),
            _ => self.cache.remote_read_times(),
        };
        let Some(times) = times.map(|times| times.by_power()) else { return String::new() };
        let counts = times.counts.iter().enumerate();
        let lines: String =
            counts.map(|(place, count)| format!("{prefix}{} {count}\n", bound_ns(place))).collect();
        lines + &format!("{prefix}sum {}\n", times.sum_ns)
    }

    /// The size classes that have zspages.
    fn table(&self) -> String {
        let mut table = String::from("size frames objects zspages used allocated\n");
        for class in self.cache.class_stats().iter().filter(|class| class.zspages > 0) {
            table += &format!(
                "{} {} {} {} {} {}\n",
                class.size,
                class.frames_per_zspage,
                class.objects_per_zspage,
                class.zspages,
                class.used,
                class.allocated
            );
        }
        table
    }

    /// The pool's sections.
    fn sections(&self) -> String {
        let states = self.cache.section_states();
        let mut used = vec![0; states.len()];
        self.cache.sections().into_iter().for_each(|(number, bytes)| used[number] = bytes);
        let node = |(number, state): (usize, SectionState)| {
            let node = (state == SectionState::Online).then(|| self.cache.node_of_section(number));
            (state.name(), node)
        };
        let places = states.into_iter().enumerate().map(node);
        let rows: Vec<_> = places.zip(used).collect();
        let mut table = String::from("sections state node used\n");
        for (numbers, run) in runs(&rows, |(place, _), (next, _)| place == next) {
            let (state, node) = run[0].0;
            let node = node.map_or_else(|| "-".into(), |node| node.to_string());
            let used: usize = run.iter().map(|(_, used)| used).sum();
            table += &format!("{numbers} {state} {node} {used}\n");
        }
        table
    }

    fn memory_failure(&self) -> std::sync::MutexGuard<'_, String> {
        self.memory_failure.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn set(&self, name: &str, value: &str) -> Result<(), Errno> {
        let is_set = match name {
            CPUS => return self.set_cpu(value),
            MEMORY => return self.set_section(value),
            WRITEBACK => {
                let is_set = value == "Y" || value == "1";
                if is_set {
                    self.cache.resume_writeback();
                }
                is_set
            }
            _ => self.cache.set_attribute(name, value).is_ok(),
        };
        if is_set { Ok(()) } else { Err(Errno::EINVAL) }
    }

    fn set_cpu(&self, value: &str) -> Result<(), Errno> {
        let (cpu, state) = value.split_once(' ').ok_or(Errno::EINVAL)?;
        let cpu = cpu.parse().map_err(|_| Errno::EINVAL)?;
        self.cache.set_cpu(cpu, state.trim()).map_err(|error| match error {
            CpuError::NoCpu { .. } | CpuError::NoState { .. } => Errno::EINVAL,
            CpuError::Last { .. } => Errno::EBUSY,
            CpuError::Step { .. } => Errno::EIO,
        })
    }
}

impl Files {
    fn set_section(&self, value: &str) -> Result<(), Errno> {
        let (section, state) = value.split_once(' ').ok_or(Errno::EINVAL)?;
        let number = |text: &str| text.parse().map_err(|_| Errno::EINVAL);
        let set = match section.strip_prefix("node") {
            Some(node) => self.cache.set_node(number(node)?, state.trim()),
            None => self.cache.set_section(number(section)?, state.trim()),
        };
        *self.memory_failure() = set.as_ref().err().map(ToString::to_string).unwrap_or_default();
        set.map_err(|error| match error {
            SectionError::NoSection { .. }
            | SectionError::NoNode { .. }
            | SectionError::NoState(_) => Errno::EINVAL,
            SectionError::Standing { .. }
            | SectionError::Last { .. }
            | SectionError::LastNode { .. }
            | SectionError::Held { .. } => Errno::EBUSY,
            SectionError::NoRoom { .. } | SectionError::Memory { .. } => Errno::ENOMEM,
        })
    }
}
