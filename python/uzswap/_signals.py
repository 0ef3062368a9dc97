"""In the mode in-thread, SIGBUS goes to the pager first, even if a handler of it is set later."""

import faulthandler
import functools
import signal

from ._uzswap import _take_back

_kept = []


def keep():
    """Makes functions that set signal handlers leave SIGBUS to the pager from now on.

    The new handler gets each SIGBUS that is not of a region. Python's functions call the C library directly, so
    they are wrapped here. `python -X faulthandler` has set its handler before this.
    """
    if _kept:
        return
    for module, name in [(faulthandler, "enable"), (signal, "signal")]:
        before = getattr(module, name)
        _kept.append(before)
        setattr(module, name, _followed(before))


def _followed(function):
    @functools.wraps(function)
    def call(*arguments, **options):
        try:
            return function(*arguments, **options)
        finally:
            _take_back()

    return call
