"""A second process that compiles, on a first run, what the first will soon ask for.

It begins with the first kernel that is compiled here, ends with this process, says nothing, and is no part of the work:
what it leaves in the cache is found there, what it is about to leave is waited for (``claims``), and without it all is
compiled here.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from piper_ray.compiled import claims
from piper_ray.compiled.jit import cache_folders

_THE_SECOND_PROCESS = 0
"""A lock that no kernel has: of several first runs at once one gets a second process."""

_PROGRAM = "import sys; sys.path[:0] = [sys.argv[1]]; from piper_ray.compiled.beside import main; main(*sys.argv[2:])"


def compile_beside(module: str, function: str) -> int | None:
    """Calls the function, without arguments, in a process of its own that ends with this one; returns at once.

    Its number; None where there is none, as it could keep nothing.
    """
    folders = cache_folders()
    if not sys.executable or not claims.can_be_made(folders):
        return None
    command = [sys.executable, "-c", _PROGRAM, str(Path(__file__).parents[2]), module, function]
    with contextlib.suppress(OSError):
        # What it reads ends when this process does.
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=True,
        )
        threading.Thread(target=_wait_for, args=(process,), name="piper-ray-compiling", daemon=True).start()
        return process.pid
    return None


def _wait_for(process: subprocess.Popen[bytes]) -> None:
    with process:  # which closes its end of the pipe: Python would warn of it
        process.wait()


def main(module: str, function: str) -> None:
    """The second process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the first, and comes to all
    threading.Thread(target=_end_with_the_first, daemon=True).start()
    if claims.is_free(cache_folders(), _THE_SECOND_PROCESS):
        getattr(importlib.import_module(module), function)()


def _end_with_the_first() -> None:
    while os.read(0, 1):
        pass
    os._exit(0)
