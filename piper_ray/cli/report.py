"""``piper-ray report``: all about a plan on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import piper_ray
from piper_ray.cli.common import (
    Bandwidth,
    Devices,
    Input,
    KeptInFlight,
    Memory,
    Microbatches,
    PlanFile,
    load_instance,
    refuse_unwritable,
)
from piper_ray.cli.interrupts import current
from piper_ray.cli.plan_files import judged
from piper_ray.cli.progress import working
from piper_ray.cli.search_options import Chunks, PlannedSchedule, valued_schedule
from piper_ray.workloads.formats.load import plan_claims


def report(
    source: Input,
    plan_file: PlanFile,
    out: Annotated[
        Path,
        typer.Option("-o", "--out", metavar="FILE", show_default=False, help="The page to write, as report.html."),
    ],
    devices: Devices = None,
    microbatches: Microbatches = None,
    memory: Memory = None,
    bandwidth: Bandwidth = None,
    in_flight: KeptInFlight = None,
    schedule: PlannedSchedule = None,
    chunks: Chunks = None,
) -> None:
    """Write one HTML page about PLAN for INPUT: where stages run, timeline, memory, what binds, other planners' plans.

    The page opens offline and prints. A plan holds for one cluster: give the same --devices, --microbatches, --memory
    and --bandwidth as to solve.
    """
    refuse_unwritable("--out", out)
    instance = load_instance(source, devices, microbatches, memory, bandwidth, in_flight)
    plan = piper_ray.load_plan(plan_file, instance)
    claims = plan_claims(plan_file)
    shown_for = valued_schedule(schedule, chunks, claims.schedule or instance.schedule)

    from piper_ray.report.page.build import report_subject, write_page

    with judged(plan_file, instance), working("other planners") as line:
        subject = current().run(lambda _: report_subject(instance, plan, shown_for, claims, line))
    write_page(subject, out)
    typer.echo(f"{out}: {subject.valued.simulation!r}")
