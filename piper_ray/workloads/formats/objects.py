"""Checks instances and plans as Python objects by the same rules as files.

Readers report faults with the path in the file; faults of an object are reported here with the path in Python:
``layers[3].tmpcs[2][0].time_per_sample_s``. The rules of a figure are in ``fields``, those of a graph and of a layer's
TMPCs in ``graph``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from pydantic import TypeAdapter

from piper_ray.model import limits
from piper_ray.model.cluster import Cluster, DeviceKind, Link
from piper_ray.model.errors import InputError
from piper_ray.model.instance import Batch, Edge, Instance, Layer, MovedRows, Tensor, Tmpc, TrainedModel
from piper_ray.model.mode import Mode
from piper_ray.model.plan import Plan, Stage
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.workloads.formats import fields, graph, surroundings
from piper_ray.workloads.formats.documents import is_printable
from piper_ray.workloads.formats.faults import Faults, path_of, quoted, shown

T = TypeVar("T")


class _Rule(NamedTuple):
    """A rule of a field. holds: whether a value certainly keeps the rule; if not, ``note`` examines it and notes faults
    with their path."""

    holds: Callable[[object], bool]
    note: Callable[[object, str, Faults], None]


def _adapter_rule(holds: Callable[[object], bool], kind: Any, expected: str) -> _Rule:
    """The rule that files have for this kind of number. Files also accept texts that convert to a number; objects do
    not."""
    adapter: TypeAdapter[object] = TypeAdapter(kind)

    def note(value: object, path: str, faults: Faults) -> None:
        if faults.value(adapter, value, path, expected) is not None and not isinstance(value, (int, float)):
            faults.at(path, f"not a number ({shown(value)}); expected {expected}")

    return _Rule(holds, note)


def _is_figure(value: object) -> bool:
    return type(value) is float and 0.0 <= value <= limits.FIGURE


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= limits.ID


def _is_degree(value: object) -> bool:
    return type(value) is int and 1 <= value <= limits.DEVICES


def _is_nothing(value: object) -> bool:
    return value is None


def _is_plain_text(value: object) -> bool:
    return type(value) is str and value.isascii()


def _note_text(value: object, path: str, faults: Faults) -> None:
    if not isinstance(value, str):
        faults.at(path, f"not a text ({shown(value)}); expected a text")
    elif not is_printable(value):
        faults.at(path, f"{quoted(value)} holds half a surrogate pair; expected Unicode text")


def _note_flag(value: object, path: str, faults: Faults) -> None:
    faults.at(path, f"neither true nor false ({shown(value)}); expected True or False")


def _note_mode(value: object, path: str, faults: Faults) -> None:
    faults.at(path, f"no Mode ({shown(value)}); expected a Mode, or none for what the id says")


def _are_ids(values: object) -> bool:
    return isinstance(values, tuple) and all(map(_is_id, values))


def _note_ids(values: object, path: str, faults: Faults) -> None:
    if not isinstance(values, tuple):
        faults.at(path, f"not a tuple ({shown(values)}); expected the ids of layers")
        return
    for index, value in enumerate(values):
        if not _is_id(value):
            _ID.note(value, f"{path}[{index}]", faults)


def _note_stage_degree(value: object, path: str, faults: Faults) -> None:
    problem = "too large" if type(value) is int else "not a whole number"
    faults.at(path, f"{problem} ({shown(value)}); expected {fields.DEGREE_WORDS}")


_TEXT = _Rule(_is_plain_text, _note_text)
_FLAG = _Rule(lambda value: isinstance(value, bool), _note_flag)
_MODE = _Rule(lambda value: isinstance(value, Mode), _note_mode)
_FIGURE = _adapter_rule(_is_figure, fields.Figure, fields.FIGURE_WORDS)
_FIGURE_OR_NONE = _FIGURE._replace(holds=lambda value: value is None or _is_figure(value))
_ID = _adapter_rule(_is_id, fields.LayerId, fields.ID_WORDS)
_IDS = _Rule(_are_ids, _note_ids)
_DEGREE = _adapter_rule(_is_degree, fields.Degree, fields.DEGREE_WORDS)
_COUNT_OR_NONE = _adapter_rule(_is_nothing, fields.Count, fields.COUNT_WORDS)
_COUNT_OR_ZERO = _COUNT_OR_NONE._replace(holds=lambda value: type(value) is int and value == 0)
_STAGE_DEGREE = _Rule(lambda value: type(value) is int and abs(value) <= limits.DEVICES, _note_stage_degree)
"""A degree below 1 breaks a rule of the problem, which ``evaluate`` reports."""

_RULES: Mapping[type, Mapping[str, _Rule]] = {
    Batch: {"samples_per_microbatch": _COUNT_OR_NONE, "tokens_per_sample": _COUNT_OR_NONE},
    Edge: {"communication_bytes": _FIGURE, "source": _ID, "target": _ID},
    Tensor: {"forward_bytes": _FIGURE, "backward_bytes": _FIGURE, "layers": _IDS},
    Layer: {
        "name": _TEXT,
        "path": _TEXT,
        "tied": _TEXT,
        "predictor": _FLAG,
        "experts": _COUNT_OR_ZERO,
        "key_heads": _COUNT_OR_ZERO,
    },
    Tmpc: {
        "id": _TEXT,
        "time_per_sample_s": _FIGURE,
        "weights_bytes": _FIGURE,
        "activation_bytes": _FIGURE,
        "fixed_bytes": _FIGURE,
        "shared_bytes": _FIGURE,
        "forward_s": _FIGURE_OR_NONE,
        "backward_s": _FIGURE_OR_NONE,
        "weight_s": _FIGURE_OR_NONE,
        "least_data_parallel_degree": _DEGREE,
        "recompute": _FLAG,
        "mode": _MODE,
        "kind": _TEXT,
    },
    Stage: {
        "kind": _TEXT,
        "data_parallel_degree": _STAGE_DEGREE,
        "tensor_parallel_degree": _STAGE_DEGREE,
        "layers": _IDS,
    },
}
"""The rules of fields that can be checked on their own."""


def _check_fields(kind: type, given: object, path: str, faults: Faults) -> None:
    for name, rule in _RULES[kind].items():
        value = getattr(given, name)
        if not rule.holds(value):
            rule.note(value, f"{path}.{name}", faults)


def _objects(values: object, kind: type[T], path: str, faults: Faults) -> list[T | None] | None:
    """The items, with None for each of another kind; None if the value has no items."""
    if not isinstance(values, (tuple, list)):
        faults.at(path, f"not a tuple ({shown(values)}); expected a tuple of {kind.__name__} objects")
        return None
    for index, value in enumerate(values):
        if not isinstance(value, kind):
            faults.at(f"{path}[{index}]", f"no {kind.__name__} ({shown(value)}); expected {kind.__name__} objects")
    return [value if isinstance(value, kind) else None for value in values]


def _as_given(value: object) -> object:
    """The value of a field, which may have any type."""
    return value


def _is_a(kind: type, value: object, path: str, faults: Faults, otherwise: str = "") -> bool:
    """Whether the value is of this kind; notes a fault if not. otherwise: other allowed values, in words."""
    if not isinstance(value, kind):
        faults.at(path, f"no {kind.__name__} ({shown(value)}); expected a {kind.__name__}{otherwise}")
    return isinstance(value, kind)


def check_instance(instance: Instance) -> None:
    """Checks an instance and marks it as checked. Raises InputError with every fault found."""
    if instance.checked:
        return
    faults = Faults()
    if not _is_plain_text(instance.name):
        _note_text(instance.name, "name", faults)
    if _is_a(Cluster, instance.cluster, "cluster", faults):
        _check_cluster(instance.cluster, faults)
    if _is_a(Batch, instance.batch, "batch", faults):
        _check_quantity("microbatches", instance.batch.microbatches, "microbatches", faults)
        _check_fields(Batch, instance.batch, "batch", faults)
    if instance.schedule is not None:
        names = ", ".join(name.value for name in ScheduleName)
        _is_a(Schedule, instance.schedule, "schedule", faults, f", None or one of {names}")
    if instance.model is not None and _is_a(TrainedModel, instance.model, "model", faults, " or None"):
        surroundings.read_trained_model(surroundings.trained_model_table(instance.model), "model", faults)
    surroundings.read_schemes(instance.schemes, faults)
    if instance.measured_threads is not None:
        _COUNT_OR_NONE.note(instance.measured_threads, "measured_threads", faults)
    layers = _objects(instance.layers, Layer, "layers", faults)
    edges = _objects(instance.edges, Edge, "edges", faults)
    if layers is not None and edges is not None:
        tensors = _objects(instance.tensors, Tensor, "tensors", faults) or ()
        if graph.check_size(len(layers), len(edges), faults, "layers", "edges"):
            _check_graph(layers, edges, tensors, faults)
    for index, note in enumerate(_objects(instance.notes, str, "notes", faults) or ()):
        if note is not None:
            _note_text(note, f"notes[{index}]", faults)
    if not faults:
        own = [kind.name for kind in instance.cluster.kinds]
        graph.check_kinds(_kinds_said(instance.layers), own, complete=True, faults=faults)
    if faults:
        name = _as_given(instance.name)
        raise InputError(f"Instance {quoted(name)}" if isinstance(name, str) and name else "Instance", faults.found)
    instance.mark_checked()


def _kinds_said(layers: Iterable[Layer]) -> Iterator[tuple[str, Collection[str]]]:
    """The path of each layer's TMPCs and the kinds that they are for."""
    known: dict[int, set[str]] = {}
    for index, layer in enumerate(layers):
        if (key := id(layer.priced)) not in known:
            known[key] = {tmpc.kind for row in layer.priced.tmpcs.values() for tmpc in row}
        yield f"layers[{index}].tmpcs", known[key]


def _check_cluster(cluster: Cluster, faults: Faults) -> None:
    """Notes the faults of a cluster. A fault of its only link is reported as one of the bandwidth, which is the usual
    way to give that link."""
    if not isinstance(_as_given(cluster.kinds), tuple) or cluster.kinds:
        _check_kinds(cluster, faults)
        return
    rate = cluster.between_bytes_per_s
    if _as_given(cluster.sites) != ():
        surroundings.check_sites(cluster.devices, cluster.sites, "cluster.sites", faults)
        _check_quantity("bandwidth_bytes_per_s", rate, "cluster.between_bytes_per_s", faults)
    elif rate is not None:
        between = f"{shown(rate)}, a rate between kinds of devices or sites"
        faults.at("cluster.between_bytes_per_s", f"{between}; expected kinds or sites too")
    _check_quantity("devices", cluster.devices, "devices", faults)
    _check_quantity("memory_bytes", cluster.memory_bytes, "memory_bytes", faults)
    links = _objects(cluster.links, Link, "cluster.links", faults)
    if links is None:
        return
    if not links:
        faults.at("cluster.links", "no links; expected at least one")
    smaller = 1
    for index, link in enumerate(links):
        if link is None:
            continue
        path = f"cluster.links[{index}]"
        where = "bandwidth_bytes_per_s" if len(links) == 1 else f"{path}.bandwidth_bytes_per_s"
        _check_quantity("bandwidth_bytes_per_s", link.bandwidth_bytes_per_s, where, faults)
        if link.uplink_bytes_per_s is not None:
            _check_quantity("bandwidth_bytes_per_s", link.uplink_bytes_per_s, f"{path}.uplink_bytes_per_s", faults)
        if index == len(links) - 1:
            if link.devices is not None:
                faults.at(f"{path}.devices", f"{shown(link.devices)}; expected None: the last link joins all devices")
            if link.uplink_bytes_per_s is not None:
                faults.at(f"{path}.uplink_bytes_per_s", "expected None: nothing leaves all devices")
        elif not _is_degree(link.devices):
            _DEGREE.note(link.devices, f"{path}.devices", faults)
        elif link.devices is not None:
            if link.devices % smaller:
                faults.at(f"{path}.devices", f"{link.devices}; expected a multiple of {smaller}, the group before")
            smaller = link.devices
    node, inner = cluster.node_devices, [link for link in links[:-1] if link is not None and _is_degree(link.devices)]
    if _is_degree(node):
        surroundings.check_node_devices(node, inner, "cluster.node_devices", faults)
    elif node is not None:
        _COUNT_OR_NONE.note(node, "cluster.node_devices", faults)


def _check_kinds(cluster: Cluster, faults: Faults) -> None:
    kinds = _objects(cluster.kinds, DeviceKind, "cluster.kinds", faults) or ()
    rate = cluster.between_bytes_per_s
    if len(kinds) == 1:
        faults.at("cluster.kinds", "one kind; expected none, or at least two")
    _check_quantity("bandwidth_bytes_per_s", rate, "cluster.between_bytes_per_s", faults)
    names = [kind.name for kind in kinds if kind is not None]
    for index, kind in enumerate(kinds):
        path = f"cluster.kinds[{index}]"
        if kind is None or not _is_a(Cluster, kind.cluster, f"{path}.cluster", faults):
            continue
        own = Faults()
        _check_cluster(kind.cluster, own)
        for fault in own.found:
            faults.at(f"{path}.{fault.path}", fault.message)
        if kind.cluster.kinds:
            faults.at(f"{path}.cluster.kinds", "kinds within a kind; expected none")
        if not _is_plain_text(kind.name) or not kind.name or names.count(kind.name) > 1:
            faults.at(f"{path}.name", f"{shown(kind.name)}; expected a text that no other kind has")
    if not faults and rate is not None and cluster != Cluster.of_kinds(cluster.kinds, rate):
        faults.at("cluster", "figures that differ from those of its kinds; expected what Cluster.of_kinds gives")


def _check_quantity(quantity: str, value: object, path: str, faults: Faults) -> None:
    rule, _, expected, _ = surroundings.CLUSTER_RULES[quantity]
    if faults.value(rule, value, path, expected) is not None and not isinstance(value, (int, float)):
        faults.at(path, f"not a number ({shown(value)}); expected {expected}")


def check_plan(plan: Plan) -> None:
    """Checks the types of a plan's parts; ``evaluate`` checks whether it keeps the rules of the problem.

    Raises InputError with every fault found.
    """
    faults = Faults()
    for index, stage in enumerate(_objects(plan.stages, Stage, "stages", faults) or ()):
        if stage is not None:
            _check_fields(Stage, stage, f"stages[{index}]", faults)
            _check_tmpc_ids(stage.tmpc_ids, f"stages[{index}].tmpc_ids", faults)
    if not isinstance(_as_given(plan.keeps_order), bool):
        _note_flag(plan.keeps_order, "keeps_order", faults)
    for name, listed in (("in_flight", plan.in_flight), ("places", plan.places)):
        for index, y in enumerate(_objects(listed, int, name, faults) or () if listed is not None else ()):
            if y is not None and y >= 1:  # smaller whole numbers are reported with the other rules of plans
                _COUNT_OR_NONE.note(y, f"{name}[{index}]", faults)
    for index, share in enumerate(_objects(plan.shares, tuple, "shares", faults) or ()):
        if share is not None and not (len(share) == 2 and _is_plain_text(share[0]) and _is_degree(share[1])):
            faults.at(f"shares[{index}]", f"{shown(share)}; expected a kind of devices and a whole number > 0")
    if faults:
        raise InputError("Plan", faults.found)


def _check_tmpc_ids(tmpc_ids: object, path: str, faults: Faults) -> None:
    if not isinstance(tmpc_ids, Mapping):
        faults.at(path, f"not a dict ({shown(tmpc_ids)}); expected TMPC ids by layer id")
        return
    for layer, tmpc_id in tmpc_ids.items():
        if type(tmpc_id) is not str:
            _note_text(tmpc_id, path_of(path, layer if isinstance(layer, int) else str(layer)), faults)


def _check_graph(
    layers: Sequence[Layer | None], edges: Sequence[Edge | None], tensors: Sequence[Tensor | None], faults: Faults
) -> None:
    for index, layer in enumerate(layers):
        if layer is not None and not _is_id(layer.id):
            _ID.note(layer.id, f"layers[{index}].id", faults)
    for index, edge in enumerate(edges):
        if edge is not None:
            _check_fields(Edge, edge, f"edges[{index}]", faults)
    ids = [
        graph.NamedId(layer.id, f"layers[{index}].id")
        for index, layer in enumerate(layers)
        if layer is not None and _is_id(layer.id)
    ]
    named = [
        graph.NamedEdge(edge.source, edge.target, f"edges[{index}]")
        for index, edge in enumerate(edges)
        if edge is not None and _is_id(edge.source) and _is_id(edge.target)
    ]
    complete = len(ids) == len(layers)
    neighbours = graph.check_graph(ids, named, faults, "edges", ids_complete=complete)
    known, sound = neighbours if complete and len(named) == len(edges) else None, set[tuple[int, ...]]()
    sound_layers = set[int]()  # by identity
    for index, layer in enumerate(layers):
        if layer is not None:
            before, path = len(faults.found), f"layers[{index}]"
            _check_fields(Layer, layer, path, faults)
            if known is None or not _moves_sound_rows(layer, sound_layers, known):
                _check_rows(layer, path, known, sound, faults)
            if len(faults.found) == before:
                sound_layers.add(id(layer))
    ends = {}
    for index, tensor in enumerate(tensors):
        if tensor is not None:
            _check_fields(Tensor, tensor, f"tensors[{index}]", faults)
            if _are_ids(tensor.layers):
                ends[f"tensors[{index}].layers"] = tensor.layers
    if complete:
        graph.check_tensors(ends, [layer.id for layer in ids], faults)


def _moves_sound_rows(layer: Layer, sound_layers: set[int], neighbours: graph.Neighbours) -> bool:
    """Whether its rows are those of a layer that was found sound, moved with all its neighbours."""
    rows = layer.tmpcs
    if not isinstance(rows, MovedRows) or id(rows.layer) not in sound_layers:
        return False
    return all(
        {end + rows.by for end in sides[rows.layer.id]} == set(sides[layer.id])
        for sides in (neighbours.predecessors, neighbours.successors)
    )


_fields_of_tmpc = attrgetter(*_RULES[Tmpc])


def _check_rows(
    layer: Layer, path: str, neighbours: graph.Neighbours | None, sound: set[tuple[int, ...]], faults: Faults
) -> None:
    """neighbours: None if some edge could not be read. sound: identities of the values of the fields of valid rows;
    equal layers share these values, so each row is checked once."""
    tmpcs_of = _as_given(layer.tmpcs)
    if not isinstance(tmpcs_of, Mapping):
        faults.at(f"{path}.tmpcs", f"not a dict ({shown(tmpcs_of)}); expected tuples of TMPCs by degree")
        return
    ends: tuple[frozenset[int], frozenset[int]] | None = None
    sound_tables = set[tuple[int, int]]()  # by identity, since TMPCs share tables
    if neighbours is not None:
        ends = frozenset(neighbours.predecessors[layer.id]), frozenset(neighbours.successors[layer.id])
    for degree, row in tmpcs_of.items():
        where = path_of(f"{path}.tmpcs", degree if isinstance(degree, int) else str(degree))
        if not _is_degree(degree):
            _DEGREE.note(degree, where, faults)
        tmpcs, before = _objects(row, Tmpc, where, faults) or (), len(faults.found)
        some = [tmpc for tmpc in tmpcs if tmpc is not None]
        fields = tuple(map(id, chain.from_iterable(map(_fields_of_tmpc, some))))
        if fields not in sound:
            for kind in dict.fromkeys(tmpc.kind for tmpc in some):
                graph.check_tmpc_ids([x.id for x in some if x.kind == kind], where, faults)
            for index, tmpc in enumerate(tmpcs):
                if tmpc is not None:
                    _check_tmpc_fields(tmpc, f"{where}[{index}]", faults)
            if len(faults.found) == before:
                sound.add(fields)
        for index, tmpc in enumerate(tmpcs):
            if tmpc is not None:
                tables = id(tmpc.forward_sync_bytes), id(tmpc.backward_sync_bytes)
                if tables not in sound_tables:
                    if _has_sound_tables(tmpc, ends):
                        sound_tables.add(tables)
                    else:
                        _check_tables(tmpc, f"{where}[{index}]", layer.id, ends, faults)
    graph.check_some_tmpc(tmpcs_of.values(), f"{path}.tmpcs", faults)


def _check_tmpc_fields(tmpc: Tmpc, path: str, faults: Faults) -> None:
    found_before = len(faults.found)
    _check_fields(Tmpc, tmpc, path, faults)
    if (tmpc.forward_s is not None or tmpc.weight_s is not None) and len(faults.found) == found_before:
        graph.check_passes(tmpc, lambda name: f"{path}.{name}", faults)


def _has_sound_tables(tmpc: Tmpc, ends: tuple[frozenset[int], frozenset[int]] | None) -> bool:
    """Whether the tables are certainly valid; if not, they are examined further."""
    before, after = tmpc.forward_sync_bytes, tmpc.backward_sync_bytes
    if ends is None or type(before) is not dict or type(after) is not dict:
        return False
    sizes = all(map(_is_figure, before.values())) and all(map(_is_figure, after.values()))
    return sizes and before.keys() <= ends[0] and after.keys() <= ends[1]


def _check_tables(
    tmpc: Tmpc, path: str, layer: int, ends: tuple[frozenset[int], frozenset[int]] | None, faults: Faults
) -> None:
    """ends: the sources of arriving edges and the targets of leaving edges; None if some edge could not be read."""
    arriving, leaving = (None, None) if ends is None else ends
    for name, neighbours, arrow in (
        ("forward_sync_bytes", arriving, f"{{}} -> {layer}"),
        ("backward_sync_bytes", leaving, f"{layer} -> {{}}"),
    ):
        _check_sync(getattr(tmpc, name), f"{path}.{name}", neighbours, arrow, faults)


def _check_sync(table: object, path: str, neighbours: frozenset[int] | None, arrow: str, faults: Faults) -> None:
    if not isinstance(table, Mapping):
        faults.at(path, f"not a dict ({shown(table)}); expected bytes by the neighbour's layer id")
        return
    for key, size in table.items():
        if not _is_figure(size):
            _FIGURE.note(size, path_of(path, key if isinstance(key, int) else str(key)), faults)
    if neighbours is not None and not table.keys() <= neighbours:
        graph.check_sync_names(table, neighbours, path, arrow, faults)
