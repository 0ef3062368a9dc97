"""SIGBUS is the pager's in the mode in-thread, whoever sets a handler of it later."""

import faulthandler
import functools
import signal

from ._uzswap import _take_back

_kept = []


def keep():
    """From now on, what sets handlers of signals leaves SIGBUS to the pager.

    The new handler gets what is not of a region. Python's functions call the C library directly, so
    they are wrapped here; `python -X faulthandler` was there before.
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
