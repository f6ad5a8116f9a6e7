"""A bound from memory: a rank with little memory for microbatches in flight leaves work to others."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from piper_ray.cost.products import dot
from piper_ray.model.schedule import Schedule, ScheduleName

_FloatArray = npt.NDArray[np.float64]


_FEW_RANKS, _MOST_BYTES = 8, 100_000
"""Bytes of all kinds, TMPCs and ranks are compared on so many ranks at least, and in so many figures otherwise."""


@lru_cache(maxsize=1 << 14)
def surely_in_flight(schedule: Schedule, ranks: int, microbatches: int) -> _FloatArray:
    """Returns float64[p], from the first rank to the last: a lower bound on the microbatches that are in flight at once
    in each of its chunks.

    With interleaved chunks the last one has the fewest when the first backward pass begins: 2 q - 1 on rank q from the
    end, but no more than the batch or a group, which has at least p. Under ``zb-h1`` gradients of weights come as many
    passes later as ranks are in front, so all ranks hold as much. Under ``gpipe`` and ``looped-bfs`` the whole batch is
    in flight when backward passes begin. 1 if nothing more is known.
    """
    from_end, found = np.arange(ranks, 0, -1.0), np.ones(ranks)
    if schedule.name in (ScheduleName.GPIPE, ScheduleName.LOOPED_BFS):
        found *= microbatches
    elif schedule.name is ScheduleName.ZB_H1:
        found *= min(ranks, microbatches)
    elif schedule.name is ScheduleName.ONE_F_ONE_B:
        found = np.minimum(microbatches, from_end)
    elif schedule.name is ScheduleName.INTERLEAVED:
        found = np.minimum(min(ranks, microbatches), 2.0 * from_end - 1.0)
    return found


@dataclass(frozen=True)
class HeldLayers:
    """Layers that ranks share out, for one or several ways to run them. counts: float64[kind], the number of layers
    with the same figures. seconds: float64[.., kind], the least time of a layer in a batch. fixed_bytes,
    activation_bytes: float64[.., kind, TMPC], inf where a kind has fewer.
    """

    counts: _FloatArray
    seconds: _FloatArray
    fixed_bytes: _FloatArray
    activation_bytes: _FloatArray

    def only(self, ways: npt.NDArray[np.bool_]) -> HeldLayers:
        """Returns only some of several ways."""
        return HeldLayers(self.counts, self.seconds[ways], self.fixed_bytes[ways], self.activation_bytes[ways])

    @cached_property
    def _of_all(self) -> tuple[_FloatArray, _FloatArray, _FloatArray]:
        """float64[..] each: the time of all layers, and the least of both kinds of bytes."""
        least = (dot(x.min(axis=-1), self.counts) for x in (self.fixed_bytes, self.activation_bytes))
        return dot(self.seconds, self.counts), *least

    def whole_s(self, ranks: int) -> _FloatArray:
        """Returns float64[..]: a lower bound on a batch on ``ranks`` ranks, since of each kind some rank has its share
        in whole layers."""
        found: _FloatArray = (np.ceil(self.counts / ranks) * self.seconds).max(axis=-1)
        return found

    def least_s(self, flight: _FloatArray, memory_bytes: float) -> _FloatArray:
        """Returns float64[..]: a lower bound on a batch in which each rank does its layers' work in T seconds and holds
        them in M bytes, with at least y_q microbatches in flight on rank q. inf: none fits. flight: float64[ranks], the
        y_q, descending.

        A rank with the layers l takes the sum of their v_l in seconds, and the sum of f_l + y_q a_l in bytes. For the k
        ranks that can hold least, bytes are counted, as shares of what all layers would hold there; for the others
        seconds, as shares of V, the time of all layers. A layer takes at least the least of these shares, wherever it
        is. So all layers together take at least the sum of the least ones, and at most the sum of M / (F + y_q A) over
        the k ranks and (p - k) T / V. That bounds T for each k; where layers are of many kinds, it does for a few k. A
        share rises or falls with y, so that the least of the first k ranks is that of the first or of the last of them.
        """
        ranks, (every_s, fixed_bytes, activation_bytes) = flight.size, self._of_all
        every_bytes = fixed_bytes[..., None] + flight * activation_bytes[..., None]
        known = (every_s > 0.0) & (every_bytes.min(axis=-1) > 0.0)
        part_s, part_bytes = np.where(known, every_s, 1.0), np.where(known[..., None], every_bytes, 1.0)
        few = min(ranks, max(_FEW_RANKS, _MOST_BYTES // (self.counts.size * self.fixed_bytes.shape[-1])))
        at = np.linspace(0, ranks - 1, few).astype(np.int64)  # k - 1
        bytes_at = (self.fixed_bytes[..., None] + flight[at] * self.activation_bytes[..., None]).min(axis=-2)
        shares = np.minimum.accumulate(bytes_at / part_bytes[..., None, at], axis=-1)  # [.., kind, at]
        capacity = np.cumsum(memory_bytes / part_bytes, axis=-1)[..., at]
        taken = dot(self.counts, np.minimum(shares[..., :-1], (self.seconds / part_s[..., None])[..., None]))
        others_s = (taken - capacity[..., :-1]) * part_s[..., None] / (ranks - 1 - at[:-1])
        found = np.maximum(every_s / ranks, others_s.max(axis=-1, initial=0.0))
        full = (dot(self.counts, shares[..., -1:]) > capacity[..., -1:])[..., 0]
        full |= bytes_at[..., -1].max(axis=-1) > memory_bytes  # some layer fits on no rank
        return np.where(known, np.where(full, math.inf, found), every_s / ranks)
