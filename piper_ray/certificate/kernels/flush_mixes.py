"""Kernels: how many stages of a tail are on devices of each kind, and which kinds meet at its front, in one number.

From its last digit on: the kind that the stage in front is to be on, the kind of the tail's first stage, the stages on
each kind, and all stages. 0: no stages. With devices of one kind it says how many stages there are, and nothing else.
"""

from __future__ import annotations

from math import prod

import numpy as np

from piper_ray.certificate.kernels.downsets import Ints
from piper_ray.certificate.kernels.flush_stages import FlushShape, StageTables
from piper_ray.compiled.jit import inlined_kernel, leaf_kernel
from piper_ray.model.errors import LimitError


def units_of(most_of_kind: tuple[int, ...]) -> Ints:
    """int64[kinds + 1]: what one more stage on each kind adds to its digit, and to that of all. Raises LimitError."""
    found = [len(most_of_kind) ** 2 * prod(x + 1 for x in most_of_kind[:g]) for g in range(len(most_of_kind) + 1)]
    if found[-1] * (sum(most_of_kind) + 1) >= 2**63:
        raise LimitError(f"{len(most_of_kind)} kinds of devices have more mixes of stages than a certificate can hold")
    return np.array(found, np.int64)


@inlined_kernel
def stages_of(mix: int, shape: FlushShape) -> int:
    """All of them."""
    return int(mix // shape.mix_unit[-1])


@leaf_kernel
def _count_on(mix: int, kind: int, shape: FlushShape) -> int:
    return int(mix // shape.mix_unit[kind] % (shape.most_of_kind[kind] + 1))


@leaf_kernel
def share_left(mix: int, shape: FlushShape) -> float:
    """What a second counts on all stages that there may be in front, one second each."""
    found = 0.0
    for kind in range(shape.share.size):
        found += (shape.most_of_kind[kind] - _count_on(mix, kind, shape)) * shape.share[kind]
    return found


@leaf_kernel
def ends_whole(mix: int, shape: FlushShape) -> bool:
    """Whether nothing has to be in front: the first stage counts as having one of its own kind there."""
    kinds = shape.share.size
    return bool(mix % kinds == mix // kinds % kinds and stages_of(mix, shape) >= shape.fewest_stages)


@leaf_kernel
def _is_between_borders(behind: int, r: int, tables: StageTables, shape: FlushShape) -> bool:
    """With one kind: whether the borders of a stage with so many behind it are those of a way."""
    if not 0 <= behind < shape.most_stages:
        return False
    return bool(tables.behind[r] == shape.borders[behind] and tables.ahead[r] == shape.borders[behind + 1])


@leaf_kernel
def put_on(mix: int, r: int, tables: StageTables, shape: FlushShape) -> int:
    """With a stage of a way in front; -1: it cannot be there."""
    if shape.borders.size > 0:
        is_there = _is_between_borders(stages_of(mix, shape), r, tables, shape)
        return int(mix + shape.mix_unit[0] + shape.mix_unit[-1]) if is_there else -1
    kinds, kind = shape.share.size, tables.kind[r]
    first, wanted = mix // kinds % kinds, mix % kinds
    if mix == 0:  # the last stage counts as having one of its own kind behind it
        first = wanted = kind
    if kind != wanted or tables.behind[r] != first or _count_on(mix, kind, shape) == shape.most_of_kind[kind]:
        return -1
    counts = mix // kinds**2 * kinds**2 + shape.mix_unit[kind] + shape.mix_unit[-1]
    return int(counts + kind * kinds + tables.ahead[r])


@leaf_kernel
def taken_off(mix: int, r: int, tables: StageTables, shape: FlushShape) -> int:
    """Without its first stage, which is in a way; -1: it cannot be. The other way round than ``put_on``."""
    if shape.borders.size > 0:
        is_there = _is_between_borders(stages_of(mix, shape) - 1, r, tables, shape)
        return int(mix - shape.mix_unit[0] - shape.mix_unit[-1]) if is_there else -1
    kinds, kind = shape.share.size, tables.kind[r]
    if mix // kinds % kinds != kind or mix % kinds != tables.ahead[r]:
        return -1
    counts = mix // kinds**2 * kinds**2 - shape.mix_unit[kind] - shape.mix_unit[-1]
    if counts == 0:
        return 0 if tables.behind[r] == kind else -1
    return int(counts + tables.behind[r] * kinds + kind)
