"""Counts pages and faults of a disk of ours behind the kernel's zram, in the lab.

docs/design/zram-front.md describes the method and has the results. Usage: zram_front.py PROGRAM
COMPRESSOR AGE MIB..., where AGE is the age in seconds at which a page is written back, and each
MIB is a limit of resident memory. It writes front.jsonl and cold.pages into /out.

A program runs in a memory cgroup, with zram as the only swap. At each limit it works twice. The
first time zram writes nothing back. The ages of zram's pages, sampled by block_state, tell which
faults and which bytes the disk would have for any age. The fault that reads a slot frees it, so a
page's age is the time since it left. The second time zram writes pages of AGE back, and counts its
reads of them. This tests the first result, and the disk gets contents of cold pages.
"""

import json
import pathlib
import subprocess
import sys
import threading
import time

import zram_front_programs

ZRAM = pathlib.Path("/sys/block/zram0")
STATE = pathlib.Path("/sys/kernel/debug/zram/zram0/block_state")
GROUP = pathlib.Path("/sys/fs/cgroup/front")
COLD, OUT = pathlib.Path("/var/tmp/cold"), pathlib.Path("/out")
DISK_BYTES = 384 << 20
SAMPLE_SECONDS = 4
AGES = [8, 16, 32, 64, 128, 256]
# struct zram_table_entry with a time, and zsmalloc's handle.
ZRAM_METADATA_BYTES = 24 + 8
PAGE = 4096


def shell(command):
    return subprocess.run(command, shell=True, check=True, capture_output=True, text=True).stdout


def counters():
    """Pages swapped in and out, and the disk's reads and writes."""
    lines = dict(line.split() for line in open("/proc/vmstat"))
    disk = (ZRAM / "bd_stat").read_text().split()
    return [int(lines["pswpin"]), int(lines["pswpout"]), int(disk[1]), int(disk[2])]


def slots():
    """The times at which pages came to zram, by slot, without pages of one repeated word."""
    text = b""
    with open(STATE, "rb", buffering=0) as state:
        # The kernel returns 0 for a buffer that is too short for a line, as at the end.
        while part := state.read(1 << 20):
            text += part
    lines = (line.split() for line in text.splitlines())
    return {number: float(time) for number, time, flags in lines if b"s" not in flags}


class Zram:
    """The swap device, backed by a file."""

    def __init__(self, compressor):
        with open(COLD, "wb") as file:
            file.truncate(DISK_BYTES)
        self.loop = shell(f"losetup --find --show {COLD}").strip()
        (ZRAM / "backing_dev").write_text(self.loop)
        (ZRAM / "comp_algorithm").write_text(compressor)
        (ZRAM / "disksize").write_text(str(DISK_BYTES))
        shell("mkswap /dev/zram0 && swapon /dev/zram0")

    def remove(self):
        (GROUP / "memory.max").write_text("max")
        shell("swapoff /dev/zram0")
        (ZRAM / "reset").write_text("1")
        shell(f"losetup --detach {self.loop}")


class Sampler(threading.Thread):
    """Samples zram's pages. With an age, writes cold pages back."""

    def __init__(self, age):
        super().__init__()
        self.age = age
        self.ended = threading.Event()
        self.states, self.sizes = [], []
        self.begin = counters()

    def run(self):
        while not self.ended.wait(SAMPLE_SECONDS):
            if self.age is not None:
                (ZRAM / "idle").write_text(str(self.age))
                (ZRAM / "writeback").write_text("idle")
            self.sample()

    def sample(self):
        memory = [int(word) for word in (ZRAM / "mm_stat").read_text().split()]
        disk = int((ZRAM / "bd_stat").read_text().split()[0])
        self.sizes.append((memory[0] // PAGE, memory[5], memory[2], memory[1], disk))
        if self.age is None:
            self.states.append((time.clock_gettime(time.CLOCK_BOOTTIME), slots()))

    def end(self):
        self.ended.set()
        self.join()
        self.sample()
        return [after - before for before, after in zip(self.begin, counters())]

    def cold(self, age):
        """The mean share of pages that are older than `age`."""
        shares = [sum(now - at > age for at in state.values()) / len(state)
                  for now, state in self.states if state]
        return sum(shares) / max(len(shares), 1)

    def freed(self, age):
        """Number of slots with older pages that were freed between two samples."""
        count = 0
        for (_, before), (now, after) in zip(self.states, self.states[1:]):
            middle = now - SAMPLE_SECONDS / 2
            count += sum(middle - at > age for number, at in before.items()
                         if after.get(number) != at)
        return count

    def mean(self, index):
        return sum(sizes[index] for sizes in self.sizes) / len(self.sizes)


def measure(program, age):
    """Lets the program work. Returns the figures of this turn."""
    sampler = Sampler(age)
    began = time.time()
    sampler.start()
    program.work()
    ins, outs, reads, writes = sampler.end()
    pages, same, total, objects, disk = (sampler.mean(index) for index in range(5))
    figures = {
        "seconds": round(time.time() - began),
        "faults": ins,
        "outs": outs,
        "pages": round(pages),
        "same": round(same),
        "zram_bytes": round(total + pages * ZRAM_METADATA_BYTES),
        "object_bytes": round(objects),
        "pages_max": max(sizes[0] for sizes in sampler.sizes),
    }
    if age is None:
        figures["cold"] = {age: round(sampler.cold(age), 4) for age in AGES}
        figures["freed"] = {age: sampler.freed(age) for age in AGES}
    else:
        # The blocks that were ever used. zram does not inform its disk that a block is free again.
        used = COLD.stat().st_blocks * 512 // PAGE
        figures |= {"age": age, "disk_reads": reads, "disk_writes": writes}
        figures |= {"disk_pages": round(disk), "disk_pages_max": used}
    return figures


def limit(mebibytes):
    """Lowers the limit in steps, so that reclaim keeps up."""
    current = int((GROUP / "memory.current").read_text()) >> 20
    for step in range(max(current, mebibytes + 1), mebibytes, -4):
        (GROUP / "memory.max").write_text(f"{step}M")
    (GROUP / "memory.max").write_text(f"{mebibytes}M")


def keep_cold():
    """Copies the written pages of the disk, and measures their mean size in zram."""
    pages = OUT / "cold.pages"
    count, sizes = 0, {}
    with open(COLD, "rb") as disk, open(pages, "wb") as kept:
        # Blocks that were never written are holes.
        while page := disk.read(PAGE):
            if page != bytes(PAGE):
                kept.write(page)
                count += 1
    for name in ("lz4", "zstd"):
        (ZRAM / "comp_algorithm").write_text(name)
        (ZRAM / "disksize").write_text(str(DISK_BYTES))
        shell(f"dd if={pages} of=/dev/zram0 bs=1M conv=fsync")
        total = int((ZRAM / "mm_stat").read_text().split()[2])
        (ZRAM / "reset").write_text("1")
        sizes[name] = round(total / max(count, 1) + ZRAM_METADATA_BYTES)
    return {"cold_pages": count, "zram_bytes_a_page": sizes}


def main():
    name, compressor, age, *limits = sys.argv[1:]
    shell("mount -t debugfs debugfs /sys/kernel/debug || true")
    pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled").write_text("never")
    pathlib.Path("/proc/sys/vm/page-cluster").write_text("0")
    pathlib.Path("/sys/fs/cgroup/cgroup.subtree_control").write_text("+memory")
    GROUP.mkdir()
    program = zram_front_programs.start(name, GROUP)
    print("resident", int((GROUP / "memory.current").read_text()) >> 20, "MiB", flush=True)
    log = open(OUT / "front.jsonl", "w")
    for mebibytes in map(int, limits):
        zram = Zram(compressor)
        limit(mebibytes)
        program.work()
        for turn in (None, int(age)):
            figures = {"program": name, "compressor": compressor, "mib": mebibytes}
            print(json.dumps(figures | measure(program, turn)), file=log, flush=True)
        zram.remove()
    program.end()
    print(json.dumps(keep_cold()), file=log, flush=True)


main()
