"""Reads a compact workload (``workload_schema``): checks its types and layers, then expands it layer by layer."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from piper_ray.model import limits
from piper_ray.model.instance import Edge, Instance, Layer, Tensor, Tmpc
from piper_ray.model.passes import RECOMPUTE_ID
from piper_ray.workloads.formats import graph
from piper_ray.workloads.formats import workload_schema as schema
from piper_ray.workloads.formats.faults import Faults, path_of, quoted, shown
from piper_ray.workloads.formats.surroundings import Quantities, kind_names, read_surroundings

_OF_OTHER_FORMS_TOO = ("model", "name", "schemes")


def read_workload(document: Mapping[str, object], overrides: Quantities, name: str, faults: Faults) -> Instance | None:
    """The instance that ``document`` describes; None, with the faults noted, if it is not valid."""
    for key in document:
        if key not in schema.KEYS and key not in _OF_OTHER_FORMS_TOO:
            expected = ", ".join(sorted({*schema.KEYS, *_OF_OTHER_FORMS_TOO}))
            faults.at(path_of("", key), f"unknown key; expected one of {expected}")
    tables = {key: _table(document, key, faults) for key in schema.TABLES}
    for name_of_table in ("cluster", "batch"):
        known = [path.partition(".")[2] for path in schema.PATHS.values() if path.startswith(f"{name_of_table}.")]
        for key in tables[name_of_table]:
            if key not in known:
                faults.at(path_of(name_of_table, key), f"unknown key; expected one of {', '.join(known)}")
    around, before = Faults(), len(faults.found)  # layers are looked at, whatever the cluster is
    surroundings = read_surroundings(document, schema.PATHS, overrides, name, around, units=True)
    types = {key: _read_type(key, raw, faults) for key, raw in tables["types"].items()}
    chains = _read_layers(tables["layers"], types, faults)
    drawn = _read_graph(tables["graph"], tables["layers"], faults)
    expanded = None if chains is None or drawn is None else expand(chains, drawn, types, faults)
    used = {entry.get("type") for entry in tables["layers"].values() if isinstance(entry, Mapping)}
    of_types = [
        (path_of("types", key, "tmpcs"), _kinds_said(raw)) for key, raw in tables["types"].items() if key in used
    ]
    graph.check_kinds(of_types, *kind_names(tables["cluster"].get("kinds")), faults)
    faults.found[before:before] = around.found
    faults.notes += around.notes
    if expanded is None or faults:
        return None
    layers, edges, tensors = expanded
    return Instance(layers, edges, tensors=tensors, **surroundings)


def _table(document: Mapping[str, object], key: str, faults: Faults) -> Mapping[str, object]:
    table = document.get(key, {})
    if isinstance(table, Mapping):
        return table
    faults.at(key, f"not a table ({shown(table)}); expected a table")
    return {}


def _kinds_said(raw: object) -> list[str]:
    """The kinds of devices that a type's rows are for, as far as they can be read."""
    rows = raw.get("tmpcs") if isinstance(raw, Mapping) else None
    said = [row.get("kind", "") for row in rows if isinstance(row, Mapping)] if isinstance(rows, list) else []
    return [kind for kind in dict.fromkeys(said) if isinstance(kind, str)]


def _read_type(key: str, raw: object, faults: Faults) -> schema.LayerType | None:
    path = path_of("types", key)
    kind = faults.model(schema.LayerType, raw, path)
    if kind is None:
        return None
    for index, row in enumerate(kind.tmpcs):
        if row.time_per_sample_s is None and (row.forward_s is None or row.backward_s is None):
            faults.at(f"{path}.tmpcs[{index}].time_s", f"missing; expected {schema.TIMES_WORDS} (or both passes)")
    used = Counter((t, row.kind, row.id) for row in kind.tmpcs for t in row.degrees)
    for (t, _, tmpc_id), count in used.items():
        if count > 1:
            faults.at(f"{path}.tmpcs", f"duplicate TMPC id {quoted(tmpc_id)} at t = {t}; expected unique ids "
                                       "within a type and degree")  # fmt: skip
    return kind


def _read_layers(
    table: Mapping[str, object], types: Mapping[str, schema.LayerType | None], faults: Faults
) -> list[Chain] | None:
    """The chains in the order of the file; None if some have faults, so that no graph can be drawn."""
    found_before = len(faults.found)
    chains: dict[str, Chain] = {}
    next_id = 0
    for label, raw in table.items():
        path = path_of("layers", label)
        entry = faults.model(schema.Entry, raw, path)
        if label == schema.PREVIOUS:
            faults.at(path, 'reserved label; expected another: "previous" is the layer before in a chain')
        chain = None if entry is None else _read_entry(label, entry, next_id, chains, table, path, faults)
        if chain is None:
            continue
        chains[label] = chain
        next_id = chain.first_id + chain.count
        if isinstance(chain.path, list) and len(chain.path) != chain.count:
            faults.at(f"{path}.path", f"{len(chain.path)} paths for {chain.count} layers; expected as many")
        if chain.type_key not in types:
            faults.at(f"{path}.type", f"unknown type {quoted(chain.type_key)}; expected a key of [types]")
        _check_inputs(chain, types.get(chain.type_key), table, path, faults)
    if not table:
        faults.at("layers", "no layers; expected at least one")
    return list(chains.values()) if len(faults.found) == found_before else None


def _read_entry(
    label: str,
    entry: schema.Entry,
    next_id: int,
    chains: Mapping[str, Chain],
    table: Mapping[str, object],
    path: str,
    faults: Faults,
) -> Chain | None:
    first_id = next_id if entry.id is None else entry.id
    if entry.continues is None:
        if entry.length is not None:
            faults.at(f"{path}.length", "a length without continues; expected both or neither")
        if entry.type is None:
            faults.at(f"{path}.type", "missing; expected the key of a layer type (or continues, for a chain)")
        if entry.length is not None or entry.type is None:
            return None
        return Chain(label, entry.type, entry.inputs or (), first_id, 1, 1, first_id, None, entry.path, entry.tied)
    if entry.type is not None:
        faults.at(f"{path}.type", "a type and continues; expected one of them: a chain is of one type")
    if entry.length is None:
        faults.at(f"{path}.length", "missing; expected the number of layers of the whole chain")
    head = chains.get(entry.continues)
    if head is None:
        if entry.continues not in table or entry.continues == label:
            faults.at(f"{path}.continues", f"unknown layer {quoted(entry.continues)}; expected an earlier label")
        elif list(table).index(entry.continues) > list(table).index(label):
            faults.at(f"{path}.continues", f"{quoted(entry.continues)} comes later; expected an earlier label")
        return None
    if entry.length is None or entry.type is not None:
        return None
    count = entry.length - head.length
    if count < 0:
        faults.at(f"{path}.length", f"{entry.length}, but what it continues has {head.length} layers; "
                                    "expected at least as many")  # fmt: skip
        return None
    last_id = first_id + count - 1 if count else head.last_id
    inputs = (schema.PREVIOUS,) if entry.inputs is None else entry.inputs
    return Chain(
        label, head.type_key, inputs, first_id, count, entry.length, last_id, head.last_id, entry.path, entry.tied
    )


def _check_inputs(
    chain: Chain, kind: schema.LayerType | None, table: Mapping[str, object], path: str, faults: Faults
) -> None:
    seen: set[str] = set()
    for index, label in enumerate(chain.inputs):
        where = f"{path}.inputs[{index}]"
        if label in seen:
            faults.at(where, f"duplicate edge from {quoted(label)}; expected each input once")
        seen.add(label)
        if label == schema.PREVIOUS and chain.before_id is None:
            faults.at(where, '"previous" outside a chain; expected the label of a layer')
        elif label != schema.PREVIOUS and label not in table:
            faults.at(where, f"unknown layer {quoted(label)}; expected a label of [layers]")
    if kind is None or chain.count == 0:
        return
    sizes = kind.inputs
    if isinstance(sizes, list) and len(sizes) != len(chain.inputs):
        faults.at(f"{path}.inputs", f"{len(chain.inputs)} inputs, but {path_of('types', chain.type_key)}.inputs lists "
                                    f"{len(sizes)} sizes; expected as many")  # fmt: skip


def _read_graph(table: Mapping[str, object], layers: Mapping[str, object], faults: Faults) -> schema.GraphTable | None:
    """The content of [graph]; None, with the faults noted, if some of it cannot be drawn."""
    found_before = len(faults.found)
    drawn = faults.model(schema.GraphTable, table, "graph")
    if drawn is None:
        return None
    named = [
        (f"graph.edges[{index}].{key}", label)
        for index, edge in enumerate(drawn.edges)
        for key, label in (("from", edge.source), ("to", edge.target))
    ]
    named += [
        (f"graph.tensors[{index}].layers[{position}]", label)
        for index, tensor in enumerate(drawn.tensors)
        for position, label in enumerate(tensor.layers)
    ]
    for path, label in named:
        if label not in layers:
            faults.at(path, f"unknown layer {quoted(label)}; expected a label of [layers]")
    return drawn if len(faults.found) == found_before else None


PATH_NUMBER = re.compile(r"\{([0-9]{1,9})\}")
"""The number of a chain's first layer in the chain's path; further layers count on from it."""


@dataclass(frozen=True)
class Chain:
    """An entry of [layers]: ``count`` layers of one type, with the ids from ``first_id`` on.

    length: of the whole chain, including the part that it continues. last_id: the id of the chain's last layer.
    before_id: the id of the layer that it continues; None for a single layer. path: the path of each layer, or one for
    all, with {n} for n, n + 1, ... tied: the name of each layer's tied weights.
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
        """The path of layer number ``index``, from 0 to ``count`` - 1."""
        if isinstance(self.path, list):
            return self.path[index]
        return PATH_NUMBER.sub(lambda found: str(int(found[1]) + index), self.path)

    def layer_ids(self) -> range:
        return range(self.first_id, self.first_id + self.count)


def expand(
    chains: Sequence[Chain], drawn: schema.GraphTable, types: Mapping[str, schema.LayerType | None], faults: Faults
) -> tuple[tuple[Layer, ...], tuple[Edge, ...], tuple[Tensor, ...]] | None:
    """All layers, edges and tensors, in order; None, with the faults noted, if the graph is invalid or too large.

    ``types`` may hold None for a type with faults of its own; the graph is still checked.
    """
    layer_count = sum(chain.count for chain in chains)
    edge_count = sum(chain.count * len(chain.inputs) for chain in chains) + len(drawn.edges)
    if not graph.check_size(layer_count, edge_count, faults, "layers", "layers"):
        return None
    ids = [graph.NamedId(layer, path_of("layers", chain.label)) for chain in chains for layer in chain.layer_ids()]
    inputs = list(_inputs(chains))
    last_id = {chain.label: chain.last_id for chain in chains}
    others = [
        graph.NamedEdge(last_id[edge.source], last_id[edge.target], f"graph.edges[{index}]")
        for index, edge in enumerate(drawn.edges)
    ]
    ends = [[last_id[label] for label in tensor.layers] for tensor in drawn.tensors]
    named = {f"graph.tensors[{index}].layers": layers for index, layers in enumerate(ends)}
    graph.check_tensors(named, [layer.id for layer in ids], faults)
    neighbours = graph.check_graph(ids, [edge for edge, _ in inputs] + others, faults, "layers")
    kind_of = {layer: types.get(chain.type_key) for chain in chains for layer in chain.layer_ids()}
    sound = {layer: kind for layer, kind in kind_of.items() if kind is not None}
    if faults or not _check_sync(chains, sound, neighbours, faults):
        return None
    edges = [Edge(edge.source, edge.target, _at(sound[edge.target].inputs, position)) for edge, position in inputs]
    edges += [
        Edge(edge.source, edge.target, costed.cost_bytes) for edge, costed in zip(others, drawn.edges, strict=True)
    ]
    tensors = (Tensor(tuple(x), t.forward, t.backward) for x, t in zip(ends, drawn.tensors, strict=True))
    layers = tuple(_layers(chains, sound, neighbours, faults))
    return None if faults else (layers, tuple(edges), tuple(tensors))


def _inputs(chains: Sequence[Chain]) -> Iterator[tuple[graph.NamedEdge, int]]:
    """Every edge in an entry's inputs, with its position among them."""
    last_id = {chain.label: chain.last_id for chain in chains}
    for chain in chains:
        path = path_of("layers", chain.label, "inputs")
        before = chain.before_id
        for layer in chain.layer_ids():
            for position, label in enumerate(chain.inputs):
                source = before if label == schema.PREVIOUS and before is not None else last_id[label]
                yield graph.NamedEdge(source, layer, f"{path}[{position}]"), position
            before = layer


def _check_sync(
    chains: Sequence[Chain], kind_of: Mapping[int, schema.LayerType], neighbours: graph.Neighbours, faults: Faults
) -> bool:
    """Whether lists of sync sizes match the edges, and the number of all figures is within the limits."""
    tmpcs = sync_figures = 0
    for chain in chains:
        for layer in chain.layer_ids():
            kind = kind_of[layer]
            arriving, leaving = len(neighbours.predecessors[layer]), len(neighbours.successors[layer])
            rows = sum(len(row.degrees) for row in kind.tmpcs)
            tmpcs += rows
            sync_figures += rows * (arriving + leaving)
            for index, row in enumerate(kind.tmpcs):
                row_path = f"{path_of('types', chain.type_key)}.tmpcs[{index}]"
                for sizes, edges, what, where in [
                    (row.forward_sync_bytes, arriving, "arrive at", f"{row_path}.forward_sync"),
                    (row.backward_sync_bytes, leaving, "leave", f"{row_path}.backward_sync"),
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


def _layers(
    chains: Sequence[Chain], kind_of: Mapping[int, schema.LayerType], neighbours: graph.Neighbours, faults: Faults
) -> Iterator[Layer]:
    """The layers. Passes that do not add up to a row's time are noted once for each row."""
    taken: Counter[str] = Counter()
    wrong: set[str] = set()
    for chain in chains:
        for number, layer in enumerate(chain.layer_ids()):
            kind = kind_of[layer]
            tmpcs: dict[int, list[Tmpc]] = {}
            for index, row in enumerate(kind.tmpcs):
                tmpc = _tmpc(row, taken[chain.type_key], neighbours.predecessors[layer], neighbours.successors[layer])
                row_path = f"{path_of('types', chain.type_key)}.tmpcs[{index}]"
                if (tmpc.forward_s is not None or tmpc.weight_s is not None) and row_path not in wrong:
                    found_before = len(faults.found)
                    graph.check_passes(tmpc, lambda name, at=row_path: f"{at}.{schema.name_in_rows(name)}", faults)  # type: ignore[misc]
                    if len(faults.found) > found_before:
                        wrong.add(row_path)
                for t in row.degrees:
                    tmpcs.setdefault(t, []).append(tmpc)
            taken[chain.type_key] += 1
            yield Layer(
                layer,
                chain.type_key if kind.name is None else kind.name,
                {t: tuple(listed) for t, listed in tmpcs.items()},
                chain.layer_path(number),
                chain.tied,
                kind.experts or 0,
                kind.key_heads or 0,
                kind.predictor,
            )


def _tmpc(row: schema.Row, turn: int, before: Sequence[int], after: Sequence[int]) -> Tmpc:
    """The row for the layer with index ``turn`` (from 0) of its type."""
    said: dict[str, Any] = vars(row) | {
        name: times[turn % len(times)] for name in schema.TIMES if isinstance(times := getattr(row, name), list)
    }
    del said["t"]
    said["forward_sync_bytes"] = {layer: _at(row.forward_sync_bytes, index) for index, layer in enumerate(before)}
    said["backward_sync_bytes"] = {layer: _at(row.backward_sync_bytes, index) for index, layer in enumerate(after)}
    said["recompute"] = row.id == RECOMPUTE_ID if row.recompute is None else row.recompute
    return Tmpc(**said)


def _at(sizes: float | list[float], position: int) -> float:
    return sizes[position] if isinstance(sizes, list) else sizes
