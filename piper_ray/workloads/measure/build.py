"""Makes an instance for the planner from measured layers, with the ways to run each layer on t devices.

A way is measured at t = 1 or on a shard; otherwise it is estimated. Exchanges between t devices are never measured
here: their time is that of a ring's all-reduce by the table of hardware, as Megatron (Shoeybi et al. 2019) needs it.
Every two divided matrices need one all-reduce of the outputs in the forward pass and one of the inputs' gradients in
the backward pass.

Also keeps the figures measured so far in a file next to the output, from which a stopped profile continues.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from piper_ray.model.cluster import Cluster
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import Batch, Edge, Instance, Layer, Tmpc
from piper_ray.model.schedule import TRAINED_TODAY
from piper_ray.workloads.estimate.costs import Setting, edge_bytes, sync_bytes, times_of
from piper_ray.workloads.estimate.exchanges import Group, all_reduce_s
from piper_ray.workloads.estimate.hardware import Gpu, Training
from piper_ray.workloads.estimate.modes import LayerMode
from piper_ray.workloads.estimate.software import DEFAULT_SOFTWARE, Stack, software_named
from piper_ray.workloads.measure.graph import TracedLayer
from piper_ray.workloads.measure.passes import Kept, MeasuredPasses, Resident

_VERSION = 1


@dataclass(frozen=True)
class LayerFigures:
    """All measured figures of one layer.

    recomputed: None if recomputation saves nothing or the layer overwrites its inputs. output_gradients: whether each
    of its outputs has a gradient. output_bytes: of each output. input_gradient_bytes: of all inputs with gradients
    together.
    """

    plain: MeasuredPasses
    recomputed: MeasuredPasses | None
    kept: Kept
    parameters: tuple[Resident, ...]
    output_gradients: tuple[bool, ...]
    output_bytes: tuple[int, ...]
    input_gradient_bytes: int


class Store:
    """Figures by signature, one line of JSON each, below a line that names the model and the machine."""

    def __init__(self, path: Path, setting: Mapping[str, object]) -> None:
        self.path = path
        head = {"schema": "piper-ray/partial-profile", "version": _VERSION, **setting}
        self._head: dict[str, object] = json.loads(json.dumps(head))
        self._figures: dict[str, LayerFigures] = {}

    def __len__(self) -> int:
        return len(self._figures)

    def get(self, signature: str) -> LayerFigures | None:
        return self._figures.get(signature)

    def start(self) -> None:
        """Writes an empty file. Raises UsageError if it cannot be written."""
        try:
            self.path.write_text(json.dumps(self._head) + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{self.path}: cannot be written: {error.strerror or error}") from error

    def resume(self) -> None:
        """Reads the file, except an incomplete last line. Raises UsageError if it belongs to another profile."""
        try:
            lines = self.path.read_text(encoding="utf-8").splitlines()
            head = json.loads(lines[0])
        except FileNotFoundError:
            self.start()
            return
        except (OSError, ValueError, IndexError) as error:
            raise UsageError(f"--resume: {self.path} cannot be read: {error}; remove it to start anew") from error
        if head != self._head:
            known = head if isinstance(head, dict) else {}
            other = ", ".join(key for key, value in self._head.items() if known.get(key) != value) or "keys"
            raise UsageError(
                f"--resume: {self.path} is of another profile: other {other}; without --resume one starts anew"
            )
        read = map(_read, lines[1:])
        self._figures.update(entry for entry in read if entry is not None)
        self._rewrite()

    def add(self, signature: str, figures: LayerFigures) -> None:
        self._figures[signature] = figures
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_line(signature, figures))

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    def _rewrite(self) -> None:
        """Writes the file again, so that nothing is appended to an incomplete line."""
        self.start()
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(_line(signature, figures) for signature, figures in self._figures.items())


def _line(signature: str, figures: LayerFigures) -> str:
    return json.dumps({"signature": signature, "figures": dataclasses.asdict(figures)}) + "\n"


def _read(line: str) -> tuple[str, LayerFigures] | None:
    """The entry of a line; None for an incomplete line."""
    from pydantic import TypeAdapter

    try:
        document = json.loads(line)
        return document["signature"], TypeAdapter(LayerFigures).validate_python(document["figures"])
    except (ValueError, KeyError, TypeError):
        return None


_FULL_PRECISION_BYTES = 4


@dataclass(frozen=True)
class Measured:
    """A layer of the graph with its figures; layers with the same signature share them."""

    layer: TracedLayer
    signature: str
    figures: LayerFigures


@dataclass(frozen=True)
class ProfileTarget:
    """The devices and the batch that the layers are planned for, before memory is set aside.

    gpu: the GPU whose links t devices use; None if only t = 1 is needed.
    """

    cluster: Cluster
    batch: Batch
    gpu: Gpu | None
    training: Training


def instance_of(
    name: str,
    layers: Sequence[Measured],
    shards: Mapping[int, Sequence[Measured] | None],
    target: ProfileTarget,
) -> tuple[Instance, float]:
    """The workload, and the bytes of each device's memory that are set aside for recomputing one layer.

    shards: for each degree above 1 the layers of a shard, or None if they are to be estimated. Raises UsageError if the
    memory is too small to recompute a layer.
    """
    ways = [_ways_of(index, layer, shards, target) for index, layer in enumerate(layers)]
    workspace_bytes = max(way.transient_bytes for of_layer in ways for way in of_layer)
    memory_bytes = target.cluster.memory_bytes
    if workspace_bytes >= memory_bytes:
        raise UsageError(
            f"recomputing one layer takes {workspace_bytes:,.0f} bytes, more than --memory; expected a smaller "
            "--microbatch-size or more memory"
        )
    largest = max([1, *shards])
    setting = _setting(target, largest) if largest > 1 else None
    sent, tied = _sent_bytes(layers), _tied(layers)
    costs = {ends: size if setting is None else edge_bytes(size, setting) for ends, size in sent.items()}
    instance = Instance(
        layers=tuple(
            Layer(
                index,
                measured.layer.name,
                _tmpcs(index, ways[index], sent, setting),
                measured.layer.path,
                tied.get(index, ""),
            )
            for index, measured in enumerate(layers)
        ),
        edges=tuple(Edge(*ends, float(math.ceil(size))) for ends, size in costs.items()),
        cluster=replace(target.cluster, memory_bytes=float(int(memory_bytes - workspace_bytes))),
        batch=target.batch,
        name=name,
        schedule=TRAINED_TODAY,
    )
    return instance, workspace_bytes


def _ways_of(
    index: int, layer: Measured, shards: Mapping[int, Sequence[Measured] | None], target: ProfileTarget
) -> list[Way]:
    ways = list(measured_ways(layer.figures, target.training))
    for degree, of_degree in shards.items():
        assert target.gpu is not None
        if of_degree is None:
            ways += estimated_ways(layer.figures, degree, target.training, target.gpu)
        else:
            ways += shard_ways(of_degree[index].figures, layer.figures, degree, target.training, target.gpu)
    return ways


def _tied(layers: Sequence[Measured]) -> dict[int, str]:
    """For each layer that shares a parameter with others, the parameter's name in the first of these layers."""
    owners: dict[int, tuple[str, list[int]]] = {}
    for index, measured in enumerate(layers):
        for name, parameter in measured.layer.module.named_parameters():
            owners.setdefault(id(parameter), (name, []))[1].append(index)
    tied: dict[int, str] = {}
    for name, members in owners.values():
        if len(members) > 1:
            common = next((tied[index] for index in members if index in tied), name)
            tied |= dict.fromkeys(members, common)
    return tied


def _sent_bytes(layers: Sequence[Measured]) -> dict[tuple[int, int], float]:
    """The bytes of each edge, by (source, target), in the order of the targets.

    A tensor without gradient moves in one direction only, while c is charged for both; so half of its size counts.
    """
    sent: dict[tuple[int, int], float] = {}
    for target, measured in enumerate(layers):
        for source in measured.layer.sources:
            if source.layer is not None:
                figures = layers[source.layer].figures
                both = 1.0 if figures.output_gradients[source.output] else 0.5
                edge = (source.layer, target)
                sent[edge] = sent.get(edge, 0.0) + both * figures.output_bytes[source.output]
    return sent


def _tmpcs(
    index: int, ways: Sequence[Way], sent: Mapping[tuple[int, int], float], setting: Setting | None
) -> dict[int, tuple[Tmpc, ...]]:
    tmpcs: dict[int, tuple[Tmpc, ...]] = {}
    for way in ways:
        mode = LayerMode(degree=way.degree)
        extra = {
            edge: 0.0 if setting is None else sync_bytes(size, mode.degree, mode, setting)
            for edge, size in sent.items()
        }
        tmpc = Tmpc(
            id=way.id,
            **times_of(way.time_s, way.forward_s),
            weights_bytes=float(math.ceil(way.gradient_bytes)),
            activation_bytes=float(math.ceil(way.activation_bytes)),
            fixed_bytes=float(math.ceil(way.state_bytes)),
            forward_sync_bytes={u: size for (u, v), size in extra.items() if v == index},
            backward_sync_bytes={v: size for (u, v), size in extra.items() if u == index},
            recompute=way.recompute,
        )
        tmpcs[way.degree] = (*tmpcs.get(way.degree, ()), tmpc)
    return tmpcs


def _setting(target: ProfileTarget, largest: int) -> Setting:
    assert target.gpu is not None
    microbatches, bytes_per_s = target.batch.microbatches, target.cluster.bandwidth_bytes_per_s
    stack = Stack(target.gpu, software_named(DEFAULT_SOFTWARE))
    return Setting(stack, target.training, microbatches, bytes_per_s, 0.0, largest)


@dataclass(frozen=True)
class Way:
    """One way to run a layer, which becomes a TMPC.

    forward_s: the part of time_s before the backward pass. transient_bytes: additional memory that is needed once,
    while the layer is recomputed.
    """

    id: str
    degree: int
    recompute: bool
    time_s: float
    forward_s: float
    gradient_bytes: float
    state_bytes: float
    activation_bytes: float
    transient_bytes: float


def measured_ways(figures: LayerFigures, training: Training) -> Iterator[Way]:
    """The ways to run a layer at t = 1, as measured."""
    yield from _ways(figures, figures.parameters, training, 1, "", 1.0, (0.0, 0.0))


def shard_ways(shard: LayerFigures, whole: LayerFigures, degree: int, training: Training, gpu: Gpu) -> Iterator[Way]:
    """The ways measured on one of ``degree`` shards. whole: the figures of the same layer undivided."""
    matrices = [held.shape for held in whole.parameters if _is_matrix(held)]
    divided = sum(held.shape not in matrices for held in shard.parameters if _is_matrix(held))
    exchange_s = _exchange_s(shard, divided, degree, gpu)
    yield from _ways(shard, shard.parameters, training, degree, "-shard", 1.0, exchange_s)


def estimated_ways(whole: LayerFigures, degree: int, training: Training, gpu: Gpu) -> Iterator[Way]:
    """Ways estimated on the assumption that matrices with a side that t divides are divided, and the time with them.
    Each device has all of the rest."""
    held = [
        Resident((one.numbers // degree,), one.number_bytes, one.trainable) if _is_divisible(one, degree) else one
        for one in whole.parameters
    ]
    divided = sum(_is_divisible(one, degree) for one in whole.parameters)
    share = 1.0 / degree if divided else 1.0
    yield from _ways(whole, held, training, degree, "-estimated", share, _exchange_s(whole, divided, degree, gpu))


def _ways(
    figures: LayerFigures,
    held: Sequence[Resident],
    training: Training,
    degree: int,
    suffix: str,
    share: float,
    exchange_s: tuple[float, float],
) -> Iterator[Way]:
    """share: the part of the measured time and activations on each device, except the layer's inputs. exchange_s: the
    times of the exchanges in the forward and the backward pass."""
    kept, gradients, state = figures.kept, _gradient_bytes(held), _state_bytes(held, training)
    saved = kept.saved_inputs + (kept.saved - kept.saved_inputs) * share
    forward_s, backward_s = exchange_s
    time_s = figures.plain.total_s * share + forward_s + backward_s
    first_s = figures.plain.forward_share_s * share + forward_s
    yield Way(f"plain{suffix}", degree, False, time_s, first_s, gradients, state, saved, 0.0)
    if figures.recomputed is not None and kept.inputs < saved:
        time_s = figures.recomputed.total_s * share + 2.0 * forward_s + backward_s
        first_s = figures.recomputed.forward_share_s * share + forward_s
        yield Way(f"full{suffix}", degree, True, time_s, first_s, gradients, state, float(kept.inputs), saved)


def _exchange_s(figures: LayerFigures, divided: int, degree: int, gpu: Gpu) -> tuple[float, float]:
    times = math.ceil(divided / 2)

    def reduced_s(size_bytes: float) -> float:
        return times * all_reduce_s(size_bytes, Group(degree), gpu, degree) if size_bytes else 0.0

    return reduced_s(sum(figures.output_bytes)), reduced_s(figures.input_gradient_bytes)


def _is_matrix(held: Resident) -> bool:
    return held.trainable and len(held.shape) > 1


def _is_divisible(held: Resident, degree: int) -> bool:
    return _is_matrix(held) and any(side % degree == 0 for side in held.shape[:2])


def _gradient_bytes(held: Sequence[Resident]) -> float:
    """Bytes of gradients, which have the types of their parameters in torch."""
    return float(sum(one.numbers * one.number_bytes for one in held if one.trainable))


def _state_bytes(held: Sequence[Resident], training: Training) -> float:
    """The bytes of parameters, of gradients and of optimizer state, which has no copy of parameters that already have
    full precision."""
    total = _gradient_bytes(held)
    for one in held:
        each = float(one.number_bytes)
        if one.trainable:
            copy = _FULL_PRECISION_BYTES if one.number_bytes >= _FULL_PRECISION_BYTES else 0
            each += max(0.0, training.optimizer_bytes - copy)
        total += one.numbers * each
    return total
