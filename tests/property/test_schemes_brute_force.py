"""The program of schemes against all schemes of small layers."""

from __future__ import annotations

import pytest

from piper_ray.workloads.schemes.graph import REPLICATED, OperatorGraph, TensorPlacement
from piper_ray.workloads.schemes.program import SchemeProgram
from tests.lengths import long_after
from tests.scheme_brute_force import least_s
from tests.scheme_support import RandomPrices, chain_layer, norm_layer, random_layer


def _assert_fastest(graph: OperatorGraph, seed: int, border: TensorPlacement, share: float) -> None:
    """share: of the memory between what the smallest scheme holds and the fastest."""
    prices = RandomPrices(seed, with_host=bool(seed % 2))
    program = SchemeProgram(graph, 2, prices, border)
    least, free = program.least_held_bytes(2), program.fastest(2)
    assert free is not None
    most = least + share * (free.figures.held_bytes(2) - least) + 1e-6
    found = program.fastest(2, most)
    assert found is not None
    assert found.figures.held_bytes(2) <= most * (1.0 + 1e-9)
    time_s = found.figures.time_s
    expected = least_s(graph, 2, prices, border, (2.0, most), time_s * (1.0 + 1e-9))
    assert time_s * (1.0 - 2e-4) <= expected <= time_s * (1.0 + 1e-9)


@pytest.mark.parametrize("seed", long_after(1, range(4)))
@pytest.mark.parametrize("graph", [chain_layer(), norm_layer()], ids=["chain", "norm"])
def test_no_scheme_is_faster(graph: OperatorGraph, seed: int) -> None:
    border = REPLICATED if "s" not in graph.values["x"].axes or seed % 3 else TensorPlacement("s")
    for share in (1.0, 0.2):
        _assert_fastest(graph, seed, border, share)


_SLOW = 12
"""A seed of which the twin takes minutes."""


@pytest.mark.parametrize("seed", long_after(2, [seed for seed in range(1, 15) if seed != _SLOW]))
def test_no_scheme_of_five_to_eight_operators_is_faster(seed: int) -> None:
    border = [REPLICATED, TensorPlacement("s")][seed // 2 % 2]
    _assert_fastest(random_layer(seed), seed, border, (1.0, 0.5, 0.2, 0.05)[seed // 4 % 4])
