"""Orders of layers that edges run along."""

from __future__ import annotations

from itertools import permutations
from random import Random

from piper_ray.engine.chunks.tables import linear_orders


def test_a_chain_has_one() -> None:
    (order,) = linear_orders([[], [0], [1], [2]], [1.0] * 4, 8)
    assert order.tolist() == [0, 1, 2, 3]


def test_edges_run_along_all_of_them_and_no_two_are_the_same() -> None:
    draws = Random(0)
    for _ in range(50):
        n = draws.randrange(1, 9)
        predecessors = [sorted(draws.sample(range(x), draws.randrange(min(x, 2) + 1))) for x in range(n)]
        seconds = [draws.choice([0.0, 0.5, 1.0]) for _ in range(n)]
        found = [tuple(order.tolist()) for order in linear_orders(predecessors, seconds, 10)]
        assert found[0] == tuple(range(n))
        assert len(set(found)) == len(found) <= 10
        for order in found:
            assert sorted(order) == list(range(n))
            assert all(order.index(tail) < order.index(x) for x in range(n) for tail in predecessors[x])


def test_every_sequence_of_branches_is_among_them() -> None:
    """Three branches of two layers each, which a last layer joins."""
    predecessors = [[], [0], [], [2], [], [4], [1, 3, 5]]
    found = {tuple(order.tolist()) for order in linear_orders(predecessors, [1.0] * 7, 60)}
    for branches in permutations([(0, 1), (2, 3), (4, 5)]):
        assert (*(x for branch in branches for x in branch), 6) in found
    assert (0, 2, 4, 1, 3, 5, 6) in found  # side by side
