"""Equal runs of layers as stages, all with one d and one t: a grid, and the baselines that look at a part of it.

Under a schedule that flushes each batch the points are simulated, in the order of a bound from below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from piper_ray.evaluate import MEMORY_TOLERANCE, evaluate
from piper_ray.model import arguments
from piper_ray.model.errors import InvalidPlan, UsageError
from piper_ray.model.figures import plural
from piper_ray.model.instance import Instance, divisors
from piper_ray.model.plan import Plan, Stage
from piper_ray.model.restrictions import Restrictions
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.planners.planner import Light, Proposal
from piper_ray.planners.runs import Floats, Integers, RunCosts, RunOrder, UniformChoice, run_order, uniform_choices
from piper_ray.simulate.actions import ActionKind, flush_lists

_ROUNDING = 1e-9
"""Relative. Sums of the same seconds in another order differ by less."""

_LARGEST = 2**31
"""Of a digit's place: with as many times as there are microbatches it is still an int64."""

_SPLIT = frozenset({ScheduleName.ZB_H1, ScheduleName.ZB_V, ScheduleName.DUALPIPE_V})
"""Schedules in which a rank may end with gradients of weights, after its last word to the rank before it."""


@dataclass(frozen=True)
class GridPoint:
    """A point of the grid. lower_s: no step of it takes less. starts: where in the order its stages begin."""

    lower_s: float
    devices: int
    stages: int
    starts: Integers
    degree: int
    choice: UniformChoice
    fits: Callable[[], bool]


def candidates(
    costs: RunCosts, choices: Sequence[UniformChoice], layouts: Iterable[Integers], degrees: Integers
) -> Iterator[GridPoint]:
    """All that the devices hold, in no order. layouts: of stages; degrees: int64[..], those that d may be."""
    instance = costs.instance
    schedule = Schedule.first_of(instance.schedule)
    for starts in layouts:
        ranks, over = divmod(len(starts), schedule.v)
        if over:
            continue
        stages_of = [schedule.stages_of_rank(rank, ranks) for rank in range(ranks)]
        passes_s: dict[float, tuple[Floats, Floats]] = {}
        weights, activation, fixed, shared = costs.held(starts)
        for i, choice in enumerate(choices):
            for d in map(int, degrees):
                devices = ranks * d * choice.degree
                in_range = choice.least_data_parallel_degree <= d <= choice.most_data_parallel_degree
                if devices > instance.devices or not in_range:
                    continue
                microbatches = instance.microbatches // d
                cluster = instance.cluster.holding(devices)
                between = cluster.bandwidth_bytes_per_s if schedule.v == 1 else np.inf  # chunks of a rank: free
                if between not in passes_s:
                    passes_s[between] = costs.passes_s(starts, between)
                forward_s, backward_s = passes_s[between]
                replicas = cluster.replicas_link(d, choice.degree)
                sync_s = 4.0 * (d - 1) / d * weights[i] / replicas.bandwidth_bytes_per_s
                lower_s = _lower_s(schedule, stages_of, forward_s[i], backward_s[i], sync_s, microbatches)

                def fits(
                    stages_of: list[tuple[int, ...]] = stages_of,
                    microbatches: int = microbatches,
                    activation: Floats = activation[i],
                    fixed: Floats = fixed[i] + shared[i] / d,
                ) -> bool:
                    limit = instance.memory_bytes * (1.0 + MEMORY_TOLERANCE)
                    return _peak_bytes(schedule, stages_of, microbatches, activation, fixed) <= limit

                yield GridPoint(lower_s, devices, len(starts), starts, d, choice, fits)


def best_simulated(
    instance: Instance, restrictions: Restrictions, found: Iterable[GridPoint], plan_of: Callable[[GridPoint], Plan]
) -> tuple[GridPoint | None, int]:
    """The candidate whose step is shortest, then of the fewest devices and stages; and how many candidates there were.

    One is simulated only if it keeps the restrictions and its bound is no more than the best step so far.
    """
    schedule = Schedule.first_of(instance.schedule)
    ordered = sorted(found, key=lambda x: (x.lower_s, x.devices, x.stages))
    best: GridPoint | None = None
    least: tuple[float, int, int] | None = None
    for candidate in ordered:
        if least is not None and candidate.lower_s * (1.0 - _ROUNDING) > least[0] * instance.microbatches:
            break
        try:
            if not candidate.fits():
                continue
            plan = plan_of(candidate)
            if any(restrictions.violations(instance, plan, schedule)):
                continue
            value_s = evaluate(instance, plan).time_per_sample_s
        except (InvalidPlan, UsageError):  # too much memory by a hair; too few microbatches for the schedule
            continue
        key = value_s, candidate.devices, candidate.stages
        if least is None or key < least:
            best, least = candidate, key
    return best, len(ordered)


def _lower_s(
    schedule: Schedule,
    stages_of: Sequence[Sequence[int]],
    forward_s: Floats,
    backward_s: Floats,
    sync_s: Floats,
    microbatches: int,
) -> float:
    """Each rank waits for one forward pass of all stages before its first, does all its passes, and sums gradients.

    Or its last backward pass goes back through the stages before it.
    """
    ahead_s = np.concatenate([[0.0], np.cumsum(forward_s)])
    behind_s = np.concatenate([[0.0], np.cumsum(backward_s)]) * (schedule.name not in _SPLIT)
    whole_s = forward_s + backward_s
    found = 0.0
    for held in stages_of:
        first = min(held)
        done_s = ahead_s[first] + microbatches * float(whole_s[list(held)].sum())
        found = max(found, done_s + float(sync_s[list(held)].sum()), done_s + behind_s[first])
    return found


def _peak_bytes(
    schedule: Schedule, stages_of: Sequence[Sequence[int]], microbatches: int, activation: Floats, fixed: Floats
) -> float:
    """Of the rank that holds most at a time: its list of passes alone says how much of each chunk it holds when."""
    ranks = len(stages_of)
    most = 0.0
    for rank, stages in enumerate(stages_of):
        held = held_on(schedule, ranks, rank, microbatches)
        most = max(most, float(fixed[list(stages)].sum() + (held @ activation[list(stages)]).max()))
    return most


@lru_cache(maxsize=2)
def _lists(schedule: Schedule, ranks: int, microbatches: int) -> list[Integers]:
    return flush_lists(schedule, ranks, microbatches)


@lru_cache(maxsize=10_000)
def held_on(schedule: Schedule, ranks: int, rank: int, microbatches: int) -> Integers:
    """int64[.., v]: microbatches of each chunk in flight on a rank, as far as that differs."""
    if schedule.name is ScheduleName.GPIPE:
        return np.array([[microbatches]])
    if schedule.name is ScheduleName.ONE_F_ONE_B:
        return np.array([[min(microbatches, ranks - rank)]])
    actions = _lists(schedule, ranks, microbatches)[rank]
    change = np.where(actions[:, 0] == ActionKind.F, 1, -1) * (actions[:, 0] != ActionKind.I)
    in_chunk = actions[:, 1:2] == np.arange(schedule.v)
    held = np.cumsum(change[:, None] * in_chunk, axis=0)
    place = (microbatches + 1) ** np.arange(schedule.v, dtype=object)  # of digits of a number that stands for a row
    if place[-1] > _LARGEST:
        return np.unique(held, axis=0)
    return held[np.unique(held @ place.astype(np.int64), return_index=True)[1]]


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
        """Of equally fast plans the one on the fewest devices, then of the fewest stages.

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
        if not Schedule.first_of(instance.schedule).asynchronous:
            return self._under_flush(instance, restrictions, order, costs, choices, degrees)
        best: tuple[float, int, int] | None = None
        winner: tuple[Integers, int, UniformChoice] | None = None
        tried = 0
        for starts in self._layouts(order, instance):
            stages = len(starts)
            d = degrees[: np.searchsorted(degrees, instance.data_parallel_limit // stages, side="right")]
            within = (costs.degree[:, None] * d * stages <= instance.devices) & _in_range(choices, d)
            if not within.any():
                continue
            tried += int(within.sum())
            times, fits = costs.of(starts, d)
            times[~(within & fits)] = np.inf
            time_s = float(times.min())
            if time_s == np.inf:
                continue
            devices, choice, degree = min(
                (stages * int(d[j]) * int(costs.degree[i]), int(i), int(d[j]))
                for i, j in zip(*np.nonzero(times == time_s), strict=True)
            )
            if best is None or (time_s, devices, stages) < best:
                best = (time_s, devices, stages)
                winner = (starts, degree, choices[choice])
        if winner is None:
            return Proposal(None, tried, self._why_none(tried))
        return _proposal(instance, order, *winner, tried)

    def _under_flush(
        self,
        instance: Instance,
        restrictions: Restrictions,
        order: RunOrder,
        costs: RunCosts,
        choices: Sequence[UniformChoice],
        degrees: Integers,
    ) -> Proposal:
        def plan_of(found: GridPoint) -> Plan:
            return _plan(instance, order, found.starts, found.degree, found.choice)

        listed = candidates(costs, choices, self._layouts(order, instance), degrees)
        best, tried = best_simulated(instance, restrictions, listed, plan_of)
        if best is None:
            return Proposal(None, tried, self._why_none(tried, restrictions))
        return _proposal(instance, order, best.starts, best.degree, best.choice, tried)

    def _data_parallel_degrees(self, instance: Instance, restrictions: Restrictions) -> Integers:
        """int64[...], ascending."""
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

    @staticmethod
    def _why_none(tried: int, restrictions: Restrictions = Restrictions()) -> str:
        if tried == 0:
            return "no point of the grid is within the devices and microbatches"
        allowed = " and is allowed" if restrictions.plan_wide else ""
        return f"none of {plural(tried, 'grid point')} fits in memory{allowed}"


class _PartOfGrid(Light):
    """A planner that looks at a part of the grid."""

    def grid(self) -> EqualRuns:
        """That part."""
        raise NotImplementedError

    def propose(self, instance: Instance, restrictions: Restrictions) -> Proposal:
        return self.grid().propose(instance, restrictions)


@dataclass(frozen=True)
class DataParallel(_PartOfGrid):
    """One stage, t = 1, the best d that divides N: each replica holds the whole model."""

    def grid(self) -> EqualRuns:
        return EqualRuns(runs=(1,), tensor_parallel_degrees=(1,))


@dataclass(frozen=True)
class TensorParallel(_PartOfGrid):
    """One stage, d = 1, the best t: the whole model sharded over the devices."""

    def grid(self) -> EqualRuns:
        return EqualRuns(runs=(1,), data_parallel_degrees=(1,))


@dataclass(frozen=True)
class GPipe(_PartOfGrid):
    """Equal stages on one device each: d = 1, t = 1, as GPipe cuts them (Huang et al., NeurIPS 2019).

    Valued under the schedule asked for, which need not be GPipe's.
    """

    def grid(self) -> EqualRuns:
        return EqualRuns(data_parallel_degrees=(1,), tensor_parallel_degrees=(1,))


@dataclass(frozen=True)
class Megatron(_PartOfGrid):
    """Best of one t, one d and a number of stages that divides the repeated layers, as Megatron-LM runs them.

    Narayanan et al., SC 2021. t divides ``devices_per_node``, so that no tensor-parallel group leaves its node. Where
    no layers repeat the stages are runs of a topological order that differ by a layer at most. Raises UsageError for
    devices_per_node < 1.
    """

    devices_per_node: int = 8

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices_per_node", arguments.positive("devices_per_node", self.devices_per_node))

    def grid(self) -> EqualRuns:
        return EqualRuns(even=True, tensor_parallel_degrees=tuple(divisors(self.devices_per_node)))


@dataclass(frozen=True)
class PipeDream2BW(_PartOfGrid):
    """The whole grid: PipeDream-2BW's planner (Narayanan et al., ICML 2021), the "equi" baseline of Piper.

    NeurIPS 2021, section 5. separate: try the layers before and after the repeated ones as own stages too.

    Without tensor parallelism under ``Restrictions(tensor_parallelism=False)``.
    """

    separate: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "separate", arguments.flag("separate", self.separate))

    def grid(self) -> EqualRuns:
        return EqualRuns(separate=self.separate)


def _proposal(
    instance: Instance, order: RunOrder, starts: Integers, degree: int, choice: UniformChoice, tried: int
) -> Proposal:
    note = f"{plural(len(starts), 'stage')}, d = {degree}, t = {choice.degree}, {choice.recompute_words}"
    return Proposal(_plan(instance, order, starts, degree, choice), tried, note)


def _in_range(choices: Sequence[UniformChoice], data_parallel_degrees: Integers) -> npt.NDArray[np.bool_]:
    """bool[choices, degrees]: whether stages of this degree may run the choice."""
    least = np.array([choice.least_data_parallel_degree for choice in choices])[:, None]
    most = np.array([choice.most_data_parallel_degree for choice in choices])[:, None]
    return (least <= data_parallel_degrees) & (data_parallel_degrees <= most)


def _plan(instance: Instance, order: RunOrder, starts: Integers, degree: int, choice: UniformChoice) -> Plan:
    place = {layer.id: i for i, layer in enumerate(instance.layers)}
    stages = []
    for run in np.split(np.array(order.layers), starts[1:]):
        layers = tuple(sorted(run.tolist(), key=place.__getitem__))
        stages.append(Stage(layers, degree, choice.degree, {layer: choice.tmpcs[layer].id for layer in layers}))
    return Plan(tuple(stages))
