"""Groups, sorts and merges 700 000 rows with pandas, and multiplies and transforms with numpy."""

import hashlib
import numpy
import pandas

noise = numpy.random.RandomState(1)
rows = 700000
frame = pandas.DataFrame(
    {
        "key": noise.randint(0, 5000, rows),
        "price": numpy.round(noise.gamma(2.0, 50.0, rows), 2),
        "count": noise.randint(1, 20, rows),
    }
)


def digest(values):
    return hashlib.md5(numpy.ascontiguousarray(values).tobytes()).hexdigest()


grouped = frame.groupby("key").agg({"price": ["sum", "mean", "max"], "count": "sum"})
print("grouped", digest(grouped.to_numpy()))
ordered = frame.sort_values(["key", "price", "count"], kind="mergesort")
print("sorted", digest(ordered["price"].to_numpy()), digest(ordered["count"].to_numpy()))
names = pandas.DataFrame({"key": range(5000), "name": [f"item {at}" for at in range(5000)]})
merged = frame.merge(names, on="key")
print("merged", len(merged), hashlib.md5("".join(merged["name"][::100]).encode()).hexdigest())
del ordered, merged
square = noise.rand(900, 900)
print("product", digest(square @ square.T))
print("transform", digest(numpy.fft.fft(frame["price"].to_numpy())))
