"""Arrays larger than the memory they may take.

    import uzswap
    pager = uzswap.Pager(memory="512M")
    x = pager.empty((40_000, 10_000), "f4")    # 1.5 GiB, a plain numpy array

Arrays that do not fit in the pager's memory are compressed, and come back when they are touched.
docs/python.md has the rest.
"""

import contextlib
import ctypes
import sys

from ._uzswap import Error, Region, __version__
from ._uzswap import Pager as _Pager
from ._files import fromfile, readinto, tofile
from ._signals import keep as _keep_signals

__all__ = ["Error", "Pager", "Region", "__version__", "fromfile", "readinto", "tofile"]


class Pager(_Pager):
    """A memory budget for any number of arrays.

    memory: bytes, or a text such as "512M" or "4G". Pages in memory, compressed pages and tables
        take no more.
    compressor: "lz4", "zstd", "lzo", "deflate", "wkdm" or "raw", with ":LEVEL" if it has levels.
    backing: "PATH" or "PATH:SIZE", a file for the coldest pages. Without it all pages stay in memory.
    mode: "in-thread" needs no privilege, but a system call on memory that is paged out fails with
        EFAULT. "handler-threads" has no such rule, but needs root or /dev/userfaultfd. It is the
        default if it is permitted.
    fork: the arrays in a forked process. "absent", the default: the process has none, and dies with
        a message if it touches one. "copy": the process has a private copy, an ordinary array, and
        methods of the pager fail there. Each fork writes all pages to /var/tmp.
    reclaim_threads: threads that compress.

    Raises Error if memory cannot be paged or an option is wrong.
    """

    def __new__(cls, *arguments, **options):
        pager = super().__new__(cls, *arguments, **options)
        if pager.mode == "in-thread":
            _keep_signals()
        return pager

    def buffer(self, nbytes):
        """A writable memoryview of zeros, for programs without numpy."""
        region = self.map(nbytes)
        block = (ctypes.c_ubyte * nbytes).from_address(region.address)
        block.region = region
        return memoryview(block).cast("B")

    def empty(self, shape, dtype=float, order="C"):
        """A numpy array in a region of its own. It holds zeros, as `zeros` does."""
        import numpy

        dtype = numpy.dtype(dtype)
        if dtype.hasobject:
            raise TypeError(f"{dtype} holds Python objects, which cannot be paged; use numpy.empty")
        count = 1
        for length in shape if isinstance(shape, (tuple, list)) else (shape,):
            count *= int(length)
        if count < 0:
            raise ValueError(f"negative dimensions are not allowed: {shape}")
        if count * dtype.itemsize == 0:
            return numpy.empty(shape, dtype, order)
        region = self.map(count * dtype.itemsize)
        # The array's base keeps the region alive, and the region keeps its pager alive.
        return numpy.ndarray(shape, dtype, buffer=numpy.asarray(region), order=order)

    def zeros(self, shape, dtype=float, order="C"):
        """A numpy array of zeros. Pages that are never touched take no memory."""
        return self.empty(shape, dtype, order)

    def array(self, source, dtype=None):
        """A copy of `source`: an array, or anything that numpy.asarray takes."""
        import numpy

        source = numpy.asarray(source, dtype)
        copy = self.empty(source.shape, source.dtype)
        copy[...] = source
        return copy

    @contextlib.contextmanager
    def pin(self, array):
        """Keeps the whole of `array` in memory while the `with` block runs.

        In the block, system calls and other libraries may use it in any mode. Raises Error if it
        does not fit into the pager's memory.
        """
        address, length = _span(array)
        pinned = self._pin(address, length)
        try:
            yield array
        finally:
            pinned.release()

    def touch(self, array):
        """Brings all of `array` into memory now, as far as the budget allows."""
        self._touch(*_span(array))

    def advise(self, array, advice):
        """Announces the use of `array`.

        advice: "normal", "sequential", "random", "will-need", "page-out" (compress it now) or
        "dont-need" (drop its contents; it reads as zeros).
        """
        self._advise(*_span(array), advice)

    @contextlib.contextmanager
    def allocator(self, above="1M"):
        """In the `with` block, every new numpy array of at least `above` bytes is in a region.

        This holds for the current context (contextvars): a thread that starts in the block has
        numpy's own allocator. For whole programs: uzswap run -- python script.py.
        """
        from . import _uzswap

        handler = _uzswap._numpy_handler(self, above)
        before = _uzswap._numpy_install(handler)
        try:
            yield self
        finally:
            _uzswap._numpy_install(before)


def _span(array):
    """Address and length of the memory that an array spans."""
    if isinstance(array, Region):
        return array.address, array.nbytes
    if "numpy" in sys.modules:
        import numpy

        if isinstance(array, numpy.ndarray):
            if array.size == 0:
                return array.ctypes.data, 0
            ahead = sum((n - 1) * s for n, s in zip(array.shape, array.strides) if s > 0)
            behind = sum((n - 1) * s for n, s in zip(array.shape, array.strides) if s < 0)
            return array.ctypes.data + behind, ahead - behind + array.itemsize
    view = memoryview(array).cast("B")
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(view)), view.nbytes
