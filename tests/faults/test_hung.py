"""Workers that hang without dying: nobody waits for them."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.faults.driver import driving
from tests.faults.machines import ACTOR, Machines


def test_a_solve_goes_on_without_a_hung_worker(cluster: Machines, local_plan: bytes, tmp_path: Path) -> None:
    with driving(cluster, tmp_path) as driver:
        driver.until_all_join(3)
        cluster.signal_process(1, ACTOR, signal.SIGSTOP)
        assert driver.finish() == local_plan
        told = [note.partition(" is slow or hangs: ")[0] for note in driver.notes if "is slow or hangs" in note]
        assert cluster.name(1) in told
        assert len(told) == len(set(told)), "each once"
