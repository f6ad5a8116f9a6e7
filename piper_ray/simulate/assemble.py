"""A simulation from end to end: figures of the stages, action lists, events, and the resulting figures of each rank.

The links between a plan's stages and between their replicas follow from the positions of devices, counted device by
device. Parts that share a node have consecutive devices, the largest parts first, so no part whose size divides the
node is split by its border: a whole stage, or as many of its replicas as together divide a node. Any other
neighbourhood would be chance, and is not assumed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from piper_ray.model.cluster import Cluster
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import Batch, Instance
from piper_ray.model.plan import Plan
from piper_ray.model.plan_rules import as_planned, lies_in_groups, unpassed_edges
from piper_ray.model.schedule import PAPERS_SCHEDULE, Schedule, ScheduleName
from piper_ray.simulate.actions import ActionKind, Actions, flush_lists, gpipe, one_f_one_b
from piper_ray.simulate.borders import best_ring, plan_border_rates, reached_bytes_per_s
from piper_ray.simulate.communication import sends_waited_for, with_buffers, with_joined_passes
from piper_ray.simulate.kernels.events import Floats
from piper_ray.simulate.result import PROMISE_KEPT, Interval, PathPart, RankSimulation, Simulation, pass_of
from piper_ray.simulate.run import InFlightRule, SimulationOptions, Transfers
from piper_ray.simulate.stages import Hop, StageLoad, Stages, charged_s, hops, stages_of
from piper_ray.simulate.steady import SteadyState, Stream, least_in_flight, rule_in_flight, steady_state, sustained_s
from piper_ray.simulate.timeline import (
    Held,
    MemorySteps,
    PassSeconds,
    SimulatedRanks,
    Timeline,
    Versions,
    held_microbatches,
    layout,
    memory_steps,
    program_of,
    run_program,
    weight_versions,
)

_ONE_IN_TURN = frozenset({ScheduleName.TWO_BW, ScheduleName.PIPEDREAM, ScheduleName.ONE_F_ONE_B})
"""Schedules that alternate one backward and one forward pass, with a given number of microbatches in flight."""

_OF_REPLICA = {ScheduleName.GPIPE: gpipe}
"""The list of a replica's own microbatches, for the other schedules of ``UNEVEN``."""


@dataclass(frozen=True)
class _Scene:
    """The input of a simulation, apart from the action lists."""

    schedule: Schedule
    options: SimulationOptions
    stages: Stages
    placed: SimulatedRanks
    seconds: PassSeconds
    hops: tuple[Hop, ...]
    all_reduce_s: Floats
    memory_limits_bytes: tuple[float, ...]
    microbatches: int
    planned_in_flight: tuple[int, ...] | None

    @property
    def figures(self) -> tuple[StageLoad, ...]:
        return self.stages.figures

    def run(self, lists: Sequence[Actions], microbatches: int) -> Timeline:
        program = program_of(self.placed, lists, microbatches, self.seconds, self.hops, self.options.latency_s)
        if self.schedule.name is ScheduleName.DUALPIPE_V and self.options.pass_overlap:
            program = with_joined_passes(program, self.seconds.compute_s, self.options.pass_overlap)
        if self.options.transfers is Transfers.OVERLAPPED_STEADY:
            program = program._replace(waited_for=sends_waited_for(program, self.schedule, microbatches))
        return run_program(self.placed, program, self.seconds.communication_s, self.options.transfers)


def simulated(instance: Instance, plan: Plan, schedule: Schedule, options: SimulationOptions) -> Simulation:
    """See ``run.simulate``. The arguments must be checked already."""
    scene = _scene(instance, plan, schedule, options)
    _check_overlaps(schedule, options)
    if options.vertical_sync and schedule.name is not ScheduleName.PIPEDREAM:
        raise UsageError(f"vertical sync: schedule {schedule.name.value} has one version in all stages anyway")
    if schedule.asynchronous and options.transfers is Transfers.ONE_STREAM:
        raise UsageError(f"transfers on one stream: no runtime that has one runs schedule {schedule.name.value}")
    return _asynchronous(scene, instance) if schedule.asynchronous else _flushed(scene, instance)


def _check_overlaps(schedule: Schedule, options: SimulationOptions) -> None:
    if options.transfers is Transfers.OVERLAPPED_STEADY and schedule.name is not ScheduleName.INTERLEAVED:
        raise UsageError(
            f"transfers overlapped-steady: Megatron's interleaved schedule alone has them, not {schedule.name.value}; "
            "expected in-passes or overlapped"
        )
    if options.pass_overlap and schedule.name is not ScheduleName.DUALPIPE_V:
        raise UsageError(f"pass_overlap: schedule {schedule.name.value} runs no two passes as one; dualpipe-v does")
    if options.pass_overlap and options.transfers is Transfers.ONE_STREAM:
        raise UsageError("pass_overlap: on one stream, torch runs the two passes one after the other")


def sustaining_in_flight(instance: Instance, plan: Plan) -> tuple[int, ...] | None:
    """For each stage the microbatches that a replica must keep in flight under 2bw so that the slowest stage is always
    busy. Their sum is the least possible, and none is below ceil(s / d). None if no number suffices, or if the search
    would take too long.

    Raises InvalidPlan as ``simulate`` does.
    """
    scene = _scene(instance, replace(plan, in_flight=None), PAPERS_SCHEDULE, SimulationOptions())
    return least_in_flight(_stream(scene), rule_in_flight(scene.placed.replicas))


def most_bytes(instance: Instance, plan: Plan) -> float:
    """The largest memory of any stage under 2bw, in bytes per device, with the plan's microbatches in flight."""
    figures = stages_of(instance, plan, PAPERS_SCHEDULE).figures
    in_flight = plan.in_flight or rule_in_flight([stage.data_parallel_degree for stage in figures])
    return max(x.activation_bytes * y + x.fixed_bytes for x, y in zip(figures, in_flight, strict=True))


def _scene(instance: Instance, plan: Plan, schedule: Schedule, options: SimulationOptions) -> _Scene:
    instance = as_planned(instance, plan)
    if not schedule.asynchronous:
        plan = replace(plan, places=None)
    in_groups = lies_in_groups(instance.cluster, plan, schedule)
    stages = stages_of(instance, plan, schedule, unpassed_edges(instance) if in_groups or plan.places else frozenset())
    if schedule.name is ScheduleName.INTERLEAVED and options.transfers.overlaps:
        stages = with_buffers(stages, schedule, instance.microbatches)
    figures = stages.figures
    placed = layout(schedule, figures)
    cluster, devices = instance.cluster, plan.span // schedule.v
    kinds = [stage.kind for stage in plan.stages]

    own_rates = plan_border_rates(cluster, plan) if in_groups or plan.places else []

    def rate(source: int, target: int, is_unpassed: bool) -> float:
        if is_unpassed:
            return own_rates[source]
        return transfer_bytes_per_s(cluster, devices, kinds[source], kinds[target])

    replicas_bandwidth = np.array(
        [
            replicas_bytes_per_s(
                cluster.of_kind(kind),
                devices,
                x.data_parallel_degree,
                x.tensor_parallel_degree,
                kinds.count(kind) if in_groups else None,
            )
            for x, kind in zip(figures, kinds, strict=True)
        ]
    )
    degrees = np.array([stage.data_parallel_degree for stage in figures])
    weights_bytes = np.array([stage.weights_bytes for stage in figures])
    all_reduce_s = options.all_reduce.factor * (degrees - 1) / degrees * weights_bytes / replicas_bandwidth
    forward_s = np.array([stage.forward_s for stage in figures])
    input_s = np.array([stage.input_s for stage in figures])
    weight_s = np.array([stage.weight_s for stage in figures])
    charged = np.array(charged_s(stages, placed.places, rate)) * (not options.transfers.overlaps)
    sync_s = _sync_each_pass_s(schedule, all_reduce_s, instance.microbatches / degrees)
    compute_s = np.stack([forward_s, input_s + weight_s, input_s, weight_s], axis=1)
    communication_s = np.stack([charged[:, 0], charged[:, 1] + sync_s, charged[:, 1], np.zeros(len(figures))], axis=1)
    return _Scene(
        schedule,
        options,
        stages,
        placed,
        PassSeconds(compute_s, communication_s),
        hops(stages, placed.places, rate, overlapped=options.transfers.overlaps),
        all_reduce_s,
        tuple(cluster.of_kind(kind).memory_bytes for kind in kinds),
        instance.microbatches,
        plan.in_flight if schedule.asynchronous else None,
    )


def _batch(instance: Instance, options: SimulationOptions) -> Batch:
    """The instance's batch, with the figures that the options replace."""
    samples, tokens = options.samples_per_microbatch, options.tokens_per_sample
    batch = instance.batch
    return Batch(
        batch.microbatches,
        batch.samples_per_microbatch if samples is None else samples,
        batch.tokens_per_sample if tokens is None else tokens,
    )


def _sync_each_pass_s(schedule: Schedule, all_reduce_s: Floats, passes: Floats) -> Floats:
    """The time that the sum of gradients adds to each backward pass of a schedule that never flushes.

    Under PipeDream, which updates after each round of the replicas, it is the whole sum. Under 2BW, which updates once
    a batch, it is the sum's share per pass, as Piper charges it.
    """
    if not schedule.asynchronous:
        return np.zeros(len(all_reduce_s))
    return {ScheduleName.PIPEDREAM: all_reduce_s, ScheduleName.TWO_BW: all_reduce_s / passes}[schedule.name]


def _in_flight(scene: _Scene) -> tuple[int, ...] | None:
    """y of each stage, for schedules that have a limit in flight; None for the others."""
    wanted = scene.options.in_flight
    if scene.schedule.name not in _ONE_IN_TURN:
        if wanted is not InFlightRule.RULE:
            raise UsageError(f"in_flight: schedule {scene.schedule.name.value} sets itself what is in flight")
        return None
    if wanted is InFlightRule.RULE and scene.planned_in_flight is not None:
        wanted = scene.planned_in_flight
    if wanted is InFlightRule.RULE:
        return rule_in_flight(scene.placed.replicas)
    if wanted is InFlightRule.SUSTAINING:
        if not scene.schedule.asynchronous:
            raise UsageError("in_flight: only 2bw and pipedream have a rate to sustain; 1f1b drains after each batch")
        least = least_in_flight(_stream(scene))
        if least is None:
            raise UsageError("in_flight: no number keeps the slowest stage busy: transfers take far longer than passes")
        return least
    assert isinstance(wanted, tuple)
    if len(wanted) != len(scene.figures):
        raise UsageError(f"in_flight has {len(wanted)} figures; the plan has {len(scene.figures)} stages")
    return wanted


def _stream(scene: _Scene) -> Stream:
    duration_s = scene.seconds.duration_s
    latency_s = scene.options.latency_s
    return Stream(
        tuple(duration_s[:, ActionKind.F].tolist()),
        tuple(duration_s[:, ActionKind.B].tolist()),
        scene.placed.replicas,
        tuple(Hop(hop.source, hop.target, hop.forward_s + latency_s, hop.backward_s + latency_s) for hop in scene.hops),
    )


def _flushed(scene: _Scene, instance: Instance) -> Simulation:
    lanes = scene.placed.lanes
    microbatches = scene.microbatches // lanes
    in_flight = _in_flight(scene)
    timeline = scene.run(_lists(scene, microbatches, in_flight), microbatches)
    all_reduces, optimizers = _after_the_flush(scene, timeline)
    step_s = max(interval.end_s for interval in optimizers)
    made = _simulation(scene, instance, timeline, (0.0, step_s), in_flight, (all_reduces, optimizers))
    return replace(made, critical_path=critical_path(timeline, all_reduces, optimizers))


def _simulation(
    scene: _Scene,
    instance: Instance,
    timeline: Timeline,
    window_s: tuple[float, float],
    in_flight: tuple[int, ...] | None,
    after: tuple[tuple[Interval, ...], tuple[Interval, ...]] = ((), ()),
) -> Simulation:
    """The simulation of a step that is as long as the window. after: the all-reduces and the optimizer's steps after a
    flush."""
    return Simulation(
        schedule=scene.schedule,
        options=scene.options,
        batch=_batch(instance, scene.options),
        step_s=window_s[1] - window_s[0],
        pipelines=scene.placed.lanes,
        ranks=_ranks(scene, timeline, window_s, *after),
        stages=scene.figures,
        window_s=window_s,
        in_flight=in_flight,
        timeline=timeline,
        notes=tuple(_pipeline_notes(scene, bool(instance.cluster.kinds))),
        all_reduces=after[0],
        optimizer_steps=after[1],
    )


def _lists(scene: _Scene, microbatches: int, in_flight: tuple[int, ...] | None) -> list[Actions]:
    replicas = scene.placed.replicas
    if in_flight is None and set(replicas) == {1}:
        return flush_lists(scene.schedule, len(scene.placed.ranks), microbatches)
    known: dict[tuple[int, int], Actions] = {}  # by stage and number of microbatches: nearly all replicas are equal
    lists = []
    for rank in scene.placed.ranks:
        (stage,) = rank.stages
        own = len(range(rank.replica, microbatches, replicas[stage]))
        if (stage, own) not in known:
            name = scene.schedule.name
            known[stage, own] = _OF_REPLICA[name](own) if in_flight is None else one_f_one_b(own, in_flight[stage])
        lists.append(known[stage, own])
    return lists


def _after_the_flush(scene: _Scene, timeline: Timeline) -> tuple[tuple[Interval, ...], tuple[Interval, ...]]:
    """The all-reduce and the optimizer's step of each rank.

    The replicas of a stage sum their gradients when all of them have finished, for all stages of a rank together. An
    interval does not include the part that overlaps with backward passes.
    """
    last = timeline.first[1:] - 1
    end_s = timeline.end_s[last]
    replicas = defaultdict(list)
    for number, rank in enumerate(scene.placed.ranks):
        replicas[rank.place].append(number)
    all_reduces, optimizers = [], []
    for number, rank in enumerate(scene.placed.ranks):
        together = replicas[rank.place]
        due_s = max(float(end_s[i]) for i in together)
        seconds = float(sum(scene.all_reduce_s[stage] for stage in rank.stages))
        seconds *= 1.0 - scene.options.all_reduce_overlap
        all_reduces.append(Interval(number, due_s, due_s + seconds))
        optimizers.append(Interval(number, due_s + seconds, due_s + seconds + scene.options.optimizer_s))
    return tuple(all_reduces), tuple(optimizers)


def _asynchronous(scene: _Scene, instance: Instance) -> Simulation:
    in_flight = _in_flight(scene)
    assert in_flight is not None
    stream = _stream(scene)
    lanes = scene.placed.lanes

    found = _steady_state(scene, in_flight)
    microbatch_s = found.microbatch_s + scene.options.optimizer_s * lanes / scene.microbatches
    promised_s = stream.promised_s + scene.options.optimizer_s * lanes / scene.microbatches
    batches = scene.microbatches / lanes
    return replace(
        _simulation(scene, instance, found.timeline, found.window_s, in_flight),
        step_s=microbatch_s * batches,
        promised_s=promised_s * batches,
        sustaining=_sustaining(scene, stream, in_flight),
        steady=found.periodic,
    )


def _steady_state(scene: _Scene, in_flight: tuple[int, ...]) -> SteadyState:
    return steady_state(
        lambda microbatches: scene.run(_lists(scene, microbatches, in_flight), microbatches), scene.placed, in_flight
    )


def _sustaining(scene: _Scene, stream: Stream, in_flight: tuple[int, ...]) -> tuple[int, ...] | None:
    """The least numbers in flight that keep the promised rate, if ``in_flight`` does not. They are found by analysis,
    and a simulation confirms them.

    None also if no numbers keep it: transfers take far longer than passes, or delay each other on a rank's way out,
    which the analysis does not model.
    """
    if sustained_s(stream, in_flight) <= stream.promised_s:
        return None
    least = least_in_flight(stream)
    if least is None:
        return None
    kept_s = _steady_state(scene, least).microbatch_s
    return least if kept_s <= stream.promised_s * PROMISE_KEPT else None


def _ranks(
    scene: _Scene,
    timeline: Timeline,
    window_s: tuple[float, float],
    all_reduces: Sequence[Interval],
    optimizers: Sequence[Interval],
) -> tuple[RankSimulation, ...]:
    """The figures of each rank. Passes that cross the window's ends count by their part inside. Ranks of the same place
    with equally many passes run the same list, only at other times, so their common figures are computed once."""
    start_s, end_s = window_s
    length_s = timeline.end_s - timeline.start_s
    inside_s = np.clip(timeline.end_s, start_s, end_s) - np.clip(timeline.start_s, start_s, end_s)
    share = np.divide(inside_s, length_s, out=np.zeros(len(timeline)), where=length_s > 0)
    transit_s = np.clip(timeline.start_s, start_s, end_s) - np.clip(
        timeline.start_s - timeline.transit_s, start_s, end_s
    )
    on_the_way_s = share * timeline.communication_s
    found = []
    known: dict[tuple[int, int], Held] = {}
    memories: dict[tuple[tuple[int, int], Versions | None], MemorySteps] = {}
    for number, rank in enumerate(timeline.layout.ranks):
        mine = timeline.of_rank(number)
        alike = rank.place, mine.stop - mine.start
        if alike not in known:
            known[alike] = held_microbatches(timeline, number)
        versions = None
        if scene.schedule.name is ScheduleName.PIPEDREAM:
            versions = weight_versions(timeline, number, scene.options.vertical_sync)
        if (alike, versions) not in memories:
            memories[alike, versions] = memory_steps(timeline, scene.figures, number, versions, known[alike])
        memory = memories[alike, versions]
        communication_s = float(on_the_way_s[mine].sum())
        compute_s = float(inside_s[mine].sum()) - communication_s
        waiting_s = float(transit_s[mine].sum())
        if all_reduces:
            communication_s += all_reduces[number].end_s - all_reduces[number].start_s
            compute_s += optimizers[number].end_s - optimizers[number].start_s
        found.append(
            RankSimulation(
                name=rank.name,
                stages=rank.stages,
                replica=rank.replica,
                devices=scene.figures[rank.stages[0]].tensor_parallel_degree,
                compute_s=compute_s,
                communication_s=communication_s,
                waiting_s=waiting_s,
                bubble_s=max(0.0, end_s - start_s - (compute_s + communication_s + waiting_s)),
                in_flight=tuple(int(microbatches.max(initial=0)) for microbatches in known[alike].microbatches),
                peak_memory_bytes=memory.peak_bytes,
                fixed_memory_bytes=memory.fixed_bytes,
                memory_limit_bytes=scene.memory_limits_bytes[rank.stages[0]],
                versions=versions,
            )
        )
    return tuple(found)


def _pipeline_notes(scene: _Scene, several_kinds: bool) -> list[str]:
    """Notes on what the simulation leaves out: equal pipelines, devices of tensor parallelism, links that are shared,
    joined passes."""
    lanes, figures = scene.placed.lanes, scene.figures
    devices = sum(stage.data_parallel_degree * stage.tensor_parallel_degree for stage in figures) // scene.schedule.v
    notes = []
    if lanes > 1:
        uneven = len({stage.data_parallel_degree for stage in figures}) > 1
        why = (
            f"microbatches go round-robin, so those alike modulo {lanes} meet the same replicas and no others do"
            if uneven
            else "each does the same with microbatches of its own, and they meet in the all-reduce alone"
        )
        notes.append(
            f"one of {lanes:,} equal pipelines is simulated, {devices // lanes:,} of {devices:,} devices: {why}"
        )
    degrees = {stage.tensor_parallel_degree for stage in figures}
    if max(degrees) > 1:
        of = f"{max(degrees)}" if len(degrees) == 1 else f"{min(degrees)} to {max(degrees)}"
        notes.append(f"a rank stands for the {of} devices that share its layers by tensor parallelism: they go in step")
    if several_kinds:
        notes.append(
            "replicas of a stage are devices of one kind at one site; transfers and sums of gradients that share a "
            "link do not slow each other down here"
        )
    if scene.schedule.name is ScheduleName.DUALPIPE_V and not scene.options.pass_overlap:
        notes.append(
            "passes that DualPipeV runs as one go one after the other here; --pass-overlap counts what that gains"
        )
    return notes


def transfer_bytes_per_s(cluster: Cluster, devices: int, one: str = "", other: str = "") -> float:
    """The bandwidth between two stages of a plan on ``devices`` devices, that of the outermost link that the plan uses,
    since some two neighbours have no faster one. one, other: the kinds of their devices, if there are several."""
    if one != other and cluster.between_bytes_per_s is not None:
        return cluster.between_bytes_per_s
    _, bandwidth = _groups(cluster.of_kind(one), devices // max(1, len(cluster.sites)))[-1]
    return bandwidth


def replicas_bytes_per_s(cluster: Cluster, devices: int, d: int, t: int, stages: int | None = None) -> float:
    """The bandwidth of a ring through the d replicas of a stage, t devices each, in a plan of this many devices. Where
    several replicas share a node, each has a link out of it. inf for one replica. stages: of a plan whose links
    follow from where its stages lie.
    """
    if cluster.sites and cluster.between_bytes_per_s is not None:
        near = d // len(cluster.sites)  # of the ring's members, each with a link of its own to the next site
        within = replicas_bytes_per_s(cluster.at_site, near * devices // d, near, t, stages)
        return min(near * cluster.between_bytes_per_s, within)
    if stages is not None:
        return best_ring(cluster, d, t, stages, replicas_bytes_per_s)
    *inner, (_, between) = _groups(cluster, devices)
    row = max((n for n in (size // t for size in cluster.blocks if size % t == 0) if d % n == 0), default=1)
    carried, near = float("inf"), 1
    for size, bandwidth in inner:
        if size % t > 0:
            continue  # replicas cross the borders of groups
        together = min(Counter(replica * t // size for replica in range(row)).values())
        if together > near:
            carried, near = min(carried, near * bandwidth), together
    return min(carried, near * between) if near < d else carried


def _groups(cluster: Cluster, devices: int) -> list[tuple[int, float]]:
    """Devices and bandwidth of each group that a ring or a transfer may lie in, the smallest first; the last group
    holds the plan. Within a node the network may be used too, if it is faster.
    """
    found: list[tuple[int, float]] = []
    for level, link in enumerate(cluster.links):
        size = devices if link.devices is None else link.devices
        found.append((size, reached_bytes_per_s(cluster, level)))
        if cluster.packed and devices <= size:
            break
    return found


def critical_path(
    timeline: Timeline, all_reduces: Sequence[Interval], optimizers: Sequence[Interval]
) -> tuple[PathPart, ...]:
    """The parts of the critical path, consecutive from 0 to the end of the step, without parts of length zero.

    If several ranks end last, the path ends on the first of them. If a pass waited for several things at once, the path
    follows the earlier pass of its own rank.
    """
    ends_s = [interval.end_s for interval in optimizers]
    rank = ends_s.index(max(ends_s))
    parts = [
        PathPart(rank, what, None, None, interval.start_s, interval.end_s)
        for what, interval in (("optimizer", optimizers[rank]), ("all-reduce", all_reduces[rank]))
    ]
    place = timeline.layout.ranks[rank].place
    together = [number for number, other in enumerate(timeline.layout.ranks) if other.place == place]
    action = max((int(timeline.first[number + 1]) - 1 for number in together), key=lambda last: timeline.end_s[last])
    while action >= 0:
        part = pass_of(timeline, action)
        parts.append(part)
        cause = int(timeline.cause[action])
        if cause >= 0 and float(timeline.end_s[cause]) < part.start_s:
            parts.append(PathPart(part.rank, "transfer", None, None, float(timeline.end_s[cause]), part.start_s))
        action = cause
    return tuple(part for part in reversed(parts) if part.duration_s > 0.0)
