"""An estimate's request, calibrated by measurements: steps of runs in their own layouts, or times of a profile's
layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from piper_ray.calibrate.fit import Fit, Measurement, fit
from piper_ray.calibrate.layouts import Laid, NotExpressible, Untold, laid_out
from piper_ray.calibrate.runs import PublishedRun, is_run, read_runs
from piper_ray.model.errors import InputError, UsageError
from piper_ray.model.figures import plural, size_text
from piper_ray.model.instance import Instance
from piper_ray.model.mode import Sharding
from piper_ray.model.passes import passes_of
from piper_ray.simulate.result import Simulation
from piper_ray.simulate.run import SimulationOptions, Transfers, simulate
from piper_ray.workloads.estimate.build import EstimateRequest
from piper_ray.workloads.estimate.config import ModelConfig
from piper_ray.workloads.estimate.costs import Setting, costs_of
from piper_ray.workloads.estimate.families import Microbatch
from piper_ray.workloads.estimate.hardware import Hardware
from piper_ray.workloads.estimate.layout import PricedLayout, priced
from piper_ray.workloads.estimate.modes import LayerMode
from piper_ray.workloads.estimate.operators import LayerKind
from piper_ray.workloads.estimate.software import Calibration, precision_named
from piper_ray.workloads.formats import load
from piper_ray.workloads.formats.documents import parse_json, read_text
from piper_ray.workloads.formats.faults import Faults


@dataclass(frozen=True)
class Estimated:
    """The estimate that is to be calibrated."""

    model: ModelConfig
    hardware: Hardware
    gpu: str
    request: EstimateRequest


def calibrated(path: str, estimated: Estimated) -> EstimateRequest:
    """The request, calibrated by the file's measurements. Raises UsageError and InputError."""
    measurements = measurements_in(path, estimated)
    found = fit(measurements)
    told = tuple(told_of(path, found))
    return replace(estimated.request, calibration=replace(found.calibration, notes=told))


def told_of(path: str, found: Fit) -> list[str]:
    """Sentences on the changed constants, and on the error of predictions before and after."""
    changed = [f"{constant.value} x {factor:.3g}" for constant, factor in found.calibration.factors.items()]
    counted = plural(len(found.before), "measurement")
    lines = [
        f"calibrated with {counted} of {path}: {', '.join(changed) or 'nothing changed'} (of the tables' rates)",
        f"error of these {_errors_text(found.before)} before, {_errors_text(found.after)} after",
    ]
    if found.left_out is not None:
        lines.append(f"error of each run, predicted from the others: {found.left_out:.1%} on average")
    if found.left:
        named = ", ".join(constant.value for constant in found.left)
        lines.append(f"unchanged, because these runs do not determine them: {named}")
    return lines


def _errors_text(errors: Sequence[float]) -> str:
    return f"{sum(map(abs, errors)) / len(errors):.1%} on average and {max(errors, key=abs):+.1%} at worst"


def measurements_in(path: str, estimated: Estimated) -> list[Measurement]:
    """The measurements of a file of runs, or of a profiled workload. Raises InputError with all runs that cannot be
    used: of another GPU, software or precision, or in a layout that cannot have run."""
    if _holds_runs(path):
        faults = Faults()
        found = [measured for run in read_runs(path) for measured in _of_run(run, estimated, faults)]
        if faults:
            raise InputError(path, faults.found)
        return found
    return list(_of_layers(path, load(path), estimated))


def _holds_runs(path: str) -> bool:
    if Path(path).suffix.lower() != ".json":
        return False
    text = read_text(path)
    if text.lstrip().startswith("["):
        return True
    document = parse_json(path, text)
    return "runs" in document or "sources" in document or is_run(document)


def _of_run(run: PublishedRun, estimated: Estimated, faults: Faults) -> Iterator[Measurement]:
    """The run's step, if it can be used."""
    request, hardware = estimated.request, estimated.hardware
    asked = precision_named(request.precision)
    untold = Untold(
        model=estimated.model,
        gpu=estimated.gpu,
        gpus_per_node=request.gpus_per_node,
        software=request.software,
        precision=asked,
        imbalance=request.expert_imbalance,
    )
    try:
        laid = laid_out(run, hardware, untold)
        needed_bytes = simulated(priced(laid.model, laid.stack, hardware.training, laid.layout)).peak_memory_bytes
    except (NotExpressible, UsageError) as error:
        faults.at(run.id, str(error))
        return
    gpu, precision, there_bytes = hardware.gpu(estimated.gpu), laid.stack.precision, laid.stack.gpu.device_bytes
    reasons = []
    if run.measured_step_s is None:
        reasons.append("step_s: missing; expected the measured seconds of a step")
    if laid.stack.gpu.name != gpu.name:
        reasons.append(f"was measured on {laid.stack.gpu.name}, the estimate is for {gpu.name}")
    if laid.software != request.software:
        reasons.append(f"is of {laid.software}, the estimate of {request.software}; add --software {laid.software}")
    if precision is not asked:
        reasons.append(f"is in {precision.value}, the estimate in {asked.value}; add --precision {precision.value}")
    if laid.layout.sharding < Sharding.WEIGHTS and needed_bytes > _IMPOSSIBLE * there_bytes:
        needed, there = size_text(needed_bytes), size_text(there_bytes)
        reasons.append(f"would need {needed} on each GPU, which has {there}; expected a layout that can have run")
    if reasons or run.measured_step_s is None:
        faults.at(run.id, "; ".join(reasons))
    else:
        yield Measurement(run.id, run.measured_step_s, partial(layout_step_s, laid, hardware))


_IMPOSSIBLE = 1.75
"""No layout that ran was estimated to need more than this multiple of a GPU's memory."""


def simulated(plan: PricedLayout) -> Simulation:
    """Simulates the layout event by event."""
    transfers = Transfers.OVERLAPPED if plan.overlap_transfers else Transfers.IN_PASSES
    options = replace(SimulationOptions.of(plan.terms), transfers=transfers)
    return simulate(plan.instance, plan.plan, plan.schedule, options=options)


def layout_step_s(laid: Laid, hardware: Hardware, calibration: Calibration) -> float:
    """The step time of a layout."""
    return simulated(priced(laid.model, calibration.applied(laid.stack), hardware.training, laid.layout)).step_s


def _of_layers(path: str, profile: Instance, estimated: Estimated) -> Iterator[Measurement]:
    """One measurement for each pass of each kind of layer whose modules the profile names, on one device."""
    request = estimated.request
    batch = profile.batch
    samples = batch.samples_per_microbatch or request.samples or estimated.model.samples
    tokens = None if estimated.model.tokens is None else batch.tokens_per_sample or request.tokens
    microbatch = Microbatch(samples, tokens or estimated.model.tokens, request.fused)
    architecture = estimated.model.architecture(microbatch)
    times: dict[str, list[tuple[float, float]]] = {}
    kinds: dict[str, LayerKind] = {kind.key: kind for kind in architecture.kinds}
    for node in architecture.nodes:
        layer = next((x for x in profile.layers if _same_module(x.path, node.path)), None)
        row = () if layer is None else layer.tmpcs.get(1, ())
        plain = next((tmpc for tmpc in row if not tmpc.recompute), None)
        if plain is not None:
            passes = passes_of(plain)
            times.setdefault(node.kind.key, []).append((passes.forward_s, passes.backward_s))
    whole_s = sum(sum(both) for of_kind in times.values() for both in of_kind)
    if whole_s <= 0.0:
        raise UsageError(
            f"{path}: no layer of {estimated.model.name} by its module's path, such as {architecture.nodes[1].path}; "
            "expected a profile of this model, or runs (docs/estimates.md)"
        )
    for key, of_kind in times.items():
        for place, name in enumerate(("forward pass", "backward pass")):
            measured_s = sum(both[place] for both in of_kind) / len(of_kind)
            if measured_s > 0.0:
                yield Measurement(
                    f"{kinds[key].name}, {name}",
                    measured_s,
                    partial(_layer_pass_s, kinds[key], place, estimated),
                    weight=measured_s * len(of_kind) / whole_s,
                )


def _layer_pass_s(kind: LayerKind, place: int, estimated: Estimated, calibration: Calibration) -> float:
    """The time of a layer's forward pass (place 0) or backward pass (1) on one device."""
    request, hardware = estimated.request, estimated.hardware
    stack = replace(request, calibration=calibration).stack(hardware.gpu(estimated.gpu))
    setting = Setting(stack, hardware.training, 1, stack.gpu.network_bytes_per_s, 0.0, 1)
    costs = costs_of(kind, LayerMode(degree=1), setting)
    return (costs.forward_pass_s, costs.time_s - costs.forward_pass_s)[place]


def _same_module(measured: str, known: str) -> bool:
    """Whether both paths name the same module; if a model is wrapped, one path is longer at the front."""
    if not measured or not known:
        return False
    return measured == known or measured.endswith(f".{known}") or known.endswith(f".{measured}")
