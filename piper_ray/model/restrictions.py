"""All constraints of a plan together, with names for the usual three. Also the conditions under which all devices can
be
used: they number d t p, where d divides a batch's microbatches."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from piper_ray.model import arguments
from piper_ray.model.constraints import (
    AllDevices,
    Constraint,
    NoDataParallelism,
    NoTensorParallelism,
    Recompute,
    RecomputeRule,
    SameDegrees,
    Scope,
    StageCount,
)
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import Instance, Tmpc, divisors
from piper_ray.model.plan import Plan
from piper_ray.model.schedule import PAPERS_SCHEDULE, Schedule


@dataclass(frozen=True, init=False)
class Restrictions:
    """What plans must keep. constraints: at most one of each kind, the usual three first.

    tensor_parallelism, data_parallelism: whether it is allowed. recompute: a ``Recompute`` or its text, such as
    "never". These stand for ``NoTensorParallelism()``, ``NoDataParallelism()`` and ``RecomputeRule(recompute)``.

    Raises UsageError for other values, and for two different constraints of one kind.

    >>> from piper_ray import SameDegrees, StageCount
    >>> restrictions = Restrictions(tensor_parallelism=False, constraints=[SameDegrees(), StageCount(4)])
    >>> len(restrictions.constraints)
    3
    """

    constraints: tuple[Constraint, ...]

    def __init__(
        self,
        tensor_parallelism: bool = True,
        data_parallelism: bool = True,
        recompute: Recompute | str = Recompute.AUTO,
        constraints: Iterable[Constraint] = (),
    ) -> None:
        usual: list[Constraint] = []
        if not arguments.flag("tensor_parallelism", tensor_parallelism):
            usual.append(NoTensorParallelism())
        if not arguments.flag("data_parallelism", data_parallelism):
            usual.append(NoDataParallelism())
        usual.append(RecomputeRule(arguments.choice("recompute", recompute, Recompute)))
        object.__setattr__(self, "constraints", _one_of_a_kind([*usual, *_constraints(constraints)]))

    def adding(self, *constraints: Constraint) -> Restrictions:
        """These constraints and more. Raises UsageError as the constructor does."""
        return Restrictions(constraints=(*self.constraints, *constraints))

    def with_recompute(self, rule: Recompute) -> Restrictions:
        """These constraints with another rule of recomputation."""
        others = (x for x in self.constraints if not isinstance(x, RecomputeRule))
        return Restrictions(recompute=rule, constraints=others)

    def without(self, kind: type[Constraint]) -> Restrictions:
        """These constraints without those of one kind."""
        return Restrictions(constraints=[x for x in self.constraints if not isinstance(x, kind)])

    def has(self, kind: type[Constraint]) -> bool:
        """Whether there is a constraint of this kind."""
        return any(isinstance(constraint, kind) for constraint in self.constraints)

    @property
    def tensor_parallelism(self) -> bool:
        """Whether t > 1 is allowed: there is no ``NoTensorParallelism``."""
        return not self.has(NoTensorParallelism)

    @property
    def data_parallelism(self) -> bool:
        """Whether d > 1 is allowed: there is no ``NoDataParallelism``."""
        return not self.has(NoDataParallelism)

    @property
    def recompute(self) -> Recompute:
        """The rule of the ``RecomputeRule``; AUTO if there is none."""
        rules = (constraint.rule for constraint in self.constraints if isinstance(constraint, RecomputeRule))
        return next(rules, Recompute.AUTO)

    @property
    def stage_count(self) -> int | None:
        """p, if there is a ``StageCount``: the number of stages, or of ranks where a rank holds several."""
        return next((constraint.stages for constraint in self.constraints if isinstance(constraint, StageCount)), None)

    @property
    def all_devices(self) -> bool:
        """Whether all devices must be used: there is an ``AllDevices``."""
        return self.has(AllDevices)

    @property
    def others(self) -> tuple[Constraint, ...]:
        """The constraints other than the usual three."""
        return tuple(constraint for constraint in self.constraints if not isinstance(constraint, _USUAL))

    def admits_tensor_parallel_degree(self, degree: int) -> bool:
        """Whether a stage may have this t: every constraint admits it."""
        return all(constraint.admits_tensor_parallel_degree(degree) for constraint in self.constraints)

    def admits_data_parallel_degree(self, degree: int) -> bool:
        """Whether a stage may have this d: every constraint admits it."""
        return all(constraint.admits_data_parallel_degree(degree) for constraint in self.constraints)

    def admits_devices(self, devices: int, rows: Collection[Sequence[Tmpc]]) -> bool:
        """Whether a stage may have this many devices: every constraint admits it. rows: the TMPCs of each of its
        layers."""
        return all(constraint.admits_devices(devices, rows) for constraint in self.constraints)

    def data_parallel_degrees(self, instance: Instance) -> list[int]:
        """The degrees that a stage can have, ascending: divisors of N up to min(N, K) that all constraints admit, and
        with several sites multiples of their number."""
        limit, each = instance.data_parallel_limit, len(instance.cluster.sites) or 1
        found = (d for d in divisors(instance.microbatches) if d <= limit and d % each == 0)
        return [d for d in found if self.admits_data_parallel_degree(d)]

    @property
    def roles(self) -> tuple[bool | None, ...]:
        """The choices of recomputation for a stage that all constraints admit (``Constraint.roles``)."""
        left: tuple[bool | None, ...] = (None,)
        for constraint in self.constraints:
            asked = constraint.roles
            left = asked if left == (None,) else left if asked == (None,) else tuple(x for x in left if x in asked)
        return left

    def violations(self, instance: Instance, plan: Plan, schedule: Schedule = PAPERS_SCHEDULE) -> Iterator[str]:
        """Yields each violation of one of these constraints by a plan, as a sentence.

        For a constraint about ranks, the stages that the schedule puts on one rank count as one.
        """
        ranks = plan.by_rank(schedule)
        for constraint in self.constraints:
            yield from constraint.violations(instance, ranks if constraint.is_of_ranks else plan)

    @property
    def plan_wide(self) -> tuple[Constraint, ...]:
        """The constraints that are about more than one stage."""
        return tuple(constraint for constraint in self.constraints if constraint.scope is Scope.PLAN)

    def require_stages_alone(self, planner: str) -> None:
        """Raises UsageError if some constraint is about the whole plan. planner: the name of one that keeps no such
        constraint."""
        if self.plan_wide:
            raise UsageError(f"{planner} plans stage by stage and cannot keep {', '.join(map(repr, self.plan_wide))}")

    def require_same_degrees(self, how: str, *also: type[Constraint]) -> None:
        """Raises UsageError for constraints that searches with one d and one t for all stages do not keep.

        how: the words for such plans in the error. also: further constraints that the schedule's solver keeps.
        """
        unknown = [
            rule for rule in self.plan_wide if not isinstance(rule, (SameDegrees, StageCount, AllDevices, *also))
        ]
        if unknown:
            raise UsageError(f"plans {how} cannot keep {', '.join(map(repr, unknown))} yet")

    def to_dict(self) -> dict[str, object]:
        """Ready for ``json.dump``: the usual three by name, and other constraints under ``constraints`` if there are
        any."""
        usual: dict[str, object] = {
            "tensor_parallelism": self.tensor_parallelism,
            "data_parallelism": self.data_parallelism,
            "recompute": self.recompute.value,
        }
        others = [{"kind": type(constraint).__name__, **_fields(constraint)} for constraint in self.others]
        return usual | ({"constraints": others} if others else {})


_USUAL = (NoTensorParallelism, NoDataParallelism, RecomputeRule)


def _constraints(given: object) -> list[Constraint]:
    listed: list[Any] = list(given) if isinstance(given, Iterable) else [given]
    for constraint in listed:
        arguments.of_kind("constraints", constraint, Constraint, "Constraint objects such as NoTensorParallelism()")
    return listed


def _one_of_a_kind(constraints: list[Constraint]) -> tuple[Constraint, ...]:
    """The constraints without duplicates and without those that restrict nothing."""
    found: dict[type[Constraint], Constraint] = {}
    for constraint in constraints:
        if isinstance(constraint, RecomputeRule) and constraint.rule is Recompute.AUTO:
            continue
        if found.setdefault(type(constraint), constraint) != constraint:
            raise UsageError(f"{found[type(constraint)]!r} and {constraint!r} contradict each other; expected one")
    order: dict[type, int] = {kind: index for index, kind in enumerate(_USUAL)}
    return tuple(sorted(found.values(), key=lambda constraint: order.get(type(constraint), len(order))))


def _fields(constraint: Constraint) -> dict[str, object]:
    values = vars(constraint)  # the fields of a frozen dataclass
    return {name: value.value if isinstance(value, Enum) else value for name, value in values.items()}


_NEAR = 1 / 50
"""How much a suggested batch may differ from the requested one, relative."""


def can_use_all(instance: Instance, restrictions: Restrictions) -> bool:
    """Whether plans with one d and one t can use all devices; memory is not considered."""
    most, wanted = len(instance.layers), restrictions.stage_count
    for d in restrictions.data_parallel_degrees(instance):
        for t in filter(restrictions.admits_tensor_parallel_degree, instance.degrees):
            ranks, left = divmod(instance.devices, d * t)
            if left == 0 and ranks <= most and wanted in (None, ranks):
                return True
    return False


def reason_against_all(instance: Instance, restrictions: Restrictions) -> str:
    """Explains to the user why no plan can use all devices."""
    devices, microbatches = instance.devices, instance.microbatches
    degrees = [str(t) for t in instance.degrees if restrictions.admits_tensor_parallel_degree(t)]
    wanted = restrictions.stage_count
    ranks = f"at most {len(instance.layers):,}, the layers" if wanted is None else f"{wanted:,}"
    fitting = divisible_batch(microbatches, devices)
    other = "" if fitting == microbatches else f"; {fitting:,} microbatches may do"
    return (
        f"no plan with one d and one t uses all {devices:,} devices: of d t p = {devices:,}, d divides the "
        f"{microbatches:,} microbatches, t is {', '.join(degrees) or 'nothing'}, and p {ranks}{other}"
    )


def divisible_batch(batch: int, devices: int) -> int:
    """A batch near ``batch`` that allows more degrees to use all devices. It is a multiple of the odd part of
    ``devices``, and of the largest power of two that leaves it near enough."""
    step = odd_part(devices)
    found = max(1, round(batch / step)) * step
    while 2 * step <= batch:
        step *= 2
        near = round(batch / step) * step
        if abs(near - batch) > _NEAR * batch:
            break
        found = near
    return found


def odd_part(number: int) -> int:
    """The largest odd divisor of a number."""
    return number // (number & -number)
