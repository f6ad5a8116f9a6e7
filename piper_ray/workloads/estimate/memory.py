"""Bytes on each device: the state of parameters, what a microbatch in flight keeps, what recomputing needs at once."""

from __future__ import annotations

from collections.abc import Iterable

from piper_ray.workloads.estimate.hardware import Training
from piper_ray.workloads.estimate.modes import Mode, Recomputation
from piper_ray.workloads.estimate.operators import KeptBytes, LayerKind, Split


def parameters_on_device(kind: LayerKind, mode: Mode) -> float:
    """Parameters that each device holds."""
    return sum(kind.value(operator.parameters) / mode.parameter_parts(operator) for operator in kind.operators)


def trained_on_device(kind: LayerKind, mode: Mode) -> float:
    """Those of them that have gradients and optimizer state."""
    return sum(
        kind.value(operator.parameters) / mode.parameter_parts(operator)
        for operator in kind.operators
        if not operator.frozen
    )


def state_bytes(kind: LayerKind, mode: Mode, training: Training) -> float:
    """Weights, gradients and optimizer state; ``mode.zero_shards`` replicas share the last, or all of it (FSDP)."""
    weights = parameters_on_device(kind, mode) * training.weight_bytes
    trained = trained_on_device(kind, mode)
    gradients, optimizer = trained * training.gradient_bytes, trained * training.optimizer_bytes
    if mode.fsdp:
        return (weights + gradients + optimizer) / mode.zero_shards
    return weights + gradients + optimizer / mode.zero_shards


def kept_bytes(kind: LayerKind, mode: Mode) -> float:
    """What a microbatch keeps between its forward and its backward pass, wherever that is.

    Full recomputation keeps the layer's checkpoint, as a rule its inputs; selective recomputation all but what is
    cheap to make again.
    """
    if mode.recomputation is Recomputation.FULL:
        return kind.value(kind.checkpoint) / mode.parts(Split.SEQUENCE)
    selective = mode.recomputation is Recomputation.SELECTIVE
    return _saved_bytes(kind, mode, (saved for saved in _all_saved(kind) if not (selective and saved.cheap)))


def transient_bytes(kind: LayerKind, mode: Mode) -> float:
    """What is needed beyond that while the layer's backward pass runs, once per device and not per microbatch.

    Recomputation: all that was not kept. Offload: a layer's activations in use while the next ones come.
    """
    dropped = _saved_bytes(kind, mode, _all_saved(kind)) - kept_bytes(kind, mode)
    if mode.recomputation is Recomputation.FULL:
        dropped = _saved_bytes(kind, mode, _all_saved(kind))
    return dropped + (2.0 * kept_bytes(kind, mode) if mode.offload else 0.0)


def activation_bytes(kind: LayerKind, mode: Mode) -> float:
    """What each microbatch in flight keeps on the device: nothing if it is offloaded."""
    return 0.0 if mode.offload else kept_bytes(kind, mode)


def _all_saved(kind: LayerKind) -> Iterable[KeptBytes]:
    return (saved for operator in kind.operators for saved in operator.saved)


def _saved_bytes(kind: LayerKind, mode: Mode, listed: Iterable[KeptBytes]) -> float:
    return sum(kind.value(saved.bytes) / mode.parts(saved.split) for saved in listed)
