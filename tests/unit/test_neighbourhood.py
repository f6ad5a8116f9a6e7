"""Orders of vertices for early plans."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from piper_ray.engine.lattice.contraction import without_contraction
from piper_ray.engine.search.neighbourhood import moved_run, prompt_order
from tests.instances import equal_chain, random_instance, two_towers
from tests.operator_graphs import traced_encoder_decoder
from tests.solver_support import tables


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 5, 6, 7])
def test_each_vertex_comes_after_its_successors(seed: int) -> None:
    graph = tables(random_instance(seed, most_layers=9), contraction=without_contraction()).graph
    order = prompt_order(graph)
    assert sorted(order) == list(range(graph.size))
    assert all(order.index(head) < order.index(v) for v in order for head in graph.successors[v])


def test_one_tower_comes_after_the_other() -> None:
    graph = tables(two_towers(6), contraction=without_contraction()).graph
    order = prompt_order(graph)
    assert sum(v in graph.predecessors[u] for u, v in pairwise(order)) >= graph.size - 3


def test_what_a_block_makes_of_a_hub_comes_with_the_block() -> None:
    """Keys and values of each block are made of what all blocks read; the last ones let it follow."""
    graph = tables(traced_encoder_decoder(1, 3, 1)).graph
    hub = max(range(graph.size), key=lambda v: len(graph.successors[v]))
    order = prompt_order(graph)
    apart = [order.index(v) - max(order.index(w) for w in graph.successors[v]) for v in graph.successors[hub]]
    assert len(apart) == 6
    assert sorted(apart)[:5] == [1] * 5


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 5, 6, 7])
def test_orders_with_one_run_elsewhere_are_reached_and_no_others(seed: int) -> None:
    """Compared with all runs at all places."""
    graph = tables(random_instance(seed, most_layers=6), contraction=without_contraction()).graph
    order, draws = list(range(graph.size)), Random(seed)
    legal = set()
    for begin in range(graph.size):
        for end in range(begin + 1, graph.size + 1):
            rest = order[:begin] + order[end:]
            for to in range(len(rest) + 1):
                moved = rest[:to] + order[begin:end] + rest[to:]
                if all(moved.index(w) < moved.index(v) for v in moved for w in graph.successors[v]):
                    legal.add(tuple(moved))
    assert {tuple(moved_run(graph, order, draws)) for _ in range(3000)} == legal


def test_no_run_of_a_chain_can_move() -> None:
    graph = tables(equal_chain(5), contraction=without_contraction()).graph
    assert moved_run(graph, range(5), Random(0)) == range(5)
