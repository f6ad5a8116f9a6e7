"""The schemes of a kind of layer that may be the best somewhere: fastest within a memory, for more and less of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from piper_ray.model.errors import UsageError
from piper_ray.workloads.estimate.build import Estimate
from piper_ray.workloads.estimate.costs import Setting
from piper_ray.workloads.estimate.operators import LayerKind
from piper_ray.workloads.schemes.graph import REPLICATED, OperatorGraph, TensorPlacement
from piper_ray.workloads.schemes.kept import keep_schemes, key_of, read_schemes
from piper_ray.workloads.schemes.layers import TOKENS, graph_of
from piper_ray.workloads.schemes.names import name_of
from piper_ray.workloads.schemes.prices import EstimatedPrices, SchemePrices
from piper_ray.workloads.schemes.program import SchemeProgram
from piper_ray.workloads.schemes.scheme import PricedGraph, Scheme
from piper_ray.workloads.schemes.traced import TracedGraph, TracedPrices

BORDERS = TensorPlacement(TOKENS), REPLICATED
"""Where the values between layers may lie: one of the two in a whole plan."""

USUAL_IN_FLIGHT = (8.0,)

_STEPS = 8
"""Limits of memory between the fastest scheme's and the least."""


@dataclass(frozen=True)
class FoundScheme:
    """A scheme with its name; ``new`` where it has none."""

    name: str
    scheme: Scheme


def within_limits(
    graph: OperatorGraph, degree: int, prices: SchemePrices, border: TensorPlacement, in_flight: Sequence[float]
) -> Iterator[Scheme]:
    """The fastest schemes, with less and less memory, for each number of microbatches in flight."""
    program = SchemeProgram(graph, degree, prices, border)
    for count in in_flight:
        least_bytes = program.least_held_bytes(count)
        found = program.fastest(count)
        first_bytes = None
        while found is not None:
            yield found
            held_bytes = found.figures.held_bytes(count)
            first_bytes = first_bytes or held_bytes
            if held_bytes <= least_bytes * 1.001:
                break
            limit = held_bytes - (first_bytes - least_bytes) / _STEPS
            found = program.fastest(count, max(limit, least_bytes * (1.0 + 1e-6)))


def undominated(schemes: Sequence[Scheme]) -> list[Scheme]:
    """Those that no other is as good as, the fastest first. One with shards of tokens at its border hands less on."""
    kept: list[Scheme] = []
    for one in sorted(schemes, key=lambda one: one.figures.time_s):
        alike = (other for other in kept if other.border.axis or other.border == one.border)
        if not any(other.figures.as_good_as(one.figures) for other in alike):
            kept.append(one)
    return kept


def schemes_of(
    of: PricedGraph, degree: int, in_flight: Sequence[float], tell: Callable[[str], None]
) -> list[FoundScheme]:
    """Of a layer on so many devices. tell: called with what was found so far; what it raises ends the search."""
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
        for scheme in within_limits(graph, degree, of.prices, border, in_flight):
            count += 1
            tell(f"{graph.name} at t = {degree}: {count} schemes")
            yield scheme


@dataclass(frozen=True)
class KindSchemes:
    """Of a layer on ``degree`` devices. refused: why it has none; empty where it has some. kind: None for modules of
    PyTorch."""

    name: str
    kind: LayerKind | None
    degree: int
    found: tuple[FoundScheme, ...]
    refused: str = ""
    priced: PricedGraph | None = None


def find_schemes(
    estimate: Estimate, kind: LayerKind, degree: int, in_flight: Sequence[float], tell: Callable[[str], None]
) -> KindSchemes:
    """The schemes of a kind, or why it has none. tell: as of ``schemes_of``."""
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
    """The schemes of a traced module, or why it has none. tell: as of ``schemes_of``."""
    sizes, name = of.graph.sizes, of.graph.name
    if not any(size % degree == 0 for size in sizes.values()):
        told = ", ".join(f"{axis} {size}" for axis, size in sizes.items()) or "none"
        return KindSchemes(name, None, degree, (), f"t = {degree} divides none of its axes ({told})")
    priced = PricedGraph(of.graph, TracedPrices(degree, setting, of))
    return KindSchemes(name, None, degree, tuple(schemes_of(priced, degree, in_flight, tell)), "", priced)
