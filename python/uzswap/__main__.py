"""python -m uzswap: the program `uzswap` that was installed with this module."""

import importlib.metadata
import os
import shutil
import sys


def _program():
    """The path of the program; None without one."""
    try:
        installed = importlib.metadata.files("uzswap") or []
    except importlib.metadata.PackageNotFoundError:
        installed = []
    for file in installed:
        if file.parts[-2:] == ("bin", "uzswap"):
            path = os.path.realpath(file.locate())
            if os.access(path, os.X_OK):
                return path
    return shutil.which("uzswap")


def main():
    program = _program()
    if program is None:
        sys.exit(
            "python -m uzswap: this module was installed without the program; install a wheel of a release, or "
            "build the program: cargo build --release --workspace"
        )
    os.execv(program, [program, *sys.argv[1:]])


main()
