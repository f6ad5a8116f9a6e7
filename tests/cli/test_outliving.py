"""A process that Ray ends from outside leaves its answer: what becomes of it, of signals, and of real Rays' ends."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import piper_ray
from piper_ray import dump
from piper_ray.cli import outliving
from piper_ray.evaluate import evaluate
from tests.cli_cases import ROOT, run, write_small
from tests.faults.surroundings import TO_WORKERS
from tests.instances import two_towers
from tests.interrupt_support import HANG_S, long_solve, started, wait_for, write_long
from tests.sweep_support import SMALL_POINTS
from tests.sweep_support import write_small as write_sweep

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the child must end with its parent")

# The first evaluation waits for the end of a process, as if it were one of Ray's, and ends then as Ray ends it.
_ENDED = """
import os, time
from piper_ray.cli import outliving
from piper_ray.engine.search.search import Search
def ended(*arguments, **options):
    outliving.tell_of_services(({address!r}, {pids!r}))
    print("waiting", file=sys.stderr, flush=True)
    for pid in {pids!r}.values():
        while os.path.exists(f"/proc/{{pid}}"):
            time.sleep(0.01)
    {end}
Search._evaluate = ended
"""


def ended(address: str = "127.0.0.1:1", pids: dict[str, int] | None = None, end: str = "os._exit(1)") -> str:
    return _ENDED.format(address=address, pids=pids or {}, end=end)


@pytest.fixture
def long(tmp_path: Path) -> Path:
    return write_long(tmp_path)


@pytest.fixture
def base() -> Iterator[Path]:
    """A folder with a path short enough for sockets."""
    folder = tempfile.mkdtemp(dir="/tmp")
    yield Path(folder)
    shutil.rmtree(folder, ignore_errors=True)


def assert_left(output: str, out: Path) -> None:
    document: dict[str, Any] = json.loads(output)
    assert (document["status"], document["stopped_by"]) == ("feasible", "process lost")
    for plan in (piper_ray.load_plan(document, long_solve()), piper_ray.load_plan(out, long_solve())):
        assert evaluate(long_solve(), plan).time_per_sample_s == document["time_per_sample_s"]
    assert 0 < document["lower_bound_s"] < document["time_per_sample_s"]


@pytest.mark.long
def test_plan_and_bound_are_written_and_what_died_is_named(long: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    with subprocess.Popen(["sleep", "1000"]) as raylet:
        setup = ended(pids={"raylet": raylet.pid})
        with started("solve", long, "--json", "--out", out, "--address", "local", setup=setup) as process:
            wait_for(process, "waiting")
            raylet.kill()
            raylet.wait()
            output, errors = process.communicate(timeout=HANG_S)
            assert process.returncode == 7, errors
    assert_left(output, out)
    assert f"piper-ray: Ray's raylet on this machine (process {raylet.pid}) died, and with it" in errors


@pytest.mark.long
def test_a_head_elsewhere_that_no_longer_answers_is_named(long: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    setup = ended(address, end="os.abort()")
    with started("solve", long, "--json", "--out", out, "--address", "local", setup=setup) as process:
        output, errors = process.communicate(timeout=HANG_S)
        assert process.returncode == 7, errors
    assert_left(output, out)
    assert f"piper-ray: Ray's GCS, the cluster's head, no longer answers at {address}, and with it" in errors


def test_what_the_system_kills_leaves_its_plan_too(long: Path, tmp_path: Path) -> None:
    out, kept = tmp_path / "plan.json", tmp_path / "kept"
    options = ("--json", "--out", out, "--address", "local", "--checkpoint", kept)
    setup = ended(end="os.kill(os.getpid(), 9)")
    with started("solve", long, *options, setup=setup) as process:
        output, errors = process.communicate(timeout=HANG_S)
        assert process.returncode == 128 + signal.SIGKILL, errors
    assert_left(output, out)
    assert "the process that did the work was killed by SIGKILL; the same command goes on from the checkpoint" in errors


@pytest.mark.long
def test_before_anything_is_found_it_is_told(long: Path) -> None:
    setup = ended() + "\nSearch._improve_on_chain = ended\n"
    with started("solve", long, "--json", "--address", "local", setup=setup) as process:
        output, errors = process.communicate(timeout=HANG_S)
        assert (process.returncode, output) == (7, "")
    assert errors.rstrip().endswith("; nothing had been found yet")


@pytest.mark.long
def test_an_input_from_stdin_is_still_known(long: Path) -> None:
    command = [sys.executable, "-c", f"import sys\nfrom piper_ray.cli import program\n{ended()}\nprogram()"]
    result = subprocess.run(
        [*command, "solve", "-", "--json", "--address", "local"],
        input=long.read_text(),
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_S,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert result.returncode == 7, result.stderr
    assert json.loads(result.stdout)["plan"]


@pytest.mark.long
def test_a_fault_of_ours_is_told_once(long: Path) -> None:
    setup = ended(end="raise ZeroDivisionError('ours')")
    with started("solve", long, "--json", "--address", "local", setup=setup) as process:
        output, errors = process.communicate(timeout=HANG_S)
        assert (process.returncode, output) == (1, "")
    assert errors.count("unexpected ZeroDivisionError: ours") == 1


@pytest.mark.long
def test_signals_are_passed_on(long: Path, tmp_path: Path) -> None:
    """As a supervisor passes on each of them: test_supervise.py."""
    number, out = signal.SIGTERM, tmp_path / "plan.json"
    with started("solve", long, "--json", "--out", out, "--address", "local") as process:
        wait_for(process, "   1  ")
        process.send_signal(number)
        output, _ = process.communicate(timeout=HANG_S)
        assert process.returncode == 128 + number
    assert json.loads(output)["stopped_by"] == "interrupt"
    assert piper_ray.load_plan(out, long_solve()).stages


def test_the_child_ends_with_its_parent(long: Path) -> None:
    with started("solve", long, "--json", "--address", "local") as process:
        wait_for(process, "   1  ")
        process.kill()
        process.communicate(timeout=HANG_S)  # to the end of all who have its streams


def test_exit_codes_are_those_of_the_command(tmp_path: Path) -> None:
    small = write_small(tmp_path)
    assert run("solve", small, "--address", "local").returncode == 0
    assert run("solve", small, "--address", "local", "--memory", "1B").returncode == 4
    assert run("solve", small, "--address", "local", "--workers", "none").returncode == 2


@pytest.mark.parametrize(
    ("arguments", "environment", "expected"),
    [
        (["solve", "x", "--address", "local"], {}, True),
        (["solve", "x", "--address=a:1"], {}, True),
        (["solve", "x"], {"RAY_ADDRESS": "a:1"}, True),
        (["solve", "x"], {"RAY_ADDRESS": ""}, False),
        (["solve", "x"], {}, False),
        (["solve", "x", "--address", "local", "--supervise"], {}, False),
        (["solve", "x", "--address", "local"], {outliving.SUPERVISED: "1"}, False),
        (["sweep", "x", "--storage", "y"], {}, True),
        (["sweep", "x", "--storage", "y", "--dry-run"], {}, False),
        (["info", "x"], {"RAY_ADDRESS": "a:1"}, False),
    ],
)
def test_which_commands_have_a_child(arguments: list[str], environment: dict[str, str], expected: bool) -> None:
    assert outliving.may_be_ended(arguments, environment) is expected


@pytest.mark.long
def test_processes_that_compile_end_with_the_command() -> None:
    with started("warm", "--processes", "1", loaded=False) as process:
        end = time.monotonic() + HANG_S
        while not (children := _children_of(process.pid)):
            assert time.monotonic() < end
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        process.wait(HANG_S)
        while left := [child for child in children if Path(f"/proc/{child}").exists()]:
            assert time.monotonic() < end, left
            time.sleep(0.05)


def _children_of(parent: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if path.read_text().rpartition(")")[2].split()[1] == str(parent):
                found.append(int(path.parent.name))
    return found


def _of_session(base: Path, program: str) -> int:
    """The process of the Ray that lies in a folder."""
    end = time.monotonic() + HANG_S
    while time.monotonic() < end:
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                line = path.read_bytes()
            except OSError:
                continue
            if Path(os.fsdecode(line.split(b"\0")[0])).name == program and os.fsencode(base) in line:
                return int(path.parent.name)
        time.sleep(0.05)
    raise AssertionError(f"there is no {program}")


def _until_at_work(base: Path) -> None:
    """Until a worker of the Ray that lies in a folder is there: before that a driver may go on without its raylet."""
    end = time.monotonic() + HANG_S
    while time.monotonic() < end:
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                title, environment = (path / "cmdline").read_bytes(), (path / "environ").read_bytes()
                if title.startswith(b"ray::Worker") and b"__init__" not in title and os.fsencode(base) in environment:
                    return
        time.sleep(0.05)
    raise AssertionError("no worker came")


def _on_ray(base: Path, tmp_path: Path) -> dict[str, str]:
    """All goes to workers. The GCS, which has ended, is waited for a little instead of a minute."""
    (tmp_path / "sitecustomize.py").write_text(TO_WORKERS)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    paths = {"PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT))), "RAY_TMPDIR": str(base)}
    return {**environment, **paths, "RAY_gcs_rpc_server_reconnect_timeout_s": "2"}


@pytest.mark.long
def test_the_end_of_a_real_ray_leaves_plan_and_bound(base: Path, tmp_path: Path) -> None:
    """Of its GCS; the tests below end a raylet."""
    instance = two_towers(400, devices=48, microbatches=96, memory_bytes=600.0)
    dump(instance, tmp_path / "long.json")
    out = tmp_path / "plan.json"
    options = ["--json", "--out", str(out), "--address", "local", "--workers", "1"]
    with subprocess.Popen(
        [sys.executable, "-m", "piper_ray", "solve", str(tmp_path / "long.json"), "--verbose", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=_on_ray(base, tmp_path),
    ) as process:
        try:
            wait_for(process, "plan (chain)")
            pid = _of_session(base, "gcs_server")
            _until_at_work(base)
            os.kill(pid, signal.SIGKILL)
            try:
                output, errors = process.communicate(timeout=HANG_S)
            except subprocess.TimeoutExpired:  # Ray does not always end whoever has nothing to ask of it
                process.terminate()
                output, errors = process.communicate(timeout=HANG_S)
        finally:
            process.kill()
    assert process.returncode == 7, errors
    document = json.loads(output)
    assert document["stopped_by"] in ("process lost", "interrupt")
    assert evaluate(instance, piper_ray.load_plan(out, instance)).time_per_sample_s == document["time_per_sample_s"]
    assert document["lower_bound_s"] > 0
    if document["stopped_by"] == "process lost":
        assert f"Ray's GCS on this machine (process {pid}) died" in errors


@pytest.mark.long
def test_the_end_of_a_real_ray_leaves_a_sweep_to_go_on(base: Path, tmp_path: Path) -> None:
    source, storage = write_sweep(tmp_path), tmp_path / "dataset"
    environment = _on_ray(base, tmp_path)
    (tmp_path / "sitecustomize.py").write_text(_SLOWLY)
    command = [sys.executable, "-m", "piper_ray", "sweep", str(source), "--storage", str(storage)]
    with subprocess.Popen(
        [*command, "--address", "local"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            wait_for(process, "at work")
            pid = _of_session(base, "raylet")
            os.kill(pid, signal.SIGKILL)
            output, errors = process.communicate(timeout=2 * HANG_S)
        finally:
            process.kill()
    assert process.returncode == 7, errors
    assert f"of {SMALL_POINTS} on record" in output
    told_by_parent = f"Ray's raylet on this machine (process {pid}) died, and with it the process that did the work"
    told_by_itself = "Ray on this machine has ended, and with it the connection to the cluster"
    assert told_by_parent in errors or told_by_itself in errors
    assert f"to go on: piper-ray sweep {source} --storage {storage} --address local --resume" in errors
    result = run("sweep", source, "--storage", storage, "--resume")
    assert result.returncode == 0, result.stderr
    assert piper_ray.read_dataset(storage).num_rows == SMALL_POINTS


# Only where Ray is loaded anyhow: in the driver.
_SLOWLY = """
import sys, time
if sys.argv[:1] == ["-m"]:
    from piper_ray.engine.backends.ray.calls import ClusterWorkers
    done = ClusterWorkers.done
    def told(*arguments):
        print("at work", file=sys.stderr, flush=True)
        ClusterWorkers.done = done
        return done(*arguments)
    ClusterWorkers.done = told
"""
