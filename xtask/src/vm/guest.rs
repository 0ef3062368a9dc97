//! A guest from start to end.

use super::job::{Ended, Job, Reader};
use super::processor::Processor;
use super::{Image, Lab, Machine, Result, image, kernel};
use crate::output;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// Messages of a kernel about its own faults, or about failed requests.
const COMPLAINTS: [&str; 9] = [
    "BUG:",
    "WARNING:",
    "Oops",
    "Kernel panic",
    "blocked for more than",
    "possible recursive locking",
    "possible circular locking",
    "rcu: INFO:",
    "soft lockup",
];

/// No complaint without KVM. In 6.12 the deadline server of a queue with waiting programs warns
/// about its own timer when emulated CPUs stand still.
const TIMER: &str = "at kernel/sched/deadline.c";

/// A factor for the times of tests in emulation, where starting another keeper takes four seconds.
const SLOWNESS: u32 = 4;

/// The message of a kernel that met its own breakpoint after it had replaced it. QEMU's emulation
/// of several CPUs (7.2) runs the old code for a moment. Seen in two guests of eleven.
const STALE: &str = "Oops: int3";
const ATTEMPTS: u32 = 3;

/// The result of a guest.
pub struct GuestOutcome {
    pub tests: Vec<Ended>,
    /// Complaints in the kernel's log.
    pub complaints: Vec<String>,
    /// The release of the guest's kernel.
    pub release: String,
    /// The time that the guest took.
    pub time: Duration,
    /// True if the job was completed.
    is_done: bool,
    /// The folder of the guest's logs.
    folder: PathBuf,
}

impl GuestOutcome {
    /// True if the job was completed, without a failure or complaint.
    pub fn passed(&self) -> bool {
        self.is_done && self.complaints.is_empty() && self.tests.iter().all(|test| test.passed)
    }

    /// Trouble other than failed tests, if there was some.
    pub fn trouble(&self) -> Option<String> {
        match (self.is_done, self.complaints.first()) {
            (false, _) => Some("it did not come to its end".into()),
            (true, line) => line.map(|line| format!("its kernel complained: {line}")),
        }
    }

    /// The outcome in one line.
    pub fn summary(&self) -> String {
        let failed = self.tests.iter().filter(|test| !test.passed).count();
        let end = match (self.passed(), self.trouble()) {
            (true, _) => "all is well".into(),
            (false, None) => format!("logs in {}", self.folder.display()),
            (false, Some(trouble)) => format!("{trouble}; logs in {}", self.folder.display()),
        };
        let (tests, seconds) = (self.tests.len(), self.time.as_secs());
        format!(
            "{} of {tests} tests passed in {seconds} s on {}; {end}",
            tests - failed,
            self.release
        )
    }
}

/// Kills the emulator when dropped.
struct Emulator(Child);

impl Drop for Emulator {
    fn drop(&mut self) {
        // The call fails if the process has ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Boots a guest, runs a job in it, and waits for its end. Repeats the run if the emulator is at
/// fault.
pub fn boot(lab: &Lab, machine: &Machine, job: &Job) -> Result<GuestOutcome> {
    let has_kvm = machine.processor()?.has_kvm();
    for _ in 1..ATTEMPTS {
        let outcome = attempt(lab, machine, job)?;
        let is_emulators = |line: &String| line.contains(STALE);
        if has_kvm || !outcome.complaints.iter().any(is_emulators) {
            return Ok(outcome);
        }
        println!("vm: the emulator ran code that the kernel had replaced; once more");
    }
    attempt(lab, machine, job)
}

fn attempt(lab: &Lab, machine: &Machine, job: &Job) -> Result<GuestOutcome> {
    let kernel = kernel::get(lab, &machine.kernel)?;
    let folder = lab.folder.join("runs").join(std::process::id().to_string());
    fs::create_dir_all(&folder)?;
    let script = folder.join("job.sh");
    let mut environment = machine.environment.clone();
    let processor = machine.processor()?;
    if !processor.has_kvm() {
        environment.push(format!("UZSWAP_TEST_SLOWNESS={SLOWNESS}"));
    }
    if machine.hot_memory.is_some() {
        environment.push("UZSWAP_TEST_MONITOR=/dev/ttyS2".into());
    }
    fs::write(&script, job.script(&environment, processor.job_line()))?;
    let initramfs = folder.join("initramfs");
    image::write_initramfs(&initramfs, lab, machine, &kernel, &script)?;
    let mut command = emulator(lab, machine, processor, &folder)?;
    command.arg("-kernel").arg(&kernel.image).arg("-initrd").arg(&initramfs);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let (program, package) = processor.emulator();
    let began = Instant::now();
    let child = command.spawn();
    let mut emulator =
        Emulator(child.map_err(|error| format!("{program}: {error}; install {package}"))?);
    let output = emulator.0.stdout.take().ok_or("no output of the emulator")?;
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        for line in BufReader::new(output).split(b'\n').map_while(std::io::Result::ok) {
            let line = String::from_utf8_lossy(&line).trim_end_matches('\r').to_owned();
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    let reader = read(&receiver, began + machine.timeout(), &folder)?;
    drop(emulator);
    let complaints = complaints(&folder.join("console.log"), processor);
    let outcome = GuestOutcome {
        tests: reader.tests,
        complaints,
        release: reader.release.unwrap_or(kernel.release),
        time: began.elapsed(),
        is_done: reader.is_done,
        folder: folder.clone(),
    };
    // After an error the file stays, which is harmless.
    let _ = fs::remove_file(&initramfs);
    if outcome.passed() {
        let _ = fs::remove_dir_all(&folder);
    }
    Ok(outcome)
}

/// Reads the job's output to its end or the deadline. Keeps it in a file.
fn read(receiver: &Receiver<String>, deadline: Instant, folder: &Path) -> Result<Reader> {
    let mut reader = Reader::default();
    let mut log = fs::File::create(folder.join("job.log"))?;
    let shows = std::env::var_os("UZSWAP_LAB_VERBOSE").is_some();
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match receiver.recv_timeout(left) {
            Ok(line) => {
                writeln!(log, "{line}")?;
                if shows {
                    println!("| {line}");
                }
                reader.line(&line);
            }
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return Ok(reader),
        }
    }
}

fn emulator(lab: &Lab, machine: &Machine, processor: Processor, folder: &Path) -> Result<Command> {
    let mut command = Command::new(processor.emulator().0);
    let has_kvm = processor.has_kvm();
    command.args(["-accel", if has_kvm { "kvm" } else { "tcg,thread=multi" }]);
    command.args(processor.board());
    command.args(["-nodefaults", "-display", "none"]);
    // A panic reboots the guest, and with this option a reboot ends QEMU. Only a busybox guest
    // never reboots otherwise.
    if machine.image == Image::Busybox {
        command.arg("-no-reboot");
    }
    // Each socket must be in one node, or the kernel complains.
    command.arg("-smp").arg(format!("{},sockets={}", machine.cpus, machine.nodes.max(1)));
    memory(&mut command, machine)?;
    command.arg("-serial").arg(format!("file:{}", folder.join("console.log").display()));
    command.args(["-chardev", "stdio,id=job,signal=off"]).args(processor.job_device());
    if machine.hot_memory.is_some() {
        monitor(&mut command, folder)?;
    }
    command.args([
        "-virtfs",
        "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap",
    ]);
    if let Some(out) = &machine.out {
        let share = "mount_tag=out,security_model=none,multidevs=remap";
        let path = out.canonicalize().map_err(|error| format!("{}: {error}", out.display()))?;
        command.arg("-virtfs").arg(format!("local,path={},{share}", path.display()));
    }
    let space = image::space(lab)?;
    let limit = machine.slow_disk.map(|bytes| format!(",throttling.bps-total={bytes}"));
    disk(&mut command, image::SPACE_DISK, &space, &limit.unwrap_or_default());
    if let Some(suite) = machine.image.suite() {
        disk(&mut command, image::ROOT_DISK, &image::debian(lab, suite)?, "");
    }
    if machine.bad_disk {
        bad_disk(&mut command, folder)?;
    }
    // Plugged memory must be removable, so the kernel may put only movable pages into it.
    let console = processor.console();
    let append = "panic=-1 oops=panic sysctl.kernel.hung_task_timeout_secs=60 quiet loglevel=7 \
                  systemd.show_status=false memhp_default_state=online_movable";
    // Many emulated CPUs share few real ones, so a CPU that does not run for a minute is not hung.
    let patience = " watchdog_thresh=60 rcupdate.rcu_cpu_stall_timeout=300";
    let patience = if has_kvm || machine.cpus <= 4 { "" } else { patience };
    // Beside builds, an emulator stands still at times. A kernel then took its timer for a broken
    // one.
    let timer = if has_kvm || processor == Processor::Arm { "" } else { " no_timer_check" };
    command.arg("-append").arg(format!("console={console} {append}{patience}{timer}"));
    Ok(command)
}

fn memory(command: &mut Command, machine: &Machine) -> Result<()> {
    let mut size = machine.memory.clone();
    if let Some(hot) = &machine.hot_memory {
        let [now, more] = [&machine.memory, hot].map(|text| mebibytes(text));
        size += &format!(",slots=8,maxmem={}M", now? + more?);
    }
    command.args(["-m", &size]);
    let nodes = machine.nodes.max(1);
    if nodes > 1 {
        let (each, cpus) = (mebibytes(&machine.memory)? / u64::from(nodes), machine.cpus / nodes);
        for node in 0..nodes {
            let (first, last) = (node * cpus, node * cpus + cpus.max(1) - 1);
            command.arg("-object").arg(format!("memory-backend-ram,id=m{node},size={each}M"));
            let numa = format!("node,nodeid={node},cpus={first}-{last},memdev=m{node}");
            command.arg("-numa").arg(numa);
        }
    }
    Ok(())
}

/// Parses `1G`, `512M` or a number of MiB.
fn mebibytes(text: &str) -> Result<u64> {
    let (number, factor) = match text.strip_suffix('G') {
        Some(number) => (number, 1024),
        None => (text.strip_suffix('M').unwrap_or(text), 1),
    };
    let number: u64 =
        number.parse().map_err(|_| format!("'{text}' is no size; give 512M or 1G"))?;
    Ok(number * factor)
}

/// The guest's third serial line leads to the emulator's monitor, so that tests can plug memory in
/// and out. The monitor's answers go to a file, not back to the guest, whose line echoes its input.
fn monitor(command: &mut Command, folder: &Path) -> Result<()> {
    let [asks, monitor] = ["asks", "monitor"].map(|name| folder.join(name));
    let of = |end: &Path, way: &str| end.with_extension(way);
    // Files of an earlier run with the same number; they may not exist.
    for (end, way) in [(&asks, "in"), (&asks, "out"), (&monitor, "in")] {
        let _ = fs::remove_file(of(end, way));
    }
    output(Command::new("mkfifo").args([of(&asks, "in"), of(&asks, "out")]))?;
    std::os::unix::fs::symlink(of(&asks, "out"), of(&monitor, "in"))?;
    fs::write(of(&monitor, "out"), "")?;
    for end in [asks, monitor] {
        let name = end.file_name().unwrap_or_default().display();
        command.arg("-chardev").arg(format!("pipe,id={name},path={}", end.display()));
    }
    command.args(["-serial", "chardev:asks", "-mon", "chardev=monitor,mode=readline"]);
    Ok(())
}

/// Adds a disk that the guest may write to. Its file stays unchanged.
fn disk(command: &mut Command, serial: &str, path: &Path, options: &str) {
    let path = path.display();
    let drive = format!("file={path},format=raw,snapshot=on,if=none,id={serial}{options}");
    command.arg("-drive").arg(drive);
    let device = format!("virtio-blk-pci,drive={serial},serial={serial}");
    command.arg("-device").arg(device);
}

/// Adds a disk whose requests fail beyond its first MiB.
fn bad_disk(command: &mut Command, folder: &Path) -> Result<()> {
    let (file, rules) = (folder.join("bad.raw"), folder.join("bad.rules"));
    fs::File::create(&file)?.set_len(256 << 20)?;
    let rule = |event: &str| format!("[inject-error]\nevent = \"{event}\"\nerrno = \"5\"\n");
    fs::write(&rules, rule("write_aio") + &rule("read_aio"))?;
    let path = format!("blkdebug:{}:{}", rules.display(), file.display());
    command.arg("-drive").arg(format!("file={path},format=raw,if=none,id={}", image::BAD_DISK));
    let serial = image::BAD_DISK;
    command.arg("-device").arg(format!("virtio-blk-pci,drive={serial},serial={serial}"));
    Ok(())
}

/// The complaints in the kernel's log.
fn complaints(console: &Path, processor: Processor) -> Vec<String> {
    let log = fs::read(console).unwrap_or_default();
    let log = String::from_utf8_lossy(&log);
    let is_emulators = |line: &str| !processor.has_kvm() && line.contains(TIMER);
    let is_word = |line: &str| COMPLAINTS.iter().any(|word| line.contains(word));
    let is_one = |line: &&str| is_word(line) && !is_emulators(line);
    log.lines().filter(is_one).map(str::to_owned).collect()
}
