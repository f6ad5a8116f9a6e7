"""Which claims can be certified: of Piper's own schedule, under constraints on what a stage may be."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from piper_ray.model.constraints import (
    Constraint,
    DataParallelDegrees,
    KeepOrder,
    NoDataParallelism,
    NoTensorParallelism,
    Recompute,
    RecomputeRule,
    TensorParallelDegrees,
)
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import Instance
from piper_ray.model.options import Contract
from piper_ray.model.plan_rules import in_order
from piper_ray.model.restrictions import Restrictions
from piper_ray.model.schedule import PAPERS_SCHEDULE, Schedule

_CERTIFIED: Mapping[str, type[Constraint]] = MappingProxyType(
    {
        kind.__name__: kind
        for kind in (
            NoTensorParallelism,
            NoDataParallelism,
            RecomputeRule,
            TensorParallelDegrees,
            DataParallelDegrees,
            KeepOrder,
        )
    }
)
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
