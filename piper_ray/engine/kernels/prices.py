"""Kernel: what a stage takes at least, with a price on the memory that it may use.

Of variant r, with y microbatches in flight and z = 1 / y, any choice of options o that fits in memory M has

    sum p(o) >= sum p(o) + price z (sum (a(o) y + b(o)) - M)
             >= least work + sum over layers of min over o of (p(o) - least p + price (a(o) + b(o) z)) - price M z,

whatever the price, as it pays for what is left over at most. Each layer's minimum is concave in z, so no less than the
straight line between its values at z = 0, endlessly many in flight, and z = 1, one. Sums of these over downsets are
``many_s`` and ``one_s``: a stage costs differences, as it does of the work. What replicas share out comes on top.
"""

from __future__ import annotations

from piper_ray.compiled.jit import inlined_kernel
from piper_ray.engine.kernels.types import CostArrays, OptionArrays, StageKey, StageWork, Tables

_GUARD, _HAIR = 1e-9, 1e-12
"""Of the threshold, and of all there is: sums over downsets round otherwise than those of a stage's choice."""


@inlined_kernel
def has_price(options: OptionArrays) -> bool:
    """Whether memory has one in any variant."""
    for r in range(options.price_s.size):
        if options.price_s[r] > 0.0:
            return True
    return False


@inlined_kernel
def longest_s(r: int, threshold_s: float, costs: CostArrays) -> float:
    """Of a stage in variant r that keeps the threshold, with what roundings may add."""
    last = costs.need_s.shape[0] - 1
    all_s = costs.need_s[last, r] + max(costs.many_s[last, r], costs.one_s[last, r])
    return float(threshold_s * (1.0 + _GUARD) + _HAIR * all_s)


@inlined_kernel
def is_too_long(many_s: float, one_s: float, resync_s: float, y: int, d: int, limit_s: float) -> bool:
    """Whether no choice of a stage that fits in memory keeps a threshold at degree d with y microbatches in flight.

    many_s, one_s: the stage's, work and communication included; of one_s what all of M costs is taken off.
    limit_s: the threshold, with a guard.
    """
    return many_s + (one_s - many_s) / y + (d - 1) * resync_s > limit_s * d


@inlined_kernel
def needs_longer(stage: StageKey, d: int, y: int, work: StageWork, tables: Tables, threshold_s: float) -> bool:
    """``is_too_long`` of one stage."""
    i, j, r = stage
    costs = tables.costs
    many_s = work.work_s + costs.many_s[i, r] - costs.many_s[j, r]
    one_s = (
        work.work_s + costs.one_s[i, r] - costs.one_s[j, r] - tables.options.price_s[r] * tables.cluster.memory_bytes
    )
    return is_too_long(many_s, one_s, work.resync_s, y, d, longest_s(r, threshold_s, costs))
