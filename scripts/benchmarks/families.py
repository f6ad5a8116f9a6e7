"""Graphs that are hard to plan exactly, of any size, each from its seed: towers, mixtures, cells, chains, operators."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from piper_ray.model.instance import Instance, Tmpc
from tests.instances import build, kept_and_recomputed, on_one_and_two
from tests.operator_graphs import transformer_operators

MS = 1e-3
MIB = 2.0**20

Sizes = Mapping[tuple[int, int], float]
_Layers = dict[int, dict[int, list[Tmpc]]]


def tower_edges(count: int, height: int, inner: Callable[[], float], outer: Callable[[], float]) -> Sizes:
    """Chains of ``height`` layers side by side between layer 0 and the last one: (height + 1)^count + 2 downsets.

    inner, outer: bytes of an edge within a chain, and at its ends; called for one edge after the other.
    """
    chains = [range(1 + number * height, 1 + (number + 1) * height) for number in range(count)]
    last = count * height + 1
    edges = {pair: inner() for chain in chains for pair in pairwise(chain)}
    return edges | {pair: outer() for chain in chains for pair in ((0, chain[0]), (chain[-1], last))}


def towers(count: int, height: int, seed: int) -> Instance:
    """Chains side by side, as the encoders of a model for several kinds of input."""
    rng = random.Random(seed)
    edges = tower_edges(count, height, _sizes(rng, 10, 30), _sizes(rng, 10, 30))
    return build({layer: _layer(rng) for layer in range(count * height + 2)}, edges)


def mixture(blocks: int, experts: int, seed: int) -> Instance:
    """A dense layer, then parallel blocks of experts and a dense layer: blocks 2^experts + 2 downsets."""
    rng = random.Random(seed)
    size = _sizes(rng, 5, 10)
    layers: _Layers = {0: _layer(rng)}
    edges: dict[tuple[int, int], float] = {}
    for block in range(blocks):
        fork, join = block * (experts + 1), (block + 1) * (experts + 1)
        for expert in range(fork + 1, join):
            layers[expert] = _expert(rng)
            edges |= {(fork, expert): size(), (expert, join): size()}
        layers[join] = _layer(rng)
    return build(layers, edges)


def cells(count: int, nodes: int, seed: int) -> Instance:
    """As architecture search finds them (NASNet): in each cell ``nodes`` sums of two operators.

    An operator reads the output of one of the two cells before, or a sum of its own cell; sums that nobody reads are
    put together as the cell's output.
    """
    rng = random.Random(seed)
    size = _sizes(rng, 5, 15)
    layers: _Layers = {0: _layer(rng), 1: _layer(rng)}
    edges: dict[tuple[int, int], float] = {(0, 1): size()}
    outputs = [0, 1]

    def add(layer: dict[int, list[Tmpc]], *sources: int) -> int:
        number = len(layers)
        layers[number] = layer
        edges.update({(source, number): size() for source in sources})
        return number

    for _ in range(count):
        sums: list[int] = []
        for _ in range(nodes):
            sources = rng.sample([*outputs[-2:], *sums], 2)
            sums.append(add(_light(rng), *(add(_layer(rng), source) for source in sources)))
        unread = [number for number in sums if not any(source == number for source, _ in edges)]
        outputs.append(add(_light(rng), *unread))
    return build(layers, edges)


def chain(length: int, seed: int, degrees: Sequence[int] = (1, 2, 4, 8), jitter: float = 0.01) -> Instance:
    """Layers one after the other, as measured: alike, but for figures that are off by up to ``jitter`` each."""
    rng = random.Random(seed)
    layers: _Layers = {}
    for number in range(length):
        time_s, weights, activation, fixed = (
            figure * (1.0 + jitter * rng.uniform(-1.0, 1.0)) for figure in (8 * MS, 40 * MIB, 30 * MIB, 60 * MIB)
        )
        layers[number] = {
            degree: kept_and_recomputed(time_s * (1.0 / degree + 0.06 * (degree > 1)), *shares)
            for degree in degrees
            for shares in [(weights / degree, activation / degree, fixed / degree, 6.0)]
        }
    size = _sizes(rng, 4.9, 5.1)
    return build(layers, {(number, number + 1): size() for number in range(length - 1)})


def operators(blocks: int, heads: int, seed: int, jitter: float = 0.01) -> Instance:
    """A traced decoder: (9 + 7 ``heads``) operators in a block and 4 more, times off by up to ``jitter``."""
    rng = random.Random(seed)
    traced = transformer_operators(blocks, heads)

    def measured(tmpc: Tmpc) -> Tmpc:
        return replace(tmpc, time_per_sample_s=tmpc.time_per_sample_s * (1.0 + jitter * rng.uniform(-1.0, 1.0)))

    return replace(
        traced,
        layers=tuple(
            replace(layer, tmpcs={degree: tuple(map(measured, row)) for degree, row in layer.tmpcs.items()})
            for layer in traced.layers
        ),
    )


def _layer(rng: random.Random) -> dict[int, list[Tmpc]]:
    """Five to ten ms on one device, 0.6 of that on two; all activations kept, or a fifth for a third more time."""
    time_s, weights = rng.uniform(5, 10) * MS, rng.uniform(30, 60) * MIB
    activation, fixed = rng.uniform(30, 70) * MIB, rng.uniform(40, 80) * MIB
    return on_one_and_two(time_s, weights, activation, fixed)


def _expert(rng: random.Random) -> dict[int, list[Tmpc]]:
    return on_one_and_two(rng.uniform(0.8, 1.2) * MS, 10 * MIB, 5 * MIB, 10 * MIB)


def _light(rng: random.Random) -> dict[int, list[Tmpc]]:
    """A sum or a concatenation: no weights."""
    return on_one_and_two(rng.uniform(0.3, 0.6) * MS, 0.0, rng.uniform(5, 10) * MIB, 0.0)


def _sizes(rng: random.Random, least_mib: float, most_mib: float) -> Callable[[], float]:
    return lambda: rng.uniform(least_mib, most_mib) * MIB
