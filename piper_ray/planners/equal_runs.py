"""Equal runs of layers as stages, all with one d and one t: a grid, and the baselines that look at a part of it.

Points are valued, under a schedule that flushes each batch by a simulation, in the order of a bound from below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from piper_ray.evaluate import MEMORY_TOLERANCE, evaluate
from piper_ray.model import arguments
from piper_ray.model.constraints import Restrictions
from piper_ray.model.errors import InvalidPlan, UsageError
from piper_ray.model.figures import plural
from piper_ray.model.instance import Instance, divisors
from piper_ray.model.plan import Plan, Stage
from piper_ray.model.schedule import FLUSHED, PAPERS_SCHEDULE, Schedule, ScheduleName
from piper_ray.planners.planner import Light, Proposal
from piper_ray.planners.runs import Floats, Integers, RunCosts, RunOrder, UniformChoice, run_order, uniform_choices
from piper_ray.simulate.actions import ActionKind, flush_lists

_ROUNDING = 1e-9
"""Relative. Sums of the same seconds in another order differ by less."""

_SPLIT = frozenset({ScheduleName.ZB_H1, ScheduleName.ZB_V, ScheduleName.DUALPIPE_V})
"""Schedules in which a rank may end with gradients of weights, after its last word to the rank before it."""


@dataclass(frozen=True)
class GridPoint:
    """A point of the grid. lower_s: no batch of it takes less. starts: where in the order its stages begin.

    activation_bytes, fixed_bytes: float64[stages], for each microbatch in flight, and whatever is.
    """

    lower_s: float
    devices: int
    starts: Integers
    degree: int
    choice: UniformChoice
    activation_bytes: Floats
    fixed_bytes: Floats


def grid_points(
    instance: Instance,
    costs: RunCosts,
    choices: Sequence[UniformChoice],
    layouts: Iterable[Integers],
    degrees: Integers,
) -> Iterator[GridPoint]:
    """All that the devices hold, in no order. layouts: of stages; degrees: int64[..], those that d may be."""
    schedule = Schedule.first_of(instance.schedule)
    for starts in layouts:
        if len(starts) % schedule.v:
            continue
        ranks = len(starts) // schedule.v
        passes_s: dict[float, tuple[Floats, Floats]] = {}
        weights, activation, fixed, shared = costs.held(starts)
        for i, choice in enumerate(choices):
            for d in map(int, degrees):
                devices = ranks * d * choice.degree
                in_range = choice.least_data_parallel_degree <= d <= choice.most_data_parallel_degree
                if devices > instance.devices or not in_range:
                    continue
                if schedule.asynchronous and len(starts) * d > instance.data_parallel_limit:
                    break
                cluster = instance.cluster.holding(devices)
                between = np.inf  # chunks of a rank: free
                if schedule.v == 1:
                    between = cluster.border_rates()[0] if schedule.name in FLUSHED else cluster.bandwidth_bytes_per_s
                if between not in passes_s:
                    passes_s[between] = costs.passes_s(starts, between)
                forward_s, backward_s = passes_s[between]
                replicas = cluster.replicas_link(d, choice.degree)
                if schedule.name in FLUSHED:
                    replicas = instance.cluster.replicas_link(d, choice.degree, ranks)
                sync_s = 4.0 * (d - 1) / d * weights[i] / replicas.bandwidth_bytes_per_s
                lower_s = _lower_s(schedule, forward_s[i], backward_s[i], sync_s, instance.microbatches // d)
                yield GridPoint(lower_s, devices, starts, d, choice, activation[i], fixed[i] + shared[i] / d)


def best_point(
    instance: Instance, restrictions: Restrictions, points: Sequence[GridPoint], plan_of: Callable[[GridPoint], Plan]
) -> GridPoint | None:
    """The point whose batch is shortest, then of the fewest devices and stages.

    One is valued only if its bound is no more than the best so far: without a flush the bound is the value, but for
    rounding. Under a flush it is simulated, and has to keep the restrictions on whole plans.
    """
    schedule = Schedule.first_of(instance.schedule)
    flushed = not schedule.asynchronous
    instance = instance if flushed else instance.replace(schedule=PAPERS_SCHEDULE)
    best: GridPoint | None = None
    least: tuple[float, int, int] | None = None
    for point in sorted(points, key=lambda x: (x.lower_s, x.devices, len(x.starts))):
        if least is not None and point.lower_s * (1.0 - _ROUNDING) > least[0] * instance.microbatches:
            break
        try:
            if peak_bytes(schedule, point, instance.microbatches) > instance.memory_bytes * (1.0 + MEMORY_TOLERANCE):
                continue
            plan = plan_of(point)
            if flushed and any(restrictions.violations(instance, plan, schedule)):
                continue
            value_s = evaluate(instance, plan).time_per_sample_s
        except (InvalidPlan, UsageError):  # too much memory by a hair; too few microbatches for the schedule
            continue
        key = value_s, point.devices, len(point.starts)
        if least is None or key < least:
            best, least = point, key
    return best


def _lower_s(schedule: Schedule, forward_s: Floats, backward_s: Floats, sync_s: Floats, microbatches: int) -> float:
    """The least time of a batch of which a replica runs ``microbatches`` microbatches. Without a flush it is
    that of the slowest stage's passes and sums.

    Else each rank waits for one forward pass of all stages before its first, does all its passes, and sums gradients.
    Or its last backward pass goes back through the stages before it.
    """
    whole_s = forward_s + backward_s
    if schedule.asynchronous:
        return float((microbatches * whole_s + sync_s).max())
    ahead_s = np.concatenate([[0.0], np.cumsum(forward_s)])
    behind_s = np.concatenate([[0.0], np.cumsum(backward_s)]) * (schedule.name not in _SPLIT)
    found = 0.0
    for held in _stages_of_ranks(schedule, len(whole_s)):
        first = min(held)
        done_s = ahead_s[first] + microbatches * float(whole_s[held].sum())
        found = max(found, done_s + float(sync_s[held].sum()), done_s + behind_s[first])
    return found


def _stages_of_ranks(schedule: Schedule, stages: int) -> list[list[int]]:
    ranks = stages // schedule.v
    return [list(schedule.stages_of_rank(rank, ranks)) for rank in range(ranks)]


def peak_bytes(schedule: Schedule, point: GridPoint, microbatches: int) -> float:
    """The bytes of the rank that holds most at a time: its list of passes alone says how much of each chunk it holds
    when."""
    own, ranks = microbatches // point.degree, len(point.starts) // schedule.v
    if schedule.asynchronous or schedule.name in (ScheduleName.GPIPE, ScheduleName.ONE_F_ONE_B):
        behind = np.full(ranks, own) if schedule.name is ScheduleName.GPIPE else np.arange(ranks, 0, -1)
        in_flight = behind if schedule.asynchronous else np.minimum(behind, own)
        return float((point.fixed_bytes + in_flight * point.activation_bytes).max())
    most = 0.0
    for rank, stages in enumerate(_stages_of_ranks(schedule, len(point.starts))):
        held = held_on(schedule, ranks, rank, own)
        fixed_bytes, activation_bytes = point.fixed_bytes[stages].sum(), (held @ point.activation_bytes[stages]).max()
        most = max(most, float(fixed_bytes + activation_bytes))
    return most


@lru_cache(maxsize=2)
def _lists(schedule: Schedule, ranks: int, microbatches: int) -> list[Integers]:
    return flush_lists(schedule, ranks, microbatches)


@lru_cache(maxsize=10_000)
def held_on(schedule: Schedule, ranks: int, rank: int, microbatches: int) -> Integers:
    """int64[.., v]: microbatches of each chunk in flight on a rank, as far as that differs."""
    actions = _lists(schedule, ranks, microbatches)[rank]
    change = np.where(actions[:, 0] == ActionKind.F, 1, -1) * (actions[:, 0] != ActionKind.I)
    in_chunk = actions[:, 1:2] == np.arange(schedule.v)
    return np.unique(np.cumsum(change[:, None] * in_chunk, axis=0), axis=0)


@dataclass(frozen=True)
class EqualRuns(Light):
    """Best of a grid: how many runs, one d, one t, recomputation everywhere or nowhere.

    The runs are of the workload's repeated layers, or of all in topological order where none repeat (``run_order``),
    and the last are one layer longer where their number does not divide. Layers before the repeated ones join the
    first stage, layers after them the last. d divides N, and stages * d is at most min(K, N).

    separate: try as well the layers before and after as stages of their own.
    even: where layers repeat, only numbers of runs that divide them.
    runs, data_parallel_degrees, tensor_parallel_degrees: only these; None: all.
    """

    separate: bool = False
    even: bool = False
    runs: tuple[int, ...] | None = None
    data_parallel_degrees: tuple[int, ...] | None = None
    tensor_parallel_degrees: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("separate", "even"):
            object.__setattr__(self, name, arguments.flag(name, getattr(self, name)))
        for name in ("runs", "data_parallel_degrees", "tensor_parallel_degrees"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, arguments.whole_numbers(name, getattr(self, name)))

    def propose(self, instance: Instance, restrictions: Restrictions) -> Proposal:
        """Proposes of equally fast plans the one on the fewest devices, then of the fewest stages.

        Under a schedule that flushes each batch stages are numbers of chunks, and what counts is the simulated step.
        """
        choices = [
            choice
            for choice in uniform_choices(instance, restrictions)
            if self.tensor_parallel_degrees is None or choice.degree in self.tensor_parallel_degrees
        ]
        if not choices:
            return Proposal(None, 0, "no tensor-parallel degree of the grid at which every layer can run")
        order = run_order(instance)
        costs = RunCosts.build(instance, order.layers, choices)
        degrees = self._data_parallel_degrees(instance, restrictions)
        points = [*grid_points(instance, costs, choices, self._layouts(order, instance), degrees)]
        best = best_point(instance, restrictions, points, lambda point: _plan(instance, order, point))
        if best is None:
            return Proposal(None, len(points), _why_none(instance, restrictions, len(points)))
        at = f"d = {best.degree}, t = {best.choice.degree}, {best.choice.recompute_words}"
        return Proposal(_plan(instance, order, best), len(points), f"{plural(len(best.starts), 'stage')}, {at}")

    def _data_parallel_degrees(self, instance: Instance, restrictions: Restrictions) -> Integers:
        """The degrees to try, ascending: int64[...]."""
        degrees = filter(restrictions.admits_data_parallel_degree, divisors(instance.microbatches))
        wanted = self.data_parallel_degrees
        return np.array([d for d in degrees if wanted is None or d in wanted], np.int64)

    def _layouts(self, order: RunOrder, instance: Instance) -> Iterator[Integers]:
        """For each way to cut the order into stages, where they start: int64[stages], ascending from 0."""
        under = Schedule.first_of(instance.schedule)
        most = min(order.between, instance.data_parallel_limit if under.asynchronous else instance.devices * under.v)
        last = len(order.layers) - order.after
        for runs in range(1, most + 1):
            if self.runs is not None and runs not in self.runs:
                continue
            length, longer = divmod(order.between, runs)
            if self.even and order.repeated and longer:
                continue
            lengths = np.full(runs, length)
            lengths[runs - longer :] += 1
            inner = order.before + np.cumsum(lengths)[:-1]
            yield np.concatenate([[0], inner])
            if self.separate and (order.before or order.after):
                ends = ([0] if order.before else [], [last] if order.after else [])
                yield np.concatenate([ends[0], [order.before], inner, ends[1]]).astype(np.int64)


@dataclass(frozen=True)
class DataParallel(Light):
    """One stage, t = 1, the best d that divides N: each replica holds the whole model."""

    def propose(self, instance: Instance, restrictions: Restrictions) -> Proposal:
        return EqualRuns(runs=(1,), tensor_parallel_degrees=(1,)).propose(instance, restrictions)


@dataclass(frozen=True)
class TensorParallel(Light):
    """One stage, d = 1, the best t: the whole model sharded over the devices."""

    def propose(self, instance: Instance, restrictions: Restrictions) -> Proposal:
        return EqualRuns(runs=(1,), data_parallel_degrees=(1,)).propose(instance, restrictions)


@dataclass(frozen=True)
class GPipe(Light):
    """Equal stages on one device each: d = 1, t = 1, as GPipe cuts them (Huang et al., NeurIPS 2019).

    Valued under the schedule asked for, which need not be GPipe's.
    """

    def propose(self, instance: Instance, restrictions: Restrictions) -> Proposal:
        return EqualRuns(data_parallel_degrees=(1,), tensor_parallel_degrees=(1,)).propose(instance, restrictions)


@dataclass(frozen=True)
class Megatron(Light):
    """Best of one t, one d and a number of stages that divides the repeated layers, as Megatron-LM runs them.

    Narayanan et al., SC 2021. t divides ``devices_per_node``, so that no tensor-parallel group leaves its node. Where
    no layers repeat the stages are runs of a topological order that differ by a layer at most. Raises UsageError for
    devices_per_node < 1.
    """

    devices_per_node: int = 8

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices_per_node", arguments.positive("devices_per_node", self.devices_per_node))

    def propose(self, instance: Instance, restrictions: Restrictions) -> Proposal:
        return EqualRuns(even=True, tensor_parallel_degrees=tuple(divisors(self.devices_per_node))).propose(
            instance, restrictions
        )


@dataclass(frozen=True)
class PipeDream2BW(Light):
    """The whole grid: PipeDream-2BW's planner (Narayanan et al., ICML 2021), the "equi" baseline of Piper.

    NeurIPS 2021, section 5. separate: try the layers before and after the repeated ones as own stages too.

    Without tensor parallelism under ``Restrictions(tensor_parallelism=False)``.
    """

    separate: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "separate", arguments.flag("separate", self.separate))

    def propose(self, instance: Instance, restrictions: Restrictions) -> Proposal:
        return EqualRuns(separate=self.separate).propose(instance, restrictions)


def _why_none(instance: Instance, restrictions: Restrictions, tried: int) -> str:
    if tried == 0:
        return "no point of the grid is within the devices and microbatches"
    flushed = not Schedule.first_of(instance.schedule).asynchronous
    allowed = " and is allowed" if flushed and restrictions.plan_wide else ""
    return f"none of {plural(tried, 'grid point')} fits in memory{allowed}"


def _plan(instance: Instance, order: RunOrder, point: GridPoint) -> Plan:
    place = {layer.id: i for i, layer in enumerate(instance.layers)}
    d, t, tmpcs = point.degree, point.choice.degree, point.choice.tmpcs
    stages = []
    for run in np.split(np.array(order.layers), point.starts[1:]):
        layers = tuple(sorted(run.tolist(), key=place.__getitem__))
        stages.append(Stage(layers, d, t, {layer: tmpcs[layer].id for layer in layers}))
    return Plan(tuple(stages))
