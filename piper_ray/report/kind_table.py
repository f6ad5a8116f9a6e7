"""A table over the devices of two kinds: on the screen, as CSV, and drawn."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from piper_ray.engine.frontier.kinds import Counts, KindPoint
from piper_ray.model.figures import NEAR_DIGITS, percent_text, plural, printable, time_text
from piper_ray.model.instance import Instance
from piper_ray.model.solution import Status
from piper_ray.report.terminal import Column, print_lines, print_table
from piper_ray.workloads.formats.plans import Document

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def print_kind_table(screen: Console, kinds: Sequence[str], points: Sequence[KindPoint]) -> None:
    """Times of a microbatch, with the gap of those that are not proved; then how many are proved."""
    first, second = map(printable, kinds)
    of_pair = {one.devices: _cell(one) for one in points}
    others = sorted({one.devices[1] for one in points})
    columns = [Column(f"{first} \\ {second}", right=True), *(Column(f"{count:,}", right=True) for count in others)]
    rows = [
        [f"{count:,}", *(of_pair.get((count, other), "?" if count or other else "") for other in others)]
        for count in sorted({one.devices[0] for one in points})
    ]
    print_table(screen, columns, rows)
    proved = sum(one.solution.status in (Status.OPTIMAL, Status.INFEASIBLE) for one in points)
    solved = sum(one.solved for one in points)
    print_lines(screen, ["", f"{proved:,} of {plural(len(points), 'point')} proved, by {plural(solved, 'solve')}"])


def _cell(point: KindPoint) -> str:
    found = point.solution
    if found.time_per_sample_s is None:
        return "none fits" if found.status is Status.INFEASIBLE else "?"
    gap = "" if found.gap is None or found.status is Status.OPTIMAL else f" (gap {percent_text(found.gap)})"
    return f"{time_text(found.time_per_sample_s, NEAR_DIGITS)}{gap}"


def kind_rows(kinds: Sequence[str], points: Sequence[KindPoint], plans: Mapping[Counts, str]) -> list[Document]:
    """A row for each point, with the name of its plan's file, if one was written."""
    return [
        {
            **dict(zip(kinds, one.devices, strict=True)),
            "time_per_sample_s": one.solution.time_per_sample_s,
            "lower_bound_s": None if one.solution.status is Status.INFEASIBLE else one.solution.lower_bound_s,
            "status": one.solution.status.value,
            "plan_file": plans.get(one.devices),
        }
        for one in points
    ]


def kind_csv(rows: Sequence[Document]) -> str:
    """The table as a CSV file."""
    text = io.StringIO()
    written = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    written.writeheader()
    written.writerows(rows)
    return text.getvalue()


def kind_figure(instance: Instance, kinds: Sequence[str], points: Sequence[KindPoint]) -> Figure | None:
    """Time against the devices of the second kind, a curve for each number of the first. None where no plan is."""
    from piper_ray.report.plots import style
    from piper_ray.report.plots.curves import TIME, Look, draw_curves, finish

    known = [one.solution.time_per_sample_s for one in points if one.solution.time_per_sample_s is not None]
    if not known:
        return None
    figure, (axes,) = style.panels(instance.name, [f"N = {instance.microbatches:,}"])
    counts = sorted({one.devices[0] for one in points})
    looks = [Look(f"{count:,} {kinds[0]}", at, len(counts), ordered=True) for at, count in enumerate(counts)]
    lines = [
        (look, [(float(x.devices[1]), x.solution.time_per_sample_s) for x in points if x.devices[0] == count])
        for look, count in zip(looks, counts, strict=True)
    ]
    draw_curves(axes, lines)
    style.devices_axis(axes, [one.devices[1] for one in points])
    axes.set_xlabel(f"devices of {kinds[1]}")
    finish(figure, [axes], TIME, known)
    return figure
