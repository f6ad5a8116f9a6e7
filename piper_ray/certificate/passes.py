"""The passes of a batch as a graph, and paths through it: the length of each path is a lower bound on a batch.

Each rank runs its list in order, and a pass waits for the same microbatch's pass at the neighbouring stage. So a batch
takes at least as long as the passes of any path together, including what a rank does after its last pass if the path
ends there. ``simulate.actions`` defines the passes: it states the problem, and knows nothing of plans.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from piper_ray.certificate.kernels.downsets import Floats, Ints
from piper_ray.certificate.kernels.events import PassEvents, count_passes, longest_through, steps_through
from piper_ray.model.errors import CertificateRefused
from piper_ray.model.schedule import Schedule
from piper_ray.simulate.actions import ActionKind, flush_lists, stage_of_chunk

KINDS = len(ActionKind)
_BACKWARD = (ActionKind.B, ActionKind.I)


@dataclass(frozen=True)
class PathSteps:
    """A path. It begins with a rank's pass, by its place in the list, and then alternates: a number of steps along the
    list of the current rank, and a number of steps onward with the same microbatch."""

    rank: int
    place: int
    steps: tuple[int, ...]


@dataclass(frozen=True)
class PassCounts:
    """How often passes are on a path, or on average on several. passes: float64[stages, kinds]. sync:
    float64[ranks]."""

    passes: Floats
    sync: Floats


class PassGraph:
    """The passes of a schedule on ``ranks`` ranks with ``microbatches`` microbatches each."""

    def __init__(self, schedule: Schedule, ranks: int, microbatches: int) -> None:
        self.ranks, self.stages = ranks, ranks * schedule.v
        lists = flush_lists(schedule, ranks, microbatches)
        sizes = [len(one) for one in lists]
        self._kind = np.concatenate([one[:, 0] for one in lists])
        self._chunk = np.concatenate([one[:, 1] for one in lists])
        microbatch = np.concatenate([one[:, 2] for one in lists])
        self.start = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        stage_of = [[stage_of_chunk(schedule, ranks, rank, c) for c in range(schedule.v)] for rank in range(ranks)]
        stage = np.array(stage_of, np.int64)[np.repeat(np.arange(ranks), sizes), self._chunk]
        self.rank_of = np.zeros(self.stages, np.int64)  # int64[stages]
        for rank, stages in enumerate(stage_of):
            self.rank_of[stages] = rank
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
        self.events = PassEvents(self.start, stage, self._kind.astype(np.int64), onward)

    @cached_property
    def held(self) -> Ints:
        """int64[passes, v]: the microbatches of each chunk whose activations the pass's rank holds during the pass."""
        chunks = int(self._chunk.max()) + 1
        found = np.zeros((self._kind.size, chunks), np.int64)
        adds = self._kind == ActionKind.F
        ends = np.isin(self._kind, (ActionKind.B, ActionKind.W))
        for chunk in range(chunks):
            mine = self._chunk == chunk
            # A pass holds what it frees until its end.
            added, ended = np.cumsum(adds & mine), np.cumsum(ends & mine)
            found[:, chunk] = added - np.append(0, ended[:-1])
        return found

    def walked(self, walk: PathSteps) -> PassCounts:
        """Counts the passes on the path. Raises CertificateRefused for steps that lead nowhere."""
        start = self.start
        if not (0 <= walk.rank < self.ranks and 0 <= walk.place < start[walk.rank + 1] - start[walk.rank]):
            raise CertificateRefused("a path of the certificate begins with no pass")
        counts, sync = np.zeros((self.stages, KINDS)), np.zeros(self.ranks)
        steps = np.array(walk.steps, np.int64)
        at = int(count_passes(self.events, int(start[walk.rank]) + walk.place, steps, counts))
        if at < 0:
            raise CertificateRefused("a path of the certificate goes on where no pass follows")
        rank = int(np.searchsorted(start, at, side="right")) - 1
        sync[rank] = float(at == start[rank + 1] - 1)
        return PassCounts(counts, sync)

    def longest(self, seconds: Floats, sync_s: Floats, most: int) -> list[tuple[float, PathSteps]]:
        """Returns the longest paths through some pass of each stage, longest first. seconds: float64[stages, kinds]."""
        longest = longest_through(self.events, seconds, sync_s)
        found: dict[PathSteps, float] = {}
        for stage in np.argsort(-longest.through_s, kind="stable").tolist():
            first, steps = steps_through(self.events, longest, int(longest.at[stage]))
            rank = int(np.searchsorted(self.start, first, side="right")) - 1
            walk = PathSteps(rank, int(first - self.start[rank]), tuple(steps.tolist()))
            found.setdefault(walk, float(longest.through_s[stage]))
            if len(found) == most:
                break
        return [(length_s, walk) for walk, length_s in found.items()]
