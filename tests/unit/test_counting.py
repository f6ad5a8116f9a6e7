"""Downsets and nested pairs are counted right without being listed."""

from __future__ import annotations

from math import comb
from pathlib import Path
from random import Random

import pytest

from piper_ray.engine.lattice.contraction import without_contraction
from piper_ray.engine.lattice.layer_graph import LayerGraph, build_graph, count_downsets, count_pairs
from piper_ray.model.instance import Instance
from piper_ray.workloads.formats.load import load
from tests.data import INCEPTION, WORKLOADS
from tests.instances import two_towers
from tests.solver_support import downsets_by_definition, graph_only, random_graph


def graph_of(instance: Instance) -> LayerGraph:
    return build_graph(instance, without_contraction())


@pytest.mark.parametrize("density", [0.0, 0.15, 0.3, 0.6, 1.0])
def test_against_enumeration(density: float) -> None:
    rng = Random(density)
    for layers in range(1, 9):
        for _ in range(4):
            instance = random_graph(rng, layers, density)
            downsets = downsets_by_definition(instance)
            assert count_downsets(graph_of(instance)) == len(downsets)
            assert count_pairs(graph_of(instance)) == sum(one < other for one in downsets for other in downsets)


@pytest.mark.parametrize(
    ("path", "downsets", "pairs"),
    [
        (WORKLOADS["bert32a100"], 43, 890),
        (WORKLOADS["resnet"], 242, 28_729),
        (WORKLOADS["gnmt"], 17_914, 15_488_764),
        (INCEPTION, 221_565, 10_265_454_156),
    ],
    ids=lambda value: value.stem if isinstance(value, Path) else None,
)
def test_published_workloads(path: Path, downsets: int, pairs: int) -> None:
    graph = graph_of(load(path))
    assert count_downsets(graph) == downsets
    assert count_pairs(graph) == pairs


def test_a_long_chain() -> None:
    graph = graph_of(graph_only(range(300), [(v, v + 1) for v in range(299)]))
    assert count_downsets(graph) == 301
    assert count_pairs(graph) == 301 * 300 // 2


def test_independent_layers() -> None:
    graph = graph_of(graph_only(range(60), []))
    assert count_downsets(graph) == 2**60
    assert count_pairs(graph) == 3**60 - 2**60  # outside, inside J, or between


def test_independent_chains() -> None:
    """k chains of n layers: (n + 1)^k downsets; of each chain C(n + 2, 2) nested pairs or equal ones."""
    n, k = 7, 12
    graph = graph_of(graph_only(range(n * k), [(v, v + 1) for v in range(n * k - 1) if (v + 1) % n]))
    assert count_downsets(graph) == (n + 1) ** k
    assert count_pairs(graph) == comb(n + 2, 2) ** k - (n + 1) ** k


def test_two_towers() -> None:
    assert count_downsets(graph_of(two_towers(50))) == 51**2 + 2


@pytest.mark.long
def test_too_entangled_to_count() -> None:
    graph = graph_of(random_graph(Random(5), 200, 0.03))
    assert count_downsets(graph) is None
    assert count_pairs(graph) is None
