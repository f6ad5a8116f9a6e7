"""Plans of one task: cut after fractional plans, with TMPCs that fit, then made better by moves."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, islice, pairwise, permutations, product
from typing import NamedTuple

import numpy as np

from piper_ray.cost.plan import places, stage_of
from piper_ray.cost.products import dot
from piper_ray.cost.tolerances import PROOF
from piper_ray.engine.chunks.rank_patterns import PatternSearch
from piper_ray.engine.chunks.relaxation import Relaxation
from piper_ray.engine.chunks.tables import DegreeTables
from piper_ray.engine.chunks.tasks import PipelineShape, Task
from piper_ray.engine.kernels.chunk_bound import FIGURE
from piper_ray.engine.kernels.chunk_cuts import level_cuts
from piper_ray.engine.kernels.chunk_moves import (
    DRAWS,
    PlanWalk,
    WalkBounds,
    Windows,
    anneal,
    batch_seconds,
    best_of_all,
    fit_all,
)
from piper_ray.engine.kernels.chunk_program import ChunkProgram
from piper_ray.engine.kernels.chunk_stages import ChunkModel
from piper_ray.engine.kernels.types import FloatArray, IndexArray
from piper_ray.model.plan import Plan

_MOST_PATTERNS = 150
"""Ways to share layers out to the turns that are tried."""

_FEW_KINDS = 64
"""Layers are shared out to turns by their number if they are of no more kinds than this, so that many are alike."""

_MOST_WAYS = 10_000_000
"""If there are more ways, all of which would be passed through, plans of equal work come close to them."""

_FIRST_ORDERS = 4
"""Orders of the layers that are tried at first."""

_SMALL = 0.1
"""A share of the mean layer's time. Layers that take less are not counted when layers are shared out."""

_SQUARINGS = 2, 4
"""Chunks are cut so that their times, squared so often, have the least sum. The more often, the more even chunks are,
and the more they may send."""

_ROUNDS = 5
"""The most cuts for each of these, each after what the ranks run in the plan before."""

_MOST_PLACES = 48
"""The most places of a cut among which it is chosen."""

_NEARLY = 1.003
"""Plans within this factor of the best one are improved layer by layer."""

_DESCENT_PASSES = 20_000_000
"""The most passes that are simulated to improve one plan layer by layer: some seconds."""

_PASSES_OF_A_STEP = 10
"""Simulated passes that take about as long as a step through all plans of a small model."""

_PREFERENCE = 1.0
"""Relative: how much more a step that saves memory is preferred in the first turn than in the last one."""

_HEAT = 0.003
"""Relative: how much slower a move may make a plan at first."""


@dataclass(frozen=True)
class Candidate:
    """A plan of a task that fits. chunk_of, choice: as in ``kernels.chunk_stages``. value_s: of a batch, simulated."""

    task: Task
    tables: DegreeTables
    chunk_of: IndexArray
    choice: IndexArray
    value_s: float

    @property
    def devices(self) -> int:
        return self.task.devices

    @property
    def stages(self) -> int:
        return self.task.shape.stages

    @property
    def rank(self) -> tuple[int, int]:
        """Orders plans that take the same time: fewest devices first, then fewest chunks."""
        return self.devices, self.stages

    def plan(self) -> Plan:
        """The plan whose stages are the chunks, with layers in file order."""
        task, order = self.task, self.task.tables.order
        place = places(order.instance)
        stages = []
        for k in range(task.shape.stages):
            tmpc_ids = {
                order.layers[x]: self.tables.tmpcs[x][int(self.choice[x] - self.tables.option_start[x])].id
                for x in np.flatnonzero(self.chunk_of == k).tolist()
            }
            stages.append(stage_of(place, tmpc_ids, task.data_parallel_degree, task.tensor_parallel_degree))
        return Plan(tuple(stages))


class Candidates:
    """Keeps the best plan of a task for each of its choices. On one thread at a time, but for ``like``.

    passes: simulated so far, which is what its work is counted in.
    """

    def __init__(self, task: Task, program: ChunkProgram) -> None:
        self._task = task
        self._program = program
        self._models = [model_of(task, tables, program) for tables in task.choices]
        self._fastest_s = [
            layers.figures[layers.option_start[:-1], FIGURE.forward_s : FIGURE.weight_s + 1].sum(axis=1)
            for layers, *_ in self._models
        ]
        self._best: list[Candidate | None] = [None] * (len(task.choices) + 1)  # the last: of mixed choices
        self._random = np.random.default_rng(0)
        self._orders = task.tables.order.orders
        self._is_cut, self._moved = False, False
        self.passes = 0

    def copy(self) -> Candidates:
        """Returns a copy with plans, models and random numbers of its own."""
        found = copy.copy(self)
        found._best, found._models, found._random = [*self._best], [*self._models], copy.deepcopy(self._random)
        return found

    @property
    def best(self) -> Candidate | None:
        return min((x for x in self._best if x is not None), key=lambda x: x.value_s, default=None)

    def cut_evenly(self) -> None:
        """Plans of equal work, and of whole layers shared out to turns; once."""
        if self._is_cut:
            return
        self._is_cut = True
        shape, order = self._task.shape, self._orders[0]
        for index, fastest_s in enumerate(self._fastest_s):
            large = (fastest_s >= _SMALL * fastest_s.mean()).astype(np.float64)
            self._cut(index, order, np.ones(fastest_s.size), np.ones(shape.stages))
            few = len(set(self._task.choices[index].like)) <= _FEW_KINDS
            for wanted in _patterns(shape, int(large.sum())) if few else ():
                self._cut(index, order, large + 1e-6, wanted)
        self._cut_orders(self._orders[:_FIRST_ORDERS])
        self._cut_level()
        for index, found in enumerate(self._best[:-1]):
            if found is not None and not np.array_equal(found.choice, found.tables.option_start[:-1]):
                self._prefer_turns(index, found)

    def _prefer_turns(self, index: int, found: Candidate) -> None:
        """Where layers cannot all take their fastest TMPCs, lets all ranks save memory in the same turns: in those
        turns that make this plan the quickest. A turn takes as long as its slowest chunk."""
        model = best = self._models[index]
        v = self._task.shape.chunks
        for first, step in product(range(v), (1, -1) if v > 2 else (1,)):
            liking = 1.0 + _PREFERENCE * (1.0 - (step * (np.arange(v) - first) % v) / v)
            self._models[index] = model._replace(held=model.held * liking[self._program.turn_of])
            plan = self._plan_of(index, found.chunk_of)
            self._count(1)
            if plan is not None and plan.value_s < found.value_s:
                found, best = plan, self._models[index]
                self._take(index, plan)
        self._models[index] = best

    def like(self, layers_in: FloatArray, chunk_of: IndexArray) -> dict[int, Candidate]:
        """Plans made from a fractional one, by choice. They are not kept. layers_in: the number of layers in each
        chunk, of any kinds; chunk_of: the chunk of each layer, which may be earlier than the chunk of a layer that it
        reads."""
        order = self._orders[0]
        cut = np.empty(order.size, np.int64)
        cut[order] = np.repeat(np.arange(layers_in.size), np.diff(_cuts(np.ones(order.size), layers_in)))
        by_kind = _filled(self._ordered(chunk_of), layers_in.size)
        found = {}
        for index in range(len(self._models)):
            plans = [plan for way in (cut, by_kind) if (plan := self._plan_of(index, way)) is not None]
            if plans:
                found[index] = min(plans, key=lambda plan: plan.value_s)
        return found

    def chosen(self, search: PatternSearch) -> dict[int, Candidate]:
        """The quickest plan of a search of patterns, as in ``like``. Returns none where all layers or chunks choose
        recomputation together, or where layers read others behind them, because patterns do not cover these cases."""
        return self._of_options(None if search.chosen is None else search.patterns.plan(search.chosen))

    def whole(self, relaxation: Relaxation) -> dict[int, Candidate]:
        """A plan of whole layers, as in ``chosen``, where memory is so tight that no other plan is known."""
        if (plan := relaxation.whole_plan()) is None:
            return {}
        chunk_of = _filled(self._ordered(plan[0]), self._task.shape.stages)
        again = {index: self._plan_of(index, chunk_of) for index in range(len(self._models))}
        found = {index: one for index, one in again.items() if one is not None}
        return found or {index: one for index, one in self._of_options(plan).items() if self._fits(one)}

    def _fits(self, plan: Candidate) -> bool:
        """Whether each rank has the memory at each moment."""
        program, model = self._program, self._models[0]
        own = model.layers.figures[plan.choice]
        activation = np.bincount(plan.chunk_of, own[:, FIGURE.activation], program.rank_of.size)
        fixed = np.bincount(program.rank_of[plan.chunk_of], own[:, FIGURE.fixed], program.last.size)
        moments = zip(program.stage_of, pairwise(program.held_start), fixed, strict=True)
        held = [dot(program.held[first:end], activation[stages]).max() + more for stages, (first, end), more in moments]
        return bool(max(held) <= model.memory_bytes)

    def _of_options(self, plan: tuple[IndexArray, IndexArray] | None) -> dict[int, Candidate]:
        """plan: as in ``placed``."""
        tables = self._task.choices[0]
        if plan is None or len(self._models) > 1 or (self._ordered(plan[0]) != plan[0]).any():
            return {}
        chunk_of, choice = plan[0], plan[1] + tables.option_start[:-1]
        value_s = batch_seconds(self._models[0], chunk_of, choice, np.empty(self._program.kind.size + 1))
        return {0: Candidate(self._task, tables, chunk_of, choice, float(value_s))}

    def _ordered(self, chunk_of: IndexArray) -> IndexArray:
        return _in_order(chunk_of, self._task.tables.order.predecessors)

    def take(self, found: Mapping[int, Candidate]) -> None:
        """Keeps those that are the best of their choice."""
        for index, plan in found.items():
            self._take(index, plan)

    def _cut_level(self) -> None:
        """Plans whose chunks take about as long as each other, with what they send and receive. Each plan says how many
        layers of a rank cannot take their fastest TMPCs, and which edges join two chunks of a rank, in the next one."""
        rank_of, sync_s = self._program.rank_of, self._task.sync_s_per_byte / self._program.microbatches
        for (index, model), order in product(enumerate(self._models), self._orders[:_FIRST_ORDERS]):
            tables, start = self._task.choices[index], model.layers.option_start
            tail, head, *_ = tables.along_order
            option_s = model.layers.figures[:, FIGURE.forward_s : FIGURE.weight_s + 1].sum(axis=1)
            slower_s = np.maximum.reduceat(option_s, start[:-1]) - option_s[start[:-1]]
            layer_s = (option_s + sync_s * model.layers.figures[:, FIGURE.weights])[start[:-1]]
            for squarings in _SQUARINGS:
                share, free = np.zeros(self._task.shape.stages), np.zeros(tail.size, np.bool_)
                for _ in range(_ROUNDS):
                    along = layer_s[order], slower_s[order], tables.edges_along(order, free)
                    cuts = level_cuts(*along, share, rank_of, _MOST_PLACES, squarings)
                    found = self._cut_at(index, order, cuts) if cuts.size else None
                    if found is None:
                        break
                    before = share, free
                    own = self._shares(found, option_s[found.choice] - option_s[start[:-1]], slower_s)
                    share = own if not share.any() else 0.5 * (share + own)
                    first, last = found.chunk_of[tail], found.chunk_of[head]
                    free = (rank_of[first] == rank_of[last]) & (first < last)
                    if all(map(np.array_equal, before, (share, free))):
                        break

    def _shares(self, plan: Candidate, slower_s: FloatArray, most_s: FloatArray) -> FloatArray:
        """float64[s]: how much slower the layers of a chunk's rank are than they could be, as a share of the most."""
        rank = self._program.rank_of[plan.chunk_of]
        now_s, all_s = (np.bincount(rank, x, self._program.last.size) for x in (slower_s, most_s))
        found: FloatArray = (now_s / np.maximum(all_s, 1e-300))[self._program.rank_of]
        return found

    def _cut_orders(self, orders: Sequence[IndexArray]) -> None:
        """Plans of equal work."""
        for index, fastest_s in enumerate(self._fastest_s):
            for order in orders:
                self._cut(index, order, fastest_s, np.ones(self._task.shape.stages))

    def move(self, moves: int, control: FloatArray) -> None:
        """Makes moves for the best plan of each choice that has a plan, after trying more orders."""
        if moves > 0 and not self._moved:
            self._moved = True
            self._cut_orders(self._orders[_FIRST_ORDERS:])
        for index, found in enumerate(self._best[:-1]):
            if found is None:
                continue
            chunk_of, choice = found.chunk_of.copy(), found.choice.copy()
            value_s = anneal(
                self._models[index],
                chunk_of,
                choice,
                self._random.random((moves, DRAWS)),
                _HEAT,
                control,
            )
            self._count(moves)
            self._take(index, Candidate(found.task, found.tables, chunk_of, choice, float(value_s)))

    def descend(self, control: FloatArray) -> None:
        """Tries regular plans. Then moves single layers from any chunk to any other one as long as that helps, in the
        plans that are nearly the best: random moves seldom bring distant chunks to the right sizes."""
        for index in range(len(self._models)):
            for counts in _regular(self._task.shape.stages, self._orders[0].size):
                if control[1] != 0.0:
                    return
                self._cut_at(index, self._orders[0], np.concatenate([[0], np.cumsum(counts)]))
        best = self.best
        left = _DESCENT_PASSES // max(1, self._program.kind.size)
        for index, found in enumerate(self._best[:-1]):
            if best is not None and found is not None and found.value_s <= best.value_s * _NEARLY:
                after = self._descend(index, found, left, control)
                self._count(left - after)
                left = after

    def _descend(self, index: int, found: Candidate, left: int, control: FloatArray) -> int:
        """left: the number of simulations that are allowed. Returns how many are left afterwards."""
        model = self._models[index]
        end_s = np.empty(self._program.kind.size + 1)
        failed = 0  # moves in a row that did not help
        moves = list(permutations(range(self._task.shape.stages), 2))
        while failed < len(moves) and left > 0 and control[1] == 0.0:
            for a, b in moves:
                failed += 1
                if np.count_nonzero(found.chunk_of == a) >= 2:
                    chunk_of, choice = _shifted(found.chunk_of, a, b), found.choice.copy()
                    if fit_all(model, chunk_of, choice):
                        left -= 1
                        value_s = batch_seconds(model, chunk_of, choice, end_s)
                        if value_s < found.value_s * (1.0 - PROOF):
                            found = Candidate(found.task, found.tables, chunk_of, choice, float(value_s))
                            self._take(index, found)
                            failed = 0
                if failed == len(moves) or left <= 0 or control[1] != 0.0:
                    break
        return left

    def try_all(self, bounds: WalkBounds, most_steps: int, target_s: float, control: FloatArray) -> float:
        """Searches for the best of all plans that take less than ``target_s``. Returns the share of the plans that it
        looked at in these steps, as in ``PlanWalk``."""
        found = all_plans(self._task, self._program, bounds, most_steps, target_s, control)
        if found is None:
            return 0.0
        self.passes += _PASSES_OF_A_STEP * found.walk.steps
        if found.walk.value < target_s:
            mixed = self._task.mixed.tables
            self._take(-1, Candidate(self._task, mixed, found.chunk_of, found.choice, found.walk.value))
        return found.walk.share

    def _count(self, simulations: int) -> None:
        self.passes += simulations * self._program.kind.size

    def _take(self, index: int, found: Candidate) -> None:
        best = self._best[index]
        if best is None or found.value_s < best.value_s:
            self._best[index] = found

    def _cut(self, index: int, order: IndexArray, size: FloatArray, wanted: FloatArray) -> None:
        """Tries chunks that are runs of an order. The work of the runs, for layers of these sizes, is close to the
        wanted shares."""
        self._cut_at(index, order, _cuts(size[order], wanted))

    def _cut_at(self, index: int, order: IndexArray, cuts: IndexArray) -> Candidate | None:
        """Keeps a plan with these cuts of an order if it is the best one, and returns it; None if it does not fit."""
        chunk_of = np.empty(order.size, np.int64)
        chunk_of[order] = np.repeat(np.arange(self._task.shape.stages), np.diff(cuts))
        found = self._plan_of(index, chunk_of)
        self._count(1)
        if found is not None:
            self._take(index, found)
        return found

    def _plan_of(self, index: int, chunk_of: IndexArray) -> Candidate | None:
        """The plan with a choice; None if it does not fit."""
        task, model = self._task, self._models[index]
        choice = model.layers.option_start[:-1].copy()
        if not fit_all(model, chunk_of, choice):
            return None
        end_s = np.empty(self._program.kind.size + 1)
        value_s = batch_seconds(model, chunk_of, choice, end_s)
        return Candidate(task, task.choices[index], chunk_of, choice, float(value_s))


def model_of(task: Task, tables: DegreeTables, program: ChunkProgram) -> ChunkModel:
    """Plans of a task whose layers choose from one of its ``choices``, or from ``mixed``."""
    layers = tables.layers(task.data_parallel_degree)
    return ChunkModel(layers, program, task.sync_s_per_byte, task.memory_bytes, _mean_held(program))


class LeastPlan(NamedTuple):
    """The plan that a walk found to be the best."""

    walk: PlanWalk
    chunk_of: IndexArray
    choice: IndexArray


def all_plans(
    task: Task,
    program: ChunkProgram,
    bounds: WalkBounds,
    most_steps: int,
    target_s: float,
    control: FloatArray,
    *,
    memory_bytes: float | None = None,
    by_bytes: bool = False,
) -> LeastPlan | None:
    """``best_of_all`` of a task. None if its variants are too many. memory_bytes: instead of the task's own."""
    if task.mixed.variants is None:
        return None
    stages = task.shape.stages
    windows = task.tables.windows(stages)
    chunk_of, choice = np.empty(windows.shape[0], np.int64), np.empty(windows.shape[0], np.int64)
    model = model_of(task, task.mixed.tables, program)
    walk = best_of_all(
        model if memory_bytes is None else model._replace(memory_bytes=memory_bytes),
        Windows(windows[:, 0].copy(), windows[:, 1].copy(), task.mixed.variants),
        bounds,
        target_s,
        by_bytes,
        most_steps,
        control,
        chunk_of,
        choice,
    )
    return LeastPlan(walk, chunk_of, choice)


def walk_bounds(task: Task, program: ChunkProgram, relaxation: Relaxation | None = None) -> WalkBounds:
    """The bounds for a walk over all plans of a task, or over those that its relaxation is about. ``mixed`` says what
    layers may run."""
    figures, s = task.mixed.tables.figures(task.data_parallel_degree), task.shape.stages
    mean_bytes = figures[:, [FIGURE.fixed]] + np.outer(figures[:, FIGURE.activation], _mean_held(program))
    if relaxation is None:
        return WalkBounds(np.zeros((2, task.shape.ranks)), 0.0, np.zeros((len(figures), s)), mean_bytes)
    return WalkBounds(relaxation.waits_s, *relaxation.priced_s(figures), mean_bytes)


def _regular(stages: int, layers: int) -> Iterator[IndexArray]:
    """Yields numbers of layers for each chunk, int64[stages]: all chunks but the first and the last have the same
    number, and some chunks in a row get one more each of what is left. People write such plans by hand."""
    each = layers // stages
    for first, last in product((1, 0, -1), (1, 0, -1, -2)):
        counts = np.full(stages, each, np.int64)
        counts[0] += first
        counts[-1] += last
        left = layers - int(counts.sum())
        if not 0 <= left < stages or counts.min() < 1:
            continue
        for start in range(stages - left + 1 if left else 1):
            found = counts.copy()
            found[start : start + left] += 1
            yield found


def _shifted(chunk_of: IndexArray, a: int, b: int) -> IndexArray:
    """Hands a layer on from each chunk between a and b to the next, from a as far as b: each chunk gives its last
    layer, or its first one."""
    shifted, x = chunk_of.copy(), -1
    step = 1 if a < b else -1
    for chunk in range(a, b, step):
        members = np.flatnonzero(chunk_of == chunk)
        if members.size:  # else what it has been handed
            x = members[-1 if a < b else 0]
        shifted[x] += step
    return shifted


def _in_order(chunk_of: IndexArray, predecessors: Sequence[Sequence[int]]) -> IndexArray:
    """Moves layers so that none is in an earlier chunk than a layer that it reads."""
    found = chunk_of.copy()
    for x, tails in enumerate(predecessors):
        found[x] = max([found[x], *(found[tail] for tail in tails)])
    return found


def _filled(chunk_of: IndexArray, stages: int) -> IndexArray:
    """Fills empty chunks with layers handed on from the nearest chunk that has several."""
    found = chunk_of
    layers_in = np.bincount(found, minlength=stages)
    for k in np.flatnonzero(layers_in == 0).tolist():
        several = np.flatnonzero(np.bincount(found, minlength=stages) >= 2)
        found = _shifted(found, int(several[np.abs(several - k).argmin()]), k)
    return found


def _mean_held(program: ChunkProgram) -> FloatArray:
    """float64[s]: microbatches of each chunk in flight, averaged over the fullest moments of its rank."""
    found = np.empty(program.rank_of.size)
    for stages, (first, end) in zip(program.stage_of, pairwise(program.held_start), strict=True):
        found[stages] = program.held[first:end].mean(axis=0)
    return found


def _patterns(shape: PipelineShape, layers: int) -> Iterator[FloatArray]:
    """Yields how many layers each chunk should have, float64[stages], where all chunks of a turn should have the same
    number.

    A turn takes as long as its largest chunk. Where layers differ, some turns should have more of them than others.
    """
    p, v = shape.ranks, shape.chunks
    if v == 1:
        return
    for each in sorted({layers // p, -(-layers // p)}):
        if each >= v:
            ways = math.comb(each - 1, v - 1)
            if ways > _MOST_WAYS:
                continue
            borders = combinations(range(1, each), v - 1)
            for inner in islice(borders, 0, None, -(-ways // _MOST_PATTERNS)):
                yield np.repeat(np.diff((0, *inner, each)).astype(np.float64), p)


def _cuts(size: FloatArray, wanted: FloatArray) -> IndexArray:
    """int64[chunks + 1]: runs of layers of given sizes whose sums are close to the wanted shares; no run is empty."""
    ends = np.cumsum(size)
    middles = ends - size / 2.0
    targets = np.cumsum(wanted)[:-1] / wanted.sum() * ends[-1]
    return _apart([0, *np.searchsorted(middles, targets).tolist(), size.size])


def _apart(cuts: Sequence[int]) -> IndexArray:
    """Moves ascending cuts so that no run between two of them is empty."""
    found = np.array(cuts, np.int64)
    for k in range(1, found.size - 1):
        found[k] = max(found[k], found[k - 1] + 1)
    for k in range(found.size - 2, 0, -1):
        found[k] = min(found[k], found[k + 1] - 1)
    return found
