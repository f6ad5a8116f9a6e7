"""The time and memory of a whole plan under Piper's schedule, as the solver computes them. Source: Piper, section 3.

Sums are exactly rounded, so they are the same in any order: the referee, which has its own formulas, gets the same
bits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import fsum, inf
from typing import NamedTuple

from piper_ray.cost.stage import in_flight
from piper_ray.cost.tolerances import MEMORY_TOLERANCE
from piper_ray.model.cluster import Cluster
from piper_ray.model.instance import Instance, Tmpc
from piper_ray.model.plan import Plan, Stage
from piper_ray.model.plan_rules import as_planned, chosen_tmpcs, unpassed_edges

_Chosen = Sequence[dict[int, Tmpc]]
"""For each stage the TMPC of each layer."""


def places(instance: Instance) -> dict[int, int]:
    """Returns the place of each layer id in the file."""
    return {layer.id: index for index, layer in enumerate(instance.layers)}


def stage_of(place: Mapping[int, int], tmpc_ids: Mapping[int, str], d: int, t: int, kind: str = "") -> Stage:
    """Makes a stage, with layers in the order of the file. place: see ``places``. kind: of the devices, if there are
    several."""
    layers = tuple(sorted(tmpc_ids, key=place.__getitem__))
    return Stage(layers, d, t, {layer: tmpc_ids[layer] for layer in layers}, kind)


class PlanCost(NamedTuple):
    """The cost of a plan. sample_s: seconds per sample, those of the slowest stage. fault: why the plan does not fit on
    these devices; None: it does."""

    sample_s: float
    fault: str | None


def cost_of(instance: Instance, plan: Plan) -> PlanCost:
    """Returns the cost of a plan of the instance's layers. The plan may be too large for the devices, or have unknown
    TMPCs."""
    chosen: list[dict[int, Tmpc]] = []
    for number, stage in enumerate(plan.stages, start=1):
        tmpcs, faults = chosen_tmpcs(instance, stage, number)
        if faults:
            return PlanCost(inf, faults[0])
        chosen.append(tmpcs)
    return PlanCost(_sample_s(as_planned(instance, plan), plan, chosen), _fault(instance, plan, chosen))


def _sample_s(instance: Instance, plan: Plan, chosen: _Chosen) -> float:
    cluster = instance.cluster.holding(plan.span)
    stages_s = []
    for stage, tmpcs, crossing in zip(
        plan.stages, chosen, _crossing_bytes(cluster, instance, plan, chosen), strict=True
    ):
        d = stage.data_parallel_degree
        link = cluster.of_kind(stage.kind).replicas_link(d, stage.tensor_parallel_degree)
        weights_bytes = fsum([tmpc.weights_bytes for tmpc in tmpcs.values()])
        resync_s = 4.0 * (d - 1) / d * weights_bytes / (instance.microbatches * link.bandwidth_bytes_per_s)
        work_s = fsum([tmpc.time_per_sample_s for tmpc in tmpcs.values()]) / d
        crossing_s = fsum(size / (d * rate) for rate, size in crossing.items())
        stages_s.append(fsum((work_s, crossing_s, resync_s)))
    return max(stages_s)


def _fault(instance: Instance, plan: Plan, chosen: _Chosen) -> str | None:
    """Returns a fault of degrees or memory, if there is one."""
    if plan.span > instance.devices or plan.data_parallel_sum > instance.data_parallel_limit:
        return "it has more devices or replicas than there are"
    later_sum = 0
    for stage, tmpcs in zip(reversed(plan.stages), reversed(chosen), strict=True):
        d = stage.data_parallel_degree
        y = in_flight(later_sum, d)
        held_bytes = fsum(
            [x for tmpc in tmpcs.values() for x in (tmpc.activation_bytes * y, tmpc.fixed_bytes, tmpc.shared_bytes / d)]
        )
        memory_bytes = instance.cluster.of_kind(stage.kind).memory_bytes
        if instance.microbatches % d or held_bytes > memory_bytes * (1.0 + 2.0 * MEMORY_TOLERANCE):
            return f"a stage with d = {d} needs {held_bytes:.6g} bytes of {memory_bytes:.6g} on each device"
        later_sum += d
    return None


def _crossing_bytes(cluster: Cluster, instance: Instance, plan: Plan, chosen: _Chosen) -> list[dict[float, float]]:
    """Returns for each stage its bytes by rate: each edge that crosses its border twice, with its layer's extras, and
    each tensor with ends both inside and outside once."""
    stage_of = {layer: number for number, tmpcs in enumerate(chosen) for layer in tmpcs}
    edges: list[dict[float, list[float]]] = [defaultdict(list) for _ in chosen]
    tensors: list[dict[float, list[float]]] = [defaultdict(list) for _ in chosen]
    unpassed = frozenset[tuple[int, int]]() if plan.places is None else unpassed_edges(instance)
    for edge in instance.edges:
        tail, head = stage_of[edge.source], stage_of[edge.target]
        if tail != head:
            rate = cluster.rate_between(plan.stages[tail].kind, plan.stages[head].kind)
            if plan.places is not None and (edge.source, edge.target) in unpassed:
                level = cluster.shared_level(plan.places[head], plan.places[tail] + plan.stages[tail].devices)
                rate = cluster.level_bytes_per_s(level)
            sent_bytes = chosen[tail][edge.source].backward_sync_bytes.get(edge.target, 0.0)
            received_bytes = chosen[head][edge.target].forward_sync_bytes.get(edge.source, 0.0)
            edges[tail][rate] += (edge.communication_bytes, sent_bytes)
            edges[head][rate] += (edge.communication_bytes, received_bytes)
    for tensor in instance.tensors:
        ends = {stage_of[layer] for layer in tensor.layers}
        rate = cluster.slowest_rate(plan.stages[number].kind for number in ends)
        for number in ends if len(ends) > 1 else ():
            tensors[number][rate] += (tensor.forward_bytes, tensor.backward_bytes)
    return [
        {rate: 2.0 * fsum(of_edges.get(rate, ())) + fsum(of_tensors.get(rate, ())) for rate in of_edges | of_tensors}
        for of_edges, of_tensors in zip(edges, tensors, strict=True)
    ]
