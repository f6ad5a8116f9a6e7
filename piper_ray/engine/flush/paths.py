"""The longest paths through a pipeline's step under a flush, given by how often each stage is on them: see
``kernels.flush_paths``. A stage's position is the number of stages behind it."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from piper_ray.cost.products import dot
from piper_ray.engine.kernels.flush_critical import paths_of_1f1b, paths_of_gpipe
from piper_ray.engine.kernels.flush_types import GPIPE, TWO_BW
from piper_ray.engine.kernels.types import FloatArray, IndexArray, frozen

_MOST_ENDS = 4
"""Paths to the end of this many stages are considered besides those to the end of the first one."""

_SLOW = 4.0
"""How much slower than the others the slow stage of ``path_past`` is."""


class PassPath(NamedTuple):
    """How often the forward passes, the backward passes and the synchronisation of each position are on a path:
    float64[positions] each, by stages behind."""

    forward: FloatArray
    backward: FloatArray
    sync: FloatArray

    def seconds(self, forward_s: FloatArray, backward_s: FloatArray, sync_s: FloatArray) -> float:
        """Returns the length of the path for the given seconds of each position."""
        return float(dot(self.forward, forward_s) + dot(self.backward, backward_s) + dot(self.sync, sync_s))


def longest_paths(
    schedule: int, microbatches: int, forward_s: FloatArray, backward_s: FloatArray, sync_s: FloatArray
) -> list[PassPath]:
    """Returns the longest path of each position, the longest first. The arguments in s are by stages behind."""
    seconds = np.stack([forward_s, backward_s, sync_s])  # arrays of one kind, for which kernels are compiled once
    if schedule == GPIPE:
        often = paths_of_gpipe(microbatches, seconds[0], seconds[1])
    else:
        often = paths_of_1f1b(microbatches, seconds[0], seconds[1], _ends(sync_s))
    lengths_s = dot(often.reshape(often.shape[0], -1), seconds.ravel())
    # Copies, so that a path that is kept does not keep them all.
    return [PassPath(*often[k].copy()) for k in np.argsort(-lengths_s, kind="stable").tolist()]


def path_past(schedule: int, microbatches: int, positions: int, slow: int) -> PassPath:
    """Returns the longest path of a pipeline of equal stages but for a slow one at position ``slow``."""
    seconds = np.ones(positions)
    seconds[slow] = _SLOW
    return longest_paths(schedule, microbatches, seconds, seconds, np.zeros(positions))[0]


@lru_cache(maxsize=1 << 8)
def paths_past(schedule: int, microbatches: int, positions: int) -> tuple[PassPath, ...]:
    """Returns ``path_past`` of each position."""
    return tuple(frozen(path_past(schedule, microbatches, positions, slow)) for slow in range(positions))


def often(schedule: int, microbatches: int, most_stages: int) -> float:
    """Returns the factor c of a bound: a batch takes at least the work of all stages plus c times the time of any one
    of them for a microbatch, in a pipeline of at most ``most_stages`` stages. 0: that bounds nothing.
    """
    m = microbatches
    if schedule == TWO_BW:
        return 0.0
    return m - 1 if schedule == GPIPE else m - 1 - min(most_stages - 1, m - 1) / 2.0


@lru_cache(maxsize=1 << 14)
def room(schedule: int, microbatches: int, most_stages: int) -> FloatArray:
    """Returns float64[most_stages + 1]: for k = 0, 1, ..., how much the last k stages may take together, as a multiple
    of what a batch takes beyond the work of all stages; float64[0] if that bounds nothing.

    Each stage alone is limited so: with q stages behind it, it may take one part in ``often`` of a pipeline of q + 1.
    """
    times = np.array([often(schedule, microbatches, q + 1) for q in range(most_stages)], np.float64)
    return np.append(0.0, np.cumsum(1.0 / times)) if (times > 0.0).all() else np.zeros(0)


def fits_in_order(
    seconds: FloatArray, held_bytes: FloatArray, room_s: FloatArray, in_flight: FloatArray, memory_bytes: float
) -> bool:
    """Returns whether stages can hold a chain's layers. seconds: float64[layers], from the back. held_bytes:
    float64[layers, 2], fixed, and for each microbatch in flight. room_s, in_flight: float64[stages] each, from the
    back: the time that a stage may take, and its microbatches in flight.

    A stage's limits hold for each part of it, so no plan is further with its last stages than one that fills each.
    """
    ends_s = np.append(0.0, np.cumsum(seconds))
    fixed_bytes, activation_bytes = np.vstack([np.zeros(2), np.cumsum(held_bytes, axis=0)]).T
    end = 0
    for stage_s, microbatches in zip(room_s.tolist(), in_flight.tolist(), strict=True):
        ends_bytes = fixed_bytes + microbatches * activation_bytes
        in_time = np.searchsorted(ends_s, ends_s[end] + stage_s, side="right")
        end = min(int(in_time), int(np.searchsorted(ends_bytes, ends_bytes[end] + memory_bytes, side="right"))) - 1
        if end >= seconds.size:
            return True
    return False


def _ends(sync_s: FloatArray) -> IndexArray:
    """Returns the position of the first stage, and those that synchronise longer than all in front of them, longest
    first."""
    first, found = sync_s.size - 1, []
    longest_s = sync_s[first]
    for q in range(first - 1, -1, -1):
        if sync_s[q] > longest_s:
            longest_s = sync_s[q]
            found.append(q)
    return np.array([first, *found[: -_MOST_ENDS - 1 : -1]])
