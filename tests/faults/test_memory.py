"""Ray kills workers when a machine runs out of memory: the user hears what happened, where, and what was asked for."""

from __future__ import annotations

import re
from pathlib import Path

from tests.faults.driver import driving
from tests.faults.machines import USUAL, Machines
from tests.faults.surroundings import Memory

_KILLED = r"ran out of memory \(.* in use\), so Ray killed it; it used [\d.]+ GB and had asked for 0\.[0-9]+ GB"


def test_a_solve_goes_on(cluster: Machines, local_plan: bytes, tmp_path: Path) -> None:
    memory = Memory(tmp_path)
    cluster.run({1: memory.setup, 2: USUAL, 3: USUAL})
    with driving(cluster, tmp_path) as driver:
        driver.until_all_join(3)
        memory.free(0.01)
        driver.until_note("is lost, 2 left")
        memory.free(0.9)
        driver.until_workers(3)
        assert driver.finish() == local_plan
        (note,) = [note for note in driver.notes if "is lost" in note]
        host = re.escape(cluster.name(1))
        assert re.fullmatch(
            rf"a worker on {host} is lost, 2 left; what it had goes to others: {host} {_KILLED}", note
        ), note
