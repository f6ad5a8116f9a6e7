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

PRICE_GUARD = 1e-9
"""Relative: sums over downsets round otherwise than those of a stage's choice."""


@inlined_kernel
def is_too_long(many_s: float, one_s: float, resync_s: float, y: int, d: int, longest_s: float) -> bool:
    """Whether no choice of a stage that fits in memory keeps a threshold at degree d with y microbatches in flight.

    many_s, one_s: the stage's, work and communication included; of one_s what all of M costs is taken off.
    longest_s: the threshold, with a guard.
    """
    return many_s + (one_s - many_s) / y + (d - 1) * resync_s > longest_s * d
