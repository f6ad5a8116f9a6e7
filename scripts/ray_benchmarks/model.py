"""Time against machines, from what was measured on one. No I/O: every constant comes in.

T(n machines of c workers) = driver + sum over batches of [ work / chunks * ceil(chunks / (n c))
                             + round trip + chunks * call + what n - 1 machines fetch ]
with as many chunks as the backend's own pacing makes for n c workers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from piper_ray.engine.backends.ray.pacing import Pacing
from scripts.ray_benchmarks.meter import BatchRecord
from scripts.ray_benchmarks.results import Run

CALL_HERE_S, CALL_ACROSS_S = 0.67e-3, 1.27e-3
"""A call and its answer, to another process and to another machine."""

_FETCH_BYTES = 200e6
_FETCH_S = ((1, 0.38), (2, 0.58), (3, 0.74))
"""Pairs of a number of machines that fetch one table of 200 MB from the driver, and the seconds until the last one has
it."""

LEAST_CALL_S = 0.18e-3
"""Seconds of one call among many."""

NODES = tuple(2**power for power in range(9))


@dataclass(frozen=True)
class Constants:
    """round_trip_s: of a batch beyond its work. call_s: for each chunk, of the driver.

    fetch_s_per_byte, fetch_s_per_byte_and_node: until the last of several machines has a table.
    """

    round_trip_s: float
    call_s: float
    fetch_s_per_byte: float
    fetch_s_per_byte_and_node: float

    def across(self) -> Constants:
        """The constants for another machine instead of another process."""
        round_trip_s = self.round_trip_s + CALL_ACROSS_S - CALL_HERE_S
        return Constants(round_trip_s, self.call_s, self.fetch_s_per_byte, self.fetch_s_per_byte_and_node)


@dataclass(frozen=True)
class Prediction:
    """Seconds of a search and their parts. work_s: until the last worker is done, so idle ones count there."""

    nodes: int
    workers: int
    work_s: float
    driver_s: float
    calls_s: float
    fetched_s: float

    @property
    def seconds(self) -> float:
        return self.work_s + self.driver_s + self.calls_s + self.fetched_s

    @property
    def share(self) -> float:
        """The share of time that is not workers' work, including the driver's own part."""
        return 1.0 - self.work_s / self.seconds


def fit(batches: Sequence[BatchRecord]) -> Constants:
    """Round trip and call from batches of one worker, by least squares; the fetches from the figures above.

    A call costs at least what Ray needs for it: a worker has its next chunk already while it works on one.
    """
    beyond_s = np.array([batch.seconds - batch.worked_s for batch in batches])
    chunks = np.array([batch.chunks for batch in batches], np.float64)
    call_s = LEAST_CALL_S
    if np.unique(chunks).size > 1:
        call_s = max(call_s, float(np.polyfit(chunks, beyond_s, 1)[0]))
    round_trip_s = max(CALL_HERE_S, float(np.median(beyond_s - call_s * chunks)))
    nodes, seconds = np.array(_FETCH_S).T
    for_each_node, for_any = np.polyfit(nodes, seconds, 1) / _FETCH_BYTES
    return Constants(round_trip_s, call_s, float(for_any), float(for_each_node))


def predict(run: Run, constants: Constants, nodes: int, workers_per_node: int, slower_work: float = 1.0) -> Prediction:
    """The search of ``run``, measured with one worker, on ``nodes`` machines, one of them the driver's.

    slower_work: what a chunk takes with all of a machine's workers busy, against one alone.
    """
    workers, pacing = nodes * workers_per_node, Pacing()
    work_s = calls_s = fetched_s = 0.0
    for batch in run.batches:
        worked_s = batch.worked_s * slower_work
        chunks = pacing.chunks(worked_s, workers, workers, batch.downsets)
        work_s += worked_s / chunks * math.ceil(chunks / workers)
        calls_s += constants.round_trip_s + constants.call_s * chunks
        if nodes > 1 and batch.put_bytes:
            per_byte = constants.fetch_s_per_byte + constants.fetch_s_per_byte_and_node * (nodes - 1)
            fetched_s += batch.put_bytes * per_byte
    return Prediction(nodes, workers, work_s, run.driver_s, calls_s, fetched_s)


def crossing(run: Run, constants: Constants, workers_per_node: int, most_nodes: int = NODES[-1]) -> Prediction | None:
    """The fewest machines on which more than half of the time is no work of workers; None: not up to ``most_nodes``."""
    predictions = (predict(run, constants, nodes, workers_per_node) for nodes in range(1, most_nodes + 1))
    return next((found for found in predictions if found.share > 0.5), None)
