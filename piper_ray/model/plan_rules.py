"""What makes a plan one of an instance, whatever it costs: every layer in one stage, nothing backwards, known TMPCs."""

from __future__ import annotations

from itertools import pairwise

from piper_ray.model.arguments import did_you_mean
from piper_ray.model.in_order import layers_in_order
from piper_ray.model.instance import Instance, Tmpc
from piper_ray.model.plan import Plan, Stage


def partition_violations(instance: Instance, plan: Plan) -> list[str]:
    """In words: stages without layers, and layers in no stage, in several, or not of the instance."""
    violations = []
    stage_of: dict[int, int] = {}
    for number, stage in enumerate(plan.stages, start=1):
        if not stage.layers:
            violations.append(f"stage {number} is empty")
        for layer in stage.layers:
            if layer not in instance.layer_by_id:
                violations.append(f"stage {number}: layer {layer} is not in the instance")
            elif layer not in stage_of:
                stage_of[layer] = number
            elif stage_of[layer] == number:
                violations.append(f"layer {layer} is listed twice in stage {number}")
            else:
                violations.append(f"layer {layer} is in stage {stage_of[layer]} and again in stage {number}")
    violations += [f"layer {layer.id} is in no stage" for layer in instance.layers if layer.id not in stage_of]
    return violations


def edge_violations(instance: Instance, plan: Plan) -> list[str]:
    """Edges that run backwards. Where there is none every stage is contiguous: no path leaves it and comes back.

    Of a plan that keeps the layers' order, what breaks that: no edge runs backwards in it.
    """
    if plan.keeps_order:
        return order_violations(instance, plan)
    stage_of = {layer: number for number, stage in enumerate(plan.stages, start=1) for layer in stage.layers}
    return [
        f"edge {edge.source} -> {edge.target} runs backwards, from stage {stage_of[edge.source]} "
        f"to stage {stage_of[edge.target]}"
        for edge in instance.edges
        if edge.source in stage_of and edge.target in stage_of and stage_of[edge.source] > stage_of[edge.target]
    ]


def order_violations(instance: Instance, plan: Plan) -> list[str]:
    """Layers that stand in an earlier stage than the one before them in the layers' order."""
    stage_of = {layer: number for number, stage in enumerate(plan.stages, start=1) for layer in stage.layers}
    return [
        f"layer {after} comes after layer {before} in the layers' order, but stands before it, in stage "
        f"{stage_of[after]}"
        for before, after in pairwise(layer for layer in layers_in_order(instance) if layer in stage_of)
        if stage_of[before] > stage_of[after]
    ]


def chosen_tmpcs(instance: Instance, stage: Stage, number: int) -> tuple[dict[int, Tmpc], list[str]]:
    """The stage's TMPC for each layer of the instance in it, and what is wrong with the others."""
    t = stage.tensor_parallel_degree
    chosen: dict[int, Tmpc] = {}
    violations = []
    for layer_id in dict.fromkeys(stage.layers):
        layer = instance.layer_by_id.get(layer_id)
        if layer is None:
            continue
        if layer_id not in stage.tmpc_ids:
            violations.append(f"stage {number}: layer {layer_id} has no TMPC chosen")
            continue
        wanted = stage.tmpc_ids[layer_id]
        offered = {tmpc.id: tmpc for tmpc in layer.tmpcs.get(t, ())}
        if wanted in offered:
            chosen[layer_id] = offered[wanted]
            least = offered[wanted].least_data_parallel_degree
            if 1 <= stage.data_parallel_degree < least:
                violations.append(
                    f"stage {number}: TMPC {wanted!r} of layer {layer_id} needs a data-parallel degree of at least "
                    f"{least}, the stage has {stage.data_parallel_degree}"
                )
        elif offered:
            violations.append(
                f"stage {number}: layer {layer_id} has no TMPC {wanted!r} at tensor-parallel degree {t}, only "
                + ", ".join(repr(tmpc_id) for tmpc_id in offered)
                + did_you_mean(str(wanted), offered)
            )
        else:
            violations.append(f"stage {number}: layer {layer_id} has no TMPC at tensor-parallel degree {t}")
    strangers = [layer_id for layer_id in stage.tmpc_ids if layer_id not in stage.layers]
    violations += [
        f"stage {number}: a TMPC is chosen for layer {layer_id}, not in this stage" for layer_id in strangers
    ]
    return chosen, violations
