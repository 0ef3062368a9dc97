"""python -m uzswap: runs a program with its large numpy arrays in a budget of memory."""

import argparse
import contextvars
import os
import runpy
import sys
import threading

import uzswap


def _arguments():
    parser = argparse.ArgumentParser(
        prog="python -m uzswap",
        usage="%(prog)s --memory SIZE [options] (SCRIPT | -m MODULE) [argument ...]",
        description="Run a Python program, unchanged, with its large numpy arrays in a budget of "
        "memory. What does not fit is kept compressed.",
    )
    parser.add_argument("--memory", required=True, metavar="SIZE", help="for example 512M or 4G")
    parser.add_argument("--above", default="1M", metavar="SIZE", help="arrays this large (1M)")
    parser.add_argument("--compressor", metavar="NAME[:LEVEL]", help="lz4, zstd, lzo, wkdm, ...")
    parser.add_argument("--backing", metavar="PATH[:SIZE]", help="a file for the coldest pages")
    parser.add_argument("--mode", choices=["handler-threads", "in-thread"])
    parser.add_argument("--fork", choices=["absent", "copy"], help="what forks have of the arrays")
    parser.add_argument("-q", "--quiet", action="store_true", help="print no report")
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT names a module")
    parser.add_argument("program", metavar="SCRIPT", help="a program, or after -m a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...")
    return parser.parse_args()


def _threads_inherit():
    """New threads run in a copy of the starter's context, and with it allocate as it does."""
    start = threading.Thread.start

    def start_in_context(thread, *arguments, **keywords):
        context, run = contextvars.copy_context(), thread.run
        thread.run = lambda: context.run(run)
        return start(thread, *arguments, **keywords)

    threading.Thread.start = start_in_context


def _report(pager):
    statistics = pager.stats()
    print(f"uzswap: {pager.mode}, {pager.memory >> 20} MiB of memory", file=sys.stderr)
    for name, value in statistics.items():
        print(f"  {name} {value}", file=sys.stderr)


def main():
    given = _arguments()
    try:
        pager = uzswap.Pager(
            given.memory,
            compressor=given.compressor,
            backing=given.backing,
            mode=given.mode,
            fork=given.fork,
        )
        allocator = pager.allocator(given.above)
        allocator.__enter__()
    except (uzswap.Error, ImportError) as error:
        sys.exit(f"python -m uzswap: {error}")
    _threads_inherit()
    sys.argv = [given.program, *given.arguments]
    try:
        if given.module:
            sys.path[0] = os.getcwd()
            runpy.run_module(given.program, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(given.program))
            runpy.run_path(given.program, run_name="__main__")
    finally:
        if not given.quiet:
            _report(pager)


main()
