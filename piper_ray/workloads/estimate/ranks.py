"""The most memory that each rank of a training run holds, and its parts at that moment.

The passes of a rank run in their order here: a microbatch's activations exist from its forward pass through a chunk to
its backward pass. The worst moment of all backward passes and of the optimizer's step counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from piper_ray.model.mode import Sharding
from piper_ray.workloads.estimate.memory import activation_bytes, numbers_on_device, parameters_on_device, working_bytes
from piper_ray.workloads.estimate.modes import LayerMode
from piper_ray.workloads.estimate.operators import LOSS, LayerKind, Operator, Split
from piper_ray.workloads.estimate.runtimes import Traits

Chunk = Sequence[tuple[LayerKind, LayerMode]]
"""The layers of a chunk in their order, each with its mode."""


@dataclass(frozen=True)
class RankLayout:
    """The part of a model on a rank.

    chunks: the one nearest the input first. replicas: the number that share the state of its layers. expert_replicas:
    the number that share the state of its experts. groups: the number of groups of ranks with which it communicates.
    rank: its place in a pipeline of ``ranks``.
    """

    chunks: Sequence[Chunk]
    replicas: int
    expert_replicas: int
    sharding: Sharding
    ranks: int = 1
    rank: int = 0
    groups: int = 1


_BUFFERS = "buffers"
_LOSS = "logits and loss"
_TERM_OF = {
    "weights": "weights",
    "gradients": "gradients",
    "accumulated gradients": "gradients",
    "optimizer state": "optimizer state",
    "activations": "activations",
    _LOSS: _LOSS,
    "backward pass": "backward pass",
    "gradients' copy for the step": "backward pass",
}
"""The term of each item, by the part of its name before a colon; all others are buffers."""

_TERMS = (*dict.fromkeys(_TERM_OF.values()), _BUFFERS)


@dataclass(frozen=True)
class RankMemory:
    """What a rank holds at its worst moment, in bytes.

    items: what is allocated then, by what it is; ``moment`` names the moment. layers: of each chunk; in_flight: the
    microbatches of each chunk that are kept then; parameters: those that the rank holds. reserved_bytes: what the
    allocator holds of the device where there is room; shown_bytes: what nvidia-smi shows then, with CUDA's context and
    communicators. device_bytes: what the device must have: when there is no room the allocator gives back all of its
    fragments but what is stuck.

    >>> import piper_ray
    >>> rank = piper_ray.memory("llama3-8b", "tp=2,dp=4").ranks[0]
    >>> rank.terms["weights"] == 2 * rank.parameters
    True
    """

    items: Mapping[str, float]
    moment: str
    fragments_bytes: float
    stuck_bytes: float
    context_bytes: float
    communicators_bytes: float
    layers: tuple[int, ...] = ()
    in_flight: tuple[int, ...] = ()
    parameters: float = 0.0

    @property
    def terms(self) -> dict[str, float]:
        """The allocated bytes in few terms: states, what microbatches in flight keep, and what comes and goes."""
        found = dict.fromkeys(_TERMS, 0.0)
        for name, size in self.items.items():
            found[_TERM_OF.get(name.partition(":")[0], _BUFFERS)] += size
        return found

    @property
    def outside_bytes(self) -> float:
        """Bytes outside the allocator's tensors: CUDA's context, communicators, what is stuck in the allocator."""
        return self.device_bytes - self.allocated_bytes

    @property
    def allocated_bytes(self) -> float:
        """The bytes that are allocated at the worst moment."""
        return sum(self.items.values())

    @property
    def reserved_bytes(self) -> float:
        """The bytes of the device that the allocator holds while there is room."""
        return self.allocated_bytes + self.fragments_bytes

    @property
    def shown_bytes(self) -> float:
        """The bytes that nvidia-smi shows then."""
        return self.reserved_bytes + self.context_bytes + self.communicators_bytes

    @property
    def device_bytes(self) -> float:
        """The bytes that the device must have."""
        return self.allocated_bytes + self.stuck_bytes + self.context_bytes + self.communicators_bytes


@dataclass(frozen=True)
class _Work:
    """The memory of a chunk.

    kept: bytes of each microbatch, by item. working: the most bytes beyond all that is kept when its backward pass
    begins. moment: the kind of layer that then runs.
    """

    kept: Mapping[str, float]
    working: float
    moment: str


def memory_of_rank(layout: RankLayout, passes: Iterable[tuple[str, int]], runtime: Traits) -> RankMemory:
    """The memory of a rank. passes: the passes in order, each with its chunk: "F" and "B", or "I" and "W" for the two
    halves of a backward pass."""
    reduced = _reduced_bytes(layout, runtime)
    works = [_work(chunk, runtime, reduced) for chunk in layout.chunks]
    kept_bytes = [sum(work.kept.values()) for work in works]
    in_flight = [0] * len(works)
    held = worst = working = 0.0
    at, moment = list(in_flight), ""
    for kind, chunk in passes:
        work = works[chunk]
        if kind == "F":
            in_flight[chunk] += 1
            held += kept_bytes[chunk]
            continue
        if held + work.working > worst:
            worst, at, moment = held + work.working, list(in_flight), work.moment
            working = work.working
        if kind != "I":
            in_flight[chunk] -= 1
            held -= kept_bytes[chunk]
    states, step_bytes = _states(layout, runtime)
    items = {**states, **_fixed(layout, runtime)}
    if step_bytes > worst:
        items["gradients' copy for the step"] = step_bytes
        at, moment = [0] * len(works), "the optimizer's step"
    elif worst:
        for count, work in zip(at, works, strict=True):
            for name, size in work.kept.items():
                items[name] = items.get(name, 0.0) + count * size
        items[f"backward pass: {moment}"] = working
    passing = sum(items.values()) - sum(states.values())
    fragments = runtime.grouped_fragments if _grouped(layout) else runtime.fragments
    return RankMemory(
        items={name: size for name, size in items.items() if size},
        moment=moment,
        fragments_bytes=fragments * passing,
        stuck_bytes=runtime.stuck * passing,
        context_bytes=runtime.context_bytes,
        communicators_bytes=runtime.communicator_bytes * layout.groups,
        layers=tuple(len(chunk) for chunk in layout.chunks),
        in_flight=tuple(at),
        parameters=sum(parameters_on_device(kind, mode) for chunk in layout.chunks for kind, mode in chunk),
    )


def _work(chunk: Chunk, runtime: Traits, reduced: float) -> _Work:
    kept: dict[str, float] = {}
    released, working, moment = 0.0, 0.0, ""
    for kind, mode in reversed(chunk):
        own = activation_bytes(kind, mode, runtime)
        item = _LOSS if any(operator.name == LOSS for operator in kind.operators) else f"activations: {kind.name}"
        kept[item] = kept.get(item, 0.0) + own
        gradients = reduced * parameters_on_device(kind, mode) if kind.recomputable else 0.0
        needed = working_bytes(kind, mode, runtime) + gradients - released
        if needed > working:
            working, moment = needed, kind.name
        released += own
    return _Work(kept, working, moment)


def _states(layout: RankLayout, runtime: Traits) -> tuple[dict[str, float], float]:
    """The bytes of states by item, and the further bytes that the optimizer's step needs."""
    items: dict[str, float] = {}
    step_bytes = 0.0
    for chunk in layout.chunks:
        for kind, mode in chunk:
            for numbers in numbers_on_device(kind, mode):
                replicas = layout.expert_replicas if numbers.routed else layout.replicas
                for name, size in runtime.states.held(layout.sharding, replicas).items():
                    items[name] = items.get(name, 0.0) + (numbers.held if name == "weights" else numbers.trained) * size
                step_bytes += numbers.trained * runtime.states.step_bytes(layout.sharding, replicas)
    return items, step_bytes


def _fixed(layout: RankLayout, runtime: Traits) -> dict[str, float]:
    """The bytes that are held all the time, without states."""
    layers = [layer for chunk in layout.chunks for layer in chunk]
    shapes = {shape: size for kind, mode in layers for shape, size in gradient_shapes(kind, mode).items()}
    grouped = runtime.grouped_workspace_bytes if _grouped(layout) else 0.0
    return {
        "autograd's tensors for gradients of weights": sum(shapes.values()) if runtime.reused_gradients else 0.0,
        "workspace of products": runtime.workspace_bytes + grouped,
        "buffers to reduce and gather in": runtime.buffers_bytes,
        "tensors between stages": _boundary_bytes(layout),
        "gathered weights": _gathered_bytes(layout),
        "gradients until they are reduced": _unreduced_bytes(layout, runtime),
    }


def _grouped(layout: RankLayout) -> bool:
    """Whether the rank has experts."""
    return any(operator.routed for chunk in layout.chunks for kind, _ in chunk for operator in kind.operators)


def _boundary_bytes(layout: RankLayout) -> float:
    """The bytes of the gradient that a rank sent back last, until the next one replaces it; with chunks also those of
    what it is about to send on."""
    if layout.ranks == 1:
        return 0.0
    sizes = [kind.value(kind.output) / mode.parts(Split.SEQUENCE) for chunk in layout.chunks for kind, mode in chunk]
    copies = 2 if len(layout.chunks) > 1 else int(layout.rank > 0)
    return copies * max(sizes, default=0.0)


def _gathered_bytes(layout: RankLayout) -> float:
    """Sharded weights (FSDP) in half precision: two repeated layers' at a time, and those of all other layers, which
    are a group of their own. Pipelines keep all weights gathered."""
    if not _gathers(layout):
        return 0.0
    layers = [(kind.recomputable, parameters_on_device(kind, mode)) for chunk in layout.chunks for kind, mode in chunk]
    repeated = [size for recomputable, size in layers if recomputable]
    pairs = [first + second for first, second in pairwise(repeated)] or repeated
    whole = sum(size for _, size in layers)
    return 2.0 * (whole if layout.ranks > 1 else whole - sum(repeated) + max(pairs, default=0.0))


def _unreduced_bytes(layout: RankLayout, runtime: Traits) -> float:
    """The gradients of gathered weights that a pipeline keeps until the last microbatch."""
    if not _gathers(layout) or layout.ranks == 1:
        return 0.0
    return runtime.states.gradients * sum(parameters_on_device(*layer) for chunk in layout.chunks for layer in chunk)


def _reduced_bytes(layout: RankLayout, runtime: Traits) -> float:
    """The bytes of a parameter's gradients while FSDP reduces those of a repeated layer after its backward pass: in
    half precision and in fp32. Those of the other layers come last, when hardly anything else is left."""
    return 2.0 + runtime.states.gradients if _gathers(layout) and layout.ranks == 1 else 0.0


def _gathers(layout: RankLayout) -> bool:
    return layout.sharding is Sharding.WEIGHTS and layout.replicas > 1


def gradient_shapes(kind: LayerKind, mode: LayerMode) -> dict[tuple[int, int], float]:
    """The bytes of one bf16 tensor in the shape of each weight matrix, by that shape: rows and columns on a device."""
    found: dict[tuple[int, int], float] = {}
    for operator in kind.operators:
        if not kind.value(operator.parameters) or operator.on_chip or operator.frozen:
            continue
        for rows, columns in _weight_shapes(operator, kind, mode):
            found[round(rows), round(columns)] = 2.0 * rows * columns
    return found


def _weight_shapes(operator: Operator, kind: LayerKind, mode: LayerMode) -> list[tuple[float, float]]:
    parts = float(mode.degree if operator.parameters_split is Split.TENSOR and not operator.routed else 1)
    shapes = []
    for product in operator.products:
        columns, depth = kind.value(product.columns), kind.value(product.depth)
        divided = "columns" if operator.routed else product.divided
        by_columns, by_depth = divided == "columns", divided == "depth"
        own = parts * (mode.expert_tensor if operator.routed else 1)
        shapes.append((columns / (own if by_columns else 1.0), depth / (own if by_depth else 1.0)))
    return shapes
