"""The program of schemes against every scheme in turn."""

from __future__ import annotations

from dataclasses import replace

import pytest

from piper_ray.workloads.schemes.graph import REPLICATED, OperatorFamily, OperatorGraph, Step, TensorPlacement
from piper_ray.workloads.schemes.program import SchemeProgram
from tests.lengths import long_after
from tests.scheme_brute_force import least_s
from tests.scheme_support import RandomPrices, chain_layer, made, norm_layer


def _eight() -> OperatorGraph:
    """Two products with functions and norms about them, and two sums: eight operators."""

    def own(name: str, family: OperatorFamily, read: str, along: tuple[str, ...] = ()) -> Step:
        return Step(f"to {name}", family, (read,), (name,), along, (read,))

    steps = (
        own("n", OperatorFamily.ROWS, "x", ("h",)),
        Step("in", OperatorFamily.CONTRACTION, ("n", "W"), ("u",), (), ("n", "W")),
        own("v", OperatorFamily.POINTWISE, "u"),
        Step("out", OperatorFamily.CONTRACTION, ("v", "V"), ("p",), (), ("v", "V")),
        Step("sum", OperatorFamily.SUM, ("x", "p"), ("r",)),
        own("m", OperatorFamily.ROWS, "r", ("h",)),
        own("q", OperatorFamily.POINTWISE, "m"),
        Step("last", OperatorFamily.SUM, ("r", "q"), ("y",)),
    )
    axes = dict.fromkeys("xnprmqy", "sh") | {"u": "sf", "v": "sf", "W": "hf", "V": "fh"}
    return replace(made({"s": 4, "h": 3, "f": 8}, steps, axes, "W V"), sizes={"f": 8})


@pytest.mark.long
@pytest.mark.parametrize(("seed", "share"), [(1, 1.0), (4, 0.4)])
def test_no_scheme_of_eight_operators_is_faster(seed: int, share: float) -> None:
    graph, prices, border = _eight(), RandomPrices(seed, with_host=False), REPLICATED
    program = SchemeProgram(graph, 2, prices, border)
    least, free = program.least_held_bytes(2), program.fastest(2)
    assert free is not None
    most = least + share * (free.figures.held_bytes(2) - least) + 1e-6
    found = program.fastest(2, most)
    assert found is not None
    assert least_s(graph, 2, prices, border, (2.0, most), found.figures.time_s * (1.0 - 2e-4)) == float("inf")


@pytest.mark.parametrize("seed", long_after(1, range(8)))
@pytest.mark.parametrize("graph", [chain_layer(), norm_layer()], ids=["chain", "norm"])
def test_no_scheme_is_faster(graph: OperatorGraph, seed: int) -> None:
    prices = RandomPrices(seed, with_host=bool(seed % 2))
    border = REPLICATED if "s" not in graph.values["x"].axes or seed % 3 else TensorPlacement("s")
    program = SchemeProgram(graph, 2, prices, border)
    least, free = program.least_held_bytes(2), program.fastest(2)
    assert free is not None
    for share in (1.0, 0.2):
        most = least + share * (free.figures.held_bytes(2) - least) + 1e-6
        found = program.fastest(2, most)
        expected = least_s(graph, 2, prices, border, (2.0, most))
        assert found is not None
        assert found.figures.held_bytes(2) <= most * (1.0 + 1e-9)
        assert expected * (1.0 - 1e-9) <= found.figures.time_s <= expected * (1.0 + 2e-4)
