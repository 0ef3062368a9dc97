# Workers of joblib, each with its own libraries and its own part of a table.
exec /usr/bin/python3 -c '
import joblib, numpy, pandas, time
def work(part):
    rng = numpy.random.default_rng(part)
    frame = pandas.DataFrame({"key": rng.integers(0, 1000, 200000), "value": rng.random(200000).round(2)})
    grouped = frame.groupby("key").value.agg(["sum", "mean", "max"])
    time.sleep(1)
    return float(grouped["sum"].sum())
print(sum(joblib.Parallel(n_jobs=4)(joblib.delayed(work)(part) for part in range(8))))
'
