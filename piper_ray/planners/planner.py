"""What a planner is, what it proposes, and what proposing takes; and the solver as one, the only one that proves what
it proposes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from piper_ray.evaluate import Evaluation, evaluate
from piper_ray.model.constraints import KeepOrder, Restrictions, SameDegrees, SameDegreesByKind
from piper_ray.model.errors import InvalidPlan, LimitError, UsageError
from piper_ray.model.events import Listener, silent
from piper_ray.model.instance import Instance
from piper_ray.model.options import SolveOptions
from piper_ray.model.plan import Plan
from piper_ray.model.plan_rules import in_order
from piper_ray.model.schedule import PAPERS_SCHEDULE, Schedule
from piper_ray.model.solution import Forecast, Solution, Status
from piper_ray.model.stop import Stop

if TYPE_CHECKING:
    from piper_ray.engine.evaluation.backend import Backend
    from piper_ray.engine.preparation import Preparation


_PROCESS_BYTES = 170e6
_QUICK_S = 0.01


@dataclass(frozen=True)
class Proposal:
    """A planner's own answer. plan: None when no candidate fits.

    tried: candidates looked at (grid points; for the dynamic programs, nested pairs of states).
    note: where in its grid the plan stands, or why there is none.
    solution: what is proved, and how far the search got; None where a planner proves nothing.
    """

    plan: Plan | None
    tried: int
    note: str
    solution: Solution | None = None

    def without_plan(self, why: str) -> Proposal:
        """The same for a plan that is not allowed."""
        return Proposal(None, self.tried, f"{why} ({self.note})")


class Planner(Protocol):
    """A way to plan, its parameters being the fields of a frozen dataclass.

    A plan that it proposes keeps the restrictions, and is meant for the instance's schedule, Piper's where it has none.
    """

    def propose(self, instance: Instance, restrictions: Restrictions) -> Proposal: ...


def allowed_proposal(planner: Planner, instance: Instance, restrictions: Restrictions) -> Proposal:
    """What the planner proposes for the instance's schedule, without a plan where that breaks a constraint.

    Who looks at one stage at a time knows nothing of constraints on the whole plan, such as one d and one t under a
    flush, which no runtime can do without.
    """
    if isinstance(planner, OfKinds) and not instance.cluster.kinds:
        raise UsageError("this planner is for devices of several kinds, and these are alike")
    if instance.cluster.kinds and not isinstance(planner, (OfKinds, Exact)):
        raise UsageError(
            "this planner is for devices that are alike, and these are of several kinds; expected piper, even-layers, "
            "layers-by-speed or one-kind"
        )
    if not restrictions.has(KeepOrder):
        return allowed(instance, restrictions, planner.propose(instance, restrictions))
    proposal = planner.propose(in_order(instance), restrictions.without(KeepOrder))
    plan = None if proposal.plan is None else replace(proposal.plan, keeps_order=True)
    return allowed(instance, restrictions, replace(proposal, plan=plan))


def allowed(instance: Instance, restrictions: Restrictions, proposal: Proposal) -> Proposal:
    """The proposal, without its plan where that breaks a constraint."""
    if proposal.plan is None:
        return proposal
    under = Schedule.first_of(instance.schedule)
    alike = SameDegreesByKind() if instance.cluster.kinds else SameDegrees()
    if not under.asynchronous and alike not in restrictions.constraints:
        restrictions = restrictions.adding(alike)
    broken = next(restrictions.violations(instance, proposal.plan, under), None)
    return proposal if broken is None else proposal.without_plan(f"its plan is not allowed: {broken}")


def evaluated(instance: Instance, proposal: Proposal) -> tuple[Proposal, Evaluation | None]:
    """The proposal with what its plan costs under the instance's schedule; without a plan where it cannot run so."""
    if proposal.plan is None:
        return proposal, None
    try:
        return proposal, evaluate(instance, proposal.plan)
    except InvalidPlan as invalid:
        reason = invalid.violations[0]
    except UsageError as cannot_run:
        reason = str(cannot_run)
    name = Schedule.first_of(instance.schedule).name.value
    return proposal.without_plan(f"its plan does not run under {name}: {reason}"), None


@dataclass(frozen=True)
class Needs:
    """What proposing takes, as a guess. memory_bytes: the memory of the process. can_spread: whether a cluster can
    share the work."""

    memory_bytes: float = _PROCESS_BYTES
    seconds: float = _QUICK_S
    can_spread: bool = False

    @classmethod
    def of_tables(cls, table_bytes: float) -> Needs:
        """The needs of a planner that is quick whatever its tables."""
        return cls(_PROCESS_BYTES + table_bytes)


class NamedPlanner(Planner, Protocol):
    """A planner of ``named``: what it needs can be asked beforehand."""

    def needs(self, lattice: Forecast, devices: int, microbatches: int) -> Needs:
        """What the planner needs on K devices with N microbatches. lattice: that of the exact planner's solve, its
        downsets counted."""
        ...


class Light:
    """A planner whose tables are next to nothing."""

    def needs(self, lattice: Forecast, devices: int, microbatches: int) -> Needs:  # noqa: ARG002 - as the protocol has it
        return Needs()


class OfKinds(Light):
    """A planner for devices of several kinds."""


@dataclass(frozen=True)
class Terms:
    """The terms on which a planner that searches does so: its limits, who works, who is told, what ends it early.

    prepare: what solves of one graph share, where somebody keeps it.
    """

    options: SolveOptions = SolveOptions()
    backend: Backend | None = None
    listener: Listener = silent
    stop: Stop[Any] = field(default_factory=Stop)
    prepare: Callable[[Instance, Restrictions], Preparation] | None = None


@dataclass(frozen=True)
class BaselineResult:
    """A proposal and what ``evaluate`` makes of it under ``schedule``. planner: the name it goes by, or its parameters.

    evaluation: None without a plan. tried, note, solution: as in ``Proposal``.
    """

    planner: str
    plan: Plan | None
    evaluation: Evaluation | None
    tried: int
    note: str
    solution: Solution | None = None
    schedule: Schedule = PAPERS_SCHEDULE

    def __repr__(self) -> str:
        found = "no plan" if self.evaluation is None else repr(self.evaluation)
        return f"BaselineResult({self.planner}: {found}, best of {self.tried:,}; {self.note})"

    @property
    def time_per_sample_s(self) -> float | None:
        """The plan's time, in s; None without a plan."""
        return None if self.evaluation is None else self.evaluation.time_per_sample_s


@dataclass(frozen=True)
class Exact:
    """``piper_ray.solve`` on the given terms. Raises as that does."""

    terms: Terms = field(default_factory=Terms)

    def propose(self, instance: Instance, restrictions: Restrictions) -> Proposal:
        from piper_ray.engine.solve import solve  # and with it the kernels

        terms = self.terms
        solution = solve(
            instance,
            restrictions=restrictions,
            options=terms.options,
            backend=terms.backend,
            listener=terms.listener,
            prepared=_prepared(terms, instance, restrictions),
            stop=terms.stop,
        )
        tried = sum(evaluation.candidates_tested for evaluation in solution.stats.evaluations)
        return Proposal(solution.plan, tried, _note(solution), solution)

    def needs(self, lattice: Forecast, devices: int, microbatches: int) -> Needs:  # noqa: ARG002 - as the protocol has it
        assert lattice.memory_bytes is not None
        seconds = 1.0 if lattice.seconds is None else lattice.seconds
        return Needs(lattice.memory_bytes, seconds, can_spread=True)


def _prepared(terms: Terms, instance: Instance, restrictions: Restrictions) -> Preparation | None:
    """What solves share; None too where there are more downsets than can be listed: a solve by itself makes those that
    it needs."""
    if terms.prepare is None:
        return None
    try:
        return terms.prepare(instance, restrictions)
    except LimitError:
        return None


def _note(solution: Solution) -> str:
    if solution.infeasibility is not None:
        return solution.infeasibility.reason
    stopped = "" if solution.stopped_by is None else f", stopped by: {solution.stopped_by}"
    proved = "proved" if solution.status is Status.OPTIMAL else "not proved"
    return f"{proved}{stopped}"
