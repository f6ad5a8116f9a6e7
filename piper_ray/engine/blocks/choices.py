"""The TMPC choices of a block: combinations of its layers' TMPCs that none beats, thinned out if there are many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from piper_ray.model.instance import Tmpc

MOST_CHOICES = 32
"""For each block and variant."""

Rows = npt.NDArray[np.float64]

_TIME, _WEIGHTS, _ACTIVATION, _FIXED, _SHARED = range(5)
_FIGURES = 5


@dataclass(frozen=True)
class BlockChoice:
    """One TMPC for each layer of a block, and what they cost together; the tensors within the block cost nothing.

    figures: p, w, a, b and what replicas share out. forward_bytes, backward_bytes: fw and bw for each neighbouring
    block.
    """

    tmpc_ids: Mapping[int, str]
    figures: tuple[float, float, float, float, float]
    forward_bytes: Mapping[int, float]
    backward_bytes: Mapping[int, float]


@dataclass(frozen=True)
class Choices:
    """dropped: combinations that no other beats and that are not among ``choices``."""

    choices: tuple[BlockChoice, ...]
    dropped: int


def combine(
    members: Sequence[int], tmpcs: Mapping[int, Sequence[Tmpc]], block_of: Mapping[int, int], most: int = MOST_CHOICES
) -> Choices:
    """The choices of the block of ``members``; none if one of them has no TMPC in this variant.

    block_of: the block of each layer. Kept of too many: the least of each figure, and an even spread over the times.
    """
    if not all(tmpcs[layer] for layer in members):
        return Choices((), 0)
    own = block_of[members[0]]
    every = [tmpc for layer in members for tmpc in tmpcs[layer]]  # one may name a neighbour that another does not
    before = sorted({block_of[u] for tmpc in every for u in tmpc.forward_sync_bytes} - {own})
    after = sorted({block_of[w] for tmpc in every for w in tmpc.backward_sync_bytes} - {own})
    columns = _Columns(block_of, before, after)
    rows = np.zeros((1, columns.count))
    picked = np.zeros((1, len(members)), np.int64)
    dropped = 0
    for index, layer in enumerate(members):
        options = np.array([columns.of(tmpc) for tmpc in tmpcs[layer]])
        kept = _unbeaten(options)
        rows = (rows[:, None, :] + options[kept][None, :, :]).reshape(-1, columns.count)
        picked = np.repeat(picked, kept.size, axis=0)
        picked[:, index] = np.tile(kept, picked.shape[0] // kept.size)
        if kept.size > 1:
            best = _unbeaten(rows)
            chosen = best[_spread(rows[best], most)]
            dropped += best.size - chosen.size
            rows, picked = rows[chosen], picked[chosen]
    return Choices(
        tuple(
            BlockChoice(
                {layer: tmpcs[layer][option].id for layer, option in zip(members, of_row, strict=True)},
                (row[_TIME], row[_WEIGHTS], row[_ACTIVATION], row[_FIXED], row[_SHARED]),
                dict(zip(before, row[_FIGURES:], strict=False)),
                dict(zip(after, row[_FIGURES + len(before) :], strict=True)),
            )
            for row, of_row in zip(rows.tolist(), picked.tolist(), strict=True)
        ),
        dropped,
    )


class _Columns:
    """A TMPC as a row: p, w, a, b, shared, then fw and bw summed for each neighbouring block."""

    def __init__(self, block_of: Mapping[int, int], before: Sequence[int], after: Sequence[int]) -> None:
        self._block_of = block_of
        self._before = {block: _FIGURES + index for index, block in enumerate(before)}
        self._after = {block: _FIGURES + len(before) + index for index, block in enumerate(after)}
        self.count = _FIGURES + len(before) + len(after)

    def of(self, tmpc: Tmpc) -> list[float]:
        row = [0.0] * self.count
        row[_TIME], row[_WEIGHTS] = tmpc.time_per_sample_s, tmpc.weights_bytes
        row[_ACTIVATION], row[_FIXED], row[_SHARED] = tmpc.activation_bytes, tmpc.fixed_bytes, tmpc.shared_bytes
        for places, sizes in ((self._before, tmpc.forward_sync_bytes), (self._after, tmpc.backward_sync_bytes)):
            for neighbour, size in sizes.items():
                place = places.get(self._block_of[neighbour])
                if place is not None:
                    row[place] += size
        return row


def _unbeaten(rows: Rows) -> npt.NDArray[np.int64]:
    """The rows that no other one never loses to (as ``variants.undominated``); of equal ones the first."""
    figures = rows.copy()
    # a y + b + shared / d with y, d >= 1
    figures[:, _FIXED] += figures[:, _ACTIVATION]
    figures[:, _SHARED] += figures[:, _FIXED]
    figures = figures[:, (figures != figures[0]).any(axis=0)]
    if figures.shape[1] == 0:
        return np.zeros(1, np.int64)
    never_worse = (figures[:, None, :] <= figures[None, :, :]).all(axis=2)  # [one, other]
    first = np.tri(rows.shape[0], k=-1, dtype=bool).T
    return np.flatnonzero(~(never_worse & (~never_worse.T | first)).any(axis=0))


def _spread(rows: Rows, most: int) -> npt.NDArray[np.int64]:
    if rows.shape[0] <= most:
        return np.arange(rows.shape[0])
    least = {int(rows[:, column].argmin()) for column in range(rows.shape[1])}
    least.add(int((rows[:, _ACTIVATION] + rows[:, _FIXED]).argmin()))
    least.add(int((rows[:, _ACTIVATION] + rows[:, _FIXED] + rows[:, _SHARED]).argmin()))
    by_time = np.argsort(rows[:, _TIME], kind="stable")
    even = by_time[np.linspace(0, by_time.size - 1, most).round().astype(np.int64)].tolist()
    return np.array(sorted(least | set(even)), np.int64)
