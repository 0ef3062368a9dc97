# A Redis that saves from a fork while a sixth of its values changes.
rm -f redis.socket dump.rdb
redis-server --port 0 --unixsocket redis.socket --save "" --rdb-key-save-delay 40 &
server=$!
python3 -c '
import os, random, socket, time
while not os.path.exists("redis.socket"): time.sleep(0.1)
connection = socket.socket(socket.AF_UNIX)
connection.connect("redis.socket")
reader = connection.makefile("rb")
def ask(*words):
    words = [str(word).encode() for word in words]
    connection.sendall(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words))
    return reader.readline()
random.seed(1)
def value(i):
    return "".join("{\"item\":%d,\"price\":%d}," % (random.randrange(5000), random.randrange(100000)) for _ in range(30))
for i in range(60000): ask("SET", "key:%d" % i, value(i))
ask("BGSAVE")
for i in range(0, 60000, 6): ask("SET", "key:%d" % i, value(i))
time.sleep(2)
'
status=$?
kill $server
wait $server
rm -f redis.socket dump.rdb temp-*.rdb
exit $status
