"""All figures of a kind of layer in a mode, and the TMPC that they form."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypedDict, TypeVar

from piper_ray.model.instance import Tmpc
from piper_ray.model.mode import Mode, Recomputation
from piper_ray.workloads.estimate import memory
from piper_ray.workloads.estimate.exchanges import (
    ExchangeSeconds,
    Group,
    all_gather_s,
    exchanges_of,
    in_passes_s,
    synchronised_bytes,
    unsaid_s,
)
from piper_ray.workloads.estimate.hardware import Gpu, Training
from piper_ray.workloads.estimate.modes import LayerMode
from piper_ray.workloads.estimate.operators import LayerKind, Operator
from piper_ray.workloads.estimate.roofline import (
    backward_s,
    expert_launches,
    forward_s,
    launches,
    traffic_s,
    weight_gradients_s,
)
from piper_ray.workloads.estimate.software import CudaGraph, Stack

_HALF = 1.5
"""Half the exponent of the norm that adds the host's time to the GPU's time in a pass."""


_ROUTED_BACK = 1.5
"""How many times as long the host takes to launch the backward pass of routing as the forward pass."""


@dataclass(frozen=True)
class Setting:
    """What the costs depend on besides layer and mode.

    bytes_per_s: the planner's B, both directions of a link together. workspace_bytes: memory of each device that is set
    aside for one layer's backward pass. reserve_bytes: memory of each device that stays free. largest_degree: the
    largest degree of the workload; an edge's own cost is its share at that degree.
    """

    stack: Stack
    training: Training
    microbatches: int
    bytes_per_s: float
    workspace_bytes: float
    largest_degree: int
    reserve_bytes: float = 0.0

    @property
    def memory_bytes(self) -> float:
        """M: the memory for states and activations."""
        return self.gpu.device_bytes - self.reserve_bytes - self.workspace_bytes

    @property
    def gpu(self) -> Gpu:
        return self.stack.gpu


class LayerPasses(NamedTuple):
    """The seconds of a layer's passes for a microbatch, without what is moved during them.

    forward_s, backward_s, again_s: time on the GPU. weight_s: the part of the backward pass for gradients of weights.
    idle_forward_s, idle_backward_s: time that the GPU waits for the host.
    """

    forward_s: float
    backward_s: float
    again_s: float
    talk: ExchangeSeconds
    idle_forward_s: float
    idle_backward_s: float
    weight_s: float

    @property
    def seconds(self) -> tuple[float, float]:
        """The seconds of the forward and of the backward pass."""
        back_s = self.backward_s + self.talk.backward_s + self.again_s + self.talk.again_s + self.idle_backward_s
        return self.forward_s + self.talk.forward_s + self.idle_forward_s, back_s


@dataclass(frozen=True)
class LayerCosts:
    """A layer's figures on each device, in s per microbatch and bytes. ``tmpc`` adds them up.

    gather_forward_s, gather_backward_s: FSDP's exchanges, as far as they take longer than the pass. offload_s: moving
    activations to the host and back. offload_forward_s: its part in the forward pass. synchronised_bytes: w.
    shared_bytes: bytes of state that all replicas together hold once. updated: the number of parameters whose optimizer
    state is here. unsaid_s: the part of synchronisation that w cannot express at any d (``exchanges``).
    """

    passes: LayerPasses
    offload_s: float
    gather_forward_s: float
    gather_backward_s: float
    parameters: float
    trained: float
    gradient_bytes: float
    synchronised_bytes: float
    state_bytes: float
    activation_bytes: float
    transient_bytes: float
    excess_bytes: float
    offload_forward_s: float
    shared_bytes: float
    updated: float
    unsaid_s: float

    @property
    def forward_pass_s(self) -> float:
        """The part of p before the backward pass begins."""
        waiting = self.passes.idle_forward_s + self.gather_forward_s + self.offload_forward_s
        return self.passes.forward_s + self.passes.talk.forward_s + waiting

    @property
    def compute_s(self) -> float:
        """Arithmetic and memory traffic, which more devices never make longer."""
        return self.passes.forward_s + self.passes.backward_s + self.passes.again_s

    @property
    def time_s(self) -> float:
        """p: all parts, one after the other."""
        idle_s = self.passes.idle_forward_s + self.passes.idle_backward_s
        waiting = idle_s + self.gather_forward_s + self.gather_backward_s
        return self.compute_s + self.passes.talk.all_s + waiting + self.offload_s

    @property
    def planned_s(self) -> float:
        """p, corrected by what the planner's own charge for synchronisation leaves out or has too much of."""
        return max(self.time_s + self.unsaid_s, (self.time_s + self.forward_pass_s) / 2.0)

    @property
    def fixed_bytes(self) -> float:
        """b: the state, and what a backward pass needs beyond the workspace that is set aside once for all layers."""
        return self.state_bytes + self.excess_bytes

    @cached_property
    def compared(self) -> tuple[float, ...]:
        """All figures on which a plan with this layer depends, including the whole backward pass and its gradients of
        inputs."""
        backward_s, weight_s = self.planned_s - self.forward_pass_s, self.passes.weight_s
        seconds = self.forward_pass_s, self.planned_s, weight_s, backward_s, backward_s - weight_s
        return (*seconds, self.synchronised_bytes, self.activation_bytes, self.fixed_bytes, self.shared_bytes)


_Known = TypeVar("_Known")


def _known_on(stack: Stack, kind: LayerKind, key: Hashable, work_out: Callable[[], _Known]) -> _Known:
    """Computes a figure once for all modes of the kind that have this key on the same stack."""
    known_for, found = kind.known.get(key, (None, None))
    if known_for is not stack:
        found = work_out()
        kind.known[key] = stack, found
    known: _Known = found
    return known


def _passes(kind: LayerKind, mode: LayerMode, stack: Stack) -> LayerPasses:
    return _known_on(stack, kind, mode.divided, lambda: _work_out_passes(kind, mode, stack))


def _work_out_passes(kind: LayerKind, mode: LayerMode, stack: Stack) -> LayerPasses:
    launch_s = stack.launch_s(mode.degree)
    once = _known_on(stack, kind, mode.divides, lambda: _work_out_once(kind, mode, stack))
    forward, backward = sum(once.forward), once.backward_s
    again, again_launches = _again(kind, mode, stack, once.forward)
    talk = exchanges_of(kind, mode, stack)
    experts_host = experts_host_s(kind, mode, stack)
    return LayerPasses(
        forward,
        backward,
        again,
        talk,
        idle_s(forward + talk.forward_s, launch_s * once.launches[0] + experts_host[0]),
        idle_s(
            backward + again + talk.backward_s + talk.again_s,
            launch_s * (once.launches[1] + again_launches) + experts_host[1],
        ),
        once.weight_s,
    )


class _Once(NamedTuple):
    """A layer's operators without recomputation.

    forward: seconds of each. launches: those of both passes.
    """

    forward: list[float]
    backward_s: float
    weight_s: float
    launches: tuple[int, int]


def _work_out_once(kind: LayerKind, mode: LayerMode, stack: Stack) -> _Once:
    launched = [launches(x, kind, mode, stack) for x in kind.operators if not is_captured(x, stack)]
    return _Once(
        [forward_s(operator, kind, mode, stack) / stack.efficiency for operator in kind.operators],
        sum(backward_s(operator, kind, mode, stack) for operator in kind.operators) / stack.efficiency,
        sum(weight_gradients_s(operator, kind, mode, stack) for operator in kind.operators) / stack.efficiency,
        (sum(forward for forward, _ in launched), sum(backward for _, backward in launched)),
    )


def costs_of(kind: LayerKind, mode: LayerMode, setting: Setting) -> LayerCosts:
    """The figures of one layer in one mode."""
    stack = setting.stack
    passes = _passes(kind, mode, stack)
    passes_s = passes.seconds
    parameters = memory.parameters_on_device(kind, mode)
    trained = memory.trained_on_device(kind, mode)
    transient = memory.working_bytes(kind, mode, stack.traits) + memory.gathered_bytes(kind, mode, setting.training)
    # Of gradients alone repeated layers need no more than is set aside, or little, which the reserve covers; charged to
    # each it would count as often as a stage has them. What stands once in a model, and recomputation, is charged.
    charged = not kind.recomputable or memory.transient_bytes(kind, mode, stack.traits) > 0.0
    charged = charged or mode.expert_tensor > 1
    kept = memory.kept_bytes(kind, mode, stack.traits)
    offload = [offload_s(kept, pass_s, setting.gpu) if mode.offload else 0.0 for pass_s in passes_s]
    gathers = [
        max(0.0, moved_s - pass_s) + stack.software.gather_slowdown * min(moved_s, pass_s)
        for moved_s, pass_s in zip(in_passes_s(kind, mode, stack, setting.training), passes_s, strict=True)
    ]
    return LayerCosts(
        passes=passes,
        offload_s=sum(offload),
        gather_forward_s=gathers[0],
        gather_backward_s=gathers[1],
        parameters=parameters,
        trained=trained,
        gradient_bytes=trained * setting.training.gradient_bytes,
        synchronised_bytes=synchronised_bytes(kind, mode, stack, setting.training),
        state_bytes=memory.state_bytes(kind, mode, setting.training),
        activation_bytes=memory.activation_bytes(kind, mode, stack.traits),
        transient_bytes=transient,
        excess_bytes=max(0.0, transient - setting.workspace_bytes) if charged else 0.0,
        offload_forward_s=offload[0],
        shared_bytes=memory.shared_bytes(kind, mode, setting.training),
        updated=sum(x.trained / mode.state_parts(x.routed) for x in memory.numbers_on_device(kind, mode)),
        unsaid_s=unsaid_s(kind, mode, stack, setting.training, setting.microbatches),
    )


def is_captured(operator: Operator, stack: Stack) -> bool:
    """Whether a CUDA graph launches the operator, which costs the host no time."""
    graphs = stack.software.graphs
    return CudaGraph.ALL in graphs or (CudaGraph.ATTENTION in graphs and not operator.routed)


def experts_host_s(kind: LayerKind, mode: LayerMode, stack: Stack) -> tuple[float, float]:
    """The host's time to route tokens and to launch grouped products expert by expert, in a forward and in a backward
    pass."""
    counts = [expert_launches(operator, kind, mode) for operator in kind.operators if operator.routed]
    if not counts or CudaGraph.ALL in stack.software.graphs:
        return 0.0, 0.0
    each_s = stack.launch_s(mode.degree) * stack.software.expert_launches
    routing = routing_host_s(stack)
    forward_s = each_s * sum(forward for forward, _ in counts) + routing[0]
    backward_s = each_s * sum(backward for _, backward in counts) + routing[1]
    return forward_s, backward_s + (forward_s if mode.recomputation == Recomputation.FULL else 0.0)


def routing_host_s(stack: Stack) -> tuple[float, float]:
    """The host's time to route a layer's tokens, in a forward and in a backward pass."""
    software = stack.software
    left = software.graphed_experts_host if CudaGraph.ROUTING in software.graphs else 1.0
    routing_s = left * software.experts_host_s
    return routing_s, _ROUTED_BACK * routing_s


def idle_s(device_s: float, host_s: float) -> float:
    """The time that the GPU waits for the host, which launches kernels while earlier ones run. A pass takes the longer
    of both; if both are about equal, each sometimes waits for the other."""
    if host_s == 0.0:
        return 0.0
    return float(math.hypot(device_s**_HALF, host_s**_HALF) ** (1.0 / _HALF)) - device_s


def pass_slopes(device_s: float, host_s: float) -> tuple[float, float]:
    """The derivatives of a pass's time, ``device_s + idle_s(device_s, host_s)``, by each argument. The time is a norm
    of both."""
    pass_s = device_s + idle_s(device_s, host_s)
    if pass_s == 0.0:
        return 1.0, 1.0
    exponent = 2.0 * _HALF - 1.0
    return (device_s / pass_s) ** exponent, (host_s / pass_s) ** exponent


def _again(kind: LayerKind, mode: LayerMode, stack: Stack, forward: Sequence[float]) -> tuple[float, int]:
    """The seconds of recomputation in the backward pass, and its launches."""
    again_s, count = 0.0, 0
    for operator, pass_s in zip(kind.operators, forward, strict=True):
        share = mode.share_again(operator)
        again_s += share * pass_s
        count += launches(operator, kind, mode, stack)[0] if share == 1.0 else 0
    return again_s, count


def offload_s(kept_bytes: float, pass_s: float, gpu: Gpu) -> float:
    """The seconds of offloading: activations go to the host during the forward pass, and return during the backward
    pass. A pass waits for transfers that take longer than itself, and transfers take part of the GPU's own memory
    bandwidth."""
    moved_s = kept_bytes / (gpu.host_bytes_per_s * gpu.host_fraction)
    return max(0.0, moved_s - pass_s) + traffic_s(kept_bytes, gpu)


def edge_bytes(output_bytes: float, setting: Setting) -> float:
    """c of an edge: the bytes that each device sends if all stages have the largest degree."""
    return output_bytes / setting.largest_degree


def sync_bytes(output_bytes: float, degree: int, mode: Mode, setting: Setting) -> float:
    """fw or bw of an edge: what each of t devices sends or receives beyond ``edge_bytes``.

    t devices send 1/t of a tensor each, over their own network links (Narayanan et al. 2021, section 4.1). Without
    sequence parallelism those on the other side then gather it over the node's links; its time is said in bytes of B,
    of which the planner charges 2 (c + fw) / B. Whole bytes.
    """
    share = output_bytes / (degree * mode.context)
    gathered = 0.0
    if degree > 1 and not mode.sequence_parallel:
        stack = setting.stack
        gather_s = all_gather_s(output_bytes / mode.context, Group(degree), stack.gpu, stack.domain)
        gathered = gather_s * setting.bytes_per_s / 2.0
    return float(math.ceil(share - edge_bytes(output_bytes, setting) + gathered))


_ALONE = Tmpc("", 0.0)


def tmpc_of(costs: LayerCosts, mode: LayerMode) -> Tmpc:
    """The TMPC, without neighbours: ``between`` adds what it sends them."""
    times = times_of(costs.planned_s, costs.forward_pass_s, costs.passes.weight_s)
    return _ALONE.changed(
        id=mode.id,
        **times,
        backward_s=times["time_per_sample_s"] - times["forward_s"],
        weights_bytes=float(math.ceil(costs.synchronised_bytes)),
        activation_bytes=float(math.ceil(costs.activation_bytes)),
        fixed_bytes=float(math.ceil(costs.fixed_bytes)),
        recompute=mode.recomputation != Recomputation.NONE,
        shared_bytes=float(math.ceil(costs.shared_bytes)),
        least_data_parallel_degree=mode.least_data_parallel_degree,
        mode=mode.without_degree,
    )


class Times(TypedDict):
    """The times of a TMPC; its backward pass is the rest."""

    time_per_sample_s: float
    forward_s: float
    weight_s: float | None


def times_of(time_s: float, forward_s: float, weight_s: float | None = None) -> Times:
    """p, its forward pass and the part of the rest that computes gradients of weights: rounded, and still parts."""
    p_s = rounded_s(time_s)
    forward_s = min(rounded_s(forward_s), p_s)
    part_s = None if weight_s is None else min(rounded_s(weight_s), p_s - forward_s)
    return Times(time_per_sample_s=p_s, forward_s=forward_s, weight_s=part_s)


def rounded_s(seconds: float) -> float:
    """The figure in six digits, which keep files readable; an estimate is no surer."""
    return float(f"{seconds:.6g}")
