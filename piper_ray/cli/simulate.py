"""``piper-ray simulate``: what a plan delivers under a schedule, event by event."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import piper_ray
from piper_ray.cli.common import (
    Bandwidth,
    Devices,
    Input,
    Json,
    KeptInFlight,
    Memory,
    Microbatches,
    PlanFile,
    Unwritten,
    load_instance,
    option_value,
    parse_time,
)
from piper_ray.cli.interrupts import current
from piper_ray.cli.plan_files import judged
from piper_ray.cli.progress import working
from piper_ray.cli.search_options import OptimizerTime, SumOfGradients, SumOverlap, step_terms
from piper_ray.model.errors import UsageError
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.simulate.options import InFlightRule, SimulationOptions
from piper_ray.workloads.formats.load import plan_claims


def _in_flight(text: str) -> InFlightRule | tuple[int, ...]:
    if text in [rule.value for rule in InFlightRule]:
        return InFlightRule(text)
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise UsageError(
            f"--keep {text!r} is unknown; expected rule, sustaining, or a number for each stage, as 5,2,1"
        ) from None


def _schedule(name: ScheduleName | None, chunks: int | None, group: int | None, own: Schedule) -> Schedule:
    """What is asked for; without a name that which the plan is for, with the chunks and the group asked for."""
    if name is not None:
        return Schedule(name, chunks, group)
    return Schedule(own.name, own.chunks if chunks is None else chunks, own.group if group is None else group)


def simulate(
    source: Input,
    plan_file: PlanFile,
    schedule: Annotated[
        ScheduleName | None,
        typer.Option(
            "--schedule",
            metavar="NAME",
            help="How each rank orders its passes; if not given as the plan says, else the input. 2bw, Piper's model, "
            "and pipedream never drain; gpipe, 1f1b, zb-h1, interleaved, looped-bfs, zb-v and dualpipe-v flush each "
            "batch. The latter four hold several of the plan's stages on a rank.",
        ),
    ] = None,
    chunks: Annotated[
        int | None,
        typer.Option(
            "--chunks",
            metavar="V",
            help="Stages of the plan on each rank, for interleaved, looped-bfs (2 if not given) and zb-h1 (1).",
        ),
    ] = None,
    group: Annotated[
        int | None,
        typer.Option(
            "--group",
            metavar="G",
            help="Microbatches that pass through a chunk before the next, for interleaved and zb-h1; the least allowed "
            "if not given.",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE", help="Write every event, as JSON that ui.perfetto.dev opens."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Draw the timeline, as FILE.svg, .png or .pdf."),
    ] = None,
    latency: Annotated[
        float | None,
        typer.Option(
            "--latency",
            metavar="TIME",
            parser=option_value(parse_time),
            help="Of each transfer between stages, as 5us.",
        ),
    ] = None,
    overlap_transfers: Annotated[
        bool,
        typer.Option(
            "--overlap-transfers",
            help="Transfers run beside the passes. Otherwise they are charged in the passes of both stages, as Piper "
            "does.",
        ),
    ] = False,
    all_reduce: SumOfGradients = None,
    all_reduce_overlap: SumOverlap = None,
    optimizer: OptimizerTime = None,
    keep: Annotated[
        str,
        typer.Option(
            "--keep",
            metavar="Y",
            help="Microbatches that a replica of each stage keeps in flight under 2bw, pipedream and 1f1b: rule, "
            "ceil(s / d); sustaining, the least that keep an asynchronous pipeline's slowest stage busy; or numbers, "
            "as 5,2,1.",
        ),
    ] = InFlightRule.RULE.value,
    samples_per_microbatch: Annotated[
        int | None,
        typer.Option(
            "--microbatch-size",
            metavar="SAMPLES",
            help="Samples of a microbatch, for samples/s, in place of the input's.",
        ),
    ] = None,
    tokens_per_sample: Annotated[
        int | None,
        typer.Option("--tokens", metavar="COUNT", help="Tokens of a sample, for tokens/s, in place of the input's."),
    ] = None,
    devices: Devices = None,
    microbatches: Microbatches = None,
    memory: Memory = None,
    bandwidth: Bandwidth = None,
    in_flight: KeptInFlight = None,
    json: Json = False,
) -> None:
    """Run PLAN for INPUT event by event under a schedule: step time, each rank's time and memory, what bounds it.

    A plan holds for one cluster: give the same --devices, --microbatches, --memory and --bandwidth as to solve.
    """
    if plot is not None:
        from piper_ray.report.plots.style import refuse_other_formats

        refuse_other_formats(plot)
    instance = load_instance(source, devices, microbatches, memory, bandwidth, in_flight)
    plan = piper_ray.load_plan(plan_file, instance)
    claims = plan_claims(plan_file)
    named = _schedule(schedule, chunks, group, Schedule.first_of(claims.schedule, instance.schedule))
    step = step_terms(all_reduce, all_reduce_overlap, optimizer, claims.step_under(named))
    options = SimulationOptions(
        latency_s=latency or 0.0,
        overlap_transfers=overlap_transfers,
        all_reduce=step.all_reduce,
        all_reduce_overlap=step.all_reduce_overlap,
        optimizer_s=step.optimizer_s,
        in_flight=_in_flight(keep),
        samples_per_microbatch=samples_per_microbatch,
        tokens_per_sample=tokens_per_sample,
    )

    from piper_ray.report.document import to_text
    from piper_ray.report.layout import console
    from piper_ray.report.simulation.document import simulation_document
    from piper_ray.report.simulation.table import print_simulation
    from piper_ray.report.summary import instance_lines

    with judged(plan_file, instance), working("simulating"):
        simulation = current().run(lambda _: piper_ray.simulate(instance, plan, named, options=options))
    unwritten = Unwritten()
    if trace is not None:
        with unwritten.noted():
            piper_ray.write_trace(simulation, trace)
    if plot is not None:
        from piper_ray.report.simulation.picture import plot_timeline

        with unwritten.noted():
            plot_timeline(simulation, plot)
    if json:
        typer.echo(to_text(simulation_document(instance, simulation)), nl=False)
    else:
        screen = console()
        for line in instance_lines(instance):
            screen.print(line, soft_wrap=True)
        screen.print()
        print_simulation(screen, simulation)
    unwritten.report()
