"""Throughput inputs of dnn-partitioning (https://github.com/msr-fiddle/dnn-partitioning), read and written.

The inputs of "Efficient Algorithms for Device Placement of DNN Graph Operators" (Tarnawski et al., NeurIPS 2020). Their
model has accelerators of one kind and CPUs, no replication and no tensor parallelism, and only counts time. So:

- Nodes of one ``colorClass`` share a device, so they form one layer, forward and backward nodes alike. Classes that
  would wait for one another in a circle are merged too; a note lists them.
- Edges between forward nodes order the layers. Edges between backward nodes state the same order reversed, in the
  direction of the backward pass. Files at the level of layers draw them in the direction of the forward pass; the
  direction that fits the forward edges is taken, with a note, and a file that fits neither is refused.
- p = the sum of ``fpgaLatency``, in ms, divided by ``isBackwardNode`` if the file has any backward node; b = the sum of
  ``size``; a = w = 0; one TMPC, at t = 1. K = ``maxFPGAs``, M = ``maxSizePerFPGA``. N is K unless given (with fewer, K
  stages would not be possible), B is 1 GB/s unless given.
- ``cost`` is the time that a node's output takes: paid once on its own device if any other device needs it, and once on
  each that does. So a node that sends to several layers becomes a ``Tensor`` with these ends, of ``cost`` times B
  bytes; plans do not depend on B. Between two layers with an edge the edge carries it: our edges cost 2 c / B, so c is
  half.
- CPUs are not supported: ``maxCPUs`` and ``cpuLatency`` are ignored, and a node that only CPUs can run is refused.
- Weights are unknown, so replicas would synchronise for free: ``--no-data-parallel`` is their model.

We add ``bandwidth`` and ``mbsInBatch``, which their reader ignores, so that a written file reads back unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from graphlib import TopologicalSorter
from itertools import count
from typing import Any

from pydantic import Field

from piper_ray.model.instance import Edge, Instance, Layer, Tensor, Tmpc
from piper_ray.workloads.formats import graph
from piper_ray.workloads.formats.faults import Faults
from piper_ray.workloads.formats.fields import ID_WORDS, Figure, LayerId, Open
from piper_ray.workloads.formats.pipedream_profile import unwritten
from piper_ray.workloads.formats.surroundings import Quantities, paths_in, read_surroundings

KEYS = frozenset({"maxSizePerFPGA", "maxFPGAs", "maxCPUs"})
TMPC_ID = "vanilla"

_PATHS = paths_in("partitioning")
_BANDWIDTH_BYTES_PER_S = 1e9
_MS = 1e-3
_COST_TOLERANCE = 1e-6  # absolute, as in upstream's reader
_SHOWN = 20  # classes of a circle
_FLAG_WORDS = "true, false, 0 or 1"


class _Node(Open):
    id: LayerId
    name: str | None = Field(default=None, description="a text")
    supportedOnFpga: bool | int = Field(description=_FLAG_WORDS)
    fpgaLatency: Figure
    isBackwardNode: bool | int = Field(description=_FLAG_WORDS)
    colorClass: int | None = Field(default=None, description=ID_WORDS)
    size: Figure = 0.0


class _Edge(Open):
    sourceId: LayerId = Field(description="the id of a node")
    destId: LayerId = Field(description="the id of a node")
    cost: Figure


class _NodesAndEdges(Open):
    nodes: list[_Node] = Field(description="a list")
    edges: list[_Edge] = Field(default=[], description="a list")


def read_dnn_partitioning(
    document: Mapping[str, object], overrides: Quantities, name: str, faults: Faults
) -> Instance | None:
    """The instance that ``document`` describes; None, with the faults noted, if it is not valid."""
    paths = _PATHS if "mbsInBatch" in document else _PATHS | {"microbatches": "maxFPGAs"}
    said = {"bandwidth": _BANDWIDTH_BYTES_PER_S, "maxFPGAs": None, **document, "name": str(document.get("name", name))}
    if overrides.devices is not None:
        said["maxFPGAs"] = overrides.devices
    surroundings = read_surroundings(said, paths, overrides, name, faults)
    read = faults.model(_NodesAndEdges, document, "")
    if read is None or not graph.check_size(len(read.nodes), len(read.edges), faults, "nodes", "edges"):
        return None
    nodes = read.nodes
    for index, node in enumerate(nodes):
        if not node.supportedOnFpga:
            faults.at(
                f"nodes[{index}].supportedOnFpga",
                f"node {node.id} runs on CPUs only, which would be lost; expected nodes that an accelerator can run",
            )
    edges = list(dict.fromkeys(read.edges))  # without duplicates, as in upstream's reader
    if not faults:
        _check(nodes, edges, faults)
    if faults:
        return None
    return _instance(nodes, edges, surroundings, faults)


def _check(nodes: Sequence[_Node], edges: Sequence[_Edge], faults: Faults) -> None:
    ids = [graph.NamedId(node.id, f"nodes[{index}].id") for index, node in enumerate(nodes)]
    named = [graph.NamedEdge(edge.sourceId, edge.destId, f"edges[{index}]") for index, edge in enumerate(edges)]
    graph.check_graph(ids, named, faults, "edges")
    backward = {node.id: bool(node.isBackwardNode) for node in nodes}
    cost_of: dict[int, float] = {}
    for index, edge in enumerate(edges):
        if backward.get(edge.sourceId) and not backward.get(edge.destId, True):
            faults.at(
                f"edges[{index}]",
                f"runs from backward node {edge.sourceId} to forward node {edge.destId}; expected none that does",
            )
        if abs(cost_of.setdefault(edge.sourceId, edge.cost) - edge.cost) > _COST_TOLERANCE:
            faults.at(
                f"edges[{index}].cost",
                f"{edge.cost}, but node {edge.sourceId} has an edge of {cost_of[edge.sourceId]}; "
                "expected one cost for all edges of a node",
            )


def _instance(
    nodes: Sequence[_Node], edges: Sequence[_Edge], surroundings: Mapping[str, Any], faults: Faults
) -> Instance | None:
    class_of = _class_of(nodes)
    found = _arcs(nodes, edges, class_of, faults)
    if found is None:
        return None
    pairs, notes_of_arcs = found
    group_of, notes = _without_circles(class_of, pairs)
    members: dict[int, list[_Node]] = {}
    for node in nodes:
        members.setdefault(group_of[node.id], []).append(node)
    drawn = {(group_of[one], group_of[other]) for one, other in pairs if group_of[one] != group_of[other]}
    layer_id = {
        group: min((node.id for node in of_group if not node.isBackwardNode), default=of_group[0].id)
        for group, of_group in members.items()
    }
    sent = _sent_bytes(nodes, edges, group_of, surroundings["cluster"].bandwidth_bytes_per_s * _MS)
    links = []
    for tail, head in sorted(drawn, key=lambda ends: (layer_id[ends[0]], layer_id[ends[1]])):
        # An edge is charged twice its bytes, for the forward and the backward pass.
        links.append(Edge(layer_id[tail], layer_id[head], sum(sent.pop(frozenset((tail, head)), (0.0, 0.0))) / 2.0))
    tensors = [
        Tensor(tuple(sorted(layer_id[group] for group in ends)), forward, backward)
        for ends, (forward, backward) in sent.items()
        if forward + backward > 0.0
    ]
    trains = any(node.isBackwardNode for node in nodes)
    layers = []
    for group in _forward_order(members, drawn):
        layer = layer_id[group]
        first = next(node for node in members[group] if node.id == layer)
        tmpc = Tmpc(
            TMPC_ID,
            sum(node.fpgaLatency for node in members[group]) * _MS,
            0.0,
            0.0,
            sum(node.size for node in members[group]),
            forward_s=_latency_s(members[group], backward=False) if trains else None,
            backward_s=_latency_s(members[group], backward=True) if trains else None,
        )
        layers.append(Layer(layer, str(layer) if first.name is None else first.name, {1: (tmpc,)}))
    return Instance(
        tuple(layers),
        tuple(links),
        tensors=tuple(sorted(tensors, key=lambda tensor: tensor.layers)),
        notes=(*notes_of_arcs, *notes),
        **surroundings,
    )


def _latency_s(nodes: Sequence[_Node], *, backward: bool) -> float:
    return sum(node.fpgaLatency for node in nodes if bool(node.isBackwardNode) is backward) * _MS


def _class_of(nodes: Sequence[_Node]) -> dict[int, int]:
    """The colour class of each node, named by the id of its first node."""
    first_of_class: dict[int, int] = {}
    return {
        node.id: node.id if node.colorClass is None else first_of_class.setdefault(node.colorClass, node.id)
        for node in nodes
    }


def _arcs(
    nodes: Sequence[_Node], edges: Sequence[_Edge], class_of: Mapping[int, int], faults: Faults
) -> tuple[Sequence[tuple[int, int]], Sequence[str]] | None:
    """Pairs of classes whose first must not come after the second, in the direction of the forward pass; and notes.

    Forward edges are taken as they are. Backward edges are drawn in the direction of the backward pass or, in some
    files, of the forward pass; the direction in which no class waits for itself is taken. None, with the fault noted,
    if there is none.
    """
    is_backward = {node.id: bool(node.isBackwardNode) for node in nodes}
    forward_classes = {class_of[node] for node, backward_one in is_backward.items() if not backward_one}
    forward: list[tuple[int, int]] = []
    backward: list[tuple[int, int]] = []  # drawn in the direction of the backward pass, reversed
    for edge in edges:
        tail, head = class_of[edge.sourceId], class_of[edge.destId]
        if tail == head:
            continue
        if is_backward[edge.sourceId]:
            backward.append((head, tail))
        elif not is_backward[edge.destId]:
            forward.append((tail, head))
    # A class of backward nodes only has no position in the forward pass that its edges could contradict.
    telling = [ends for ends in backward if forward_classes.issuperset(ends)]
    circles = _circles(forward)
    if _circles([*forward, *telling]) == circles:
        return [*forward, *backward], ()
    turned = [(head, tail) for tail, head in telling]
    if _circles([*forward, *turned]) == circles:
        note = "the edges between backward nodes are drawn as the forward pass runs; they are taken the other way round"
        return [*forward, *((head, tail) for tail, head in backward)], (note,)
    faults.at(
        "edges",
        "some edges between backward nodes run as the forward edges between the same classes do, others against them; "
        "expected all against them (or all along, as some files have it)",
    )
    return None


def _circles(arcs: Iterable[tuple[int, int]]) -> set[frozenset[int]]:
    """The sets of classes that wait for themselves: strongly connected, with more than one class."""
    members: dict[int, set[int]] = {}
    for v, component in strong_components(_successors(arcs)).items():
        members.setdefault(component, set()).add(v)
    return {frozenset(group) for group in members.values() if len(group) > 1}


def _successors(arcs: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    successors: dict[int, list[int]] = {}
    for tail, head in arcs:
        successors.setdefault(tail, []).append(head)
        successors.setdefault(head, [])
    return successors


def _without_circles(
    class_of: Mapping[int, int], pairs: Iterable[tuple[int, int]]
) -> tuple[dict[int, int], tuple[str, ...]]:
    """The group of each node: its class, or the classes that wait for one another; and a note on each of the latter."""
    component = strong_components(_successors(pairs))
    group_of = {node: component.get(own, own) for node, own in class_of.items()}
    merged: dict[int, set[int]] = {}
    for node, own in class_of.items():
        merged.setdefault(group_of[node], set()).add(own)
    notes = tuple(
        f"{len(owns)} colour classes wait for one another in a circle and become one layer: those of nodes "
        + ", ".join(str(own) for own in sorted(owns)[:_SHOWN])
        + (", ..." if len(owns) > _SHOWN else "")
        for owns in merged.values()
        if len(owns) > 1
    )
    return group_of, notes


def _sent_bytes(
    nodes: Sequence[_Node], edges: Sequence[_Edge], group_of: Mapping[int, int], bytes_per_cost: float
) -> dict[frozenset[int], tuple[float, float]]:
    """For each set of groups the bytes that their nodes send to one another: those of forward nodes, those of backward
    nodes.

    A node pays once for its output on its own device, and once on each other device that needs it.
    """
    groups: dict[int, set[int]] = {}
    cost: dict[int, float] = {}
    for edge in edges:
        groups.setdefault(edge.sourceId, {group_of[edge.sourceId]}).add(group_of[edge.destId])
        cost[edge.sourceId] = edge.cost
    sent: dict[frozenset[int], tuple[float, float]] = {}
    for node in nodes:
        ends = frozenset(groups.get(node.id, ()))
        if len(ends) > 1:
            size = cost[node.id] * bytes_per_cost
            forward, backward = sent.get(ends, (0.0, 0.0))
            sent[ends] = (forward, backward + size) if node.isBackwardNode else (forward + size, backward)
    return sent


def _forward_order(groups: Iterable[int], arcs: Iterable[tuple[int, int]]) -> list[int]:
    """The groups in an order in which every arc runs forwards."""
    sorter = TopologicalSorter(dict.fromkeys(groups, ()))
    for tail, head in arcs:
        sorter.add(head, tail)
    sorter.prepare()
    ready: list[int] = []
    order = []
    while sorter.is_active():
        ready += sorted(sorter.get_ready(), reverse=True)
        order.append(ready.pop())
        sorter.done(order[-1])
    return order


def strong_components(successors: Mapping[int, Iterable[int]]) -> dict[int, int]:
    """For each vertex a vertex that represents its strongly connected component (Tarjan's algorithm, without
    recursion)."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stands_for: dict[int, int] = {}
    stack: list[int] = []
    for root in successors:
        if root in index:
            continue
        index[root] = low[root] = len(index)
        stack.append(root)
        walk = [(root, iter(successors[root]))]
        while walk:
            v, rest = walk[-1]
            w = next(rest, None)
            if w is not None:
                if w not in index:
                    index[w] = low[w] = len(index)
                    stack.append(w)
                    walk.append((w, iter(successors[w])))
                elif w not in stands_for:
                    low[v] = min(low[v], index[w])
                continue
            walk.pop()
            if walk:
                low[walk[-1][0]] = min(low[walk[-1][0]], low[v])
            if low[v] == index[v]:
                while v not in stands_for:
                    stands_for[stack.pop()] = v
    return stands_for


def losses(instance: Instance) -> list[str]:
    """What this form cannot hold of ``instance``, in words."""
    found = unwritten(instance)
    tmpcs = [tmpc for layer in instance.layers for row in layer.tmpcs.values() for tmpc in row]
    if any(tmpc.weights_bytes for tmpc in tmpcs):
        found.append("weights to synchronise (parameterSize)")
    if any(tmpc.activation_bytes for tmpc in tmpcs):
        found.append("memory for each microbatch in flight (memoryUsageA)")
    if sum(tmpc.forward_s is not None for tmpc in tmpcs) not in (0, len(tmpcs)):
        found.append("how the time of some layers parts into a forward and a backward pass, and of others does not")
    if _costs(instance) is None:
        found.append("tensors other than one that a layer sends to all layers after it, and each of these takes once")
    return found


def _costs(instance: Instance) -> dict[int, float] | None:
    """For each layer the cost of its single output, in bytes of both directions; None if the tensors do not have this
    form."""
    after: dict[int, dict[int, float]] = {layer.id: {} for layer in instance.layers}
    for edge in instance.edges:
        after[edge.source][edge.target] = edge.communication_bytes
    costs: dict[int, float] = {}
    ends_of = {frozenset((source, *heads)): source for source, heads in after.items() if heads}
    for tensor in instance.tensors:
        source = ends_of.get(frozenset(tensor.layers))
        if source is None or source in costs or tensor.backward_bytes > 0.0:
            return None
        costs[source] = tensor.forward_bytes
    for source, heads in after.items():
        if any(heads.values()):
            if len(heads) > 1 or source in costs:
                return None
            costs[source] = 2.0 * sum(heads.values())
    return costs


def to_dnn_partitioning(instance: Instance) -> dict[str, object]:
    """An instance without ``losses`` as a document. Each layer becomes a forward node, and also a backward node of the
    same class if both passes are known. Loading it gives the same instance, its times and sizes up to rounding.
    """
    cost_bytes = _costs(instance)
    assert cost_bytes is not None
    per_byte = 1.0 / (instance.bandwidth_bytes_per_s * _MS)
    unused = (number for number in count() if number not in instance.layer_by_id)
    nodes = []
    for index, layer in enumerate(instance.layers):
        ((tmpc,),) = layer.tmpcs.values()
        if tmpc.backward_s is None:
            nodes.append(_node(layer.id, layer.name, tmpc.time_per_sample_s, tmpc.fixed_bytes))
        else:
            color = {"colorClass": index}
            nodes.append(_node(layer.id, layer.name, tmpc.forward_s or 0.0, tmpc.fixed_bytes) | color)
            backward = _node(next(unused), layer.name, tmpc.backward_s, 0.0)
            nodes.append(backward | color | {"isBackwardNode": True})
    return {
        "name": instance.name,
        "maxSizePerFPGA": instance.memory_bytes,
        "maxFPGAs": instance.devices,
        "maxCPUs": 0,
        "bandwidth": instance.bandwidth_bytes_per_s,
        "mbsInBatch": instance.microbatches,
        "nodes": nodes,
        "edges": [
            {"sourceId": edge.source, "destId": edge.target, "cost": cost_bytes.get(edge.source, 0.0) * per_byte}
            for edge in instance.edges
        ],
    }


def _node(node_id: int, name: str, time_s: float, size_bytes: float) -> dict[str, object]:
    latency = time_s / _MS
    return {"id": node_id, "name": name, "supportedOnFpga": True, "cpuLatency": latency, "fpgaLatency": latency,
            "isBackwardNode": False, "size": size_bytes}  # fmt: skip
