"""All figures of a kind of layer in a mode, and the TMPC that they make."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypedDict

from piper_ray.model.instance import Tmpc
from piper_ray.workloads.estimate.hardware import Gpu, Training
from piper_ray.workloads.estimate.memory import (
    activation_bytes,
    kept_bytes,
    parameters_on_device,
    state_bytes,
    trained_on_device,
    transient_bytes,
    working_bytes,
)
from piper_ray.workloads.estimate.modes import Mode, Recomputation
from piper_ray.workloads.estimate.operators import LayerKind
from piper_ray.workloads.estimate.roofline import backward_s, exchange_s, forward_s, traffic_s, weight_gradients_s


@dataclass(frozen=True)
class Setting:
    """What the costs depend on besides layer and mode.

    bytes_per_s: the planner's B, both directions of a link together. workspace_bytes: set aside on each device for
    one layer's backward pass; reserve_bytes: left free of it. largest_degree: of the whole workload; an edge's own cost
    is its share at that degree.
    """

    gpu: Gpu
    training: Training
    microbatches: int
    bytes_per_s: float
    workspace_bytes: float
    largest_degree: int
    reserve_bytes: float = 0.0

    @property
    def memory_bytes(self) -> float:
        """M: what is there for states and activations."""
        return self.gpu.device_bytes - self.reserve_bytes - self.workspace_bytes


@dataclass(frozen=True)
class Costs:
    """A layer's figures on each of the devices, in s per microbatch and bytes; ``tmpc`` says how they add up.

    offload_s, zero_s: moving activations to the host and back, gathering the parameters that others have updated.
    offload_forward_s: of the former, beside the forward pass. weight_s: of backward_s, products that give gradients of
    weights.
    """

    forward_s: float
    backward_s: float
    recompute_s: float
    exchange_forward_s: float
    exchange_backward_s: float
    exchange_recompute_s: float
    offload_s: float
    zero_s: float
    parameters: float
    trained: float
    gradient_bytes: float
    state_bytes: float
    activation_bytes: float
    transient_bytes: float
    excess_bytes: float
    offload_forward_s: float
    weight_s: float

    @property
    def forward_pass_s(self) -> float:
        """What of p comes before the backward pass begins; updated parameters are gathered before anything else."""
        return self.forward_s + self.exchange_forward_s + self.offload_forward_s + self.zero_s

    @property
    def compute_s(self) -> float:
        """Arithmetic and memory traffic: what more devices never make longer."""
        return self.forward_s + self.backward_s + self.recompute_s

    @property
    def time_s(self) -> float:
        """p: everything, one after the other."""
        exchanges = self.exchange_forward_s + self.exchange_backward_s + self.exchange_recompute_s
        return self.compute_s + exchanges + self.offload_s + self.zero_s

    @property
    def fixed_bytes(self) -> float:
        """b: state, and what a backward pass needs beyond the workspace set aside for all layers together."""
        return self.state_bytes + self.excess_bytes


def costs_of(kind: LayerKind, mode: Mode, setting: Setting) -> Costs:
    """The figures of one layer in one mode."""
    gpu, degree, sequence = setting.gpu, mode.degree, mode.sequence_parallel
    forward = [forward_s(operator, kind, gpu, degree, sequence) for operator in kind.operators]
    backward = sum(backward_s(operator, kind, gpu, degree, sequence) for operator in kind.operators)
    again = {
        Recomputation.NONE: 0.0,
        Recomputation.SELECTIVE: sum(
            pass_s for operator, pass_s in zip(kind.operators, forward, strict=True) if operator.cheap
        ),
        Recomputation.FULL: sum(forward),
    }[mode.recomputation]
    talk_forward = sum(ex.forward * exchange_s(ex, kind, gpu, degree, sequence) for ex in kind.exchanges)
    talk_backward = sum(ex.backward * exchange_s(ex, kind, gpu, degree, sequence) for ex in kind.exchanges)
    talk_again = talk_forward if mode.recomputation is Recomputation.FULL else 0.0
    trained = trained_on_device(kind, mode)
    transient = working_bytes(kind, mode)
    # Of gradients alone repeated layers need no more than is set aside, or little, which the reserve covers; charged to
    # each it would count as often as a stage has them. What stands once in a model, and recomputation, is charged.
    charged = not kind.recomputable or transient_bytes(kind, mode) > 0.0
    passes_s = (sum(forward) + talk_forward, backward + talk_backward + again + talk_again)
    offload = [offload_s(kept_bytes(kind, mode), pass_s, gpu) if mode.offload else 0.0 for pass_s in passes_s]
    return Costs(
        forward_s=sum(forward),
        backward_s=backward,
        recompute_s=again,
        exchange_forward_s=talk_forward,
        exchange_backward_s=talk_backward,
        exchange_recompute_s=talk_again,
        offload_s=sum(offload),
        zero_s=_zero_s(trained, mode, setting),
        parameters=parameters_on_device(kind, mode),
        trained=trained,
        gradient_bytes=trained * setting.training.gradient_bytes,
        state_bytes=state_bytes(kind, mode, setting.training),
        activation_bytes=activation_bytes(kind, mode),
        transient_bytes=transient,
        excess_bytes=max(0.0, transient - setting.workspace_bytes) if charged else 0.0,
        offload_forward_s=offload[0],
        weight_s=sum(weight_gradients_s(operator, kind, gpu, degree, sequence) for operator in kind.operators),
    )


def offload_s(kept_bytes: float, pass_s: float, gpu: Gpu) -> float:
    """Activations go to the host beside the forward pass, or come back beside the backward pass.

    That waits for what takes longer than the pass, and takes its share of the GPU's own memory bandwidth.
    """
    moved_s = kept_bytes / (gpu.host_bytes_per_s * gpu.host_fraction)
    return max(0.0, moved_s - pass_s) + traffic_s(kept_bytes, gpu)


def _zero_s(parameters: float, mode: Mode, setting: Setting) -> float:
    """ZeRO-1 (Rajbhandari et al. 2020): once a batch, replicas gather the weights that others have updated.

    The planner divides p by d; so that a batch's time comes to 1 / N of it a sample, d / N of it is charged, with
    d = the shards. Stages of more replicas gather a little more than that; their reduction, counted in w as if all
    gradients were gathered too, takes less than w says.
    """
    shards = mode.zero_shards
    gathered_bytes = parameters * setting.training.weight_bytes * (shards - 1) / shards
    return gathered_bytes / (setting.bytes_per_s / 2.0) * shards / setting.microbatches


def edge_bytes(output_bytes: float, setting: Setting) -> float:
    """c of an edge: what each device sends when all stages have the largest degree."""
    return output_bytes / setting.largest_degree


def sync_bytes(output_bytes: float, mode: Mode, setting: Setting) -> float:
    """fw or bw of an edge: what each of t devices sends or receives beyond ``edge_bytes``.

    t devices send 1/t of a tensor each, over their own network links (Narayanan et al. 2021, section 4.1). Without
    sequence parallelism those on the other side then gather it over the node's links; its time is said in bytes of B,
    of which the planner charges 2 (c + fw) / B.
    """
    share = output_bytes / mode.degree
    gathered = 0.0
    if mode.degree > 1 and not mode.sequence_parallel:
        gather_s = (mode.degree - 1) * (share / setting.gpu.ring_bytes_per_s(mode.degree) + setting.gpu.link_latency_s)
        gathered = gather_s * setting.bytes_per_s / 2.0
    return share - edge_bytes(output_bytes, setting) + gathered


def tmpc_of(
    costs: Costs, mode: Mode, setting: Setting, arriving: Mapping[int, float], leaving: Mapping[int, float]
) -> Tmpc:
    """The TMPC. arriving, leaving: whole bytes of the tensors from and to each neighbour, by layer id."""
    return Tmpc(
        id=mode.id,
        **times_of(costs.time_s, costs.forward_pass_s, costs.weight_s),
        weights_bytes=float(math.ceil(costs.gradient_bytes)),
        activation_bytes=float(math.ceil(costs.activation_bytes)),
        fixed_bytes=float(math.ceil(costs.fixed_bytes)),
        forward_sync_bytes={u: float(math.ceil(sync_bytes(size, mode, setting))) for u, size in arriving.items()},
        backward_sync_bytes={w: float(math.ceil(sync_bytes(size, mode, setting))) for w, size in leaving.items()},
        recompute=mode.recomputation is not Recomputation.NONE,
        least_data_parallel_degree=mode.zero_shards,
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
    """Six digits: an estimate has no more, and files stay readable."""
    return float(f"{seconds:.6g}")
