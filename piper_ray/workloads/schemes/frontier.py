"""The schemes of a kind of layer that are the best at some price of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from piper_ray.model.errors import UsageError
from piper_ray.workloads.estimate.build import Estimate
from piper_ray.workloads.estimate.costs import Setting
from piper_ray.workloads.estimate.operators import LayerKind
from piper_ray.workloads.schemes.graph import REPLICATED
from piper_ray.workloads.schemes.kept import keep_schemes, key_of, read_schemes
from piper_ray.workloads.schemes.layers import BORDERS, TOKENS, graph_of
from piper_ray.workloads.schemes.names import known_divisions, name_of
from piper_ray.workloads.schemes.prices import EstimatedPrices, TracedGraph, TracedPrices
from piper_ray.workloads.schemes.program import SchemeProgram
from piper_ray.workloads.schemes.scheme import PricedGraph, Scheme

USUAL_IN_FLIGHT = (8.0,)

_LEAST = 1e-5
"""Relative to the memory: ten times HiGHS's tolerance in a row."""

_NEAR = 1e-3
"""Relative to the time: no scheme is faster than the found ones by more than this, at any price of memory."""


@dataclass(frozen=True)
class FoundScheme:
    """A scheme with its name; ``new`` if it has no name."""

    name: str
    scheme: Scheme


@dataclass(frozen=True)
class _Corner:
    """A scheme's time and the memory that it holds. price_s: the price of a byte at which no scheme costs less;
    infinite for the scheme that holds the least."""

    time_s: float
    held_bytes: float
    price_s: float

    def cost_s(self, price_s: float) -> float:
        return self.time_s + price_s * self.held_bytes


def at_prices(program: SchemeProgram, in_flight: Sequence[float]) -> Iterator[Scheme]:
    """The cheapest schemes of a program for each number of microbatches in flight, from a price of 0 for memory to a
    price at which only memory counts.

    There may be other schemes between two of them. At the price that makes these two equal, no scheme costs less than
    the bounds at the neighbouring prices allow. Where these leave little room, the search asks no further.
    """
    for count in in_flight:

        def corner(scheme: Scheme, price_s: float, count: float = count) -> _Corner:
            return _Corner(scheme.figures.time_s, scheme.figures.held_bytes(count), price_s)

        fastest, least = program.fastest(count), _least(program, count)
        assert fastest is not None  # each device may do everything
        yield from (fastest, least)
        todo = [(corner(fastest, 0.0), corner(least, np.inf))]
        while todo:
            left, right = todo.pop()
            slower_s, saved_bytes = right.time_s - left.time_s, left.held_bytes - right.held_bytes
            little_s = _NEAR * left.time_s
            if slower_s <= little_s or saved_bytes <= 0.0:
                continue
            price_s, held_bytes = slower_s / saved_bytes, right.held_bytes
            if np.isfinite(right.price_s):
                between_s = right.cost_s(right.price_s) - left.cost_s(left.price_s)
                held_bytes = between_s / (right.price_s - left.price_s)
            least_s = left.cost_s(left.price_s) + (price_s - left.price_s) * held_bytes
            if least_s > left.cost_s(price_s) - little_s:
                continue
            scheme = program.at_price(price_s * count, price_s)
            found = corner(scheme, price_s)
            if found.cost_s(price_s) < left.cost_s(price_s) - little_s:
                yield scheme
                todo += [(left, found), (found, right)]


def _least(program: SchemeProgram, count: float) -> Scheme:
    """The fastest of the schemes that hold the fewest bytes. Where weights are far larger than activations, HiGHS may
    find none within its tolerance; then the limit is raised slightly."""
    least_bytes, more = program.least_held_bytes(count), _LEAST
    while (found := program.fastest(count, least_bytes * (1.0 + more))) is None:
        more *= 10.0
    return found


def undominated(schemes: Sequence[Scheme]) -> list[Scheme]:
    """The undominated schemes, the fastest first. A scheme with shards of tokens at its border hands less on."""
    kept: list[Scheme] = []
    for one in sorted(schemes, key=lambda one: one.figures.time_s):
        alike = (other for other in kept if other.border.axis or other.border == one.border)
        if not any(other.figures.as_good_as(one.figures) for other in alike):
            kept.append(one)
    return kept


def schemes_of(
    of: PricedGraph, degree: int, in_flight: Sequence[float], tell: Callable[[str], None]
) -> list[FoundScheme]:
    """The schemes of a layer on a number of devices. tell: called with the schemes found so far; an exception from it
    ends the search."""
    graph, key = of.graph, key_of(of, degree, in_flight)
    found = read_schemes(key, of, degree)
    if found is None:
        found = undominated(list(_searched(of, degree, in_flight, tell)))
        keep_schemes(key, found, of)
    return [FoundScheme(name_of(one, graph), one) for one in found]


def _searched(
    of: PricedGraph, degree: int, in_flight: Sequence[float], tell: Callable[[str], None]
) -> Iterator[Scheme]:
    graph, count = of.graph, 0
    between = [graph.at_border(name, BORDERS[0]) for name in (*graph.arriving, *graph.leaving)]
    whole = any(graph.sizes.get(place.axis, 0) % degree for place in between) or not any(x.axis for x in between)
    for border in (REPLICATED,) if whole else BORDERS:
        programs = [SchemeProgram(graph, degree, of.prices, border)]
        programs += [  # the schemes that runtimes have without recomputation, which may lie inside the front
            SchemeProgram(graph, degree, of.prices, border, only, again=False)
            for its_border, only in known_divisions(graph, degree).values()
            if its_border == border
        ]
        for scheme in chain.from_iterable(at_prices(program, in_flight) for program in programs):
            count += 1
            tell(f"{graph.name} at t = {degree}: {count} schemes")
            yield scheme


@dataclass(frozen=True)
class KindSchemes:
    """The schemes of a layer on ``degree`` devices. refused: why it has none; empty if it has some. kind: None for
    modules of PyTorch."""

    name: str
    kind: LayerKind | None
    degree: int
    found: tuple[FoundScheme, ...]
    refused: str = ""
    priced: PricedGraph | None = None

    @property
    def digest(self) -> str:
        """The key of the graph, its prices and the rules."""
        assert self.priced is not None
        return key_of(self.priced, self.degree, USUAL_IN_FLIGHT)


def find_schemes(
    estimate: Estimate, kind: LayerKind, degree: int, in_flight: Sequence[float], tell: Callable[[str], None]
) -> KindSchemes:
    """The schemes of a kind, or why it has none. tell: as in ``schemes_of``."""
    refused = ""
    if not kind.divides(degree):
        heads = ", ".join(f"{count:,}" for count in kind.heads)
        refused = f"t = {degree} does not divide its heads or experts ({heads})"
    elif TOKENS not in kind.symbols or not kind.tensor_parallel:
        refused = "no rules say how layers without tokens may be divided"
    else:
        try:
            of = graph_of(kind, degree)
        except UsageError as error:
            refused = str(error)
    if refused:
        return KindSchemes(kind.name, kind, degree, (), refused)
    priced = PricedGraph(of.graph, EstimatedPrices(degree, estimate.setting, of))
    return KindSchemes(kind.name, kind, degree, tuple(schemes_of(priced, degree, in_flight, tell)), "", priced)


def find_traced(
    of: TracedGraph, setting: Setting, degree: int, in_flight: Sequence[float], tell: Callable[[str], None]
) -> KindSchemes:
    """The schemes of a traced module, or why it has none. tell: as in ``schemes_of``."""
    sizes, name = of.graph.sizes, of.graph.name
    if not any(size % degree == 0 for size in sizes.values()):
        told = ", ".join(f"{axis} {size}" for axis, size in sizes.items()) or "none"
        return KindSchemes(name, None, degree, (), f"t = {degree} divides none of its axes ({told})")
    priced = PricedGraph(of.graph, TracedPrices(degree, setting, of))
    return KindSchemes(name, None, degree, tuple(schemes_of(priced, degree, in_flight, tell)), "", priced)
