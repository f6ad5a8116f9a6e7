"""The rules for layers and edges of a graph that can be planned: known ids, each edge once, no cycle; and the rules for
a layer's TMPCs. Files and Python objects follow the same rules.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from piper_ray.model import limits
from piper_ray.model.instance import Tmpc
from piper_ray.workloads.formats.faults import Faults, path_of, quoted, shown

_SHOWN_OF_CYCLE = 20


@dataclass(frozen=True)
class NamedId:
    """A layer's id, and its path in the input."""

    id: int
    path: str


@dataclass(frozen=True)
class NamedEdge:
    """An edge's ends, and its path in the input."""

    source: int
    target: int
    path: str


@dataclass(frozen=True)
class Neighbours:
    """For each layer id the ids of its predecessors and successors, in the order of the edges."""

    predecessors: Mapping[int, Sequence[int]]
    successors: Mapping[int, Sequence[int]]


def check_size(layers: int, edges: int, faults: Faults, layers_path: str, edges_path: str) -> bool:
    """Whether the graph has a layer and is within the limits on size; notes a fault if not."""
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
    """Notes duplicate ids, self loops, duplicate edges, edges to unknown layers, and a cycle.

    ids_complete: whether every layer's id could be read; if not, an unknown id may belong to one of the others and is
    ignored. Returns the neighbours along the valid edges.
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


def check_tensors(ends: Mapping[str, Sequence[int]], ids: Iterable[int], faults: Faults) -> None:
    """Notes ends that are not layers, ends listed twice, and fewer than two ends. ends: by their path in the input."""
    known = set(ids)
    for path, layers in ends.items():
        for end in dict.fromkeys(layers):
            if end not in known:
                faults.at(path, f"unknown layer {end}; expected the ids of layers")
            if layers.count(end) > 1:
                faults.at(path, f"layer {end} comes more than once; expected each layer once")
        if len(layers) < 2:
            faults.at(path, f"{len(layers)} layers; expected at least two")


def find_cycle(neighbours: Neighbours) -> list[int]:
    """The ids of one cycle in the direction of its edges, starting with the smallest id; empty if there is none."""
    try:
        TopologicalSorter(neighbours.predecessors).prepare()
    except CycleError as error:
        cycle: list[int] = error.args[1][:-1]
        start = cycle.index(min(cycle))
        return cycle[start:] + cycle[:start]
    return []


def _cycle_text(cycle: Sequence[int]) -> str:
    names = [str(layer) for layer in cycle]
    if len(names) > _SHOWN_OF_CYCLE:
        names[_SHOWN_OF_CYCLE:] = [f"... ({len(cycle)} layers)"]
    return " -> ".join([*names, str(cycle[0])])


PASSES_TOLERANCE = 1e-9
"""Relative to p, since the passes may have been added or rounded elsewhere."""


def check_tmpc_ids(ids: Iterable[object], path: str, faults: Faults) -> None:
    """Notes duplicate ids, because a plan names a layer's TMPC by degree and id."""
    seen: set[str] = set()
    for tmpc_id in ids:
        if isinstance(tmpc_id, str):
            if tmpc_id in seen:
                faults.at(path, f"duplicate TMPC id {quoted(tmpc_id)}; expected unique ids within a layer and degree")
            seen.add(tmpc_id)


def check_some_tmpc(rows: Iterable[object], path: str, faults: Faults) -> None:
    """Notes a layer without TMPCs at any degree."""
    if not any(isinstance(row, (list, tuple)) and row for row in rows):
        faults.at(path, "no TMPC at all; expected at least one for some degree")


def check_kinds(
    layers: Iterable[tuple[str, Collection[str]]], names: Sequence[str], complete: bool, faults: Faults
) -> None:
    """Notes TMPCs on kinds of devices that the cluster does not have, and layers without a TMPC for some kind.

    layers: for each its path and the kinds that its TMPCs are for; none if they could not be read. names: of the
    cluster's kinds. complete: whether it has no others.
    """
    expected = f"one of {', '.join(names)}" if names else "none: all devices are alike"
    for path, used in layers:
        for kind in used:
            if complete and kind not in (names or [""]):
                said = f"for devices of kind {quoted(kind)}" if kind else "without a kind"
                faults.at(path, f"a TMPC {said}; expected {expected}")
        for name in names if used else ():
            if name not in used:
                note_no_tmpc_on(name, path, faults)


def note_no_tmpc_on(kind: str, path: str, faults: Faults) -> None:
    """Notes a layer without a TMPC for a kind of devices."""
    faults.at(path, f"no TMPC for devices of kind {quoted(kind)}; expected at least one for each kind")


def check_passes(tmpc: Tmpc, path_to: Callable[[str], str], faults: Faults) -> None:
    """Notes passes that do not add up to p, and a weight_s that exceeds the backward pass.

    The figures must be finite and >= 0. path_to: returns the path of a field of the TMPC.
    """
    p_s, forward_s, backward_s, weight_s = tmpc.time_per_sample_s, tmpc.forward_s, tmpc.backward_s, tmpc.weight_s
    if forward_s is None or backward_s is None:
        if weight_s is not None:
            faults.at(path_to("weight_s"), "a share of a backward pass that is not given; expected the passes as well")
        return
    slack_s = PASSES_TOLERANCE * p_s
    if forward_s > p_s + slack_s or backward_s > p_s + slack_s:
        name, part_s = ("forward_s", forward_s) if forward_s > backward_s else ("backward_s", backward_s)
        faults.at(path_to(name), f"{part_s!r}, more than both passes together ({p_s!r}); expected a part of it")
    elif abs(forward_s + backward_s - p_s) > slack_s:
        faults.at(
            path_to("time_per_sample_s"),
            f"{p_s!r}, but the passes take {forward_s!r} and {backward_s!r}; expected their sum",
        )
    elif weight_s is not None and weight_s > backward_s + slack_s:
        faults.at(path_to("weight_s"), f"{weight_s!r}, more than the backward pass ({backward_s!r}); expected a share")


def check_sync_names(
    table: Iterable[object], neighbours: Collection[object], path: str, arrow: str, faults: Faults
) -> None:
    """Notes each entry of a sync table that has no edge. arrow: the edge with {} for the neighbour."""
    for key in table:
        if key not in neighbours:
            part = key if isinstance(key, int) else str(key)
            text = quoted(part) if isinstance(part, str) else shown(part)
            faults.at(path_of(path, part), f"there is no edge {arrow.format(text)}; expected edges only")
