"""One run: predicted step and memory in its own layout, or the reason why there are none."""

from __future__ import annotations

from dataclasses import dataclass, replace

from piper_ray.model.errors import PiperRayError
from piper_ray.simulate.actions import ActionKind, flush_lists
from piper_ray.simulate.options import SimulationOptions
from piper_ray.simulate.result import Simulation
from piper_ray.simulate.run import simulate
from piper_ray.validate.layouts import Laid, NotExpressible, laid_out
from piper_ray.validate.runs import Run, Unreadable
from piper_ray.workloads.estimate.hardware import Hardware
from piper_ray.workloads.estimate.layout import PricedLayout, priced
from piper_ray.workloads.estimate.ranks import RankMemory, memory_of_rank


@dataclass(frozen=True)
class Outcome:
    """What came of a run. reason: why there is no prediction, in place of its figures.

    predicted_memory_bytes: of the rank that holds most, as the run's own figure is counted: allocated where that is
    what was measured, else all that the device must have. needed_memory_bytes: the latter; device_memory_bytes: what
    programs find there. ranks: of one pipeline, what each holds, the first stage's first.
    """

    run: Run | Unreadable
    predicted_step_s: float | None = None
    predicted_memory_bytes: float | None = None
    needed_memory_bytes: float | None = None
    device_memory_bytes: float | None = None
    ranks: tuple[RankMemory, ...] = ()
    reason: str | None = None
    laid: Laid | None = None

    @property
    def measured_step_s(self) -> float | None:
        return self.run.measured_step_s if isinstance(self.run, Run) else None

    @property
    def error(self) -> float | None:
        """(predicted - measured) / measured; above 0: predicted too slow."""
        if self.predicted_step_s is None or self.measured_step_s is None:
            return None
        return self.predicted_step_s / self.measured_step_s - 1.0

    @property
    def fits(self) -> bool | None:
        if self.needed_memory_bytes is None or self.device_memory_bytes is None:
            return None
        return self.needed_memory_bytes <= self.device_memory_bytes

    def to_dict(self) -> dict[str, object]:
        """As ``--json`` lists it; what could not be priced has a reason in place of figures."""
        if self.reason is not None:
            return {"id": self.run.id, "measured_step_s": self.measured_step_s, "reason": self.reason}
        return {
            "id": self.run.id,
            "predicted_step_s": self.predicted_step_s,
            "measured_step_s": self.measured_step_s,
            "error": self.error,
            "predicted_memory_bytes": self.predicted_memory_bytes,
            "fits": self.fits,
            "memory_of_stages": [_memory_dict(rank) for rank in self.ranks],
            "assumed": [] if self.laid is None else list(self.laid.assumed),
        }


def _memory_dict(rank: RankMemory) -> dict[str, object]:
    """Of the ranks of a stage: what they allocate and reserve at most, what their devices must have, and what for."""
    return {
        "allocated_bytes": rank.allocated_bytes,
        "reserved_bytes": rank.reserved_bytes,
        "device_bytes": rank.device_bytes,
        "moment": rank.moment,
        "items_bytes": dict(rank.items),
    }


def outcome_of(run: Run | Unreadable, hardware: Hardware) -> Outcome:
    """Prices a run; never raises for what it says."""
    if isinstance(run, Unreadable):
        return Outcome(run, reason=run.reason)
    try:
        laid = laid_out(run, hardware)
        plan = priced(laid.model, laid.stack, hardware.training, laid.layout)
        simulation = simulated(plan)
    except NotExpressible as error:
        return Outcome(run, reason=str(error))
    except PiperRayError as error:
        return Outcome(run, reason=" ".join(str(error).split()))
    return _outcome(run, laid, plan, simulation)


def simulated(plan: PricedLayout) -> Simulation:
    """The layout run event by event."""
    options = SimulationOptions(
        overlap_transfers=plan.overlap_transfers,
        all_reduce=plan.terms.all_reduce,
        all_reduce_overlap=plan.terms.all_reduce_overlap,
        optimizer_s=plan.terms.optimizer_s,
    )
    return simulate(plan.instance, plan.plan, plan.schedule, options=options)


def memory_of(plan: PricedLayout, laid: Laid) -> list[RankMemory]:
    """What each rank of a pipeline holds at its worst moment."""
    lists = flush_lists(plan.schedule, len(plan.ranks), laid.layout.microbatches)
    return [
        memory_of_rank(
            replace(rank, sharding=laid.shared_states),
            [(ActionKind(kind).name, int(chunk)) for kind, chunk, _ in actions],
            laid.runtime,
        )
        for rank, actions in zip(plan.ranks, lists, strict=True)
    ]


def _outcome(run: Run, laid: Laid, plan: PricedLayout, simulation: Simulation) -> Outcome:
    ranks = memory_of(plan, laid)
    needed_bytes = max(rank.device_bytes for rank in ranks)
    allocated_bytes = max(rank.allocated_bytes for rank in ranks)
    return Outcome(
        run,
        predicted_step_s=simulation.step_s,
        predicted_memory_bytes=needed_bytes if run.peak_allocated_gib is None else allocated_bytes,
        needed_memory_bytes=needed_bytes,
        device_memory_bytes=laid.stack.gpu.device_bytes,
        ranks=tuple(ranks),
        laid=laid,
    )
