"""The head's machine is the driver's too, and it may be lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.driver import INCEPTION, driving
from tests.faults.machines import HEAD, LONG_S, Machines, machines


@pytest.fixture(scope="module")
def small_cluster() -> Iterator[Machines]:
    with machines(2) as cluster:
        yield cluster


def test_head_dies_under_a_supervised_solve(small_cluster: Machines, local_plan: bytes, tmp_path: Path) -> None:
    out, state = tmp_path / "plan.json", tmp_path / "state"
    options = ["--address", small_cluster.address, "--workers", "2", "--resume", str(state), "--out", str(out)]
    command = [sys.executable, "-m", "piper_ray", "solve", *INCEPTION, *options, "--supervise"]
    with (
        (tmp_path / "stdout").open("w+") as stdout,
        small_cluster.popen(HEAD, [*command, "--json"], stdout=stdout, stderr=subprocess.PIPE) as process,
    ):
        assert process.stderr is not None
        log = ""
        while "go to workers" not in log:
            line = process.stderr.readline()
            assert line, log
            log += line
        (driver,) = (
            pid for pid, line in small_cluster.processes(HEAD, "piper_ray solve").items() if "--supervise" not in line
        )
        os.kill(driver, signal.SIGSTOP)  # it cannot end before the fault
        small_cluster.kill_services_of_head()
        os.kill(driver, signal.SIGCONT)
        log += process.stderr.read()
        assert process.wait(LONG_S) == 0, log
    assert "it goes on from the checkpoint" in log
    assert out.read_bytes() == local_plan
    small_cluster.wait_for_machines(1, 2)
    small_cluster.assert_nothing_left()


def test_machine_of_the_driver_rebooted(small_cluster: Machines, local_plan: bytes, tmp_path: Path) -> None:
    state = tmp_path / "state"
    with driving(small_cluster, tmp_path, "--resume", str(state)) as driver:
        driver.until_all_join(2)
        driver.until_level(100, evaluation=4)
        small_cluster.kill(HEAD)
        assert driver.end() != 0
    small_cluster.start(HEAD)
    with driving(small_cluster, tmp_path, "--resume", str(state)) as driver:
        assert driver.finish() == local_plan
        assert driver.was_told(f"resumed from {state}")
    small_cluster.wait_for_machines(1, 2)
    small_cluster.assert_nothing_left()
