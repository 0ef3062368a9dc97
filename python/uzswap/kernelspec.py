"""A Jupyter kernel whose memory is kept within a limit, and a line magic that shows it.

python -m uzswap.kernelspec install --user --memory 2G
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile


def _specification(memory, display_name):
    """The contents of kernel.json."""
    limit = ["--memory", memory] if memory else []
    # The module finds this environment's program, independent of the server's PATH.
    command = [sys.executable, "-m", "uzswap", "run", "--in-process", "--quiet", *limit, "--"]
    return {
        "argv": [*command, sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": display_name,
        "language": "python",
        "metadata": {"debugger": False},
    }


def install(arguments):
    try:
        import ipykernel  # noqa: F401
        from jupyter_client.kernelspec import KernelSpecManager
    except ImportError as error:
        sys.exit(f"uzswap.kernelspec: {error}; pip install ipykernel")
    size = f", {arguments.memory}" if arguments.memory else ""
    name = arguments.display_name or f"Python {sys.version_info.major} (uzswap{size})"
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        text = json.dumps(_specification(arguments.memory, name), indent=1)
        pathlib.Path(folder, "kernel.json").write_text(text + "\n", encoding="utf-8")
        try:
            path = KernelSpecManager().install_kernel_spec(
                folder, arguments.name, user=arguments.user, prefix=arguments.prefix
            )
        except OSError as error:
            sys.exit(f"uzswap.kernelspec: {error}; --user installs it for you alone")
    print(path)


def _figures(status, process):
    """The line of `uzswap status` about a process; None if the process is in no run."""
    for line in status.splitlines():
        number, _, rest = line.strip().partition(" ")
        if number == str(process):
            return rest.partition(": ")[2]
    return None


def load_ipython_extension(shell):
    """%load_ext uzswap.kernelspec"""

    def show(_line):
        program = [sys.executable, "-m", "uzswap", "status"]
        told = subprocess.run(program, capture_output=True, text=True, check=False)
        figures = _figures(told.stdout, os.getpid())
        print(f"uzswap: {figures or 'this kernel runs without uzswap, or has less than 12 MiB'}")

    shell.register_magic_function(show, "line", "uzswap")


def main():
    parser = argparse.ArgumentParser(
        prog="python -m uzswap.kernelspec",
        description="Install a Jupyter kernel that slows down instead of dying.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("install", help="add the kernel to Jupyter's kernels")
    command.add_argument("--memory", metavar="SIZE", help="the limit of a notebook, for example 2G")
    command.add_argument("--name", default="uzswap", help="the name that Jupyter uses (uzswap)")
    command.add_argument("--display-name", metavar="TEXT", help="the name that people see")
    place = command.add_mutually_exclusive_group()
    place.add_argument("--user", action="store_true", help="for this user alone")
    place.add_argument("--prefix", metavar="DIR", help="below DIR/share/jupyter")
    install(parser.parse_args())


if __name__ == "__main__":
    main()
