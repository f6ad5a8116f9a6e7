"""A point of a sweep that is a plan: one model trained on one cluster by one runtime, over all that ``plan`` chooses;
and its row."""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from piper_ray.calibrate.workload import running_arguments
from piper_ray.model.errors import InfeasibleError, UsageError
from piper_ray.model.fields import plain_fields
from piper_ray.model.figures import PROOF_TOLERANCE
from piper_ray.model.mode import ALL_REPLICAS
from piper_ray.model.schedule import ScheduleName
from piper_ray.model.solution import Status
from piper_ray.model.stop import Stop
from piper_ray.proposal.cells import Closing
from piper_ray.proposal.demand import PlanDemand, figures_of, usual_batch
from piper_ray.proposal.layout_words import layout_words
from piper_ray.proposal.offers import PlanQuestion, schedules_of
from piper_ray.proposal.propose import FoundPlans, propose
from piper_ray.runtimes.runtime import RUNTIMES, RuntimeName
from piper_ray.workloads.estimate.build import EstimateRequest
from piper_ray.workloads.estimate.config import ModelConfig
from piper_ray.workloads.estimate.hardware import Hardware
from piper_ray.workloads.estimate.modes import Offer
from piper_ray.workloads.estimate.refusals import plain_instance, reasons_against

PLAN = "plan"
"""What the dataset has as the planner of such a point."""

REFUSED = "refused"
"""The status of one that a runtime or a GPU cannot do, whatever memory there is."""

Row = dict[str, object]
"""Columns of the dataset."""


@dataclass(frozen=True)
class PlannedModel:
    """What points of one model share."""

    model: ModelConfig
    hardware: Hardware

    def digest(self) -> str:
        """SHA-256 of the model's config, of how it is trained if nothing else is said, and of the table of hardware."""
        model, hardware = self.model, self.hardware
        usual = [model.tokens, model.samples, model.batch]
        gpus = {key: gpu.model_dump() for key, gpu in hardware.gpus.items()}
        facts = [usual, model.document, gpus, hardware.training.model_dump()]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def point(
        self,
        label: str,
        cluster: Mapping[str, int],
        gpus_per_node: int | None,
        batch: int | None,
        precision: str,
        trained_by: str,
        tokens: int | None,
        schedule: str | None,
    ) -> PlanPoint:
        """A point of this model, with what is not said filled in, so that one question is one point. cluster: of each
        GPU its nodes.

        Raises UsageError for a GPU or a precision that is not known.
        """
        nodes_of = {self.hardware.key(gpu): nodes for gpu, nodes in cluster.items()}
        if len(nodes_of) < len(cluster):
            raise UsageError(f"{', '.join(cluster)} are one GPU; expected several kinds")
        devices = sum(
            EstimateRequest(nodes, gpus_per_node).devices_of(self.hardware.gpus[key]) for key, nodes in nodes_of.items()
        )
        named = " ".join(f"{key}:{nodes}" for key, nodes in nodes_of.items())
        return PlanPoint(
            label,
            named if len(nodes_of) > 1 else next(iter(nodes_of)),
            sum(nodes_of.values()),
            devices,
            usual_batch(self.model, devices) if batch is None else batch,
            running_arguments(precision, (), None, None)["precision"],
            trained_by,
            tokens,
            None if schedule is None else ScheduleName(schedule),
        )


@dataclass(frozen=True)
class PlanPoint:
    """One plan of a sweep.

    workload: the model's label. gpu: its key in the table of hardware; of several kinds each with its nodes, as
    "A100-80:2 H100-SXM:4". nodes, devices: of the cluster. batch: in samples.
    trained_by: the runtime. tokens: of a sample; None: the model's own. asked_schedule: no other one; None: those that
    the runtime has of 1f1b and interleaved.

    >>> PlanPoint("llama3-8b", "H100-SXM", 2, 16, 256, "bf16", "megatron").devices
    16
    """

    workload: str
    gpu: str
    nodes: int
    devices: int
    batch: int
    precision: str
    trained_by: str
    tokens: int | None = None
    asked_schedule: ScheduleName | None = None

    @property
    def kinds(self) -> dict[str, int]:
        """For each kind of GPU, its nodes."""
        named = (part.rpartition(":") for part in self.gpu.split())
        return {name or nodes: int(nodes) if name else self.nodes for name, _, nodes in named}

    def identity(self, digest: str) -> dict[str, object]:
        """What tells which point a row of the dataset is of, as ``Sweep.identity`` has it. digest: the model's."""
        facts = asdict(self)
        input_hash = hashlib.sha256(json.dumps([PLAN, digest, *facts.values()]).encode()).hexdigest()
        return {"input_hash": input_hash, "graph_hash": digest, "planner": PLAN, **facts}


def schedules_tried(point: PlanPoint) -> tuple[ScheduleName, ...]:
    """Raises UsageError for one that the runtime does not have."""
    return schedules_of(RUNTIMES[RuntimeName(point.trained_by)], point.asked_schedule, kinds=len(point.kinds) > 1)


def _demand(point: PlanPoint, planned: PlannedModel) -> PlanDemand:
    """What ``piper_ray.plan`` searches for, where nothing else is said. Raises UsageError for what the runtime cannot
    do."""
    runtime, kinds = RUNTIMES[RuntimeName(point.trained_by)], point.kinds
    asked = EstimateRequest(
        nodes=point.nodes,
        gpus_per_node=point.devices // point.nodes if len(kinds) == 1 else None,
        tokens=point.tokens,
        batch=point.batch,
        precision=point.precision,
        software=runtime.software,
        offer=Offer(zero=ALL_REPLICAS),
    )
    runtime.require_kinds([*kinds])
    question = PlanQuestion(planned.model, planned.hardware, runtime, asked, point.asked_schedule)
    return question.demand({gpu: (gpu, nodes) for gpu, nodes in kinds.items()})


def plan_row(point: PlanPoint, planned: PlannedModel, stop: Stop[Any]) -> Row:
    """The answer: a plan, or why there is none. It depends on the point alone, not on what was planned before.

    Raises StopSearch when ``stop`` asks before there is a plan.
    """
    with _nothing_is_left_over():
        return _plan_row(point, planned, stop)


def _plan_row(point: PlanPoint, planned: PlannedModel, stop: Stop[Any]) -> Row:
    try:
        demand = _demand(point, planned)
        plain = plain_instance(demand.model, demand.hardware, demand.request)
        demand.runtime.constraints(plain, demand.schedules[0], demand.domain)  # raises for models that it cannot train
        reasons = reasons_against(demand.model, demand.hardware, demand.gpu, demand.request, demand.runtime)
        if reasons and demand.further is None:  # which may hold what this kind does not
            raise InfeasibleError("\n".join(reasons))
        return _of_plans(propose(demand, stop.part(), listed=1, threads=1))
    except UsageError as error:
        return {"status": REFUSED, "note": str(error)}
    except InfeasibleError as error:
        return {"status": Status.INFEASIBLE.value, "note": str(error)}


@contextmanager
def _nothing_is_left_over() -> Iterator[None]:
    """Collections meanwhile pass over all that there was before: it would take a tenth of a plan's time or more. What
    is made meanwhile is collected at the end: a whole collection seldom comes at another time, and would pass over it.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        gc.unfreeze()


def _of_plans(found: FoundPlans) -> Row:
    best, cells = found.best, found.cells
    figures, schedule, words = figures_of(best), best.solution.schedule, layout_words(best)
    gpus = {kind.name: kind.cluster.devices for kind in best.instance.cluster.kinds}
    left_open = sum(cell.closing is Closing.LEFT_OPEN for cell in cells.cells)
    return {
        "status": (Status.OPTIMAL if found.gap <= PROOF_TOLERANCE else Status.FEASIBLE).value,
        "microbatches": best.instance.microbatches,
        "memory_bytes": best.instance.memory_bytes,
        "schedule": schedule.name.value,
        "chunks": schedule.v,
        "gap": found.gap,
        "devices_used": best.devices,
        "stages": best.stages,
        "plan": json.dumps(best.plan.to_dict(), separators=(",", ":"), ensure_ascii=False),
        "layers": len(best.instance.layers),
        "microbatch_samples": best.samples,
        "step_s": best.step_s,
        "step_lower_bound_s": found.lower_s,
        **plain_fields(figures, ("tokens_per_s", "tokens_per_s_per_device", "mfu")),
        "peak_memory_bytes": best.simulation.peak_memory_bytes,
        "layout": words.text,
        **({"devices_of_kinds": json.dumps(gpus), "kinds_of_stages": json.dumps(words.kinds)} if gpus else {}),
        "combinations": cells.count,
        "combinations_closed": cells.count - left_open,
    }
