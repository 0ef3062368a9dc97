"""Programs for zram_front.py, each in a memory cgroup, with repeatable work."""

import glob
import random
import socket
import subprocess
import time

KEYS = 40_000
# Values of 1 KB like those of a shop, partly common and partly random.
LOAD = """
math.randomseed(tonumber(ARGV[2]))
local first = tonumber(ARGV[1])
for key = first, first + 999 do
  local parts = {string.format('{"id":"%08x%08x","lines":[', math.random(2^30), math.random(2^30))}
  for line = 1, 20 do
    local item = math.random(5000)
    parts[line + 1] = string.format('{"item":%d,"price":%d,"quantity":%d},',
                                    item, math.random(100000), item % 7)
  end
  redis.call('SET', string.format('key:%012d', key), string.sub(table.concat(parts), 1, 1000))
end
"""
# 95 of 100 requests go to the first fifth of the keys.
FIFTH = """
math.randomseed(tonumber(ARGV[1]))
local keys = tonumber(ARGV[2])
for _ = 1, 1000 do
  local key = math.random(0, (math.random(100) <= 95 and keys / 5 or keys) - 1)
  redis.call('GET', string.format('key:%012d', key))
end
"""
# The value of rank r is requested in proportion to 1/r. Neighbours in rank are far apart.
RANKS = """
math.randomseed(tonumber(ARGV[1]))
local keys = tonumber(ARGV[2])
for _ = 1, 1000 do
  local key = math.floor(keys ^ math.random()) * 7919 % keys
  redis.call('GET', string.format('key:%012d', key))
end
"""
REQUESTS = 200_000

WORKERS = 6
# Each request walks over syntax trees of a part of the standard library.
WORKER = """
import ast, gc, glob, random, sys
gc.disable()
own, all = int(sys.argv[1]), int(sys.argv[2])
trees = []
for path in sorted(glob.glob('/usr/lib/python3*/*.py'))[own::all]:
    try: trees.append(ast.parse(open(path, 'rb').read()))
    except (SyntaxError, ValueError): pass
noise = random.Random(own)
print('ready', flush=True)
for line in sys.stdin:
    for _ in range(int(line)):
        sum(1 for _ in ast.walk(noise.choice(trees)))
    print('done', flush=True)
"""
TURNS, WALKS = 18, 20

SOURCES = "/root/.cargo/registry/src/*/zstd-sys-*/zstd/lib"
FOLDERS = ["decompress", "common"]
JOBS = 4


def spawn(group, command, **options):
    """Starts a program in the group."""
    script = f"echo 0 > {group}/cgroup.procs && exec \"$@\""
    return subprocess.Popen(["sh", "-c", script, "sh", *command], **options)


class Redis:
    def __init__(self, group, script):
        path = "/tmp/redis.socket"
        command = ["redis-server", "--port", "0", "--save", "", "--unixsocket", path]
        self.process = spawn(group, command, stdout=subprocess.DEVNULL)
        self.socket = socket.socket(socket.AF_UNIX)
        while self.socket.connect_ex(path):
            time.sleep(0.2)
        self.answers = self.socket.makefile("rb")
        self.script, self.seed = script, 0
        for key in range(0, KEYS, 1000):
            self.ask("EVAL", LOAD, 0, key, key)

    def ask(self, *words):
        parts = [b"*%d\r\n" % len(words)]
        for word in words:
            word = str(word).encode()
            parts.append(b"$%d\r\n%s\r\n" % (len(word), word))
        self.socket.sendall(b"".join(parts))
        answer = self.answers.readline()
        if answer[:1] == b"-":
            raise RuntimeError(answer)

    def work(self):
        for _ in range(REQUESTS // 1000):
            self.seed += 1
            self.ask("EVAL", self.script, 0, self.seed, KEYS)

    def end(self):
        self.process.kill()
        self.process.wait()


class Workers:
    """Several programs, of which one is used at a time."""

    def __init__(self, group):
        command = ["/usr/bin/python3", "-c", WORKER]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.all = [spawn(group, [*command, str(own), str(WORKERS)], **pipes)
                    for own in range(WORKERS)]
        for worker in self.all:
            worker.stdout.readline()
        self.noise = random.Random(1)

    def work(self):
        for _ in range(TURNS):
            worker = self.noise.choice(self.all)
            worker.stdin.write(f"{WALKS}\n")
            worker.stdin.flush()
            if worker.stdout.readline() != "done\n":
                raise RuntimeError("a worker ended")

    def end(self):
        for worker in self.all:
            worker.kill()
            worker.wait()


class Build:
    """Several compilers, which build a C library at the same time."""

    def __init__(self, group):
        self.group = group
        root = glob.glob(SOURCES)[0]
        self.files = [file for folder in FOLDERS for file in glob.glob(f"{root}/{folder}/*.c")]

    def work(self):
        command = ["xargs", "-P", str(JOBS), "-n", "1", "gcc", "-O0", "-g", "-c", "-o", "/dev/null"]
        xargs = spawn(self.group, command, stdin=subprocess.PIPE, text=True)
        xargs.communicate("\n".join(sorted(self.files)))
        if xargs.returncode:
            raise RuntimeError("the build failed")

    def end(self):
        pass


def start(name, group):
    """The program of this name, with its data loaded and without a memory limit."""
    kinds = {
        "redis": lambda: Redis(group, FIFTH),
        "redis-ranks": lambda: Redis(group, RANKS),
        "workers": lambda: Workers(group),
        "build": lambda: Build(group),
    }
    return kinds[name]()
