# The measured program of `forks`: it has MIB of file contents, and forks FORKS times; the children
# end immediately. Prints the time of each fork, ms, as JSON.
import json, os, sys, time

size, forks = int(sys.argv[1]) << 20, int(sys.argv[2])
blocks, total = [], 0
for folder, folders, names in os.walk("/usr/lib"):
    folders.sort()
    for path in (os.path.join(folder, name) for name in sorted(names)):
        if total < size and os.path.isfile(path) and not os.path.islink(path):
            with open(path, "rb") as file:
                blocks.append(bytearray(file.read(size - total)))
            total += len(blocks[-1])
blocks = [block for block in blocks if block]
time.sleep(0.5)
taken = []
for turn in range(forks):
    # The program writes between two forks.
    for change in range(100):
        block = blocks[(turn * 7919 + change * 104729) % len(blocks)]
        block[change * 4099 % len(block)] ^= 1
    began = time.perf_counter_ns()
    child = os.fork()
    if child == 0:
        os._exit(0)
    taken.append((time.perf_counter_ns() - began) / 1e6)
    if os.waitpid(child, 0)[1] != 0:
        sys.exit("a child ended badly")
print(json.dumps({"mib": total >> 20, "ms": taken}))
