"""A certificate as plain data; which claims can be certified: of Piper's own schedule, under constraints on what a
stage may be; and the ways in which such a stage may run. ``file`` keeps a certificate, ``check`` judges it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from piper_ray.model import constraints
from piper_ray.model.constraints import KeepOrder, Recompute
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import Instance, Tmpc
from piper_ray.model.options import Contract
from piper_ray.model.plan_rules import in_order
from piper_ray.model.restrictions import Restrictions
from piper_ray.model.schedule import PAPERS_SCHEDULE, Schedule


@dataclass(frozen=True, eq=False)
class Tails:
    """What tails of the pipeline take at least, in plans on up to ``devices`` devices: one row for each pair.

    layers: the layers that downsets are told apart by, each after its successors: bit v % 8 of byte v // 8 stands for
    layers[v]. joined: each of the other layers, with the one of these whose stage it shares.
    members: uint8[rows, bytes], the tail's layers. used_devices, data_parallel_sum: int64[rows].

    >>> import piper_ray
    >>> bert = piper_ray.estimate("bert-large", "A100-80")
    >>> certificate = piper_ray.certify(bert, piper_ray.solve(bert, threads=1, schedule="2bw"))
    >>> certificate.tails[-1].devices
    8
    """

    devices: int
    layers: tuple[int, ...]
    joined: Mapping[int, int]
    members: npt.NDArray[np.uint8]
    used_devices: npt.NDArray[np.int64]
    data_parallel_sum: npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Certificate:
    """That no plan of a workload that keeps ``restrictions`` takes less than bound_s, seconds per sample, under "2bw".

    bound_s: inf where there is no plan at all. digest: the instance's. tails: for each size of group with a link of its
    own, the smallest first, and last for all devices.

    >>> import piper_ray
    >>> bert = piper_ray.estimate("bert-large", "A100-80")
    >>> solution = piper_ray.solve(bert, threads=1, schedule="2bw")
    >>> certificate = piper_ray.certify(bert, solution)
    >>> piper_ray.verify_certificate(bert, certificate).bound_s == certificate.bound_s
    True
    """

    digest: str
    name: str
    restrictions: Restrictions
    bound_s: float
    tails: tuple[Tails, ...]


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


_CERTIFIED: Mapping[str, type[constraints.Constraint]] = {
    kind.__name__: kind
    for kind in (
        constraints.NoTensorParallelism,
        constraints.NoDataParallelism,
        constraints.RecomputeRule,
        constraints.TensorParallelDegrees,
        constraints.DataParallelDegrees,
        KeepOrder,
    )
}
_RULES = (Recompute.AUTO, Recompute.ALWAYS, Recompute.NEVER, Recompute.ALL_OR_NONE)


def require_certifiable(
    restrictions: Restrictions, schedule: Schedule = PAPERS_SCHEDULE, contract: Contract = Contract.SAFE
) -> None:
    """Raises UsageError for what no certificate is made for, by name."""
    if schedule != PAPERS_SCHEDULE:
        raise UsageError(
            f"certificates are made of bounds under 2bw alone, not under {schedule.name.value}: give schedule 2bw"
        )
    if contract is not Contract.SAFE:
        raise UsageError("the bound of a plan of operators' blocks has no certificate: leave out contract")
    unknown = [repr(x) for x in restrictions.constraints if type(x).__name__ not in _CERTIFIED]
    if restrictions.recompute not in _RULES:
        unknown.append(f"recomputation {restrictions.recompute.value}")
    if unknown:
        raise UsageError(f"bounds under {', '.join(unknown)} have no certificate")


def charged(instance: Instance, restrictions: Restrictions) -> Instance:
    """What plans that keep the restrictions are charged for: the chain of its layers where they keep their order."""
    return in_order(instance) if restrictions.has(KeepOrder) else instance


def restrictions_of(document: object) -> Restrictions:
    """The way back from ``Restrictions.to_dict``. Raises UsageError, or what Python does for other documents."""
    if not isinstance(document, dict):
        raise UsageError("no restrictions")
    others = []
    for listed in document.get("constraints", []):
        fields = {name: tuple(x) if isinstance(x, list) else x for name, x in listed.items() if name != "kind"}
        if listed["kind"] not in _CERTIFIED:
            raise UsageError(f"{listed['kind']} is certified by nobody")
        others.append(_CERTIFIED[listed["kind"]](**fields))
    found = Restrictions(
        tensor_parallelism=document["tensor_parallelism"],
        data_parallelism=document["data_parallelism"],
        recompute=document["recompute"],
        constraints=others,
    )
    require_certifiable(found)
    return found
