"""A solve through the loss of a machine, of a network link and of the driver."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.faults.driver import driving
from tests.faults.machines import Machines


def test_one_killed_one_cut_off_and_driver_resumed(cluster: Machines, local_plan: bytes, tmp_path: Path) -> None:
    state = tmp_path / "state"
    with driving(cluster, tmp_path, "--workers", "3", "--checkpoint", str(state)) as driver:
        driver.until_all_join(3)
        cluster.kill(3)
        driver.until_note("is lost, 2 left")
        driver.until_level(150, evaluation=3)
        cluster.cut(2)
        driver.until_level(100, evaluation=4)
        driver.signal(signal.SIGKILL)
        assert driver.end() != 0
        assert not driver.out.exists()
    with driving(cluster, tmp_path, "--workers", "3", "--checkpoint", str(state)) as driver:
        driver.until_level(60, evaluation=4)
        driver.until_workers(1)
        cluster.heal(2)
        driver.until_workers(2)
        assert driver.finish() == local_plan
        assert driver.was_told(f"resumed from {state}")
