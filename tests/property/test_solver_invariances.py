"""What must not change a solution, or change it in one direction only."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper_ray.engine import preparation
from piper_ray.engine.backends.local import LocalBackend
from piper_ray.engine.evaluation.backend import NextBatch
from piper_ray.engine.evaluation.evaluations import Evaluations
from piper_ray.engine.evaluation.state_tables import StateTables
from piper_ray.engine.lattice.contraction import without_contraction
from piper_ray.engine.ledger import Ledger
from piper_ray.engine.search.planning import Planning
from piper_ray.engine.search.search import Search
from piper_ray.engine.solve import solve
from piper_ray.model.instance import Instance, Tmpc
from piper_ray.model.solution import Status
from tests.instances import instances, parallel_branches, random_instance, two_towers
from tests.lengths import long_after
from tests.solver_support import (
    ONE_THREAD,
    RecordingBackend,
    assert_plan_is_worth_its_value,
    renumbered,
    same_answer,
    send_every_level_to_the_backend,
    tables,
)

INFINITE = float("inf")


def time_of(instance: Instance) -> float:
    time_s = solve(instance, options=ONE_THREAD).time_per_sample_s
    return INFINITE if time_s is None else time_s


@given(instances(most_layers=5), st.integers(1, 4))
def test_more_devices_never_hurt(instance: Instance, more: int) -> None:
    assert time_of(instance.replace(devices=instance.devices + more)) <= time_of(instance) * (1 + 1e-9)


@given(instances(most_layers=5), st.floats(0.0, 20.0))
def test_more_memory_never_hurts(instance: Instance, more_bytes: float) -> None:
    larger = instance.replace(memory_bytes=instance.memory_bytes + more_bytes)
    assert time_of(larger) <= time_of(instance) * (1 + 1e-9)


@given(instances(most_layers=5), st.floats(1.0, 10.0))
def test_more_bandwidth_never_hurts(instance: Instance, factor: float) -> None:
    faster = instance.replace(bandwidth_bytes_per_s=instance.bandwidth_bytes_per_s * factor)
    assert time_of(faster) <= time_of(instance) * (1 + 1e-9)


@given(instances(most_layers=5), st.randoms(use_true_random=False))
def test_renumbering_and_shuffling_change_nothing(instance: Instance, rng: Random) -> None:
    assert_same_value_and_size(instance, renumbered(instance, rng))


@pytest.mark.parametrize("seed", long_after(6, range(24)))
def test_renumbering_and_shuffling_larger_instances(seed: int) -> None:
    instance = random_instance(seed, most_layers=9, most_devices=12)
    assert_same_value_and_size(instance, renumbered(instance, Random(seed)))


def assert_same_value_and_size(one: Instance, other: Instance) -> None:
    first, second = solve(one, options=ONE_THREAD), solve(other, options=ONE_THREAD)
    assert first.status is second.status
    assert first.time_per_sample_s is None or first.time_per_sample_s == pytest.approx(
        second.time_per_sample_s, rel=1e-9
    )
    if first.plan is not None and second.plan is not None:
        assert first.plan.devices == second.plan.devices
        assert len(first.plan.stages) == len(second.plan.stages)
    if first.infeasibility is not None and second.infeasibility is not None:
        least, other_least = first.infeasibility.least_memory_bytes, second.infeasibility.least_memory_bytes
        assert (least is None) == (other_least is None)
        assert least is None or least == pytest.approx(other_least, rel=2e-9)


def with_free_layers(instance: Instance, rng: Random) -> Instance:
    """Some layers cost nothing, each with probability one half; so some of them can be contracted."""
    free = {layer.id for layer in instance.layers if rng.random() < 0.5}
    tmpcs = {
        layer.id: {
            t: tuple(
                Tmpc(tmpc.id, 0.0, 0.0, 0.0, 0.0, tmpc.forward_sync_bytes, tmpc.backward_sync_bytes)
                if layer.id in free
                else tmpc
                for tmpc in row
            )
            for t, row in layer.tmpcs.items()
        }
        for layer in instance.layers
    }
    return replace(instance, layers=tuple(replace(layer, tmpcs=tmpcs[layer.id]) for layer in instance.layers))


def solve_without_contraction(instance: Instance) -> Search:
    whole = tables(instance, contraction=without_contraction())
    backend = LocalBackend(1)
    search = Search(Planning(instance, whole.contraction), whole.problem, Evaluations(backend), Ledger())
    search.ledger.run(search)
    backend.close()
    return search


def with_free_edges(instance: Instance, rng: Random) -> Instance:
    """Some edges, and what their ends add to them, cost nothing; memory is ample, and free layers may take some."""

    def freed(tmpc: Tmpc, layer: int) -> Tmpc:
        return replace(
            tmpc,
            fixed_bytes=float(rng.randint(0, 3)),
            forward_sync_bytes={u: 0.0 if (u, layer) in free else x for u, x in tmpc.forward_sync_bytes.items()},
            backward_sync_bytes={w: 0.0 if (layer, w) in free else x for w, x in tmpc.backward_sync_bytes.items()},
        )

    free = {(edge.source, edge.target) for edge in instance.edges if rng.random() < 0.7}
    layers = tuple(
        replace(layer, tmpcs={t: tuple(freed(x, layer.id) for x in row) for t, row in layer.tmpcs.items()})
        for layer in instance.layers
    )
    edges = tuple(
        replace(edge, communication_bytes=0.0) if (edge.source, edge.target) in free else edge
        for edge in instance.edges
    )
    return replace(instance, layers=layers, edges=edges).replace(memory_bytes=1e6)


SEEDS = range(100)


@pytest.mark.long
def test_contraction_of_all_that_is_free_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked for where lattices are large, on small ones."""

    def prepared(instance: Instance, rng: Random) -> Instance:
        return with_free_edges(with_free_layers(instance, rng), rng)

    plain = assert_contraction_changes_nothing(prepared)
    monkeypatch.setattr(preparation, "_MANY_DOWNSETS", 0)
    assert assert_contraction_changes_nothing(prepared) > 1.5 * plain


@pytest.mark.long
def test_contraction_changes_nothing() -> None:
    assert assert_contraction_changes_nothing(with_free_layers) > 0.13 * len(SEEDS)


def assert_contraction_changes_nothing(prepared: Callable[[Instance, Random], Instance]) -> int:
    """Returns how many layers were contracted in all."""
    merged = 0
    for seed in SEEDS:
        instance = prepared(random_instance(seed, most_layers=6), Random(seed))
        if any(not any(t <= instance.devices for t in layer.tmpcs) for layer in instance.layers):
            continue  # refused before the search
        solution, search = solve(instance, options=ONE_THREAD), solve_without_contraction(instance)
        merged += len(instance.layers) - solution.stats.contracted_layers
        assert (solution.status is Status.INFEASIBLE) == search.bracket.exhausted, seed
        if solution.plan is None:
            continue
        assert_plan_is_worth_its_value(instance, solution)
        best = search.ledger.best
        assert best is not None
        assert solution.time_per_sample_s == pytest.approx(search.bracket.upper, rel=1e-9, abs=0.0), seed
        assert solution.plan.devices == best.plan.devices, seed
        assert len(solution.plan.stages) == len(best.plan.stages), seed
    return merged


WIDE = {
    "towers": two_towers(9, devices=7, microbatches=12, memory_bytes=90.0),
    "branches": parallel_branches(3, 5, devices=9, microbatches=8, memory_bytes=120.0),
}


@pytest.mark.parametrize("name", long_after(1, WIDE))
def test_threads_change_no_byte(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    send_every_level_to_the_backend(monkeypatch)
    solutions = []
    for threads in (1, 2, 4):
        backend = RecordingBackend(threads)
        solutions.append(solve(WIDE[name], backend=backend))
        backend.close()
        assert backend.levels >= solutions[-1].stats.levels - 1
    assert solutions[0].status is Status.OPTIMAL
    assert same_answer(solutions[0], solutions[1])
    assert same_answer(solutions[0], solutions[2])


@pytest.mark.long
def test_threads_change_no_byte_where_levels_are_large() -> None:
    """No setting touched: levels of this lattice go to the threads by themselves, the small ones do not."""
    instance = parallel_branches(1, 13, devices=13, microbatches=6, memory_bytes=60.0)
    solutions = []
    for threads in (1, 3):
        backend = RecordingBackend(threads)
        solutions.append(solve(instance, backend=backend))
        backend.close()
        assert backend.levels > 0
    assert same_answer(solutions[0], solutions[1])


@pytest.mark.parametrize("name", WIDE)
def test_who_computes_a_level_changes_no_byte(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    apart = solve(WIDE[name], options=ONE_THREAD)
    send_every_level_to_the_backend(monkeypatch)
    assert same_answer(apart, solve(WIDE[name], options=ONE_THREAD))
    monkeypatch.setattr("piper_ray.engine.backends.local._SMALL_LEVEL_S", float("inf"))
    assert same_answer(apart, solve(WIDE[name], options=ONE_THREAD))


class InBatches(LocalBackend):
    """Takes several levels at a time."""

    def next_batch(self, states: StateTables) -> NextBatch:
        last = states.tables.lattice.level_start.size - 1
        return NextBatch(min(states.level + 1 + states.level % 4, last), here=False)


@pytest.mark.parametrize("name", WIDE)
def test_batches_of_levels_change_no_byte(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    level_by_level = solve(WIDE[name], options=ONE_THREAD)
    send_every_level_to_the_backend(monkeypatch)
    with closing(InBatches(1)) as backend:
        in_batches = solve(WIDE[name], backend=backend)
    assert in_batches.plan == level_by_level.plan
    assert in_batches.lower_bound_s == level_by_level.lower_bound_s
    counts = [(e.threshold_s, e.feasible, e.live_downsets, e.cells) for e in in_batches.stats.evaluations]
    assert counts == [(e.threshold_s, e.feasible, e.live_downsets, e.cells) for e in level_by_level.stats.evaluations]


@pytest.mark.parametrize("seed", long_after(3, range(12)))
def test_the_same_input_gives_the_same_bytes(seed: int) -> None:
    instance = random_instance(seed, most_layers=8, most_devices=16)
    assert same_answer(solve(instance, options=ONE_THREAD), solve(instance, options=ONE_THREAD))
