"""The rate that asynchronous 1F1B sustains, and the least microbatches in flight that sustain the slowest stage's.

Every replica of a stage works through F x y, then B, F, B, ... . So microbatches k and k + 1 meet the same constraints
one microbatch apart, whichever replicas run them, and a pipeline that goes on for ever is a graph with two nodes a
stage, F and B, in which an arc says "so many seconds after, so many microbatches later":

    F(j, k) -> F(j+1, k)        B(j+1, k) -> B(j, k)        what one stage hands to the next
    F(j, k + (y-1) d) -> B(j, k)        B(j, k) -> F(j, k + y d)        the order of the list, d replicas in turn

The time for each microbatch is the largest ratio of seconds to microbatches around a circle (Cohen et al., 1985, on
timed event graphs). A stage alone has the circle F, B, F: its seconds over d. Two neighbours of different d have one in
which the second's backward pass waits for its (y-1) d-th next forward pass, which the first has not begun: why
y = ceil(s / d) is not enough with round-robin replicas.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import NamedTuple

_TOLERANCE = 1e-9
_MOST_TRIALS = 20_000


class Hand(NamedTuple):
    """A hand-over between stages with its seconds on the way, forwards and backwards."""

    source: int
    target: int
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class Stream:
    """An asynchronous pipeline that goes on for ever. For each stage the seconds of both passes of a microbatch on one
    replica, and the number of replicas.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    replicas: tuple[int, ...]
    hands: tuple[Hand, ...]

    @property
    def promised_s(self) -> float:
        """For each microbatch, as Piper promises: that of the slowest stage."""
        return max((f + b) / d for f, b, d in zip(self.forward_s, self.backward_s, self.replicas, strict=True))

    def rule(self) -> tuple[int, ...]:
        """y = ceil(s / d), as plans count memory."""
        return rule_in_flight(self.replicas)


def rule_in_flight(replicas: Sequence[int]) -> tuple[int, ...]:
    """For each stage ceil(s / d), s the sum of d over this stage and all behind it (PipeDream)."""
    return tuple(-(-sum(replicas[stage:]) // d) for stage, d in enumerate(replicas))


@dataclass(frozen=True)
class LeastInFlight:
    """in_flight: for each stage, of the least sum. proved: no smaller sum sustains the rate.

    Otherwise the search ended early, with one that does.
    """

    in_flight: tuple[int, ...]
    proved: bool


def sustained_s(stream: Stream, in_flight: Sequence[int]) -> float:
    """Seconds for each microbatch in the long run; inf: the pipeline stops, as each waits for another."""
    rate_s = stream.promised_s
    while True:
        circle = _slower_circle(stream, in_flight, rate_s)
        if circle is None:
            return rate_s
        seconds, later = sum(arc.seconds for arc in circle), sum(arc.later for arc in circle)
        if later <= 0:
            return inf
        rate_s = max(seconds / later, rate_s * (1.0 + _TOLERANCE))


def least_in_flight(stream: Stream) -> LeastInFlight:
    """The least y, in sum, with which the slowest stage sets the rate.

    A circle that is too slow gets faster only where it leaves a stage's backward pass for a later forward pass (the
    arcs with + y d): one of these y has to grow. So trying each of them, from a y that no pipeline can do without and
    by the least sum first, ends with a least one.
    """
    rate_s = stream.promised_s
    start = _least_conceivable(stream, rate_s)
    heap = [(sum(start), start)]
    seen = {start}
    for _ in range(_MOST_TRIALS):
        _, in_flight = heapq.heappop(heap)
        circle = _slower_circle(stream, in_flight, rate_s)
        if circle is None:
            return LeastInFlight(in_flight, True)
        for stage in sorted({arc.keeps for arc in circle if arc.keeps is not None}):
            more = (*in_flight[:stage], in_flight[stage] + 1, *in_flight[stage + 1 :])
            if more not in seen:
                seen.add(more)
                heapq.heappush(heap, (sum(more), more))
    return LeastInFlight(_grown(stream, start, rate_s), False)


def _grown(stream: Stream, in_flight: tuple[int, ...], rate_s: float) -> tuple[int, ...]:
    """In_flight with the first y of each slow circle grown until there is none.

    It ends: with y of each stage far larger than that of the next no circle is left but those of single stages.
    """
    while (circle := _slower_circle(stream, in_flight, rate_s)) is not None:
        stage = min(arc.keeps for arc in circle if arc.keeps is not None)
        in_flight = (*in_flight[:stage], in_flight[stage] + 1, *in_flight[stage + 1 :])
    return in_flight


def _least_conceivable(stream: Stream, rate_s: float) -> tuple[int, ...]:
    """A microbatch that meets no other is in flight from its forward to its backward pass: so many enter meanwhile."""
    stages = len(stream.replicas)
    if rate_s <= 0.0:
        return (1,) * stages
    way_s = [0.0] * (stages + 1)  # from the start of F to the end of B, along the chain of stages
    for stage in reversed(range(stages)):
        between = sum(h.forward_s + h.backward_s for h in stream.hands if (h.source, h.target) == (stage, stage + 1))
        way_s[stage] = stream.forward_s[stage] + stream.backward_s[stage] + between + way_s[stage + 1]
    return tuple(
        max(1, ceil(way_s[stage] / (d * rate_s) * (1.0 - _TOLERANCE))) for stage, d in enumerate(stream.replicas)
    )


class _Arc(NamedTuple):
    """A pass starts no sooner than so many seconds after a pass of the microbatch that is ``later`` before its own.

    source, target: 2 j is F of stage j, 2 j + 1 is B. keeps: the stage whose y allows this start, if one does.
    """

    source: int
    target: int
    seconds: float
    later: int
    keeps: int | None = None


def _arcs(stream: Stream, in_flight: Sequence[int]) -> Iterator[_Arc]:
    for hand in stream.hands:
        forward, backward = stream.forward_s[hand.source], stream.backward_s[hand.target]
        yield _Arc(2 * hand.source, 2 * hand.target, forward + hand.forward_s, 0)
        yield _Arc(2 * hand.target + 1, 2 * hand.source + 1, backward + hand.backward_s, 0)
    for stage, (d, y) in enumerate(zip(stream.replicas, in_flight, strict=True)):
        yield _Arc(2 * stage, 2 * stage + 1, stream.forward_s[stage], -(y - 1) * d)
        yield _Arc(2 * stage + 1, 2 * stage, stream.backward_s[stage], y * d, stage)


def _slower_circle(stream: Stream, in_flight: Sequence[int], rate_s: float) -> list[_Arc] | None:
    """A circle that takes more than ``rate_s`` for each microbatch; None if there is none (Bellman and Ford)."""
    arcs = list(_arcs(stream, in_flight))
    allowed_s = rate_s * (1.0 + _TOLERANCE)
    # Passes of no time wait for each other too: any time at all closes such a circle.
    gains = [arc.seconds + 1e-3 * _TOLERANCE * rate_s - allowed_s * arc.later for arc in arcs]
    nodes = 2 * len(stream.replicas)
    longest = [0.0] * nodes
    by: list[_Arc | None] = [None] * nodes
    changed = 0
    for _ in range(nodes + 1):
        changed = -1
        for arc, gain in zip(arcs, gains, strict=True):
            if longest[arc.source] + gain > longest[arc.target]:
                longest[arc.target] = longest[arc.source] + gain
                by[arc.target] = arc
                changed = arc.target
        if changed < 0:
            return None
    return _circle(by, changed)


def _circle(by: Sequence[_Arc | None], node: int) -> list[_Arc]:
    """The circle that the arcs of a last improvement lead back to."""
    for _ in by:
        arc = by[node]
        assert arc is not None
        node = arc.source
    circle, at = [], node
    while True:
        arc = by[at]
        assert arc is not None
        circle.append(arc)
        at = arc.source
        if at == node:
            return circle
