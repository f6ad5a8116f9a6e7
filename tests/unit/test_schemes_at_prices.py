"""Schemes at prices of memory against all that a memory allows, and layers that share one against every choice."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from piper_ray.proposal.scheme_prices import Cheapest, Taken, least_time, price_of_memory
from piper_ray.workloads.schemes.frontier import at_prices
from piper_ray.workloads.schemes.graph import REPLICATED, OperatorGraph
from piper_ray.workloads.schemes.program import PROGRAM_GAP, SchemeProgram
from piper_ray.workloads.schemes.scheme import Scheme
from tests.lengths import long_after
from tests.scheme_brute_force import least_s
from tests.scheme_support import RandomPrices, chain_layer, norm_layer

_IN_FLIGHT = 2.0


def _taken(scheme: Scheme) -> Taken:
    return scheme.figures.time_s, scheme.figures.held_bytes(_IN_FLIGHT)


def _all_within_memory(graph: OperatorGraph, prices: RandomPrices) -> list[Taken]:
    """Of each memory what is fastest in it: nothing lies between two of these. Sizes are whole bytes."""
    program, found = SchemeProgram(graph, 2, prices, REPLICATED), list[Taken]()
    scheme = program.fastest(_IN_FLIGHT)
    while scheme is not None:
        found.append(_taken(scheme))
        scheme = program.fastest(_IN_FLIGHT, found[-1][1] - 0.5)
    return found


@pytest.mark.parametrize("seed", long_after(1, range(2)))
@pytest.mark.parametrize("graph", [chain_layer(), norm_layer()], ids=["chain", "norm"])
def test_no_scheme_costs_less_at_any_price(graph: OperatorGraph, seed: int) -> None:
    prices = RandomPrices(seed, with_host=bool(seed % 2))
    found = sorted({_taken(one) for one in at_prices(SchemeProgram(graph, 2, prices, REPLICATED), [_IN_FLIGHT])})
    every = _all_within_memory(graph, prices)
    for seconds, held in every[:: max(1, len(every) // 4)]:
        assert least_s(graph, 2, prices, REPLICATED, (_IN_FLIGHT, held)) >= seconds * (1.0 - 2e-4)
    slopes = [(b[0] - a[0]) / (a[1] - b[1]) for a, b in itertools.combinations(every, 2)]
    for price_s in (0.0, *slopes):
        cheapest, own = (min(s + price_s * held for s, held in rows) for rows in (every, found))
        assert own <= cheapest + 1.1e-3 * found[-1][0]


@pytest.mark.parametrize("seed", long_after(1, range(1, 4)))
def test_a_scheme_that_makes_something_again_pays_for_what_is_missing(seed: int) -> None:
    """The cheaper one of the best that makes nothing again, and the best where nothing is missing, with it."""
    prices, price_s, shares = RandomPrices(seed), 0.1, set[bool]()
    program = SchemeProgram(chain_layer(), 2, prices, REPLICATED)
    without = SchemeProgram(chain_layer(), 2, prices, REPLICATED, again=False)
    for missing in (0.0, 5.0, 20.0, 100.0):

        def cost_s(scheme: Scheme, missing: float = missing) -> float:
            again = scheme.figures.again_bytes + missing if scheme.again else 0.0
            return scheme.figures.time_s + price_s * (scheme.figures.held_bytes(_IN_FLIGHT) + again)

        asked = price_s * _IN_FLIGHT, price_s, price_s
        found = program.at_price(*asked, -missing)
        shares.add(bool(found.again))
        others = without.at_price(*asked), program.at_price(*asked, 0.0)
        assert cost_s(found) == pytest.approx(min(map(cost_s, others)), rel=2e-4)
    assert len(shares) == 2


def _every_choice(counts: Sequence[int], rows: Sequence[Sequence[Taken]], most_bytes: float) -> float:
    """The least time of a number of layers of each kind, each choice in turn."""
    of_kinds = [itertools.combinations_with_replacement(of, n) for n, of in zip(counts, rows, strict=True)]
    sums = [[(sum(x for x, _ in some), sum(y for _, y in some)) for some in of] for of in of_kinds]
    return min(
        (sum(x for x, _ in one) for one in itertools.product(*sums) if sum(y for _, y in one) <= most_bytes),
        default=float("inf"),
    )


@pytest.mark.parametrize("share", [0.05, 0.4, 1.5])
@pytest.mark.parametrize("seed", long_after(1, range(2)))
def test_layers_that_share_a_memory_take_no_less(seed: int, share: float) -> None:
    """All choices of schemes for three layers of two kinds; known at first: the fastest and the smallest of each."""
    graphs, counts = [chain_layer(), norm_layer()], [2, 1]
    every = [_all_within_memory(graph, RandomPrices(seed)) for graph in graphs]
    programs = [SchemeProgram(graph, 2, RandomPrices(seed), REPLICATED) for graph in graphs]

    def cheapest(kind: int, price_s: float) -> Cheapest:
        scheme = programs[kind].at_price(price_s * _IN_FLIGHT, price_s)
        seconds, held = _taken(scheme)
        return Cheapest((seconds, held), (seconds + price_s * held) * (1.0 - PROGRAM_GAP), scheme)

    most, least = (sum(n * rows[at][1] for n, rows in zip(counts, every, strict=True)) for at in (0, -1))
    most_bytes = least + share * (most - least)
    ends = [[rows[0], rows[-1]] for rows in every]
    found = least_time(counts, ends, most_bytes, cheapest, float("inf"))
    best_s = _every_choice(counts, every, most_bytes)
    assert found.bound_s <= best_s * (1.0 + 2e-4)
    known = [[*rows, *(_taken(x) for k, x in found.columns if k == n)] for n, rows in enumerate(ends)]
    assert best_s <= _every_choice(counts, known, most_bytes) * (1.0 + 2e-4)
    price_s = price_of_memory(counts, every, most_bytes)  # the least of fractional choices of all schemes
    costs = [n * min(s + price_s * held for s, held in rows) for n, rows in zip(counts, every, strict=True)]
    assert found.bound_s == pytest.approx(sum(costs) - price_s * most_bytes, rel=5e-4)
