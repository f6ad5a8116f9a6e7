"""What a page's figures assume, in words: of the schedule, of the times, of the cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from piper_ray.model.figures import given_size_text, plural, time_text
from piper_ray.model.instance import Instance
from piper_ray.model.passes import passes_of
from piper_ray.model.plan import Plan
from piper_ray.model.schedule import AllReduce, ScheduleName
from piper_ray.simulate.result import Simulation

_ONE_DEGREE = "All stages have one data-parallel and one tensor-parallel degree, as runtimes need it."
_PROMISE = (
    "The promised time is Piper's: that of the slowest stage, of a pipeline that is always full. The simulation is "
    "what replicas deliver that take microbatches in turn, with so many in flight as the plan counts memory for."
)
_FLUSH = (
    "A batch ends with a flush: all passes, then the sum of gradients, then the optimizer, before the next one begins."
)
_TWO_BW = (
    "PipeDream-2BW: 1F1B that never drains. Weights are updated once a batch, with gradients that are a batch late; "
    "two versions of the weights are kept, which the input's fixed memory holds."
)
_RULE = (
    "A replica of a stage keeps at most ceil(s / d) microbatches in flight, s being the sum of d over this stage and "
    "all behind it."
)
_PIPEDREAM = (
    "PipeDream: 1F1B that never drains. Weights are updated after each microbatch, and a version is stashed for each "
    "microbatch in flight; versions beyond two are added to the input's fixed memory."
)
_GPIPE = (
    "GPipe: each rank runs all forward passes of a batch, then all backward passes; activations of all its "
    "microbatches are held at once."
)
_ONE_F_ONE_B = (
    "1F1B with a flush (PipeDream-Flush, DAPPLE): rank r of p runs min(m, p - r) forward passes, then a backward and a "
    "forward pass in turn, of its m microbatches; so many are in flight at most."
)
_INTERLEAVED = (
    "Interleaved 1F1B (Megatron-LM): each rank holds several chunks of the model, rank r of p the stages r, r + p, "
    "r + 2p, ..., and runs microbatches through them in groups."
)
_LOOPED_BFS = (
    "Looped breadth-first: each rank holds several chunks and runs all microbatches through one before the next, forth "
    "and back; activations of all of them are held at once."
)
_ZB_H1 = (
    "Zero bubble, ZB-H1: 1F1B whose backward pass is parted into gradients of inputs, on which others wait, and "
    "gradients of weights, which fill the bubble."
)
_ZB_V = (
    "Zero bubble, ZB-V: two chunks on each rank, placed as a V (rank r of p holds stages r and 2p - 1 - r); gradients "
    "of weights fill the bubble."
)
_DUALPIPE_V = (
    "DualPipe in a V: two chunks on each rank (rank r of p holds stages r and 2p - 1 - r), the forward pass of one "
    "beside the backward pass of the other; here they run one after the other."
)

_SCHEDULES: Mapping[ScheduleName, tuple[str, ...]] = MappingProxyType(
    {
        ScheduleName.TWO_BW: (_TWO_BW, _PROMISE),
        ScheduleName.PIPEDREAM: (_PIPEDREAM, _PROMISE),
        ScheduleName.GPIPE: (_GPIPE, _FLUSH),
        ScheduleName.ONE_F_ONE_B: (_ONE_F_ONE_B, _FLUSH),
        ScheduleName.INTERLEAVED: (_INTERLEAVED, _FLUSH, _ONE_DEGREE),
        ScheduleName.LOOPED_BFS: (_LOOPED_BFS, _FLUSH, _ONE_DEGREE),
        ScheduleName.ZB_H1: (_ZB_H1, _FLUSH, _ONE_DEGREE),
        ScheduleName.ZB_V: (_ZB_V, _FLUSH, _ONE_DEGREE),
        ScheduleName.DUALPIPE_V: (_DUALPIPE_V, _FLUSH, _ONE_DEGREE),
    }
)

_SPLITTING = frozenset({ScheduleName.ZB_H1, ScheduleName.ZB_V, ScheduleName.DUALPIPE_V})


def assumptions(instance: Instance, plan: Plan, simulation: Simulation) -> tuple[str, ...]:
    """Sentences, the schedule's first."""
    return (
        *_SCHEDULES[simulation.schedule.name],
        *_in_flight(plan, simulation),
        *_times(instance, plan, simulation),
        *_transfers(instance, simulation),
        *_gradients(simulation),
        *_places(instance),
        "Not simulated: single kernels, the network's topology, contention between pipelines, loading of data, faults.",
    )


def _in_flight(plan: Plan, simulation: Simulation) -> Iterator[str]:
    if simulation.schedule.asynchronous and plan.in_flight is None:
        yield _RULE
    elif simulation.schedule.asynchronous:
        yield "A replica of a stage keeps so many microbatches in flight as the plan says, for the promise to be kept."
    if plan.keeps_order:
        yield "Stages are runs of the input's order of layers; what jumps over stages is relayed, and charged, in each."


def _times(instance: Instance, plan: Plan, simulation: Simulation) -> Iterator[str]:
    yield "Times, weights and activations of each layer are the input's; a pass takes exactly its time."
    chosen = [
        tmpc
        for stage in plan.stages
        for layer, wanted in stage.tmpc_ids.items()
        for tmpc in instance.layer_by_id[layer].tmpcs[stage.tensor_parallel_degree]
        if tmpc.id == wanted
    ]
    assumed = sum(passes_of(tmpc).assumed for tmpc in chosen)
    if assumed:
        yield (
            f"Of {plural(assumed, 'layer')} the input gives the time of both passes together: a third is taken for the "
            "forward pass, a quarter where it recomputes."
        )
    if simulation.schedule.name in _SPLITTING and any(passes_of(tmpc).weight_s is None for tmpc in chosen):
        yield "Where the input does not say it, half of a backward pass computes gradients of weights."


def _transfers(instance: Instance, simulation: Simulation) -> Iterator[str]:
    cluster = instance.cluster.holding(simulation.devices)
    bandwidth = f"{given_size_text(cluster.bandwidth_bytes_per_s)}/s"
    if simulation.options.overlap_transfers:
        yield f"Transfers between stages run beside the passes, at {bandwidth}."
    else:
        yield (
            f"Transfers between stages take up the passes of both stages, at {bandwidth}, wherever the stages are; "
            "half of Piper's communication in each direction."
        )


def _gradients(simulation: Simulation) -> Iterator[str]:
    options = simulation.options
    if options.optimizer_s:
        yield f"The optimizer takes {time_text(options.optimizer_s)} of each rank, once a batch."
    if all(stage.data_parallel_degree == 1 for stage in simulation.stages):
        return
    how = (
        "around a ring, 2 (d - 1) / d" if options.all_reduce is AllReduce.RING else "as Piper charges it, 4 (d - 1) / d"
    )
    if simulation.schedule.name is ScheduleName.PIPEDREAM:
        when = "with each backward pass"
    elif simulation.schedule.asynchronous:
        when = "once a batch, spread over its backward passes"
    else:
        when = "after a stage's last backward pass"
    hidden = options.all_reduce_overlap
    beside = f", {100.0 * hidden:.4g} % of it beside backward passes" if hidden and "last" in when else ""
    yield f"The d replicas of a stage sum their gradients {when}{beside}: {how} bytes for each byte of weights."


def _places(instance: Instance) -> Iterator[str]:
    yield "Devices are equal. Ranks are placed in the order of the stages, the t devices of a replica side by side."
    inner = instance.cluster.links[:-1]
    if inner:
        yield "Of stages of several sizes those that share nodes are placed first, so that no node's border cuts them."
        groups = ", ".join(f"{given_size_text(link.bandwidth_bytes_per_s)}/s within {link.devices}" for link in inner)
        yield (
            f"Faster links within groups ({groups} devices) count for replicas that surely share one, and for "
            "transfers between stages where the whole plan lies in one."
        )
