"""What a user may forbid or require of a plan: small objects, each of which says what it admits and what violates it.

A constraint may depend on single stages; planners then leave out the stages that it does not admit (``cost.variants``
makes stage variants with it, and planners ask it for degrees). Or it depends on the plan as a whole; then only a
planner that knows the constraint can keep it. In both cases ``violations`` checks a finished plan independently of
planners, and ``evaluate`` uses only that.

``Restrictions`` are all constraints of a plan together, with names for the usual three. Also the conditions under which
all devices can be used: they number d t p, where d divides a batch's microbatches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Any, ClassVar

from piper_ray.model import arguments
from piper_ray.model.errors import UsageError
from piper_ray.model.fields import plain_fields
from piper_ray.model.instance import Instance, Tmpc, divisors
from piper_ray.model.plan import Plan, Stage
from piper_ray.model.plan_rules import layers_in_order, order_violations
from piper_ray.model.schedule import PAPERS_SCHEDULE, Schedule


class Scope(Enum):
    """STAGES: whether a stage is allowed depends on the stage alone. PLAN: it also depends on other stages.

    >>> NoTensorParallelism().scope, StageCount(4).scope
    (<Scope.STAGES: 'stages'>, <Scope.PLAN: 'plan'>)
    """

    STAGES = "stages"
    PLAN = "plan"


class Constraint(ABC):
    """Base of all constraints, which are frozen dataclasses. A method that is not overridden restricts nothing.

    >>> class AtMostTwoStages(Constraint):
    ...     scope = Scope.PLAN
    ...     def violations(self, instance, plan, schedule):
    ...         if len(plan.stages) > 2:
    ...             yield f"{len(plan.stages)} stages, more than 2"
    """

    @property
    def scope(self) -> Scope:
        """Whether the constraint depends on single stages or on the whole plan."""
        return Scope.STAGES

    def admits_tensor_parallel_degree(self, degree: int) -> bool:  # noqa: ARG002 - some constraints look at it
        """Whether a stage may have this t."""
        return True

    def admits_data_parallel_degree(self, degree: int) -> bool:  # noqa: ARG002
        """Whether a stage may have this d."""
        return True

    def admits_devices(self, devices: int, rows: Collection[Sequence[Tmpc]]) -> bool:  # noqa: ARG002
        """Whether a stage may have this many devices, d t. rows: the TMPCs that each of its layers may run in."""
        return True

    @property
    def roles(self) -> tuple[bool | None, ...]:
        """The choices of recomputation that a stage's layers may have: True, all recompute; False, none does; None,
        free.

        A layer without the choice is not affected. Each stage follows one of these.
        """
        return (None,)

    @property
    def is_of_ranks(self) -> bool:
        """Whether the constraint is about ranks: where a schedule puts several stages on a rank, they count as one."""
        return False

    @abstractmethod
    def violations(self, instance: Instance, plan: Plan) -> Iterator[str]:
        """Yields each violation of the constraint by a plan as a sentence; stages are numbered from 1."""


class _DegreeRule(Constraint):
    """Base of constraints on the degrees of stages."""

    @property
    def _expected(self) -> str:
        return "but none is allowed"

    def violations(self, instance: Instance, plan: Plan) -> Iterator[str]:  # noqa: ARG002
        for number, stage in enumerate(plan.stages, start=1):
            if not self.admits_tensor_parallel_degree(stage.tensor_parallel_degree):
                yield f"stage {number}: tensor-parallel degree {stage.tensor_parallel_degree}, {self._expected}"
            if not self.admits_data_parallel_degree(stage.data_parallel_degree):
                yield f"stage {number}: data-parallel degree {stage.data_parallel_degree}, {self._expected}"


@dataclass(frozen=True)
class NoTensorParallelism(_DegreeRule):
    """Every stage has t = 1.

    >>> import piper_ray
    >>> bert = piper_ray.estimate("bert-large", "A100-80")
    >>> kept = piper_ray.Restrictions(constraints=[piper_ray.NoTensorParallelism()])
    >>> piper_ray.solve(bert, restrictions=kept, threads=1).plan
    Plan(1 stage on 8 devices; d x t: 8x1)
    """

    def admits_tensor_parallel_degree(self, degree: int) -> bool:
        return degree == 1


@dataclass(frozen=True)
class NoDataParallelism(_DegreeRule):
    """Every stage has d = 1.

    >>> import piper_ray
    >>> bert = piper_ray.estimate("bert-large", "A100-80")
    >>> kept = piper_ray.Restrictions(constraints=[piper_ray.NoDataParallelism()])
    >>> piper_ray.solve(bert, restrictions=kept, threads=1).plan
    Plan(8 stages on 8 devices; d x t: 1x1 (8 stages))
    """

    def admits_data_parallel_degree(self, degree: int) -> bool:
        return degree == 1


class Recompute(str, Enum):
    """Which recomputation choices a plan may make.

    AUTO: the best choice for each layer. ALWAYS, NEVER: every layer that has the choice recomputes, or none does.
    ALL_OR_NONE: within a stage, every layer that has the choice recomputes, or none does. FIRST_K: in each stage the
    first k layers that have the choice recompute (``layers_in_order``); k may differ between stages, while Megatron's
    block method has one k. ONE_FOR_ALL: over all stages, every layer that has the choice recomputes, or none does.

    >>> Recompute("all-or-none").value
    'all-or-none'
    """

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"
    ALL_OR_NONE = "all-or-none"
    FIRST_K = "first-k"
    ONE_FOR_ALL = "one-for-all"


_ONE_ROLE: dict[Recompute, bool | None] = {Recompute.AUTO: None, Recompute.ALWAYS: True, Recompute.NEVER: False}


@dataclass(frozen=True)
class RecomputeRule(Constraint):
    """Which layers of a stage may recompute.

    rule: a ``Recompute`` or its text, such as "never". Raises UsageError for any other value.

    >>> import piper_ray
    >>> bert = piper_ray.estimate("bert-large", "A100-80")
    >>> kept = piper_ray.Restrictions(constraints=[piper_ray.RecomputeRule("always")])
    >>> piper_ray.solve(bert, restrictions=kept, threads=1).plan
    Plan(1 stage on 8 devices; d x t: 8x1)
    """

    rule: Recompute

    def __post_init__(self) -> None:
        object.__setattr__(self, "rule", arguments.choice("recompute", self.rule, Recompute))

    @property
    def scope(self) -> Scope:
        return Scope.PLAN if self.rule is Recompute.ONE_FOR_ALL else Scope.STAGES

    @property
    def roles(self) -> tuple[bool | None, ...]:
        """The choices for whole stages. Under FIRST_K stages may also lie between the two."""
        return (_ONE_ROLE[self.rule],) if self.rule in _ONE_ROLE else (False, True)

    def violations(self, instance: Instance, plan: Plan) -> Iterator[str]:
        if self.rule is Recompute.AUTO:
            return
        order = layers_in_order(instance) if self.rule is Recompute.FIRST_K else ()
        made = [_recomputation_made(instance, stage) for stage in plan.stages]
        if self.rule is Recompute.ONE_FOR_ALL:
            everywhere = {layer: role for of_stage in made for layer, role in of_stage.items()}
            if against := self._against(everywhere, order):
                yield f"recomputation is to be one-for-all, layers such as {against} break that"
            return
        for number, of_stage in enumerate(made, start=1):
            if against := self._against(of_stage, order):
                yield f"stage {number}: recomputation is to be {self.rule.value}, layers such as {against} break that"

    def _against(self, made: Mapping[int, bool], order: Sequence[int]) -> str:
        """Some layers that had the choice and break the rule; empty if none does."""
        if self.rule is Recompute.FIRST_K:
            roles = [(layer, made[layer]) for layer in order if layer in made]
            late = [after for (before, one), (after, other) in pairwise(roles) if other and not one]
            return ", ".join(map(str, late[:5]))
        against = {role: [layer for layer, found in made.items() if found != role] for role in (True, False)}
        asked = [role for role in self.roles if role is not None]
        if not all(against[role] for role in asked):
            return ""
        return ", ".join(str(layer) for role in asked for layer in against[role][:5])


def choices_made(instance: Instance, stage: Stage) -> Iterator[tuple[int, tuple[Tmpc, ...], Tmpc]]:
    """The layers of a stage whose TMPC is known: the layer's id, the TMPCs to choose from, and the chosen one."""
    for layer_id in stage.layers:
        layer = instance.layer_by_id.get(layer_id)
        row = () if layer is None else layer.tmpcs.get(stage.tensor_parallel_degree, ())
        if stage.kind or instance.cluster.kinds:
            row = tuple(tmpc for tmpc in row if tmpc.kind == stage.kind)
        chosen = next((tmpc for tmpc in row if tmpc.id == stage.tmpc_ids.get(layer_id)), None)
        if chosen is not None:
            yield layer_id, row, chosen


def _recomputation_made(instance: Instance, stage: Stage) -> dict[int, bool]:
    """Whether each layer of the stage recomputes, for the layers that have the choice and a known TMPC."""
    return {
        layer_id: chosen.recompute
        for layer_id, row, chosen in choices_made(instance, stage)
        if len({tmpc.recompute for tmpc in row}) == 2
    }


@dataclass(frozen=True)
class _SomeDegrees(_DegreeRule):
    """Base of constraints that list the allowed degrees of one kind."""

    degrees: tuple[int, ...]

    _kind: ClassVar[str]

    def __post_init__(self) -> None:
        degrees = arguments.whole_numbers("degrees", self.degrees)
        if not degrees or degrees[0] < 1 or any(later <= earlier for earlier, later in pairwise(degrees)):
            given = arguments.shown(self.degrees)
            raise UsageError(f"{self._kind}-parallel degrees must be positive and rising, not {given}")
        object.__setattr__(self, "degrees", degrees)

    @property
    def _expected(self) -> str:
        return f"not one of {', '.join(map(str, self.degrees))}"


@dataclass(frozen=True)
class TensorParallelDegrees(_SomeDegrees):
    """The tensor-parallel degrees that stages may have.

    degrees: the values that t may have, ascending. Raises UsageError unless they are positive, rising and at least one.

    >>> import piper_ray
    >>> bert = piper_ray.estimate("bert-large", "A100-80")
    >>> kept = piper_ray.Restrictions(constraints=[piper_ray.TensorParallelDegrees((2, 4))])
    >>> piper_ray.solve(bert, restrictions=kept, threads=1).plan
    Plan(1 stage on 8 devices; d x t: 4x2)
    """

    _kind = "tensor"

    def admits_tensor_parallel_degree(self, degree: int) -> bool:
        return degree in self.degrees


@dataclass(frozen=True)
class DataParallelDegrees(_SomeDegrees):
    """degrees: the values that d may have, ascending. Raises UsageError unless they are positive, rising and at least
    one."""

    _kind = "data"

    def admits_data_parallel_degree(self, degree: int) -> bool:
        return degree in self.degrees


@dataclass(frozen=True)
class SameDegrees(Constraint):
    """All stages have the same d and the same t, which runtimes that flush each batch require.

    >>> import piper_ray
    >>> bert = piper_ray.estimate("bert-large", "A100-80")
    >>> kept = piper_ray.Restrictions(constraints=[piper_ray.SameDegrees()])
    >>> piper_ray.solve(bert, restrictions=kept, threads=1).plan
    Plan(1 stage on 8 devices; d x t: 8x1)
    """

    scope = Scope.PLAN

    def violations(self, instance: Instance, plan: Plan) -> Iterator[str]:  # noqa: ARG002
        degrees = {(stage.data_parallel_degree, stage.tensor_parallel_degree) for stage in plan.stages}
        if len(degrees) > 1:
            yield f"stages differ in their degrees: {', '.join(f'd={d} t={t}' for d, t in sorted(degrees))}"


@dataclass(frozen=True)
class SameDegreesByKind(SameDegrees):
    """All stages have the same d, and all stages on one kind of devices have the same t."""

    def violations(self, instance: Instance, plan: Plan) -> Iterator[str]:
        degrees = {(s.data_parallel_degree, s.kind, s.tensor_parallel_degree) for s in plan.stages}
        if len({d for d, _, _ in degrees}) > 1 or len(degrees) > len({kind for _, kind, _ in degrees}):
            yield from super().violations(instance, plan)


@dataclass(frozen=True)
class StageCount(Constraint):
    """A plan has exactly ``stages`` stages.

    stages: p. Raises UsageError unless it is a positive number.

    >>> import piper_ray
    >>> bert = piper_ray.estimate("bert-large", "A100-80")
    >>> kept = piper_ray.Restrictions(constraints=[piper_ray.StageCount(2)])
    >>> piper_ray.solve(bert, restrictions=kept, threads=1).plan
    Plan(2 stages on 8 devices; d x t: 4x1 (2 stages))
    """

    stages: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", arguments.positive("stages", self.stages))

    scope = Scope.PLAN
    is_of_ranks = True

    def violations(self, instance: Instance, plan: Plan) -> Iterator[str]:  # noqa: ARG002
        if len(plan.stages) != self.stages:
            yield f"{len(plan.stages)} stages, but {self.stages} are asked for"


@dataclass(frozen=True)
class AllDevices(Constraint):
    """The plan uses all devices.

    >>> import piper_ray
    >>> bert = piper_ray.estimate("bert-large", "A100-80")
    >>> kept = piper_ray.Restrictions(constraints=[piper_ray.AllDevices()])
    >>> piper_ray.solve(bert, restrictions=kept, threads=1).plan
    Plan(1 stage on 8 devices; d x t: 8x1)
    """

    scope = Scope.PLAN
    is_of_ranks = True

    def violations(self, instance: Instance, plan: Plan) -> Iterator[str]:
        if plan.devices != instance.devices:
            yield f"{plan.devices} of {instance.devices} devices are used, but all of them are to be"


@dataclass(frozen=True)
class WholeExpertGroups(Constraint):
    """The devices of a stage are a multiple of the devices that a layer's experts are spread over."""

    def admits_devices(self, devices: int, rows: Collection[Sequence[Tmpc]]) -> bool:
        modes = (tmpc.mode for row in rows for tmpc in row)
        return all(devices % (mode.experts * mode.expert_tensor) == 0 for mode in modes if mode.experts is not None)

    def violations(self, instance: Instance, plan: Plan) -> Iterator[str]:
        for number, stage in enumerate(plan.stages, start=1):
            for tmpc in {one.mode.spread: one for _, _, one in choices_made(instance, stage)}.values():
                if not self.admits_devices(stage.devices, [[tmpc]]):
                    whole = (tmpc.mode.experts or 1) * tmpc.mode.expert_tensor
                    yield f"stage {number}: {stage.devices} ranks are not whole groups of {whole} that share experts"


@dataclass(frozen=True)
class WholeNodesAtSites(Constraint):
    """At each of several sites a stage has whole nodes of ``node`` devices, and whole groups that share experts. Then a
    launch can number ranks as on one site, with the nodes of each stage listed site by site."""

    sites: int
    node: int

    def admits_devices(self, devices: int, rows: Collection[Sequence[Tmpc]]) -> bool:
        each, left = divmod(devices, self.sites)
        return left == 0 and each % self.node == 0 and WholeExpertGroups().admits_devices(each, rows)

    def violations(self, instance: Instance, plan: Plan) -> Iterator[str]:
        for number, stage in enumerate(plan.stages, start=1):
            row = [tmpc for _, _, tmpc in choices_made(instance, stage)]
            if not self.admits_devices(stage.devices, [row]):
                yield (
                    f"stage {number}: its {stage.devices} devices are not whole nodes of {self.node}, with whole "
                    f"groups that share experts, at each of {self.sites} sites"
                )


@dataclass(frozen=True)
class FilledPipeline(Constraint):
    """Each replica has at least as many microbatches as its pipeline has ranks."""

    scope = Scope.PLAN
    is_of_ranks = True

    def violations(self, instance: Instance, plan: Plan) -> Iterator[str]:
        for stage in plan.stages[:1]:
            microbatches = instance.microbatches // max(1, stage.data_parallel_degree)
            if microbatches < len(plan.stages):
                yield f"{microbatches} microbatches a replica do not fill a pipeline of {len(plan.stages)} ranks"


@dataclass(frozen=True)
class PipelinedChunks(Constraint):
    """Several chunks per rank need a pipeline of at least two ranks, and the interleaved schedule needs several chunks
    there. A plan alone does not state its chunks, so the code that knows its schedule reports violations."""

    scope = Scope.PLAN

    def violations(self, instance: Instance, plan: Plan) -> Iterator[str]:  # noqa: ARG002
        return iter(())


@dataclass(frozen=True)
class WholePieces(Constraint):
    """All layers of a piece are in one stage. pieces: the ids of each piece's layers; a layer is in at most one
    piece."""

    pieces: tuple[tuple[int, ...], ...]

    scope = Scope.PLAN

    def violations(self, instance: Instance, plan: Plan) -> Iterator[str]:  # noqa: ARG002
        stage_of = {layer: number for number, stage in enumerate(plan.stages, start=1) for layer in stage.layers}
        for piece in self.pieces:
            stages = sorted({stage_of[layer] for layer in piece if layer in stage_of})
            if len(stages) > 1:
                listed = ", ".join(map(str, piece[:5]))
                yield f"layers {listed} are to stay together, but are in stages {', '.join(map(str, stages))}"


@dataclass(frozen=True)
class KeepOrder(Constraint):
    """Stages are runs of the layers' order (``layers_in_order``), and tensors are relayed through each stage that they
    skip, as in runtimes that only know chains. The plan is marked so (``keeps_order``), and is charged for the relays.

    >>> import piper_ray
    >>> bert = piper_ray.estimate("bert-large", "A100-80")
    >>> kept = piper_ray.Restrictions(constraints=[piper_ray.KeepOrder()])
    >>> piper_ray.solve(bert, restrictions=kept, threads=1).plan
    Plan(1 stage on 8 devices; d x t: 8x1; order kept)
    """

    scope = Scope.PLAN

    def violations(self, instance: Instance, plan: Plan) -> Iterator[str]:
        if not plan.keeps_order:
            yield "the plan does not say that it keeps the layers' order, and would not be charged for relays"
        yield from order_violations(instance, plan)


@dataclass(frozen=True)
class Unplaced(Constraint):
    """Plans under 2bw do not say where their stages lie on nodes (``Plan.places``), so all borders are charged at the
    outermost link.

    >>> import piper_ray
    >>> llama = piper_ray.estimate("llama3-8b", "H100-SXM", nodes=8)
    >>> kept = piper_ray.Restrictions(constraints=[piper_ray.Unplaced()])
    >>> piper_ray.solve(llama, schedule="2bw", restrictions=kept, threads=1).plan.places is None
    True
    """

    def violations(self, instance: Instance, plan: Plan) -> Iterator[str]:  # noqa: ARG002
        if plan.places is not None:
            yield "the plan says where its stages lie on nodes"


@dataclass(frozen=True)
class SustainedRate(Constraint):
    """Each stage of an asynchronous plan keeps enough microbatches in flight to keep the slowest stage busy when
    replicas take turns, and has the memory for them. The plan states how many; ``evaluate`` checks by simulation
    whether they suffice.

    >>> import piper_ray
    >>> bert = piper_ray.estimate("bert-large", "A100-80")
    >>> kept = piper_ray.Restrictions(constraints=[piper_ray.SustainedRate()])
    >>> piper_ray.solve(bert, schedule="2bw", restrictions=kept, threads=1).plan
    Plan(2 stages on 8 devices; d x t: 4x1 (2 stages); in flight 2, 1)
    """

    scope = Scope.PLAN

    def violations(self, instance: Instance, plan: Plan) -> Iterator[str]:  # noqa: ARG002
        if plan.in_flight is None:
            yield "the plan does not say how many microbatches in flight sustain its rate"


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
        usual = plain_fields(self, ("tensor_parallelism", "data_parallelism", "recompute"))
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
