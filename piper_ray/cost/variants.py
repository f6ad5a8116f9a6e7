"""Stage variants: a tensor-parallel degree together with the TMPCs that a stage of that degree may choose from.

Constraints remove degrees and TMPCs. "All or none" makes two variants of each degree, one that recomputes and one that
does not, "first k" one for each place in the layers' order; TMPCs with a least data-parallel degree make one for each
range of these degrees. The solver handles recomputation and least degrees only through variants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TypeVar

from piper_ray.model.constraints import Recompute, Restrictions
from piper_ray.model.instance import Instance, Tmpc
from piper_ray.model.plan_rules import layers_in_order
from piper_ray.model.solution import Infeasibility

_Kind = TypeVar("_Kind")

ANY_DEGREE = 2**62
"""Larger than any data-parallel degree."""


@dataclass(frozen=True)
class Variant:
    """degree: t. tmpcs: for each layer id those that it may run; empty if it cannot be in such a stage.

    least_data_parallel_degree, most_data_parallel_degree: the range of d of its stages. All its TMPCs are allowed at
    all these degrees. recompute: what its layers must do; None: either. kind: of its devices, if the cluster has
    several.
    """

    degree: int
    tmpcs: Mapping[int, tuple[Tmpc, ...]]
    least_data_parallel_degree: int = 1
    most_data_parallel_degree: int = ANY_DEGREE
    recompute: bool | None = field(default=None, compare=False)
    kind: str = ""


def stage_variants(instance: Instance, restrictions: Restrictions) -> tuple[Variant, ...]:
    """Returns all variants that the restrictions leave, by ascending degree, non-recomputing before recomputing."""
    degrees = [t for t in instance.degrees if restrictions.admits_tensor_parallel_degree(t)]
    variants: list[Variant] = []
    for degree, kind in product(degrees, instance.cluster.kind_names):
        rows = {x.id: tuple(y for y in x.tmpcs.get(degree, ()) if y.kind == kind) for x in instance.layers}
        if not any(rows.values()):
            continue
        for recompute in restrictions.roles:
            allowed = {layer: _allowed(row, recompute) for layer, row in rows.items()}
            for variant in _by_replicas(instance, Variant(degree, allowed, kind=kind), restrictions):
                if variant not in variants:
                    variants.append(replace(variant, recompute=recompute))
        if restrictions.recompute is Recompute.FIRST_K and set(restrictions.roles) == {False, True}:
            for allowed in _first_of_all(instance, rows):
                variants += _by_replicas(instance, Variant(degree, allowed, kind=kind), restrictions)
    return tuple(variants)


def usable_variants(instance: Instance, restrictions: Restrictions) -> tuple[Variant, ...]:
    """Returns the variants whose stages do not need more devices than there are."""
    return tuple(
        variant
        for variant in stage_variants(instance, restrictions)
        if variant.degree <= instance.cluster.of_kind(variant.kind).devices
    )


def _first_of_all(instance: Instance, rows: Mapping[int, tuple[Tmpc, ...]]) -> Iterator[dict[int, tuple[Tmpc, ...]]]:
    """Makes a variant for each number of layers that have the choice, except none and all: the first ones up to it
    recompute.

    The first k layers of any stage are those before some place in the order of all layers. So the variants of all
    places include each k of each stage, and nothing else.
    """
    free = [layer for layer in layers_in_order(instance) if len({tmpc.recompute for tmpc in rows[layer]}) == 2]
    for count in range(1, len(free)):
        first = set(free[:count])
        yield {layer: _allowed(row, layer in first) for layer, row in rows.items()}


def layer_without_choice(instance: Instance, variants: Sequence[Variant]) -> Infeasibility | None:
    """Returns why there is no plan if some layer fits in no allowed stage, whatever the memory; else None."""
    for layer in instance.layers:
        if not any(variant.tmpcs[layer.id] for variant in variants):
            degrees = ", ".join(str(t) for t in sorted(layer.tmpcs) if layer.tmpcs[t])
            return Infeasibility(
                f'layer {layer.id} ("{layer.name}") has configurations for tensor-parallel degree {degrees} only, '
                "which the number of devices and the restrictions do not allow",
                None,
            )
    return None


def replica_ranges(instance: Instance, restrictions: Restrictions) -> tuple[tuple[int, int], ...]:
    """Returns the ranges of data-parallel degrees with the same TMPCs, if a stage can have a degree in them.

    Together they cover all degrees that a stage can have.
    """
    starts = instance.least_data_parallel_degrees
    ranges = zip(starts, (*(start - 1 for start in starts[1:]), ANY_DEGREE), strict=True)
    possible = restrictions.data_parallel_degrees(instance)
    return tuple((least, most) for least, most in ranges if any(least <= d <= most for d in possible))


def link_ranges(
    instance: Instance,
    restrictions: Restrictions,
    degree: int,
    least: int = 1,
    most: int = ANY_DEGREE,
    kind: str = "",
) -> tuple[tuple[int, int], ...]:
    """Returns the ranges of data-parallel degrees for which the replicas of a stage, with t devices each, use the same
    link.

    Together they cover least .. most. kind: of the devices, if there are several.
    """
    cluster = instance.cluster.of_kind(kind) if kind else instance.cluster.levels()[-1]
    if len(cluster.links) == 1:
        return ((least, most),)
    starts, known = [least], None
    for d in restrictions.data_parallel_degrees(instance):
        if least <= d <= most and 1 < d <= max(1, instance.devices // degree):  # one replica has nothing to synchronise
            link = cluster.replicas_link(d, degree)
            if known is not None and link != known:
                starts.append(d)
            known = link
    return tuple(zip(starts, (*(start - 1 for start in starts[1:]), most), strict=True))


def by_links(instance: Instance, restrictions: Restrictions, variants: Sequence[Variant]) -> tuple[Variant, ...]:
    """Returns each variant once for each link that its stages' replicas may use; unchanged if there is one link."""
    if not instance.cluster.kinds and len(instance.cluster.levels()[-1].links) == 1:
        return tuple(variants)
    return tuple(
        replace(variant, least_data_parallel_degree=least, most_data_parallel_degree=most)
        for variant in variants
        for least, most in link_ranges(
            instance,
            restrictions,
            variant.degree,
            variant.least_data_parallel_degree,
            variant.most_data_parallel_degree,
            variant.kind,
        )
    )


def _by_replicas(instance: Instance, whole: Variant, restrictions: Restrictions) -> Iterator[Variant]:
    """Returns a variant once for each range of data-parallel degrees with the same TMPCs."""
    found: Variant | None = None
    for least, most in replica_ranges(instance, restrictions):
        tmpcs = {
            layer: tuple(tmpc for tmpc in listed if tmpc.least_data_parallel_degree <= least)
            for layer, listed in whole.tmpcs.items()
        }
        if found is not None and found.tmpcs == tmpcs:
            found = replace(found, most_data_parallel_degree=most)
            continue
        if found is not None:
            yield found
        found = replace(whole, tmpcs=tmpcs, least_data_parallel_degree=least, most_data_parallel_degree=most)
    if found is not None:
        yield found


def _allowed(tmpcs: tuple[Tmpc, ...], recompute: bool | None) -> tuple[Tmpc, ...]:
    """Returns the TMPCs with this recomputation. A layer without the choice keeps all."""
    if recompute is None:
        return tmpcs
    return tuple(tmpc for tmpc in tmpcs if tmpc.recompute == recompute) or tmpcs


def unbeaten(listed: Iterable[_Kind], never_loses: Callable[[_Kind, _Kind], bool]) -> tuple[_Kind, ...]:
    """Drops each that another one dominates; of equal ones the first stays."""
    kept: list[_Kind] = []
    for one in listed:
        if not any(never_loses(other, one) for other in kept):
            kept = [*(other for other in kept if not never_loses(one, other)), one]
    return tuple(kept)


def undominated(tmpcs: Iterable[Tmpc]) -> tuple[Tmpc, ...]:
    """Drops each TMPC that another one dominates in any stage of a variant; of equal ones the first stays."""
    return unbeaten(tmpcs, never_worse)


def never_worse(one: Tmpc, other: Tmpc, least_in_flight: int = 1) -> bool:
    """Whether a layer that runs ``one`` in place of ``other`` costs no more in any stage of a variant.

    Memory is a*y + b + shared/d with y >= least_in_flight and d >= 1. (While its rank holds the most, a chunk may have
    nothing in flight.) It is linear in y and in 1/d. So if it is no more at the least y, both for d = 1 and for
    infinite d, and a is no more, it is no more anywhere.
    """
    kept_bytes = one.activation_bytes * least_in_flight + one.fixed_bytes
    others_bytes = other.activation_bytes * least_in_flight + other.fixed_bytes
    return (
        one.time_per_sample_s <= other.time_per_sample_s
        and one.weights_bytes <= other.weights_bytes
        and one.activation_bytes <= other.activation_bytes
        and kept_bytes <= others_bytes
        and kept_bytes + one.shared_bytes <= others_bytes + other.shared_bytes
        and all(size <= other.forward_sync_bytes.get(u, 0.0) for u, size in one.forward_sync_bytes.items())
        and all(size <= other.backward_sync_bytes.get(w, 0.0) for w, size in one.backward_sync_bytes.items())
    )


PassesOf = Callable[[Tmpc], Sequence[float]]
"""Returns the seconds of each pass of a TMPC."""


def fastest_first(tmpc: Tmpc, passes_s: PassesOf, *, sync_first: bool = False) -> tuple[float, ...]:
    """Returns a key that sorts by time. sync_first: equally fast ones with the same weights are sorted by what they
    send, and not by what they hold."""
    held_bytes = tmpc.activation_bytes + tmpc.fixed_bytes + tmpc.shared_bytes
    sync_bytes = sum(tmpc.forward_sync_bytes.values()) + sum(tmpc.backward_sync_bytes.values())
    last = (sync_bytes, held_bytes) if sync_first else (held_bytes, sync_bytes)
    return (sum(passes_s(tmpc)), tmpc.weights_bytes, *last)


def least_by_passes(
    tmpcs: Iterable[Tmpc],
    passes_s: PassesOf,
    least_in_flight: int = 1,
    *,
    sync_first: bool = False,
) -> tuple[Tmpc, ...]:
    """Returns the TMPCs that no other dominates in any stage if each pass counts, in order of ``fastest_first``; of
    equal ones one. least_in_flight: as in ``never_worse``."""

    def never_loses(one: Tmpc, other: Tmpc) -> bool:
        shorter = all(mine <= theirs for mine, theirs in zip(passes_s(one), passes_s(other), strict=True))
        return shorter and never_worse(one, other, least_in_flight)

    return unbeaten(sorted(tmpcs, key=lambda tmpc: fastest_first(tmpc, passes_s, sync_first=sync_first)), never_loses)
