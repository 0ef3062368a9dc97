# A Python server that loads its data, forks four workers, and then answers 2000 requests.
cat > served.py <<'P'
import json
DATA = {"item %d" % i: {"price": i * 7 % 1000, "text": "an item for number %d " % i * 3} for i in range(150000)}
NAMES = list(DATA)
def app(environ, start_response):
    number = int(environ["QUERY_STRING"] or 0)
    found = [json.dumps(DATA[NAMES[(number * 7919 + k) % len(NAMES)]]) for k in range(200)]
    body = "\n".join(found).encode()
    start_response("200 OK", [("Content-Length", str(len(body)))])
    return [body]
P
gunicorn --preload -w 4 -b unix:served.socket served:app &
server=$!
python3 -c '
import http.client, os, socket, time
class Connection(http.client.HTTPConnection):
    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect("served.socket")
while not os.path.exists("served.socket"): time.sleep(0.1)
time.sleep(1)
for number in range(2000):
    connection = Connection("localhost")
    connection.request("GET", "/?%d" % number)
    connection.getresponse().read()
'
status=$?
sleep 1
kill $server
wait $server
rm -f served.socket
exit $status
