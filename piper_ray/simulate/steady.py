"""The steady state of an asynchronous pipeline, found by simulating until it repeats itself; the rate that asynchronous
1F1B sustains, and the least microbatches in flight that sustain the slowest stage's rate.

Every replica of a stage runs y forward passes, then B, F, B, ... . So microbatches k and k + 1 meet the same
constraints one microbatch apart, whichever replicas run them. An endless pipeline is therefore a graph with two nodes
per stage, F and B, whose arcs say "at least this many seconds after, this many microbatches later":

    F(j, k) -> F(j+1, k)        B(j+1, k) -> B(j, k)        transfers from one stage to the next
    F(j, k + (y-1) d) -> B(j, k)        B(j, k) -> F(j, k + y d)        the order of the list, d replicas in turn

The time per microbatch is the largest ratio of seconds to microbatches over all cycles (Cohen et al., 1985, on timed
event graphs). A stage alone has the cycle F, B, F: its seconds over d. Two neighbours with different d have a cycle in
which the second's backward pass waits for its (y-1) d-th next forward pass, which the first has not begun. This is why
y = ceil(s / d) is not enough with round-robin replicas.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, inf, lcm

import numpy as np

from piper_ray.simulate.actions import ActionKind
from piper_ray.simulate.kernels.events import Floats, Integers, gaining_circle
from piper_ray.simulate.stages import Hop
from piper_ray.simulate.timeline import SimulatedRanks, Timeline

_TOLERANCE = 1e-9
_LONGEST_PERIOD = 1_000
_DOUBLINGS = 7
_MOST_ACTIONS = 3_000_000
_MOST_TRIALS = 20_000
_MOST_IN_FLIGHT = 10_000
_NOBODY = -1


@dataclass(frozen=True)
class SteadyState:
    """microbatch_s: long-run time from one microbatch to the next. window_s: whole periods of the timeline.
    periodic: whether a period was found; if not, microbatch_s is the average over the second half of the longest
    run."""

    timeline: Timeline
    microbatch_s: float
    window_s: tuple[float, float]
    periodic: bool


def steady_state(run: Callable[[int], Timeline], placed: SimulatedRanks, in_flight: Sequence[int]) -> SteadyState:
    """run: returns the timeline of a number of microbatches. The end of a run is left out, because the pipeline
    drains."""
    depth = max(y * d for y, d in zip(in_flight, placed.replicas, strict=True))
    microbatches = 6 * depth + 96
    for _ in range(_DOUBLINGS):
        timeline = run(microbatches)
        left_s = timeline.ends_s(ActionKind.B, 0)[: microbatches - depth]
        period = _period(left_s)
        if period is not None or 2 * len(timeline) > _MOST_ACTIONS:
            break
        microbatches *= 2
    last = len(left_s) - 1
    # Whole periods; if the run is long enough, also equally many microbatches for each replica of a stage.
    turns = lcm(period or 1, *placed.replicas)
    unit = turns if turns <= last // 2 else period or 1
    count = last // 2 // unit * unit
    window_s = float(left_s[last - count]), float(left_s[last])
    return SteadyState(timeline, (window_s[1] - window_s[0]) / count, window_s, period is not None)


def _period(left_s: Floats) -> int | None:
    """The least number of microbatches after which the last two thirds of the times repeat, at least three times."""
    tail_s = left_s[len(left_s) // 3 :]
    allowed_s = _TOLERANCE * max(float(left_s[-1]), 0.0)
    for period in range(1, min(_LONGEST_PERIOD, len(tail_s) // 4) + 1):
        steps_s = tail_s[period:] - tail_s[:-period]
        if float(steps_s.max() - steps_s.min()) <= allowed_s:
            return period
    return None


@dataclass(frozen=True)
class Stream:
    """An endless asynchronous pipeline. For each stage: the seconds of both passes of a microbatch on one replica, and
    the number of replicas. hops: transfers with all the time that they take."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    replicas: tuple[int, ...]
    hops: tuple[Hop, ...]

    @property
    def promised_s(self) -> float:
        """The time per microbatch that Piper promises: that of the slowest stage."""
        return max((f + b) / d for f, b, d in zip(self.forward_s, self.backward_s, self.replicas, strict=True))


def rule_in_flight(replicas: Sequence[int]) -> tuple[int, ...]:
    """For each stage ceil(s / d), where s is the sum of d over this stage and all later ones (PipeDream)."""
    return tuple(-(-sum(replicas[stage:]) // d) for stage, d in enumerate(replicas))


def sustained_s(stream: Stream, in_flight: Sequence[int]) -> float:
    """Long-run seconds per microbatch; inf if the pipeline stops, because stages wait for each other."""
    rate_s = stream.promised_s
    arcs = _arcs(stream)
    later = arcs.later(in_flight)
    while True:
        circle = _slower_circle(arcs, later, rate_s)
        if not len(circle):
            return rate_s
        seconds, microbatches = float(arcs.seconds[circle].sum()), int(later[circle].sum())
        if microbatches <= 0:
            return inf
        rate_s = max(seconds / microbatches, rate_s * (1.0 + _TOLERANCE))


def least_in_flight(stream: Stream, at_least: Sequence[int] = ()) -> tuple[int, ...] | None:
    """For each stage the y, with the least sum, for which the slowest stage sets the rate. at_least: lower limits of y.

    A cycle that is too slow only gets faster where it passes from a stage's backward pass to a later forward pass (the
    arcs with + y d), so one of these y must grow. The search starts from a y that every pipeline needs, tries each such
    increase, and takes the least sum first; it therefore ends with a least sum. None if only absurdly large numbers
    would do, because transfers take far longer than passes, or if the search was too long.
    """
    rate_s = stream.promised_s
    start = _least_conceivable(stream, rate_s)
    if start is None:
        return None
    if at_least:
        start = tuple(map(max, start, at_least))
    heap = [(sum(start), start)]
    seen = {start}
    arcs = _arcs(stream)
    for _ in range(_MOST_TRIALS):
        _, in_flight = heapq.heappop(heap)
        circle = _slower_circle(arcs, arcs.later(in_flight), rate_s)
        if not len(circle):
            return in_flight
        for stage in sorted(set(arcs.keeps[circle].tolist()) - {_NOBODY}):
            more = (*in_flight[:stage], in_flight[stage] + 1, *in_flight[stage + 1 :])
            if more not in seen:
                seen.add(more)
                heapq.heappush(heap, (sum(more), more))
    return None


def _least_conceivable(stream: Stream, rate_s: float) -> tuple[int, ...] | None:
    """A lower bound on y: a microbatch that never waits is in flight from its forward to its backward pass, while
    others enter at the promised rate."""
    stages = len(stream.replicas)
    way_s = [0.0] * (stages + 1)  # from the start of F to the end of B, along the chain of stages
    for stage in reversed(range(stages)):
        between = sum(h.forward_s + h.backward_s for h in stream.hops if (h.source, h.target) == (stage, stage + 1))
        way_s[stage] = stream.forward_s[stage] + stream.backward_s[stage] + between + way_s[stage + 1]
    if rate_s <= 0.0:
        return None if way_s[0] > 0.0 else (1,) * stages
    needed = [way_s[stage] / (d * rate_s) for stage, d in enumerate(stream.replicas)]
    if max(needed) > _MOST_IN_FLIGHT:
        return None
    return tuple(max(1, ceil(y * (1.0 - _TOLERANCE))) for y in needed)


@dataclass(frozen=True, eq=False)
class _CycleArcs:
    """The arcs of the graph: a pass starts at least ``seconds`` after a pass of an earlier microbatch.

    Arrays by arc: transfers, then two arcs for each stage. source, target: passes; 2 j is F of stage j, 2 j + 1 is B.
    keeps: the stage whose y allows the start. replicas: by stage.
    """

    source: Integers
    target: Integers
    seconds: Floats
    keeps: Integers
    replicas: Integers

    def later(self, in_flight: Sequence[int]) -> Integers:
        """How many microbatches later the target of each arc is, with these numbers in flight."""
        y, d = np.array(in_flight, np.int64), self.replicas
        of_stages = np.stack([-(y - 1) * d, y * d], axis=1).ravel()
        return np.concatenate([np.zeros(len(self.source) - len(of_stages), np.int64), of_stages])


def _arcs(stream: Stream) -> _CycleArcs:
    rows: list[tuple[int, int, float, int]] = []
    for hop in stream.hops:
        forward, backward = stream.forward_s[hop.source], stream.backward_s[hop.target]
        rows.append((2 * hop.source, 2 * hop.target, forward + hop.forward_s, _NOBODY))
        rows.append((2 * hop.target + 1, 2 * hop.source + 1, backward + hop.backward_s, _NOBODY))
    for stage in range(len(stream.replicas)):
        rows.append((2 * stage, 2 * stage + 1, stream.forward_s[stage], _NOBODY))
        rows.append((2 * stage + 1, 2 * stage, stream.backward_s[stage], stage))
    source, target, seconds, keeps = zip(*rows, strict=True)
    return _CycleArcs(
        np.array(source, np.int64),
        np.array(target, np.int64),
        np.array(seconds, np.float64),
        np.array(keeps, np.int64),
        np.array(stream.replicas, np.int64),
    )


def _slower_circle(arcs: _CycleArcs, later: Integers, rate_s: float) -> Integers:
    """The arcs of a cycle that takes more than ``rate_s`` per microbatch; empty if there is none."""
    allowed_s = rate_s * (1.0 + _TOLERANCE)
    # Passes that take no time wait for each other too; the small extra time lets the search find such a cycle.
    gain = arcs.seconds + 1e-3 * _TOLERANCE * rate_s - allowed_s * later
    return gaining_circle(arcs.source, arcs.target, gain, 2 * len(arcs.replicas))
