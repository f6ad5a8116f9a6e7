"""The ways to run a measured layer on t devices: as measured at t = 1 or on a shard, or else estimated.

What t devices tell each other is never measured here: it is a ring's all-reduce by the table of hardware, as Megatron
(Shoeybi et al. 2019) needs it: for every two divided matrices one of the outputs in the forward pass and one of the
inputs' gradients in the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from piper_ray.workloads.estimate.exchanges import Group, all_reduce_s
from piper_ray.workloads.estimate.hardware import Gpu, Training
from piper_ray.workloads.measure.passes import Resident
from piper_ray.workloads.measure.store import LayerFigures

_FULL_PRECISION_BYTES = 4


@dataclass(frozen=True)
class Way:
    """One way to run a layer: what becomes a TMPC.

    forward_s: of time_s, before the backward pass. transient_bytes: needed besides, once, while it is recomputed.
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
    """At t = 1."""
    yield from _ways(figures, figures.parameters, training, 1, "", 1.0, (0.0, 0.0))


def shard_ways(shard: LayerFigures, whole: LayerFigures, degree: int, training: Training, gpu: Gpu) -> Iterator[Way]:
    """From the figures of one of ``degree`` shards; ``whole``: of the same layer undivided."""
    matrices = [held.shape for held in whole.parameters if _is_matrix(held)]
    divided = sum(held.shape not in matrices for held in shard.parameters if _is_matrix(held))
    exchange_s = _exchange_s(shard, divided, degree, gpu)
    yield from _ways(shard, shard.parameters, training, degree, "-shard", 1.0, exchange_s)


def estimated_ways(whole: LayerFigures, degree: int, training: Training, gpu: Gpu) -> Iterator[Way]:
    """As if matrices with a side that t divides were divided, and with them the time; the rest each device has."""
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
    """share: of the measured time and activations, the layer's inputs apart. exchange_s: forward and backward."""
    kept, gradients, state = figures.kept, _gradient_bytes(held, training), _state_bytes(held, training)
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


def _gradient_bytes(held: Sequence[Resident], training: Training) -> float:
    return sum(one.numbers * _gradient_number_bytes(one, training) for one in held if one.trainable)


def _gradient_number_bytes(held: Resident, training: Training) -> float:
    """Of half precision they are summed as ``training`` says, of full precision as they are."""
    return held.number_bytes if held.number_bytes >= _FULL_PRECISION_BYTES else training.gradient_bytes


def _state_bytes(held: Sequence[Resident], training: Training) -> float:
    """Parameters as they are, gradients and optimizer state; parameters in full precision need no copy in it."""
    total = 0.0
    for one in held:
        each = float(one.number_bytes)
        if one.trainable:
            copy = _FULL_PRECISION_BYTES if one.number_bytes >= _FULL_PRECISION_BYTES else 0
            each += _gradient_number_bytes(one, training) + max(0.0, training.optimizer_bytes - copy)
        total += one.numbers * each
    return total
