"""Kernels: mixes: how many stages of a tail are on devices of each kind, and which kinds meet at its front, in one
number.

Its digits are, from the last one on: the kind of the stage in front, the kind of the tail's first stage, the number of
stages on each kind, and the number of all stages. 0: no stages. With devices of one kind it is the number of stages
alone.
"""

from __future__ import annotations

from math import prod

import numpy as np

from piper_ray.certificate.kernels.downsets import Ints
from piper_ray.certificate.kernels.flush_stages import FlushShape, StageTables
from piper_ray.compiled.jit import inlined_kernel, leaf_kernel
from piper_ray.model.errors import LimitError


def units_of(most_of_kind: tuple[int, ...]) -> Ints:
    """Returns int64[kinds + 1]: what a further stage on each kind adds to its digit, and to that of all. Raises
    LimitError."""
    found = [len(most_of_kind) ** 2 * prod(x + 1 for x in most_of_kind[:g]) for g in range(len(most_of_kind) + 1)]
    if found[-1] * (sum(most_of_kind) + 1) >= 2**63:
        raise LimitError(f"{len(most_of_kind)} kinds of devices have more mixes of stages than a certificate can hold")
    return np.array(found, np.int64)


@inlined_kernel
def stages_of(mix: int, shape: FlushShape) -> int:
    """Returns the number of all stages."""
    return int(mix // shape.mix_unit[-1])


@leaf_kernel
def _count_on(mix: int, kind: int, shape: FlushShape) -> int:
    return int(mix // shape.mix_unit[kind] % (shape.most_of_kind[kind] + 1))


@leaf_kernel
def share_left(mix: int, shape: FlushShape) -> float:
    """Returns the sum of the values of a second over all stages that may be in front."""
    found = 0.0
    for kind in range(shape.share.size):
        found += (shape.most_of_kind[kind] - _count_on(mix, kind, shape)) * shape.share[kind]
    return found


@leaf_kernel
def ends_whole(mix: int, shape: FlushShape) -> bool:
    """Whether nothing has to be in front: the first stage counts as having one of its own kind there."""
    kinds = shape.share.size
    for kind in range(kinds):
        if _count_on(mix, kind, shape) < shape.fewest_of_kind[kind]:
            return False
    return bool(mix % kinds == mix // kinds % kinds)


@leaf_kernel
def put_on(mix: int, r: int, tables: StageTables, shape: FlushShape) -> int:
    """Returns the mix with a stage of a way in front; -1 if the stage cannot be there."""
    kinds, kind, ahead = shape.share.size, tables.kind[r], tables.ahead[r]
    first, wanted, count = mix // kinds % kinds, mix % kinds, _count_on(mix, kind, shape)
    if mix == 0:  # the last stage counts as having one of its own kind behind it
        first = wanted = kind
    if kind != wanted or count == shape.most_of_kind[kind]:
        return -1
    behind = shape.borders[kind, count] if first == kind else first
    if tables.behind[r] != behind or (ahead % kinds == kind and ahead != shape.borders[kind, count + 1]):
        return -1
    counts = mix // kinds**2 * kinds**2 + shape.mix_unit[kind] + shape.mix_unit[-1]
    return int(counts + kind * kinds + ahead % kinds)


@leaf_kernel
def taken_off(mix: int, r: int, tables: StageTables, shape: FlushShape) -> int:
    """Returns the mix without its first stage, which runs in a way; -1 if that is impossible. The inverse of
    ``put_on``."""
    kinds, kind, ahead = shape.share.size, tables.kind[r], tables.ahead[r]
    if mix // kinds % kinds != kind or mix % kinds != ahead % kinds:
        return -1
    count, first = _count_on(mix, kind, shape) - 1, tables.behind[r] % kinds
    if ahead % kinds == kind and ahead != shape.borders[kind, count + 1]:
        return -1
    if first == kind and tables.behind[r] != shape.borders[kind, count]:
        return -1
    counts = mix // kinds**2 * kinds**2 - shape.mix_unit[kind] - shape.mix_unit[-1]
    if counts == 0:
        return 0 if first == kind else -1
    return int(counts + first * kinds + kind)
