"""Cuts of an order into chunks that take about as long as each other: compared with all cuts."""

from __future__ import annotations

from itertools import pairwise, product
from random import Random

import numpy as np
import pytest

import piper_ray
from piper_ray.engine.chunks.tables import DegreeTables
from piper_ray.engine.chunks.tasks import ChunkProblem
from piper_ray.engine.kernels.chunk_cuts import cut_places, level_cuts
from piper_ray.engine.kernels.types import BoolArray, FloatArray, IndexArray
from piper_ray.model.constraints import Restrictions
from piper_ray.model.schedule import Schedule, ScheduleName
from tests.instances import random_instance

MANY = 1_000


def some_tables(seeds: range) -> list[tuple[DegreeTables, IndexArray]]:
    """With one of the orders."""
    found = []
    for seed in seeds:
        instance = piper_ray.with_passes(random_instance(seed, most_layers=8, most_devices=4))
        tasks = ChunkProblem.of(instance, Restrictions(), [Schedule(ScheduleName.ZB_H1)]).tasks(instance)
        found += [(task.tables, Random(seed).choice(task.tables.order.orders)) for task in tasks[:1]]
    return found


def chunk_seconds(
    tables: DegreeTables,
    order: IndexArray,
    cuts: tuple[int, ...],
    layer_s: FloatArray,
    rank_of: IndexArray,
    free: BoolArray,
) -> FloatArray:
    """From its definition. layer_s: float64[n, s], by place."""
    place = {int(x): n for n, x in enumerate(order)}
    found, chunk_of_place = np.zeros(rank_of.size), np.repeat(np.arange(rank_of.size), np.diff(cuts))
    for n, k in enumerate(chunk_of_place.tolist()):
        found[k] += layer_s[n, k]
    last = rank_of.size - 1
    for edge in (edge for edge, is_free in zip(tables.edge_seconds, free.tolist(), strict=True) if not is_free):
        a, b = int(chunk_of_place[place[edge.tail]]), int(chunk_of_place[place[edge.head]])
        if a != b:
            found[a] += 2.0 * edge.sent_s if a == last or rank_of[a] != rank_of[a + 1] else 0.0
            found[b] += 2.0 * edge.received_s if b == 0 or rank_of[b] != rank_of[b - 1] else 0.0
    return found


def test_no_other_cuts_have_a_lesser_sum_of_powers() -> None:
    rng, random, compared = Random(1), np.random.default_rng(1), 0
    for tables, order in some_tables(range(120)):
        n = order.size
        s = rng.randint(1, min(n, 4))
        rank_of = np.array([0, 1, 1, 0][:s] if rng.random() < 0.5 else range(s), np.int64)
        seconds, slower_s, share = random.random(n), random.random(n), random.random(s)
        free, squarings = random.random(len(tables.edge_seconds)) < 0.3, rng.choice([0, 1, 2, 4])
        edges = tables.edges_along(order, free)
        places = cut_places(seconds + share.mean() * slower_s, edges.crossing_s, s, MANY)
        each = [places.place[a:b].tolist() for a, b in pairwise(places.start.tolist())]
        layer_s = seconds[:, None] + np.outer(slower_s, share)

        found = level_cuts(seconds, slower_s, edges, share, rank_of, MANY, squarings)
        sums = {
            cuts: float((chunk_seconds(tables, order, cuts, layer_s, rank_of, free) ** 2**squarings).sum())
            for cuts in product(*each)
            if all(a < b for a, b in pairwise(cuts))
        }
        assert bool(found.size) == bool(sums)
        if sums:
            assert sums[tuple(found.tolist())] == pytest.approx(min(sums.values()))
            compared += len(sums) > 1
    assert compared > 20


def test_places_are_a_chunk_or_less_away_from_even_ones_and_the_cheapest_of_equal_parts() -> None:
    seconds, crossing_s = np.ones(12), np.array([0.0, 5, 1, 4, 2, 9, 3, 8, 1, 7, 2, 6, 0])
    every = cut_places(seconds, crossing_s, 3, MANY)
    assert every.start.tolist() == [0, 1, 9, 17, 18]
    assert every.place.tolist() == [0, *range(1, 9), *range(4, 12), 12][: every.place.size]
    few = cut_places(seconds, crossing_s, 3, 2)
    assert few.start.tolist() == [0, 1, 3, 5, 6]
    assert few.place.tolist() == [0, 2, 8, 4, 8, 12]


def test_no_chunk_is_empty() -> None:
    """Also where the first layer takes nearly all of the time."""
    seconds = np.array([100.0, 1.0, 1.0, 1.0])
    places = cut_places(seconds, np.zeros(5), 4, MANY)
    assert [places.place[a:b].tolist() for a, b in pairwise(places.start.tolist())] == [[0], [1], [2], [3], [4]]
