"""A bound from whole layers: if the ranks together have no room for all layers, no plan takes at most T seconds.

For a batch of T seconds, two conditions limit the layers of one rank:

- Time. The rank's first pass comes after a forward pass through each stage in front of it. Then the rank needs time for
  all its passes and for its synchronisation. If backward passes are not divided, the passes back through the stages in
  front follow its last pass.
- Memory. At each moment the rank holds no more bytes than it has. A layer holds at least what it would hold in the
  chunk of the rank with the fewest microbatches in flight. No chunk is empty, so each further chunk has at least one
  layer.

The kind with the most layers is the main kind. For each choice of numbers of layers of the other kinds, these
conditions give the most layers of the main kind on one rank; ``most_of_main`` adds them up over all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from piper_ray.cost.products import dot
from piper_ray.engine.kernels.chunk_bound import FIGURE, LayerKinds, ShapeLimits
from piper_ray.engine.kernels.chunk_cover import most_of_main
from piper_ray.engine.kernels.chunk_program import BACKWARD, ChunkProgram
from piper_ray.engine.kernels.types import BoolArray, FloatArray, IndexArray

_MOST_CHOICES = 256
"""The most choices of numbers of layers of the other kinds. Kinds that would give more choices take no room."""

_SMALL = 0.1
"""A share of the mean layer's time."""

_HALVINGS = 8
"""How often the range of times is halved."""

_A_LITTLE = 1e-9
"""The rounding errors that are allowed for: relative in sums, absolute in numbers of layers."""


def is_small(kinds: LayerKinds) -> BoolArray:
    """bool[kinds]: the kinds whose layers take much less time than the mean layer."""
    passes = kinds.figures[:, FIGURE.forward_s : FIGURE.weight_s + 1].sum(axis=1)
    seconds = np.minimum.reduceat(passes, kinds.option_start[:-1])
    found: BoolArray = seconds * kinds.layers.sum() < _SMALL * dot(seconds, kinds.layers)
    return found


def least_in_chunks(kinds: LayerKinds, seconds: FloatArray, chunks: int) -> FloatArray:
    """float64[2, chunks]: the least that layers take in each chunk, first if one of them is not small, then in any
    case; inf if there can be no such layer. seconds: float64[kinds], of a layer.

    Each chunk has some layer, and all layers that can be nowhere else.
    """
    chunk = np.arange(chunks)[:, None]
    inside = (kinds.first_chunk <= chunk) & (chunk <= kinds.last_chunk)
    there = dot((inside & (kinds.first_chunk == kinds.last_chunk)) * kinds.layers, seconds)
    some = [np.where(x, seconds, np.inf).min(axis=1) for x in (inside & ~is_small(kinds), inside)]
    found: FloatArray = np.maximum(there, some)
    return found


def least_together(least: FloatArray, small: int) -> float:
    """The least that some chunks take together. least: as in ``least_in_chunks``, of these chunks. small: the most
    small layers that they have together, so that at most as many chunks have no other layer."""
    other = np.isfinite(least[0])
    saved = np.where(other, np.where(other, least[0], 0.0) - np.where(other, least[1], 0.0), np.inf)
    order = np.argsort(-saved, kind="stable")
    return float(least[1, order[:small]].sum() + least[0, order[small:]].sum())


def waits_s(kinds: LayerKinds, limits: ShapeLimits, program: ChunkProgram) -> FloatArray:
    """float64[2, p]: the least time that a rank is idle before its first pass, and the least before that and after its
    last pass together."""
    seconds = kinds.figures[:, FIGURE.forward_s : FIGURE.weight_s + 1]
    forward, passes = (np.minimum.reduceat(x, kinds.option_start[:-1]) for x in (seconds[:, 0], seconds.sum(axis=1)))
    whole, small = bool((program.kind <= BACKWARD).all()), is_small(kinds)
    found = np.zeros((2, program.stage_of.shape[0]))
    for row, (layer_s, often) in enumerate(((forward, 1.0), (passes, 2.0) if whole else (forward, 1.0))):
        least = least_in_chunks(kinds, layer_s, program.rank_of.size)
        for rank, first in enumerate(program.stage_of.min(axis=1).tolist()):
            few = int(kinds.layers[small & (kinds.first_chunk < first)].sum())
            found[row, rank] = least_together(least[:, :first], few) + often * limits.crossing_s[:first].sum()
    return found


@dataclass(frozen=True)
class RankCover:
    """The conditions on the ranks of a shape, one in each row.

    first_row: int64[p], the first row of each rank. timed: bool[rows], whether a row is of seconds; else it is of
    bytes. room: float64[rows], the bytes, or the seconds to add to T. main: float64[rows], what a layer of the main
    kind takes of the room; others: float64[rows, choices], what each choice takes; inf for layers that the rank cannot
    have. chosen: int64[choices, other kinds], the choices; the last one has all layers. layers: those of the main kind.
    """

    first_row: IndexArray
    timed: BoolArray
    room: FloatArray
    main: FloatArray
    others: FloatArray
    chosen: IndexArray
    layers: int

    @classmethod
    def of(cls, kinds: LayerKinds, limits: ShapeLimits, program: ChunkProgram, waits: FloatArray) -> RankCover:
        """kinds: all layers of the model, by kind. waits: as ``waits_s``."""
        m, p, rank_of = program.microbatches, program.stage_of.shape[0], limits.rank_of
        least = np.minimum.reduceat(kinds.figures, kinds.option_start[:-1])
        passes = np.minimum.reduceat(
            kinds.figures[:, FIGURE.forward_s : FIGURE.weight_s + 1].sum(axis=1), kinds.option_start[:-1]
        )
        activation, fixed = least[:, FIGURE.activation], least[:, FIGURE.fixed]
        chunks = np.arange(rank_of.size)
        may = (kinds.first_chunk[:, None] <= chunks) & (chunks <= kinds.last_chunk[:, None])  # [kinds, s]
        before, and_behind = waits
        crossing = 2.0 * m * np.bincount(rank_of, limits.crossing_s, p)
        takes = m * passes
        absent: BoolArray = ~np.asarray(may[:, program.stage_of].any(axis=2))  # [kinds, p]
        # Of each moment: the chunks of its rank, and the fewest microbatches that a layer of a kind may be held for.
        own = program.stage_of[limits.moment_rank]
        held, may_own = np.take_along_axis(limits.held, own, axis=1), may[:, own]
        fewest = np.where(may_own, held, np.inf).min(axis=2)  # [kinds, moments]
        fewest = np.where(np.isfinite(fewest), fewest, 0.0)
        more = np.where(may_own, (held - fewest[..., None]) * activation[:, None, None], np.inf).min(axis=0).sum(axis=1)
        synced = takes + limits.sync_s_per_byte * least[:, FIGURE.weights]
        every = np.ones(p)
        takes_of = np.concatenate(
            [np.outer(synced, every), np.outer(takes, every), fixed[:, None] + fewest * activation[:, None]], axis=1
        )
        row_rank = np.concatenate([np.arange(p), np.arange(p), limits.moment_rank])
        room = np.concatenate([-before - crossing, -and_behind - crossing, limits.memory_bytes - more])
        by_rank = np.argsort(row_rank, kind="stable")
        timed = np.arange(room.size) < 2 * p
        takes_of[absent[:, row_rank]] = np.inf
        return cls._over(kinds, takes_of[:, by_rank], row_rank[by_rank], room[by_rank], timed[by_rank])

    @classmethod
    def _over(
        cls, kinds: LayerKinds, takes_of: FloatArray, row_rank: IndexArray, room: FloatArray, timed: BoolArray
    ) -> RankCover:
        counts, finite = kinds.layers, np.where(np.isfinite(takes_of), takes_of, 0.0)
        main = int(counts.argmax())
        # The kinds that take the largest share of time or memory come first.
        weight = np.maximum(
            *(
                counts * part.max(axis=1) / max(float(dot(counts, part).max()), 1e-300)
                for part in (finite[:, timed], finite[:, ~timed])
            )
        )
        kept, choices = list[int](), 1
        for kind in np.argsort(-weight, kind="stable").tolist():
            if kind != main and choices * (counts[kind] + 1) <= _MOST_CHOICES:
                kept.append(kind)
                choices *= int(counts[kind]) + 1
        chosen = np.array([*np.ndindex(*(counts[kept] + 1).tolist())], np.int64).reshape(choices, len(kept))
        others = np.zeros((room.size, choices))
        for column, kind in enumerate(kept):
            some = chosen[:, column] > 0
            others[:, some] += takes_of[kind][:, None] * chosen[some, column]
        return cls(
            np.searchsorted(row_rank, np.arange(row_rank[-1] + 1)),
            timed,
            room,
            takes_of[main],
            others,
            chosen,
            int(counts[main]),
        )

    def has_room(self, batch_s: float) -> bool:
        """Whether the ranks may have room for all layers if a batch takes ``batch_s``."""
        return bool(most_of_main(self._most(batch_s), self.chosen) >= self.layers)

    def _most(self, batch_s: float) -> IndexArray:
        """int64[p, choices]: the most layers of the main kind with each choice; negative if the choice has no room."""
        all_s = np.where(self.timed, batch_s, 0.0)
        left = (self.room + all_s + _A_LITTLE * (np.abs(self.room) + all_s))[:, None] - self.others
        main = self.main[:, None]
        each = np.where(np.isfinite(main) & (main > 0.0), main, 1.0)
        most = np.minimum(np.floor(left / each + _A_LITTLE), self.layers)
        most = np.where(main > 0.0, np.where(np.isfinite(main), most, 0.0), self.layers)
        found: IndexArray = np.minimum.reduceat(np.where(left >= 0.0, most, -1.0), self.first_row).astype(np.int64)
        return found

    def least_s(self, lower_s: float, target_s: float) -> float:
        """A time between these two that no batch is below; the second one if no batch is shorter than that."""
        if not np.isfinite(target_s) or not self.has_room(target_s):
            return target_s if np.isfinite(target_s) else lower_s
        above_s = target_s
        for _ in range(_HALVINGS):
            middle_s = 0.5 * (lower_s + above_s)
            if self.has_room(middle_s):
                above_s = middle_s
            else:
                lower_s = middle_s
        return lower_s
