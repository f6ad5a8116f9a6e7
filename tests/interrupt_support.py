"""``piper-ray`` as a process that is sent signals, at a moment that it tells of or at a random one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from piper_ray import dump
from piper_ray.model.instance import Instance
from tests.cli_cases import ROOT
from tests.instances import two_towers

HANG_S = 60.0
"""After which a test fails, and no process is left."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# Signals are what they are for a command in a terminal, whatever the tests were started to ignore.
AS_IN_A_TERMINAL = """
import signal
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)
"""

# Runs the command line after some statements.
_PROGRAM = """
import sys
from piper_ray.cli import program
{setup}
program()
"""


def long_solve() -> Instance:
    """Takes half a minute, and has its first plan at once."""
    return two_towers(110, devices=48, microbatches=96, memory_bytes=150.0)


def write_long(folder: Path) -> Path:
    path = folder / "long.json"
    dump(long_solve(), path)
    return path


@contextmanager
def started(
    *arguments: object, setup: str = "", ignored: signal.Signals | None = None
) -> Iterator[subprocess.Popen[str]]:
    """setup: statements before the command. ignored: a signal that it is started to ignore, as under nohup."""
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "FORCE_COLOR")}
    if ignored is not None:
        setup = f"signal.signal({ignored.value}, signal.SIG_IGN)\n{setup}"
    program = AS_IN_A_TERMINAL + _PROGRAM.format(setup=setup)
    rows = ["--verbose"] if arguments[0] == "solve" else []  # which tests wait for
    command = [sys.executable, "-c", program, *(str(argument) for argument in arguments), *rows]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**environment, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"},
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(process: subprocess.Popen[str], words: str) -> str:
    """Until a line of stderr has the words. Returns what came there up to it."""
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if words in line:
            return "".join(seen)
    raise AssertionError(f"{words!r} is not in\n{''.join(seen)}")
