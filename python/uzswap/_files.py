"""File I/O for arrays in regions, in any mode.

In the in-thread mode the kernel cannot access memory that is paged out: read(2) into it fails with
EFAULT. These functions use a buffer. Python code copies it to or from the array, and may fault.
"""

import contextlib

_BUFFER = 1 << 20


def _bytes_of(array):
    """A flat view of an array's bytes."""
    import numpy

    if isinstance(array, numpy.ndarray):
        if not array.flags.c_contiguous:
            raise ValueError("the array is not contiguous; give a contiguous part, or copy it")
        return array.reshape(-1).view("u1")
    return numpy.asarray(array).reshape(-1).view("u1")


@contextlib.contextmanager
def _opened(file, mode):
    if hasattr(file, "read") or hasattr(file, "write"):
        yield file
    else:
        with open(file, mode) as opened:
            yield opened


def readinto(file, array):
    """Reads from `file` into all of `array`. Returns the number of bytes, which is less at the file's end.

    file: a path, or a file opened for reading bytes.
    """
    into = _bytes_of(array)
    buffer = bytearray(min(_BUFFER, len(into)))
    done = 0
    with _opened(file, "rb") as opened:
        while done < len(into):
            with memoryview(buffer)[: len(into) - done] as part:
                count = opened.readinto(part)
                if not count:
                    break
                into[done : done + count] = part[:count]
            done += count
    return done


def fromfile(file, dtype=float, count=-1, *, pager):
    """Like numpy.fromfile for a binary file, but into an array of `pager`.

    count: the number of items; -1 for all from the file's position to its end.
    """
    import os

    import numpy

    dtype = numpy.dtype(dtype)
    with _opened(file, "rb") as opened:
        if count < 0:
            left = os.fstat(opened.fileno()).st_size - opened.tell()
            count = left // dtype.itemsize
        array = pager.empty(count, dtype)
        done = readinto(opened, array)
    return array[: done // dtype.itemsize]


def tofile(array, file):
    """Writes the bytes of `array` to `file`: a path, or a file opened for writing bytes."""
    source = _bytes_of(array)
    with _opened(file, "wb") as opened:
        for start in range(0, len(source), _BUFFER):
            part = memoryview(source[start : start + _BUFFER].tobytes())
            # A raw file may write less than the whole part.
            while part:
                part = part[opened.write(part) :]
