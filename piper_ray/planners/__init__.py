"""Planners, the exact one and simpler ones to compare with: one protocol, and all valued by the same ``evaluate``
under the schedule asked for.

result = piper_ray.planners.plan(instance, "pipedream-2bw", restrictions=restrictions)
result.plan, result.time_per_sample_s, result.note
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from piper_ray.model import arguments
from piper_ray.model.constraints import Recompute, Restrictions
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import Instance
from piper_ray.model.options import EXACT
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.model.solution import Forecast
from piper_ray.planners.equal_runs import DataParallel, EqualRuns, GPipe, Megatron, PipeDream2BW, TensorParallel
from piper_ray.planners.kind_runs import KindRuns, OneKind
from piper_ray.planners.pipedream.planner import Level, Partition, PipeDream, Recurrence, States
from piper_ray.planners.planner import (
    BaselineResult,
    Exact,
    NamedPlanner,
    Needs,
    Planner,
    Proposal,
    Terms,
    allowed_proposal,
    evaluated,
)
from piper_ray.planners.published.paper_table import (
    DEFAULT_TABLE_LIMIT_BYTES,
    TmpcChoice,
    bytes_per_downset,
    checked_limit_bytes,
    paper_table,
)
from piper_ray.workloads.formats.load import Source, instance_of

__all__ = [
    "plan",
    "planner_of",
    "PLANNERS",
    "ALL_NAMES",
    "KIND_PLANNERS",
    "BaselineResult",
    "Planner",
    "NamedPlanner",
    "Needs",
    "Proposal",
    "Terms",
    # the planners and their parameters
    "Exact",
    "PipeDream2BW",
    "DataParallel",
    "TensorParallel",
    "GPipe",
    "Megatron",
    "EqualRuns",
    "PipeDream",
    "Recurrence",
    "Level",
    "States",
    "Partition",
    "PiperPublished",
]


def plan(
    instance: Instance | Source,
    planner: str | Planner,
    *,
    restrictions: Restrictions = Restrictions(),
    schedule: Schedule | ScheduleName | str | None = None,
) -> BaselineResult:
    """What a planner proposes, valued by ``evaluate``. planner: as ``planner_of`` takes it, or one with its parameters.

    instance: may be what ``load`` takes, such as a path. schedule: the schedule that the planner chooses its best plan
    for, and that the plan is valued under; None: the instance's own, else Piper's. Under a flush a plan with stages of
    different degrees is refused: no runtime runs it. Raises UsageError for arguments that make no sense, InputError for
    an instance that is not sound, and LimitError where a planner's tables would be too large.

    >>> import piper_ray
    >>> result = piper_ray.baselines.plan(piper_ray.estimate("bert-large", "A100-80"), "data-parallel")
    >>> [stage.data_parallel_degree for stage in result.plan.stages]
    [8]
    """
    arguments.of_kind("restrictions", restrictions, Restrictions, "Restrictions")
    if isinstance(planner, type) or not (isinstance(planner, str) or callable(getattr(planner, "propose", None))):
        names = ", ".join([*PLANNERS, EXACT])
        raise UsageError(
            f"planner must be a planner such as Megatron(), or one of {names}; not {arguments.shown(planner)}"
        )
    instance = instance_of(instance)
    under = Schedule.first_of(schedule, instance.schedule).settled
    instance = instance.replace(schedule=under)
    if isinstance(planner, str):
        name, planner = planner, planner_of(planner)
    else:
        name = repr(planner)
    proposal, evaluation = evaluated(instance, allowed_proposal(planner, instance, restrictions))
    return BaselineResult(name, proposal.plan, evaluation, proposal.tried, proposal.note, proposal.solution, under)


@dataclass(frozen=True)
class PiperPublished:
    """dp[I][k][s] over all downsets, on one thread: seconds to minutes at thousands of devices.

    Raises LimitError when the table would take more than ``table_limit_bytes``.
    """

    table_limit_bytes: int = DEFAULT_TABLE_LIMIT_BYTES

    def __post_init__(self) -> None:
        object.__setattr__(self, "table_limit_bytes", checked_limit_bytes(self.table_limit_bytes))

    def propose(self, instance: Instance, restrictions: Restrictions) -> Proposal:
        if restrictions.recompute in (Recompute.FIRST_K, Recompute.ONE_FOR_ALL):
            restrictions = restrictions.with_recompute(Recompute.ALL_OR_NONE)  # as far as the table can go
        table = paper_table(
            instance,
            restrictions=restrictions,
            choice=TmpcChoice.GREEDY,
            table_limit_bytes=self.table_limit_bytes,
        )
        size = f"table of {table.downsets:,} downsets and {table.pairs:,} pairs"
        if table.plan is None:
            return Proposal(None, table.pairs, f"no plan in a {size}")
        return Proposal(table.plan, table.pairs, f"{size}, greedy choice of TMPCs: {table.time_per_sample_s:.6g} s")

    def needs(self, lattice: Forecast, devices: int, microbatches: int) -> Needs:
        table_bytes = float(bytes_per_downset(devices, min(devices, microbatches))) * (lattice.downsets or 0)
        return Needs.of_tables(min(table_bytes, self.table_limit_bytes))


PLANNERS: Mapping[str, Callable[..., NamedPlanner]] = MappingProxyType(
    {
        "pipedream-2bw": PipeDream2BW,
        "data-parallel": DataParallel,
        "tensor-parallel": TensorParallel,
        "gpipe": GPipe,
        "megatron": Megatron,
        "pipedream": PipeDream,
        "piper-published": PiperPublished,
    }
)
"""The planners to compare the exact one with, by name, with default parameters."""

KIND_PLANNERS: Mapping[str, Callable[..., NamedPlanner]] = MappingProxyType(
    {
        "even-layers": partial(KindRuns, by_speed=False),
        "layers-by-speed": partial(KindRuns, by_speed=True),
        "one-kind": OneKind,
    }
)
"""The planners on devices of several kinds."""

ALL_NAMES = (EXACT, *PLANNERS, *KIND_PLANNERS)


def planner_of(text: str, terms: Terms | None = None) -> NamedPlanner:
    """``NAME`` or ``NAME:key=value,key=value``. terms: those of the exact one.

    Raises UsageError for a name, key or value that is unknown.
    """
    arguments.of_kind("planner", text, str, "a text such as 'megatron'")
    name, _, settings = text.partition(":")
    if name not in ALL_NAMES:
        names = [*PLANNERS, *KIND_PLANNERS, EXACT]
        meant = arguments.did_you_mean(name, names)
        raise UsageError(f"planner {name!r} is unknown; expected one of {', '.join(names)}{meant}")
    known = _SETTINGS.get(name, {})
    chosen: dict[str, Any] = {}
    for setting in filter(None, settings.split(",")):
        key, _, value = setting.partition("=")
        if key not in known:
            raise UsageError(
                f"planner {name} has no setting {key!r}; "
                + (f"expected one of {', '.join(known)}" if known else "it has none")
            )
        try:
            chosen[key.replace("-", "_")] = known[key](value)
        except ValueError:
            raise UsageError(f"planner {name}: {value!r} is no value for {key}") from None
    return Exact(terms or Terms()) if name == EXACT else {**PLANNERS, **KIND_PLANNERS}[name](**chosen)


def _flag(text: str) -> bool:
    """Named alone it is on."""
    if text not in ("", "yes", "no"):
        raise ValueError(text)
    return text != "no"


def _levels(text: str) -> tuple[Level, ...]:
    """``4x100GB/s+8x10GB/s``: groups of 4 devices, and 8 such groups."""
    from piper_ray.model.units import parse_bytes_per_s

    parts = [part.partition("x") for part in text.split("+")]
    return tuple(
        Level(int(machines), parse_bytes_per_s(bandwidth, unit_required=True)) for machines, _, bandwidth in parts
    )


def _ratio(text: str) -> float | None:
    return None if text == "none" else float(text)


_SETTINGS: Mapping[str, Mapping[str, Callable[[str], object]]] = {
    "pipedream-2bw": {"separate": _flag},
    "megatron": {"devices-per-node": int},
    "pipedream": {
        "states": States,
        "levels": _levels,
        "activation-compression-ratio": _ratio,
        "recurrence": Recurrence,
        "straight": _flag,
    },
}
"""For each planner, by its field's name with hyphens, how the value is read that a user writes (ValueError: none)."""
