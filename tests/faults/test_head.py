"""The head's machine is the driver's too, and it may be lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.driver import INCEPTION
from tests.faults.machines import HEAD, LONG_S, Machines, machines
from tests.faults.surroundings import TO_WORKERS


@pytest.fixture(scope="module")
def cluster() -> Iterator[Machines]:
    with machines(2) as cluster:
        yield cluster


@pytest.mark.long
def test_head_dies_under_a_supervised_solve(cluster: Machines, local_plan: bytes, tmp_path: Path) -> None:
    out, state = tmp_path / "plan.json", tmp_path / "state"
    options = ["--address", cluster.address, "--workers", "2", "--checkpoint", str(state), "--out", str(out)]
    command = [sys.executable, "-m", "piper_ray", "solve", *INCEPTION, *options, "--supervise"]
    (tmp_path / "sitecustomize.py").write_text(TO_WORKERS)
    paths = [str(tmp_path), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    variable = f"PYTHONPATH={os.pathsep.join(filter(None, paths))}"
    with (
        (tmp_path / "stdout").open("w+") as stdout,
        cluster.popen(HEAD, ["env", variable, *command, "--json"], stdout=stdout, stderr=subprocess.PIPE) as process,
    ):
        assert process.stderr is not None
        log = ""
        while "go to workers" not in log:
            line = process.stderr.readline()
            assert line, log
            log += line
        (driver,) = (
            pid for pid, line in cluster.processes(HEAD, "piper_ray solve").items() if "--supervise" not in line
        )
        os.kill(driver, signal.SIGSTOP)  # it cannot end before the fault
        cluster.kill_services_of_head()
        os.kill(driver, signal.SIGCONT)
        log += process.stderr.read()
        assert process.wait(LONG_S) == 0, log
    assert "it goes on from the checkpoint" in log
    assert out.read_bytes() == local_plan
    for machine in (1, 2):  # they would take most of a minute to find the new head
        cluster.kill(machine)
    cluster.assert_nothing_left()
