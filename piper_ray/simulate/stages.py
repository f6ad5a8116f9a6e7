"""What the stages of a plan compute and send for one microbatch, added up from the instance's layers. Also the division
of a TMPC's seconds into its passes; all simulations use this one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement, pairwise
from math import fsum
from typing import NamedTuple

from piper_ray.model.errors import InvalidPlan
from piper_ray.model.instance import Instance, Tmpc
from piper_ray.model.passes import passes_of
from piper_ray.model.plan import Plan
from piper_ray.model.plan_rules import chosen_tmpcs, device_violations, edge_violations, partition_violations
from piper_ray.model.schedule import UNEVEN, Schedule


class PassTimes(NamedTuple):
    """Seconds of one layer for one microbatch: forward pass, gradients of its inputs, gradients of its weights.

    input_s includes what the backward pass recomputes.
    """

    forward_s: float
    input_s: float
    weight_s: float


def pass_times(tmpc: Tmpc) -> PassTimes:
    """The known times (``model.passes``). If weight_s is unknown, it is half of the backward pass without
    recomputation.

    Recomputation is assumed to take as long as the forward pass, or the whole backward pass if that is shorter.
    """
    passes = passes_of(tmpc)
    weight_s = passes.weight_s
    if weight_s is None:
        again_s = passes.forward_s if tmpc.recompute else 0.0
        weight_s = max(0.0, passes.backward_s - again_s) / 2.0
    return PassTimes(passes.forward_s, passes.backward_s - weight_s, weight_s)


@dataclass(frozen=True)
class StageLoad:
    """One replica of a plan's stage: seconds for one microbatch, bytes on each device.

    activation_bytes: for each microbatch in flight. fixed_bytes: independent of microbatches in flight, weights
    included.
    beside_bytes: the part of fixed_bytes other than versions of the weights.

    >>> import piper_ray
    >>> bert = piper_ray.estimate("bert-large", "A100-80")
    >>> solution = piper_ray.solve(bert, threads=1)
    >>> simulation = piper_ray.simulate(bert, solution.plan)
    >>> simulation.stages[0].data_parallel_degree
    8
    """

    forward_s: float
    input_s: float
    weight_s: float
    activation_bytes: float
    fixed_bytes: float
    beside_bytes: float
    weights_bytes: float
    data_parallel_degree: int
    tensor_parallel_degree: int


@dataclass(frozen=True)
class Message:
    """What stage ``source`` sends to the later stage ``target`` for a microbatch, and receives in its backward pass.

    sent_bytes: moved by the source, in each direction; received_bytes: moved by the target. They differ where layers
    run on several devices. is_unpassed: no plan has a stage between the two ends.
    """

    source: int
    target: int
    sent_bytes: float
    received_bytes: float
    is_unpassed: bool = False

    @property
    def moved_bytes(self) -> float:
        """The bytes that the slower of both ends moves."""
        return max(self.sent_bytes, self.received_bytes)


@dataclass(frozen=True)
class SharedTensor:
    """A tensor that each of these stages moves once in each direction, however many of its layers use it."""

    stages: tuple[int, ...]
    forward_bytes: float
    backward_bytes: float


@dataclass(frozen=True)
class Stages:
    """The stages of a plan, front to back, and what they send to each other."""

    figures: tuple[StageLoad, ...]
    messages: tuple[Message, ...]
    tensors: tuple[SharedTensor, ...]


def stages_of(
    instance: Instance, plan: Plan, schedule: Schedule, unpassed: frozenset[tuple[int, int]] = frozenset()
) -> Stages:
    """Raises InvalidPlan with every rule that the plan breaks under this schedule, except the limit of memory.
    unpassed: the edges of ``plan_rules.unpassed_edges``, if borders have rates of their own."""
    violations = [*partition_violations(instance, plan), *edge_violations(instance, plan)]
    choices = []
    for number, stage in enumerate(plan.stages, start=1):
        chosen, faults = chosen_tmpcs(instance, stage, number)
        choices.append(chosen)
        violations += faults
    violations += _degree_violations(instance, plan, schedule)
    if violations:
        raise InvalidPlan(violations)
    figures = tuple(
        _figures(chosen.values(), stage.data_parallel_degree, stage.tensor_parallel_degree, instance.versions_in_fixed)
        for chosen, stage in zip(choices, plan.stages, strict=True)
    )
    stage_of = {layer: number for number, stage in enumerate(plan.stages) for layer in stage.layers}
    messages = _messages(instance, choices, stage_of, unpassed)
    return Stages(figures, messages, _shared_tensors(instance, stage_of))


def _degree_violations(instance: Instance, plan: Plan, schedule: Schedule) -> list[str]:
    violations = []
    name, v = schedule.name.value, schedule.v
    for number, stage in enumerate(plan.stages, start=1):
        d, t = stage.data_parallel_degree, stage.tensor_parallel_degree
        if d < 1 or t < 1:
            violations.append(f"stage {number}: degrees are at least 1, not d = {d} and t = {t}")
        elif instance.microbatches % d != 0:
            violations.append(
                f"stage {number}: data-parallel degree {d} does not divide the {instance.microbatches} microbatches"
            )
    if not plan.stages:
        return ["the plan has no stages"]
    if len(plan.stages) % v != 0:
        violations.append(
            f"schedule {name} puts {v} stages on each rank; the plan has {len(plan.stages)}, which {v} does not divide"
        )
    if schedule.name not in UNEVEN and len({stage.data_parallel_degree for stage in plan.stages}) > 1:
        violations.append(f"schedule {name} needs one data-parallel degree for all stages")
    if v > 1 and len({stage.tensor_parallel_degree for stage in plan.stages}) > 1:
        violations.append(f"schedule {name} needs one tensor-parallel degree for all stages: they share their devices")
    return violations + device_violations(instance, plan, 1 if violations else v)


def _figures(tmpcs: Iterable[Tmpc], d: int, t: int, versions_in_fixed: int) -> StageLoad:
    chosen = list(tmpcs)
    passes = [pass_times(tmpc) for tmpc in chosen]
    return StageLoad(
        forward_s=fsum(times.forward_s for times in passes),
        input_s=fsum(times.input_s for times in passes),
        weight_s=fsum(times.weight_s for times in passes),
        activation_bytes=fsum(tmpc.activation_bytes for tmpc in chosen),
        fixed_bytes=fsum(x for tmpc in chosen for x in (tmpc.fixed_bytes, tmpc.shared_bytes / d)),
        beside_bytes=fsum(
            max(0.0, tmpc.fixed_bytes - versions_in_fixed * tmpc.weights_bytes) + tmpc.shared_bytes / d
            for tmpc in chosen
        ),
        weights_bytes=fsum(tmpc.weights_bytes for tmpc in chosen),
        data_parallel_degree=d,
        tensor_parallel_degree=t,
    )


def _messages(
    instance: Instance,
    choices: Sequence[dict[int, Tmpc]],
    stage_of: dict[int, int],
    unpassed: frozenset[tuple[int, int]],
) -> tuple[Message, ...]:
    """For each pair of stages with edges between them, one message for the unpassed edges and one for the others."""
    sent: dict[tuple[int, int, bool], list[float]] = defaultdict(list)
    received: dict[tuple[int, int, bool], list[float]] = defaultdict(list)
    for edge in instance.edges:
        key = stage_of[edge.source], stage_of[edge.target], (edge.source, edge.target) in unpassed
        source, target, _ = key
        if source != target:
            by, to = choices[source][edge.source], choices[target][edge.target]
            sent[key] += [edge.communication_bytes, by.backward_sync_bytes.get(edge.target, 0.0)]
            received[key] += [edge.communication_bytes, to.forward_sync_bytes.get(edge.source, 0.0)]
    return tuple(Message(*key[:2], fsum(sent[key]), fsum(received[key]), key[2]) for key in sorted(sent))


def _shared_tensors(instance: Instance, stage_of: dict[int, int]) -> tuple[SharedTensor, ...]:
    found = []
    for tensor in instance.tensors:
        stages = tuple(sorted({stage_of[layer] for layer in tensor.layers}))
        if len(stages) > 1:
            found.append(SharedTensor(stages, tensor.forward_bytes, tensor.backward_bytes))
    return tuple(found)


@dataclass(frozen=True)
class Hop:
    """A transfer of each microbatch between two stages: seconds on the sender's link, forwards and backwards."""

    source: int
    target: int
    forward_s: float
    backward_s: float


Rate = Callable[[int, int, bool], float]
"""Bytes per second between two stages, for unpassed edges or for others."""


def charged_s(stages: Stages, rank_of: Sequence[int], rate: Rate) -> list[tuple[float, float]]:
    """For each stage the seconds that the transfers of its forward and of its backward pass take, as Piper charges
    them.

    Transfers between stages on one rank are free. A tensor with several ends moves at the slowest rate of all pairs of
    its stages; the pairs include stages on equal devices.
    """
    moved: list[dict[float, list[tuple[float, float]]]] = [defaultdict(list) for _ in stages.figures]
    for message in stages.messages:
        if rank_of[message.source] != rank_of[message.target]:
            at = rate(message.source, message.target, message.is_unpassed)
            moved[message.source][at].append((message.sent_bytes, message.sent_bytes))
            moved[message.target][at].append((message.received_bytes, message.received_bytes))
    for tensor in stages.tensors:
        if len({rank_of[stage] for stage in tensor.stages}) > 1:
            at = min(rate(*pair, False) for pair in combinations_with_replacement(tensor.stages, 2))
            for stage in tensor.stages:
                moved[stage][at].append((tensor.forward_bytes, tensor.backward_bytes))
    return [_sum([_seconds(sizes, at) for at, sizes in of_stage.items()]) for of_stage in moved]


def _sum(parts: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return fsum(forward_s for forward_s, _ in parts), fsum(backward_s for _, backward_s in parts)


def _seconds(sizes: Sequence[tuple[float, float]], bytes_per_s: float) -> tuple[float, float]:
    """The seconds for the forward bytes and for the backward bytes."""
    return fsum(forward for forward, _ in sizes) / bytes_per_s, fsum(backward for _, backward in sizes) / bytes_per_s


def hops(stages: Stages, rank_of: Sequence[int], rate: Rate, *, overlapped: bool) -> tuple[Hop, ...]:
    """The dependencies between stages: each waits for the one before it, and for those that send to it over other
    stages.

    Transfers take time of their own only if ``overlapped``, and only between ranks. A tensor with several ends is
    relayed from each of its stages to the next.
    """
    moved: dict[tuple[int, int], dict[bool, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    moved |= {(stage, stage + 1): defaultdict(list) for stage in range(len(stages.figures) - 1)}
    for message in stages.messages:
        moved[message.source, message.target][message.is_unpassed].append((message.moved_bytes, message.moved_bytes))
    for tensor in stages.tensors:
        for pair in pairwise(tensor.stages):
            moved[pair][False].append((tensor.forward_bytes, tensor.backward_bytes))
    found = []
    for source, target in sorted(moved):
        moves = overlapped and rank_of[source] != rank_of[target]
        parts = moved[source, target].items() if moves else ()
        found.append(
            Hop(source, target, *_sum([_seconds(sizes, rate(source, target, unpassed)) for unpassed, sizes in parts]))
        )
    return tuple(found)
