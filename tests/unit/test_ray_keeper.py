"""A Ray of our own ends with whoever wanted it, and nothing of it is left."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from piper_ray.engine.backends.ray.keeper import PREFIX, remove_abandoned
from tests.cli_cases import ROOT
from tests.lengths import long_after
from tests.sweep_support import write_small

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the end of a process is known to its parent")

_HANG_S = 60.0

# Says the keeper's pid, and when it is connected; closes at the end of stdin.
_DRIVER = """
import os, subprocess, sys, types
from piper_ray.engine.backends.ray import session

class Told(subprocess.Popen):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        print(self.pid, flush=True)

session.subprocess = types.SimpleNamespace(**vars(subprocess))
session.subprocess.Popen = Told
before = dict(os.environ)
assert "ray" not in sys.modules
connected = session.connect("local", 1)
import ray
listens = ray.nodes()[0]["NodeManagerAddress"]
print("connected", listens, os.environ["RAY_AUTH_MODE"], len(os.environ["RAY_AUTH_TOKEN"]), flush=True)
sys.stdin.read()
connected.close()
changed = {name for name in {**os.environ, **before} if os.environ.get(name) != before.get(name)}
print("closed", sorted(changed - {"PYTHONBREAKPOINT", "RAY_CLIENT_MODE"}), flush=True)  # which are Ray's own
"""


@pytest.fixture
def base() -> Iterator[Path]:
    """A folder with a path short enough for sockets."""
    folder = tempfile.mkdtemp(dir="/tmp")
    yield Path(folder)
    shutil.rmtree(folder)


@contextmanager
def driver(base: Path) -> Iterator[subprocess.Popen[str]]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    with subprocess.Popen(
        [sys.executable, "-c", _DRIVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**environment, "PYTHONPATH": str(ROOT), "RAY_TMPDIR": str(base)},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def await_end(pid: int) -> None:
    """Of any process."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([descriptor], [], [], _HANG_S)[0], "it goes on"
    finally:
        os.close(descriptor)


def living(session: int) -> list[str]:
    """What goes on in a session, by name."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, fields = path.read_text().rpartition(")")
        except OSError:
            continue
        if int(fields.split()[3]) == session and fields.split()[0] not in "ZX":
            found.append(name.partition("(")[2])
    return found


def folders(base: Path) -> list[str]:
    return [path.name for path in base.iterdir() if PREFIX in path.name]


@pytest.mark.long
def test_it_ends_with_the_session_and_the_environment_is_as_it_was(base: Path) -> None:
    """Not by signals that ask it to end, nor does Ray: whoever wanted it is asked as well, and ends it."""
    with driver(base) as process:
        keeper = int(line(process))
        assert line(process) == "connected 127.0.0.1 token 64"
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(keeper, number)
        assert {"raylet", "gcs_server"} <= set(living(keeper))
        assert len(folders(base)) == 1
        assert process.stdin is not None
        process.stdin.close()
        assert line(process) == "closed []"
        assert process.wait(_HANG_S) == 0
        assert (living(keeper), folders(base)) == ([], [])


_UNHANDLED = """
import time, sys
from piper_ray.engine.backends.ray import session
connected = session.connect("local", 1)
import ray

@ray.remote(num_cpus=0, max_retries=0)
def fails():
    raise ValueError("that nobody asks for")

@ray.remote(num_cpus=0)
def succeeds():
    return 1

one = fails.remote()
assert ray.get(succeeds.remote()) == 1
del one
time.sleep(7.0)  # Ray tells of it five seconds after it is there, if not at once
connected.close()
"""


@pytest.mark.long
def test_what_a_task_fails_of_is_ours_to_tell(base: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _UNHANDLED],
        capture_output=True,
        text=True,
        check=True,
        timeout=_HANG_S,
        env={**environment, "PYTHONPATH": str(ROOT), "RAY_TMPDIR": str(base)},
    )
    assert "Unhandled error" not in done.stderr
    assert "that nobody asks for" not in done.stdout + done.stderr


@pytest.mark.parametrize("connected", long_after(1, [False, True]))
def test_it_ends_with_a_driver_that_is_killed(base: Path, connected: bool) -> None:
    """During the start too."""
    with driver(base) as process:
        keeper = int(line(process))
        if connected:
            assert line(process).startswith("connected")
        process.kill()
        await_end(keeper)
    assert (living(keeper), folders(base)) == ([], [])


@pytest.mark.long
def test_what_a_killed_keeper_leaves_ends_with_the_session(base: Path) -> None:
    with driver(base) as process:
        keeper = int(line(process))
        assert line(process).startswith("connected")
        os.kill(keeper, signal.SIGKILL)
        assert "raylet" in living(keeper)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(_HANG_S) == 0
        assert living(keeper) == []


@pytest.mark.long
def test_what_is_left_of_all_goes_with_the_next_start_and_what_is_in_use_stays(base: Path) -> None:
    with driver(base) as process:
        keeper = int(line(process))
        assert line(process).startswith("connected")
        before = sorted(living(keeper)), folders(base)
        remove_abandoned(base)
        assert (sorted(living(keeper)), folders(base)) == before
        ended = os.pidfd_open(keeper)  # type: ignore[attr-defined,unused-ignore]  # Linux has it
        os.kill(keeper, signal.SIGKILL)
        assert select.select([ended], [], [], _HANG_S)[0]
        os.close(ended)
        process.kill()
        process.wait()
    assert "raylet" in living(keeper)
    assert len(folders(base)) == 1
    remove_abandoned(base)
    assert (living(keeper), folders(base)) == ([], [])


@pytest.mark.long
def test_why_it_does_not_start_is_told(base: Path) -> None:
    (base / "file").touch()
    sweep = ("sweep", str(write_small(base)), "--storage", str(base / "dataset"), "--address", "local")
    result = subprocess.run(
        [sys.executable, "-m", "piper_ray", *sweep],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_TMPDIR": str(base / "file")},
    )
    assert result.returncode == 7
    assert f"no Ray cluster could be reached at local: [Errno 17] File exists: '{base / 'file'}'" in result.stderr
    assert "Traceback" not in result.stderr
