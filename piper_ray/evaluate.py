"""Independent check of a plan: everything re-derived from the instance, with none of the solver's code.

The formulas are those of Piper (NeurIPS 2021), section 3, with what ``model`` adds: bytes that replicas share out,
least data-parallel degrees and tensors with several ends. Beside the model, the plan and the errors it imports only
what looks through arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import fsum
from typing import TYPE_CHECKING, Literal

from piper_ray.model.errors import InvalidPlan
from piper_ray.model.instance import Instance, Tmpc
from piper_ray.model.plan import Plan, Stage
from piper_ray.model.restrictions import Restrictions

if TYPE_CHECKING:
    from piper_ray.workloads.formats.load import Source

MEMORY_TOLERANCE = 1e-9
"""Relative excess over the memory limit that still counts as fitting.

A stage that fits exactly may come out a few ulps over when its bytes are added in another order than the planner's.
"""

Binding = Literal["time", "memory"]

TIME_BINDS = 1e-3
"""Relative. A stage limits the speed when it is slower than all but this share of the slowest one's time."""

MEMORY_BINDS = 0.95
"""A stage is short of memory from this share of the limit on."""


@dataclass(frozen=True)
class StageEvaluation:
    """What one stage costs. time_s = compute_s + communication_s + resync_s, each per sample.

    in_flight_microbatches: y, the microbatches whose activations a device of this stage holds at once.
    memory_bytes: on each device of the stage.
    binding: what limits the stage: "time" when it is as slow as the slowest, to within TIME_BINDS, "memory" when it
    takes MEMORY_BINDS of what there is, or more; either, both or neither.
    """

    time_s: float
    compute_s: float
    communication_s: float
    resync_s: float
    memory_bytes: float
    in_flight_microbatches: int
    devices: int
    data_parallel_degree: int
    tensor_parallel_degree: int
    binding: tuple[Binding, ...]


@dataclass(frozen=True)
class Evaluation:
    """A valid plan's cost: time_per_sample_s in s, devices used, and ``stages`` front to back.

    bottleneck: index of the first stage that is as slow as the whole.
    """

    time_per_sample_s: float
    devices: int
    data_parallel_sum: int
    stages: tuple[StageEvaluation, ...]
    bottleneck: int


def in_flight_microbatches(suffix_sum: int, data_parallel_degree: int) -> int:
    """y = ceil(s/d): the memory rule of asynchronous 1F1B. s sums d over this stage and all later ones."""
    return -(-suffix_sum // data_parallel_degree)


def objective_s(stage_times_s: Iterable[float]) -> float:
    """A pipeline that never drains is as fast as its slowest stage."""
    return max(stage_times_s)


def evaluate(instance: Instance | Source, plan: Plan, *, restrictions: Restrictions = Restrictions()) -> Evaluation:
    """Cost of ``plan`` on ``instance``; raises InvalidPlan with every rule it breaks, stages numbered from 1.

    instance: may be what ``load`` takes, such as a path. restrictions: further rules. Raises InputError for an instance
    or plan that is not sound in itself, UsageError for arguments that are something else.
    """
    instance = _checked(instance, plan, restrictions)
    violations = [*partition_violations(instance, plan), *edge_violations(instance, plan)]
    violations += _degree_violations(instance, plan)
    choices = []
    for number, stage in enumerate(plan.stages, start=1):
        chosen, faults = chosen_tmpcs(instance, stage, number)
        choices.append(chosen)
        violations += faults
    suffix_sums = [sum(stage.data_parallel_degree for stage in plan.stages[i:]) for i in range(len(plan.stages))]
    violations += _memory_violations(instance, plan, choices, suffix_sums)
    violations += restrictions.violations(instance, plan)
    if violations:
        raise InvalidPlan(violations)
    return _cost(instance, plan, choices, suffix_sums)


def _checked(instance: Instance | Source, plan: Plan, restrictions: Restrictions) -> Instance:
    from piper_ray.model import arguments
    from piper_ray.workloads import formats
    from piper_ray.workloads.formats.objects import check_plan

    arguments.of_kind("plan", plan, Plan, "a Plan (load_plan reads one)")
    arguments.of_kind("restrictions", restrictions, Restrictions, "Restrictions")
    check_plan(plan)
    return formats.instance_of(instance)


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
    """Edges that run backwards. Where there is none every stage is contiguous: no path leaves it and comes back."""
    stage_of = {layer: number for number, stage in enumerate(plan.stages, start=1) for layer in stage.layers}
    return [
        f"edge {edge.source} -> {edge.target} runs backwards, from stage {stage_of[edge.source]} "
        f"to stage {stage_of[edge.target]}"
        for edge in instance.edges
        if edge.source in stage_of and edge.target in stage_of and stage_of[edge.source] > stage_of[edge.target]
    ]


def _degree_violations(instance: Instance, plan: Plan) -> list[str]:
    violations = []
    for number, stage in enumerate(plan.stages, start=1):
        d, t = stage.data_parallel_degree, stage.tensor_parallel_degree
        if d < 1:
            violations.append(f"stage {number}: data-parallel degree {d} is less than 1")
        elif instance.microbatches % d != 0:
            violations.append(
                f"stage {number}: data-parallel degree {d} does not divide the {instance.microbatches} microbatches"
            )
        if t < 1:
            violations.append(f"stage {number}: tensor-parallel degree {t} is less than 1")
    if plan.devices > instance.devices:
        violations.append(f"the plan uses {plan.devices} devices, {instance.devices} are there")
    if plan.data_parallel_sum > instance.data_parallel_limit:
        violations.append(
            f"the data-parallel degrees sum to {plan.data_parallel_sum}, more than {instance.data_parallel_limit}, "
            f"the lesser of {instance.microbatches} microbatches and {instance.devices} devices"
        )
    return violations


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
            )
        else:
            violations.append(f"stage {number}: layer {layer_id} has no TMPC at tensor-parallel degree {t}")
    strangers = [layer_id for layer_id in stage.tmpc_ids if layer_id not in stage.layers]
    violations += [
        f"stage {number}: a TMPC is chosen for layer {layer_id}, not in this stage" for layer_id in strangers
    ]
    return chosen, violations


def _memory_violations(
    instance: Instance, plan: Plan, choices: Sequence[dict[int, Tmpc]], suffix_sums: Sequence[int]
) -> list[str]:
    """Stages over the limit. Where a TMPC or a degree is wrong the figure is that of the layers that are right."""
    violations = []
    limit = instance.memory_bytes
    for number, (stage, chosen, s) in enumerate(zip(plan.stages, choices, suffix_sums, strict=True), start=1):
        if stage.data_parallel_degree < 1:
            continue
        y = in_flight_microbatches(s, stage.data_parallel_degree)
        needed = _memory_bytes(chosen.values(), y, stage.data_parallel_degree)
        if not _fits(needed, limit):
            violations.append(
                f"stage {number}: needs {needed:.0f} bytes on each device with {y} microbatches in flight, "
                f"{needed - limit:.6g} more than the {limit:.0f} there are"
            )
    return violations


def _memory_bytes(tmpcs: Iterable[Tmpc], y: int, d: int) -> float:
    """On each device: a y + b, and the d-th part of what the replicas share out."""
    return fsum(x for tmpc in tmpcs for x in (tmpc.activation_bytes * y, tmpc.fixed_bytes, tmpc.shared_bytes / d))


def _fits(needed_bytes: float, limit_bytes: float) -> bool:
    return needed_bytes <= limit_bytes * (1.0 + MEMORY_TOLERANCE)


def binding(instance: Instance, slowest_s: float, time_s: float, memory_bytes: float) -> tuple[Binding, ...]:
    """What limits a stage of so much time and memory. slowest_s: of the plan's stages."""
    reasons: dict[Binding, bool] = {
        "time": time_s >= slowest_s * (1.0 - TIME_BINDS),
        "memory": memory_bytes >= instance.memory_bytes * MEMORY_BINDS,
    }
    return tuple(name for name, binds in reasons.items() if binds)


def _cost(instance: Instance, plan: Plan, choices: Sequence[dict[int, Tmpc]], suffix_sums: Sequence[int]) -> Evaluation:
    crossing = [_crossing_bytes(instance, chosen) for chosen in choices]
    parts = [
        _time_parts_s(instance, stage, chosen, cut_bytes)
        for stage, chosen, cut_bytes in zip(plan.stages, choices, crossing, strict=True)
    ]
    times = [fsum(part) for part in parts]
    slowest = objective_s(times)
    stages = []
    for stage, chosen, s, (compute, communication, resync), time in zip(
        plan.stages, choices, suffix_sums, parts, times, strict=True
    ):
        y = in_flight_microbatches(s, stage.data_parallel_degree)
        d = stage.data_parallel_degree
        memory_bytes = _memory_bytes(chosen.values(), y, d)
        stages.append(
            StageEvaluation(
                time_s=time,
                compute_s=compute,
                communication_s=communication,
                resync_s=resync,
                memory_bytes=memory_bytes,
                in_flight_microbatches=y,
                devices=stage.devices,
                data_parallel_degree=d,
                tensor_parallel_degree=stage.tensor_parallel_degree,
                binding=binding(instance, slowest, time, memory_bytes),
            )
        )
    return Evaluation(slowest, plan.devices, plan.data_parallel_sum, tuple(stages), times.index(slowest))


def _crossing_bytes(instance: Instance, chosen: dict[int, Tmpc]) -> float:
    """comm: each edge with one end in the stage is charged twice (forwards and backwards), with its layer's extras, and
    each tensor with some ends in the stage and others outside once, whatever their number.
    """
    terms = []
    for edge in instance.edges:
        source, target = chosen.get(edge.source), chosen.get(edge.target)
        if source is None and target is not None:
            terms += [edge.communication_bytes, target.forward_sync_bytes.get(edge.source, 0.0)]
        elif source is not None and target is None:
            terms += [edge.communication_bytes, source.backward_sync_bytes.get(edge.target, 0.0)]
    tensors = [
        size
        for tensor in instance.tensors
        if 0 < sum(layer in chosen for layer in tensor.layers) < len(tensor.layers)
        for size in (tensor.forward_bytes, tensor.backward_bytes)
    ]
    return 2.0 * fsum(terms) + fsum(tensors)


def _time_parts_s(
    instance: Instance, stage: Stage, chosen: dict[int, Tmpc], crossing_bytes: float
) -> tuple[float, float, float]:
    """Compute, communication over the cut, and weight resynchronisation of a stage, in s per sample.

    4(d-1)/d is PipeDream's parameter-server model of all-reduce, paid once for the N microbatches of a batch.
    """
    d, bandwidth = stage.data_parallel_degree, instance.bandwidth_bytes_per_s
    compute = fsum(tmpc.time_per_sample_s for tmpc in chosen.values()) / d
    weights = fsum(tmpc.weights_bytes for tmpc in chosen.values())
    resync = 4.0 * (d - 1) / d * weights / (instance.microbatches * bandwidth)
    return compute, crossing_bytes / (d * bandwidth), resync
