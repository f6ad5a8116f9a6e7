"""Groups of similar layers: what they have in common, and that bounds by their prices hold."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

import piper_ray
from piper_ray.engine.chunks import nodes, relaxation, tables
from piper_ray.engine.chunks.similar_kinds import similar
from piper_ray.engine.chunks.tables import DegreeTables
from piper_ray.engine.chunks.tasks import ChunkProblem
from piper_ray.engine.kernels.chunk_bound import FIGURE, LayerKinds
from piper_ray.model.constraints import Restrictions
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.model.solution import Status
from tests.chunks_brute_force import least_step_s
from tests.instances import build, random_instance, tmpc
from tests.lengths import long_after
from tests.operator_graphs import traced_mixture
from tests.solver_support import ONE_THREAD


def kinds_of(seconds: list[list[float]], layers: list[int], side: list[int] | None = None) -> LayerKinds:
    """seconds: forward, of each option of each kind."""
    count, starts = len(seconds), np.concatenate([[0], np.cumsum([len(row) for row in seconds])])
    figures = np.zeros((starts[-1], len(FIGURE)))
    figures[:, FIGURE.forward_s] = np.concatenate(seconds)
    return LayerKinds(
        np.array(layers),
        np.ones(count, np.int64),
        np.arange(count),
        np.arange(count) + 1,
        np.zeros(count, np.int64) if side is None else np.array(side),
        starts,
        figures,
        np.zeros(starts[-1]),
    )


def members_of(kinds: LayerKinds) -> list[np.ndarray[tuple[int], np.dtype[np.int64]]]:
    ends = np.cumsum(kinds.layers)
    return [np.arange(end - count, end) for end, count in zip(ends, kinds.layers, strict=True)]


def test_those_that_differ_least_are_together_with_the_mean_of_their_layers() -> None:
    kinds = kinds_of([[1.0], [9.0], [1.5], [8.0]], [1, 1, 3, 1])
    found, members = similar(kinds, members_of(kinds), 2)
    assert [one.tolist() for one in members] == [[1, 5], [0, 2, 3, 4]]
    assert found.layers.tolist() == [2, 4]
    assert found.figures[:, FIGURE.forward_s].tolist() == [8.5, (1.0 + 3 * 1.5) / 4]
    assert (found.first_chunk.tolist(), found.last_chunk.tolist()) == ([1, 0], [4, 3])


def test_neither_sides_nor_numbers_of_options_are_mixed() -> None:
    kinds = kinds_of([[1.0], [1.0, 2.0], [1.0], [1.0]], [1, 1, 1, 1], [0, 0, 1, 0])
    found, members = similar(kinds, members_of(kinds), 1)
    assert [one.tolist() for one in members] == [[0, 3], [1], [2]]
    assert found.option_start.tolist() == [0, 1, 3, 4]
    assert found.side.tolist() == [0, 0, 1]


def test_as_many_groups_as_kinds_are_the_kinds() -> None:
    rng = Random(1)
    kinds = kinds_of([[rng.random(), rng.random()] for _ in range(9)], [rng.randint(1, 3) for _ in range(9)])
    found, members = similar(kinds, members_of(kinds), 20)
    order = [int(np.flatnonzero([x[0] == one[0] for x in members_of(kinds)])[0]) for one in members]
    assert sorted(order) == [*range(9)]
    assert found.figures.reshape(9, 2, -1)[np.argsort(order)] == pytest.approx(kinds.figures.reshape(9, 2, -1))


@pytest.mark.parametrize("name", long_after(2, ["interleaved", "zb-h1", "looped-bfs", "zb-v"]))
def test_bounds_by_their_prices_are_not_above_the_best_plan(
    name: str, monkeypatch: pytest.MonkeyPatch, few: bool
) -> None:
    monkeypatch.setattr(nodes, "_FEW_LAYERS", 0)
    for limit, value in (("_MOST_KINDS", 0), ("_FEW_KINDS", 2), ("_MOST_CELLS", 0)):
        monkeypatch.setattr(relaxation, limit, value)
    monkeypatch.setattr(tables, "_MOST_DOWNSETS", 0)
    schedule, raised = Schedule(ScheduleName(name), 1 if name == "zb-h1" else 2), 0
    for seed in range(6 if few else 12):
        instance = random_instance(seed, most_layers=4 + seed % 2, most_tmpcs=2, most_devices=4)
        least_s = least_step_s(instance, schedule, Restrictions())
        found = piper_ray.solve(instance, schedule=schedule, options=ONE_THREAD)
        if least_s is None:
            assert found.plan is None
            continue
        least_s /= instance.microbatches
        assert found.status is not Status.INFEASIBLE
        assert found.lower_bound_s <= least_s * (1.0 + 1e-9)
        assert found.time_per_sample_s is None or found.time_per_sample_s >= least_s * (1.0 - 1e-9)
        raised += found.lower_bound_s > 0.9 * least_s
    assert raised > 0


def test_a_traced_graph_has_a_plan_and_a_bound_of_each_shape() -> None:
    """Its layers all differ: the shares of each one would be a program of hundreds of thousands of columns."""
    instance = traced_mixture(3, 6, 1, devices=4)
    found = piper_ray.solve(instance, schedule=Schedule(ScheduleName.ZB_H1), options=ONE_THREAD)
    assert found.plan is not None
    assert found.gap is not None
    assert found.gap < 0.25


def test_borders_near_even_cuts_are_what_plans_are_expected_to_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of eight layers in two stages, the border behind the third layer is the cheapest one near the middle."""
    monkeypatch.setattr(tables, "_MOST_DOWNSETS", 0)
    sizes = [9.0, 9.0, 1.0, 9.0, 9.0, 9.0, 9.0]
    instance = build(
        {x: {1: [tmpc(1.0)]} for x in range(8)},
        {(x, x + 1): size for x, size in enumerate(sizes)} | {(0, 7): 2.0},
        bandwidth_bytes_per_s=1.0,
    )
    problem = ChunkProblem.of(instance, Restrictions(), [Schedule(ScheduleName.ZB_H1)])
    found = DegreeTables.of(problem.order, 1, problem.variants)
    assert found is not None
    assert found.usual_border_s(1) == 0.0
    assert found.usual_border_s(2) == 4 * (1.0 + 2.0)  # both sides, both directions
    assert found.usual_border_s(4) == pytest.approx(4 * (9.0 + 1.0 + 9.0 + 2.0) / 3)  # what passes by is paid once
