"""``piper-ray`` as a process that is sent signals, at a moment that it tells of or at a random one."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from piper_ray import dump
from piper_ray.model.instance import Instance
from tests.cli_cases import environment_of_commands, original_of
from tests.forking import Copy
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
    *arguments: object, setup: str = "", ignored: signal.Signals | None = None, loaded: bool = True
) -> Iterator[subprocess.Popen[str] | Copy]:
    """setup: statements before the command. ignored: a signal that it is started to ignore, as under nohup. loaded:
    whether it may begin with all that commands load, which setup comes before otherwise."""
    if ignored is not None:
        setup = f"signal.signal({ignored.value}, signal.SIG_IGN)\n{setup}"
    rows = ["--verbose"] if arguments[0] == "solve" else []  # which tests wait for
    asked = [*(str(argument) for argument in arguments), *rows]
    environment = environment_of_commands()
    original = original_of(environment) if loaded else None
    if original is not None:
        with original.start(asked, AS_IN_A_TERMINAL + setup) as copy:
            yield copy
        return
    program = AS_IN_A_TERMINAL + _PROGRAM.format(setup=setup)
    with subprocess.Popen(
        [sys.executable, "-c", program, *asked],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(process: subprocess.Popen[str] | Copy, words: str) -> str:
    """Until a line of stderr has the words. Returns what came there up to it."""
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if words in line:
            return "".join(seen)
    raise AssertionError(f"{words!r} is not in\n{''.join(seen)}")
