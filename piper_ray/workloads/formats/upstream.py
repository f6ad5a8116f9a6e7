"""Piper's own JSON workload (https://github.com/msr-fiddle/piper), read and written.

In contrast to upstream's reader, both spellings of N are accepted; ``edges`` and empty sync tables may be left out; a
top-level ``name`` and a TMPC's ``recompute`` are read (and written only if the id alone does not determine it). Fields
that upstream's model does not have are written only if they are used: a TMPC's ``memoryUsageShared`` and
``leastDataParallelDegree``; a list ``tensors`` of ``{"nodes": [ids], "forwardBytes": x, "backwardBytes": y}``; a TMPC's
``forwardTimePerSample`` (and ``backwardTimePerSample`` if it is not simply the rest of ``timePerSample``) and
``weightTimePerSample``, the part of the backward pass that computes gradients of weights; a node's ``path``, the
module's name in the user's model, ``tied``, a name that all nodes with the same weights share, ``experts``, the number
of experts that its tokens are routed to, ``keyHeads``, of keys and values in its attention, and ``predictor``, true for
multi-token prediction; ``model``, the trained model and how it is trained (see ``surroundings``);
``samplesPerMicrobatch`` and ``tokensPerSample``; ``schedule``, ``chunks`` and ``group``; ``measuredThreads``, of the
CPU that times were measured on; ``innerLinks``, a list of ``{"devices": 8, "bandwidth": x}`` for links within groups of
devices, maybe with an ``uplink`` that a group shares, while ``bandwidth`` belongs to the link that joins all; and
``devicesPerNode`` if the first of these joins several nodes. Devices of several kinds are a list ``kinds``, which
replaces ``maxDevices`` and so on; each kind has these keys and a ``name``. ``bandwidthBetween`` joins stages on
different kinds, and a node's ``TMPCs`` are then an object of such objects, one for each kind.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from piper_ray.model import limits
from piper_ray.model.instance import Edge, Instance, Layer, Tensor, Tmpc
from piper_ray.model.passes import RECOMPUTE_ID
from piper_ray.workloads.formats import graph
from piper_ray.workloads.formats.faults import Faults, path_of, quoted, shown
from piper_ray.workloads.formats.fields import DEGREE_WORDS, Count, Degree, Figure, LayerId, Open
from piper_ray.workloads.formats.surroundings import (
    Quantities,
    kind_names,
    kinds_of,
    paths_in,
    read_surroundings,
    surroundings_of,
)

KEYS = frozenset(
    {"nodes", "edges", "maxDevices", "maxMemoryPerDevice", "bandwidth", "mbsInBatch", "maxBatchSize", "kinds"}
)

_PATHS = paths_in("piper")
_DEGREE_KEY = re.compile(r"[1-9][0-9]{0,8}")
_SYNC_WORDS = "an object of finite numbers >= 0"


class _UpstreamNode(Open):
    """A node without its TMPCs, which are read one by one, so that one fault does not hide the others."""

    id: LayerId
    name: str | None = Field(default=None, description="a text")
    path: str = Field(default="", description="a text")
    tied: str = Field(default="", description="a text")
    experts: Count | None = 0
    key_heads: Count | None = Field(default=0, alias="keyHeads")
    predictor: bool = Field(default=False, description="true or false")


class _Tmpc(Open):
    id: str = Field(description="a text")
    time_per_sample_s: Figure = Field(alias="timePerSample")
    weights_bytes: Figure = Field(alias="parameterSize")
    activation_bytes: Figure = Field(alias="memoryUsageA")
    fixed_bytes: Figure = Field(alias="memoryUsageB")
    forward_sync_bytes: dict[str, Figure] = Field(default={}, alias="syncTimeFw", description=_SYNC_WORDS)
    backward_sync_bytes: dict[str, Figure] = Field(default={}, alias="syncTimeBw", description=_SYNC_WORDS)
    recompute: bool | None = Field(default=None, description="true or false")
    shared_bytes: Figure = Field(default=0.0, alias="memoryUsageShared")
    least_data_parallel_degree: Degree = Field(default=1, alias="leastDataParallelDegree")
    forward_s: Figure | None = Field(default=None, alias="forwardTimePerSample")
    backward_s: Figure | None = Field(default=None, alias="backwardTimePerSample")
    weight_s: Figure | None = Field(default=None, alias="weightTimePerSample")


class _Tensor(Open):
    nodes: list[LayerId] = Field(description="a list of the ids of layers")
    forward_bytes: Figure = Field(default=0.0, alias="forwardBytes")
    backward_bytes: Figure = Field(default=0.0, alias="backwardBytes")


class _UpstreamEdge(Open):
    source: LayerId = Field(alias="sourceId", description="the id of a layer")
    target: LayerId = Field(alias="destId", description="the id of a layer")
    communication_bytes: Figure = Field(alias="communicationCost")


class _SyncEdges:
    """The edges that a layer's sync tables must cover: {key in the table: neighbour's id}, in their order."""

    def __init__(self, layer: int, neighbours: graph.Neighbours) -> None:
        self.layer = layer
        self.forward = {str(u): u for u in neighbours.predecessors[layer]}
        self.backward = {str(w): w for w in neighbours.successors[layer]}


def read_upstream(document: Mapping[str, object], overrides: Quantities, name: str, faults: Faults) -> Instance | None:
    """The instance that ``document`` describes; None, with the faults noted, if it is not valid."""
    surroundings = read_surroundings(document, _paths(document, overrides, faults), overrides, name, faults)
    if "nodes" not in document:
        faults.at("nodes", "missing; expected a list of layers")
    nodes, edges = _list(document, "nodes", faults), _list(document, "edges", faults)
    if nodes is None or edges is None or not graph.check_size(len(nodes), len(edges), faults, "nodes", "edges"):
        return None
    neighbours = _read_graph(nodes, edges, faults)
    kinds = kind_names(document.get("kinds"))
    layers = [_read_node(node, f"nodes[{index}]", neighbours, kinds, faults) for index, node in enumerate(nodes)]
    drawn = [faults.model(_UpstreamEdge, edge, f"edges[{index}]") for index, edge in enumerate(edges)]
    tensors = _read_tensors(document, [layer.id for layer in layers if layer is not None], faults)
    if faults:
        return None
    return Instance(
        layers=tuple(layer for layer in layers if layer is not None),
        edges=tuple(Edge(**vars(edge)) for edge in drawn if edge is not None),
        tensors=tensors,
        **surroundings,
    )


def _read_tensors(document: Mapping[str, object], ids: Sequence[int], faults: Faults) -> tuple[Tensor, ...]:
    listed = _list(document, "tensors", faults) or ()
    read = [faults.model(_Tensor, tensor, f"tensors[{index}]") for index, tensor in enumerate(listed)]
    if not faults:  # all ids are known
        ends = {f"tensors[{index}].nodes": x.nodes for index, x in enumerate(read) if x is not None}
        graph.check_tensors(ends, ids, faults)
    return tuple(Tensor(tuple(x.nodes), x.forward_bytes, x.backward_bytes) for x in read if x is not None)


def to_upstream(instance: Instance) -> dict[str, object]:
    """The instance as a document in upstream's form, ready for ``json.dump``; loading it returns an equal instance."""
    kinds = kinds_of(instance.cluster, _PATHS)
    document: dict[str, object] = {
        **{_PATHS[what]: value for what, value in surroundings_of(instance).items()},
        **({_PATHS["kinds"]: kinds} if kinds else {}),
        "nodes": [
            {**_said(_UpstreamNode, vars(layer)), "TMPCs": _tmpcs_document(layer, instance)}
            for layer in instance.layers
        ],
        "edges": [_said(_UpstreamEdge, vars(edge)) for edge in instance.edges],
    }
    if instance.tensors:
        document["tensors"] = [
            {"nodes": list(x.layers), "forwardBytes": x.forward_bytes, "backwardBytes": x.backward_bytes}
            for x in instance.tensors
        ]
    return document


def _tmpcs_document(layer: Layer, instance: Instance) -> dict[str, object]:
    """TMPCs by degree; if there are several kinds of devices, by kind and then by degree."""
    neighbours = instance.neighbours[layer.id]

    def of_kind(name: str) -> dict[str, object]:
        rows = {t: [tmpc for tmpc in row if tmpc.kind == name] for t, row in layer.tmpcs.items()}
        return {str(t): [_tmpc_document(tmpc, *neighbours) for tmpc in row] for t, row in rows.items() if row}

    names = [kind.name for kind in instance.cluster.kinds]
    return {name: of_kind(name) for name in names} if names else of_kind("")


def _said(model: type[Open], values: Mapping[str, object], **usual: object) -> dict[str, object]:
    """The fields of a model under the document's names, without those that have their usual value. usual: in place of
    the default."""
    fields = model.model_fields
    usual = {name: field.default for name, field in fields.items()} | usual
    return {field.alias or name: values[name] for name, field in fields.items() if values[name] != usual[name]}


def _tmpc_document(tmpc: Tmpc, before: Sequence[int], after: Sequence[int]) -> dict[str, object]:
    """The TMPC with a figure for every edge of the layer, which upstream's reader requires."""
    tables = {
        "forward_sync_bytes": {str(layer): tmpc.forward_sync_bytes.get(layer, 0.0) for layer in before},
        "backward_sync_bytes": {str(layer): tmpc.backward_sync_bytes.get(layer, 0.0) for layer in after},
    }
    rest_s = None if tmpc.forward_s is None else tmpc.time_per_sample_s - tmpc.forward_s
    usual = {"recompute": tmpc.id == RECOMPUTE_ID, "backward_s": rest_s, **dict.fromkeys(tables)}
    return _said(_Tmpc, vars(tmpc) | tables, **usual)


def _paths(document: Mapping[str, object], overrides: Quantities, faults: Faults) -> Mapping[str, str]:
    """The paths of fields. Upstream's readers use two names for N."""
    if "maxBatchSize" not in document:
        return _PATHS
    if "mbsInBatch" not in document:
        return _PATHS | {"microbatches": "maxBatchSize"}
    one, other = document["mbsInBatch"], document["maxBatchSize"]
    if not _equal_numbers(other, one) and overrides.microbatches is None:
        faults.at(
            "maxBatchSize",
            f"{shown(other)}, but mbsInBatch is {shown(one)}; expected one of the two keys, or the same number in both",
        )
    return _PATHS


def _equal_numbers(one: object, other: object) -> bool:
    return type(one) in (int, float) and type(other) in (int, float) and one == other


def _list(document: Mapping[str, object], key: str, faults: Faults) -> Sequence[object] | None:
    value = document.get(key, [])
    if isinstance(value, (list, tuple)):
        return value
    faults.at(key, f"not a list ({shown(value)}); expected a list")
    return None


def _read_graph(nodes: Sequence[object], edges: Sequence[object], faults: Faults) -> graph.Neighbours | None:
    """The graph, as far as its ids can be read; None if some edge's ends cannot, so that fw and bw cannot be checked.

    Faults of the ids themselves are noted when the nodes and edges are read one by one.
    """
    ids = [
        graph.NamedId(node_id, f"nodes[{index}].id")
        for index, node in enumerate(nodes)
        if (node_id := _id_at(node, "id")) is not None
    ]
    named = [
        graph.NamedEdge(source, target, f"edges[{index}]")
        for index, edge in enumerate(edges)
        if (source := _id_at(edge, "sourceId")) is not None and (target := _id_at(edge, "destId")) is not None
    ]
    complete = len(ids) == len(nodes)
    neighbours = graph.check_graph(ids, named, faults, "edges", ids_complete=complete)
    return neighbours if complete and len(named) == len(edges) else None


def _id_at(item: object, key: str) -> int | None:
    value = item.get(key) if isinstance(item, Mapping) else None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= limits.ID else None


def _read_node(
    raw: object, path: str, neighbours: graph.Neighbours | None, kinds: tuple[Sequence[str], bool], faults: Faults
) -> Layer | None:
    """kinds: as ``kind_names`` returns them."""
    node = faults.model(_UpstreamNode, raw, path)
    if not isinstance(raw, Mapping):
        return None
    path_of_tmpcs, given = f"{path}.TMPCs", raw.get("TMPCs")
    sync = None if node is None or neighbours is None else _SyncEdges(node.id, neighbours)
    tmpcs: dict[int, tuple[Tmpc, ...]] = {}
    rows: list[object] = []
    found_before, (names, complete) = len(faults.found), kinds
    others = [str(name) for name in given if name not in names] if names and isinstance(given, Mapping) else []
    if complete:
        for name in others:
            faults.at(path_of(path_of_tmpcs, name), f"unknown kind; expected one of {', '.join(names)}")
    read = [*names, *([] if complete else others)] or [""] * complete
    for kind in read:
        by_degree, where = given, path_of_tmpcs
        if kind and isinstance(given, Mapping):
            by_degree, where = given.get(kind), path_of(path_of_tmpcs, kind)
        if not isinstance(by_degree, Mapping):
            problem = "missing" if by_degree is None else f"not an object ({shown(by_degree)})"
            faults.at(where, f"{problem}; expected an object of lists of TMPCs, one for each degree")
            if where == path_of_tmpcs:
                break
            continue
        if kind in names and not any(by_degree.values()):
            graph.note_no_tmpc_on(kind, path_of_tmpcs, faults)
        rows += by_degree.values()
        for t, row in _read_degrees(by_degree, where, sync, kind, faults).items():
            tmpcs[t] = tmpcs.get(t, ()) + row
    if len(faults.found) == found_before and read:
        graph.check_some_tmpc(rows, path_of_tmpcs, faults)
    if node is None:
        return None
    name = str(node.id) if node.name is None else node.name
    return Layer(node.id, name, tmpcs, node.path, node.tied, node.experts or 0, node.key_heads or 0, node.predictor)


def _read_degrees(
    by_degree: Mapping[object, object], path: str, sync: _SyncEdges | None, kind: str, faults: Faults
) -> dict[int, tuple[Tmpc, ...]]:
    """The TMPCs of a layer on devices of one kind."""
    tmpcs: dict[int, tuple[Tmpc, ...]] = {}
    for key, listed in by_degree.items():
        degree_path = path_of(path, str(key))
        if not _DEGREE_KEY.fullmatch(str(key)) or int(str(key)) > limits.DEVICES:
            faults.at(degree_path, f"{quoted(str(key))} is no tensor-parallel degree; expected {DEGREE_WORDS}")
        if not isinstance(listed, (list, tuple)):
            faults.at(degree_path, f"not a list ({shown(listed)}); expected a list of TMPCs")
            continue
        read = [_read_tmpc(tmpc, f"{degree_path}[{index}]", sync, kind, faults) for index, tmpc in enumerate(listed)]
        graph.check_tmpc_ids([tmpc.get("id") for tmpc in listed if isinstance(tmpc, Mapping)], degree_path, faults)
        if not faults and read:
            tmpcs[int(str(key))] = tuple(tmpc for tmpc in read if tmpc is not None)
    return tmpcs


def _read_tmpc(raw: object, path: str, sync: _SyncEdges | None, kind: str, faults: Faults) -> Tmpc | None:
    tmpc = faults.model(_Tmpc, raw, path)
    if sync is None:
        return None
    if isinstance(raw, Mapping):  # reads the raw document, so that one wrong figure does not hide a missing entry
        _check_sync(raw.get("syncTimeFw", {}), sync.forward, f"{path}.syncTimeFw", f"{{}} -> {sync.layer}", faults)
        _check_sync(raw.get("syncTimeBw", {}), sync.backward, f"{path}.syncTimeBw", f"{sync.layer} -> {{}}", faults)
    if tmpc is None or faults:
        return None
    said: dict[str, Any] = vars(tmpc) | {
        "forward_sync_bytes": {u: tmpc.forward_sync_bytes[key] for key, u in sync.forward.items()},
        "backward_sync_bytes": {w: tmpc.backward_sync_bytes[key] for key, w in sync.backward.items()},
        "recompute": tmpc.id == RECOMPUTE_ID if tmpc.recompute is None else tmpc.recompute,
    }
    read = Tmpc(**said, kind=kind)
    graph.check_passes(read, lambda name: f"{path}.{_Tmpc.model_fields[name].alias}", faults)
    return read


def _check_sync(table: object, edges: Mapping[str, int], path: str, arrow: str, faults: Faults) -> None:
    """Notes each edge without an entry in ``table``, and each entry without an edge."""
    if not isinstance(table, Mapping):
        return  # the model reports it
    for key in edges:
        if key not in table:
            faults.at(path_of(path, key), f"missing; expected a figure for edge {arrow.format(key)}")
    graph.check_sync_names(table, edges, path, arrow, faults)
