"""Quick plans of a shape, against all that share whole layers out to turns."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from piper_ray.engine.chunks.candidates import Candidate, Candidates, model_of
from piper_ray.engine.chunks.tasks import ChunkProblem
from piper_ray.engine.kernels.chunk_moves import batch_seconds
from piper_ray.model.constraints import Restrictions, StageCount
from piper_ray.model.instance import Instance
from piper_ray.model.passes import with_passes
from piper_ray.model.schedule import Schedule, ScheduleName
from tests.instances import RECOMPUTE, build, tmpc


def on_ranks(ranks: int) -> Restrictions:
    return Restrictions(data_parallelism=False, constraints=[StageCount(ranks)])


@pytest.mark.parametrize(
    "schedule",
    [Schedule(ScheduleName.INTERLEAVED, 3), Schedule(ScheduleName.LOOPED_BFS, 2), Schedule(ScheduleName.ZB_V)],
    ids=str,
)
@pytest.mark.parametrize("light_s", [1, 3, 6])
def test_no_plan_whose_turns_take_whole_layers_is_better_than_the_quick_one(schedule: Schedule, light_s: int) -> None:
    """An encoder's eight layers, then a decoder's eight lighter ones."""
    tmpcs = {v: {1: [tmpc(6 if v < 8 else light_s)]} for v in range(16)}
    instance = with_passes(build(tmpcs, {(v, v + 1): 1 for v in range(15)}, devices=4, microbatches=8))
    (task,) = ChunkProblem.of(instance, on_ranks(4), [schedule]).tasks(instance)
    program = task.shape.program()
    assert program is not None
    candidates = Candidates(task, program)
    candidates.cut_evenly()
    assert candidates.best is not None
    layers = task.tables.layers(1)
    end_s = np.empty(program.kind.size + 1)
    found = []
    for turns in product(range(1, 5), repeat=schedule.v):
        if sum(turns) == 4:
            chunk_of = np.repeat(np.arange(task.shape.stages), np.repeat(turns, 4))
            choice = layers.option_start[:-1].copy()
            found.append(batch_seconds(model_of(task, task.tables, program), chunk_of, choice, end_s))
    assert candidates.best.value_s <= min(found) * (1 + 1e-12)
    assert len(set(found)) > 1


def test_branches_are_shared_out_by_moves_that_no_order_of_layers_allows() -> None:
    """A tower of four heavy layers parallel to one of eight light ones: halves of equal work take two heavy and four
    light ones each, or all light ones with one heavy one, as edges cost.
    """
    tmpcs = {v: {1: [tmpc(6 if v < 4 else 3)]} for v in range(12)}
    edges = {(v, v + 1): 1 for v in (0, 1, 2, *range(4, 11))}
    instance = with_passes(build(tmpcs, edges, devices=2, microbatches=8))
    (task,) = ChunkProblem.of(instance, on_ranks(2), [Schedule(ScheduleName.ZB_H1)]).tasks(instance)
    program = task.shape.program()
    assert program is not None
    candidates = Candidates(task, program)
    candidates.cut_evenly()
    candidates.move(3_000, np.array([np.inf, 0.0]))
    assert candidates.best is not None
    layers, order = task.tables.layers(1), task.tables.order
    found = []
    for heavy, light in product(range(5), range(9)):
        if 0 < heavy + light < 12:
            first = {*range(heavy), *range(4, 4 + light)}
            chunk_of = np.array([0 if layer in first else 1 for layer in order.layers], np.int64)
            end_s = np.empty(program.kind.size + 1)
            seconds = batch_seconds(
                model_of(task, task.tables, program), chunk_of, layers.option_start[:-1].copy(), end_s
            )
            found.append(seconds)
    assert candidates.best.value_s == pytest.approx(min(found), rel=1e-12)


def quick_plan(instance: Instance, ranks: int, schedule: Schedule) -> Candidate:
    """Before any move."""
    instance = with_passes(instance)
    (task,) = ChunkProblem.of(instance, on_ranks(ranks), [schedule]).tasks(instance)
    program = task.shape.program()
    assert program is not None
    candidates = Candidates(task, program)
    candidates.cut_evenly()
    assert candidates.best is not None
    return candidates.best


def test_a_quick_plan_is_cut_at_cheap_edges_of_uneven_chunks_also_where_layers_have_one_order() -> None:
    """Equal work would cut 120 layers into halves, through an edge that takes as long as ten of them."""
    tmpcs = {v: {1: [tmpc(1 + v / 1_000)]} for v in range(120)}
    instance = build(tmpcs, {(v, v + 1): 0.1 if v == 64 else 40 for v in range(119)}, devices=2, microbatches=8)
    plan = quick_plan(instance, 2, Schedule(ScheduleName.ZB_H1))
    assert np.bincount(plan.chunk_of).tolist() == [65, 55]


def test_ranks_that_compute_layers_again_get_fewer_of_them_in_a_quick_plan() -> None:
    """The first rank holds two microbatches, the second one one of them."""
    tmpcs = {v: {1: [tmpc(3 + v / 1_000, activation=1), tmpc(6, name=RECOMPUTE)]} for v in range(100)}
    instance = build(tmpcs, {(v, v + 1): 0.1 for v in range(99)}, devices=2, microbatches=8, memory_bytes=60)
    plan = quick_plan(instance, 2, Schedule(ScheduleName.INTERLEAVED, 1))
    first, second = np.bincount(plan.chunk_of).tolist()
    assert first < 45 < 55 < second


def test_a_quick_plan_knows_that_edges_between_chunks_of_one_rank_cost_nothing() -> None:
    """As skips of a U-net do if the middle of the V is its own. Else the outer chunks would seem long."""
    tmpcs = {v: {1: [tmpc(1 + v / 1_000)]} for v in range(120)}
    cheap = {19, 32, 59, 86, 99}
    edges = {(v, v + 1): 0.1 if v in cheap else 40.0 for v in range(119)}
    edges |= {(v, 119 - v): 2.0 for v in range(33)}
    plan = quick_plan(build(tmpcs, edges, devices=2, microbatches=8), 2, Schedule(ScheduleName.ZB_V))
    assert np.bincount(plan.chunk_of).tolist() == [33, 27, 27, 33]
