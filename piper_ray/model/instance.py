"""The problem: layers, their configurations, edges, the cluster they run on (Piper, section 3), and the batch.

One pass works on one microbatch, the paper's sample; all times "per sample" are times per microbatch.

Plain frozen data. ``formats`` builds it from files and checks every instance, wherever it comes from; nothing here
reads, solves or prints. Numbers of other libraries (numpy, for example) are converted to Python's; whether they make
sense is checked later.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from piper_ray.model.arguments import cluster_figures, shown
from piper_ray.model.cluster import Cluster, Link
from piper_ray.model.errors import UsageError
from piper_ray.model.figures import html_table, memory_text, plural
from piper_ray.model.mode import Mode, mode_of
from piper_ray.model.schedule import Schedule
from piper_ray.model.units import as_tuple, convert_fields, count, counts, figure, plain, size


@dataclass(frozen=True)
class Batch:
    """The data of one training step.

    microbatches: N. samples_per_microbatch, tokens_per_sample: numbers of the training data; None if unknown.

    >>> Batch(512, samples_per_microbatch=2).samples
    1024
    """

    microbatches: int
    samples_per_microbatch: int | None = None
    tokens_per_sample: int | None = None

    def __post_init__(self) -> None:
        convert_fields(self, count, "microbatches", "samples_per_microbatch", "tokens_per_sample")

    def step_s(self, time_per_sample_s: float) -> float:
        """The time of the whole batch, in s."""
        return self.microbatches * time_per_sample_s

    @property
    def samples(self) -> int | None:
        """The samples of the whole batch; None if unknown."""
        return None if self.samples_per_microbatch is None else self.microbatches * self.samples_per_microbatch

    @property
    def tokens_per_microbatch(self) -> int | None:
        """The tokens of a microbatch; None if unknown, and for samples without tokens."""
        if self.samples_per_microbatch is None or self.tokens_per_sample is None:
            return None
        return self.samples_per_microbatch * self.tokens_per_sample


@dataclass(frozen=True)
class TrainedModel:
    """The model that a workload describes, and how it is trained.

    config: the keys of its Hugging Face config that matter here, ``model_type`` among them; plain values. precision: of
    matrix products: bf16, fp16 or fp8. software: the generation of training software whose speed the times assume.
    gpu: the device of these times, by its key in the table of hardware; "several": of devices of several kinds; "":
    the times are no estimates, as in a profile. lora_rank: the rank of adapters that are
    trained while the model is frozen; 0: the model itself is trained. fused_attention: attention is one kernel.
    context_exchange: how groups that share a sequence exchange keys and values for attention. dispatcher: how tokens
    reach experts on other devices; "": the usual way for the number of ranks. expert_overlap: whether that overlaps
    with passes. weight_bytes, gradient_bytes, optimizer_bytes: bytes kept per parameter. optimizer_on_host: the
    optimizer's state is in host memory, and parameters are updated there. calibrated: ``least`` and ``most`` of
    measured over estimated steps of the cluster, and the number of ``runs``; None: none were measured.

    >>> TrainedModel({"model_type": "llama"}).precision
    'bf16'
    """

    config: Mapping[str, object] = field(default_factory=dict)
    precision: str = "bf16"
    software: str = "megatron-core"
    gpu: str = ""
    lora_rank: int = 0
    fused_attention: bool = True
    context_exchange: str = "ring"
    dispatcher: str = ""
    expert_overlap: bool = False
    weight_bytes: float = 2.0
    gradient_bytes: float = 4.0
    optimizer_bytes: float = 12.0
    optimizer_on_host: bool = False
    calibrated: Mapping[str, Any] | None = None

    @property
    def on_blackwell(self) -> bool:
        """Whether its device is of NVIDIA's Blackwell, which scales 8-bit products by blocks of 32 numbers (MXFP8)."""
        return self.gpu.startswith(("B", "GB"))


_CHECKED = "_checked"


@dataclass(frozen=True)
class Tmpc:
    """A tensor model parallelism configuration: one way to run one layer on t devices.

    time_per_sample_s: p, forward and backward, on the t devices together. If left out, it is the sum of both passes.

    weights_bytes: w, on each device.

    activation_bytes: a, on each device and for each microbatch in flight; memory is a*y + b.

    fixed_bytes: b, on each device.

    forward_sync_bytes: fw by the predecessor's layer id, in addition to the edge's bytes.

    backward_sync_bytes: bw by the successor's layer id, in addition to the edge's bytes.

    recompute: the configuration recomputes activations in the backward pass.

    shared_bytes: memory that the d replicas of a stage divide among them: each holds 1/d. Memory is then a*y + b +
    shared/d.

    least_data_parallel_degree: only stages with at least this many replicas may use the configuration.

    forward_s, backward_s: the passes that make up p; None where only p is known (``passes`` states the assumption
    then). Any two of p and these two determine the third.

    weight_s: the part of backward_s that computes gradients of weights; None if unknown.

    mode: how it runs the layer apart from its degree; if left out, it is read from the words of its id and
    ``recompute``.

    kind: the kind of device that it runs on, if the cluster has several.

    A neighbour that a sync table does not name adds no bytes: tables that differ in zeros only are equal.

    >>> Tmpc("plain", forward_s=0.01, backward_s=0.02, weights_bytes="1GiB").time_per_sample_s
    0.03
    """

    id: str
    time_per_sample_s: float = None  # type: ignore[assignment] # a number from __post_init__ on
    weights_bytes: float = 0.0
    activation_bytes: float = 0.0
    fixed_bytes: float = 0.0
    forward_sync_bytes: Mapping[int, float] = field(default_factory=dict)
    backward_sync_bytes: Mapping[int, float] = field(default_factory=dict)
    recompute: bool = False
    shared_bytes: float = 0.0
    least_data_parallel_degree: int = 1
    forward_s: float | None = None
    backward_s: float | None = None
    weight_s: float | None = None
    mode: Mode = field(default=None, repr=False)  # type: ignore[assignment] # a mode from __post_init__ on
    kind: str = ""

    def __post_init__(self) -> None:
        convert_fields(self, figure, "time_per_sample_s")
        convert_fields(self, size, "weights_bytes", "activation_bytes", "fixed_bytes", "shared_bytes")
        convert_fields(self, _table, "forward_sync_bytes", "backward_sync_bytes")
        convert_fields(self, plain, "recompute")
        convert_fields(self, count, "least_data_parallel_degree")
        if self.forward_s is not None or self.backward_s is not None or self.weight_s is not None:
            convert_fields(self, figure, "forward_s", "backward_s", "weight_s")
            self._complete_times()
        given: object = self.mode
        if given is None:
            object.__setattr__(self, "mode", mode_of(str(self.id), self.recompute is True))

    def between(self, forward_sync_bytes: Mapping[int, float], backward_sync_bytes: Mapping[int, float]) -> Tmpc:
        """The same configuration with other sync tables, for an equal layer elsewhere. Their values are floats."""
        found = object.__new__(Tmpc)  # as ``changed``, which takes a third longer
        vars(found).update(vars(self), forward_sync_bytes=forward_sync_bytes, backward_sync_bytes=backward_sync_bytes)
        return found

    def changed(self, **fields: object) -> Tmpc:
        """The same configuration with new values of these fields, which must be converted already: none is checked."""
        found = object.__new__(Tmpc)
        vars(found).update(vars(self), **fields)
        return found

    def _complete_times(self) -> None:
        """Computes the third of p, forward_s and backward_s from the other two."""
        names = ("time_per_sample_s", "forward_s", "backward_s")
        known = {name: value for name in names if isinstance(value := getattr(self, name), float)}
        missing = [name for name in names if getattr(self, name) is None]
        if len(known) < 2 or len(missing) != 1:
            return  # the check of the instance reports what is wrong
        if missing == ["time_per_sample_s"]:
            found = known["forward_s"] + known["backward_s"]
        else:
            (given,) = known.keys() - {"time_per_sample_s"}
            found = known["time_per_sample_s"] - known[given]
        object.__setattr__(self, missing[0], found)

    def __eq__(self, other: object) -> bool:
        return _comparable(self) == _comparable(other) if isinstance(other, Tmpc) else NotImplemented

    def __hash__(self) -> int:
        return hash((self.id, self.time_per_sample_s))


class MovedRows(Mapping[int, tuple[Tmpc, ...]]):
    """The rows of ``layer``, for a layer whose neighbours' ids are larger by ``by``. Each is made when it is first
    read."""

    def __init__(self, layer: Layer, by: int) -> None:
        self.layer, self.by = layer, by
        self._made: dict[int, tuple[Tmpc, ...]] = {}
        self._tables: dict[int, dict[int, float]] = {}  # by the identity of a table, which many TMPCs share

    def __getitem__(self, t: int) -> tuple[Tmpc, ...]:
        if (made := self._made.get(t)) is None:
            row = self.layer.tmpcs[t]
            moved = (x.between(self._moved(x.forward_sync_bytes), self._moved(x.backward_sync_bytes)) for x in row)
            made = self._made.setdefault(t, tuple(moved))  # the same for all threads
        return made

    def __iter__(self) -> Iterator[int]:
        return iter(self.layer.tmpcs)

    def __len__(self) -> int:
        return len(self.layer.tmpcs)

    def _moved(self, sizes: Mapping[int, float]) -> dict[int, float]:
        if id(sizes) not in self._tables:
            self._tables[id(sizes)] = {end + self.by: size for end, size in sizes.items()}
        return self._tables[id(sizes)]


@dataclass(frozen=True)
class Layer:
    """A node of the DNN's graph. ``tmpcs[t]`` lists the configurations for tensor-parallel degree t.

    path: the module's name in the user's model, such as "model.layers.17"; empty if unknown. tied: a name that all
    layers with the same tied weights share; empty for untied weights. experts: the number of experts its tokens are
    routed to, 0 if it has none. key_heads: the heads of keys and values in its attention, 0 without attention or if
    unknown.
    predictor: whether it predicts a further token (multi-token prediction) in addition to the decoder.

    >>> Layer(0, "block", {1: [Tmpc("plain", 0.03)], 2: [Tmpc("plain", 0.02)]}).tmpcs[2][0].time_per_sample_s
    0.02
    """

    id: int
    name: str
    tmpcs: Mapping[int, tuple[Tmpc, ...]]
    path: str = ""
    tied: str = ""
    experts: int = 0
    key_heads: int = 0
    predictor: bool = False

    def __post_init__(self) -> None:
        convert_fields(self, count, "id", "experts", "key_heads")
        convert_fields(self, plain, "predictor")
        convert_fields(self, _rows, "tmpcs")

    def having(self, tmpcs: Mapping[int, tuple[Tmpc, ...]]) -> Layer:
        """The same layer with other rows, which must be converted already."""
        found = object.__new__(Layer)  # as ``replace``, which takes several times as long
        vars(found).update(vars(self), tmpcs=tmpcs)
        return found

    @property
    def priced(self) -> Layer:
        """The layer that its rows were made for: another one if they are moved."""
        return self.tmpcs.layer if isinstance(self.tmpcs, MovedRows) else self

    def __repr__(self) -> str:
        given: object = self.tmpcs  # before the check it may have any type
        rows = given.items() if isinstance(given, Mapping) else ()
        counts = "".join(f"; t={t}: {plural(len(row), 'TMPC')}" for t, row in rows if isinstance(row, tuple))
        return f"Layer({self.id!r}, {shown(self.name)}{counts})"


def with_rows(layers: Iterable[Layer], rows_of: Callable[[Layer], Mapping[int, tuple[Tmpc, ...]]]) -> tuple[Layer, ...]:
    """The layers with other rows. rows_of: those of a layer; it is called once for layers that are alike but for their
    neighbours."""
    made: dict[int, Layer] = {}
    found = list[Layer]()
    for layer in layers:
        priced = layer.priced
        if id(priced) not in made:
            made[id(priced)] = priced.having(rows_of(priced))
        own = made[id(priced)]
        found.append(own if priced is layer else layer.having(MovedRows(own, layer.id - own.id)))
    return tuple(found)


@dataclass(frozen=True)
class Edge:
    """A tensor that layer ``source`` passes to layer ``target``: c bytes per sample when it crosses stages.

    >>> Edge(0, 1, "16MiB").communication_bytes
    16777216.0
    """

    source: int
    target: int
    communication_bytes: float

    def __post_init__(self) -> None:
        convert_fields(self, count, "source", "target")
        convert_fields(self, size, "communication_bytes")


@dataclass(frozen=True)
class Tensor:
    """A tensor with several ends, which each stage sends or receives once, however many of its layers make or use it.

    ``layers`` are its makers and users, in any order. A stage with some but not all of them moves it: ``forward_bytes``
    per sample in the forward pass, ``backward_bytes`` in the backward pass. It does not constrain the order of stages;
    edges do. An edge's own bytes, in contrast, are charged for each edge, as in Piper.

    >>> Tensor((0, 1, 5), "16MiB", "16MiB").layers
    (0, 1, 5)
    """

    layers: tuple[int, ...]
    forward_bytes: float
    backward_bytes: float

    def __post_init__(self) -> None:
        convert_fields(self, counts, "layers")
        convert_fields(self, size, "forward_bytes", "backward_bytes")


@dataclass(frozen=True, init=False)
class Instance:
    """Everything a plan depends on. Layers and edges keep the order of the file.

    tensors: charged once for each stage, in addition to edges, which are charged one by one. schedule: the schedule for
    its plans; None: unknown, and ``solve`` then takes Piper's. model: the trained model, and how it is trained; None:
    unknown. Plans do not depend on it; launch files do. notes: a sentence for each thing that the reader assumed,
    changed, or takes for a mistake; notes do not change costs. measured_threads: the CPU threads of each process when
    its times were measured; None if they were not measured on a CPU. schemes: TMPCs that were found from operators, in
    full, by the words of their ids (``workloads.schemes``).

    devices: K. microbatches: N, in a batch. memory_bytes: M, of each device. bandwidth_bytes_per_s: B, from a device to
    the outside. These four describe a cluster with one link and a batch of which no more is known; if ``cluster`` or
    ``batch`` is passed too, they replace its figures.

    >>> layers = [Layer(number, "block", {1: [Tmpc("plain", 0.03)]}) for number in range(4)]
    >>> edges = [Edge(number, number + 1, "16MiB") for number in range(3)]
    >>> Instance(layers, edges, devices=4, microbatches=8, memory_bytes="80GB", bandwidth_bytes_per_s="50GB/s").devices
    4
    """

    layers: tuple[Layer, ...]
    edges: tuple[Edge, ...]
    cluster: Cluster
    batch: Batch
    name: str = ""
    tensors: tuple[Tensor, ...] = ()
    notes: tuple[str, ...] = field(default=(), compare=False)
    schedule: Schedule | None = None
    model: TrainedModel | None = None
    measured_threads: int | None = None
    schemes: Mapping[str, Mapping[str, object]] = field(default_factory=dict, compare=False)

    def __init__(
        self,
        layers: Iterable[Layer],
        edges: Iterable[Edge],
        devices: int | None = None,
        microbatches: int | None = None,
        memory_bytes: float | str | None = None,
        bandwidth_bytes_per_s: float | str | None = None,
        name: str = "",
        tensors: Iterable[Tensor] = (),
        notes: Iterable[str] = (),
        *,
        cluster: Cluster | None = None,
        batch: Batch | None = None,
        schedule: Schedule | str | None = None,
        model: TrainedModel | None = None,
        measured_threads: int | None = None,
        schemes: Mapping[str, Mapping[str, object]] | None = None,
    ) -> None:
        figures = {
            "devices": devices,
            "memory_bytes": memory_bytes,
            "bandwidth_bytes_per_s": bandwidth_bytes_per_s,
        }
        if cluster is None:
            # The check of the instance reports missing figures.
            cluster = Cluster(devices, memory_bytes, (Link(bandwidth_bytes_per_s),))  # type: ignore[arg-type] # or texts
        elif given := {name: value for name, value in figures.items() if value is not None}:
            cluster = cluster.changed(given)
        if batch is None:
            batch = Batch(microbatches)  # type: ignore[arg-type]
        elif microbatches is not None:
            batch = dataclasses.replace(batch, microbatches=microbatches)
        values = {"layers": layers, "edges": edges, "cluster": cluster, "batch": batch, "name": name}
        values |= {"schedule": _named_schedule(schedule), "model": model, "measured_threads": measured_threads}
        values["schemes"] = {} if schemes is None else schemes
        for field_name, value in (values | {"tensors": tensors, "notes": notes}).items():
            object.__setattr__(self, field_name, value)
        convert_fields(self, as_tuple, "layers", "edges", "tensors", "notes")
        convert_fields(self, count, "measured_threads")

    def replace(
        self,
        *,
        devices: int | None = None,
        microbatches: int | None = None,
        memory_bytes: float | str | None = None,
        bandwidth_bytes_per_s: float | str | None = None,
        schedule: Schedule | str | None = None,
        cluster: Cluster | None = None,
    ) -> Instance:
        """The same workload on another cluster, or under another schedule; None keeps the present value. A new
        bandwidth replaces all links; ``cluster``, which must be valid, replaces the whole cluster. Sizes are numbers of
        bytes or texts such as "8GiB" and "25GB/s".

        Raises UsageError for figures that make no sense.
        """
        figures = cluster_figures(devices, microbatches, memory_bytes, bandwidth_bytes_per_s)
        batch = dataclasses.replace(self.batch, microbatches=figures.get("microbatches", self.microbatches))
        under = self.schedule if schedule is None else _named_schedule(schedule)
        on = (self.cluster if cluster is None else cluster).changed(figures)
        return dataclasses.replace(self, cluster=on, batch=batch, schedule=under).checked_as(self)

    def require_one_site(self, what: str) -> None:
        """Raises UsageError for a cluster at several sites. what: what does not support these, in words."""
        if self.cluster.sites:
            takes = "1f1b and all others with a flush take them"
            raise UsageError(f"{what}: not with pipelines at each of several sites; {takes}")

    def require_one_kind(self, what: str) -> None:
        """Raises UsageError for a cluster with several kinds of devices. what: what does not support these, in
        words."""
        if self.cluster.kinds:
            names = ", ".join(self.cluster.kind_names)
            of = "at several sites" if self.kind_word == "site" else "of several kinds"
            raise UsageError(
                f"{what}: not with devices {of} ({names}); solve, evaluate and simulate take them under "
                "2bw, 1f1b and gpipe"
            )

    @property
    def kind_word(self) -> str:
        """``site`` if devices are at several sites, or their kinds are one GPU at several, else ``kind``."""
        of_one_gpu = self.model is not None and self.model.gpu not in ("", "several")
        return "site" if self.cluster.sites or (self.cluster.kinds and of_one_gpu) else "kind"

    @property
    def devices(self) -> int:
        """K: the number of devices."""
        return self.cluster.devices

    @property
    def memory_bytes(self) -> float:
        """M: the memory of each device."""
        return self.cluster.memory_bytes

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """B: bytes per second from a device to the outside."""
        return self.cluster.bandwidth_bytes_per_s

    @property
    def microbatches(self) -> int:
        """N: the microbatches of a batch."""
        return self.batch.microbatches

    def __repr__(self) -> str:
        if not self.checked:  # values may have any type
            graph = f"layers={shown(self.layers)}, edges={shown(self.edges)}"
            return (
                f"Instance({graph}, cluster={shown(self.cluster)}, batch={shown(self.batch)}, name={shown(self.name)})"
            )
        head, *others = (f"{name} {text}" for name, text in self._facts())
        return f"Instance({'; '.join([f'{shown(self.name)}: {head}', *others])})"

    def _repr_html_(self) -> str:
        if not self.checked:
            return html_table("Instance", [("layers", shown(self.layers)), ("edges", shown(self.edges))])
        return html_table(f"Instance {self.name}", self._facts())

    def _facts(self) -> list[tuple[str, str]]:
        degrees = ", ".join(map(str, self.degrees))
        return [
            ("layers", f"{len(self.layers):,}"),
            ("edges", f"{len(self.edges):,}"),
            ("tensor-parallel degrees", degrees),
            ("devices", f"{self.devices:,} of {memory_text(self.memory_bytes)}"),
            ("microbatches", f"{self.microbatches:,}"),
            *([] if self.schedule is None else [("schedule", self.schedule.text)]),
        ]

    @property
    def checked(self) -> bool:
        """Whether a check found that it keeps all rules (``formats.objects``)."""
        return _CHECKED in vars(self)

    def mark_checked(self) -> None:
        """Marks the instance as checked. Call it only after all rules were checked."""
        vars(self)[_CHECKED] = True

    def checked_as(self, other: Instance) -> Instance:
        """Returns itself, marked as checked if ``other`` is: for instances derived from ``other`` in a way that keeps
        all rules."""
        if other.checked:
            self.mark_checked()
        return self

    @cached_property
    def layer_by_id(self) -> Mapping[int, Layer]:
        """The layers by their ids."""
        return {layer.id: layer for layer in self.layers}

    @cached_property
    def tied_layers(self) -> Mapping[str, tuple[int, ...]]:
        """The ids of the layers that share tied weights, by the name of the weights; names with one layer are left
        out."""
        found: dict[str, tuple[int, ...]] = {}
        for layer in self.layers:
            if layer.tied:
                found[layer.tied] = (*found.get(layer.tied, ()), layer.id)
        return {name: layers for name, layers in found.items() if len(layers) > 1}

    @cached_property
    def key_heads(self) -> int:
        """The greatest common divisor of the key and value heads of all layers; 0 if none has any."""
        return math.gcd(*(layer.key_heads for layer in self.layers))

    @cached_property
    def degrees(self) -> tuple[int, ...]:
        """The tensor-parallel degrees of all layers together, ascending."""
        return tuple(sorted({t for layer in self.priced_layers for t, tmpcs in layer.tmpcs.items() if tmpcs}))

    @property
    def priced_layers(self) -> list[Layer]:
        """Layers with all rows that there are, but for their neighbours' numbers."""
        return list({id(layer.priced): layer.priced for layer in self.layers}.values())

    @cached_property
    def contexts(self) -> frozenset[int]:
        """The degrees of context parallelism of all configurations together."""
        rows = (row for layer in self.priced_layers for row in layer.tmpcs.values())
        return frozenset(tmpc.mode.context for row in rows for tmpc in row)

    @cached_property
    def least_data_parallel_degrees(self) -> tuple[int, ...]:
        """1 and the least data-parallel degrees of all configurations, ascending."""
        asked = {
            x.least_data_parallel_degree for layer in self.priced_layers for xs in layer.tmpcs.values() for x in xs
        }
        return tuple(sorted({1, *asked}))

    @cached_property
    def data_parallel_limit(self) -> int:
        """min(N, K): the data-parallel degrees of a plan's stages sum to at most this."""
        return min(self.microbatches, self.devices)

    @property
    def versions_in_fixed(self) -> int:
        """How many versions of the weights the fixed memory contains: two in a workload for 2bw, one if the schedule
        flushes."""
        return 2 if Schedule.first_of(self.schedule).asynchronous else 1

    @cached_property
    def neighbours(self) -> Mapping[int, tuple[tuple[int, ...], tuple[int, ...]]]:
        """For each layer id the ids of its predecessors and of its successors, in the order of the edges."""
        before: dict[int, list[int]] = {layer.id: [] for layer in self.layers}
        after: dict[int, list[int]] = {layer.id: [] for layer in self.layers}
        for edge in self.edges:
            before.setdefault(edge.target, []).append(edge.source)
            after.setdefault(edge.source, []).append(edge.target)
        return {layer.id: (tuple(before[layer.id]), tuple(after[layer.id])) for layer in self.layers}

    @cached_property
    def digest(self) -> str:
        """SHA-256 over every figure, in file order: two instances with the same digest have the same plans."""
        document: list[object] = [
            [
                [
                    layer.id,
                    layer.name,
                    [
                        [t, [_tmpc_figures(tmpc, *self.neighbours[layer.id]) for tmpc in layer.tmpcs[t]]]
                        for t in sorted(layer.tmpcs)
                    ],
                ]
                for layer in self.layers
            ],
            [[edge.source, edge.target, edge.communication_bytes + 0.0] for edge in self.edges],
            [self.devices, self.microbatches, self.memory_bytes, self.bandwidth_bytes_per_s],
        ]
        if inner := self.cluster.links[:-1]:
            document.append(_link_figures(inner))
            if any(link.uplink_bytes_per_s for link in inner):
                document.append(_link_figures(self.cluster.links[-1:]))
        if self.cluster.kinds:
            kinds = [[x.name, *_cluster_figures(x.cluster)] for x in self.cluster.kinds]
            document.append([self.cluster.between_bytes_per_s, kinds])
        if self.cluster.sites:
            document.append([self.cluster.between_bytes_per_s, len(self.cluster.sites)])
        if self.tensors:
            document.append([[x.layers, x.forward_bytes + 0.0, x.backward_bytes + 0.0] for x in self.tensors])
        return hashlib.sha256(json.dumps(document, separators=(",", ":")).encode()).hexdigest()


def _named_schedule(given: Schedule | str | None) -> Schedule | None:
    """An unknown name stays as it is; the check of the instance reports it."""
    try:
        return None if given is None else Schedule.of(given)
    except UsageError:
        return given  # type: ignore[return-value]


def _table(sizes: object) -> object:
    """A sync table with plain numbers."""
    if not isinstance(sizes, Mapping) or all(type(u) is int and type(size) is float for u, size in sizes.items()):
        return sizes
    return {count(u): figure(size) for u, size in sizes.items()}


def _rows(tmpcs: object) -> object:
    """The TMPCs of a layer as tuples, without degrees that have no TMPC."""
    if not isinstance(tmpcs, Mapping) or isinstance(tmpcs, MovedRows):
        return tmpcs
    if all(type(t) is int and type(row) is tuple and row for t, row in tmpcs.items()):
        return tmpcs
    rows = {count(t): as_tuple(row) for t, row in tmpcs.items()}
    return {t: row for t, row in rows.items() if row != ()}


def _comparable(tmpc: Tmpc) -> dict[str, object]:
    """All fields, with zeros removed from the sync tables."""
    return {
        name: {key: size for key, size in value.items() if size} if isinstance(value, Mapping) else value
        for name, value in vars(tmpc).items()
    }


def _tmpc_figures(tmpc: Tmpc, before: Iterable[int], after: Iterable[int]) -> list[object]:
    """The figures of a TMPC, with -0.0 as 0.0, and with a figure for every neighbour."""
    return [
        tmpc.id,
        tmpc.time_per_sample_s + 0.0,
        tmpc.weights_bytes + 0.0,
        tmpc.activation_bytes + 0.0,
        tmpc.fixed_bytes + 0.0,
        [(u, size + 0.0) for u, size in sorted({**dict.fromkeys(before, 0.0), **tmpc.forward_sync_bytes}.items())],
        [(w, size + 0.0) for w, size in sorted({**dict.fromkeys(after, 0.0), **tmpc.backward_sync_bytes}.items())],
        tmpc.recompute,
        # Fields that few instances use are left out at their default, so that recorded digests stay valid.
        *([tmpc.shared_bytes, tmpc.least_data_parallel_degree] if _shards(tmpc) else []),
        *([[tmpc.forward_s, tmpc.backward_s, tmpc.weight_s]] if tmpc.forward_s is not None else []),
        *([repr(tmpc.mode)] if tmpc.mode != mode_of(str(tmpc.id), tmpc.recompute is True) else []),
        *([{"kind": tmpc.kind}] if tmpc.kind else []),
    ]


def _cluster_figures(cluster: Cluster) -> list[object]:
    return [cluster.devices, cluster.memory_bytes + 0.0, _link_figures(cluster.links)]


def _link_figures(links: Iterable[Link]) -> list[object]:
    return [
        [x.devices, x.bandwidth_bytes_per_s + 0.0, *([x.uplink_bytes_per_s] if x.uplink_bytes_per_s else [])]
        for x in links
    ]


def _shards(tmpc: Tmpc) -> bool:
    return tmpc.shared_bytes != 0.0 or tmpc.least_data_parallel_degree != 1


def divisors(number: int) -> list[int]:
    """All positive divisors of ``number``, ascending. For N these are the possible data-parallel degrees."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def reached(start: int, ahead: Mapping[int, Iterable[int]] | Sequence[Iterable[int]]) -> set[int]:
    """``start`` and all that paths from it lead to. ahead: what each layer leads to."""
    found, pending = {start}, [start]
    while pending:
        new = set(ahead[pending.pop()]) - found
        found |= new
        pending += new
    return found
