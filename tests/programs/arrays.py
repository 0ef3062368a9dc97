"""Sorts, multiplies, transforms and indexes arrays of 24 MB with numpy."""

import hashlib
import numpy


def digest(values):
    return hashlib.md5(numpy.ascontiguousarray(values).tobytes()).hexdigest()


noise = numpy.random.RandomState(1)
values = noise.randint(0, 1 << 20, 3_000_000)
print("summed", digest(numpy.cumsum(values)))
print("sorted", digest(numpy.sort(values, kind="mergesort")))
order = numpy.argsort(values[::4], kind="stable")
print("indexed", digest(values[::4][order]))
print("counted", digest(numpy.bincount(values & 0xFFFF)))
print("unique", digest(numpy.unique(values)))
square = (values[:1_000_000] % 1000).reshape(1000, 1000).astype(float)
print("product", digest(square @ square.T))
print("transform", digest(numpy.round(numpy.fft.fft(values[: 1 << 20]))))
print("turned", digest(square.T), digest(values.reshape(-1, 3).T))
