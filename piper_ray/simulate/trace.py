"""The events as a trace for Perfetto and chrome://tracing: a track for each rank, its memory, the critical path.

Chrome's trace event format, JSON object form: times in microseconds, "X" an interval, "M" a name, "C" a counter, "s"
and "f" the ends of an arrow.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from piper_ray.simulate.result import PathPart, Simulation, pass_of
from piper_ray.storage.files import write_atomically

Event = dict[str, object]

_US = 1e6
_PASSES, _BATCH = 0, 1
"""Tracks of a rank: its passes, and its work once a batch."""

_CATEGORIES = {
    "F": "forward",
    "B": "backward",
    "I": "backward input",
    "W": "backward weight",
}


def chrome_trace(simulation: Simulation) -> dict[str, object]:
    """The whole document of a simulation in Chrome's trace format, which Perfetto opens.

    >>> import piper_ray
    >>> bert = piper_ray.estimate("bert-large", "A100-80")
    >>> solution = piper_ray.solve(bert, threads=1)
    >>> simulation = piper_ray.simulate(bert, solution.plan)
    >>> sorted(piper_ray.chrome_trace(simulation))
    ['displayTimeUnit', 'otherData', 'traceEvents']
    """
    return document(
        simulation_events(simulation, range(len(simulation.ranks))),
        {
            "schedule": simulation.schedule.name.value,
            "step_s": simulation.step_s,
            "microbatches": simulation.microbatches,
            "pipelines": simulation.pipelines,
            "notes": list(simulation.notes),
        },
    )


def write_trace(simulation: Simulation, path: str | Path) -> None:
    """Writes ``chrome_trace`` as one line of JSON, completely or not at all. Raises UsageError if it cannot be written.

    >>> import piper_ray
    >>> bert = piper_ray.estimate("bert-large", "A100-80")
    >>> solution = piper_ray.solve(bert, threads=1)
    >>> simulation = piper_ray.simulate(bert, solution.plan)
    >>> piper_ray.write_trace(simulation, "trace.json")
    """
    write_document(chrome_trace(simulation), path)


def document(events: Iterable[Event], facts: Event) -> dict[str, object]:
    """A trace of these events. facts: data about the trace as a whole."""
    return {"traceEvents": list(events), "displayTimeUnit": "ms", "otherData": facts}


def write_document(trace: dict[str, object], path: str | Path) -> None:
    """Writes one line of JSON, completely or not at all. Raises UsageError if it cannot be written."""
    write_atomically(Path(path), json.dumps(trace, separators=(",", ":"), allow_nan=False) + "\n")


def simulation_events(simulation: Simulation, tracks: Sequence[int], prefix: str = "") -> Iterator[Event]:
    """All events of a simulation. tracks: the number of each rank's track. prefix: put before the names of tracks."""
    yield from _names(simulation, tracks, prefix)
    for part in (_passes, _batch, _memory, _arrows):
        yield from part(simulation, tracks)


def track_names(track: int, name: str, devices: int, *, batch: bool) -> Iterator[Event]:
    """Events that name a rank's track. batch: whether it also shows the rank's work once a batch."""
    yield _meta(track, "process_name", {"name": name})
    yield _meta(track, "process_labels", {"labels": f"{devices} device{'s' if devices > 1 else ''}"})
    yield _meta(track, "process_sort_index", {"sort_index": track})
    yield _meta(track, "thread_name", {"name": "passes"}, _PASSES)
    if batch:
        yield _meta(track, "thread_name", {"name": "all-reduce and optimizer"}, _BATCH)


def stretch_event(track: int, part: PathPart, chunks: int) -> Event:
    """A pass from start to end, or a rank's work once a batch. chunks: the number of stages on the rank."""
    event: Event = {
        "name": part.what,
        "cat": _CATEGORIES.get(part.what, part.what),
        "ph": "X",
        "pid": track,
        "tid": _BATCH,
        "ts": part.start_s * _US,
        "dur": part.duration_s * _US,
    }
    if part.stage is None or part.microbatch is None:
        return event
    name = f"{part.what}{part.microbatch}" + (f" stage {part.stage + 1}" if chunks > 1 else "")
    said = {
        "microbatch": part.microbatch,
        "stage": part.stage + 1,
        "communication_us": part.communication_s * _US,
    }
    return {**event, "name": name, "tid": _PASSES, "args": said}


def _names(simulation: Simulation, tracks: Sequence[int], prefix: str) -> Iterator[Event]:
    for number, rank in enumerate(simulation.ranks):
        replica = f", replica {rank.replica}" if max(simulation.timeline.layout.replicas) > 1 else ""
        name = f"{prefix}rank {number}: {rank.name}{replica}"
        yield from track_names(tracks[number], name, rank.devices, batch=bool(simulation.all_reduces))


def _meta(rank: int, name: str, arguments: Event, thread: int = 0) -> Event:
    return {"name": name, "ph": "M", "pid": rank, "tid": thread, "args": arguments}


def _passes(simulation: Simulation, tracks: Sequence[int]) -> Iterator[Event]:
    for action, rank in enumerate(simulation.timeline.rank_of_action.tolist()):
        yield stretch_event(tracks[rank], pass_of(simulation.timeline, action), simulation.schedule.v)


def _batch(simulation: Simulation, tracks: Sequence[int]) -> Iterator[Event]:
    for name, intervals in (("all-reduce", simulation.all_reduces), ("optimizer", simulation.optimizer_steps)):
        for interval in intervals:
            part = PathPart(interval.rank, name, None, None, interval.start_s, interval.end_s)
            if part.duration_s > 0.0:
                yield stretch_event(tracks[interval.rank], part, simulation.schedule.v)


def _memory(simulation: Simulation, tracks: Sequence[int]) -> Iterator[Event]:
    """A counter for each rank; if memory changes several times at one moment, the last value counts."""
    for rank in range(len(simulation.ranks)):
        steps = simulation.memory(rank)
        last_of_moment = np.append(steps.time_s[1:] > steps.time_s[:-1], True)
        for time_s, size in zip(steps.time_s[last_of_moment], steps.bytes[last_of_moment], strict=True):
            yield {
                "name": "memory",
                "ph": "C",
                "pid": tracks[rank],
                "tid": 0,
                "ts": float(time_s) * _US,
                "args": {"bytes": float(size)},
            }


def _arrows(simulation: Simulation, tracks: Sequence[int]) -> Iterator[Event]:
    """Arrows along the critical path, from each rank to the next."""
    passes = [part for part in simulation.critical_path if part.stage is not None]
    for number, (before, after) in enumerate(pairwise(passes)):
        if before.rank == after.rank:
            continue
        common: Event = {"name": "critical path", "cat": "critical path", "id": number, "tid": _PASSES}
        # Both ends lie inside their intervals, since an arrow belongs to the interval that encloses its end.
        yield {**common, "ph": "s", "pid": tracks[before.rank], "ts": (before.start_s + before.end_s) / 2 * _US}
        yield {**common, "ph": "f", "bp": "e", "pid": tracks[after.rank], "ts": (after.start_s + after.end_s) / 2 * _US}
