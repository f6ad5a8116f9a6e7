"""Stage variants: a tensor-parallel degree together with the TMPCs that a stage of that degree may choose from.

A restriction takes TMPCs away. "All or none" makes two variants of each degree, one that recomputes and one that does
not; the solver knows nothing of roles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from piper_ray.model import Instance, Tmpc
from piper_ray.restrictions import Recompute, Restrictions


@dataclass(frozen=True)
class Variant:
    """degree: t. tmpcs: for each layer id what it may run; empty if it cannot be in such a stage."""

    degree: int
    tmpcs: Mapping[int, tuple[Tmpc, ...]]


def stage_variants(instance: Instance, restrictions: Restrictions) -> tuple[Variant, ...]:
    """All variants that the restrictions leave, by ascending degree, non-recomputing before recomputing."""
    degrees = instance.degrees if restrictions.tensor_parallelism else (1,) if 1 in instance.degrees else ()
    variants: list[Variant] = []
    for degree in degrees:
        for recompute in _recompute_choices(restrictions.recompute):
            variant = Variant(
                degree,
                {layer.id: _allowed(layer.tmpcs.get(degree, ()), recompute) for layer in instance.layers},
            )
            if variant not in variants:
                variants.append(variant)
    return tuple(variants)


def _recompute_choices(recompute: Recompute) -> tuple[bool | None, ...]:
    return {
        Recompute.AUTO: (None,),
        Recompute.ALWAYS: (True,),
        Recompute.NEVER: (False,),
        Recompute.ALL_OR_NONE: (False, True),
    }[recompute]


def _allowed(tmpcs: tuple[Tmpc, ...], recompute: bool | None) -> tuple[Tmpc, ...]:
    """A layer without the choice keeps what it has."""
    if recompute is None:
        return tmpcs
    return tuple(tmpc for tmpc in tmpcs if tmpc.recompute == recompute) or tmpcs


def undominated(tmpcs: tuple[Tmpc, ...]) -> tuple[Tmpc, ...]:
    """Drops each TMPC that another one never loses to, in any stage; of equal ones the first stays.

    Memory is a*y + b with y >= 1, so a' <= a and a' + b' <= a + b mean no more memory at any y.
    """
    kept: list[Tmpc] = []
    for index, tmpc in enumerate(tmpcs):
        beaten = any(
            _never_worse(other, tmpc) and (position < index or not _never_worse(tmpc, other))
            for position, other in enumerate(tmpcs)
            if position != index
        )
        if not beaten:
            kept.append(tmpc)
    return tuple(kept)


def _never_worse(one: Tmpc, other: Tmpc) -> bool:
    return (
        one.time_per_sample_s <= other.time_per_sample_s
        and one.weights_bytes <= other.weights_bytes
        and one.activation_bytes <= other.activation_bytes
        and one.activation_bytes + one.fixed_bytes <= other.activation_bytes + other.fixed_bytes
        and all(size <= other.forward_sync_bytes[u] for u, size in one.forward_sync_bytes.items())
        and all(size <= other.backward_sync_bytes[w] for w, size in one.backward_sync_bytes.items())
    )
