"""Kernels of sets of layers against all sets of small graphs, and against all ways to share cells out."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from piper_ray.engine.kernels.rank_sets import least_of_parts, least_of_sets
from piper_ray.engine.lattice.labelling import SET_LABELS, Labelling
from tests.instances import random_instance
from tests.kernel_support import case
from tests.lengths import long_after


@pytest.mark.parametrize("seed", long_after(4, range(16)))
def test_the_least_of_all_sets_by_their_cells(seed: int) -> None:
    """A set pays for edges that leave it, and for those that come in, and for its vertices."""
    graph, rng = case(random_instance(seed, most_layers=7)).whole.graph, np.random.default_rng(seed)
    labelling = Labelling.of(graph, SET_LABELS)
    assert labelling is not None
    moves, n = labelling.moves, graph.size
    cells_of, own_s = rng.integers(0, 4, n), rng.random(n) - 0.3
    in_s, out_s = rng.random(len(graph.edges)), rng.random(len(graph.edges))
    expected = np.full(int(cells_of.sum()) + 1, np.inf)
    for inside in product((0, 1), repeat=n):
        paid_s = float(own_s @ inside)
        for e, (tail, head, _) in enumerate(graph.edges):
            paid_s += inside[tail] * (1 - inside[head]) * out_s[e] + inside[head] * (1 - inside[tail]) * in_s[e]
        cells = int(cells_of @ inside)
        expected[cells] = min(expected[cells], paid_s)
    vertex = np.repeat(moves.order, np.diff(moves.move_start))
    cost = labelling.charges.seconds(in_s, out_s) + moves.inside * own_s[vertex]
    assert least_of_sets(moves, cells_of, cost) == pytest.approx(expected)


def test_the_least_of_all_ways_to_share_cells_out() -> None:
    rng = np.random.default_rng(0)
    for parts in range(1, 6):
        cost = np.where(rng.random(6) < 0.2, np.inf, rng.random(6) - 0.2)
        ways = [each for each in product(range(6), repeat=parts) if sum(each) == 5]
        assert least_of_parts(cost, parts) == pytest.approx(min(float(cost[list(each)].sum()) for each in ways))
