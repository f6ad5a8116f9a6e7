"""Equal runs of layers as stages, all with one d and one t: a grid, and the baselines that look at a part of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from piper_ray.model import arguments
from piper_ray.model.figures import plural
from piper_ray.model.instance import Instance, divisors
from piper_ray.model.plan import Plan, Stage
from piper_ray.model.restrictions import Restrictions
from piper_ray.model.schedule import Schedule
from piper_ray.planners.flushed_runs import GridPoint, best_simulated, candidates
from piper_ray.planners.order import RunOrder, run_order
from piper_ray.planners.planner import Light, Proposal
from piper_ray.planners.run_costs import Integers, RunCosts, UniformChoice, uniform_choices


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
