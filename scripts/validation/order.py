"""Whether estimates put layouts in the right order: what planning by them costs, against the best layout measured.

Runs are alike where they train one model on one cluster with batches of about one size; what is compared is the time of
a sample. Regret: how much slower the layout that is predicted fastest is than the fastest. Of five: the mean of that
over all choices of five of the layouts, which are what a planner has once memory has left the others out.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from scripts.validation.price import PricedRun

_FEW = 5
_ALIKE = math.log(1.05)
"""Batches whose logarithms differ by less count as one size."""


@dataclass(frozen=True)
class Layouts:
    """Predicted and measured seconds of a sample of layouts that are alike."""

    steps: tuple[tuple[float, float], ...]

    @property
    def regret(self) -> float:
        return regret_of(self.steps)

    @property
    def regret_of_five(self) -> float:
        """The mean regret over all choices of five; equal to ``regret`` if there are no more layouts.

        Where a layout is predicted to be the fastest of five, the others are predicted to be slower. It has a regret by
        each of them that is faster, in as many choices as have all others from those that are slower than that one.
        """
        few, ordered, total = min(_FEW, len(self.steps)), sorted(self.steps), 0.0
        for place, (_, chosen) in enumerate(ordered):
            behind = sorted(measured for _, measured in ordered[place + 1 :])
            for rank, best in enumerate(behind[: bisect_left(behind, chosen)]):
                total += math.comb(len(behind) - 1 - rank, few - 2) * (chosen / best - 1.0)
        return total / math.comb(len(ordered), few)

    @property
    def pairs(self) -> tuple[int, int]:
        """Of the pairs whose measurements differ: the number in the right order less that in the wrong order, and the
        number of all."""
        products = [
            (first[0] - second[0]) * (first[1] - second[1])
            for first, second in combinations(self.steps, 2)
            if first[1] != second[1]
        ]
        return sum(1 if product > 0 else -1 for product in products), len(products)


def regret_of(steps: Sequence[tuple[float, float]]) -> float:
    """The regret of predicted and measured steps."""
    return min(steps)[1] / min(measured for _, measured in steps) - 1.0


@dataclass(frozen=True)
class OrderFigures:
    """The figures of a source's groups of layouts. regret, regret_of_five: means over the groups. worst: the largest
    regret."""

    groups: int
    regret: float
    worst: float
    regret_of_five: float
    tau: float
    pairs: int


def layouts_by_source(outcomes: Iterable[PricedRun]) -> dict[str, list[Layouts]]:
    """Groups of at least two layouts that are alike."""
    alike: dict[tuple[object, ...], list[tuple[float, float]]] = defaultdict(list)
    for outcome in outcomes:
        run, predicted_s, measured_s = outcome.run, outcome.predicted_step_s, outcome.measured_step_s
        if predicted_s is not None and measured_s is not None and run.global_batch:
            size = round(math.log(run.global_batch) / _ALIKE)
            how = run.citation, run.precision, run.software
            what = (run.source, how, run.model.name, run.gpu, run.gpus, size, run.seq)
            alike[what].append((predicted_s / run.global_batch, measured_s / run.global_batch))
    found: dict[str, list[Layouts]] = defaultdict(list)
    for (source, *_), steps in alike.items():
        if len(steps) > 1:
            found[str(source)].append(Layouts(tuple(steps)))
    return dict(sorted(found.items()))


def order_figures(groups: Sequence[Layouts]) -> OrderFigures:
    """The figures of one source."""
    concordant, pairs = (sum(column) for column in zip(*(group.pairs for group in groups), strict=True))
    regrets = [group.regret for group in groups]
    return OrderFigures(
        groups=len(groups),
        regret=sum(regrets) / len(groups),
        worst=max(regrets),
        regret_of_five=sum(group.regret_of_five for group in groups) / len(groups),
        tau=concordant / pairs if pairs else 1.0,
        pairs=pairs,
    )


def order_lines(found: Mapping[str, Sequence[Layouts]]) -> Iterator[str]:
    """A table in Markdown."""
    yield "| layouts of | groups | regret | worst | regret of five | Kendall's tau | pairs |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for source, groups in found.items():
        one = order_figures(groups)
        yield (
            f"| {source} | {one.groups} | {one.regret:.1%} | {one.worst:.1%} | {one.regret_of_five:.1%} "
            f"| {one.tau:+.2f} | {one.pairs:,} |"
        )
