"""Errors by source, compared with ranges from the other sources alone."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from piper_ray.calibrate.measurements import student_90
from scripts.validation.errors import Errors, groups_of
from scripts.validation.price import PricedRun

_COVERED = 0.9
_LEAST_SOURCES = 3
"""The least number of other sources in a group for a range."""


@dataclass(frozen=True)
class SourceErrors:
    """The errors of a source. group: the runs like the source's. interval: measured over predicted, from the group's
    other sources; None if there are too few. covered: the share of the source's runs within it."""

    source: str
    group: str
    errors: Errors
    interval: tuple[float, float] | None
    covered: float | None


def errors_by_source(outcomes: Iterable[PricedRun]) -> list[SourceErrors]:
    """The errors of each source in each of its main groups."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for outcome in outcomes:
        if outcome.error is not None:
            found[groups_of(outcome)[0]][outcome.run.source].append(outcome.error)
    return [
        _of_source(source, group, errors, {name: other for name, other in of_group.items() if name != source})
        for group, of_group in sorted(found.items())
        for source, errors in sorted(of_group.items())
    ]


def _of_source(source: str, group: str, errors: Sequence[float], others: Mapping[str, Sequence[float]]) -> SourceErrors:
    interval = covered = None
    if len(others) >= _LEAST_SOURCES:
        interval = interval_of(list(others.values()))
        ratios = [1.0 / (1.0 + error) for error in errors]
        covered = sum(interval[0] <= ratio <= interval[1] for ratio in ratios) / len(ratios)
    return SourceErrors(source, group, Errors(tuple(errors)), interval, covered)


def interval_of(sources: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The range of measured over predicted that covers 90 % of the sources' runs, each source counting once, widened
    for their number.

    The difference of a run of an unknown source has a part that is common to all runs of the source. So the spread adds
    that of sources' means to that of runs about them, with Student's factor for this number of sources.
    """
    logs = [[-math.log1p(error) for error in errors] for errors in sources]
    means = [sum(of) / len(of) for of in logs]
    count = len(means)
    centre = sum(means) / count
    between = sum((mean - centre) ** 2 for mean in means) / (count - 1)
    within = sum(sum((x - mean) ** 2 for x in of) / len(of) for of, mean in zip(logs, means, strict=True)) / count
    half = student_90(count - 1) * math.sqrt((between + within) * (1.0 + 1.0 / count))
    return math.exp(centre - half), math.exp(centre + half)


def source_lines(found: Iterable[SourceErrors]) -> Iterator[str]:
    """A table in Markdown."""
    yield "| source | like | runs | mean error | signed | worst | 90 % by other sources | of these runs within |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|"
    for one in found:
        interval = "-" if one.interval is None else f"x{one.interval[0]:.2f} to x{one.interval[1]:.2f}"
        covered = "-" if one.covered is None else f"{one.covered:.0%}"
        errors = f"{one.errors.mean:.1%} | {one.errors.signed:+.1%} | {one.errors.worst:+.1%}"
        yield f"| {one.source} | {one.group} | {len(one.errors.values)} | {errors} | {interval} | {covered} |"
