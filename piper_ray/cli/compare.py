"""``piper-ray compare``: plans of one workload side by side, and why one is faster."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

import piper_ray
from piper_ray.cli.interrupts import current
from piper_ray.cli.options import argument
from piper_ray.cli.shared import JsonOption, StepOptions, WorkloadOptions
from piper_ray.cli.telling import judged, working
from piper_ray.model.errors import InvalidPlan
from piper_ray.model.instance import Instance
from piper_ray.model.schedule import Schedule
from piper_ray.simulate.options import SimulationOptions
from piper_ray.workloads.formats.load import plan_claims

if TYPE_CHECKING:
    from piper_ray.report.comparison import ComparedPlan
    from piper_ray.report.live import Working


@dataclass(frozen=True)
class PlanFiles:
    """What is compared."""

    plan_files: list[Path] = argument(
        "PLAN...", "Plans, yours first: upstream's JSON, or what solve or import-plan wrote."
    )


def compare(workload: WorkloadOptions, compared: PlanFiles, charged: StepOptions, told_as: JsonOption) -> None:
    """Simulate PLANs for INPUT, each under the schedule that it is for, and say what separates the first from the best.

    All are charged the same terms of a step: those given here, else those of the first plan.
    """
    instance, plan_files = workload.load(), compared.plan_files

    from piper_ray.report.comparison import comparison_document, print_comparison, verdict
    from piper_ray.report.document import to_text
    from piper_ray.report.layout import console
    from piper_ray.report.summary import instance_lines

    names = _names(plan_files)
    with working("simulating") as progress:
        plans = current().run(lambda _: _compared(instance, plan_files, names, charged, progress))
    if told_as.json:
        document: dict[str, object] = {"plans": comparison_document(instance, plans), "verdict": verdict(plans)}
        typer.echo(to_text(document), nl=False)
        return
    screen = console()
    for line in instance_lines(instance):
        screen.print(line, soft_wrap=True)
    screen.print()
    print_comparison(screen, instance, plans)
    screen.print()
    screen.print(verdict(plans), soft_wrap=True, markup=False, highlight=False)


def _compared(
    instance: Instance, plan_files: list[Path], names: list[str], charged: StepOptions, progress: Working
) -> list[ComparedPlan]:
    from piper_ray.report.comparison import ComparedPlan

    found = []
    first = plan_claims(plan_files[0])
    for done, (name, plan_file) in enumerate(zip(names, plan_files, strict=True)):
        progress(done, len(names), name)
        plan = piper_ray.load_plan(plan_file, instance)
        schedule = Schedule.first_of(plan_claims(plan_file).schedule, instance.schedule)
        step = charged.terms(first.step_under(schedule))
        with judged(plan_file, instance, f"{plan_file}: {InvalidPlan.HEADING}"):
            simulation = piper_ray.simulate(instance, plan, schedule, options=SimulationOptions.of(step))
        found.append(ComparedPlan(name, plan, simulation))
    return found


def _names(plan_files: list[Path]) -> list[str]:
    """Their names without folders where these tell them apart."""
    stems = [path.stem for path in plan_files]
    return stems if len(set(stems)) == len(stems) else [str(path) for path in plan_files]
