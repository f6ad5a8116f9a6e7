"""Measures what calibration is worth: constants are fitted to a few runs of a machine and checked on its other runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from piper_ray.calibrate.layouts import Laid
from piper_ray.calibrate.measurements import Measurement, fit, layout_step_s
from piper_ray.calibrate.runs import PublishedRun
from piper_ray.workloads.estimate.hardware import Hardware
from piper_ray.workloads.estimate.software import DEFAULT_SOFTWARE, UNCALIBRATED, Constant, Stack, software_named
from scripts.validation.errors import Errors, groups_of, in_fitted_half
from scripts.validation.price import PricedRun

MACHINES = ("SimuMax, B200", "vTrain, one node")
"""Groups whose runs are all on one node."""

MOST = 12
"""The number of runs to calibrate with, which people can measure before they plan."""


_SHARES = ("matrix_fraction", "attention_fraction", "edge", "depth_edge", "memory_fraction", "link_fraction")
_KNOWN_GPU = "H100-SXM"


@dataclass(frozen=True)
class Proof:
    """The result for a machine. fitted: the number of runs used for calibration. before, after: errors of the runs of
    the other half."""

    machine: str
    fitted: int
    factors: dict[Constant, float]
    before: Errors
    after: Errors


def proofs(outcomes: Sequence[PricedRun], hardware: Hardware) -> list[Proof]:
    """Of each machine, calibrated with the first runs of the half that constants were fitted on: as the tables have it,
    and as if nothing but its data sheets were known, all else being as with Megatron-Core on H100."""
    of_machine: dict[str, list[tuple[PublishedRun, Laid]]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.laid is not None and outcome.error is not None:
            for group in groups_of(outcome):
                of_machine[group].append((outcome.run, outcome.laid))
    found = []
    for machine in MACHINES:
        runs = of_machine[machine]
        if runs:
            found += _proof(machine, runs, hardware)
            strange = [(run, replace(laid, stack=_strange(laid.stack, hardware))) for run, laid in runs]
            found += _proof(f"{machine}, by data sheets", strange, hardware)
    return found


def _strange(stack: Stack, hardware: Hardware) -> Stack:
    known = hardware.gpu(_KNOWN_GPU)
    shares = {name: getattr(known, name) for name in _SHARES}
    return replace(stack, gpu=stack.gpu.model_copy(update=shares), software=software_named(DEFAULT_SOFTWARE))


def _proof(machine: str, runs: Sequence[tuple[PublishedRun, Laid]], hardware: Hardware) -> list[Proof]:
    measured = [
        Measurement(run.id, run.measured_step_s, partial(layout_step_s, laid, hardware))
        for run, laid in runs
        if run.measured_step_s is not None
    ]
    known = [one for one in measured if in_fitted_half(one.label)][:MOST]
    others = [one for one in measured if not in_fitted_half(one.label)]
    if not known or not others:
        return []
    calibration = fit(known).calibration
    before, after = (
        Errors(tuple(one.predicted_s(each) / one.measured_s - 1.0 for one in others))
        for each in (UNCALIBRATED, calibration)
    )
    return [Proof(machine, len(known), dict(calibration.factors), before, after)]


def proof_lines(found: Sequence[Proof]) -> list[str]:
    """The results as a table in Markdown."""
    lines = ["| calibrated | with | other runs | mean error before | after | at worst | changed |"]
    lines.append("|---|---:|---:|---:|---:|---:|---|")
    for proof in found:
        changed = ", ".join(f"{constant.value} x {factor:.2f}" for constant, factor in proof.factors.items())
        lines.append(
            f"| {proof.machine} | {proof.fitted} | {len(proof.after.values)} | {proof.before.mean:.1%} | "
            f"{proof.after.mean:.1%} | {proof.after.worst:+.1%} | {changed or 'nothing'} |"
        )
    return lines
