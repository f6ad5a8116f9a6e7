"""The trace against the rules of Chrome's trace event format, and against the simulation that it tells of."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from typing import Any

import pytest

from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.simulate.result import Simulation
from piper_ray.simulate.run import SimulationOptions, Transfers, simulate
from piper_ray.simulate.trace import chrome_trace
from tests.simulate_support import GIB, chain, cut

Event = dict[str, Any]


def _simulated(name: ScheduleName) -> Simulation:
    instance = chain([1.0, 2.0, 1.5, 1.0], microbatches=16, weights_bytes=GIB / 8, edge_bytes=GIB / 8)
    options = SimulationOptions(optimizer_s=0.1, latency_s=0.01, transfers=Transfers.OVERLAPPED)
    return simulate(instance, cut([1] * 4, 2), Schedule(name), options=options)


def _events(simulation: Simulation) -> list[Event]:
    """As a reader of the file gets them."""
    document = json.loads(json.dumps(chrome_trace(simulation), allow_nan=False))
    assert set(document) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert document["displayTimeUnit"] in ("ms", "ns")
    events: list[Event] = document["traceEvents"]
    return events


@pytest.fixture(params=ScheduleName, scope="module")
def simulation(request: pytest.FixtureRequest) -> Simulation:
    return _simulated(request.param)


def test_every_event_has_what_its_kind_needs(simulation: Simulation) -> None:
    needed = {
        "M": {"name", "pid", "tid", "args"},
        "X": {"name", "cat", "pid", "tid", "ts", "dur"},
        "C": {"name", "pid", "ts", "args"},
        "s": {"name", "cat", "id", "pid", "tid", "ts"},
        "f": {"name", "cat", "id", "pid", "tid", "ts", "bp"},
    }
    for event in _events(simulation):
        assert needed[event["ph"]] <= event.keys()
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        for key in ("ts", "dur"):
            if key in event:
                assert math.isfinite(event[key])
                assert event[key] >= 0
        if event["ph"] == "M":
            assert event["name"] in {"process_name", "process_labels", "process_sort_index", "thread_name"}
        if event["ph"] == "C":
            assert all(isinstance(value, (int, float)) for value in event["args"].values())
        if event["ph"] == "f":
            assert event["bp"] == "e"


def test_every_rank_has_a_named_track_and_a_memory_counter(simulation: Simulation) -> None:
    events = _events(simulation)
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names[0] == f"rank 0: {simulation.ranks[0].name}"
    assert set(names) == set(range(len(simulation.ranks)))
    counters = {event["pid"] for event in events if event["ph"] == "C"}
    assert counters == set(names)
    tracks = {(event["pid"], event["tid"]) for event in events if event["ph"] == "X"}
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert tracks <= named


def test_stretches_of_a_track_follow_each_other(simulation: Simulation) -> None:
    tracks: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in _events(simulation):
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    for events in tracks.values():
        end_us = 0.0
        for event in sorted(events, key=lambda event: float(event["ts"])):
            assert event["ts"] >= end_us - 1e-6
            end_us = event["ts"] + event["dur"]


def test_passes_are_those_of_the_simulation(simulation: Simulation) -> None:
    passes = [event for event in _events(simulation) if event["ph"] == "X" and "stage" in event.get("args", {})]
    assert len(passes) == len(simulation.timeline)
    assert sum(event["dur"] for event in passes) == pytest.approx(
        1e6 * float((simulation.timeline.end_s - simulation.timeline.start_s).sum())
    )


def test_the_memory_of_a_rank_reaches_its_peak_unless_it_is_over_at_once(simulation: Simulation) -> None:
    for number, rank in enumerate(simulation.ranks):
        counters = [event for event in _events(simulation) if event["ph"] == "C" and event["pid"] == number]
        assert max(event["args"]["bytes"] for event in counters) == rank.peak_memory_bytes
        times_us = [event["ts"] for event in counters]
        assert times_us == sorted(set(times_us))


def test_arrows_begin_and_end_within_passes(simulation: Simulation) -> None:
    events = _events(simulation)
    arrows: dict[int, dict[str, Event]] = defaultdict(dict)
    for event in events:
        if event["ph"] in ("s", "f"):
            assert event["ph"] not in arrows[event["id"]]
            arrows[event["id"]][event["ph"]] = event
    assert bool(arrows) == (simulation.promised_s is None)
    for arrow in arrows.values():
        assert arrow["s"]["ts"] <= arrow["f"]["ts"]
        assert arrow["s"]["pid"] != arrow["f"]["pid"]
        for end in arrow.values():
            assert any(
                one["ph"] == "X"
                and (one["pid"], one["tid"]) == (end["pid"], end["tid"])
                and one["ts"] <= end["ts"] <= one["ts"] + one["dur"]
                for one in events
            )


def test_the_step_ends_with_the_last_event() -> None:
    simulation = _simulated(ScheduleName.ZB_H1)
    ends_us = [event["ts"] + event["dur"] for event in _events(simulation) if event["ph"] == "X"]
    assert max(ends_us) == pytest.approx(1e6 * simulation.step_s)
