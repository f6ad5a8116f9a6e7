"""The passes of a batch as a graph, and paths through it: each is a bound on what a batch takes.

Each rank runs its list in order, and a pass waits for the same microbatch's pass at the neighbouring stage. So a batch
takes at least as long as the passes of any path take together, and what a rank does after its last pass, where the path
ends with that. Which passes there are says ``simulate.actions``: it states the problem, and knows nothing of plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from piper_ray.certificate.kernels.downsets import Floats, Ints
from piper_ray.certificate.kernels.events import Events, longest_through
from piper_ray.model.errors import CertificateRefused
from piper_ray.model.schedule import Schedule
from piper_ray.simulate.actions import ActionKind, flush_lists, stage_of_chunk

KINDS = len(ActionKind)
_BACKWARD = (ActionKind.B, ActionKind.I)


@dataclass(frozen=True)
class Walk:
    """A path: it begins with a rank's pass, by its place in the list; then by turns so many steps along the list of the
    rank where it is, and so many steps onward with the same microbatch."""

    rank: int
    place: int
    steps: tuple[int, ...]


@dataclass(frozen=True)
class PassCounts:
    """How often passes are on a path, or on paths on average. passes: float64[stages, kinds]. sync: float64[ranks]."""

    passes: Floats
    sync: Floats


class PassGraph:
    """Of a schedule on so many ranks, each with so many microbatches."""

    def __init__(self, schedule: Schedule, ranks: int, microbatches: int) -> None:
        self.ranks, self.stages = ranks, ranks * schedule.v
        lists = flush_lists(schedule, ranks, microbatches)
        sizes = [len(one) for one in lists]
        self._kind = np.concatenate([one[:, 0] for one in lists])
        self._chunk = np.concatenate([one[:, 1] for one in lists])
        microbatch = np.concatenate([one[:, 2] for one in lists])
        self.start = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        stage_of = [[stage_of_chunk(schedule, ranks, rank, c) for c in range(schedule.v)] for rank in range(ranks)]
        rank_of = np.repeat(np.arange(ranks), sizes)
        stage = np.array(stage_of, np.int64)[rank_of, self._chunk]
        number = np.arange(stage.size)
        forward, backward = (np.full((self.stages + 1, microbatches), -1, np.int64) for _ in range(2))
        goes_on, comes_back = self._kind == ActionKind.F, np.isin(self._kind, _BACKWARD)
        forward[stage[goes_on], microbatch[goes_on]] = number[goes_on]
        backward[stage[comes_back], microbatch[comes_back]] = number[comes_back]
        onward = np.full(stage.size, -1, np.int64)
        onward[goes_on] = forward[stage[goes_on] + 1, microbatch[goes_on]]
        turns = goes_on & (stage == self.stages - 1)
        onward[turns] = backward[stage[turns], microbatch[turns]]
        returns = comes_back & (stage > 0)
        onward[returns] = backward[stage[returns] - 1, microbatch[returns]]
        self.events = Events(self.start, stage, self._kind.astype(np.int64), onward)

    @cached_property
    def held(self) -> Ints:
        """int64[passes, v]: microbatches of each chunk that the pass's rank holds activations of, at the pass."""
        chunks = int(self._chunk.max()) + 1
        found = np.zeros((self._kind.size, chunks), np.int64)
        adds = self._kind == ActionKind.F
        ends = np.isin(self._kind, (ActionKind.B, ActionKind.W))
        for chunk in range(chunks):
            mine = self._chunk == chunk
            # What a pass frees it holds until its end.
            added, ended = np.cumsum(adds & mine), np.cumsum(ends & mine)
            found[:, chunk] = added - np.append(0, ended[:-1])
        return found

    def walked(self, walk: Walk) -> PassCounts:
        """What is on the path. Raises CertificateRefused for steps that lead nowhere."""
        start, stage, kind, onward = self.events
        if not (0 <= walk.rank < self.ranks and 0 <= walk.place < start[walk.rank + 1] - start[walk.rank]):
            raise CertificateRefused("a path of the certificate begins with no pass")
        at = int(start[walk.rank]) + walk.place
        on_path = [np.array([at])]
        for turn, count in enumerate(walk.steps):
            last = int(start[np.searchsorted(start, at, side="right")]) - 1
            if count < 0 or (turn % 2 == 0 and count > last - at):
                raise CertificateRefused("a path of the certificate goes on past the end of a rank's list")
            if turn % 2 == 0:
                on_path.append(np.arange(at + 1, at + count + 1))
                at += count
                continue
            for _ in range(min(count, 2 * self.stages)):
                at = int(onward[at])
                if at < 0:
                    raise CertificateRefused("a path of the certificate goes on where no pass follows")
                on_path.append(np.array([at]))
        counts, sync = np.zeros((self.stages, KINDS)), np.zeros(self.ranks)
        passes = np.concatenate(on_path)
        np.add.at(counts, (stage[passes], kind[passes]), 1.0)
        rank = int(np.searchsorted(start, at, side="right")) - 1
        sync[rank] = float(at == start[rank + 1] - 1)
        return PassCounts(counts, sync)

    def longest(self, seconds: Floats, sync_s: Floats) -> list[tuple[float, Walk]]:
        """The longest path through some pass of each stage, longest first. seconds: float64[stages, kinds]."""
        end_s, _, before, left_s, after = longest_through(self.events, seconds, sync_s)
        through_s = end_s + left_s
        found: dict[Walk, float] = {}
        for stage in range(self.stages):
            of_stage = np.flatnonzero(self.events.stage == stage)
            at = int(of_stage[np.argmax(through_s[of_stage])])
            back, ahead = [at], []
            while before[back[-1]] >= 0:
                back.append(int(before[back[-1]]))
            while after[at] >= 0:
                at = int(after[at])
                ahead.append(at)
            found[self._walk([*reversed(back), *ahead])] = float(through_s[back[0]])
        return sorted(((length_s, walk) for walk, length_s in found.items()), key=lambda pair: -pair[0])

    def _walk(self, passes: Sequence[int]) -> Walk:
        rank = int(np.searchsorted(self.start, passes[0], side="right")) - 1
        steps, along = [0], True
        for one, following in pairwise(passes):
            by_list = following == one + 1 and following not in self.start
            if by_list != along:
                steps.append(0)
                along = by_list
            steps[-1] += 1
        return Walk(rank, passes[0] - int(self.start[rank]), tuple(steps))
