"""Writes an instance as a compact workload: layers with equal figures share a type, repeated ones form a chain."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from piper_ray.model.figures import given_size_text, size_text
from piper_ray.model.instance import Instance, Layer, Tensor, Tmpc
from piper_ray.model.passes import RECOMPUTE_ID
from piper_ray.model.units import parse_bytes
from piper_ray.workloads.formats.surroundings import kinds_of, surroundings_of
from piper_ray.workloads.formats.workload import PATH_NUMBER
from piper_ray.workloads.formats.workload_schema import PATHS, PREVIOUS, name_in_rows

Sizes = float | tuple[float, ...]

_NOT_BARE = re.compile(r"[^A-Za-z0-9_-]+")
_NUMBER_IN_PATH = re.compile(r"(?<![0-9])(?:0|[1-9][0-9]{0,8})(?![0-9])")
_LONGEST_TYPE_KEY = 40
_FIGURES_PER_LINE = 8
_LARGE = 1e6
"""From this number of bytes, or bytes per second, sizes are written with a unit."""


def to_toml(instance: Instance) -> str:
    """The instance as TOML (see ``workload_schema``); ``load`` returns an equal instance."""
    graph = _Graph(instance)
    types = _types(instance, graph)
    lines = list(_surroundings(instance))
    for kind in dict.fromkeys(types.values()):
        lines += ["", *kind.lines()]
    spans = list(_spans([layer.id for layer in instance.layers], graph, types))
    label_of = {span.ids[-1]: span.label for span in spans}
    lines += ["", "[layers]", *_entries(spans, label_of, graph, types, instance.layer_by_id)]
    if instance.tensors or not graph.grouped:
        lines += ["", "[graph]"]
    if not graph.grouped:
        lines += ["edges = ["]
        lines += [
            f'  {{ from = "{edge.source}", to = "{edge.target}", bytes = {_number(edge.communication_bytes)} }},'
            for edge in instance.edges
        ]
        lines += ["]"]
    if instance.tensors:
        lines += ["tensors = [", *(f"  {_tensor(tensor, label_of)}," for tensor in instance.tensors), "]"]
    return "\n".join(lines) + "\n"


def _surroundings(instance: Instance) -> Iterator[str]:
    """The tables of everything other than the graph."""
    said, schedule, links = surroundings_of(instance), instance.schedule, instance.cluster.links
    if schedule is not None and (schedule.chunks_are_open or schedule.v == 1):
        del said["chunks"]
    inner = (
        f"{{ devices = {x.devices}, bandwidth = {_size(x.bandwidth_bytes_per_s, '/s')}"
        + (f", uplink = {_size(x.uplink_bytes_per_s, '/s')}" if x.uplink_bytes_per_s else "")
        + " }"
        for x in links[:-1]
    )
    sizes = {
        "between": _size(instance.cluster.between_bytes_per_s or 0.0, "/s"),
        "memory_bytes": _size(instance.memory_bytes) + _in_words(instance.memory_bytes),
        "bandwidth_bytes_per_s": _size(links[-1].bandwidth_bytes_per_s, "/s")
        + _in_words(links[-1].bandwidth_bytes_per_s, "/s"),
        "links": f"[{', '.join(inner)}]",
    }
    tables: dict[str, list[str]] = {"": [], "cluster": [], "batch": [], "model": [], "schemes": []}
    for what, value in said.items():
        table, _, key = PATHS[what].rpartition(".")
        if isinstance(value, Mapping):
            tables[key] += [f"{entry} = {_inline(given)}" for entry, given in value.items()]
        else:
            tables[table].append(f"{key} = {sizes.get(what) or _inline(value)}")
    for table, entries in tables.items():
        yield from ["", f"[{table}]", *entries] if table and entries else entries
        if table == "cluster":
            for kind in kinds_of(instance.cluster, PATHS):
                yield from ["", "[[cluster.kinds]]", *(f"{key} = {_inline(value)}" for key, value in kind.items())]


class _Graph:
    """Neighbours in the order of the edges.

    tensor_ends: layers that a tensor names, which therefore need labels of their own. tied: the name of each layer's
    tied weights. grouped: the edges are in the order of their target layers, so that ``inputs`` can express them all;
    otherwise they are listed one by one.
    """

    def __init__(self, instance: Instance) -> None:
        self.predecessors = {layer: before for layer, (before, _) in instance.neighbours.items()}
        self.successors = {layer: after for layer, (_, after) in instance.neighbours.items()}
        self.costs_bytes: dict[int, list[float]] = {layer.id: [] for layer in instance.layers}
        for edge in instance.edges:
            self.costs_bytes[edge.target].append(edge.communication_bytes)
        self.tied = {layer.id: layer.tied for layer in instance.layers}
        self.tensor_ends = {layer for tensor in instance.tensors for layer in tensor.layers}
        by_target = [(source, layer.id) for layer in instance.layers for source in self.predecessors[layer.id]]
        self.grouped = by_target == [(edge.source, edge.target) for edge in instance.edges]

    def inputs(self, layer: int) -> Sequence[int]:
        """The layers that the layer's ``inputs`` must name."""
        return self.predecessors[layer] if self.grouped else ()


class _Row(NamedTuple):
    """A TMPC as the file states it, without its times and with its sync sizes by position. Layers of one type share it.

    times: the names of the times that each layer has of its own.
    """

    tmpc_id: str
    times: tuple[str, ...]
    figures: tuple[str, ...]


@dataclass(eq=False)
class _Type:
    """A layer type. like: its first layer. rows: of figures, by degree. layers: in order, with their times."""

    key: str
    like: Layer
    inputs: Sizes
    rows: Mapping[int, tuple[_Row, ...]]
    layers: list[Layer] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        yield f"[types.{self.key}]"
        if self.like.name != self.key:
            yield f"name = {_text(self.like.name)}"
        for name in ("experts", "key_heads"):
            if getattr(self.like, name):
                yield f"{name} = {getattr(self.like, name)}"
        if self.like.predictor:
            yield "predictor = true"
        if self.inputs != 0.0:
            yield f"inputs = {_sizes(self.inputs)}"
        yield "tmpcs = ["
        degrees: dict[tuple[int, _Row, tuple[tuple[float, ...], ...]], list[int]] = {}
        for index in range(max(map(len, self.rows.values()))):  # the rows of a degree must keep their order
            for t, row in self.rows.items():
                if index < len(row):
                    times = tuple(
                        tuple(getattr(layer.tmpcs[t][index], name) for layer in self.layers)
                        for name in row[index].times
                    )
                    degrees.setdefault((index, row[index], times), []).append(t)
        for (_, row_of_all, times), ts in degrees.items():
            degree = f"t = {ts[0] if len(ts) == 1 else ts}"
            series = (
                f"{name_in_rows(name)} = {_sizes(_series(of_layers))}"
                for name, of_layers in zip(row_of_all.times, times, strict=True)
            )
            yield f"  {{ {', '.join([degree, row_of_all.tmpc_id, *series, *row_of_all.figures])} }},"
        yield "]"


def type_keys(instance: Instance) -> dict[int, str]:
    """The key of each layer's type in the file, by the layer's id."""
    return {layer: kind.key for layer, kind in _types(instance, _Graph(instance)).items()}


def _types(instance: Instance, graph: _Graph) -> dict[int, _Type]:
    """The type of each layer id. Layers have the same type if only their times differ."""
    types: dict[object, _Type] = {}
    type_of: dict[int, _Type] = {}
    keys: set[str] = set()
    for layer in instance.layers:
        inputs = _common(graph.costs_bytes[layer.id]) if graph.grouped else 0.0
        rows = {t: tuple(_row(tmpc, layer.id, graph) for tmpc in layer.tmpcs[t]) for t in sorted(layer.tmpcs)}
        signature = (layer.name, layer.experts, layer.key_heads, layer.predictor, inputs, tuple(rows.items()))
        if signature not in types:
            key = _fresh_key(layer.name, keys)
            keys.add(key)
            types[signature] = _Type(key, layer, inputs, rows)
        types[signature].layers.append(layer)
        type_of[layer.id] = types[signature]
    return type_of


def _row(tmpc: Tmpc, layer: int, graph: _Graph) -> _Row:
    own = tmpc.weights_bytes, tmpc.activation_bytes, tmpc.fixed_bytes, tmpc.shared_bytes
    forward_sync = _common([tmpc.forward_sync_bytes.get(u, 0.0) for u in graph.predecessors[layer]])
    backward_sync = _common([tmpc.backward_sync_bytes.get(w, 0.0) for w in graph.successors[layer]])
    others = tmpc.least_data_parallel_degree, tmpc.kind, tmpc.recompute
    return _row_of(tmpc.id, tuple(_times(tmpc)), (*own, forward_sync, backward_sync), *others)


_SIZES = "weights", "activation", "fixed", "shared", "forward_sync", "backward_sync"


@lru_cache(maxsize=2**12)  # equal layers have the same rows
def _row_of(
    tmpc_id: str, times: tuple[str, ...], sizes: tuple[Sizes, ...], least_d: int, kind: str, recompute: bool
) -> _Row:
    """sizes: in the order of ``_SIZES``."""
    figures = [f"{key} = {_sizes(size)}" for key, size in zip(_SIZES, sizes, strict=True) if size != 0.0]
    if least_d > 1:
        figures.append(f"least_data_parallel_degree = {least_d}")
    if kind:
        figures.append(f"kind = {_text(kind)}")
    if recompute != (tmpc_id == RECOMPUTE_ID):
        figures.append(f"recompute = {str(recompute).lower()}")
    return _Row(f"id = {_text(tmpc_id)}", times, tuple(figures))


def _times(tmpc: Tmpc) -> Iterator[str]:
    """The fields that a row states. The backward pass is left out if it is exactly the rest of p, which is usual."""
    yield "time_per_sample_s"
    if tmpc.forward_s is not None:
        yield "forward_s"
        if tmpc.backward_s != tmpc.time_per_sample_s - tmpc.forward_s:
            yield "backward_s"
    if tmpc.weight_s is not None:
        yield "weight_s"


def _common(sizes: Sequence[float]) -> Sizes:
    return tuple(sizes) if len(set(sizes)) > 1 else sizes[0] if sizes else 0.0


def _fresh_key(name: str, taken: set[str]) -> str:
    stem = _NOT_BARE.sub("-", name)[:_LONGEST_TYPE_KEY].strip("-") or "layer"
    key, number = stem, 1
    while key in taken:
        number += 1
        key = f"{stem}-{number}"
    return key


@dataclass(frozen=True)
class _Span:
    """Layers of one entry of [layers]: ``ids``, and the layer that they continue if they are a chain."""

    ids: Sequence[int]
    head: int | None

    @property
    def label(self) -> str:
        return str(self.ids[0]) if self.head is None else f"{self.ids[0]}-{self.ids[-1]}"


def _tensor(tensor: Tensor, label_of: Mapping[int, str]) -> str:
    parts = [f"layers = [{', '.join(_text(label_of[layer]) for layer in tensor.layers)}]"]
    for key, size in (("forward", tensor.forward_bytes), ("backward", tensor.backward_bytes)):
        parts += [f"{key} = {_number(size)}"] if size else []
    return f"{{ {', '.join(parts)} }}"


def _entries(
    spans: Sequence[_Span],
    label_of: Mapping[int, str],
    graph: _Graph,
    types: Mapping[int, _Type],
    layers: Mapping[int, Layer],
) -> Iterator[str]:
    length_of: dict[int, int] = {}  # of the chain that ends with this layer
    expected_id = 0
    for span in spans:
        first, last = span.ids[0], span.ids[-1]
        if span.head is None:
            length_of[last] = 1
            parts = [f"type = {_text(types[first].key)}"]
        else:
            length_of[last] = length_of[span.head] + len(span.ids)
            parts = [f"continues = {_text(label_of[span.head])}", f"length = {length_of[last]}"]
        inputs = [PREVIOUS if source == span.head else label_of[source] for source in graph.inputs(first)]
        if inputs:
            parts.append(f"inputs = [{', '.join(map(_text, inputs))}]")
        if first != expected_id:
            parts.append(f"id = {first}")
        path = _path([layers[layer].path for layer in span.ids])
        if path is not None:
            parts.append(f"path = {path}")
        if layers[first].tied:
            parts.append(f"tied = {_text(layers[first].tied)}")
        expected_id = last + 1
        yield f"{span.label} = {{ {', '.join(parts)} }}"


def _path(paths: Sequence[str]) -> str | None:
    """One text, with a rising number if there are several layers, or a list; None if there are no paths."""
    if not any(paths):
        return None
    first = paths[0]
    if not PATH_NUMBER.search(first):
        if len(paths) == 1:
            return _text(first)
        for found in _NUMBER_IN_PATH.finditer(first):
            head, tail, start = first[: found.start()], first[found.end() :], int(found[0])
            if all(path == f"{head}{start + index}{tail}" for index, path in enumerate(paths)):
                return _text(f"{head}{{{start}}}{tail}")
    return f"[{', '.join(map(_text, paths))}]"


def _spans(ids: Sequence[int], graph: _Graph, types: Mapping[int, _Type]) -> Iterator[_Span]:
    """The layers, divided into single ones and, greedily from the front, chains of at least two layers."""
    ends: set[int] = set()  # the last layers of the spans so far, which a chain can continue
    start = 0
    while start < len(ids):
        best = _Span(ids[start : start + 1], None)
        for head in graph.inputs(ids[start]):
            if head in ends and types[head] is types[ids[start]]:
                count = _chain_count(ids, start, head, graph, types)
                if count > len(best.ids):
                    best = _Span(ids[start : start + count], head)
        yield best
        ends.add(best.ids[-1])
        start += len(best.ids)


def _chain_count(ids: Sequence[int], start: int, head: int, graph: _Graph, types: Mapping[int, _Type]) -> int:
    """How many layers from ``start`` on continue ``head``. They have its type and consecutive ids; each has the one
    before and otherwise the same layers as inputs, and only the next as successor; only the last may be an end of a
    tensor."""
    pattern = [None if source == head else source for source in graph.inputs(ids[start])]
    end = start + 1
    while end < len(ids):
        before, layer = ids[end - 1], ids[end]
        inputs = [None if source == before else source for source in graph.inputs(layer)]
        alike = layer == before + 1 and types[layer] is types[head] and inputs == pattern
        alike = alike and graph.tied[layer] == graph.tied[before]
        if not alike or graph.successors[before] != (layer,) or before in graph.tensor_ends:
            break
        end += 1
    return end - start


def _series(times: Sequence[float]) -> Sizes:
    """The shortest series that gives ``times`` when repeated."""
    for period in range(1, len(times)):
        if all(time == times[index % period] for index, time in enumerate(times)):
            return tuple(times[:period]) if period > 1 else times[0]
    return tuple(times) if len(times) > 1 else times[0]


def _sizes(sizes: Sizes) -> str:
    if not isinstance(sizes, tuple):
        return _number(sizes)
    numbers = [_number(size) for size in sizes]
    if len(numbers) <= _FIGURES_PER_LINE:
        return f"[{', '.join(numbers)}]"
    lines = [numbers[i : i + _FIGURES_PER_LINE] for i in range(0, len(numbers), _FIGURES_PER_LINE)]
    return "[\n    " + ",\n    ".join(", ".join(line) for line in lines) + ",\n  ]"


def _size(value: float, per: str = "") -> str:
    """``"42.5GB/s"`` if a few digits express the value exactly, else the number."""
    text = given_size_text(value).replace(" ", "")
    return _text(text + per) if value >= _LARGE and parse_bytes(text) == value else _number(value)


def _in_words(value: float, per: str = "") -> str:
    """A comment with the size in words, for a number of many digits."""
    is_number = not _size(value, per).startswith('"')
    return f"  # {size_text(value)}{per}" if value >= _LARGE and is_number else ""


def _number(value: float) -> str:
    """The shortest text that reads back as the same float."""
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)


def _text(value: str) -> str:
    """A TOML basic string."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")


def _inline(value: object) -> str:
    if isinstance(value, Mapping):
        inner = ", ".join(f"{json.dumps(key) if not key.isidentifier() else key} = {_inline(x)}"
                          for key, x in value.items() if x is not None)  # fmt: skip
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_inline(x) for x in value if x is not None)}]"
    return _text(value) if isinstance(value, str) else json.dumps(value)
