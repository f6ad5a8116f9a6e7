"""The events as a trace that Perfetto and chrome://tracing open: a track for each rank, its memory, the critical path.

Chrome's trace event format, JSON object form: times in microseconds, "X" a stretch, "M" a name, "C" a counter, "s" and
"f" the ends of an arrow.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np

from piper_ray.simulate.actions import ActionKind
from piper_ray.simulate.result import Simulation
from piper_ray.storage.files import write_atomically

Event = dict[str, object]

_US = 1e6
_PASSES, _BATCH = 0, 1
"""Tracks of a rank: its passes, and what it does once a batch."""

_CATEGORIES = {
    ActionKind.F: "forward",
    ActionKind.B: "backward",
    ActionKind.I: "backward input",
    ActionKind.W: "backward weight",
}


def chrome_trace(simulation: Simulation) -> dict[str, object]:
    """The events of a simulation in Chrome's trace format, which Perfetto opens: the whole document."""
    return {
        "traceEvents": [event for part in (_names, _passes, _batch, _memory, _arrows) for event in part(simulation)],
        "displayTimeUnit": "ms",
        "otherData": {
            "schedule": simulation.schedule.name.value,
            "step_s": simulation.step_s,
            "microbatches": simulation.microbatches,
            "pipelines": simulation.pipelines,
            "notes": list(simulation.notes),
        },
    }


def write_trace(simulation: Simulation, path: str | Path) -> None:
    """Writes ``chrome_trace`` as a line of JSON, whole or not at all. Raises UsageError if that cannot be done."""
    write_atomically(Path(path), json.dumps(chrome_trace(simulation), separators=(",", ":"), allow_nan=False) + "\n")


def _names(simulation: Simulation) -> Iterator[Event]:
    for number, rank in enumerate(simulation.ranks):
        replica = f", replica {rank.replica}" if max(simulation.timeline.layout.replicas) > 1 else ""
        yield _meta(number, "process_name", {"name": f"rank {number}: {rank.name}{replica}"})
        yield _meta(number, "process_labels", {"labels": f"{rank.devices} device{'s' if rank.devices > 1 else ''}"})
        yield _meta(number, "process_sort_index", {"sort_index": number})
        yield _meta(number, "thread_name", {"name": "passes"}, _PASSES)
        if simulation.all_reduces:
            yield _meta(number, "thread_name", {"name": "all-reduce and optimizer"}, _BATCH)


def _meta(rank: int, name: str, arguments: Event, thread: int = 0) -> Event:
    return {"name": name, "ph": "M", "pid": rank, "tid": thread, "args": arguments}


def _passes(simulation: Simulation) -> Iterator[Event]:
    timeline = simulation.timeline
    chunks = simulation.schedule.v
    for action, rank in enumerate(timeline.rank_of_action.tolist()):
        kind, stage = ActionKind(timeline.kind[action]), int(timeline.stage[action])
        microbatch = int(timeline.microbatch[action])
        start_s, end_s = float(timeline.start_s[action]), float(timeline.end_s[action])
        yield {
            "name": f"{kind.name}{microbatch}" + (f" stage {stage + 1}" if chunks > 1 else ""),
            "cat": _CATEGORIES[kind],
            "ph": "X",
            "pid": rank,
            "tid": _PASSES,
            "ts": start_s * _US,
            "dur": (end_s - start_s) * _US,
            "args": {
                "microbatch": microbatch,
                "stage": stage + 1,
                "communication_us": float(timeline.communication_s[action]) * _US,
            },
        }


def _batch(simulation: Simulation) -> Iterator[Event]:
    for name, intervals in (("all-reduce", simulation.all_reduces), ("optimizer", simulation.optimizer_steps)):
        for interval in intervals:
            if interval.end_s > interval.start_s:
                yield {
                    "name": name,
                    "cat": name,
                    "ph": "X",
                    "pid": interval.rank,
                    "tid": _BATCH,
                    "ts": interval.start_s * _US,
                    "dur": (interval.end_s - interval.start_s) * _US,
                }


def _memory(simulation: Simulation) -> Iterator[Event]:
    """A counter for each rank; of changes at one moment the last counts."""
    for rank in range(len(simulation.ranks)):
        steps = simulation.memory(rank)
        last_of_moment = np.append(steps.time_s[1:] > steps.time_s[:-1], True)
        for time_s, size in zip(steps.time_s[last_of_moment], steps.bytes[last_of_moment], strict=True):
            yield {
                "name": "memory",
                "ph": "C",
                "pid": rank,
                "tid": 0,
                "ts": float(time_s) * _US,
                "args": {"bytes": float(size)},
            }


def _arrows(simulation: Simulation) -> Iterator[Event]:
    """Along the critical path, from each rank to the next."""
    passes = [part for part in simulation.critical_path if part.stage is not None]
    for number, (before, after) in enumerate(pairwise(passes)):
        if before.rank == after.rank:
            continue
        common: Event = {"name": "critical path", "cat": "critical path", "id": number, "tid": _PASSES}
        # Inside both stretches: an arrow belongs to the one that encloses its end.
        yield {**common, "ph": "s", "pid": before.rank, "ts": (before.start_s + before.end_s) / 2 * _US}
        yield {**common, "ph": "f", "bp": "e", "pid": after.rank, "ts": (after.start_s + after.end_s) / 2 * _US}
