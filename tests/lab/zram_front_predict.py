"""Predicts times and memory from the figures of zram_front.py: docs/design/zram-front.md.

Usage: zram_front_predict.py FIGURES BYTES: front.jsonl, and the bytes that a page of the program
takes in our pool with zstd.
"""

import json
import math
import sys

# Microseconds of a fault, from docs/benchmarks.md, "A fault": p50 in random order. The table has no
# zram with zstd: the difference of zstd:3 and lz4:1 is added ("Compressors": python, in).
ZRAM_US = {"lz4": 4.0, "zstd": 4.0 + 4.98 - 1.25}
OURS_US = 18.5
MIB = 1 << 20


class Alone:
    """Memory and time of zram alone: lines through its limits, over the logarithm of the time."""

    def __init__(self, lines, us):
        points = [(line["faults"] * us, line["mib"] + line["zram_bytes"] / MIB) for line in lines]
        self.points = sorted(points, reverse=True)

    def memory(self, time):
        """The memory with which zram takes this time. And True if zram would need less memory:
        it is faster even at the smallest limit."""
        if time >= self.points[0][0]:
            return self.points[0][1], time > self.points[0][0]
        for (slow, little), (fast, much) in zip(self.points, self.points[1:]):
            if fast <= time:
                share = math.log(slow / time) / math.log(slow / fast)
                return little + share * (much - little), False
        return self.points[-1][1], False


def splits(line, test):
    """For each age: the shares of zram's pages and of all faults that our disk would have."""
    for age, cold in line.get("cold", {}).items():
        yield f"{age} s", cold, min(line["freed"][age] / line["faults"], 1)
    if test:
        yield "counted", test["disk_pages"] / test["pages"], test["disk_reads"] / test["faults"]


def fronts(line, test, alone, size):
    """A row for each age: our disk behind zram, beside zram alone."""
    us = ZRAM_US[line["compressor"]]
    for age, cold, late in splits(line, test):
        mean = us * (1 - late) + OURS_US * late
        left = line["zram_bytes"] * (1 - cold)
        memory = line["mib"] + (left + line["pages"] * cold * size) / MIB
        equal, is_less = alone.memory(line["faults"] * mean)
        most, least = ("at most ", "at least ") if is_less else ("", "")
        yield (f"{age} | {100 * cold:.0f} | {100 * late:.0f} | {mean:.1f} | {memory:.1f} "
               f"| {most}{equal:.1f} | {least}{memory / equal:.2f}")


def bound(line, size):
    """Memory relative to zram's, if our disk had all pages and no fault took longer."""
    resident = line["mib"] * MIB
    return (resident + line["pages"] * size) / (resident + line["zram_bytes"])


def show(path, size):
    with open(path) as file:
        lines = [json.loads(line) for line in file]
    tests = {line["mib"]: line for line in lines if "disk_reads" in line}
    first = [line for line in lines if "mib" in line and "disk_reads" not in line]
    first.sort(key=lambda line: line["mib"])
    alone = Alone(first, ZRAM_US[first[0]["compressor"]])
    print(first[0]["program"], *(line for line in lines if "cold_pages" in line))
    print("| resident (MiB) | zram (MiB) | faults | age | pages ours (%) | faults ours (%) "
          "| mean fault (us) | memory (MiB) | zram alone, equal speed | ratio | bound |")
    print("|---" * 11 + "|")
    for line in first:
        for front in fronts(line, tests.get(line["mib"]), alone, float(size)):
            print(f"| {line['mib']} | {line['zram_bytes'] / MIB:.1f} | {line['faults']} | {front} "
                  f"| {bound(line, float(size)):.2f} |")


show(*sys.argv[1:])
