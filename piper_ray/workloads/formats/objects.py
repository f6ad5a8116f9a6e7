"""Instances and plans as Python objects, checked by the rules that files must keep.

What is wrong with a file its reader tells, with the path in the file; what is wrong with an object is told here, with
the path in Python: ``layers[3].tmpcs[2][0].time_per_sample_s``. The rules are the same ones: ``fields`` has those of a
figure, ``graph`` those of a graph and of a layer's TMPCs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

from pydantic import TypeAdapter

from piper_ray.model import limits
from piper_ray.model.cluster import Cluster, Link
from piper_ray.model.errors import InputError
from piper_ray.model.instance import Batch, Edge, Instance, Layer, Tensor, Tmpc, TrainedModel
from piper_ray.model.plan import Plan, Stage
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.workloads.formats.documents import is_printable
from piper_ray.workloads.formats.faults import Faults, path_of, quoted, shown
from piper_ray.workloads.formats.fields import (
    CLUSTER_RULES,
    COUNT_WORDS,
    DEGREE_WORDS,
    FIGURE_WORDS,
    ID_WORDS,
    Count,
    Degree,
    Figure,
    LayerId,
)
from piper_ray.workloads.formats.graph import (
    NamedEdge,
    NamedId,
    NamedTensor,
    check_graph,
    check_passes,
    check_size,
    check_some_tmpc,
    check_sync_names,
    check_tensors,
    check_tmpc_ids,
)
from piper_ray.workloads.formats.trained import read_trained_model, trained_model_table

T = TypeVar("T")

_FIGURE: TypeAdapter[float] = TypeAdapter(Figure)
_ID: TypeAdapter[int] = TypeAdapter(LayerId)
_DEGREE: TypeAdapter[int] = TypeAdapter(Degree)
_COUNT: TypeAdapter[int] = TypeAdapter(Count)

_TMPC_FIGURES = ("time_per_sample_s", "weights_bytes", "activation_bytes", "fixed_bytes", "shared_bytes")


class _Ends(NamedTuple):
    """The other ends of a layer's edges. known: whether all of its edges could be read."""

    layer: int
    before: frozenset[int]
    after: frozenset[int]
    known: bool


def check_instance(instance: Instance) -> None:
    """Marks the instance as checked. Raises InputError with every fault found."""
    if instance.checked:
        return
    faults = Faults()
    _check_text(instance.name, "name", faults)
    _check_cluster(instance.cluster, faults)
    _check_batch(instance.batch, faults)
    _check_schedule(instance.schedule, faults)
    if instance.model is not None:
        _check_model(instance.model, faults)
    if instance.measured_threads is not None:
        _keeps(_COUNT, instance.measured_threads, "measured_threads", COUNT_WORDS, faults)
    layers = _objects(instance.layers, Layer, "layers", faults)
    edges = _objects(instance.edges, Edge, "edges", faults)
    if layers is not None and edges is not None and check_size(len(layers), len(edges), faults, "layers", "edges"):
        ids = _check_graph(layers, edges, faults)
        _check_tensors(_objects(instance.tensors, Tensor, "tensors", faults) or (), ids, faults)
    for index, note in enumerate(_objects(instance.notes, str, "notes", faults) or ()):
        if note is not None:
            _check_text(note, f"notes[{index}]", faults)
    if faults:
        name = _as_given(instance.name)
        raise InputError(f"Instance {quoted(name)}" if isinstance(name, str) and name else "Instance", faults.found)
    instance.mark_checked()


def _check_cluster(cluster: Cluster, faults: Faults) -> None:
    """Where the one link there is is at fault, so is the bandwidth, by which name it is given as a rule."""
    if not isinstance(_as_given(cluster), Cluster):
        faults.at("cluster", f"no Cluster ({shown(cluster)}); expected a Cluster")
        return
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
        if index == len(links) - 1:
            if link.devices is not None:
                faults.at(f"{path}.devices", f"{shown(link.devices)}; expected None: the last link joins all devices")
        elif _keeps(_DEGREE, link.devices, f"{path}.devices", DEGREE_WORDS, faults) and link.devices is not None:
            if link.devices < smaller or link.devices % smaller:
                faults.at(f"{path}.devices", f"{link.devices}; expected a multiple of {smaller}, the group before")
            smaller = max(1, link.devices)


def _check_batch(batch: Batch, faults: Faults) -> None:
    if not isinstance(_as_given(batch), Batch):
        faults.at("batch", f"no Batch ({shown(batch)}); expected a Batch")
        return
    _check_quantity("microbatches", batch.microbatches, "microbatches", faults)
    for name in ("samples_per_microbatch", "tokens_per_sample"):
        if getattr(batch, name) is not None:
            _keeps(_COUNT, getattr(batch, name), f"batch.{name}", COUNT_WORDS, faults)


def _check_schedule(schedule: Schedule | None, faults: Faults) -> None:
    if schedule is not None and not isinstance(_as_given(schedule), Schedule):
        names = ", ".join(name.value for name in ScheduleName)
        faults.at("schedule", f"no Schedule ({shown(schedule)}); expected a Schedule, None or one of {names}")


def _check_model(model: TrainedModel, faults: Faults) -> None:
    if not isinstance(_as_given(model), TrainedModel):
        faults.at("model", f"no TrainedModel ({shown(model)}); expected a TrainedModel or None")
    else:
        read_trained_model(trained_model_table(model), "model", faults)


def _check_quantity(quantity: str, value: object, path: str, faults: Faults) -> None:
    rule, _, expected, _ = CLUSTER_RULES[quantity]
    _keeps(rule, value, path, expected, faults)


def check_plan(plan: Plan) -> None:
    """That its parts are what they should be; whether it keeps the rules of the problem is for ``evaluate`` to say.

    Raises InputError with every fault found.
    """
    faults = Faults()
    for index, stage in enumerate(_objects(plan.stages, Stage, "stages", faults) or ()):
        if stage is not None:
            _check_stage(stage, f"stages[{index}]", faults)
    if not isinstance(_as_given(plan.keeps_order), bool):
        faults.at("keeps_order", f"not true or false ({shown(plan.keeps_order)}); expected True or False")
    if plan.in_flight is not None:
        for index, y in enumerate(_objects(plan.in_flight, int, "in_flight", faults) or ()):
            if y is not None and y >= 1:  # what is less, and whole, is told beside the other rules of plans
                _keeps(_COUNT, y, f"in_flight[{index}]", COUNT_WORDS, faults)
    if faults:
        raise InputError("Plan", faults.found)


def _check_graph(layers: Sequence[Layer | None], edges: Sequence[Edge | None], faults: Faults) -> Sequence[int] | None:
    """Returns the ids of the layers; None if some could not be read."""
    ids = [
        NamedId(layer.id, f"layers[{index}].id")
        for index, layer in enumerate(layers)
        if layer is not None and _check_id(layer.id, f"layers[{index}].id", faults)
    ]
    named = [
        NamedEdge(edge.source, edge.target, f"edges[{index}]")
        for index, edge in enumerate(edges)
        if edge is not None and _check_edge(edge, f"edges[{index}]", faults)
    ]
    complete = len(ids) == len(layers)
    graph = check_graph(ids, named, faults, "edges", ids_complete=complete)
    known = complete and len(named) == len(edges)
    for index, layer in enumerate(layers):
        if layer is not None:
            before, after = (graph.predecessors[layer.id], graph.successors[layer.id]) if known else ((), ())
            _check_layer(layer, f"layers[{index}]", _Ends(layer.id, frozenset(before), frozenset(after), known), faults)
    return [layer.id for layer in ids] if complete else None


def _check_tensors(tensors: Sequence[Tensor | None], ids: Sequence[int] | None, faults: Faults) -> None:
    named = []
    for index, tensor in enumerate(tensors):
        if tensor is None:
            continue
        path = f"tensors[{index}]"
        for name in ("forward_bytes", "backward_bytes"):
            _check_figure(getattr(tensor, name), f"{path}.{name}", faults)
        if _check_ids(tensor.layers, f"{path}.layers", faults):
            named.append(NamedTensor(tensor.layers, f"{path}.layers"))
    if ids is not None:
        check_tensors(named, ids, faults)


def _check_edge(edge: Edge, path: str, faults: Faults) -> bool:
    """Whether its ends are ids at all."""
    _check_figure(edge.communication_bytes, f"{path}.communication_bytes", faults)
    sound = [_check_id(getattr(edge, end), f"{path}.{end}", faults) for end in ("source", "target")]
    return all(sound)


def _check_layer(layer: Layer, path: str, ends: _Ends, faults: Faults) -> None:
    _check_text(layer.name, f"{path}.name", faults)
    for name in ("path", "tied"):
        if getattr(layer, name) != "":
            _check_text(getattr(layer, name), f"{path}.{name}", faults)
    if not isinstance(_as_given(layer.predictor), bool):
        faults.at(f"{path}.predictor", f"not true or false ({shown(layer.predictor)}); expected True or False")
    for name in ("experts", "key_heads"):
        if getattr(layer, name) != 0:
            _keeps(_COUNT, getattr(layer, name), f"{path}.{name}", COUNT_WORDS, faults)
    tmpcs_of = _as_given(layer.tmpcs)
    if not isinstance(tmpcs_of, Mapping):
        faults.at(f"{path}.tmpcs", f"not a dict ({shown(tmpcs_of)}); expected tuples of TMPCs by degree")
        return
    for degree, row in tmpcs_of.items():
        where = path_of(f"{path}.tmpcs", degree if isinstance(degree, int) else str(degree))
        if type(degree) is not int or not 1 <= degree <= limits.DEVICES:
            _keeps(_DEGREE, degree, where, DEGREE_WORDS, faults)
        tmpcs = _objects(row, Tmpc, where, faults) or ()
        check_tmpc_ids([tmpc.id for tmpc in tmpcs if tmpc is not None], where, faults)
        for index, tmpc in enumerate(tmpcs):
            if tmpc is not None:
                _check_tmpc(tmpc, where, index, ends, faults)
    check_some_tmpc(tmpcs_of.values(), f"{path}.tmpcs", faults)


def _check_tmpc(tmpc: Tmpc, row_path: str, index: int, ends: _Ends, faults: Faults) -> None:
    """Of many TMPCs hardly one is wrong: paths are put together for those that are."""
    if not _is_plain_text(tmpc.id):
        _check_text(tmpc.id, f"{row_path}[{index}].id", faults)
    for name in _TMPC_FIGURES:
        value = getattr(tmpc, name)
        if not _is_figure(value):
            _check_figure(value, f"{row_path}[{index}].{name}", faults)
    if tmpc.forward_s is not None or tmpc.backward_s is not None or tmpc.weight_s is not None:
        _check_tmpc_passes(tmpc, f"{row_path}[{index}]", faults)
    least = _as_given(tmpc.least_data_parallel_degree)
    if type(least) is not int or not 1 <= least <= limits.DEVICES:
        _keeps(_DEGREE, least, f"{row_path}[{index}].least_data_parallel_degree", DEGREE_WORDS, faults)
    if not isinstance(_as_given(tmpc.recompute), bool):
        words = f"neither true nor false ({shown(tmpc.recompute)}); expected True or False"
        faults.at(f"{row_path}[{index}].recompute", words)
    for name, neighbours, arrow in (
        ("forward_sync_bytes", ends.before, "{{}} -> {0}"),
        ("backward_sync_bytes", ends.after, "{0} -> {{}}"),
    ):
        table = getattr(tmpc, name)
        if not (isinstance(table, Mapping) and table.keys() <= neighbours and all(map(_is_figure, table.values()))):
            path = f"{row_path}[{index}].{name}"
            _check_table(table, path, neighbours if ends.known else None, arrow.format(ends.layer), faults)


def _check_tmpc_passes(tmpc: Tmpc, path: str, faults: Faults) -> None:
    found_before = len(faults.found)
    for name in ("forward_s", "backward_s", "weight_s"):
        if getattr(tmpc, name) is not None:
            _check_figure(getattr(tmpc, name), f"{path}.{name}", faults)
    if len(faults.found) == found_before and _is_figure(tmpc.time_per_sample_s):
        check_passes(tmpc, lambda name: f"{path}.{'time_per_sample_s' if name == 'p' else name + '_s'}", faults)


def _check_table(table: object, path: str, neighbours: frozenset[int] | None, arrow: str, faults: Faults) -> None:
    """neighbours: None where some edge could not be read."""
    if not isinstance(table, Mapping):
        faults.at(path, f"not a dict ({shown(table)}); expected bytes by the neighbour's layer id")
        return
    for key, size in table.items():
        _check_figure(size, path_of(path, key if isinstance(key, int) else str(key)), faults)
    if neighbours is not None:
        check_sync_names(table, neighbours, path, arrow, faults)


def _check_stage(stage: Stage, path: str, faults: Faults) -> None:
    for name in ("data_parallel_degree", "tensor_parallel_degree"):
        value = getattr(stage, name)
        if type(value) is not int or abs(value) > limits.DEVICES:  # below 1 it breaks a rule of the problem
            problem = "too large" if type(value) is int else "not a whole number"
            faults.at(f"{path}.{name}", f"{problem} ({shown(value)}); expected {DEGREE_WORDS}")
    _check_ids(stage.layers, f"{path}.layers", faults)
    tmpc_ids = _as_given(stage.tmpc_ids)
    if not isinstance(tmpc_ids, Mapping):
        faults.at(f"{path}.tmpc_ids", f"not a dict ({shown(tmpc_ids)}); expected TMPC ids by layer id")
    elif not all(type(tmpc_id) is str for tmpc_id in tmpc_ids.values()):
        for layer, tmpc_id in tmpc_ids.items():
            _check_text(tmpc_id, path_of(f"{path}.tmpc_ids", layer if isinstance(layer, int) else str(layer)), faults)


def _objects(values: object, kind: type[T], path: str, faults: Faults) -> list[T | None] | None:
    """The items, None for each that is of another kind; None if these are no items at all."""
    if not isinstance(values, (tuple, list)):
        faults.at(path, f"not a tuple ({shown(values)}); expected a tuple of {kind.__name__} objects")
        return None
    found: list[T | None] = []
    for index, value in enumerate(values):
        if not isinstance(value, kind):
            faults.at(f"{path}[{index}]", f"no {kind.__name__} ({shown(value)}); expected {kind.__name__} objects")
        found.append(value if isinstance(value, kind) else None)
    return found


def _as_given(value: object) -> object:
    """The value of a field, whose type the caller may not have kept."""
    return value


def _keeps(rule: TypeAdapter[T], value: object, path: str, expected: str, faults: Faults) -> bool:
    """Whether a value keeps the rule that files have for it, and is a number: the rule takes what can be made one."""
    if faults.value(rule, value, path, expected) is None:
        return False
    if not isinstance(value, (int, float)):
        faults.at(path, f"not a number ({shown(value)}); expected {expected}")
    return isinstance(value, (int, float))


def _is_figure(value: object) -> bool:
    """Whether it is one for certain; else it is for the rule itself to judge."""
    return type(value) is float and 0.0 <= value <= limits.FIGURE


def _check_figure(value: object, path: str, faults: Faults) -> None:
    if not _is_figure(value):
        _keeps(_FIGURE, value, path, FIGURE_WORDS, faults)


def _check_id(value: object, path: str, faults: Faults) -> bool:
    if type(value) is int and abs(value) <= limits.ID:
        return True
    return _keeps(_ID, value, path, ID_WORDS, faults)


def _check_ids(values: object, path: str, faults: Faults) -> bool:
    if not isinstance(values, tuple):
        faults.at(path, f"not a tuple ({shown(values)}); expected the ids of layers")
        return False
    if all(type(value) is int and abs(value) <= limits.ID for value in values):
        return True
    sound = [_check_id(value, f"{path}[{index}]", faults) for index, value in enumerate(values)]
    return all(sound)


def _is_plain_text(value: object) -> bool:
    return type(value) is str and value.isascii()


def _check_text(value: object, path: str, faults: Faults) -> None:
    if not isinstance(value, str):
        faults.at(path, f"not a text ({shown(value)}); expected a text")
    elif not is_printable(value):
        faults.at(path, f"{quoted(value)} holds half a surrogate pair; expected Unicode text")
