"""What makes layers and edges a graph that can be planned: known ids, each edge once, no cycle."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from piper_ray.model import limits
from piper_ray.workloads.formats.faults import Faults

_SHOWN_OF_CYCLE = 20


@dataclass(frozen=True)
class NamedId:
    """A layer's id, and where the input says it."""

    id: int
    path: str


@dataclass(frozen=True)
class NamedEdge:
    """An edge's ends, and where the input says them."""

    source: int
    target: int
    path: str


@dataclass(frozen=True)
class NamedTensor:
    """A tensor's ends, and where the input says them."""

    layers: Sequence[int]
    path: str


@dataclass(frozen=True)
class Neighbours:
    """For each layer id the ids before and after it, in the order of the edges."""

    predecessors: Mapping[int, Sequence[int]]
    successors: Mapping[int, Sequence[int]]


def check_size(layers: int, edges: int, faults: Faults, layers_path: str, edges_path: str) -> bool:
    """Whether the graph has a layer at all and is within the limits of what is read."""
    sizes = [(layers, limits.LAYERS, "layers", layers_path), (edges, limits.EDGES, "edges", edges_path)]
    for count, most, what, path in sizes:
        if count > most:
            faults.at(path, f"{count} {what}; expected at most {most}")
    if layers == 0:
        faults.at(layers_path, "no layers; expected at least one")
    return 0 < layers <= limits.LAYERS and edges <= limits.EDGES


def check_graph(
    ids: Sequence[NamedId], edges: Sequence[NamedEdge], faults: Faults, cycle_path: str, *, ids_complete: bool = True
) -> Neighbours:
    """Note duplicate ids, self loops, duplicate edges, edges to unknown layers, and a cycle.

    ``ids_complete``: whether every layer's id could be read; if not, an unknown id may be one of those and is
    passed over. Returns the neighbours along the edges that are sound.
    """
    first_path: dict[int, str] = {}
    for layer in ids:
        if layer.id in first_path:
            faults.at(layer.path, f"duplicate id {layer.id}, first at {first_path[layer.id]}; expected unique ids")
        else:
            first_path[layer.id] = layer.path
    seen: dict[tuple[int, int], str] = {}
    predecessors: dict[int, list[int]] = {layer.id: [] for layer in ids}
    successors: dict[int, list[int]] = {layer.id: [] for layer in ids}
    for edge in edges:
        ends = (edge.source, edge.target)
        unknown = [end for end in dict.fromkeys(ends) if end not in first_path]
        if unknown:
            if ids_complete:
                for end in unknown:
                    faults.at(edge.path, f"unknown layer {end} in edge {edge.source} -> {edge.target}; "
                                         "expected the id of a layer")  # fmt: skip
        elif edge.source == edge.target:
            faults.at(edge.path, f"self loop at layer {edge.source}; expected an edge between two layers")
        elif ends in seen:
            faults.at(edge.path, f"duplicate edge {edge.source} -> {edge.target}, first at {seen[ends]}; "
                                 "expected each edge once")  # fmt: skip
        else:
            seen[ends] = edge.path
            predecessors[edge.target].append(edge.source)
            successors[edge.source].append(edge.target)
    neighbours = Neighbours(predecessors, successors)
    cycle = find_cycle(neighbours)
    if cycle:
        faults.at(cycle_path, f"cycle {_cycle_text(cycle)}; expected a graph without cycles")
    return neighbours


def check_tensors(tensors: Sequence[NamedTensor], ids: Iterable[int], faults: Faults) -> None:
    """Note ends that are no layers, that come twice, or that are fewer than two."""
    known = set(ids)
    for tensor in tensors:
        for end in dict.fromkeys(tensor.layers):
            if end not in known:
                faults.at(tensor.path, f"unknown layer {end}; expected the ids of layers")
            if tensor.layers.count(end) > 1:
                faults.at(tensor.path, f"layer {end} comes more than once; expected each layer once")
        if len(tensor.layers) < 2:
            faults.at(tensor.path, f"{len(tensor.layers)} layers; expected at least two")


def find_cycle(neighbours: Neighbours) -> list[int]:
    """The ids of one cycle in the direction of its edges, from its least id on; empty if there is none."""
    waiting_for = {layer: len(before) for layer, before in neighbours.predecessors.items()}
    ready = deque(layer for layer, count in waiting_for.items() if count == 0)
    while ready:
        for after in neighbours.successors[ready.popleft()]:
            waiting_for[after] -= 1
            if waiting_for[after] == 0:
                ready.append(after)
    stuck = {layer for layer, count in waiting_for.items() if count > 0}
    if not stuck:
        return []
    # Every stuck layer has a stuck predecessor, so walking backwards must come round to a layer already passed.
    position: dict[int, int] = {}
    walk: list[int] = []
    layer = min(stuck)
    while layer not in position:
        position[layer] = len(walk)
        walk.append(layer)
        layer = next(before for before in neighbours.predecessors[layer] if before in stuck)
    cycle = walk[position[layer] :][::-1]
    start = cycle.index(min(cycle))
    return cycle[start:] + cycle[:start]


def _cycle_text(cycle: Sequence[int]) -> str:
    names = [str(layer) for layer in cycle]
    if len(names) > _SHOWN_OF_CYCLE:
        names[_SHOWN_OF_CYCLE:] = [f"... ({len(cycle)} layers)"]
    return " -> ".join([*names, str(cycle[0])])
