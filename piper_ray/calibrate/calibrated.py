"""An estimate's request with the constants that measurements give, and what is said of that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from piper_ray.calibrate.fit import Fit, fit
from piper_ray.calibrate.measurements import Estimated, measurements_in
from piper_ray.model.figures import plural
from piper_ray.workloads.estimate.build import EstimateRequest
from piper_ray.workloads.estimate.calibration import Calibration


def calibrated(path: str, estimated: Estimated) -> EstimateRequest:
    """The request with a calibration by the file. Raises UsageError and InputError."""
    measurements = measurements_in(path, estimated)
    found = fit(measurements)
    told = tuple(told_of(path, found))
    return replace(estimated.request, calibration=Calibration(found.calibration.factors, told))


def told_of(path: str, found: Fit) -> list[str]:
    """What was changed, and how far predictions were off before and after."""
    changed = [f"{constant.value} x {factor:.3g}" for constant, factor in found.calibration.factors.items()]
    counted = plural(len(found.before), "measurement")
    lines = [
        f"calibrated with {counted} of {path}: {', '.join(changed) or 'nothing changed'} (of the tables' rates)",
        f"error of these {_text(found.before)} before, {_text(found.after)} after",
    ]
    if found.left:
        lines.append(f"left as they are, as these do not tell: {', '.join(constant.value for constant in found.left)}")
    return lines


def _text(errors: Sequence[float]) -> str:
    return f"{sum(map(abs, errors)) / len(errors):.1%} on average and {max(errors, key=abs):+.1%} at worst"
