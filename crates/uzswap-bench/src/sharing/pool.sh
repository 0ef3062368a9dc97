# A Python program whose workers read a heap from before the fork, and make results.
exec python3 -c '
import json, multiprocessing, os, time
rows = [{"id": i, "name": "customer %d" % i, "tags": ["t%d" % (i % 97), "u%d" % (i % 89)]} for i in range(160000)]
def work(part):
    mine = {}
    for row in rows[part::16]:
        mine[row["name"]] = json.dumps(row)
    time.sleep(1)
    return len(mine)
with multiprocessing.get_context("fork").Pool(4) as pool:
    print(sum(pool.map(work, range(16))))
'
