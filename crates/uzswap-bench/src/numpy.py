# Times numpy's functions on one array, and prints the times as JSON. Started by `uzswap-bench numpy`.
import argparse, hashlib, json, os, time
import numpy

parser = argparse.ArgumentParser()
parser.add_argument("--memory", choices=["plain", "memmap", "region"], required=True)
parser.add_argument("--data", choices=["prices", "counts"], required=True)
parser.add_argument("--count", type=int, required=True)
parser.add_argument("--gathers", type=int, required=True)
parser.add_argument("--budget", type=int)
parser.add_argument("--compressor")
parser.add_argument("--file")
parser.add_argument("--group")
given = parser.parse_args()

dtype = "f8" if given.data == "prices" else "i8"
if given.memory == "region":
    import uzswap

    backing = f"{given.file}:{given.count * 10}"
    pager = uzswap.Pager(given.budget, compressor=given.compressor, backing=backing)
    array = pager.empty(given.count, dtype)
elif given.memory == "memmap":
    array = numpy.memmap(given.file, dtype, "w+", shape=given.count)
else:
    array = numpy.empty(given.count, dtype)
if given.group:
    # The interpreter's own memory stays charged to its old group.
    with open(given.group, "w") as group:
        group.write("0")

CHUNK = 1 << 17
random = numpy.random.default_rng(1)
last = 0.0
for start in range(0, given.count, CHUNK):
    part = array[start : start + CHUNK]
    if given.data == "prices":
        walk = last + numpy.cumsum(random.standard_normal(part.size))
        last = walk[-1]
        part[:] = numpy.round(100 + walk, 2)
    else:
        part[:] = random.poisson(20, part.size)

found = hashlib.sha256()
seconds = {}


def timed(name, work):
    start = time.perf_counter()
    result = work()
    seconds[name] = time.perf_counter() - start
    found.update(numpy.asarray(result).tobytes())


def add():
    global array
    array += 1
    return array[:1000]


def sort():
    array.sort()
    return array[::1000]


places = random.integers(0, given.count, given.gathers)
timed("sum", lambda: array.sum())
timed("add", add)
timed("gather", lambda: array[places])
timed("sort", sort)
# All bytes in order, in chunks that take little memory.
for start in range(0, given.count, CHUNK):
    found.update(array[start : start + CHUNK].tobytes())
if given.file and os.path.exists(given.file):
    os.unlink(given.file)
print(json.dumps({"seconds": seconds, "digest": found.hexdigest()}))
