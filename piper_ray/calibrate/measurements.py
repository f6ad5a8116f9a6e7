"""An estimate's request, calibrated by measurements: steps of runs in their own layouts, or times of a profile's
layers.

Also the factors of constants for which predictions come nearest to measurements.

Minimises the sum of squares of log(predicted / measured) (Gauss-Newton); each factor is pulled towards 1 by what is
known of it without measurements. By default one constant is fitted. More are fitted only if they predict each
measurement better from all the others. A factor that is not clearly different from 1 is not fitted at all, so
deviations that no constant explains change no constant, and a few runs do no harm.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

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
from piper_ray.workloads.estimate.roofline import step_flop
from piper_ray.workloads.estimate.software import Calibration, Constant, Precision, Spread, Stack, precision_named
from piper_ray.workloads.formats.documents import parse_json, read_text
from piper_ray.workloads.formats.faults import Faults
from piper_ray.workloads.formats.load import load

_PRIOR = 0.3
"""The expected deviation of a factor's logarithm: the accuracy of the tables."""

_NOISE = 0.04
"""The deviation of a time's logarithm: the accuracy of a formula with the right constants, for one layout among
others."""

_HOLD = (_NOISE / _PRIOR) ** 2

_WORTH = 0.3
"""The share of the remaining error that a further constant must remove."""

_SPREAD = 0.08
"""The deviation of a time's logarithm between layouts of one machine, if its rates are right (vTrain)."""

_CLEAR = 2.0
"""A factor is fitted if its logarithm is at least this many standard deviations from 0."""

_FEW = 4
"""With at most this many measurements, one outlier could decide the choice of constants."""

_CLEAR_OF_FEW = 2.75
"""Of these, whichever is left out. At 2 three runs of a machine made its others worse in 6 of 15 groups, here in 2."""

_STEP = 0.05
_LARGEST_STEP = 0.5
_ROUNDS = 8
_FAR = 6.0
"""A measurement that differs from its estimate by more than this factor belongs to something else."""

_Vector = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Measurement:
    """A measured time and its prediction. weight: 1 for a step; for layers, their share of a step."""

    label: str
    measured_s: float
    predicted_s: Callable[[Calibration], float]
    weight: float = 1.0


@dataclass(frozen=True)
class Fit:
    """A fitted calibration. before, after: (predicted - measured) / measured of each measurement. left_out: the mean
    error of each measurement predicted from the others; None for a single one. left: constants that keep their
    values."""

    calibration: Calibration
    before: tuple[float, ...]
    after: tuple[float, ...]
    left_out: float | None
    left: tuple[Constant, ...]


def fit(measurements: Sequence[Measurement]) -> Fit:
    """Fits a calibration. Raises UsageError if there are no measurements, or if one is of something else than the
    estimate."""
    if not measurements:
        raise UsageError("nothing to calibrate with: expected at least one run with a measured step")
    start = np.zeros(len(Constant))
    before = _residuals(measurements, start)
    for one, ratio in zip(measurements, before, strict=True):
        if abs(ratio) > math.log(_FAR):
            raise UsageError(
                f"{one.label}: measured {one.measured_s:.4g} s, estimated {one.measured_s * math.exp(ratio):.4g} s; "
                "no constants explain that: expected the same model, GPU and layout"
            )
    scale = np.sqrt(np.array([one.weight for one in measurements]))
    slopes = scale[:, None] * _jacobian(measurements, start, before, range(len(Constant)))
    chosen = _told_apart(slopes, scale * before)
    logs, after = _fitted(measurements, chosen, scale, before)
    factors = {constant: float(math.exp(logs[k])) for k, constant in enumerate(Constant) if k in chosen}
    return Fit(
        Calibration(factors, spread=_spread_of(measurements, slopes[:, chosen], before)),
        tuple(float(math.expm1(x)) for x in before),
        tuple(float(math.expm1(x)) for x in after),
        _left_out_mean(slopes[:, chosen], scale * before),
        tuple(constant for k, constant in enumerate(Constant) if k not in chosen),
    )


def _residuals(measurements: Sequence[Measurement], logs: _Vector) -> _Vector:
    calibration = Calibration({constant: float(math.exp(x)) for constant, x in zip(Constant, logs, strict=True) if x})
    return np.array([math.log(one.predicted_s(calibration) / one.measured_s) for one in measurements])


def _jacobian(
    measurements: Sequence[Measurement], logs: _Vector, residuals: _Vector, columns: Sequence[int]
) -> _Vector:
    """float64[measurements, columns]: the derivative of each prediction's logarithm by each factor's logarithm."""
    found = np.empty((len(measurements), len(columns)))
    for place, column in enumerate(columns):
        moved = logs.copy()
        moved[column] -= _STEP  # slower, because shares of a rate may be at their maximum
        found[:, place] = (residuals - _residuals(measurements, moved)) / _STEP
    return found


def _told_apart(jacobian: _Vector, residuals: _Vector) -> list[int]:
    """The columns to fit, judged by the slopes at the start: those that predict each measurement better from all the
    others, if each factor differs from 1 by more than layouts of one machine differ anyway. With few measurements this
    must hold whichever of them is left out.

    A single measurement only determines the most general constant.
    """
    clear = [k for k in range(jacobian.shape[1]) if np.linalg.norm(jacobian[:, k]) * _PRIOR > _NOISE / 2.0]
    if len(residuals) == 1:
        return [k for k in clear[:1] if min(_clearness(jacobian[:, [k]], residuals)) >= _CLEAR]
    best, chosen = float(np.sum(np.abs(residuals))), list[int]()
    for count in range(1, min(len(clear), len(residuals) - 1) + 1):
        for columns in itertools.combinations(clear, count):
            error = _left_out_error(jacobian[:, columns], residuals)
            kept, worth = jacobian[:, columns], error < best * (1.0 - _WORTH)
            if worth and min(_clearness(kept, residuals)) >= _CLEAR and _clear_without_any(kept, residuals):
                best, chosen = error, list(columns)
    return chosen


def _clear_without_any(jacobian: _Vector, residuals: _Vector) -> bool:
    """Whether each column's factor is clearly different from 1 whichever of a few measurements is left out."""
    return len(residuals) > _FEW or all(
        min(_clearness(np.delete(jacobian, left, axis=0), np.delete(residuals, left))) >= _CLEAR_OF_FEW
        for left in range(len(residuals))
    )


def _clearness(jacobian: _Vector, residuals: _Vector) -> list[float]:
    """For each column, the logarithm of its fitted factor in standard deviations."""
    inverse = np.linalg.inv(jacobian.T @ jacobian + _HOLD * np.eye(jacobian.shape[1]))
    found = inverse @ jacobian.T @ residuals
    left = residuals - jacobian @ found
    freedom = max(1, len(residuals) - jacobian.shape[1])
    deviation = math.sqrt(max(_SPREAD**2, float(left @ left) / freedom))
    return [abs(float(x)) / (deviation * math.sqrt(float(v))) for x, v in zip(found, np.diag(inverse), strict=True)]


def _left_out(jacobian: _Vector, residuals: _Vector) -> _Vector:
    """The error of each measurement predicted from the others; all these fits at once (Allen's PRESS)."""
    inverse = np.linalg.inv(jacobian.T @ jacobian + _HOLD * np.eye(jacobian.shape[1]))
    hat = jacobian @ inverse @ jacobian.T
    found: _Vector = (residuals - hat @ residuals) / (1.0 - np.diag(hat))
    return found


def _left_out_error(jacobian: _Vector, residuals: _Vector) -> float:
    """The sum of the errors of each measurement predicted from the others."""
    return float(np.sum(np.abs(_left_out(jacobian, residuals))))


def _left_out_mean(jacobian: _Vector, residuals: _Vector) -> float | None:
    if len(residuals) == 1:
        return None
    return _left_out_error(jacobian, residuals) / len(residuals)


def _spread_of(measurements: Sequence[Measurement], jacobian: _Vector, residuals: _Vector) -> Spread | None:
    """The likely error of a step of another layout, from the errors of each step predicted from the others, with
    Student's factor; at least the accuracy of formulas. None for a single step, and for layers."""
    count = len(measurements)
    if count == 1 or any(one.weight != 1.0 for one in measurements):
        return None
    deviation = max(_NOISE, float(np.sqrt(np.mean(_left_out(jacobian, residuals) ** 2))))
    half = student_90(count - 1) * deviation * math.sqrt(1.0 + 1.0 / count)
    return Spread(math.exp(-half), math.exp(half), count)


_STUDENT_90 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)


def student_90(freedom: int) -> float:
    """Half the width of a 90 % interval, in standard deviations, for 1, 2, ... degrees of freedom."""
    return _STUDENT_90[freedom - 1] if freedom <= len(_STUDENT_90) else 1.645 + 1.7 / freedom


def _fitted(
    measurements: Sequence[Measurement], chosen: Sequence[int], scale: _Vector, residuals: _Vector
) -> tuple[_Vector, _Vector]:
    """Logarithms of all factors, and the remaining error of each measurement."""
    logs = np.zeros(len(Constant))

    def loss(at: _Vector, left: _Vector) -> float:
        return float(np.sum((scale * left) ** 2) + _HOLD * np.sum(at**2))

    for _ in range(_ROUNDS if chosen else 0):
        jacobian = scale[:, None] * _jacobian(measurements, logs, residuals, chosen)
        slope = jacobian.T @ (scale * residuals) + _HOLD * logs[list(chosen)]
        step = np.linalg.solve(jacobian.T @ jacobian + _HOLD * np.eye(len(chosen)), -slope)
        step *= min(1.0, _LARGEST_STEP / max(1e-12, float(np.max(np.abs(step)))))
        moved, left = logs, residuals
        for _half in range(4):
            moved = logs.copy()
            moved[list(chosen)] += step
            left = _residuals(measurements, moved)
            if loss(moved, left) < loss(logs, residuals):
                break
            step = step / 2.0
        else:
            break
        gained = loss(logs, residuals) - loss(moved, left)
        logs, residuals = moved, left
        if gained < 1e-4 * len(measurements) * _NOISE**2:
            break
    return logs, residuals


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
    rate, peak = _flop_per_s(laid, run.measured_step_s or math.inf), _peak(laid.stack)
    if rate > peak:
        reasons.append(
            f"would compute {rate / 1e12:,.0f} TFLOP/s on each GPU, whose peak is {peak / 1e12:,.0f}; expected the "
            "seconds of a whole batch"
        )
    if reasons or run.measured_step_s is None:
        faults.at(run.id, "; ".join(reasons))
    else:
        yield Measurement(run.id, run.measured_step_s, partial(layout_step_s, laid, hardware))


_IMPOSSIBLE = 1.75
"""No layout that ran was estimated to need more than this multiple of a GPU's memory."""


def _flop_per_s(laid: Laid, step_s: float) -> float:
    """The model's FLOP that each GPU computes in a second."""
    layout = laid.layout
    architecture = laid.model.architecture(Microbatch(layout.samples, layout.tokens, layout.fused))
    return step_flop(architecture, layout.batch // layout.samples) / (step_s * layout.devices)


def _peak(stack: Stack) -> float:
    gpu = stack.gpu
    return gpu.matrix_fp8_flop_per_s if stack.precision is Precision.FP8 else gpu.matrix_flop_per_s


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
