"""Runs of equal layers, each drawn as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from piper_ray.model import Instance, Layer

_SHORTEST_RUN = 3


@dataclass(frozen=True)
class Run:
    """Layer ids, front to back; more than one if they are equal and each feeds the next."""

    layers: tuple[int, ...]


def fold(instance: Instance) -> list[Run]:
    """Every layer in one run. Layers of a run have equal names but for digits, equal figures, and the same other
    inputs, and all but the last feed the next one only: so nothing is lost by drawing them as one."""
    successors: dict[int, list[int]] = {layer.id: [] for layer in instance.layers}
    predecessors: dict[int, list[int]] = {layer.id: [] for layer in instance.layers}
    for edge in instance.edges:
        successors[edge.source].append(edge.target)
        predecessors[edge.target].append(edge.source)
    kind = {layer.id: (kind_name(layer.name), _figures(layer)) for layer in instance.layers}

    def follows(before: int, after: int) -> bool:
        return successors[before] == [after] and kind[before] == kind[after]

    follower: dict[int, int] = {}
    for layer in instance.layers:
        for before in predecessors[layer.id]:
            if follows(before, layer.id) and before not in follower:
                follower[before] = layer.id
    followed = {after: before for before, after in follower.items()}
    runs = []
    for layer in instance.layers:
        if layer.id in followed:
            continue
        chain = [layer.id]
        while chain[-1] in follower:
            chain.append(follower[chain[-1]])
        runs += [Run(tuple(piece)) for piece in _pieces(chain, predecessors)]
    return runs


def _pieces(chain: Sequence[int], predecessors: dict[int, list[int]]) -> list[list[int]]:
    """The chain cut where the other inputs change; short pieces as single layers."""
    pieces: list[list[int]] = [[chain[0]]]
    others = None  # of the first layer they include what comes before the chain
    for before, layer in zip(chain, chain[1:], strict=False):
        of_layer = sorted(set(predecessors[layer]) - {before})
        if others is None:
            alike = set(of_layer) <= set(predecessors[before])
        else:
            alike = of_layer == others
        others = of_layer
        if alike:
            pieces[-1].append(layer)
        else:
            pieces.append([layer])
    return [part for piece in pieces for part in ([piece] if len(piece) >= _SHORTEST_RUN else [[v] for v in piece])]


def kind_name(name: str) -> str:
    """The name without what numbers it: layers of one kind share it."""
    return "".join(character for character in name if not character.isdigit()).strip(" .-_()[]")


def _figures(layer: Layer) -> object:
    return tuple(
        (t, tmpc.id, tmpc.time_per_sample_s, tmpc.weights_bytes, tmpc.activation_bytes, tmpc.fixed_bytes)
        for t in sorted(layer.tmpcs)
        for tmpc in layer.tmpcs[t]
    )
