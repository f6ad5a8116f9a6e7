"""Transfers that no good plan does without: against those of random plans, and by hand."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import numpy as np
import pytest

from piper_ray.engine.chunks import rank_transfers
from piper_ray.engine.chunks.candidates import model_of
from piper_ray.engine.chunks.crossings import (
    ChunkTransfers,
    forced_transfers_s,
    further_beside_hub,
    least_of_ranks_s,
    mean_of_ranks_s,
    transfers_beside_hub,
    with_transfers,
)
from piper_ray.engine.chunks.relaxation import Relaxation
from piper_ray.engine.chunks.tasks import ChunkProblem, Task
from piper_ray.engine.kernels.chunk_bound import FIGURE
from piper_ray.engine.kernels.chunk_moves import batch_seconds
from piper_ray.engine.kernels.types import FloatArray, IndexArray
from piper_ray.engine.lattice.cells import FEW_READERS
from piper_ray.model.constraints import Restrictions, StageCount
from piper_ray.model.instance import Instance
from piper_ray.model.passes import with_passes
from piper_ray.model.schedule import Schedule, ScheduleName
from tests.instances import build, tmpc
from tests.lengths import long_after
from tests.unit.test_kernels_chunks import random_choice, random_chunks, some_tasks, tasks_with_hubs

SCHEDULES = [Schedule(ScheduleName.ZB_H1), Schedule(ScheduleName.INTERLEAVED, 2), Schedule(ScheduleName.ZB_V)]


def transfers_s(instance: Instance, task: Task, chunk_of: IndexArray, choice: IndexArray) -> float:
    """What all ranks send and receive of edges for a microbatch, there and back, over two."""
    order, tables = task.tables.order, task.tables
    program = task.shape.program()
    assert program is not None
    rank = program.rank_of[chunk_of]
    total = 0.0
    for edge in instance.edges:
        tail, head = order.position[edge.source], order.position[edge.target]
        if rank[tail] != rank[head]:
            sender = tables.tmpcs[tail][int(choice[tail] - tables.option_start[tail])]
            receiver = tables.tmpcs[head][int(choice[head] - tables.option_start[head])]
            total += 2 * edge.communication_bytes
            total += sender.backward_sync_bytes.get(edge.target, 0.0) + receiver.forward_sync_bytes.get(
                edge.source, 0.0
            )
    return total / instance.bandwidth_bytes_per_s


def _random_plans(task: Task, rng: Random) -> Iterator[tuple[IndexArray, IndexArray, float]]:
    """The chunk and the choice of each layer, and the time of a batch."""
    program = task.shape.program()
    assert program is not None
    for _ in range(20):
        chunk_of, choice = random_chunks(task, rng), random_choice(task, rng)
        end_s = np.empty(program.kind.size + 1)
        yield chunk_of, choice, batch_seconds(model_of(task, task.tables, program), chunk_of, choice, end_s)


@pytest.mark.long
def test_every_plan_that_is_better_than_the_target_makes_them() -> None:
    rng, forced, met = Random(5), 0, 0
    for instance, task in some_tasks(range(60), SCHEDULES):
        for chunk_of, choice, batch_s in _random_plans(task, rng):
            least_s = forced_transfers_s(task, batch_s)
            plans_s = transfers_s(instance, task, chunk_of, choice)
            assert least_s <= plans_s * (1 + 1e-9)
            forced += least_s > 0.0
            met += 0.0 < least_s >= plans_s * (1 - 1e-9)
    assert forced > 20
    assert met > 2


@pytest.mark.parametrize("few", [0, 1, FEW_READERS])
@pytest.mark.parametrize("seed", long_after(1, range(12)))
def test_ranks_of_every_plan_that_is_better_than_the_target_make_them(
    seed: int, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With prices of all readers, of those that are not alone, and of many."""
    monkeypatch.setattr(rank_transfers, "FEW_READERS", few)
    rng, found = Random(seed), 0
    for instance, task in _tasks_of_quick_links(rng, 10):
        for chunk_of, choice, batch_s in _random_plans(task, rng):
            least_s = least_of_ranks_s(task, batch_s)
            assert least_s <= transfers_s(instance, task, chunk_of, choice) * (1 + 1e-9)
            assert mean_of_ranks_s(task, batch_s) <= batch_s * (1 + 1e-9)
            found += least_s > 0.0
    assert found > 5


def _tasks_of_quick_links(rng: Random, count: int) -> Iterator[tuple[Instance, Task]]:
    """Where plans with some work on each rank are the best ones."""
    for _ in range(count):
        n = rng.randint(4, 8)
        edges = {(u, v): rng.randint(0, 8) for u in range(n) for v in range(u + 1, n) if rng.random() < 0.4}
        layers = {v: {1: [tmpc(rng.randint(0, 9))]} for v in range(n)}
        instance = with_passes(build(layers, edges, devices=3, microbatches=6, bandwidth_bytes_per_s=16.0))
        tasks = ChunkProblem.of(instance, Restrictions(data_parallelism=False), [rng.choice(SCHEDULES)]).tasks(instance)
        yield from ((instance, task) for task in tasks if task.shape.ranks > 1)


@pytest.mark.parametrize(("room_s", "expected_s"), [(16.1, 0.0), (15.0, 1.5), (13.6, 1.5), (13.0, 4.5)])
def test_two_ranks_cut_a_diamond_where_that_costs_least(room_s: float, expected_s: float) -> None:
    """Four layers of 4 s. On one rank they take 16 s; with the last one apart, 13.5 s; two and two, 12.5 s each."""
    edges = {(0, 1): 8, (0, 2): 8, (1, 3): 1, (2, 3): 2}
    instance = build({v: {1: [tmpc(4)]} for v in range(4)}, edges, devices=2)
    (task,) = two_ranks(instance)
    found_s = least_of_ranks_s(task, room_s * task.shape.microbatches)
    assert found_s == pytest.approx(expected_s, rel=1e-6)


def test_layers_on_other_ranks_than_the_one_that_they_read_receive_from_it() -> None:
    """A chain of 12 layers, then one that two chains of 6 layers read. A rank has time for 9 layers of 1 s. So at
    least 4 readers are on another rank than the one that they read. Without prices of readers, all three ranks would
    have layers of the first chain."""
    first = {(v, v + 1): 0 for v in range(12)}
    second = {(v, v + 1): 0 for v in range(13, 24) if v != 18} | {(12, v): 8 for v in range(13, 25)}
    instance = build({v: {1: [tmpc(1)]} for v in range(25)}, first | second, devices=3, bandwidth_bytes_per_s=64.0)
    instance = with_passes(instance)
    restrictions = Restrictions(data_parallelism=False)
    (task,) = (
        task
        for task in ChunkProblem.of(instance, restrictions, [Schedule(ScheduleName.ZB_H1)]).tasks(instance)
        if task.shape.ranks == 3
    )
    assert least_of_ranks_s(task, 9.0 * task.shape.microbatches) >= 4 * 8 / 64.0


def test_without_a_target_nothing_is_forced() -> None:
    assert {forced_transfers_s(task, np.inf) for _, task in some_tasks(range(5))} == {0.0}


def test_none_is_good_enough_where_a_layer_alone_takes_longer() -> None:
    found = 0
    for _, task in some_tasks(range(20)):
        if any(task.tables.edge_seconds):
            found += forced_transfers_s(task, 1e-12) == np.inf
    assert found > 5


@pytest.mark.parametrize(("room_s", "expected_s"), [(8.0, 0.0), (7.9, 0.5), (4.5, 0.5), (4.4, np.inf)])
def test_a_tower_is_cut_where_that_costs_least(room_s: float, expected_s: float) -> None:
    """Four layers of 2 s; the edge in the middle takes 0.25 s at either end, in either direction, the others 2 s."""
    instance = build({v: {1: [tmpc(2)]} for v in range(4)}, {(0, 1): 8, (1, 2): 1, (2, 3): 8}, devices=2)
    (task,) = two_ranks(instance)
    assert forced_transfers_s(task, room_s * task.shape.microbatches) == expected_s


def test_the_hubs_edges_are_left_out() -> None:
    instance = build({v: {1: [tmpc(2)]} for v in range(4)}, {(0, 1): 8, (0, 2): 8, (0, 3): 8}, devices=2)
    (task,) = two_ranks(instance)
    assert task.tables.order.hub == 0
    assert forced_transfers_s(task, 2.1 * task.shape.microbatches) == 0.0


def chunks_transfers_s(task: Task, chunk_of: IndexArray) -> FloatArray:
    """float64[2, s]: the least that each chunk of a plan sends, and receives, in either direction, without the hub's
    edges."""
    order, program = task.tables.order, task.shape.program()
    assert program is not None
    found = np.zeros((2, program.rank_of.size))
    for edge in task.tables.edge_seconds:
        ends = chunk_of[[edge.tail, edge.head]]
        if order.layers[edge.tail] != order.hub and program.rank_of[ends[0]] != program.rank_of[ends[1]]:
            found[0, ends[0]] += edge.sent_s
            found[1, ends[1]] += edge.received_s
    return found


@pytest.mark.parametrize("schedule", [*SCHEDULES, Schedule(ScheduleName.LOOPED_BFS, 3)], ids=str)
def test_no_plan_transfers_less_beside_its_hub(schedule: Schedule, few: bool) -> None:
    rng, some, met, further = Random(7), 0, 0, 0
    for _, task in tasks_with_hubs(range(12 if few else 20), [schedule]):
        program, tables = task.shape.program(), task.tables
        if program is None:
            continue
        kinds, members = tables.kinds(task.data_parallel_degree, task.shape.stages, merged=True)
        crossing_s = tables.crossing_s(program.rank_of)
        for _ in range(10):
            chunk_of = random_chunks(task, rng)
            plans_s = chunks_transfers_s(task, chunk_of)
            assert tables.order.hub is not None
            hub = int(chunk_of[tables.order.position[tables.order.hub]])
            for least_s, first, last in transfers_beside_hub(task, hub, crossing_s.sum(axis=0)):
                window = slice(first, last + 1)
                beyond_s = float((plans_s.sum(axis=0) - crossing_s.sum(axis=0))[window].sum())
                assert 0.0 < least_s <= beyond_s * (1 + 1e-9)
                some += 1
                met += least_s >= beyond_s * (1 - 1e-9)
            further_s = further_beside_hub(task, program.rank_of, kinds, members, hub)
            options = np.array([kinds.option_start[n] for n, _ in enumerate(members)])
            for chunk in range(task.shape.stages):
                inside = options[[bool((chunk_of[positions] == chunk).any()) for positions in members]]
                at_borders = further_s[:, chunk, inside].min(axis=1)
                at_borders[np.isinf(at_borders)] = 0.0
                assert (at_borders <= (plans_s - crossing_s)[:, chunk] + 1e-9).all()
                further += at_borders.max() > 0.0
    assert min(some, met, further) > 10


def test_an_encoder_passes_through_all_chunks_but_one_in_front_of_the_hub() -> None:
    """Six layers and the hub in the first seven of eight chunks; the decoder's embedding may be alone in one of them.
    Each edge of the encoder takes 0.25 s at either end, in either direction."""
    rows = {v: {1: [tmpc(8)]} for v in range(11)} | {7: {1: [tmpc(1)]}}
    edges = {(v, v + 1): 1.0 for v in range(10) if v != 6} | {(6, v): 1.0 for v in range(8, 11)}
    passed = with_passes(build(rows, edges, devices=4, microbatches=4))
    restrictions = Restrictions(data_parallelism=False, constraints=[StageCount(4)])
    (task,) = ChunkProblem.of(passed, restrictions, [Schedule(ScheduleName.INTERLEAVED, 2)]).tasks(passed)
    assert [*transfers_beside_hub(task, 6, np.zeros(8))] == [(5 * 0.5, 0, 6)]


def test_what_stands_for_transfers_is_replaced_and_has_no_units() -> None:
    _, task = next(tasks_with_hubs(range(1), SCHEDULES))
    kinds, _ = task.tables.kinds(task.data_parallel_degree, task.shape.stages, merged=True)
    kinds = kinds._replace(units=kinds.units + 1.0)
    found = with_transfers(
        with_transfers(kinds, [ChunkTransfers(2.0, 0, 1)]), [ChunkTransfers(3.0, 1, 2), ChunkTransfers(4.0, 0, 2)]
    )
    own = kinds.layers.size
    assert found.counted.tolist() == [1] * own + [0, 0]
    assert found.units.tolist() == [*kinds.units, 0.0, 0.0]
    assert found.figures[-2:, FIGURE.input_s].tolist() == [3.0, 4.0]
    assert (found.first_chunk[own:].tolist(), found.last_chunk[own:].tolist()) == ([1, 0], [2, 2])
    again = with_transfers(found, [])
    assert all((one == other).all() for one, other in zip(again, kinds, strict=True))


def test_transfers_take_no_whole_units() -> None:
    """Two towers of 8 s, in pieces of at most 9.9 s with what these send and receive. Transfers take longer than a
    layer, but may be shared out over ranks."""
    edges = {(v, v + 1): 4.0 for v in range(7) if v != 3} | {(3, 8): 4.0, (7, 8): 4.0}
    passed = with_passes(build({v: {1: [tmpc(2)]} for v in range(9)}, edges, devices=3))
    restrictions = Restrictions(data_parallelism=False, constraints=[StageCount(3)])
    (task,) = ChunkProblem.of(passed, restrictions, [Schedule(ScheduleName.ZB_H1)]).tasks(passed)
    program = task.shape.program()
    assert program is not None
    relaxation = Relaxation.of(task, program, 9.9 * task.shape.microbatches)
    assert relaxation is not None
    transfers = relaxation.exact_kinds.counted == 0
    assert relaxation.exact_kinds.figures[-1, : FIGURE.weight_s].sum() > 2.0
    assert (transfers.sum(), relaxation.exact_kinds.units[-1]) == (1, 0.0)


def two_ranks(instance: Instance) -> list[Task]:
    passed = with_passes(instance)
    restrictions = Restrictions(data_parallelism=False, constraints=[StageCount(2)])
    return ChunkProblem.of(passed, restrictions, [Schedule(ScheduleName.ZB_H1)]).tasks(passed)
