"""Solves of one workload on several numbers of devices, whatever the schedule: which search they are for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from piper_ray.engine.chunks.solve import ChunkSeries
from piper_ray.engine.flush.solve import FlushSeries
from piper_ray.engine.layers import LayerSeries
from piper_ray.engine.request import SolveRequest, is_by_degrees
from piper_ray.model.schedule import CHUNKED, Schedule
from piper_ray.model.solution import Solution


class Series(Protocol):
    """Solves that share what they can. preparation_s: that took so long to make, since somebody asked."""

    preparation_s: float

    def solve(self, request: SolveRequest) -> Solution:
        """Of the same workload, on as many devices as the first request or fewer."""
        ...


def new_series(first: SolveRequest, schedules: Sequence[Schedule]) -> Series:
    """first: on the most devices of all. schedules: of one name, with the numbers of chunks that may be.

    Raises UsageError for constraints that plans for the schedule cannot keep, LimitError if a lattice does not fit.
    """
    if schedules[0].name in CHUNKED:
        return ChunkSeries(first, schedules)
    if is_by_degrees(schedules[0], first.restrictions):
        return FlushSeries(first, schedules[0])
    first.restrictions.require_stages_alone("frontier")
    return LayerSeries()
