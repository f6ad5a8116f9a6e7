"""Finds the change of an unstated setting of a run that brings its prediction nearest to the measurement."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from piper_ray.calibrate.layouts import Laid
from piper_ray.calibrate.measurements import simulated
from piper_ray.workloads.estimate.hardware import Hardware
from piper_ray.workloads.estimate.layout import priced
from piper_ray.workloads.estimate.software import BALANCED, CudaGraph, Overlap, Precision, TokenDispatcher
from scripts.ledger_of_runs.question import Question


def nearest_change(question: Question, hardware: Hardware) -> tuple[str, float]:
    """The change in words, and the step (s) that the layout then takes, priced link by link."""
    measured_s = question.run.measured_step_s
    assert measured_s is not None
    found = {"transfers and sums on their own links": simulated(question.layout).step_s}
    for name, laid in _changes(question.laid):
        found[name] = simulated(priced(laid.model, laid.stack, hardware.training, laid.layout)).step_s
    return min(found.items(), key=lambda one: abs(one[1] - measured_s))


def _changes(laid: Laid) -> Iterator[tuple[str, Laid]]:
    stack = laid.stack
    software = stack.software

    def running(**changed: object) -> Laid:
        return replace(laid, stack=replace(stack, software=software.model_copy(update=changed)))

    for overlap in Overlap:
        hiding = replace(stack, software=software.overlapping((overlap,)))
        yield f"{overlap.value} exchanges hidden", replace(laid, stack=hiding)
    for dispatcher in TokenDispatcher:
        yield f"dispatcher {dispatcher.value}", running(dispatcher=dispatcher)
    yield "CUDA graphs of attention and routers", running(graphs=tuple(CudaGraph))
    yield "no CUDA graphs", running(graphs=())
    yield "experts in balance", replace(laid, stack=replace(stack, imbalance=BALANCED))
    yield "busiest experts with twice the mean", replace(laid, stack=replace(stack, imbalance=2.0))
    yield "gradients not hidden", replace(laid, layout=replace(laid.layout, overlapped=False))
    yield "gradients hidden", replace(laid, layout=replace(laid.layout, overlapped=True))
    if stack.precision is Precision.FP8:
        yield "products in bf16", replace(laid, stack=replace(stack, precision=Precision.BF16))
