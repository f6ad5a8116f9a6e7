"""Writing plans: Piper's ``stages``, with names, paths and ranks in each, under a header that says what they are of."""

from __future__ import annotations

from piper_ray.model.instance import Instance, Layer
from piper_ray.model.plan import Plan
from piper_ray.model.schedule import PAPERS_SCHEDULE, Schedule
from piper_ray.version import __version__

SCHEMA_VERSION = 1
"""Raised when a field changes its meaning or goes; new fields do not raise it."""

Document = dict[str, object]


def header(kind: str, instance: Instance) -> Document:
    """What every document of ours says of itself and of its instance."""
    return {
        "schema": f"piper-ray/{kind}",
        "schema_version": SCHEMA_VERSION,
        "tool_version": __version__,
        "instance": {
            "name": instance.name,
            "digest": instance.digest,
            "layers": len(instance.layers),
            "edges": len(instance.edges),
            "devices": instance.devices,
            "microbatches": instance.microbatches,
            "samples_per_microbatch": instance.batch.samples_per_microbatch,
            "tokens_per_sample": instance.batch.tokens_per_sample,
            "measured_threads": instance.measured_threads,
            "memory_bytes": instance.memory_bytes,
            "bandwidth_bytes_per_s": instance.bandwidth_bytes_per_s,
        },
    }


def stage_documents(instance: Instance, plan: Plan, schedule: Schedule = PAPERS_SCHEDULE) -> list[Document]:
    """Piper's stages with the names and paths of their layers, where the instance has these, which of them recompute
    activations, and their ranks.

    schedule: that which the plan is for.
    """
    documents: list[Document] = []
    for document, stage, ranks in zip(plan.stage_dicts(), plan.stages, plan.ranks_under(schedule), strict=True):
        layers = [instance.layer_by_id.get(layer) for layer in stage.layers]
        document["names"] = ["" if layer is None else layer.name for layer in layers]
        document["paths"] = ["" if layer is None else layer.path for layer in layers]
        recompute = [
            layer is not None and _recomputes(layer, stage.tensor_parallel_degree, stage.tmpc_ids[layer.id])
            for layer in layers
        ]
        if any(recompute):
            document["recompute"] = recompute
        document["ranks"] = [ranks.start, ranks.stop - 1]
        documents.append(document)
    return documents


def _recomputes(layer: Layer, degree: int, tmpc_id: str) -> bool:
    return any(tmpc.recompute for tmpc in layer.tmpcs.get(degree, ()) if tmpc.id == tmpc_id)


def plan_document(instance: Instance, plan: Plan, schedule: Schedule | None) -> Document:
    """The plan file without what evaluating the plan would add. schedule: that which it is for; None: nobody says."""
    stages = stage_documents(instance, plan, Schedule.first_of(schedule))
    planned_for = {} if schedule is None else schedule.to_dict()
    return {"stages": stages, **plan.rule_dict(), **header("plan", instance), **planned_for}
