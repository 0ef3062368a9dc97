"""Fills a Redis, saves it from a fork while a sixth changes, and loads the saved data."""

import atexit
import hashlib
import os
import random
import socket
import subprocess
import time

KEYS = 40000


class Server:
    def __init__(self, name, *options):
        path = os.path.abspath(name)
        # The program is the Redis tool by whose name it is called.
        if not os.path.exists("redis-server"):
            os.symlink("/usr/bin/redis-check-rdb", "redis-server")
        command = ["./redis-server", "--port", "0", "--save", "", "--unixsocket", path]
        command += ["--enable-debug-command", "yes", "--logfile", name + ".log", *options]
        self.process = subprocess.Popen(command)
        atexit.register(self.process.kill)
        self.socket = socket.socket(socket.AF_UNIX)
        while True:
            try:
                self.socket.connect(path)
                break
            except OSError:
                assert self.process.poll() is None, open(name + ".log").read()
                time.sleep(0.02)
        self.answers = self.socket.makefile("rb")

    def send(self, *words):
        words = [word if isinstance(word, bytes) else str(word).encode() for word in words]
        parts = [b"*%d\r\n" % len(words)]
        parts += [b"$%d\r\n%s\r\n" % (len(word), word) for word in words]
        self.socket.sendall(b"".join(parts))

    def answer(self):
        line = self.answers.readline()
        kind, rest = line[:1], line[1:-2]
        if kind == b"$":
            return self.answers.read(int(rest) + 2)[:-2] if rest != b"-1" else None
        if kind == b"*":
            return [self.answer() for _ in range(int(rest))]
        assert kind in (b"+", b":"), line
        return rest

    def ask(self, *words):
        self.send(*words)
        return self.answer()

    def ask_all(self, commands):
        for at in range(0, len(commands), 100):
            part = commands[at : at + 100]
            for command in part:
                self.send(*command)
            for _ in part:
                self.answer()

    def information(self, name):
        lines = self.ask("INFO").split(b"\r\n")
        return next(line.split(b":")[1] for line in lines if line.startswith(name + b":"))

    def stop(self):
        self.send("SHUTDOWN", "NOSAVE")
        assert self.process.wait() == 0


def value(key, turn):
    noise = random.Random(key * 7 + turn)
    text = ",".join(f"field-{noise.getrandbits(20):x}" for _ in range(noise.randrange(40, 80)))
    return text.encode()


def commands(keys, turn):
    for key in keys:
        if key % 10 == 0:
            members = [f"member-{(key * 31 + at) % 99991}" for at in range(20)]
            yield ["SADD", f"k{key}", *members, turn]
        elif key % 10 == 1:
            yield ["HSET", f"k{key}", "name", f"the {key}th", "text", value(key, turn)]
        else:
            yield ["SET", f"k{key}", value(key, turn)]


if os.path.exists("dump.rdb"):
    os.remove("dump.rdb")  # The server would load the data of an earlier run.
server = Server("first")
server.ask_all(list(commands(range(KEYS), 0)))
saved = server.ask("DEBUG", "DIGEST")
assert server.ask("BGSAVE").startswith(b"Background saving started")
server.ask_all(list(commands(range(0, KEYS, 6), 1)))
changed = server.ask("DEBUG", "DIGEST")
while server.information(b"rdb_bgsave_in_progress") != b"0":
    time.sleep(0.05)
assert server.information(b"rdb_last_bgsave_status") == b"ok"
assert server.ask("DEBUG", "DIGEST") == changed

second = Server("second")
while second.information(b"loading") != b"0":
    time.sleep(0.05)
loaded = second.ask("DEBUG", "DIGEST")
assert loaded == saved, "what was saved is not what there was"
second.stop()

sums = hashlib.md5()
for key in range(KEYS):
    if key % 10 > 1:
        got = server.ask("GET", f"k{key}")
        assert got == value(key, key % 6 == 0), key
        sums.update(got)
server.stop()
print(saved.decode(), changed.decode(), sums.hexdigest())
