"""``piper-ray verify``: what a plan costs, or which rules it breaks, with none of the solver's code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

import piper_ray
from piper_ray.cli.certificates import CertificateInput, certified_document, certified_text, checked_certificate
from piper_ray.cli.interrupts import current
from piper_ray.cli.options import flag
from piper_ray.cli.shared import JsonOption, PlannedOptions, ScheduleOptions, StepOptions
from piper_ray.cli.telling import judged, working
from piper_ray.evaluate import Evaluation, evaluate, evaluation_of
from piper_ray.model.constraints import SameDegrees
from piper_ray.model.errors import CertificateRefused, InvalidPlan
from piper_ray.model.instance import Instance
from piper_ray.model.plan import Plan
from piper_ray.model.schedule import PAPERS_SCHEDULE, Schedule, StepTerms
from piper_ray.simulate.options import SimulationOptions

if TYPE_CHECKING:
    from piper_ray.certificate.check import CertifiedBound
    from piper_ray.simulate.result import Simulation


@dataclass(frozen=True)
class VerifyOptions:
    """How the plan is valued."""

    simulated: bool = flag("Run the plan event by event too, where that is not how it is valued.", "--simulate")


def verify(
    planned: PlannedOptions,
    scheduled: ScheduleOptions,
    charged: StepOptions,
    valued: VerifyOptions,
    proved: CertificateInput,
    told_as: JsonOption,
) -> None:
    """Check PLAN against INPUT and show what it costs, under the schedule that PLAN is for.

    A plan holds for one cluster: give the same --devices, --microbatches, --memory and --bandwidth as to solve.
    """
    json, certificate = told_as.json, proved.certificate
    instance, plan, claims = planned.load_all()
    valued_for = scheduled.valued(claims.schedule or instance.schedule)
    step = charged.terms(claims.step_under(valued_for))

    from piper_ray.report.document import to_text, verification_document
    from piper_ray.report.layout import console
    from piper_ray.report.simulation.table import print_simulation
    from piper_ray.report.stages import print_plan
    from piper_ray.report.summary import cost_text, instance_lines, print_speed, schedule_line

    with judged(planned.plan_file, instance):
        try:
            with working("checking the plan"):
                evaluation, simulation = current().run(
                    lambda _: _valued(instance, plan, valued_for, step, simulated=valued.simulated)
                )
        except InvalidPlan as error:
            if json:
                found = verification_document(instance, plan, valued_for, None, None, tuple(error.violations))
                typer.echo(to_text(found), nl=False)
            raise
    time_s = evaluation.time_per_sample_s
    certified: CertifiedBound | None = None
    silent_on: tuple[str, ...] = ()
    if certificate is not None:
        certified = checked_certificate(certificate, instance, plan, valued_for)
        silent_on = certified.silent_on(instance, plan, time_s)
    if json:
        found = verification_document(instance, plan, valued_for, evaluation, simulation, ())
        if certified is not None:
            found |= certified_document(certified, silent_on, time_s)
        typer.echo(to_text(found), nl=False)
    else:
        screen = console()
        for line in [*instance_lines(instance), schedule_line(valued_for)]:
            screen.print(line, soft_wrap=True)
        screen.print()
        print_plan(screen, instance, plan, evaluation)
        if simulation is not None:
            screen.print()
            print_simulation(screen, simulation)
        screen.print()
        screen.print(f"valid: {cost_text(instance, time_s, evaluation.devices)}", soft_wrap=True)
        print_speed(screen, instance, time_s)
        if certified is not None:
            for line in certified_text(certified, silent_on, time_s):
                screen.print(line, soft_wrap=True, highlight=False)
        if not valued_for.asynchronous:
            for uneven in SameDegrees().violations(instance, plan):
                screen.print(f"note: {uneven}: no runtime runs such a plan under a flush", soft_wrap=True)
    if silent_on:
        raise CertificateRefused("\n  ".join([f"{certificate}: says nothing of {planned.plan_file}:", *silent_on]))


def _valued(
    instance: Instance, plan: Plan, schedule: Schedule, step: StepTerms, *, simulated: bool
) -> tuple[Evaluation, Simulation | None]:
    """By Piper's formulas under its own schedule, else by events. Raises InvalidPlan with every rule that is broken."""
    if schedule == PAPERS_SCHEDULE:
        evaluation = evaluate(instance, plan, schedule=schedule, step=step)
        return evaluation, piper_ray.simulate(instance, plan, schedule) if simulated else None
    simulation = piper_ray.simulate(instance, plan, schedule, options=SimulationOptions.of(step))
    return evaluation_of(instance, plan, simulation), simulation
