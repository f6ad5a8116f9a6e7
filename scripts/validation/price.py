"""One run: predicted step and memory in its own layout, or the reason why there are none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from piper_ray.calibrate.layouts import NO_RECOMPUTATION, Laid, NotExpressible, laid_out
from piper_ray.calibrate.measurements import simulated
from piper_ray.calibrate.memory import memory_of_ranks, traits_of
from piper_ray.calibrate.runs import PublishedRun
from piper_ray.model.errors import PiperRayError
from piper_ray.model.mode import Sharding
from piper_ray.simulate.result import Simulation
from piper_ray.workloads.estimate.families import Microbatch
from piper_ray.workloads.estimate.hardware import Hardware
from piper_ray.workloads.estimate.layout import PricedLayout, priced
from piper_ray.workloads.estimate.offered import offered_recomputations
from piper_ray.workloads.estimate.ranks import RankMemory
from piper_ray.workloads.estimate.runtimes import GIB


@dataclass(frozen=True)
class PricedRun:
    """The result of pricing a run.

    reason: why there is no prediction; then the figures are missing. predicted_memory_bytes, measured_memory_bytes: the
    fullest rank's memory, counted as the run's own figure is: allocated memory if that was measured, reserved memory if
    the software's logs state it, else what nvidia-smi shows. needed_memory_bytes: memory that the device must have.
    device_memory_bytes: memory that programs find on it. ranks: what each rank of one pipeline holds, the first stage
    first.
    """

    run: PublishedRun
    predicted_step_s: float | None = None
    predicted_memory_bytes: float | None = None
    measured_memory_bytes: float | None = None
    needed_memory_bytes: float | None = None
    device_memory_bytes: float | None = None
    ranks: tuple[RankMemory, ...] = ()
    reason: str | None = None
    laid: Laid | None = None

    @property
    def measured_step_s(self) -> float | None:
        return self.run.measured_step_s

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
        """The result as ``--json`` lists it; without a prediction it has the reason."""
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
            "assumed": self._assumed(),
        }

    def _assumed(self) -> list[str]:
        if self.laid is None:
            return []
        shared = ["memory: distributed optimizer, as in all of NVIDIA's recipes"] if shares_untold(self.laid) else []
        return [*self.laid.assumed, *shared]


def _memory_dict(rank: RankMemory) -> dict[str, object]:
    """The memory of a stage's ranks: what they allocate and reserve, what their devices must have, and its terms."""
    return {
        "allocated_bytes": rank.allocated_bytes,
        "reserved_bytes": rank.reserved_bytes,
        "device_bytes": rank.device_bytes,
        "moment": rank.moment,
        "items_bytes": dict(rank.items),
    }


def outcome_of(run: PublishedRun, hardware: Hardware) -> PricedRun:
    """Prices a run; never raises for what it says."""
    try:
        laid = as_it_fits(run, laid_out(run, hardware), hardware)
        plan = priced(laid.model, laid.stack, hardware.training, laid.layout)
        simulation = simulated(plan)
    except NotExpressible as error:
        return PricedRun(run, reason=str(error))
    except (PiperRayError, MemoryError) as error:
        return PricedRun(run, reason=" ".join(str(error).split()))
    return _outcome(run, laid, plan, simulation)


def as_it_fits(run: PublishedRun, laid: Laid, hardware: Hardware) -> Laid:
    """The run with the least recomputation that its memory needs, if it does not state its recomputation."""
    if run.recompute or _needed_bytes(run, laid, hardware) <= laid.stack.gpu.device_bytes:
        return laid
    layout = laid.layout
    architecture = laid.model.architecture(Microbatch(layout.samples, layout.tokens, layout.fused))
    for recomputation in offered_recomputations(architecture, laid.stack):
        tried = replace(
            laid,
            layout=replace(layout, recomputation=recomputation),
            assumed=(*(x for x in laid.assumed if x != NO_RECOMPUTATION), f"recomputation {recomputation.id}, to fit"),
        )
        if _needed_bytes(run, tried, hardware) <= laid.stack.gpu.device_bytes:
            return tried
    return laid


def _needed_bytes(run: PublishedRun, laid: Laid, hardware: Hardware) -> float:
    plan = priced(laid.model, laid.stack, hardware.training, laid.layout)
    return max(rank.device_bytes for rank in memory_of(plan, run, laid))


def _outcome(run: PublishedRun, laid: Laid, plan: PricedLayout, simulation: Simulation) -> PricedRun:
    ranks = memory_of(plan, run, laid)
    predicted_bytes, measured_bytes = memory_as_told(run, laid, ranks)
    return PricedRun(
        run,
        predicted_step_s=simulation.step_s,
        predicted_memory_bytes=predicted_bytes,
        measured_memory_bytes=measured_bytes,
        needed_memory_bytes=max(rank.device_bytes for rank in ranks),
        device_memory_bytes=laid.stack.gpu.device_bytes,
        ranks=tuple(ranks),
        laid=laid,
    )


def shares_untold(laid: Laid) -> bool:
    """Whether replicas are assumed to divide the optimizer's state although the run does not say so, as in all of
    NVIDIA's recipes."""
    return laid.software in ("nemo", "megatron-core") and laid.layout.sharding is Sharding.NONE


def memory_of(plan: PricedLayout, run: PublishedRun, laid: Laid) -> list[RankMemory]:
    """The memory of each rank of a published run's pipeline at its peak."""
    sharding = Sharding.OPTIMIZER if shares_untold(laid) else laid.layout.sharding
    return memory_of_ranks(plan, laid.layout, sharding, traits_of(run, laid))


def memory_as_told(run: PublishedRun, laid: Laid, ranks: Sequence[RankMemory]) -> tuple[float, float | None]:
    """Predicted and measured bytes of the fullest rank, counted as the run's own figure is."""
    if run.peak_allocated_gib is not None:
        return max(rank.allocated_bytes for rank in ranks), run.peak_allocated_gib * GIB
    published_gb = run.published_memory_gb
    if traits_of(run, laid).logs_reserved:
        return max(rank.reserved_bytes for rank in ranks), None if published_gb is None else published_gb * GIB
    device_bytes, measured_bytes = laid.stack.gpu.device_bytes, None if published_gb is None else published_gb * 1e9
    return max(max(rank.device_bytes, min(rank.shown_bytes, device_bytes)) for rank in ranks), measured_bytes
