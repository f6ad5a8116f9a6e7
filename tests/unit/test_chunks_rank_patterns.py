"""Patterns of ranks: every quick plan has some that are no worse, and their bound is the best plan's time."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import piper_ray
from piper_ray.engine.chunks import nodes, rank_patterns
from piper_ray.engine.chunks.candidates import model_of
from piper_ray.engine.chunks.nodes import Node, Turn, TurnOutcome
from piper_ray.engine.chunks.pattern_program import PatternProgram
from piper_ray.engine.chunks.rank_cover import is_small
from piper_ray.engine.chunks.rank_patterns import LayerRuns, PatternSearch, Rows
from piper_ray.engine.chunks.relaxation import Case, Relaxation
from piper_ray.engine.chunks.share_program import ShareProgram
from piper_ray.engine.kernels.chunk_bound import FIGURE
from piper_ray.engine.kernels.chunk_moves import batch_seconds, fit_all
from piper_ray.engine.kernels.chunk_stages import chunk_figures
from piper_ray.engine.kernels.types import FloatArray
from piper_ray.model.options import SolveOptions
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.model.solution import Status
from piper_ray.model.stop import StoppedBy
from tests.chunks_brute_force import least_step_s
from tests.instances import build, tmpc
from tests.lengths import long_after
from tests.solver_support import ONE_THREAD
from tests.unit.test_kernels_chunks import random_choice, random_chunks, some_tasks, tasks_with_hubs

SCHEDULES = [Schedule(ScheduleName.INTERLEAVED, 2), Schedule(ScheduleName.ZB_H1), Schedule(ScheduleName.DUALPIPE_V)]
PASSES = slice(FIGURE.forward_s, FIGURE.weight_s + 1)


def test_each_rank_of_a_plan_has_a_pattern_that_is_no_worse_and_the_bound_is_not_above_it() -> None:
    rng, seen, of_hubs, proved, divided = Random(1), 0, 0, 0, 0
    for _, task in (*some_tasks(range(10), SCHEDULES), *tasks_with_hubs(range(4), SCHEDULES)):
        program = task.shape.program()
        if program is None or len(task.choices) > 1:
            continue
        model = model_of(task, task.tables, program)
        plans = []
        for _ in range(5):
            chunk_of, choice = random_chunks(task, rng), random_choice(task, rng)
            if fit_all(model, chunk_of, choice):
                value_s = batch_seconds(model, chunk_of, choice, np.empty(program.kind.size + 1))
                plans.append((float(value_s), chunk_of, choice))
        target_s = 1.001 * max((value_s for value_s, *_ in plans), default=0.0)
        relaxation = Relaxation.of(task, program, target_s)
        if not target_s or relaxation is None:
            continue
        for value_s, chunk_of, choice in plans:
            of_plan = relaxation
            if relaxation.hub_is_open:
                position = task.tables.order.position[task.tables.order.hub or 0]
                of_plan = relaxation.with_case(Case(hub=int(chunk_of[position])))
            of_plan.list_patterns(1_000_000)
            of_plan.improve(4)
            search = of_plan.by_rank
            if search is None:  # too many patterns, or no plan is quick enough
                continue
            patterns = search.patterns
            takes = chunk_figures(model.layers, program.rank_of, chunk_of, choice)[:, PASSES]
            takes[:, :2] -= relaxation.limits.crossing_s[:, None]
            alike = list[npt.NDArray[np.bool_]]()  # of each rank: patterns that are no worse than the plan's
            for rank, stages in enumerate(program.stage_of):
                rows, seconds = model.layers.figures[choice], takes[stages]
                layers = [np.isin(chunk_of[positions], stages).sum() for positions in of_plan.members]
                sync_s = task.sync_s_per_byte * rows[np.isin(chunk_of, stages), FIGURE.weights].sum()
                no_worse = (patterns.rank == rank) & (patterns.sync_s <= sync_s + 1e-9)
                no_worse &= (patterns.passes_s <= seconds + 1e-9).all(axis=(1, 2))
                alike.append(no_worse & (patterns.of_kinds == layers).all(axis=1))
                assert alike[-1].any()
                seen, of_hubs = seen + 1, of_hubs + (patterns.hub >= 0)
            assert search.lower_s <= value_s * (1.0 + 1e-9)
            assert search.value_s >= search.lower_s * (1.0 - 1e-9)
            parts = [search]
            for _ in range(6):  # together they hold the plan
                for part in parts:
                    part.improve(100, target_s, until_divided=True)
                parts = [x for part in parts for x in ([part] if part.is_over else part.apart())]
                assert min((part.lower_s for part in parts), default=np.inf) <= value_s * (1.0 + 1e-9)
                if value_s < min((part.enough_s for part in parts), default=np.inf):
                    some = [x.allowed for part in parts for x in part.parts]
                    assert any(all((allowed & own).any() for own in alike) for allowed in some)
                    divided += len(some) > 1
            proved += search.lower_s > task.lower_s
    assert seen >= 15
    assert of_hubs >= 20
    assert proved >= 5
    assert divided >= 3


def test_small_layers_that_may_be_beside_others_only_lower_what_these_pay() -> None:
    """Further transfers of a chunk are the least of its kinds; those of kinds that have none are not counted."""
    rng, lower, none = np.random.default_rng(2), 0, 0
    for _, task in tasks_with_hubs(range(0, 20, 5), SCHEDULES, small_first=True):
        program = task.shape.program()
        assert program is not None
        relaxation = Relaxation.of(task, program, np.inf)
        assert relaxation is not None
        kinds = relaxation.kinds
        further_s = rng.uniform(1.0, 2.0, (2, task.shape.stages, kinds.layers.size))
        further_s[rng.random(further_s.shape) < 0.3] = np.inf
        found = rank_patterns._least_of_small(kinds, further_s)
        for row, chunk, kind in np.ndindex(found.shape):
            may_be_there = [
                further_s[row, chunk, x]
                for x in np.flatnonzero(is_small(kinds)).tolist()
                if kinds.first_chunk[x] <= chunk <= kinds.last_chunk[x]
            ]
            own_s = further_s[row, chunk, kind]
            assert found[row, chunk, kind] == (own_s if own_s == np.inf else min([own_s, *may_be_there]))
            lower += bool(found[row, chunk, kind] < own_s)
            none += bool(own_s == np.inf)
    assert lower > 3
    assert none > 3


@pytest.mark.parametrize(("few", "more"), long_after(1, [(4, 2), (500, 50)]))
def test_patterns_of_numbers_of_layers_hold_every_plan_and_their_bound_is_not_above_it(
    few: int, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """few: the patterns of a program that need not be added. more: how many are added for a rank."""
    monkeypatch.setattr(rank_patterns, "_FEW_COLUMNS", few)
    monkeypatch.setattr(rank_patterns, "_MORE_COLUMNS", more)
    rng, seen, spread, raised, divided = Random(3), 0, 0, 0, 0
    chains = tasks_with_hubs(range(0, 20, 5), SCHEDULES, small_first=True)
    for _, task in (*tasks_with_hubs(range(6), SCHEDULES), *chains):
        program = task.shape.program()
        assert program is not None
        model = model_of(task, task.tables, program)
        plans = []
        for _ in range(30):
            chunk_of, choice = random_chunks(task, rng), random_choice(task, rng)
            if fit_all(model, chunk_of, choice):
                value_s = batch_seconds(model, chunk_of, choice, np.empty(program.kind.size + 1))
                plans.append((float(value_s), chunk_of, choice))
        if not plans:
            continue
        value_s, chunk_of, choice = min(plans, key=lambda plan: plan[0])
        relaxation = Relaxation.of(task, program, 1.001 * value_s)
        assert relaxation is not None
        position = task.tables.order.position[task.tables.order.hub or 0]
        of_plan = relaxation.with_case(Case(hub=int(chunk_of[position])))
        if not of_plan.may_divide_counts:
            continue
        before_s = of_plan.lower_s
        assert of_plan.divide_counts(1_000_000, 20)
        search = of_plan.by_counts
        assert of_plan.lower_s <= value_s * (1.0 + 1e-9)
        raised += of_plan.lower_s > before_s * (1.0 + 1e-6)
        patterns = of_plan._patterns(1_000_000, only_counts=True)
        assert patterns is not None
        large = ~is_small(patterns.kinds)
        takes = chunk_figures(model.layers, program.rank_of, chunk_of, choice)[:, PASSES]
        takes[:, :2] -= relaxation.limits.crossing_s[:, None]
        alike = list[set[tuple[int, ...]]]()
        for rank, stages in enumerate(program.stage_of):
            layers = np.array([[(chunk_of[x] == k).sum() for x in of_plan.members] for k in stages])
            has = (patterns.layers[..., large] == layers[:, large]).all(axis=(1, 2))
            no_worse = (patterns.rank == rank) & has & (patterns.passes_s <= takes[stages] + 1e-9).all(axis=(1, 2))
            whole_s = patterns.passes_s.sum(axis=(1, 2)) + patterns.spread_s
            no_worse &= whole_s <= takes[stages].sum() + 1e-9
            no_worse &= (patterns.of_kinds <= np.array(layers).sum(axis=0)).all(axis=1)
            assert no_worse.any()
            alike.append({tuple(x.ravel()) for x in patterns.layers[no_worse]})
            seen, spread = seen + 1, spread + bool((patterns.spread_s[no_worse] > 0.0).any())
        for _ in range(6):
            if search is None or search.is_over:
                break
            search.improve(1, 1.001 * value_s)
            assert search.lower_s <= value_s * (1.0 + 1e-9)
            assert any(
                all(
                    any(
                        tuple(x.ravel()) in own
                        for x in part.patterns.layers[part.allowed & (part.patterns.rank == rank)]
                    )
                    for rank, own in enumerate(alike)
                )
                for part in search.parts
            )
            divided += len(search.parts) > 1
    assert seen > 20
    assert spread > 3
    assert raised > 3
    assert divided > 1


def test_a_program_in_which_no_path_takes_time_has_no_prices() -> None:
    """Two ranks of one layer each. A pattern of a rank takes no time, the other one takes 5 s."""
    kinds = SimpleNamespace(layers=np.array([2]))
    patterns: Any = SimpleNamespace(
        rank=np.array([0, 0, 1, 1]),
        first=np.array([0, 2]),
        of_kinds=np.ones((4, 1), np.int64),
        kinds=kinds,
        least_layers=kinds.layers,
        crossing_s=np.zeros(2),
        spread_in=np.zeros(0, np.int64),
        only_counts=False,
    )
    rows = Rows(np.array([[0.0, 5.0, 0.0, 5.0]]), np.zeros(1), np.zeros((1, 2, 3)))
    free = PatternProgram(patterns, np.ones(4, np.bool_), rows)
    assert free.solve() is None
    assert free.prices is None
    paid = PatternProgram(patterns, np.array([False, True, True, True]), rows)
    found = paid.solve()
    assert found is not None
    assert found.batch_s == pytest.approx(5.0)
    assert paid.prices is not None


@pytest.mark.parametrize("splits_before_pace", long_after(1, [rank_patterns._SPLITS, 0]))
def test_parts_of_plans_end_in_the_best_plan_whoever_takes_their_turns(
    splits_before_pace: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve layers on up to six devices. That all plans together have no better one is found without patterns."""
    light = replace(tmpc(8, 0, 1, 6, "light"), forward_s=2.0)
    edges = {(x, x + 1): 0.5 for x in range(11)}
    choices = {1: [tmpc(6, 0, 5, 6), light]}
    instance = build(dict.fromkeys(range(12), choices), edges, devices=6, microbatches=12, memory_bytes=60.0)
    best = piper_ray.solve(instance, schedule="interleaved", options=ONE_THREAD)
    parts, real = set[str](), Node.take

    def noted(node: Node, turn: Turn, control: FloatArray) -> TurnOutcome:
        parts.update(filter(None, [node.origin and node.name]))
        return real(node, turn, control)

    monkeypatch.setattr(Node, "take", noted)
    by_pace, paces = PatternSearch._by_pace, list[int]()

    def counted(search: PatternSearch, *asked: Any) -> list[npt.NDArray[np.bool_]]:
        found = by_pace(search, *asked)
        paces.append(len(found))
        return found

    monkeypatch.setattr(PatternSearch, "_by_pace", counted)
    monkeypatch.setattr(rank_patterns, "_SPLITS", splits_before_pace)
    monkeypatch.setattr(nodes, "_FEW_LAYERS", 0)
    monkeypatch.setattr(nodes, "EFFORTS", (nodes.Effort(1, 20),) * 2)  # tasks are divided soon
    one = piper_ray.solve(instance, schedule="interleaved", options=ONE_THREAD)
    assert len(parts) >= 10
    assert splits_before_pace or any(paces)
    assert one.stats.degrees is not None
    assert (one.status, one.time_per_sample_s) == (Status.OPTIMAL, best.time_per_sample_s)
    kept = str(tmp_path / "kept")
    parts.clear()
    limited = SolveOptions(threads=1, resume=kept, passes_limit=one.stats.degrees.passes * 9 // 10)
    assert piper_ray.solve(instance, schedule="interleaved", options=limited).stopped_by is StoppedBy.WORK_LIMIT
    assert len(parts) >= 5
    for options in (SolveOptions(threads=3), SolveOptions(threads=2, resume=kept)):
        found = piper_ray.solve(instance, schedule="interleaved", options=options)
        assert (found.plan, found.lower_bound_s, found.stats.degrees) == (
            one.plan,
            one.lower_bound_s,
            one.stats.degrees,
        )


def test_a_chunk_of_a_chain_has_layers_in_a_row() -> None:
    rng = np.random.default_rng(0)
    for size, chunks in ((6, 3), (9, 4), (5, 5)):
        kind_of = rng.integers(0, 3, size)
        runs = LayerRuns.of([np.flatnonzero(kind_of == kind) for kind in range(3)])
        cuts = [(0, *inner, size) for inner in combinations(range(1, size), chunks - 1)]
        for chunk in range(chunks):
            found = {tuple(row) for row in runs.of_chunk(chunk, chunks).tolist()}
            assert found == {tuple(np.bincount(kind_of[slice(*cut[chunk : chunk + 2])], minlength=3)) for cut in cuts}


@pytest.mark.parametrize("schedule", [Schedule(ScheduleName.INTERLEAVED, 2), Schedule(ScheduleName.ZB_V)], ids=str)
def test_ranks_of_whole_choices_are_proved_without_shares_of_layers(
    schedule: Schedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four or five layers on two ranks, of which some can keep their activations, and send less over a border than the
    others. Nothing else is asked."""
    monkeypatch.setattr(nodes, "_FEW_LAYERS", 0)
    monkeypatch.setattr(ShareProgram, "solve", lambda *_: pytest.fail("shares of layers"))
    for count, memory_bytes in ((4, 42.0), (4, 34.0), (5, 60.0)):
        light = replace(tmpc(8, 0, 1, 6, "light"), forward_s=2.0, forward_sync_bytes=dict.fromkeys(range(count), 1.0))
        choices = {1: [tmpc(6, 0, 5, 6), light]}
        edges = {(x, x + 1): 0.5 for x in range(count - 1)}
        instance = build(dict.fromkeys(range(count), choices), edges, devices=2, memory_bytes=memory_bytes)
        least_s = least_step_s(instance, schedule)
        found = piper_ray.solve(instance, schedule=schedule, options=ONE_THREAD)
        assert least_s is not None
        assert found.status is Status.OPTIMAL
        assert found.time_per_sample_s == pytest.approx(least_s / instance.microbatches, rel=1e-9)
