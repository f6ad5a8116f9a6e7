"""Each kernel of the search for plans with chunks against a slow twin."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product
from operator import itemgetter
from random import Random

import numpy as np
import pytest

import piper_ray
from piper_ray.engine.chunks.candidates import all_plans, model_of, walk_bounds
from piper_ray.engine.chunks.crossings import TowerPieces, rank_seconds
from piper_ray.engine.chunks.layer_counts import LayerCounts
from piper_ray.engine.chunks.rank_cover import RankCover, waits_s
from piper_ray.engine.chunks.relaxation import Case, Relaxation
from piper_ray.engine.chunks.tasks import ChunkProblem, PipelineShape, Task
from piper_ray.engine.kernels.chunk_bound import FIGURE, NO_LIMIT, Paths, Prices, least_priced_s, moments, window
from piper_ray.engine.kernels.chunk_cover import (
    ChunkContents,
    PatternTimes,
    RankRoom,
    add_times,
    fitting_patterns,
    most_of_main,
    times_on_paths,
    undominated_rows,
)
from piper_ray.engine.kernels.chunk_moves import DRAWS, anneal, batch_seconds, fit_all
from piper_ray.engine.kernels.chunk_program import PASSES, ChunkProgram, longest_paths, simulate_chunks
from piper_ray.engine.kernels.chunk_stages import ChunkModel, chunk_figures, fit_rank, peak_bytes, sync_of_ranks
from piper_ray.engine.kernels.types import IndexArray
from piper_ray.model.constraints import Restrictions
from piper_ray.model.instance import Instance
from piper_ray.model.plan import Plan, Stage
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.simulate.actions import ActionKind, flush_lists
from tests.chunks_brute_force import rank_ends_s
from tests.instances import build, encoder_decoder, random_instance, tmpc

SCHEDULES = [
    Schedule(ScheduleName.INTERLEAVED, 2),
    Schedule(ScheduleName.INTERLEAVED, 3, group=4),
    Schedule(ScheduleName.LOOPED_BFS, 2),
    Schedule(ScheduleName.ZB_H1),
    Schedule(ScheduleName.ZB_V),
    Schedule(ScheduleName.DUALPIPE_V),
]


def shapes() -> Iterator[PipelineShape]:
    for schedule in SCHEDULES:
        for p in (1, 2, 3, 4):
            for m in (1, 3, 4, 8, 9):
                shape = PipelineShape(schedule, p, m)
                if shape.runs:
                    yield shape


def test_vectors_in_flight_are_the_undominated_ones_of_all_moments() -> None:
    for shape in shapes():
        program, lists = shape.program(), flush_lists(shape.schedule, shape.ranks, shape.microbatches)
        assert program is not None
        for actions, (first, end) in zip(lists, pairwise(program.held_start.tolist()), strict=True):
            now, held = [0] * shape.chunks, set[tuple[int, ...]]()
            for kind, chunk, _ in actions.tolist():
                now[chunk] += kind == ActionKind.F
                held.add(tuple(now))
                now[chunk] -= kind in (ActionKind.B, ActionKind.W)
            most = {x for x in held if not any(x != y and all(map(int.__le__, x, y)) for y in held)}
            assert sorted(most) == sorted(map(tuple, program.held[first:end].tolist()))


def test_a_pass_takes_as_many_bytes_as_the_limit_of_kept_programs_supposes() -> None:
    program = PipelineShape(Schedule(ScheduleName.ZB_V), 2, 4).program()
    assert program is not None
    of_passes = (program.kind, program.stage, program.before, program.awaited)
    assert sum(array.nbytes for array in of_passes) == 16 * program.kind.size


def test_a_batch_takes_what_its_lists_take_and_the_critical_path_has_that_length() -> None:
    rng = np.random.default_rng(0)
    for shape in shapes():
        program, lists = shape.program(), flush_lists(shape.schedule, shape.ranks, shape.microbatches)
        assert program is not None
        for _ in range(3):
            seconds = rng.integers(0, 4, (shape.stages, PASSES)) * rng.choice([1.0, 0.3], (shape.stages, PASSES))
            sync_s = rng.choice([0.0, 2.5], shape.ranks)
            end_s = np.empty(program.kind.size + 1)
            batch_s = simulate_chunks(program, seconds, sync_s, end_s)
            plain_s = rank_ends_s(shape.schedule, lists, [tuple(row) for row in seconds.tolist()])
            assert batch_s == pytest.approx((np.array(plain_s) + sync_s).max(), rel=1e-12)
            counts, rank = np.empty((2, shape.stages, PASSES)), np.empty(2, np.int64)
            assert longest_paths(program, seconds, sync_s, counts, rank) == batch_s
            for one, end in zip(counts, rank, strict=True):
                assert (one * seconds).sum() + sync_s[end] == pytest.approx(batch_s, rel=1e-12)


def test_ranks_hold_what_a_walk_along_their_lists_finds() -> None:
    rng = np.random.default_rng(1)
    for shape in shapes():
        program = shape.program()
        assert program is not None
        lists = flush_lists(shape.schedule, shape.ranks, shape.microbatches)
        held, moment_rank = moments(program, 1_000)
        for r in range(shape.ranks):
            activation = rng.integers(0, 5, shape.chunks).astype(np.float64)
            now, most = 0.0, 0.0
            for kind, chunk, _ in lists[r].tolist():
                change = {ActionKind.F: 1, ActionKind.I: 0}.get(ActionKind(kind), -1)
                now += change * activation[chunk]
                most = max(most, now)
            assert peak_bytes(program, r, activation, 7.0) == most + 7.0
            of_stage = np.zeros(shape.stages)
            of_stage[program.stage_of[r]] = activation
            assert (held[moment_rank == r] @ of_stage).max() == most


def some_tasks(seeds: range, schedules: list[Schedule] = SCHEDULES) -> Iterator[tuple[Instance, Task]]:
    for seed in seeds:
        instance = piper_ray.with_passes(random_instance(seed, most_layers=7, most_tmpcs=3, most_devices=8))
        tasks = ChunkProblem.of(instance, Restrictions(), schedules).tasks(instance)
        yield from ((instance, task) for task in Random(seed).sample(tasks, min(3, len(tasks))))


def tasks_with_hubs(
    seeds: range, schedules: list[Schedule], *, small_first: bool = False
) -> Iterator[tuple[Instance, Task]]:
    """Of encoders and decoders, on several ranks. small_first: as in ``encoder_decoder``."""
    for seed in seeds:
        made = encoder_decoder(seed, 3 + seed % 4, 3 + seed % 3, embedding=seed % 5 > 0, small_first=small_first)
        instance = piper_ray.with_passes(made)
        tasks = [
            task
            for task in ChunkProblem.of(instance, Restrictions(), schedules).tasks(instance)
            if task.shape.ranks > 1
        ]
        yield from ((instance, task) for task in Random(seed).sample(tasks, min(3, len(tasks))))


def random_chunks(task: Task, rng: Random) -> IndexArray:
    """Runs of one of the orders: of each layer the chunk."""
    order = task.tables.order
    inner = sorted(rng.sample(range(1, order.size), task.shape.stages - 1))
    layers, found = rng.choice(order.orders), np.empty(order.size, np.int64)
    for k, (first, end) in enumerate(pairwise([0, *inner, order.size])):
        found[layers[first:end]] = k
    return found


def random_choice(task: Task, rng: Random) -> IndexArray:
    start = task.tables.option_start.tolist()
    return np.array([rng.randrange(first, end) for first, end in pairwise(start)], np.int64)


def plan_of(task: Task, chunk_of: IndexArray, choice: IndexArray) -> Plan:
    tables, order = task.tables, task.tables.order
    stages = []
    for k in range(task.shape.stages):
        mine = np.flatnonzero(chunk_of == k).tolist()
        taken = {order.layers[x]: tables.tmpcs[x][int(choice[x] - tables.option_start[x])] for x in mine}
        chosen = {layer: tmpc.id for layer, tmpc in taken.items()}
        stages.append(Stage(tuple(chosen), task.data_parallel_degree, task.tensor_parallel_degree, chosen))
    return Plan(tuple(stages))


def test_a_plan_takes_and_holds_what_its_simulation_does() -> None:
    rng = Random(2)
    for instance, task in some_tasks(range(40)):
        program = task.shape.program()
        assert program is not None
        chunk_of, choice = random_chunks(task, rng), random_choice(task, rng)
        layers = task.tables.layers(task.data_parallel_degree)
        end_s = np.empty(program.kind.size + 1)
        batch_s = batch_seconds(model_of(task, task.tables, program), chunk_of, choice, end_s)
        simulation = piper_ray.simulate(instance, plan_of(task, chunk_of, choice), task.shape.schedule)
        assert batch_s == pytest.approx(simulation.step_s, rel=1e-12, abs=1e-12)
        figures = chunk_figures(layers, program.rank_of, chunk_of, choice)
        for r, rank in enumerate(simulation.ranks):
            mine = figures[program.stage_of[r]]
            peak = peak_bytes(program, r, mine[:, FIGURE.activation].copy(), float(mine[:, FIGURE.fixed].sum()))
            assert peak == pytest.approx(rank.peak_memory_bytes, rel=1e-12, abs=1e-12)


def test_quick_choices_fit_and_are_refused_only_where_none_does() -> None:
    """On ranks of one chunk, where memory is a sum over layers."""
    rng, refused, taken = Random(3), 0, 0
    for instance, task in some_tasks(range(30), [Schedule(ScheduleName.ZB_H1)]):
        task = replace(task, memory_bytes=instance.memory_bytes * rng.choice([0.2, 0.5, 1.0]))
        program = task.shape.program()
        assert program is not None
        chunk_of, choice = random_chunks(task, rng), random_choice(task, rng)
        start = task.tables.option_start.tolist()
        most_held = [program.held[first:end].max() for first, end in pairwise(program.held_start.tolist())]
        model = model_of(task, task.tables, program)._replace(held=np.array(most_held, float))
        for rank in range(task.shape.ranks):
            if fit_rank(model, rank, chunk_of, choice):
                taken += 1
                assert rank_peak(task, program, rank, chunk_of, choice) <= task.memory_bytes
                for x, o in quicker_options(task, np.flatnonzero(chunk_of == rank).tolist(), choice):
                    other = choice.copy()
                    other[x] = o
                    assert rank_peak(task, program, rank, chunk_of, other) > task.memory_bytes
                continue
            refused += 1
            mine = np.flatnonzero(chunk_of == rank).tolist()
            for options in product(*(range(start[x], start[x + 1]) for x in mine)):
                choice[mine] = options
                assert rank_peak(task, program, rank, chunk_of, choice) > task.memory_bytes
    assert min(refused, taken) > 5


def test_quick_choices_are_those_of_single_steps_in_turn() -> None:
    rng, stepped, refused = Random(6), 0, 0
    for instance, task in (*some_tasks(range(40)), *tasks_with_hubs(range(20), SCHEDULES), *tight_tasks(range(6))):
        task = replace(task, memory_bytes=instance.memory_bytes * rng.choice([0.1, 0.2, 0.4, 0.7]))
        program = task.shape.program()
        assert program is not None
        chunk_of, choice = random_chunks(task, rng), random_choice(task, rng)
        model = model_of(task, task.tables, program)
        for rank in range(task.shape.ranks):
            wanted, fits = steps_in_turn(task, model, rank, chunk_of, choice)
            assert fit_rank(model, rank, chunk_of, choice) == fits
            if fits:
                assert choice.tolist() == wanted.tolist()
                stepped += bool((wanted != task.tables.option_start[:-1])[program.rank_of[chunk_of] == rank].any())
            refused += not fits
    assert min(stepped, refused) > 20


def tight_tasks(seeds: range) -> Iterator[tuple[Instance, Task]]:
    """Chains whose layers save much or little memory for their time, so that some steps turn out not to be needed."""
    for seed in seeds:
        rng = Random(seed)
        layers = {}
        for v in range(16):
            time_s, activation = rng.randint(5, 20), rng.randint(20, 60)
            saving = [tmpc(time_s + rng.randint(1, 9), activation=rng.randint(1, 19), name=name) for name in "ab"]
            layers[v] = {1: [tmpc(time_s, activation=activation), *saving]}
        edges = {(v, v + 1): 1 for v in range(15)}
        instance = piper_ray.with_passes(build(layers, edges, devices=2, microbatches=4, memory_bytes=1000.0))
        tasks = ChunkProblem.of(instance, Restrictions(data_parallelism=False), SCHEDULES).tasks(instance)
        yield from ((instance, task) for task in tasks if task.shape.ranks > 1)


def steps_in_turn(
    task: Task, model: ChunkModel, rank: int, chunk_of: IndexArray, choice: IndexArray
) -> tuple[IndexArray, bool]:
    """What ``fit_rank`` says, by a look at all steps of all layers for each step."""
    program, figures, start = model.program, model.layers.figures, task.tables.option_start.tolist()
    seconds = [float(row[0] + row[1] + row[2]) for row in figures]
    mine, found, taken = np.flatnonzero(program.rank_of[chunk_of] == rank).tolist(), choice.copy(), list[int]()
    found[mine] = task.tables.option_start[mine]

    def fits() -> bool:
        return rank_peak(task, program, rank, chunk_of, found) <= model.memory_bytes * (1.0 + 1e-12)

    def steps() -> Iterator[tuple[float, int, int]]:
        for x in mine:
            now, held = int(found[x]), float(model.held[chunk_of[x]])
            for o in range(start[x], start[x + 1]):
                saved = held * float(figures[now, FIGURE.activation] - figures[o, FIGURE.activation])
                saved += float(figures[now, FIGURE.fixed] - figures[o, FIGURE.fixed])
                extra_s = seconds[o] - seconds[now]
                if saved > 0.0:
                    yield -(saved / extra_s if extra_s > 0.0 else np.inf), x, o

    while not fits():
        best = min(steps(), default=None)
        if best is None:
            return found, False
        _, x, found[best[1]] = best
        taken.append(x)
    for x in reversed(taken):
        best_o = int(found[x])
        for o in range(start[x], start[x + 1]):
            before = int(found[x])
            found[x] = o
            if seconds[o] >= seconds[best_o] or not fits():
                found[x] = before
            else:
                best_o = o
    return found, True


def quicker_options(task: Task, layers: list[int], choice: IndexArray) -> Iterator[tuple[int, int]]:
    """Of single layers: what takes less than their choice."""
    start = task.tables.option_start.tolist()
    seconds = task.tables.figures(task.data_parallel_degree)[:, FIGURE.forward_s : FIGURE.weight_s + 1].sum(axis=1)
    for x in layers:
        yield from ((x, o) for o in range(start[x], start[x + 1]) if seconds[o] < seconds[choice[x]])


def rank_peak(task: Task, program: ChunkProgram, rank: int, chunk_of: IndexArray, choice: IndexArray) -> float:
    figures = task.tables.figures(task.data_parallel_degree)
    mine = [figures[choice[chunk_of == k]].sum(axis=0) for k in program.stage_of[rank]]
    activation = np.array([x[FIGURE.activation] for x in mine])
    return peak_bytes(program, rank, activation, float(sum(x[FIGURE.fixed] for x in mine)))


def relaxations(seeds: range) -> Iterator[tuple[Instance, Task, Relaxation]]:
    for instance, task in some_tasks(seeds):
        program = task.shape.program()
        assert program is not None
        relaxation = Relaxation.of(task, program, np.inf)
        if relaxation is not None:
            yield instance, task, relaxation


def random_prices(relaxation: Relaxation, rng: np.random.Generator) -> Prices:
    limits = relaxation.limits
    path = rng.random(len(relaxation.rank))
    memory = rng.random(limits.moment_rank.size) * rng.choice([0.0, 1.0], limits.moment_rank.size)
    units = rng.random(limits.most_units.size) * (limits.most_units < NO_LIMIT)
    filled = rng.random(limits.rank_of.size)
    return Prices(path / path.sum(), memory, units, filled, np.zeros((0, limits.rank_of.size)))


@pytest.mark.long
def test_no_plan_that_is_better_than_the_target_takes_less_than_its_least_priced_sum() -> None:
    random, rng, above = np.random.default_rng(4), Random(4), 0
    for _, task, relaxation in relaxations(range(30)):
        plans = []
        for _ in range(30):
            chunk_of, choice = random_chunks(task, rng), random_choice(task, rng)
            end_s = np.empty(relaxation.program.kind.size + 1)
            if all(
                rank_peak(task, relaxation.program, r, chunk_of, choice) <= task.memory_bytes
                for r in range(task.shape.ranks)
            ):
                plans.append(batch_seconds(model_of(task, task.tables, relaxation.program), chunk_of, choice, end_s))
        if not plans:
            continue
        target_s = min(plans) * 1.01 + 1e-6
        known = Relaxation.of(task, relaxation.program, target_s)
        assert known is not None
        relaxation = known
        for _ in range(5):
            prices = random_prices(relaxation, random)
            bound_s, _ = least_priced_s(relaxation.exact_kinds, relaxation.limits, relaxation.paths, prices)
            assert bound_s <= min(plans) * (1 + 1e-9) + 1e-9
            above += bound_s > 0.0
        relaxation.improve(40)
        assert relaxation.lower_s <= min(plans) * (1 + 1e-9) + 1e-9
    assert above > 10


def test_the_least_priced_sum_is_the_cheapest_place_and_option_of_each_layer() -> None:
    random = np.random.default_rng(5)
    for _, task, relaxation in relaxations(range(20)):
        relaxation.aim(task.lower_s * 1.5 + 1.0)
        kinds, limits, prices = relaxation.exact_kinds, relaxation.limits, random_prices(relaxation, random)
        if random.random() < 0.5:
            prices = prices._replace(layers=random.normal(size=(kinds.layers.size, task.shape.stages)))
        counts, rank = relaxation.paths
        passes = np.tensordot(prices.path, counts, 1)
        sync = np.bincount(rank, prices.path, task.shape.ranks) * task.sync_s_per_byte
        fixed = np.bincount(limits.moment_rank, prices.memory, task.shape.ranks)
        activation = prices.memory @ limits.held
        wanted = np.inf
        hubs = relaxation.hub_chunks() or [-1]
        for hub in hubs:
            total = prices.filled.sum()
            total -= limits.memory_bytes * prices.memory.sum()
            total -= (prices.units * np.where(prices.units > 0.0, limits.most_units, 0.0)).sum()
            total += ((passes[:, 0] + passes[:, 1]) * limits.crossing_s).sum()
            for kind, layers in enumerate(kinds.layers.tolist()):
                first, last = window(kinds, kind, hub)
                cheapest = np.inf
                for k in range(first, last + 1):
                    r = limits.rank_of[k]
                    for o in range(kinds.option_start[kind], kinds.option_start[kind + 1]):
                        f, i, w, weights, a, b, from_hub, to_hub = kinds.figures[o].tolist()
                        cost = passes[k] @ np.array([f, i, w]) + sync[r] * weights + activation[k] * a + fixed[r] * b
                        cost += prices.units[r] * kinds.units[o] - prices.filled[k] * kinds.counted[kind]
                        if hub >= 0 and limits.rank_of[hub] != r:
                            cost += passes[k, :2].sum() * from_hub + passes[hub, :2].sum() * to_hub
                        cost += prices.layers[kind, k] if prices.layers.size else 0.0
                        cheapest = min(cheapest, cost)
                total += layers * cheapest
            wanted = min(wanted, total)
        found, _ = least_priced_s(kinds, limits, Paths(counts, rank), prices)
        assert found == pytest.approx(wanted, rel=1e-9, abs=1e-9)


@pytest.mark.long
def test_the_prices_of_the_program_are_the_best_ones_and_its_shares_are_all_layers() -> None:
    random, raised = np.random.default_rng(7), 0
    for _, task, relaxation in relaxations(range(30)):
        if task.lower_s <= 0.0 or relaxation.hub_is_open:
            continue
        relaxation.aim(task.lower_s * random.choice([1.5, 3.0]) + 1.0)
        relaxation.improve(100)
        best_s = relaxation.lower_s
        for _ in range(20):
            prices = random_prices(relaxation, random)
            other_s, _ = least_priced_s(relaxation.kinds, relaxation.limits, relaxation.paths, prices)
            assert best_s >= min(other_s, relaxation.target_s) * (1 - 1e-6)
        raised += best_s > task.lower_s * (1 + 1e-6)
        if relaxation.layers_in is not None:
            beside = relaxation.kinds.layers.sum() - task.tables.order.size  # transfers count as a layer
            assert relaxation.layers_in.sum() - beside == pytest.approx(task.tables.order.size)
    assert raised > 5


@pytest.mark.long
def test_windows_hold_all_plans_and_of_chains_nothing_else() -> None:
    rng = Random(9)
    for _, task in some_tasks(range(60)):
        first, last = task.tables.windows(task.shape.stages).T
        before, behind = task.tables.order.before, task.tables.order.behind
        chunks = range(task.shape.stages)
        if (before + behind == task.tables.order.size - 1).all():
            every = [x for x in product(chunks, repeat=len(first)) if set(x) == {*chunks} and list(x) == sorted(x)]
            assert (np.min(every, axis=0) == first).all()
            assert (np.max(every, axis=0) == last).all()
        for _ in range(20):
            chunk_of = random_chunks(task, rng)
            assert (first <= chunk_of).all()
            assert (chunk_of <= last).all()


def is_in(case: Case, task: Task, relaxation: Relaxation, plan: tuple[IndexArray, IndexArray]) -> bool:
    """plan: of each layer its chunk and its option."""
    chunk_of, choice = plan
    seconds = rank_seconds(task.tables.figures(task.data_parallel_degree), task)[choice]
    rank_of = relaxation.program.rank_of[chunk_of]
    units = np.bincount(rank_of, np.floor(seconds / relaxation.unit.seconds), task.shape.ranks)
    hub = task.tables.order.hub
    return (
        (case.hub is None or hub is None or chunk_of[task.tables.order.position[hub]] == case.hub)
        and (case.least_units is None or bool((units >= case.least_units).all()))
        and (case.most_units is None or bool((units <= case.most_units).all()))
        and has_tower(case, task, relaxation, chunk_of)
    )


def has_tower(case: Case, task: Task, relaxation: Relaxation, chunk_of: IndexArray) -> bool:
    """Whether the dearest tower is in as many pieces as the case says, on its ranks."""
    if (tower := TowerPieces.dearest(task, np.inf)) is None:
        return True
    ranks = relaxation.program.rank_of[chunk_of[tower.layers]]
    pieces = 1 + np.count_nonzero(np.diff(ranks))
    if not case.ranks:
        return bool(pieces >= case.pieces)
    return bool(pieces == case.pieces) and {*ranks.tolist()} <= {*case.ranks}


@pytest.mark.long
def test_cases_hold_every_plan_that_is_better_than_the_target_and_their_bounds_are_below_it() -> None:
    rng, told_apart, tightened = Random(8), 0, 0
    for _, task, relaxation in relaxations(range(30)):
        end_s = np.empty(relaxation.program.kind.size + 1)
        plans: list[tuple[float, tuple[IndexArray, IndexArray]]] = []
        for _ in range(30):
            plan = random_chunks(task, rng), random_choice(task, rng)
            peaks = [rank_peak(task, relaxation.program, r, *plan) for r in range(task.shape.ranks)]
            if max(peaks) <= task.memory_bytes:
                value_s = float(batch_seconds(model_of(task, task.tables, relaxation.program), *plan, end_s))
                plans.append((value_s, plan))
        if not plans or relaxation.unit.seconds <= 0.0:
            continue
        best_s, best = min(plans, key=lambda one: one[0])
        found = Relaxation.of(task, relaxation.program, best_s * 1.01 + 1e-6)
        assert found is not None
        for depth in range(12):
            if depth == 0 and not found.hub_is_open:
                found.limit_ranks()
                tightened += found.case.most_units is not None
                assert is_in(found.case, task, found, best)
            found.improve(20)
            assert found.lower_s <= best_s * (1 + 1e-9) + 1e-9
            cases = [*found.cases()]
            if not cases:
                break
            holding = [case for case in cases if is_in(case, task, found, best)]
            assert holding
            found = found.with_case(rng.choice(holding))
            found.aim(best_s * 1.005 + 1e-6)
            told_apart += 1
    assert told_apart > 10
    assert tightened > 5


def towers(seed: int) -> Instance:
    """Two or three chains, whose ends one layer reads."""
    rng, edges, count = Random(seed), dict[tuple[int, int], int](), 0
    ends = []
    for _ in range(rng.randint(2, 3)):
        length, cost = rng.randint(2, 5), rng.randint(0, 6)
        edges |= {(u, u + 1): cost for u in range(count, count + length - 1)}
        count += length
        ends.append(count - 1)
    edges |= {(u, count): 1 for u in ends}
    layers = {v: {1: [tmpc(rng.randint(3, 9))]} for v in range(count)} | {count: {1: [tmpc(1)]}}
    return piper_ray.with_passes(build(layers, edges, devices=4, microbatches=6, bandwidth_bytes_per_s=8.0))


def test_a_tower_is_on_the_ranks_of_its_case_and_no_bound_is_above_the_best_plan(few: bool) -> None:
    rng, divided, further, raised = Random(5), 0, 0, 0
    for seed in range(40 if few else 200):
        instance = towers(seed)
        restrictions = Restrictions(data_parallelism=False)
        for task in ChunkProblem.of(instance, restrictions, [rng.choice(SCHEDULES)]).tasks(instance):
            if (program := task.shape.program()) is None or task.shape.ranks < 3:
                continue
            model, end_s = model_of(task, task.tables, program), np.empty(program.kind.size + 1)
            choice = task.tables.option_start[:-1].copy()
            plans = [random_chunks(task, rng) for _ in range(100)]
            best_s, best = min(((float(batch_seconds(model, x, choice, end_s)), x) for x in plans), key=itemgetter(0))
            found = Relaxation.of(task, program, best_s * 1.001)
            assert found is not None
            found.improve(20)
            while found.may_settle:
                cases = [case for case in found.cases() if case.ranks or case.pieces > found.case.pieces]
                if not cases:
                    break
                holding = [case for case in cases if has_tower(case, task, found, best)]
                assert holding
                before_s, found = found.lower_s, found.with_case(rng.choice(holding))
                found.improve(20)
                assert found.lower_s <= best_s * (1 + 1e-9)
                divided, further = divided + bool(found.case.ranks), further + (found.case.further_s > 0.0)
                raised += found.lower_s > before_s * (1 + 1e-6)
                if found.case.ranks:
                    break
    assert divided > (5 if few else 30)
    assert further > 5
    assert raised > 5


def test_counts_of_layers_divide_plans_beside_a_hub_and_keep_the_best_one_known() -> None:
    rng, divided, raised = Random(5), 0, 0
    for _, task in tasks_with_hubs(range(60), SCHEDULES):
        program = task.shape.program()
        assert program is not None
        model, end_s = model_of(task, task.tables, program), np.empty(program.kind.size + 1)
        choice = task.tables.option_start[:-1].copy()
        plans = [random_chunks(task, rng) for _ in range(50)]
        fits = [
            x
            for x in plans
            if all(rank_peak(task, program, r, x, choice) <= task.memory_bytes for r in range(task.shape.ranks))
        ]
        if not fits:
            continue
        best_s, best = min(((float(batch_seconds(model, x, choice, end_s)), x) for x in fits), key=lambda one: one[0])
        found = Relaxation.of(task, program, best_s * 1.01)
        assert found is not None
        if found.hub_is_open:
            found = found.with_case(next(case for case in found.cases() if is_in(case, task, found, (best, choice))))
        found.improve(20)
        while found.may_count:
            before_s = found.lower_s
            found.count_layers(40)
            assert found.lower_s <= best_s * (1 + 1e-9)
            assert sum(has(part.counts, found, best) for part in found.parts or []) == 1
            divided += len(found.parts or []) > 1
            raised += found.lower_s > before_s * (1 + 1e-6)
    assert divided > 10
    assert raised > 5


def has(counts: LayerCounts, relaxation: Relaxation, chunk_of: IndexArray) -> bool:
    """Whether the plan is in the part with these counts."""
    stages = relaxation.task.shape.stages
    found = np.array([np.bincount(chunk_of[positions], minlength=stages) for positions in relaxation.members])
    least, most = (of[: len(found)] for of in (counts.least, counts.most))  # without transfers
    return bool(((least <= found) & (found <= most)).all())


def test_moves_leave_a_plan_that_fits_and_takes_no_longer() -> None:
    rng, random, better = Random(6), np.random.default_rng(6), 0
    for _, task in some_tasks(range(40)):
        program = task.shape.program()
        assert program is not None
        layers = task.tables.layers(task.data_parallel_degree)
        model = model_of(task, task.tables, program)._replace(held=np.ones(task.shape.stages))
        chunk_of, choice = random_chunks(task, rng), task.tables.option_start[:-1].copy()
        if not fit_all(model, chunk_of, choice):
            continue
        end_s = np.empty(program.kind.size + 1)
        before_s = batch_seconds(model, chunk_of, choice, end_s)
        control = np.array([np.inf, 0.0])
        after_s = anneal(model, chunk_of, choice, random.random((200, DRAWS)), 0.01, control)
        assert after_s == batch_seconds(model, chunk_of, choice, end_s)
        assert after_s <= before_s
        better += after_s < before_s
        assert set(chunk_of.tolist()) == set(range(task.shape.stages))
        assert all(chunk_of[x] <= chunk_of[y] for x, heads in enumerate(task.tables.order.successors) for y in heads)
        for rank in range(task.shape.ranks):
            assert rank_peak(task, program, rank, chunk_of, choice) <= task.memory_bytes
        figures = chunk_figures(layers, program.rank_of, chunk_of, choice)
        sync_s = sync_of_ranks(program, figures, task.sync_s_per_byte)
        passes_s = np.ascontiguousarray(figures[:, FIGURE.forward_s : FIGURE.weight_s + 1])
        assert simulate_chunks(program, passes_s, sync_s, end_s) == after_s
    assert better > 10


def test_the_best_of_all_plans_is_found_and_the_one_that_holds_the_least(few: bool) -> None:
    rng, compared, early, priced = Random(7), 0, 0, 0
    control = np.array([np.inf, 0.0])
    for _, task in some_tasks(range(30 if few else 60)):
        tables, order = task.mixed.tables, task.tables.order
        program = task.shape.program()
        assert program is not None
        assert task.mixed.variants is not None
        if order.size > 5 or np.prod(np.diff(tables.option_start)) > 100:
            continue
        layers, start = tables.layers(task.data_parallel_degree), tables.option_start.tolist()
        memory_bytes = task.memory_bytes * rng.choice([0.3, 0.6, 1.0])
        end_s, seconds, peaks = np.empty(program.kind.size + 1), [np.inf], [np.inf]
        for places in product(range(task.shape.stages), repeat=order.size):
            along = all(places[x] <= places[y] for x, heads in enumerate(order.successors) for y in heads)
            if not along or len(set(places)) < task.shape.stages:
                continue
            chunk_of = np.array(places, np.int64)
            for options in product(*(range(first, end) for first, end in pairwise(start))):
                choice = np.array(options, np.int64)
                figures = chunk_figures(layers, program.rank_of, chunk_of, choice)
                peak = max(
                    peak_bytes(
                        program, r, figures[mine, FIGURE.activation].copy(), float(figures[mine, FIGURE.fixed].sum())
                    )
                    for r, mine in enumerate(program.stage_of)
                )
                peaks.append(peak)
                if peak <= memory_bytes:
                    seconds.append(batch_seconds(model_of(task, tables, program), chunk_of, choice, end_s))
        least_s, bounds = min(seconds), walk_bounds(task, program)
        for by_bytes, expected, limit in ((False, least_s, memory_bytes), (True, min(peaks), np.inf)):
            found = all_plans(task, program, bounds, 10**9, np.inf, control, memory_bytes=limit, by_bytes=by_bytes)
            assert found is not None
            assert found.walk.share == 1.0
            assert found.walk.value == pytest.approx(expected, rel=1e-12)
            compared += np.isfinite(expected)
            none = all_plans(task, program, bounds, 10**9, 0.0, control, memory_bytes=limit)
            assert none is not None
            assert (none.walk.value, none.walk.share) == (np.inf, 1.0)
            begun = all_plans(task, program, bounds, 3, np.inf, control, memory_bytes=limit, by_bytes=by_bytes)
            assert begun is not None
            assert 0.0 <= begun.walk.share <= 1.0
            early += begun.walk.share < 1.0
        if 0.0 < least_s < np.inf:
            here = replace(task, memory_bytes=memory_bytes)
            relaxation = Relaxation.of(here, program, least_s * (1.0 + 1e-9))
            assert relaxation is not None
            relaxation.improve(3)
            with_prices = walk_bounds(here, program, relaxation)
            found = all_plans(here, program, with_prices, 10**9, relaxation.target_s, control)
            assert found is not None
            assert found.walk.value == pytest.approx(least_s, rel=1e-12)
            priced += with_prices.fixed_s + with_prices.priced_s.sum() != 0.0
    assert min(compared, early, priced) > 15


@pytest.mark.long
def test_ranks_have_room_for_every_plan_in_its_own_time() -> None:
    """And the least batch that they have room for is above what is known of the task for some."""
    rng, fits, raised = Random(8), 0, 0
    for _, task, relaxation in relaxations(range(200, 230)):
        program = relaxation.program
        kinds, _ = task.tables.kinds(task.data_parallel_degree, task.shape.stages, merged=True)
        waits = waits_s(kinds, relaxation.limits, program)
        cover, end_s = RankCover.of(kinds, relaxation.limits, program, waits), np.empty(program.kind.size + 1)
        for _ in range(30):
            chunk_of, choice = random_chunks(task, rng), random_choice(task, rng)
            ranks = range(task.shape.ranks)
            if all(rank_peak(task, program, r, chunk_of, choice) <= task.memory_bytes for r in ranks):
                batch_s = batch_seconds(model_of(task, task.tables, program), chunk_of, choice, end_s)
                assert cover.has_room(batch_s)
                least_s = cover.least_s(min(task.lower_s, batch_s), batch_s)
                assert least_s <= batch_s
                fits += 1
                raised += least_s > task.lower_s * (1.0 + 1e-6)
    assert fits > 50
    assert raised > 10


def test_the_most_of_one_kind_is_that_of_all_ways_to_share_out_the_others() -> None:
    random = np.random.default_rng(9)
    for _ in range(60):
        p, counts = int(random.integers(1, 4)), random.integers(0, 3, int(random.integers(0, 3)))
        every = [*np.ndindex(*(counts + 1).tolist())]
        chosen = np.array(every, np.int64).reshape(len(every), counts.size)
        most = random.integers(-1, 4, (p, chosen.shape[0]))
        wanted = -1
        for ways in product(range(chosen.shape[0]), repeat=p):
            numbers = [int(most[r, way]) for r, way in enumerate(ways)]
            if min(numbers) >= 0 and (chosen[[*ways]].sum(axis=0) == counts).all():
                wanted = max(wanted, sum(numbers))
        assert most_of_main(most, chosen) == wanted


def test_rows_are_kept_that_no_other_one_beats_or_equals() -> None:
    rng = np.random.default_rng(3)
    for _ in range(50):
        rows = rng.integers(0, 4, (int(rng.integers(0, 30)), 3)).astype(np.float64)
        group = rng.integers(0, 3, len(rows))
        order = np.lexsort((rows.sum(axis=1), group))
        kept = undominated_rows(rows, group, order, 31)
        wanted = [
            a
            for at, a in enumerate(order)
            if not any(group[b] == group[a] and (rows[b] <= rows[a]).all() for b in order[:at])
        ]
        assert kept.tolist() == wanted
        assert undominated_rows(rows, group, order, 2).tolist() == wanted[:2]


def random_contents(rng: np.random.Generator, v: int) -> ChunkContents:
    """At least two ways to have one or two layers of two kinds, the second one small, in each chunk."""
    rows = [np.array([*product((0, 1, 2), (0, 1))][1 : 1 + int(rng.integers(2, 6))]) for _ in range(v)]
    layers = np.concatenate([np.repeat(x, 2, axis=0) for x in rows])
    seconds = layers[:, :1] + rng.integers(0, 3, (len(layers), PASSES + 1)) / 2.0
    order = np.lexsort((seconds.sum(axis=1), np.arange(len(layers)) // 2))
    start, each = np.cumsum([0, *(2 * len(x) for x in rows)]), np.arange(len(layers))
    held = [rng.integers(0, 4, len(layers)).astype(np.float64) for _ in range(2)]
    return ChunkContents(start, each - each % 2, layers, seconds[order], *held)


def pattern_fits(contents: ChunkContents, room: RankRoom, chosen: tuple[int, ...]) -> bool:
    which, v, m = list(chosen), len(chosen), room.microbatches
    layers, seconds, fixed = contents.layers[which], contents.seconds[which], contents.fixed[which]
    for turn in range(1, v + 1):
        own = layers[:turn].sum(axis=0)
        few = max(0, room.ahead_s.shape[1] - 1 - int(own[room.small].sum()))
        lacks = np.maximum(room.needed - own, 0.0)
        busy_s = seconds[:turn, :PASSES].sum() + max(room.ahead_s[turn, few], lacks @ room.layer[:, 0])
        bytes_ = room.held[:, :turn] @ contents.activation[which[:turn]] + fixed[:turn].sum()
        bytes_ += room.held[:, turn:].min(axis=1, initial=m) * (lacks @ room.layer[:, 1]) + lacks @ room.layer[:, 2]
        in_time = busy_s < room.microbatch_s and m * busy_s + seconds[:turn, PASSES].sum() < room.batch_s
        if not in_time or (own > room.most).any() or (turn == v and lacks.any()) or (bytes_ > room.memory_bytes).any():
            return False
    return True


@pytest.mark.parametrize("hub", [-1, 0, 4])
def test_patterns_add_to_paths_and_to_ranks_what_their_chunks_take(hub: int) -> None:
    rng, p, v, patterns, paths = np.random.default_rng(hub + 1), 3, 2, 7, 4
    stage_of = np.arange(p * v).reshape(v, p).T.copy()
    rank = np.sort(np.concatenate([np.arange(p), rng.integers(0, p, patterns - p)]))
    passes_s, (sync_s, to_hub_s) = rng.random((patterns, v, PASSES)), rng.random((2, patterns))
    times = PatternTimes(stage_of, hub, rank, passes_s, sync_s, to_hub_s)
    counts, end = rng.integers(0, 9, (paths, p * v, PASSES)).astype(np.float64), rng.integers(0, p, paths)
    added_s = times_on_paths(times, counts, end)
    for n in range(patterns):
        # The seconds of a plan that has this pattern alone.
        of_chunks, of_ranks = np.zeros((p * v, PASSES)), np.zeros(p)
        of_chunks[stage_of[rank[n]]] = passes_s[n]
        of_ranks[rank[n]] = sync_s[n]
        if hub >= 0:
            of_chunks[hub, :2] += to_hub_s[n]
        for i in range(paths):
            assert added_s[i, n] == pytest.approx((counts[i] * of_chunks).sum() + of_ranks[end[i]], rel=1e-12)
        for share in (0.0, 0.3):
            found, found_sync = np.ones((p * v, PASSES)), np.ones(p)
            add_times(times, share * (np.arange(patterns) == n), found, found_sync)
            assert found == pytest.approx(1.0 + share * of_chunks, rel=1e-12)
            assert found_sync == pytest.approx(1.0 + share * of_ranks, rel=1e-12)


def test_patterns_of_a_rank_are_those_that_fit_and_each_other_one_is_no_better_than_one_of_them(few: bool) -> None:
    rng, beaten = np.random.default_rng(5), 0
    for _ in range(20 if few else 40):
        v = int(rng.integers(1, 4))
        contents, held = random_contents(rng, v), rng.integers(0, 3, (2, v)).astype(np.float64)
        least = np.sort(rng.integers(0, 3, (v + 1, 4)) / 2.0)[:, ::-1].copy()
        room = RankRoom(
            3, 7.0 * v, 22.0 * v, 7.0 * v, held, least, np.array([False, True]), np.array([2 * v - 1, 1]),
            np.array([1.0, float(rng.integers(0, 2))]), rng.integers(0, 2, (2, 3)).astype(np.float64),
        )  # fmt: skip

        every = [
            x
            for x in product(*(range(*pair) for pair in pairwise(contents.start.tolist())))
            if pattern_fits(contents, room, x)
        ]
        steps, found = fitting_patterns(contents, room, 10_000, 10_000)
        assert steps < 10_000
        listed = [tuple(row) for row in found.tolist()]
        assert set(listed) <= set(every)
        for one in every:
            no_worse = [
                other
                for other in listed
                if (contents.layers[list(other)] == contents.layers[list(one)]).all()
                and (contents.seconds[list(other)] <= contents.seconds[list(one)]).all()
            ]
            assert no_worse
        beaten += len(every) - len(listed)
        assert len(fitting_patterns(contents, room, 10_000, 0)[1]) == min(1, len(listed))
        assert fitting_patterns(contents, room, 2, 10_000)[0] == 2
    assert beaten >= 20
