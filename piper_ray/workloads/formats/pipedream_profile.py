"""PipeDream's profiles (``graph.txt``), read and written: one line for each node, then tab-indented edges.

    node4 -- Embedding(32320, 1024) -- forward_compute_time=0.073, backward_compute_time=6.949, ...
    <tab>node4 -- node5

A profile has neither tensor parallelism nor a cluster: each layer gets one TMPC, at t=1, and the caller gives K, N, M,
B. As in PipeDream's own planner (Narayanan et al., SOSP 2019), sources called Input* and then sinks called __getitem__*
are dropped; a __getitem__ that feeds a layer stays. Figures: p = forward + backward time (ms in the file; if no node
has any backward time, the division of p is unknown), w = the parameters, an edge's cost = its source's activation. A
node with several outputs, ``[a; b]``, has their sum as its activation, and sends the sum to each successor too, because
the profile does not say which output goes where.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, TypeAdapter

from piper_ray.model import limits
from piper_ray.model.forms import InFlight
from piper_ray.model.instance import Edge, Instance, Layer, Tmpc
from piper_ray.workloads.formats.faults import Faults, quoted
from piper_ray.workloads.formats.fields import FIGURE_WORDS, Figure
from piper_ray.workloads.formats.graph import NamedEdge, NamedId, check_graph, check_size
from piper_ray.workloads.formats.surroundings import CLUSTER_RULES, Quantities, read_surroundings

TMPC_ID = "vanilla"

_NODE_ID = re.compile(r"node([0-9]{1,15})")
_EDGE_LINE = re.compile(r"\s+node([0-9]{1,15}) -- node([0-9]{1,15})\s*")
# Sums of a few figures must be figures too, and so must twice the weights.
_FIGURE: TypeAdapter[float] = TypeAdapter(Annotated[Figure, Field(le=limits.FIGURE / 4)])
_KEYS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_NODE_WORDS = "node<id> -- <description> -- " + ", ".join(f"{key}=<number>" for key in _KEYS)


@dataclass(frozen=True)
class _ProfileNode:
    id: int
    description: str
    path: str
    time_s: float
    forward_s: float
    backward_s: float
    activation_bytes: float
    weights_bytes: float


def read_profile(text: str, in_flight: InFlight, overrides: Quantities, name: str, faults: Faults) -> Instance | None:
    """The instance that a profile describes; None, with the faults noted, if it is not valid."""
    surroundings = read_surroundings({}, {quantity: quantity for quantity in CLUSTER_RULES}, overrides, name, faults)
    lines = [(f"line {number}", line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not any(_NODE_ID.match(line) for _, line in lines):
        faults.at("", f"not a PipeDream profile; expected lines such as {_NODE_WORDS}")
        return None
    read = [_read_node(path, line, faults) for path, line in lines if not line[0].isspace()]
    nodes = [node for node in read if node is not None]
    edges = list(_read_edges(((path, line) for path, line in lines if line[0].isspace()), faults))
    if not check_size(len(nodes), len(edges), faults, "", ""):
        return None
    ids = [NamedId(node.id, node.path) for node in nodes]
    check_graph(ids, edges, faults, "", ids_complete=len(nodes) == len(read))
    if faults:
        return None
    nodes, edges = _without_ends(nodes, edges)
    if not nodes:
        faults.at("", "no layers other than Input sources and __getitem__ sinks; expected at least one")
        return None
    activation_bytes = {node.id: node.activation_bytes for node in nodes}
    return Instance(
        layers=tuple(_layers(nodes, edges, in_flight)),
        edges=tuple(Edge(edge.source, edge.target, activation_bytes[edge.source]) for edge in edges),
        **surroundings,
    )


def _read_node(path: str, line: str, faults: Faults) -> _ProfileNode | None:
    head, _, rest = line.rstrip().partition(" -- ")
    description, _, figures = rest.rpartition(" -- ")
    if figures.startswith("stage_id="):  # added by PipeDream to a profile that it has planned
        description, _, figures = description.rpartition(" -- ")
    match = _NODE_ID.fullmatch(head)
    if match is None or not description:
        faults.at(path, f"{quoted(line)} is no node; expected {_NODE_WORDS}")
        return None
    given = {key.strip(): value.strip() for key, _, value in (part.partition("=") for part in figures.split(","))}
    read = {key: _read_figure(f"{path}, {key}", given.get(key), faults) for key in _KEYS}
    forward_ms, backward_ms, activation_bytes, weights_bytes = (read[key] for key in _KEYS)
    return _ProfileNode(
        id=int(match[1]),
        description=description,
        path=path,
        time_s=(forward_ms + backward_ms) / 1000.0,
        forward_s=forward_ms / 1000.0,
        backward_s=backward_ms / 1000.0,
        activation_bytes=activation_bytes,
        weights_bytes=weights_bytes,
    )


def _read_figure(path: str, text: str | None, faults: Faults) -> float:
    """A number, or the sum of a list ``[a; b]``; 0.0, with the fault noted, for other texts."""
    if text is None:
        faults.at(path, f"missing; expected {FIGURE_WORDS}")
        return 0.0
    is_list = text.startswith("[") and text.endswith("]") and path.endswith("activation_size")
    parts = text[1:-1].split(";") if is_list else [text]
    figures = [faults.value(_FIGURE, _number(part.strip()), path, FIGURE_WORDS) for part in parts]
    return faults.value(_FIGURE, sum(figure or 0.0 for figure in figures), path, FIGURE_WORDS) or 0.0


def _number(text: str) -> float | str:
    try:
        return text if "_" in text else float(text)
    except ValueError:
        return text


def _read_edges(lines: Iterable[tuple[str, str]], faults: Faults) -> Iterable[NamedEdge]:
    for path, line in lines:
        match = _EDGE_LINE.fullmatch(line)
        if match is None:
            faults.at(path, f"{quoted(line.strip())} is no edge; expected node<id> -- node<id>")
        else:
            yield NamedEdge(int(match[1]), int(match[2]), path)


def _without_ends(nodes: list[_ProfileNode], edges: list[NamedEdge]) -> tuple[list[_ProfileNode], list[NamedEdge]]:
    """The graph without its Input* sources and then without its __getitem__* sinks, each dropped once as in
    PipeDream."""
    nodes, edges = _drop(nodes, edges, "Input", lambda edge: edge.target)
    return _drop(nodes, edges, "__getitem__", lambda edge: edge.source)


def _drop(
    nodes: list[_ProfileNode], edges: list[NamedEdge], prefix: str, inner_end: Callable[[NamedEdge], int]
) -> tuple[list[_ProfileNode], list[NamedEdge]]:
    """Drops the nodes whose description starts with ``prefix`` and that are the ``inner_end`` of no edge."""
    inner = {inner_end(edge) for edge in edges}
    dropped = {node.id for node in nodes if node.description.startswith(prefix) and node.id not in inner}
    return (
        [node for node in nodes if node.id not in dropped],
        [edge for edge in edges if edge.source not in dropped and edge.target not in dropped],
    )


def _layers(nodes: list[_ProfileNode], edges: list[NamedEdge], in_flight: InFlight) -> Iterable[Layer]:
    # Without tensor parallelism nothing is added to an edge's cost: every fw and bw is 0.
    forward: dict[int, dict[int, float]] = {node.id: {} for node in nodes}
    backward: dict[int, dict[int, float]] = {node.id: {} for node in nodes}
    for edge in edges:
        forward[edge.target][edge.source] = 0.0
        backward[edge.source][edge.target] = 0.0
    stashing = in_flight is InFlight.STASHING
    parted = any(node.backward_s > 0.0 for node in nodes)
    for node in nodes:
        tmpc = Tmpc(
            id=TMPC_ID,
            time_per_sample_s=node.time_s,
            weights_bytes=node.weights_bytes,
            activation_bytes=node.activation_bytes + (node.weights_bytes if stashing else 0.0),
            fixed_bytes=0.0 if stashing else 2.0 * node.weights_bytes,
            forward_sync_bytes=forward[node.id],
            backward_sync_bytes=backward[node.id],
            forward_s=node.forward_s if parted else None,
            backward_s=node.backward_s if parted else None,
        )
        yield Layer(node.id, node.description, {1: (tmpc,)})


_NEIGHBOURS = 2
"""How many neighbours of seconds * 1000 are tried on either side to find one that gives the seconds exactly when
divided by 1000."""


def losses(instance: Instance) -> list[str]:
    """What a profile cannot hold of ``instance``, in words. K, N, M and B are never in one."""
    found = unwritten(instance)
    if not _keeps_times(instance):
        found.append("how the time of some layers parts into a forward and a backward pass")
    rule = in_flight_rule(instance)
    if rule is None:
        found.append("memory that is neither an activation and two versions of the weights nor one of each in flight")
    else:
        activation = {layer.id: _activation_bytes(x, rule) for layer in instance.layers for x in layer.tmpcs.get(1, ())}
        if any(edge.communication_bytes != activation.get(edge.source) for edge in instance.edges):
            found.append("tensors that are not of the size of their layer's activation")
    if instance.tensors:
        found.append("tensors that each stage sends or receives once")
    dropped = [
        layer.name
        for layer in instance.layers
        for prefix, drawn in zip(("Input", "__getitem__"), instance.neighbours[layer.id], strict=True)
        if layer.name.startswith(prefix) and not drawn
    ]
    if dropped:
        found.append(f'layers that PipeDream drops by their name ("{dropped[0]}")')
    if any("\n" in layer.name or not layer.name.strip() or " -- " in layer.name for layer in instance.layers):
        found.append('names of layers that are empty or hold " -- " or a line break')
    if any(not 0 <= layer.id < 10**15 for layer in instance.layers):
        found.append("ids of layers that are negative or have more than 15 digits")
    return found


_LAYER_WORDS = {
    "path": "the paths of layers in the user's model",
    "tied": "which layers have weights in common",
    "experts": "the experts of layers",
    "key_heads": "the heads of keys and values",
    "predictor": "which layers predict further tokens",
}


def unwritten(instance: Instance) -> list[str]:
    """What forms with one TMPC per layer cannot hold of ``instance``, in words."""
    rows = [row for layer in instance.layers for row in layer.tmpcs.values()]
    tmpcs = [tmpc for row in rows for tmpc in row]
    batch = instance.batch
    lost = {
        "tensor parallelism (degrees above 1)": instance.degrees[-1] > 1,
        "the choice between several TMPCs of a layer": any(len(row) > 1 for row in rows),
        f'the ids of TMPCs (all are "{TMPC_ID}")': any(x.id != TMPC_ID or x.recompute for x in tmpcs),
        "memory that replicas share out": any(x.shared_bytes for x in tmpcs),
        "the least data-parallel degrees of TMPCs": any(x.least_data_parallel_degree > 1 for x in tmpcs),
        "what crossing an edge costs on top (syncTimeFw, syncTimeBw)": any(
            any([*x.forward_sync_bytes.values(), *x.backward_sync_bytes.values()]) for x in tmpcs
        ),
        "weight gradients' share of backward passes": any(x.weight_s is not None for x in tmpcs),
        **{words: any(getattr(x, name) for x in instance.layers) for name, words in _LAYER_WORDS.items()},
        "which model is trained, and how": instance.model is not None,
        "samples of a microbatch and tokens of a sample": {batch.samples_per_microbatch, batch.tokens_per_sample}
        != {None},
        "the threads that times were measured with": instance.measured_threads is not None,
        "links of smaller groups of devices": len(instance.cluster.links) > 1,
        "sites of devices": bool(instance.cluster.sites),
    }
    return [words for words, is_lost in lost.items() if is_lost]


def _keeps_times(instance: Instance) -> bool:
    """Whether only p is known for every layer, or both passes of every layer with some backward time."""
    tmpcs = [tmpc for layer in instance.layers for listed in layer.tmpcs.values() for tmpc in listed]
    parted = [tmpc for tmpc in tmpcs if tmpc.forward_s is not None]
    if not parted:
        return True
    return (
        len(parted) == len(tmpcs)
        and any(tmpc.backward_s for tmpc in parted)
        and all(_passes_ms(tmpc) is not None for tmpc in parted)
    )


def in_flight_rule(instance: Instance) -> InFlight | None:
    """The ``--in-flight`` with which a profile gives this instance's memory; None if neither value does."""
    tmpcs = [tmpc for layer in instance.layers for listed in layer.tmpcs.values() for tmpc in listed]
    if all(tmpc.fixed_bytes == 2.0 * tmpc.weights_bytes for tmpc in tmpcs):
        return InFlight.TWO_VERSIONS
    if all(tmpc.fixed_bytes == 0.0 and tmpc.activation_bytes >= tmpc.weights_bytes for tmpc in tmpcs):
        return InFlight.STASHING
    return None


def to_profile(instance: Instance) -> str:
    """An instance without ``losses`` as a profile. Loading it with the same K, N, M, B and ``in_flight_rule`` returns
    an equal instance. If only p is known, it is written as forward time, and no node has any backward time."""
    rule = in_flight_rule(instance)
    assert rule is not None
    lines = []
    for layer in instance.layers:
        ((tmpc,),) = layer.tmpcs.values()
        passes_ms = _passes_ms(tmpc)
        assert passes_ms is not None
        forward_ms, backward_ms = passes_ms
        lines.append(
            f"node{layer.id} -- {layer.name} -- forward_compute_time={forward_ms!r}, "
            f"backward_compute_time={backward_ms!r}, activation_size={_activation_bytes(tmpc, rule)!r}, "
            f"parameter_size={tmpc.weights_bytes!r}"
        )
    lines += [f"\tnode{edge.source} -- node{edge.target}" for edge in instance.edges]
    return "\n".join(lines) + "\n"


def _activation_bytes(tmpc: Tmpc, rule: InFlight) -> float:
    return tmpc.activation_bytes - (tmpc.weights_bytes if rule is InFlight.STASHING else 0.0)


def _passes_ms(tmpc: Tmpc) -> tuple[float, float] | None:
    """Milliseconds that read back as the passes; or, if only p is known, p and 0. None if no figures read back
    exactly."""
    if tmpc.forward_s is None or tmpc.backward_s is None:
        return _milliseconds(tmpc.time_per_sample_s)[0], 0.0
    for forward_ms in _milliseconds(tmpc.forward_s):
        for backward_ms in _milliseconds(tmpc.backward_s):
            read = (forward_ms / 1000.0, backward_ms / 1000.0, (forward_ms + backward_ms) / 1000.0)
            if read == (tmpc.forward_s, tmpc.backward_s, tmpc.time_per_sample_s):
                return forward_ms, backward_ms
    return None


def _milliseconds(seconds: float) -> list[float]:
    """Milliseconds that read back as ``seconds``, or as nearly as possible, the nearest first."""
    candidates = [seconds * 1000.0]
    for towards in (0.0, math.inf):
        near = candidates[0]
        for _ in range(_NEIGHBOURS):
            near = math.nextafter(near, towards)
            candidates.append(near)
    return sorted(candidates, key=lambda ms: abs(ms / 1000.0 - seconds))
