"""The solver as a planner: one of them, and the only one that proves what it proposes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from piper_ray.model.errors import LimitError
from piper_ray.model.instance import Instance
from piper_ray.model.restrictions import Restrictions
from piper_ray.model.solution import Forecast, Solution, Status
from piper_ray.planners.planner import Needs, Proposal, Terms

if TYPE_CHECKING:
    from piper_ray.engine.preparation import Preparation


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
    """None too where there are more downsets than can be listed: a solve by itself makes those that it needs."""
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
