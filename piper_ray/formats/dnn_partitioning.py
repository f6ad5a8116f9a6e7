"""Throughput inputs of dnn-partitioning (https://github.com/msr-fiddle/dnn-partitioning), read and written.

The inputs of "Efficient Algorithms for Device Placement of DNN Graph Operators" (Tarnawski et al., NeurIPS 2020). Their
model has devices of one kind beside CPUs, no replication and no tensor parallelism, and counts time only. So:

- Nodes of one ``colorClass`` share a device: they are one layer, forward and backward ones alike. So are layers that
  would otherwise wait for one another in a circle.
- p = the sum of ``fpgaLatency``, in ms; b = the sum of ``size``; a = w = 0; one TMPC, at t = 1. K = ``maxFPGAs``,
  M = ``maxSizePerFPGA``. N is K unless given (no fewer would allow K stages), B is 1 GB/s unless given.
- An edge between layers runs as its forward nodes do, against its backward ones. ``cost`` is time, paid on both sides,
  once for each node that sends to the layer; ours is 2 c / B for forwards and backwards together, so c is half the
  sum of the costs times B, and plans do not depend on B. Theirs charges a sender once for all its layers on a
  device, and once for leaving its own; ours once for each layer: the same where no tensor has two consumers apart.
- CPUs are not taken: ``maxCPUs`` and ``cpuLatency`` are passed over, and a node that only CPUs can run is refused.
- Weights are not known, so replicas would synchronise for nothing: ``--no-data-parallel`` is their model.

What we add and they pass over: ``bandwidth`` and ``mbsInBatch``, so that what is written here reads back as it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pydantic import Field

from piper_ray.formats.faults import Faults, shown
from piper_ray.formats.fields import FIGURE_WORDS, ID_WORDS, Cluster, Figure, LayerId, Open, read_cluster
from piper_ray.formats.graph import NamedEdge, NamedId, check_graph, check_size
from piper_ray.model import Edge, Instance, Layer, Tmpc

KEYS = frozenset({"maxSizePerFPGA", "maxFPGAs", "maxCPUs"})
TMPC_ID = "vanilla"

_PATHS = {
    "devices": "maxFPGAs",
    "microbatches": "mbsInBatch",
    "memory_bytes": "maxSizePerFPGA",
    "bandwidth_bytes_per_s": "bandwidth",
}
_BANDWIDTH_BYTES_PER_S = 1e9
_MS = 1e-3
_COST_TOLERANCE = 1e-6  # absolute, as upstream's reader has it
_FLAG_WORDS = "true, false, 0 or 1"


class _Node(Open):
    id: LayerId = Field(description=ID_WORDS)
    name: str | None = Field(default=None, description="a text")
    supportedOnFpga: bool | int = Field(description=_FLAG_WORDS)
    fpgaLatency: Figure = Field(description=FIGURE_WORDS)
    isBackwardNode: bool | int = Field(description=_FLAG_WORDS)
    colorClass: int | None = Field(default=None, description=ID_WORDS)
    size: Figure = Field(default=0.0, description=FIGURE_WORDS)


class _Edge(Open):
    sourceId: LayerId = Field(description="the id of a node")
    destId: LayerId = Field(description="the id of a node")
    cost: Figure = Field(description=FIGURE_WORDS)


def read_dnn_partitioning(
    document: Mapping[str, object], overrides: Cluster, name: str, faults: Faults
) -> Instance | None:
    """The instance that ``document`` describes; None, with the faults noted, if it is not sound."""
    given = {quantity: (key, document[key]) for quantity, key in _PATHS.items() if key in document}
    given.setdefault("bandwidth_bytes_per_s", ("bandwidth", _BANDWIDTH_BYTES_PER_S))
    devices = overrides.devices or document.get("maxFPGAs")
    given.setdefault("microbatches", ("maxFPGAs", devices))
    cluster = read_cluster(given, _PATHS, overrides, faults, units=False)
    lists = [document.get("nodes"), document.get("edges", [])]
    for key, value in zip(("nodes", "edges"), lists, strict=True):
        if not isinstance(value, (list, tuple)):
            faults.at(key, f"not a list ({shown(value)}); expected a list")
    raw_nodes, raw_edges = (value if isinstance(value, (list, tuple)) else [] for value in lists)
    if not check_size(len(raw_nodes), len(raw_edges), faults, "nodes", "edges"):
        return None
    nodes = _read_nodes(raw_nodes, faults)
    edges = [edge for i, raw in enumerate(raw_edges) if (edge := faults.model(_Edge, raw, f"edges[{i}]")) is not None]
    edges = list(
        {(edge.sourceId, edge.destId, edge.cost): edge for edge in edges}.values()
    )  # a set, as upstream has it
    if not faults:
        _check(nodes, edges, faults)
    if faults:
        return None
    return _instance(nodes, edges, cluster, str(document.get("name", name)))


def _read_nodes(raw: Sequence[object], faults: Faults) -> list[_Node]:
    nodes = []
    for index, item in enumerate(raw):
        node = faults.model(_Node, item, f"nodes[{index}]")
        if node is None:
            continue
        if not node.supportedOnFpga:
            faults.at(
                f"nodes[{index}].supportedOnFpga",
                f"node {node.id} runs on CPUs only, which would be lost; expected nodes that an accelerator can run",
            )
        nodes.append(node)
    return nodes


def _check(nodes: Sequence[_Node], edges: Sequence[_Edge], faults: Faults) -> None:
    ids = [NamedId(node.id, f"nodes[{index}].id") for index, node in enumerate(nodes)]
    named = [NamedEdge(edge.sourceId, edge.destId, f"edges[{index}]") for index, edge in enumerate(edges)]
    check_graph(ids, named, faults, "edges")
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


def _instance(nodes: Sequence[_Node], edges: Sequence[_Edge], cluster: Cluster, name: str) -> Instance:
    group_of = _groups(nodes, edges)
    backward = {node.id: bool(node.isBackwardNode) for node in nodes}
    order = {
        group: place for place, group in enumerate(_forward_order(set(group_of.values()), group_of, backward, edges))
    }
    members: dict[int, list[_Node]] = {}
    for node in nodes:
        members.setdefault(group_of[node.id], []).append(node)
    layer_id = {
        group: min((node.id for node in of_group if not node.isBackwardNode), default=of_group[0].id)
        for group, of_group in members.items()
    }
    costs: dict[tuple[int, int], dict[int, float]] = {}
    for edge in edges:
        one, other = group_of[edge.sourceId], group_of[edge.destId]
        if one != other:
            ends = (one, other) if order[one] < order[other] else (other, one)
            costs.setdefault(ends, {}).setdefault(edge.sourceId, 0.0)
            # Once for each sender; a pair may exchange tensors both ways.
            costs[ends][edge.sourceId] = edge.cost
    assert cluster.bandwidth_bytes_per_s is not None
    bytes_per_cost = cluster.bandwidth_bytes_per_s * _MS / 2.0
    drawn = [
        Edge(layer_id[tail], layer_id[head], sum(of_senders.values()) * bytes_per_cost)
        for (tail, head), of_senders in costs.items()
    ]
    forward: dict[int, dict[int, float]] = {layer: {} for layer in layer_id.values()}
    back: dict[int, dict[int, float]] = {layer: {} for layer in layer_id.values()}
    for link in drawn:
        forward[link.target][link.source] = 0.0
        back[link.source][link.target] = 0.0
    layers = []
    for group, of_group in sorted(members.items(), key=lambda item: order[item[0]]):
        layer = layer_id[group]
        first = next(node for node in of_group if node.id == layer)
        tmpc = Tmpc(
            TMPC_ID,
            sum(node.fpgaLatency for node in of_group) * _MS,
            0.0,
            0.0,
            sum(node.size for node in of_group),
            forward[layer],
            back[layer],
        )
        layers.append(Layer(layer, str(layer) if first.name is None else first.name, {1: (tmpc,)}))
    return Instance(tuple(layers), tuple(drawn), name=name, **vars(cluster))


def _groups(nodes: Sequence[_Node], edges: Sequence[_Edge]) -> dict[int, int]:
    """The group of each node, by the id of one of its nodes: colour classes, with what waits in circles joined."""
    first_of_class: dict[int, int] = {}
    parent = {
        node.id: node.id if node.colorClass is None else first_of_class.setdefault(node.colorClass, node.id)
        for node in nodes
    }
    backward = {node.id: bool(node.isBackwardNode) for node in nodes}
    arcs: dict[int, set[int]] = {group: set() for group in parent.values()}
    for tail, head in _arcs(parent, backward, edges):
        arcs[tail].add(head)
    component = strong_components(arcs)
    return {node: component[group] for node, group in parent.items()}


def _arcs(
    group_of: Mapping[int, int], backward: Mapping[int, bool], edges: Iterable[_Edge]
) -> Iterable[tuple[int, int]]:
    """What must not run backwards: edges between forward nodes, and those between backward nodes turned round."""
    for edge in edges:
        one, other = group_of[edge.sourceId], group_of[edge.destId]
        if one != other and backward[edge.sourceId] == backward[edge.destId]:
            yield (other, one) if backward[edge.sourceId] else (one, other)


def _forward_order(
    groups: set[int], group_of: Mapping[int, int], backward: Mapping[int, bool], edges: Sequence[_Edge]
) -> list[int]:
    """The groups so that every arc runs forwards. A tensor from forward to backward nodes goes along this order."""
    successors: dict[int, set[int]] = {group: set() for group in sorted(groups)}
    for tail, head in _arcs(group_of, backward, edges):
        successors[tail].add(head)
    waiting = dict.fromkeys(successors, 0)
    for heads in successors.values():
        for head in heads:
            waiting[head] += 1
    ready = [group for group, count in reversed(waiting.items()) if count == 0]
    order = []
    while ready:
        order.append(ready.pop())
        for head in sorted(successors[order[-1]], reverse=True):
            waiting[head] -= 1
            if waiting[head] == 0:
                ready.append(head)
    return order


def strong_components(successors: Mapping[int, Iterable[int]]) -> dict[int, int]:
    """For each vertex one that stands for its strongly connected component (Tarjan's algorithm, without recursion)."""
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
    """What of ``instance`` this form cannot hold, in words."""
    found = []
    tmpcs = [(t, tmpc) for layer in instance.layers for t, listed in layer.tmpcs.items() for tmpc in listed]
    if any(t > 1 for t, _ in tmpcs):
        found.append("tensor parallelism (degrees above 1)")
    if any(len(listed) > 1 for layer in instance.layers for listed in layer.tmpcs.values()):
        found.append("the choice between several TMPCs of a layer")
    if any(tmpc.id != TMPC_ID or tmpc.recompute for _, tmpc in tmpcs):
        found.append(f'the ids of TMPCs (all are "{TMPC_ID}")')
    if any(tmpc.weights_bytes for _, tmpc in tmpcs):
        found.append("weights to synchronise (parameterSize)")
    if any(tmpc.activation_bytes for _, tmpc in tmpcs):
        found.append("memory for each microbatch in flight (memoryUsageA)")
    if any(any([*x.forward_sync_bytes.values(), *x.backward_sync_bytes.values()]) for _, x in tmpcs):
        found.append("what crossing an edge costs on top (syncTimeFw, syncTimeBw)")
    sizes: dict[int, set[float]] = {}
    for edge in instance.edges:
        sizes.setdefault(edge.source, set()).add(edge.communication_bytes)
    if any(len(of_source) > 1 for of_source in sizes.values()):
        found.append("different sizes of the tensors that one layer sends")
    return found


def to_dnn_partitioning(instance: Instance) -> dict[str, object]:
    """An instance without ``losses`` as a document: each layer a forward node of its own. Loading it gives the same
    instance, its times and sizes to within rounding."""
    per_byte = 2.0 / (instance.bandwidth_bytes_per_s * _MS)
    nodes = []
    for layer in instance.layers:
        ((tmpc,),) = layer.tmpcs.values()
        latency = tmpc.time_per_sample_s / _MS
        nodes.append(
            {"id": layer.id, "name": layer.name, "supportedOnFpga": True, "cpuLatency": latency, "fpgaLatency": latency,
             "isBackwardNode": False, "size": tmpc.fixed_bytes}
        )  # fmt: skip
    return {
        "name": instance.name,
        "maxSizePerFPGA": instance.memory_bytes,
        "maxFPGAs": instance.devices,
        "maxCPUs": 0,
        "bandwidth": instance.bandwidth_bytes_per_s,
        "mbsInBatch": instance.microbatches,
        "nodes": nodes,
        "edges": [
            {"sourceId": edge.source, "destId": edge.target, "cost": edge.communication_bytes * per_byte}
            for edge in instance.edges
        ],
    }
