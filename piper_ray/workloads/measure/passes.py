"""Measures the time of a layer's passes, by warm-up, repeats, median and spread; and the bytes that it holds: its
parameters, and what autograd keeps between its forward and its backward pass.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from piper_ray.workloads.measure.graph import TracedLayer


@dataclass(frozen=True)
class MeasuredPasses:
    """Medians, in seconds per microbatch. spread_s: from the first to the third quartile of both passes together."""

    forward_s: float
    backward_s: float
    total_s: float
    spread_s: float

    @property
    def forward_share_s(self) -> float:
        """The forward pass's part of total_s. The medians of both passes do not add up to the median of their sums."""
        both_s = self.forward_s + self.backward_s
        return self.total_s * (self.forward_s / both_s) if both_s > 0.0 else 0.0


@dataclass(frozen=True)
class Repeats:
    """count: the number of measured passes. warm_up: the number of passes before them. The warm-up lasts at least
    ``warm_up_s``, until a GPU has the clock that it has in training."""

    count: int
    warm_up: int
    warm_up_s: float = 0.0


Clock = Callable[[], Callable[[], float]]
"""Marks a moment on the device. The returned function gives the moment's time in seconds, once the device has reached
it."""


def clock_of(device: torch.device) -> Clock:
    """A clock by events of the GPU's own stream, or else this machine's clock."""
    if device.type != "cuda":
        return _cpu_clock
    stream = torch.cuda.current_stream(device)
    event_type: Any = torch.cuda.Event

    def event() -> Any:
        made = event_type(enable_timing=True)
        made.record(stream)
        return made

    return EventClock(event)


class EventClock:
    """Times of a device's events, each relative to the one before it.

    The device counts float32 milliseconds between two events. Relative to the first event of a run, times would soon
    rise in steps of 62 us (after ten minutes); between neighbouring events they have the device's own precision.
    """

    def __init__(self, event: Callable[[], Any]) -> None:
        """event: records an event on the device's stream."""
        self._event = event
        self._last, self._last_s = event(), 0.0
        self._open: deque[_Marked] = deque()

    def __call__(self) -> Callable[[], float]:
        """See ``Clock``."""
        marked = _Marked(self._event())
        self._open.append(marked)

        def seconds() -> float:
            if marked.at_s is None:
                marked.event.synchronize()
                self._close(marked)
            assert marked.at_s is not None
            return marked.at_s

        return seconds

    def _close(self, marked: _Marked) -> None:
        """Computes the times of all events up to this one, which the device has reached."""
        while marked.at_s is None:
            one = self._open.popleft()
            self._last_s += float(self._last.elapsed_time(one.event)) / 1e3
            self._last, one.at_s = one.event, self._last_s


@dataclass
class _Marked:
    """A moment on the device. at_s: its time, once known."""

    event: Any
    at_s: float | None = None


def _cpu_clock() -> Callable[[], float]:
    now = time.perf_counter()
    return lambda: now


def leaves_of(inputs: Sequence[torch.Tensor], gradients: Sequence[bool]) -> tuple[list[Any], list[Any]]:
    """Copies of the inputs to differentiate by, and further copies for the layer, which may write into them in
    place."""
    leaves = [tensor.detach().requires_grad_(wanted) for tensor, wanted in zip(inputs, gradients, strict=True)]
    return leaves, [
        leaf.clone() if wanted else leaf.detach().clone() for leaf, wanted in zip(leaves, gradients, strict=True)
    ]


def passes_of(
    layer: TracedLayer,
    gradients: Sequence[bool],
    repeats: Repeats,
    clock: Clock,
    *,
    recompute: bool,
    followers: Sequence[TracedLayer] = (),
) -> tuple[MeasuredPasses, MeasuredPasses | None]:
    """The times of a layer's passes; and, with ``recompute``, their times if the forward pass keeps only its inputs.

    followers: equal layers, each with one output and reading that of the layer before it. All of them run as a chain
    and the time is divided among them, so launches, caches and memory are as in a stage.

    Both variants run alternately, so that other load on the machine slows both. Gradients of parameters are added to
    existing ones, as pipelines do with microbatches. Times are read at the end, so that a GPU has work without gaps, as
    in training, and the host's launches are hidden as they are there.
    """

    def run_again(module: torch.nn.Module, *given: torch.Tensor) -> Any:
        return checkpoint(module, *given, use_reentrant=False)

    def run_plain(module: torch.nn.Module, *given: torch.Tensor) -> Any:
        return module(*given)

    chain = [layer, *followers]
    marked: list[list[list[Callable[[], float]]]] = [[], []]
    runs: list[Callable[..., Any]] = [run_plain, run_again] if recompute else [run_plain]
    collecting = gc.isenabled()
    gc.disable()
    try:
        began_s, warm = time.perf_counter(), 0
        while warm < repeats.warm_up or time.perf_counter() - began_s < repeats.warm_up_s:
            for run in runs:
                _once(chain, run, gradients, clock)
            warm += 1
        for _ in range(repeats.count):
            for run, of_run in zip(runs, marked, strict=False):
                of_run.append(_once(chain, run, gradients, clock))
        plain, again = ([_lengths_s([one() for one in moments], len(chain)) for moments in each] for each in marked)
    finally:
        if collecting:
            gc.enable()
        for one in chain:
            one.module.zero_grad(set_to_none=True)
    return summary_of(plain), summary_of(again) if recompute else None


def summary_of(measured: Sequence[tuple[float, float]]) -> MeasuredPasses:
    """Medians and spread of at least two measured pairs of forward and backward passes."""
    totals = [forward_s + backward_s for forward_s, backward_s in measured]
    low, _, high = statistics.quantiles(totals, n=4, method="inclusive")
    return MeasuredPasses(
        forward_s=statistics.median(forward_s for forward_s, _ in measured),
        backward_s=statistics.median(backward_s for _, backward_s in measured),
        total_s=statistics.median(totals),
        spread_s=high - low,
    )


def _once(
    chain: Sequence[TracedLayer], run: Callable[..., Any], gradients: Sequence[bool], clock: Clock
) -> list[Callable[[], float]]:
    """The beginning and end of the forward pass, and of the backward pass if there is one."""
    first, *followers = chain
    _, given = leaves_of(first.inputs, gradients)
    moments = [clock()]
    outputs = run(first.module, *given)
    for one in followers:
        before = max(source.layer for source in one.sources if source.layer is not None)
        handed = [
            outputs[source.output] if source.layer == before else held
            for source, held in zip(one.sources, given, strict=True)
        ]
        outputs = run(one.module, *handed)
    moments.append(clock())
    differentiable = [output for output in outputs if output.requires_grad]
    if differentiable:
        back = [torch.ones_like(output) for output in differentiable]
        moments.append(clock())
        torch.autograd.backward(differentiable, back)
        moments.append(clock())
    return moments


def _lengths_s(moments_s: Sequence[float], layers: int) -> tuple[float, float]:
    """The time of the forward and of the backward pass, divided by ``layers``."""
    begun_s, ended_s, *back_s = moments_s
    return (ended_s - begun_s) / layers, (back_s[1] - back_s[0]) / layers if back_s else 0.0


@dataclass(frozen=True)
class Resident:
    """A parameter or buffer. number_bytes: the bytes of each of its numbers."""

    shape: tuple[int, ...]
    number_bytes: int
    trainable: bool

    @property
    def numbers(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Kept:
    """The bytes that a layer keeps for each microbatch. Each storage counts once, with its whole size.

    saved: kept without recomputation. saved_inputs: the part of saved that is the layer's inputs. inputs: all that
    recomputation needs.
    """

    saved: int
    saved_inputs: int
    inputs: int


def parameters_of(module: torch.nn.Module) -> list[Resident]:
    """Tensors that the layer holds even if no microbatch is in flight. Buffers are not trained."""
    held = [
        Resident(tuple(tensor.shape), tensor.element_size(), tensor.requires_grad) for tensor in module.parameters()
    ]
    return held + [Resident(tuple(tensor.shape), tensor.element_size(), False) for tensor in module.buffers()]


def kept_of(layer: TracedLayer, given: Sequence[torch.Tensor]) -> tuple[Kept, list[bool]]:
    """What one forward pass on ``given`` keeps, and which of its outputs have gradients.

    Parameters and buffers are not counted, because they are held anyway.
    """
    there = _storages([*layer.module.parameters(), *layer.module.buffers()])
    inputs = _storages(given)
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        found.update(_storages([tensor]))
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = layer.module(*given)  # held until all is counted, so that no address is reused
    saved = {address: size for address, size in found.items() if address not in there}
    kept = Kept(
        saved=sum(saved.values()),
        saved_inputs=sum(size for address, size in saved.items() if address in inputs),
        inputs=sum(inputs.values()),
    )
    return kept, [bool(output.requires_grad) for output in outputs]


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}
