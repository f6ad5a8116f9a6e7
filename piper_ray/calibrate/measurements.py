"""What a file says was measured: steps of runs in their own layouts, or times of a profile's layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from piper_ray.calibrate.fit import Measurement
from piper_ray.model.errors import Fault, InputError, UsageError
from piper_ray.model.instance import Instance
from piper_ray.model.passes import passes_of
from piper_ray.validate.layouts import Laid, NotExpressible, Untold, laid_out
from piper_ray.validate.price import simulated
from piper_ray.validate.runs import Run, Unreadable, is_run, read_runs
from piper_ray.workloads.estimate.build import EstimateRequest
from piper_ray.workloads.estimate.calibration import Calibration
from piper_ray.workloads.estimate.config import ModelConfig
from piper_ray.workloads.estimate.costs import Setting, costs_of
from piper_ray.workloads.estimate.families import Microbatch
from piper_ray.workloads.estimate.hardware import Hardware
from piper_ray.workloads.estimate.layout import priced
from piper_ray.workloads.estimate.modes import Mode
from piper_ray.workloads.estimate.operators import LayerKind
from piper_ray.workloads.estimate.software import precision_named
from piper_ray.workloads.formats import load
from piper_ray.workloads.formats.documents import parse_json, read_text


@dataclass(frozen=True)
class Estimated:
    """What is estimated, and is to be calibrated."""

    model: ModelConfig
    hardware: Hardware
    gpu: str
    request: EstimateRequest


def measurements_in(path: str, estimated: Estimated) -> list[Measurement]:
    """Of a file of runs, or of a workload that was profiled. Raises InputError and UsageError for what is no
    measurement of that GPU and software."""
    if _holds_runs(path):
        return [_of_run(path, run, estimated) for run in read_runs(path)]
    return list(_of_layers(path, load(path), estimated))


def _holds_runs(path: str) -> bool:
    if Path(path).suffix.lower() != ".json":
        return False
    text = read_text(path)
    if text.lstrip().startswith("["):
        return True
    document = parse_json(path, text)
    return "runs" in document or "sources" in document or is_run(document)


def _of_run(path: str, run: Run | Unreadable, estimated: Estimated) -> Measurement:
    if isinstance(run, Unreadable):
        raise InputError(path, list(run.faults))
    request, hardware = estimated.request, estimated.hardware
    untold = Untold(
        model=estimated.model,
        gpu=estimated.gpu,
        gpus_per_node=request.gpus_per_node,
        software=request.software,
        precision=precision_named(request.precision),
    )
    measured_s = run.measured_step_s
    if measured_s is None:
        raise InputError(path, [Fault(f"{run.id}.step_s", "missing; expected the measured seconds of a step")])
    try:
        laid = laid_out(run, hardware, untold)
    except NotExpressible as error:
        raise InputError(path, [Fault(run.id, str(error))]) from error
    gpu = hardware.gpu(estimated.gpu)
    if laid.stack.gpu.name != gpu.name:
        raise UsageError(f"{path}: {run.id} was measured on {laid.stack.gpu.name}, the estimate is for {gpu.name}")
    if laid.software != request.software:
        raise UsageError(
            f"{path}: {run.id} is of software {laid.software}, the estimate of {request.software}; "
            f"add --software {laid.software}"
        )
    return Measurement(run.id, measured_s, _Step(laid, hardware))


def measured_step(run: Run, laid: Laid, hardware: Hardware) -> Measurement | None:
    """A run in its own words; None where no step was measured."""
    return None if run.measured_step_s is None else Measurement(run.id, run.measured_step_s, _Step(laid, hardware))


@dataclass(frozen=True)
class _Step:
    """The step of a layout."""

    laid: Laid
    hardware: Hardware

    def __call__(self, calibration: Calibration) -> float:
        stack = calibration.applied(self.laid.stack)
        return simulated(priced(self.laid.model, stack, self.hardware.training, self.laid.layout)).step_s


def _of_layers(path: str, profile: Instance, estimated: Estimated) -> Iterator[Measurement]:
    """Each kind of layer whose modules the profile names: the forward and the backward pass of one device."""
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
                    _LayerPass(kinds[key], place, estimated),
                    weight=measured_s * len(of_kind) / whole_s,
                )


@dataclass(frozen=True)
class _LayerPass:
    """A layer's forward (0) or backward pass (1) on one device."""

    kind: LayerKind
    place: int
    estimated: Estimated

    def __call__(self, calibration: Calibration) -> float:
        request, hardware = self.estimated.request, self.estimated.hardware
        stack = replace(request, calibration=calibration).stack(hardware.gpu(self.estimated.gpu))
        setting = Setting(stack, hardware.training, 1, stack.gpu.network_bytes_per_s, 0.0, 1)
        costs = costs_of(self.kind, Mode(1), setting)
        return (costs.forward_pass_s, costs.time_s - costs.forward_pass_s)[self.place]


def _same_module(measured: str, known: str) -> bool:
    """Whether both paths name one module; people wrap models, so that one path may be longer in front."""
    if not measured or not known:
        return False
    return measured == known or measured.endswith(f".{known}") or known.endswith(f".{measured}")
