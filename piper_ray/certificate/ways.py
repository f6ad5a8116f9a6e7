"""The ways in which a stage may be run: its tensor-parallel degree, replicas, and what its layers may choose from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from piper_ray.model.constraints import Recompute
from piper_ray.model.instance import Instance, Tmpc
from piper_ray.model.restrictions import Restrictions


@dataclass(frozen=True)
class StageWay:
    """degree: t. tmpcs: for each layer id what it may run, nothing if it cannot be in such a stage.

    data_parallel_degrees: those at which just these configurations are there, ascending.
    """

    degree: int
    data_parallel_degrees: tuple[int, ...]
    tmpcs: Mapping[int, tuple[Tmpc, ...]]


def ways_of(instance: Instance, restrictions: Restrictions) -> tuple[StageWay, ...]:
    """Each stage of each plan that keeps the restrictions is run in one of these, by ``evaluate``'s rules."""
    return tuple(_ways(instance, restrictions))


def _ways(instance: Instance, restrictions: Restrictions) -> Iterator[StageWay]:
    degrees = restrictions.data_parallel_degrees(instance)
    starts = [*instance.least_data_parallel_degrees, instance.data_parallel_limit + 1]
    for t in instance.degrees:
        if t > instance.devices or not restrictions.admits_tensor_parallel_degree(t):
            continue
        for role in _roles(restrictions.recompute):
            rows = {layer.id: _in_role(layer.tmpcs.get(t, ()), role) for layer in instance.layers}
            for least, beyond in pairwise(starts):
                inside = tuple(d for d in degrees if least <= d < beyond)
                if inside:
                    yield StageWay(
                        t,
                        inside,
                        {
                            layer: tuple(x for x in row if x.least_data_parallel_degree <= least)
                            for layer, row in rows.items()
                        },
                    )


def _roles(rule: Recompute) -> tuple[bool | None, ...]:
    """What the layers of a stage that have the choice do: recompute, not recompute, or either."""
    return {Recompute.ALWAYS: (True,), Recompute.NEVER: (False,), Recompute.ALL_OR_NONE: (False, True)}.get(
        rule, (None,)
    )


def _in_role(row: tuple[Tmpc, ...], role: bool | None) -> tuple[Tmpc, ...]:
    if role is None or {tmpc.recompute for tmpc in row} != {False, True}:
        return row
    return tuple(tmpc for tmpc in row if tmpc.recompute == role)
