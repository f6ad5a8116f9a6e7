"""What a user may forbid or ask of a plan: small objects, each of which says what it leaves and what breaks it.

A constraint acts on stages, then planners leave out what it does not admit (``cost.variants`` makes stage variants of
it, and planners ask it for degrees), or on the plan as a whole, then only a planner that knows it can keep it. Either
way ``violations`` looks at a finished plan on its own: ``evaluate`` asks that, and nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

from piper_ray.model import arguments
from piper_ray.model.errors import UsageError

if TYPE_CHECKING:
    from piper_ray.model.instance import Instance
    from piper_ray.model.plan import Plan


class Scope(Enum):
    """STAGES: whether a stage is allowed depends on the stage alone. PLAN: it depends on others."""

    STAGES = "stages"
    PLAN = "plan"


class Constraint(ABC):
    """Base of all constraints: frozen dataclasses. What one does not override it leaves as it is."""

    scope: ClassVar[Scope] = Scope.STAGES

    def admits_tensor_parallel_degree(self, degree: int) -> bool:  # noqa: ARG002 - some constraints look at it
        """Whether a stage may have this t."""
        return True

    def admits_data_parallel_degree(self, degree: int) -> bool:  # noqa: ARG002
        """Whether a stage may have this d."""
        return True

    @property
    def roles(self) -> tuple[bool | None, ...]:
        """What the layers of a stage may be asked for: True, to recompute; False, not to; None, either.

        A layer without the choice keeps what it has. Each stage keeps to one of these.
        """
        return (None,)

    @abstractmethod
    def violations(self, instance: Instance, plan: Plan) -> Iterator[str]:
        """Each way in which a plan breaks it, in words, stages numbered from 1."""


@dataclass(frozen=True)
class NoTensorParallelism(Constraint):
    """Every stage has t = 1."""

    def admits_tensor_parallel_degree(self, degree: int) -> bool:
        return degree == 1

    def violations(self, instance: Instance, plan: Plan) -> Iterator[str]:  # noqa: ARG002
        for number, stage in enumerate(plan.stages, start=1):
            if stage.tensor_parallel_degree != 1:
                yield f"stage {number}: tensor-parallel degree {stage.tensor_parallel_degree}, but none is allowed"


@dataclass(frozen=True)
class NoDataParallelism(Constraint):
    """Every stage has d = 1."""

    def admits_data_parallel_degree(self, degree: int) -> bool:
        return degree == 1

    def violations(self, instance: Instance, plan: Plan) -> Iterator[str]:  # noqa: ARG002
        for number, stage in enumerate(plan.stages, start=1):
            if stage.data_parallel_degree != 1:
                yield f"stage {number}: data-parallel degree {stage.data_parallel_degree}, but none is allowed"


class Recompute(str, Enum):
    """Which recomputation choices a plan may make.

    AUTO: each layer as it is best. ALWAYS, NEVER: every layer that has the choice does, or does not.
    ALL_OR_NONE: within a stage, every layer that has the choice does, or none.
    """

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"
    ALL_OR_NONE = "all-or-none"


_ROLES: dict[Recompute, tuple[bool | None, ...]] = {
    Recompute.AUTO: (None,),
    Recompute.ALWAYS: (True,),
    Recompute.NEVER: (False,),
    Recompute.ALL_OR_NONE: (False, True),
}


@dataclass(frozen=True)
class RecomputeRule(Constraint):
    """rule: a ``Recompute`` or its text, such as "never". Raises UsageError for what is neither."""

    rule: Recompute

    def __post_init__(self) -> None:
        object.__setattr__(self, "rule", arguments.choice("recompute", self.rule, Recompute))

    @property
    def roles(self) -> tuple[bool | None, ...]:
        return _ROLES[self.rule]

    def violations(self, instance: Instance, plan: Plan) -> Iterator[str]:
        for number, stage in enumerate(plan.stages, start=1):
            against: dict[bool, list[int]] = {
                True: [],
                False: [],
            }  # by the role asked for: who could keep it and does not
            for layer_id in dict.fromkeys(stage.layers):
                layer = instance.layer_by_id.get(layer_id)
                row = () if layer is None else layer.tmpcs.get(stage.tensor_parallel_degree, ())
                chosen = next((tmpc for tmpc in row if tmpc.id == stage.tmpc_ids.get(layer_id)), None)
                for role, breaking in against.items():
                    if chosen is not None and chosen.recompute != role and any(x.recompute == role for x in row):
                        breaking.append(layer_id)
            if None not in self.roles and all(against[role] for role in self.roles if role is not None):
                listed = ", ".join(str(layer) for role in self.roles if role is not None for layer in against[role][:5])
                yield f"stage {number}: recomputation is to be {self.rule.value}, layers such as {listed} break that"


@dataclass(frozen=True)
class TensorParallelDegrees(Constraint):
    """degrees: those that t may be, ascending. Raises UsageError unless there are some, positive and rising."""

    degrees: tuple[int, ...]

    def __post_init__(self) -> None:
        degrees = arguments.whole_numbers("degrees", self.degrees)
        if not degrees or degrees[0] < 1 or any(later <= earlier for earlier, later in pairwise(degrees)):
            raise UsageError(
                f"tensor-parallel degrees must be positive and rising, not {arguments.shown(self.degrees)}"
            )
        object.__setattr__(self, "degrees", degrees)

    def admits_tensor_parallel_degree(self, degree: int) -> bool:
        return degree in self.degrees

    def violations(self, instance: Instance, plan: Plan) -> Iterator[str]:  # noqa: ARG002
        for number, stage in enumerate(plan.stages, start=1):
            if stage.tensor_parallel_degree not in self.degrees:
                allowed = ", ".join(map(str, self.degrees))
                yield f"stage {number}: tensor-parallel degree {stage.tensor_parallel_degree}, not one of {allowed}"


@dataclass(frozen=True)
class SameDegrees(Constraint):
    """All stages have one d and one t, as runtimes that flush each batch need it."""

    scope: ClassVar[Scope] = Scope.PLAN

    def violations(self, instance: Instance, plan: Plan) -> Iterator[str]:  # noqa: ARG002
        degrees = {(stage.data_parallel_degree, stage.tensor_parallel_degree) for stage in plan.stages}
        if len(degrees) > 1:
            yield f"stages differ in their degrees: {', '.join(f'd={d} t={t}' for d, t in sorted(degrees))}"


@dataclass(frozen=True)
class StageCount(Constraint):
    """stages: p. Raises UsageError unless it is a positive number."""

    scope: ClassVar[Scope] = Scope.PLAN
    stages: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", arguments.positive("stages", self.stages))

    def violations(self, instance: Instance, plan: Plan) -> Iterator[str]:  # noqa: ARG002
        if len(plan.stages) != self.stages:
            yield f"{len(plan.stages)} stages, but {self.stages} are asked for"


@dataclass(frozen=True)
class AllDevices(Constraint):
    """No device is left over."""

    scope: ClassVar[Scope] = Scope.PLAN

    def violations(self, instance: Instance, plan: Plan) -> Iterator[str]:
        if plan.devices != instance.devices:
            yield f"{plan.devices} of {instance.devices} devices are used, but all of them are to be"
