"""What is different while a command loads is as it was once the command begins, and for what the command starts."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from piper_ray.cli.process import end_loading
from tests.cli_cases import ROOT, write_small

THREADS = "OPENBLAS_NUM_THREADS"
PLUGINS = "PYDANTIC_DISABLE_PLUGINS"

_STATE = f"""
import gc, json, os, sys

def tell():
    variables = os.environ.get("{THREADS}"), os.environ.get("{PLUGINS}")
    print(json.dumps([gc.isenabled(), gc.get_freeze_count() > 0, *variables]), file=sys.stderr)
"""
_INFO = f"""{_STATE}
from piper_ray.cli import info, program

def told(function):
    def tell_and_do(*arguments):
        tell()
        return function(*arguments)
    return tell_and_do

info.WorkloadOptions.load, info._looked_into = told(info.WorkloadOptions.load), told(info._looked_into)
program()
"""
_SUPERVISED = f"""{_STATE}
from piper_ray.cli.process import begin_loading
from piper_ray.cli.supervise import supervise

begin_loading()
tell()
child = (sys.executable, "-c", "from pathlib import Path; import sys; exec(Path(sys.argv[1]).read_text()); tell()")
supervise(sys.argv[1:], ".", command=child)
"""


def _told(script: str, *arguments: object, **environment: str) -> list[list[object]]:
    """What the script's ``tell`` said, each time."""
    inherited = {name: value for name, value in os.environ.items() if name not in (THREADS, PLUGINS)}
    finished = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        env=inherited | environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in finished.stderr.splitlines() if line.startswith("[")]


def test_a_command(tmp_path: Path) -> None:
    loading, working = _told(_INFO, "info", write_small(tmp_path))
    assert loading == [False, False, "1", "1"]
    assert working == [True, True, None, None]


@pytest.mark.long
def test_what_the_user_says_stays(tmp_path: Path) -> None:
    loading, working = _told(_INFO, "info", write_small(tmp_path), **{THREADS: "3", PLUGINS: "some"})
    assert loading[-2:] == working[-2:] == ["3", "some"]


def test_a_supervised_child_inherits_nothing(tmp_path: Path) -> None:
    state = tmp_path / "state.py"
    state.write_text(_STATE)
    _, child = _told(_SUPERVISED, state)
    assert child == [True, False, None, None]


def test_nothing_ends_where_nothing_began() -> None:
    frozen, environment = gc.get_freeze_count(), dict(os.environ)
    end_loading()
    assert (gc.isenabled(), gc.get_freeze_count(), dict(os.environ)) == (True, frozen, environment)
