"""Workers that hang without dying: nobody waits for them."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from piper_ray.sweep.run import run_sweep
from tests.faults.driver import driving
from tests.faults.machines import ACTOR, Machines
from tests.faults.sweeping import sweeping
from tests.sweep_support import content, write_small

SWEEP = """
[workloads]
chain = "chain.json"
[grid]
devices = "2..25"
microbatches = 6
memory = 40
bandwidth = 4
"""


@pytest.mark.parametrize("hanging", [1, 3])
def test_a_sweep_goes_on_without_workers_that_hang(cluster: Machines, tmp_path: Path, hanging: int) -> None:
    """One of three, and all of them."""
    source = write_small(tmp_path, SWEEP)
    run_sweep(source, tmp_path / "here")
    with sweeping(cluster, source, tmp_path / "cluster", hanging) as sweep:
        sweep.finish()
        assert len([path for path in tmp_path.iterdir() if path.name.isdigit()]) == hanging
        told = [text.partition(" is slow or hangs: ")[0] for text in sweep.warnings if " is slow or hangs: " in text]
        assert sorted(told) == sorted(set(told)), "once for each machine"
        assert set(told) <= {cluster.name(machine) for machine in (1, 2, 3)}
        assert len(told) == hanging
    assert content(tmp_path / "cluster") == content(tmp_path / "here")


def test_a_solve_goes_on_without_a_hung_worker(cluster: Machines, local_plan: bytes, tmp_path: Path) -> None:
    with driving(cluster, tmp_path) as driver:
        driver.until_all_join(3)
        cluster.signal_process(1, ACTOR, signal.SIGSTOP)
        assert driver.finish() == local_plan
        notes = [note for note in driver.notes if "is slow or hangs" in note]
        assert [cluster.name(1) in note for note in notes] == [True]
