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


@pytest.mark.long
def test_a_sweep_goes_on_when_all_workers_hang(cluster: Machines, tmp_path: Path) -> None:
    """Where one of two does: test_sweep_ray.py."""
    source = write_small(tmp_path, SWEEP)
    run_sweep(source, tmp_path / "here")
    with sweeping(cluster, source, tmp_path / "cluster", hanging=3, joined=3) as sweep:
        sweep.finish()
        told = [text.partition(" is slow or hangs: ")[0] for text in sweep.warnings if "is slow or hangs" in text]
        assert all((tmp_path / str(number)).exists() for number in range(3)), "all three hang"
        # The last resort, a further worker on the driver's machine, may be done before the others are late.
        assert 0 < len(told) == len(set(told)), "each once"
        assert set(told) <= {cluster.name(machine) for machine in (1, 2, 3)}
    assert content(tmp_path / "cluster") == content(tmp_path / "here")


def test_a_solve_goes_on_without_a_hung_worker(cluster: Machines, local_plan: bytes, tmp_path: Path) -> None:
    with driving(cluster, tmp_path) as driver:
        driver.until_all_join(3)
        cluster.signal_process(1, ACTOR, signal.SIGSTOP)
        assert driver.finish() == local_plan
        told = [note.partition(" is slow or hangs: ")[0] for note in driver.notes if "is slow or hangs" in note]
        assert cluster.name(1) in told
        assert len(told) == len(set(told)), "each once"
