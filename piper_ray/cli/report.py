"""``piper-ray report``: all about a plan on one page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import typer

from piper_ray.cli.interrupts import current
from piper_ray.cli.options import REQUIRED, option
from piper_ray.cli.shared import PlannedOptions, ScheduleOptions
from piper_ray.cli.telling import judged, refuse_unwritable, working


@dataclass(frozen=True)
class PageOutput:
    """Where the page goes."""

    out: Path = option("FILE", "The page to write, as report.html.", "-o", "--out", default=REQUIRED)


def report(planned: PlannedOptions, page: PageOutput, scheduled: ScheduleOptions) -> None:
    """Write one HTML page about PLAN for INPUT: where stages run, timeline, memory, what binds, other planners' plans.

    The page opens offline and prints. A plan holds for one cluster: give the same --devices, --microbatches, --memory
    and --bandwidth as to solve.
    """
    refuse_unwritable("--out", page.out)
    instance, plan, claims = planned.load_all()
    shown_for = scheduled.valued(claims.schedule or instance.schedule)

    from piper_ray.report.page.render import write_page
    from piper_ray.report.page.subject import report_subject

    with judged(planned.plan_file, instance), working("other planners") as line:
        subject = current().run(lambda _: report_subject(instance, plan, shown_for, claims, line))
    write_page(subject, page.out)
    typer.echo(f"{page.out}: {subject.valued.simulation!r}")
