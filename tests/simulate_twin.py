"""The slow twin of the event loop: a clock, a heap of events, and ranks that start what they can.

It shares nothing with ``piper_ray.simulate`` but the numbering of passes. Where the loop there works out times by
following who waits for whom, this one goes from moment to moment.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import count

F, B, I, W = range(4)  # noqa: E741 - the field's names

Pass = tuple[int, int, int]
"""Kind, stage, microbatch of the pipeline."""


@dataclass(frozen=True)
class Link:
    """Stage ``source`` sends to ``target`` in forward passes and back in backward passes, each taking so long."""

    source: int
    target: int
    forward_s: float = 0.0
    backward_s: float = 0.0


@dataclass
class Pipeline:
    """lists: of each rank. duration_s[stage][kind]. ranks[stage]: of its replicas, which microbatches visit in turn.

    joined, waited_for: (rank, place in its list) of passes that start when they and the next can and send when both
    have ended, and of those whose sends have gone before the next pass starts.
    """

    lists: Sequence[Sequence[Pass]]
    duration_s: Sequence[Sequence[float]]
    ranks: Sequence[Sequence[int]]
    links: Sequence[Link]
    latency_s: float = 0.0
    joined: Collection[tuple[int, int]] = ()
    waited_for: Collection[tuple[int, int]] = ()
    times_s: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)

    def rank_of(self, stage: int, microbatch: int) -> int:
        return self.ranks[stage][microbatch % len(self.ranks[stage])]

    def needs(self, one: Pass) -> set[tuple[str, int, int]]:
        """What has to be there: passes of the same rank, and messages."""
        kind, stage, k = one
        if kind == W:
            return {("I", stage, k)}
        if kind == F:
            return {("forward", index, k) for index, link in enumerate(self.links) if link.target == stage}
        back = {("backward", index, k) for index, link in enumerate(self.links) if link.source == stage}
        return {("F", stage, k), *back}

    def run(self) -> dict[tuple[int, int], tuple[float, float]]:
        """(start, end) of each (rank, place in its list) that was ever run."""
        number_of_event = count()
        heap: list[tuple[float, int, str, tuple[int, ...]]] = []
        position = [0] * len(self.lists)
        busy = [False] * len(self.lists)
        there: set[tuple[str, int, int]] = set()
        way_out_free_s = [0.0] * len(self.lists)

        def start(rank: int, now_s: float) -> None:
            if busy[rank] or position[rank] == len(self.lists[rank]):
                return
            place = position[rank]
            if (rank, place - 1) in self.waited_for and now_s < way_out_free_s[rank]:
                return
            behind = place + 1 + ((rank, place) in self.joined)
            passes = self.lists[rank][place:behind]
            if all(self.needs(one) <= there for one in passes):
                busy[rank] = True
                for number, (kind, stage, _) in enumerate(passes, place):
                    end_s = now_s + self.duration_s[stage][kind]
                    self.times_s[rank, number] = now_s, end_s
                    now_s = end_s
                heapq.heappush(heap, (now_s, next(number_of_event), "end", (rank, behind)))

        def send(rank: int, direction: str, k: int, now_s: float, stage: int) -> None:
            for index, link in enumerate(self.links):
                sender, receiver = (link.source, link.target) if direction == "forward" else (link.target, link.source)
                if sender != stage:
                    continue
                out_s = link.forward_s if direction == "forward" else link.backward_s
                arrival_s = now_s
                if self.rank_of(receiver, k) != rank:
                    if out_s > 0:
                        way_out_free_s[rank] = max(way_out_free_s[rank], now_s) + out_s
                        arrival_s = way_out_free_s[rank]
                    arrival_s += self.latency_s
                what = (0 if direction == "forward" else 1, index, k, self.rank_of(receiver, k))
                heapq.heappush(heap, (arrival_s, next(number_of_event), "arrival", what))

        for rank in range(len(self.lists)):
            start(rank, 0.0)
        while heap:
            now_s, _, event, what = heapq.heappop(heap)
            if event == "arrival":
                direction, index, k, rank = what
                there.add((("forward", "backward")[direction], index, k))
                start(rank, now_s)
                continue
            if event == "way out":
                start(what[0], now_s)
                continue
            rank, behind = what
            ended = self.lists[rank][position[rank] : behind]
            busy[rank] = False
            position[rank] = behind
            for kind, stage, k in ended:
                there.add((("F", "B", "I", "W")[kind], stage, k))
                if kind != W:
                    send(rank, "forward" if kind == F else "backward", k, now_s, stage)
            heapq.heappush(heap, (max(now_s, way_out_free_s[rank]), next(number_of_event), "way out", (rank,)))
            start(rank, now_s)
        return self.times_s

    @property
    def end_s(self) -> float:
        return max(end_s for _, end_s in self.times_s.values())


def one_f_one_b(stages: int, microbatches: int) -> list[list[Pass]]:
    """F x min(m, p - j), then B, F, B, ..., then the remaining B."""
    lists: list[list[Pass]] = []
    for j in range(stages):
        ahead = min(microbatches, stages - j)
        passes = [(F, j, k) for k in range(ahead)]
        for k in range(microbatches):
            passes.append((B, j, k))
            if ahead + k < microbatches:
                passes.append((F, j, ahead + k))
        lists.append(passes)
    return lists


def peak_bytes(
    lists: Sequence[Pass], times_s: Sequence[tuple[float, float]], activation_bytes: Sequence[float], fixed_bytes: float
) -> float:
    """The most that one rank holds at any start of a pass: looked up pass by pass, microbatch by microbatch."""
    peak = fixed_bytes
    for now_s, _ in times_s:
        held = fixed_bytes
        for (kind, stage, k), (start_s, _) in zip(lists, times_s, strict=True):
            if kind == F and start_s <= now_s:
                freed_s = [
                    end_s
                    for (other, other_stage, other_k), (_, end_s) in zip(lists, times_s, strict=True)
                    if (other_stage, other_k) == (stage, k) and other in (B, W)
                ]
                held += activation_bytes[stage] * all(end_s > now_s for end_s in freed_s)
        peak = max(peak, held)
    return peak
