"""``piper-ray solve --checkpoint DIR --supervise``: the solve as a child process, started again each time it dies.

Ray ends a driver whose head is gone from outside Python, by exit code 1 or SIGABRT, so no handler in the solve itself
could go on. What was saved is in the checkpoint, where the next child takes it up.

A child that dies has written nothing of the ``--json`` document: a solve writes it in one piece, after all else that
can fail. stdin cannot be read again, so the input is a file.

The child is in a session of its own. A signal to the terminal's or the job's process group thus reaches the supervisor
alone, which passes SIGINT, SIGTERM and SIGHUP on, each once. Ctrl-Z stops the supervisor alone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import typer

from piper_ray.cli.interrupts import STOPPING, Signals, noted
from piper_ray.cli.outliving import SUPERVISED
from piper_ray.cli.process import end_loading
from piper_ray.model.errors import ClusterError, PiperRayError

OPTION = "--supervise"

DEATHS = 5
"""Deaths in a row, with nothing new in the checkpoint, after which it gives up."""

PAUSES_S = tuple(min(2.0**death, 60.0) for death in range(DEATHS - 1))
"""The seconds between a child's death and the next start, for each death in a row; after one more the supervisor gives
up."""

_DEATHS = (PiperRayError.exit_code, ClusterError.exit_code)

# Runs a command that the kernel kills as soon as its parent, the process of the first argument, is gone. A program of
# its own because Python code between fork and exec may hang if the parent has threads. 1 is PR_SET_PDEATHSIG of
# prctl(2), which exec keeps; a parent that was gone before is seen by its pid. Only Linux has that call.
_BOUND = """
try:
    import ctypes, os, signal, sys
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() == int(sys.argv[1]):
        os.execv(sys.argv[2], sys.argv[2:])
except KeyboardInterrupt:
    os._exit(130)
"""


def without_supervise(arguments: Sequence[str]) -> list[str]:
    """The command line of the child: all but the option ``--supervise``."""
    options = list(arguments)
    end = options.index("--") if "--" in options else len(options)
    return [option for option in options[:end] if option != OPTION] + options[end:]


def supervise(
    arguments: Sequence[str],
    checkpoint: str,
    *,
    command: Sequence[str] = (sys.executable, "-m", "piper_ray"),
    pauses_s: Sequence[float] = PAUSES_S,
) -> int:
    """Runs ``command`` with ``arguments`` until it ends other than by death; returns its exit code.

    A death is exit code 1 or 7, or a signal. After SIGINT, SIGTERM or SIGHUP to the supervisor the child's exit code is
    final whatever it is, 128 + N if signal N ended it, as in shells. checkpoint: a path or URI. The
    child does not outlive the supervisor; if SIGKILL ends that, so only on Linux.

    For the main thread only. Raises ClusterError after len(pauses_s) + 1 deaths in a row with no new content of the
    checkpoint (or none that can be listed).
    """
    from piper_ray.storage.folder import shown

    end_loading()
    known: set[str] = set()
    deaths = 0
    with Signals((*STOPPING, signal.SIGCHLD), noted) as signals:
        while True:
            code, stopped = _run([*command, *arguments], signals)
            if stopped or (code >= 0 and code not in _DEATHS):
                return code if code >= 0 else 128 - code
            saved = _saved(checkpoint)
            place = shown(checkpoint)
            deaths = deaths + 1 if saved <= known else 1
            known |= saved
            if deaths > len(pauses_s):
                raise ClusterError(_hopeless(code, deaths, place))
            pause_s = pauses_s[deaths - 1]
            typer.echo(
                f"piper-ray: the solve {_death(code)}; it goes on from the checkpoint at {place} in {pause_s:g} s",
                err=True,
            )
            stop = _stop_within(signals, pause_s)
            if stop is not None:
                return 128 + stop


def _run(command: Sequence[str], signals: Signals) -> tuple[int, bool]:
    """The return code, as of Popen, and whether a signal was passed on.

    The child is reaped and signalled here alone: no signal can go to a pid that is no longer its own.
    """
    if sys.platform == "linux":
        command = [sys.executable, "-I", "-S", "-c", _BOUND, str(os.getpid()), *command]
    stopped = False
    child = subprocess.Popen(command, start_new_session=True, env={**os.environ, SUPERVISED: "1"})
    try:
        while child.poll() is None:
            for number in signals.wait(None):
                if number in STOPPING:
                    child.send_signal(number)
                    stopped = True
        return child.returncode, stopped
    finally:
        if child.returncode is None:
            child.kill()
            child.wait()


def _stop_within(signals: Signals, pause_s: float) -> int | None:
    """A signal to stop, as soon as there is one; None when the time is up."""
    end = time.monotonic() + pause_s
    while True:
        left_s = end - time.monotonic()
        for number in signals.wait(max(left_s, 0.0)):
            if number in STOPPING:
                return number
        if left_s <= 0.0:
            return None


def _saved(checkpoint: str) -> set[str]:
    """The content of the checkpoint, as checksums: a lease, or an old answer written anew, is no progress."""
    from piper_ray.storage.folder import open_folder, state_files

    try:
        return {file.checksum for file in state_files(open_folder(checkpoint).names())}
    except OSError:
        return set()


def _hopeless(code: int, deaths: int, place: str) -> str:
    return (
        f"the solve {_death(code)}: {deaths} deaths in a row with nothing new in the checkpoint at "
        f"{place}. What it holds is kept; see above for the cause, then give the same command again"
    )


def _death(code: int) -> str:
    if code == ClusterError.exit_code:
        return f"lost its cluster (exit code {code})"
    if code >= 0:
        return f"died with exit code {code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"was killed by {names.get(-code, f'signal {-code}')}"
