"""Errors of all runs together: by group, signed and at worst, on the half that was fitted and on the other."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from piper_ray.model.mode import Sharding
from piper_ray.workloads.estimate.software import Precision
from scripts.validation.price import PricedRun

OLDER = frozenset({"megatron-2021", "megatron-2022", "deepspeed-2021"})
"""Generations of software before 2023."""

_NODE = 8


def in_fitted_half(run_id: str) -> bool:
    """Constants were fitted on these runs alone: the last byte of their id's SHA-1 is even."""
    return hashlib.sha1(run_id.encode(), usedforsecurity=False).digest()[-1] % 2 == 0


def groups_of(outcome: PricedRun) -> tuple[str, ...]:
    """The groups in which a priced run counts, by its software, GPU and precision. vTrain's and SimuMax's runs have
    groups of their own."""
    run, laid = outcome.run, outcome.laid
    if laid is None:
        return ()
    if run.source.startswith("SimuMax"):
        return ("SimuMax, B200",)
    if run.source.startswith("vTrain"):
        return ("vTrain, one node" if laid.layout.devices <= _NODE else "vTrain, several nodes",)
    if laid.has_experts:
        return ("experts",)
    if laid.stack.precision is Precision.FP8:
        return ("FP8",)
    if laid.layout.sharding >= Sharding.GRADIENTS:
        return ("FSDP",)
    if laid.software in OLDER:
        return ("3D, before 2023",)
    of_h100 = ("3D since 2023, H100 bf16",) if "H100" in laid.stack.gpu.name else ()
    return ("3D since 2023", *of_h100)


@dataclass(frozen=True)
class Errors:
    """Errors of some runs, as shares; above 0: predicted too slow."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return sum(map(abs, self.values)) / len(self.values)

    @property
    def signed(self) -> float:
        return sum(self.values) / len(self.values)

    @property
    def worst(self) -> float:
        return max(self.values, key=abs)

    @property
    def percentile_95(self) -> float:
        """The least size, whatever the sign, that 95 of 100 errors do not exceed."""
        ordered = sorted(map(abs, self.values))
        return ordered[-(-95 * len(ordered) // 100) - 1]


def errors_by_group(
    outcomes: Iterable[PricedRun], which: Callable[[str], bool] = lambda _run_id: True
) -> dict[str, Errors]:
    """The errors by group of the runs that have a prediction and a measured step."""
    found: dict[str, list[float]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.error is not None and which(outcome.run.id):
            for group in groups_of(outcome):
                found[group].append(outcome.error)
    return {group: Errors(tuple(values)) for group, values in sorted(found.items())}


def run_lines(outcomes: Sequence[PricedRun]) -> list[str]:
    """A line for each run that was priced, then those that could not be, with the reason."""
    width = max([len(outcome.run.id) for outcome in outcomes] or [0])
    lines = [f"{'run':{width}} {'predicted':>11} {'measured':>11} {'error':>8} {'memory':>10}  fits"]
    for outcome in outcomes:
        if outcome.reason is None and outcome.predicted_step_s is not None:
            measured_s, error = outcome.measured_step_s, outcome.error
            memory_bytes = outcome.predicted_memory_bytes
            lines.append(
                f"{outcome.run.id:{width}} {outcome.predicted_step_s:9.4g} s "
                f"{'-' if measured_s is None else f'{measured_s:9.4g} s':>11} "
                f"{'-' if error is None else f'{error:+.1%}':>8} "
                f"{'-' if memory_bytes is None else f'{memory_bytes / 1e9:.1f} GB':>10}  "
                f"{'-' if outcome.fits is None else 'yes' if outcome.fits else 'no'}"
            )
    reasons = [outcome for outcome in outcomes if outcome.reason is not None]
    if reasons:
        lines += ["", "Not priced:", *(f"  {outcome.run.id}: {outcome.reason}" for outcome in reasons)]
    return lines


def table_lines(outcomes: Sequence[PricedRun]) -> list[str]:
    """The errors by group as a table in Markdown, and what there is to say of memory and of the order of layouts."""
    lines = [
        "| runs | | mean error | signed | 95 % | worst | mean, fitted half | mean, other half |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    fitted = errors_by_group(outcomes, in_fitted_half)
    other = errors_by_group(outcomes, lambda run_id: not in_fitted_half(run_id))
    for group, errors in errors_by_group(outcomes).items():
        cells = [
            group,
            str(len(errors.values)),
            f"{errors.mean:.1%}",
            f"{errors.signed:+.1%}",
            f"{errors.percentile_95:.1%}",
            f"{errors.worst:+.1%}",
            _mean_text(fitted, group),
            _mean_text(other, group),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", *memory_lines(outcomes)]


def _mean_text(errors: Mapping[str, Errors], group: str) -> str:
    return f"{errors[group].mean:.1%} of {len(errors[group].values)}" if group in errors else "-"


def memory_lines(outcomes: Sequence[PricedRun]) -> list[str]:
    """Lines about memory: layouts that ran and would be refused, and peaks."""
    priced = [outcome for outcome in outcomes if outcome.fits is not None]
    refused = sum(not outcome.fits for outcome in priced)
    lines = [f"Memory: {refused} of {len(priced)} layouts that ran would be refused."] if priced else []
    errors = peak_errors(outcomes)
    if errors.values:
        lines.append(
            f"Peak memory where it is published, {len(errors.values)} runs: mean error {errors.mean:.1%}, "
            f"signed {errors.signed:+.1%}, worst {errors.worst:+.1%}."
        )
    return lines


def peak_errors(outcomes: Iterable[PricedRun]) -> Errors:
    """The errors of predicted peaks of runs with a published peak."""
    return Errors(
        tuple(
            outcome.predicted_memory_bytes / outcome.measured_memory_bytes - 1.0
            for outcome in outcomes
            if outcome.measured_memory_bytes and outcome.predicted_memory_bytes
        )
    )
