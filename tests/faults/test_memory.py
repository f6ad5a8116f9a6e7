"""Ray kills workers when a machine runs out of memory: the user hears what happened, where, and what was asked for.

Nobody waits for a worker that hangs without dying, which the same solve meets afterwards.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path

from tests.faults.driver import driving
from tests.faults.machines import ACTOR, USUAL, Machines
from tests.faults.surroundings import Memory

_KILLED = r"ran out of memory \(.* in use\), so Ray killed it; it used [\d.]+ GB and had asked for 0\.[0-9]+ GB"


def test_a_solve_goes_on_after_one_and_without_one_that_hangs(
    unrepaired: Machines, local_plan: bytes, tmp_path: Path
) -> None:
    cluster, memory = unrepaired, Memory(tmp_path)
    cluster.run({1: USUAL, 2: USUAL, 3: memory.setup})
    with driving(cluster, tmp_path) as driver:
        driver.until_all_join(3)
        memory.free(0.01)
        driver.until_note("is lost, 2 left")
        memory.free(0.9)
        driver.until_workers(3)
        cluster.signal_process(1, ACTOR, signal.SIGSTOP)
        assert driver.finish() == local_plan
    (note,) = [note for note in driver.notes if "is lost" in note]
    host = re.escape(cluster.name(3))
    assert re.fullmatch(rf"a worker on {host} is lost, 2 left; what it had goes to others: {host} {_KILLED}", note), (
        note
    )
    told = [note.partition(" is slow or hangs: ")[0] for note in driver.notes if "is slow or hangs" in note]
    assert cluster.name(1) in told
    assert len(told) == len(set(told)), "each once"
