"""The table, the figures of agreement and the picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np

from piper_ray.report.plots import style
from scripts.run_correlation.plans import Trial


@dataclass(frozen=True)
class Point:
    """predicted_s, measured_s: of a step; spread_s: from the first to the third quartile of the measured steps;
    promised_s: what the slowest stage takes, under an asynchronous schedule."""

    trial: Trial
    predicted_s: float
    measured_s: float
    spread_s: float
    promised_s: float | None = None

    @property
    def error(self) -> float:
        """The error of the prediction, relative to the measurement."""
        return self.predicted_s / self.measured_s - 1.0


HEAD = (
    "| plan | schedule | microbatches | predicted step | measured step | spread | error |",
    "|---|---|---:|---:|---:|---:|---:|",
)


def row(point: Point) -> str:
    trial = point.trial
    figures = (point.predicted_s, point.measured_s, point.spread_s)
    times = " | ".join(f"{1e3 * seconds:.1f} ms" for seconds in figures)
    return f"| {trial.name} | {trial.schedule.text} | {trial.microbatches} | {times} | {100.0 * point.error:+.1f} % |"


def agreement(points: Sequence[Point]) -> str:
    predicted, measured = ([getattr(point, name) for point in points] for name in ("predicted_s", "measured_s"))
    correlation = float(np.corrcoef(predicted, measured)[0, 1])
    right, pairs = ordered(points)
    return (
        f"Correlation {correlation:.4f}, mean error {100.0 * fmean(abs(point.error) for point in points):.1f} %, "
        f"largest {100.0 * max(abs(point.error) for point in points):.1f} %; {right} of {pairs} pairs of plans of one "
        "model are in the right order, among those whose steps differ by more than their spread."
    )


def ordered(points: Sequence[Point]) -> tuple[int, int]:
    """The number of pairs of plans of one model in the right predicted order, and of all pairs whose measured steps
    differ by more than either spread."""
    right = pairs = 0
    for number, one in enumerate(points):
        for other in points[number + 1 :]:
            apart_s = other.measured_s - one.measured_s
            if one.trial.sleeping == other.trial.sleeping and abs(apart_s) > max(one.spread_s, other.spread_s):
                pairs += 1
                right += (other.predicted_s - one.predicted_s) * apart_s > 0.0
    return right, pairs


def draw(points: Sequence[Point], folder: Path) -> None:
    """correlation.svg and correlation.png."""
    figure, (axes,) = style.panels("Steps of real runs against their simulations", [""])
    longest_s = 1.05 * max(max(point.predicted_s, point.measured_s) for point in points)
    axes.plot([0.0, longest_s], [0.0, longest_s], color="#999999", linewidth=1.0, label="as predicted")
    kinds = ((False, "a small GPT, two cores"), (True, "sleeping layers, 4 and 8 ranks"))
    for number, (sleeping, label) in enumerate(kinds):
        of_kind = [point for point in points if point.trial.sleeping == sleeping]
        axes.errorbar(
            [point.predicted_s for point in of_kind],
            [point.measured_s for point in of_kind],
            yerr=[point.spread_s / 2.0 for point in of_kind],
            fmt=style.MARKERS[number],
            color=style.COLOURS[number],
            label=label,
        )
    axes.set(xlabel="predicted step (s)", ylabel="measured step (s)", xlim=(0.0, longest_s), ylim=(0.0, longest_s))
    style.legend(figure, axes)
    for ending in ("svg", "png"):
        style.save(figure, folder / f"correlation.{ending}")


_ABOUT = """\
# What plans promise, and what real runs take

`scripts/correlation` makes this page. `piper-ray run` trains by each plan, with torch's pipelines over gloo and a
process of one thread for each rank. The predicted step comes from `piper-ray profile`, which measures layers one by
one, and from `piper-ray simulate`; nothing of the run goes into it. The GPT really trains on two cores. Plans for 4 and
8 ranks run with layers that sleep in proportion to the times of the GPT's layers."""

_TERMS = """\
A step lasts from its common start until the last rank has updated its weights. The measured step is the median, the
spread is from the first to the third quartile, the error is that of the prediction. The rates at which replicas sum
gradients and AdamW updates weights were measured with two processes at once."""


def page(points: Sequence[Point], facts: Sequence[str]) -> str:
    """docs/correlation.md. facts: of the machine and the measurement, a line each."""
    listed = "\n".join(f"- {fact}" for fact in facts)
    table = "\n".join([*HEAD, *(row(point) for point in points)])
    picture = "![predicted and measured steps](correlation.svg)"
    return "\n\n".join([_ABOUT, listed, agreement(points), table, picture, _TERMS]) + "\n"


_OF_MODELS = """\
## Five models on two processes

`scripts/correlation models` makes this part in its own run. Each model is profiled by two processes at once, planned
for two stages (`piper-ray solve --stages 2`), and trained by that plan with one thread for each of two ranks. Profiles
and runs take turns, five of each, and the figures are medians over all of them: the speed of a shared machine drifts by
more than what is to be shown."""


def models_page(points: Sequence[Point], cores: int, steps: int) -> str:
    """The part of docs/correlation.md on five models."""
    within = sum(abs(point.error) <= _NEAR for point in points)
    found = f"{within} of {len(points)} are within {100.0 * _NEAR:.0f} %: {cores} cores, {steps} measured steps each."
    return "\n\n".join([_OF_MODELS, found, "\n".join([*HEAD, *map(row, points)])]) + "\n"


_NEAR = 0.05

ASYNCHRONOUS_HEAD = (
    "| plan | schedule | promised | simulated | measured | spread | error of the promise | of the simulation |",
    "|---|---|---:|---:|---:|---:|---:|---:|",
)


def asynchronous_row(point: Point) -> str:
    assert point.promised_s is not None
    figures = (point.promised_s, point.predicted_s, point.measured_s, point.spread_s)
    times = " | ".join(f"{1e3 * seconds:.1f} ms" for seconds in figures)
    of_promise = point.promised_s / point.measured_s - 1.0
    name = point.trial.name.removeprefix("asynchronous, ")
    errors = f"{100.0 * of_promise:+.1f} % | {100.0 * point.error:+.1f} %"
    return f"| {name} | {point.trial.schedule.text} | {times} | {errors} |"


def learnt_rows(losses: Mapping[str, Sequence[float]]) -> list[str]:
    """The loss at some batches, by schedule: the mean of ten."""
    last = min(map(len, losses.values()))
    shown = sorted({10, last // 4, last // 2, last})
    return [
        f"| schedule | {' | '.join(f'batch {number}' for number in shown)} |",
        f"|---|{'---:|' * len(shown)}",
        *(
            f"| {name} | {' | '.join(f'{fmean(found[number - 10 : number]):.3f}' for number in shown)} |"
            for name, found in losses.items()
        ),
    ]


_ASYNCHRONOUS = """\
## Pipelines that never drain

`scripts/correlation asynchronous` makes this part in its own run. `piper-ray run` trains with the schedules of the two
papers behind this project's problem: 2BW has two versions of the weights, PipeDream one for each microbatch in
flight. Layers sleep as above. The promised step is the time of the slowest stage for a batch, as in both papers. The
simulated step is that of `piper-ray simulate`. The measured step is the time from the end of a batch to the end of the
next; no batch drains the pipeline."""

_LEARNT = """\
How old weights change training: a GPT of four blocks on two ranks learns to count, in batches of 8 microbatches, with
the same AdamW (1e-4) under each schedule. The figures are losses, means of ten batches. PipeDream updates after each
microbatch, 8 times as often as the others, so compare its two rows only with each other."""


def asynchronous_page(points: Sequence[Point], losses: Mapping[str, Sequence[float]]) -> str:
    """The part of docs/correlation.md on asynchronous schedules."""
    table = "\n".join([*ASYNCHRONOUS_HEAD, *map(asynchronous_row, points)])
    return "\n\n".join([_ASYNCHRONOUS, table, _LEARNT, "\n".join(learnt_rows(losses))]) + "\n"
