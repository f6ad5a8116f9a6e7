"""Runs of equal layers, each drawn as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from piper_ray.model.instance import Instance, Layer

_SHORTEST_RUN = 3
_TIME_TOLERANCE = 0.1


@dataclass(frozen=True)
class LayerRun:
    """Layer ids, front to back; more than one if they are equal and each feeds the next."""

    layers: tuple[int, ...]


def fold(instance: Instance) -> list[LayerRun]:
    """Every layer in one run. Layers of a run have equal names but for digits, equal sizes, times about as equal as
    measured ones are, and the same other inputs, and all but the last feed the next one only."""
    kind = {layer.id: (kind_name(layer.name), _sizes(layer)) for layer in instance.layers}
    times = {layer.id: _times_s(layer) for layer in instance.layers}

    def follows(before: int, after: int) -> bool:
        alike = kind[before] == kind[after] and all(
            abs(one - other) <= _TIME_TOLERANCE * max(one, other)
            for one, other in zip(times[before], times[after], strict=True)
        )
        return alike and instance.neighbours[before][1] == (after,)

    follower: dict[int, int] = {}
    for layer in instance.layers:
        for before in instance.neighbours[layer.id][0]:
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
        runs += [LayerRun(tuple(piece)) for piece in _pieces(chain, instance)]
    return runs


def _pieces(chain: Sequence[int], instance: Instance) -> list[list[int]]:
    """The chain cut where the other inputs change; short pieces as single layers."""
    pieces: list[list[int]] = [[chain[0]]]
    others = None  # of the first layer they include what comes before the chain
    for before, layer in pairwise(chain):
        of_layer = sorted(set(instance.neighbours[layer][0]) - {before})
        alike = set(of_layer) <= set(instance.neighbours[before][0]) if others is None else of_layer == others
        others = of_layer
        if alike:
            pieces[-1].append(layer)
        else:
            pieces.append([layer])
    return [part for piece in pieces for part in ([piece] if len(piece) >= _SHORTEST_RUN else [[v] for v in piece])]


def kind_name(name: str) -> str:
    """The name without what numbers it: layers of one kind share it."""
    return "".join(character for character in name if not character.isdigit()).strip(" .-_()[]")


def _sizes(layer: Layer) -> object:
    return tuple(
        (t, tmpc.id, tmpc.weights_bytes, tmpc.activation_bytes, tmpc.fixed_bytes)
        for t in sorted(layer.tmpcs)
        for tmpc in layer.tmpcs[t]
    )


def _times_s(layer: Layer) -> list[float]:
    return [tmpc.time_per_sample_s for t in sorted(layer.tmpcs) for tmpc in layer.tmpcs[t]]
