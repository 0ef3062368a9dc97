# A tour in cells. Run it as a program, or open it in an editor or Jupyter that supports "# %%".
#
#     python python/examples/walk.py

# %% A pager has a budget, and this array is four times as large. Numbers compress badly, so a file
# takes the coldest pages.
import os
import tempfile

import numpy as np

import uzswap

folder = tempfile.TemporaryDirectory(dir="/var/tmp")
pager = uzswap.Pager(memory="32M", compressor="zstd", backing=f"{folder.name}/pages:256M")
prices = pager.empty((1024, 16 * 1024), "i8")
print(f"{prices.nbytes >> 20} MiB in {pager.memory >> 20}, served by {pager.mode}")

# %% It is a plain array: a thousand random walks, row by row.
random = np.random.default_rng(2026)
for row in prices:
    np.cumsum(random.integers(-3, 4, row.size, dtype="i8"), out=row)
print(type(prices).__name__, prices.shape, prices[:, -1].mean().round(1))

# %% Every function of numpy works on it. Parts that do not fit into the budget are compressed.
highest = prices.max(axis=1)
print("highest", highest.max(), "in row", highest.argmax())
prices += 1000
print("lowest now", prices.min())

# %% The statistics: docs/statistics.md lists their names.
statistics = pager.stats()
print("compressed pages:", "yes" if statistics["stored_pages"] else "none")
assert statistics["memory_used"] <= statistics["memory_budget"]

# %% Advice: the array will be read in order, and then not be needed for a while.
pager.advise(prices, "sequential")
total = prices.sum()
pager.advise(prices, "page-out")
assert prices.sum() == total

# %% File I/O that works in every mode (docs/python.md has the reason).
path = os.path.join(folder.name, "prices")
uzswap.tofile(prices[:64], path)
again = uzswap.fromfile(path, "i8", pager=pager)
assert (again == prices[:64].ravel()).all()

# %% Arrays of at least 1 MiB that a library makes are in regions, too.
with pager.allocator():
    ordered = np.sort(prices[:100], axis=None)
assert (np.diff(ordered) >= 0).all()
print("done")
