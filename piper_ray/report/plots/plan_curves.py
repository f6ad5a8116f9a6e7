"""Plots of a sweep's plans: step and cost against the size of the cluster by GPU, and ways to train compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby

from matplotlib.figure import Figure

from piper_ray.report.plots import style
from piper_ray.report.plots.curves import NO_PLAN, Look, draw_curves, finish
from piper_ray.report.sweep_plans import Cost, Prices
from piper_ray.sweep.plan_findings import PlanRecord, TrainedBatch, best_of_clusters

_MOST_PANELS = 9


def plan_figures(records: Sequence[PlanRecord], prices: Prices) -> Iterator[tuple[str, Figure]]:
    """Each with a name for its file; a figure is of one model and batch. One of a single cluster is left out. A GPU has
    the same colour and marker in all of them, and so has a way to train."""
    gpus = sorted({record.gpus_text for record in records})
    ways = sorted({record.way.text for record in records})
    cost = Cost(prices)
    for training, group in groupby(records, key=lambda record: record.training):
        of_training = list(group)
        if len({record.devices for record in of_training}) < 2:
            continue
        best = _of_sizes(best_of_clusters(of_training))
        name = f"{training.model}-b{training.batch}" + ("" if training.tokens is None else f"-s{training.tokens}")
        by_gpu = [(Look(gpu, index, len(gpus)), gpu) for index, gpu in enumerate(gpus)]
        curves = [(look, [one for one in best if one.gpus_text == gpu]) for look, gpu in by_gpu]
        if best:
            title = f"{training.text}: step of the best plan"
            yield f"step-{name}", _figure(title, "seconds", [("", curves)], lambda one: one.step_s)
        if any(cost.of(one) for one in best):
            title = f"{training.text}: {cost.words}, best plan"
            yield f"cost-{name}", _figure(title, cost.words, [("", curves)], cost.of)
        if len(ways) > 1 and best:
            yield f"ways-{name}", _ways(training, of_training, gpus, ways)


def _of_sizes(records: Iterable[PlanRecord]) -> list[PlanRecord]:
    """The plan with the shortest step of all clusters with the same kinds and the same number of GPUs."""
    best: dict[tuple[str, int], PlanRecord] = {}
    for one in records:
        key = one.gpus_text, one.devices
        if key not in best or (one.step_s or math.inf) < (best[key].step_s or math.inf):
            best[key] = one
    return list(best.values())


def _ways(training: TrainedBatch, records: Sequence[PlanRecord], gpus: Sequence[str], ways: Sequence[str]) -> Figure:
    """A panel for each GPU, a curve for each runtime and precision; a cross where there is no plan."""
    looks = [(Look(way, index, len(ways)), way) for index, way in enumerate(ways)]
    panels = [
        (
            gpu,
            [
                (look, _of_sizes([one for one in records if one.gpus_text == gpu and one.way.text == way]))
                for look, way in looks
            ],
        )
        for gpu in gpus[:_MOST_PANELS]
    ]
    title = f"{training.text}: tokens per second of each GPU"
    return _figure(title, "tokens per second and GPU", panels, lambda one: one.tokens_per_s_per_device)


_Curves = Sequence[tuple[Look, Sequence[PlanRecord]]]


def _figure(
    title: str,
    quantity: str,
    panels: Sequence[tuple[str, _Curves]],
    value: Callable[[PlanRecord], float | None],
) -> Figure:
    figure, every = style.panels(title, [head for head, _ in panels])
    values, devices = list[float](), list[int]()
    for axes, (_, curves) in zip(every, panels, strict=True):
        draw_curves(axes, [(look, [(float(one.devices), value(one)) for one in of_curve]) for look, of_curve in curves])
        for look, of_curve in curves:
            none = [one.devices for one in of_curve if value(one) is None]
            if none:
                height = 0.02 + 0.03 * look.index
                axes.plot(none, [height] * len(none), NO_PLAN, color=look.colour, transform=axes.get_xaxis_transform())
        values += [found for _, of_curve in curves for one in of_curve if (found := value(one)) is not None]
        devices += [one.devices for _, of_curve in curves for one in of_curve]
    for axes in every:
        style.devices_axis(axes, devices)
    finish(figure, every, quantity, values)
    return figure
