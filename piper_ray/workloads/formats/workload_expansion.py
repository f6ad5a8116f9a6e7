"""From a compact workload's types and chains to its layers and edges, one by one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from piper_ray.model import limits
from piper_ray.model.instance import Edge, Layer, Tensor, Tmpc
from piper_ray.model.passes import RECOMPUTE_ID
from piper_ray.workloads.formats.faults import Faults, path_of
from piper_ray.workloads.formats.graph import (
    NamedEdge,
    NamedId,
    NamedTensor,
    Neighbours,
    check_graph,
    check_size,
    check_tensors,
)
from piper_ray.workloads.formats.layer_rules import check_passes
from piper_ray.workloads.formats.workload_schema import PREVIOUS, DrawnEdge, DrawnTensor, LayerType, Row

PATH_NUMBER = re.compile(r"\{([0-9]{1,9})\}")
"""In the path of a chain: the number of its first layer, from which the others count on."""

_PASS_KEYS = {"p": "time_s", "forward": "forward_s", "backward": "backward_s", "weight": "weight_s"}


@dataclass(frozen=True)
class ReadType:
    """A layer type whose every row is sound."""

    key: str
    declared: LayerType
    rows: Sequence[Row]


@dataclass(frozen=True)
class Chain:
    """What one entry of [layers] stands for: ``count`` layers of one type, with the ids from ``first_id`` on.

    length: of the whole chain, with what it continues. last_id: of the chain's last layer. before_id: of the
    layer that it continues; None for a single layer. path: of each layer, or one for all, with {n} for n, n + 1, ...
    tied: of each layer.
    """

    label: str
    type_key: str
    inputs: Sequence[str]
    first_id: int
    count: int
    length: int
    last_id: int
    before_id: int | None
    path: str | list[str] = ""
    tied: str = ""

    def layer_path(self, index: int) -> str:
        """Of layer number ``index`` (from 0) of the ``count``."""
        if isinstance(self.path, list):
            return self.path[index]
        return PATH_NUMBER.sub(lambda found: str(int(found[1]) + index), self.path)

    def layer_ids(self) -> range:
        return range(self.first_id, self.first_id + self.count)


@dataclass(frozen=True)
class DrawnGraph:
    """What [graph] draws beside the layers' inputs. Its labels are known."""

    edges: Sequence[DrawnEdge]
    tensors: Sequence[DrawnTensor]


def expand(
    chains: Sequence[Chain], drawn: DrawnGraph, types: Mapping[str, ReadType | None], faults: Faults
) -> tuple[tuple[Layer, ...], tuple[Edge, ...], tuple[Tensor, ...]] | None:
    """All layers, edges and tensors, in order; None, with the faults noted, if they are no sound graph or too many.

    ``types`` may hold None for a type with faults of its own: the graph is checked all the same.
    """
    layer_count = sum(chain.count for chain in chains)
    edge_count = sum(chain.count * len(chain.inputs) for chain in chains) + len(drawn.edges)
    if not check_size(layer_count, edge_count, faults, "layers", "layers"):
        return None
    ids = [NamedId(layer, path_of("layers", chain.label)) for chain in chains for layer in chain.layer_ids()]
    inputs = list(_inputs(chains))
    last_id = {chain.label: chain.last_id for chain in chains}
    others = [
        NamedEdge(last_id[edge.source], last_id[edge.target], f"graph.edges[{index}]")
        for index, edge in enumerate(drawn.edges)
    ]
    ends = [[last_id[label] for label in tensor.layers] for tensor in drawn.tensors]
    named = [NamedTensor(layers, f"graph.tensors[{index}].layers") for index, layers in enumerate(ends)]
    check_tensors(named, [layer.id for layer in ids], faults)
    neighbours = check_graph(ids, [edge for edge, _ in inputs] + others, faults, "layers")
    kind_of = {layer: types.get(chain.type_key) for chain in chains for layer in chain.layer_ids()}
    sound = {layer: kind for layer, kind in kind_of.items() if kind is not None}
    if faults or not _check_sync(chains, sound, neighbours, faults):
        return None
    edges = [
        Edge(edge.source, edge.target, _at(sound[edge.target].declared.inputs, position)) for edge, position in inputs
    ]
    edges += [
        Edge(edge.source, edge.target, costed.cost_bytes) for edge, costed in zip(others, drawn.edges, strict=True)
    ]
    tensors = (Tensor(tuple(x), t.forward, t.backward) for x, t in zip(ends, drawn.tensors, strict=True))
    path_of_layer = {
        layer: chain.layer_path(index)
        for chain in chains
        if chain.path
        for index, layer in enumerate(chain.layer_ids())
    }
    tied = {layer: chain.tied for chain in chains if chain.tied for layer in chain.layer_ids()}
    layers = tuple(
        replace(layer, path=path_of_layer.get(layer.id, ""), tied=tied.get(layer.id, ""))
        for layer in _layers(sound, neighbours, faults)
    )
    return None if faults else (layers, tuple(edges), tuple(tensors))


def _inputs(chains: Sequence[Chain]) -> Iterator[tuple[NamedEdge, int]]:
    """Every edge that an entry's inputs name, with its position among them."""
    last_id = {chain.label: chain.last_id for chain in chains}
    for chain in chains:
        path = path_of("layers", chain.label, "inputs")
        before = chain.before_id
        for layer in chain.layer_ids():
            for position, label in enumerate(chain.inputs):
                source = before if label == PREVIOUS and before is not None else last_id[label]
                yield NamedEdge(source, layer, f"{path}[{position}]"), position
            before = layer


def _check_sync(
    chains: Sequence[Chain], kind_of: Mapping[int, ReadType], neighbours: Neighbours, faults: Faults
) -> bool:
    """Whether lists of sync sizes fit the edges, and all figures together are within the limits."""
    tmpcs = sync_figures = 0
    for chain in chains:
        for layer in chain.layer_ids():
            kind = kind_of[layer]
            arriving, leaving = len(neighbours.predecessors[layer]), len(neighbours.successors[layer])
            rows = sum(len(row.degrees) for row in kind.rows)
            tmpcs += rows
            sync_figures += rows * (arriving + leaving)
            for index, row in enumerate(kind.rows):
                row_path = f"{path_of('types', kind.key)}.tmpcs[{index}]"
                for sizes, edges, what, where in [
                    (row.forward_sync, arriving, "arrive at", f"{row_path}.forward_sync"),
                    (row.backward_sync, leaving, "leave", f"{row_path}.backward_sync"),
                ]:
                    if isinstance(sizes, list) and len(sizes) != edges:
                        faults.at(path_of("layers", chain.label), f"{edges} edges {what} layer {layer}, but {where} "
                                                                  f"lists {len(sizes)}; expected as many")  # fmt: skip
    for count, most, described in [
        (tmpcs, limits.CONFIGURATIONS, "TMPCs"),
        (sync_figures, limits.SYNC_FIGURES, "figures of forward_sync and backward_sync"),
    ]:
        if count > most:
            faults.at("layers", f"{count} {described} over all layers; expected at most {most}")
    return not faults


def _layers(kind_of: Mapping[int, ReadType], neighbours: Neighbours, faults: Faults) -> Iterator[Layer]:
    """Passes that do not make up a row's time are noted once for the row."""
    taken: Counter[str] = Counter()
    wrong: set[tuple[str, int]] = set()
    for layer, kind in kind_of.items():
        tmpcs: dict[int, list[Tmpc]] = {}
        for index, row in enumerate(kind.rows):
            tmpc = _tmpc(row, taken[kind.key], neighbours.predecessors[layer], neighbours.successors[layer])
            if (tmpc.forward_s is not None or tmpc.weight_s is not None) and (kind.key, index) not in wrong:
                found_before = len(faults.found)
                row_path = f"{path_of('types', kind.key)}.tmpcs[{index}]"
                check_passes(tmpc, lambda name, at=row_path: f"{at}.{_PASS_KEYS[name]}", faults)  # type: ignore[misc]
                if len(faults.found) > found_before:
                    wrong.add((kind.key, index))
            for t in row.degrees:
                tmpcs.setdefault(t, []).append(tmpc)
        taken[kind.key] += 1
        name = kind.key if kind.declared.name is None else kind.declared.name
        yield Layer(
            layer,
            name,
            {t: tuple(listed) for t, listed in tmpcs.items()},
            experts=kind.declared.experts or 0,
            key_heads=kind.declared.key_heads or 0,
            predictor=kind.declared.predictor,
        )


def _tmpc(row: Row, turn: int, before: Sequence[int], after: Sequence[int]) -> Tmpc:
    """The row for the layer that is number ``turn`` (from 0) of its type."""
    return Tmpc(
        id=row.id,
        time_per_sample_s=_in_turn(row.time_s, turn),  # type: ignore[arg-type] # the sum of the passes where it is None
        weights_bytes=row.weights,
        activation_bytes=row.activation,
        fixed_bytes=row.fixed,
        forward_sync_bytes={layer: _at(row.forward_sync, position) for position, layer in enumerate(before)},
        backward_sync_bytes={layer: _at(row.backward_sync, position) for position, layer in enumerate(after)},
        recompute=row.id == RECOMPUTE_ID if row.recompute is None else row.recompute,
        shared_bytes=row.shared,
        least_data_parallel_degree=row.least_data_parallel_degree,
        forward_s=_in_turn(row.forward_s, turn),
        backward_s=_in_turn(row.backward_s, turn),
        weight_s=_in_turn(row.weight_s, turn),
    )


def _in_turn(times: float | list[float] | None, turn: int) -> float | None:
    return times[turn % len(times)] if isinstance(times, list) else times


def _at(sizes: float | list[float], position: int) -> float:
    return sizes[position] if isinstance(sizes, list) else sizes
