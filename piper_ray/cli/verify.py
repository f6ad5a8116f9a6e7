"""``piper-ray verify``: what a plan costs, or which rules it breaks, with none of the solver's code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import piper_ray
from piper_ray.cli.common import Bandwidth, Devices, Input, Json, KeptInFlight, Memory, Microbatches, load_instance
from piper_ray.evaluate import evaluate
from piper_ray.model.errors import InvalidPlan


def verify(
    source: Input,
    plan_file: Annotated[
        Path,
        typer.Argument(
            metavar="PLAN",
            show_default=False,
            help="The plan: upstream's JSON, or what solve wrote with --out or --json.",
        ),
    ],
    devices: Devices = None,
    microbatches: Microbatches = None,
    memory: Memory = None,
    bandwidth: Bandwidth = None,
    in_flight: KeptInFlight = None,
    json: Json = False,
) -> None:
    """Check PLAN against INPUT and show what it costs.

    A plan holds for one cluster: give the same --devices, --microbatches, --memory and --bandwidth as to solve.
    """
    instance = load_instance(source, devices, microbatches, memory, bandwidth, in_flight)
    plan = piper_ray.load_plan(plan_file, instance)

    from piper_ray.report.document import to_text, verification_document
    from piper_ray.report.layout import console
    from piper_ray.report.stages import print_plan
    from piper_ray.report.summary import cost_text, instance_lines, print_speed

    try:
        evaluation = evaluate(instance, plan)
    except InvalidPlan as error:
        if json:
            typer.echo(to_text(verification_document(instance, plan, None, tuple(error.violations))), nl=False)
        raise
    if json:
        typer.echo(to_text(verification_document(instance, plan, evaluation, ())), nl=False)
        return
    screen = console()
    for line in instance_lines(instance):
        screen.print(line, soft_wrap=True)
    screen.print()
    print_plan(screen, instance, plan, evaluation)
    screen.print()
    screen.print(f"valid: {cost_text(instance, evaluation)}", soft_wrap=True)
    print_speed(screen, instance, evaluation)
