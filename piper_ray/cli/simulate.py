"""``piper-ray simulate``: what a plan delivers under a schedule, event by event."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import typer

import piper_ray
from piper_ray.cli.interrupts import current
from piper_ray.cli.options import flag, option, parse_time
from piper_ray.cli.shared import JsonOption, PlannedOptions, StepOptions
from piper_ray.cli.telling import Unwritten, judged, working
from piper_ray.model.errors import UsageError
from piper_ray.model.schedule import Schedule, ScheduleName, StepTerms
from piper_ray.simulate.options import InFlightRule, SimulationOptions


def _in_flight(text: str) -> InFlightRule | tuple[int, ...]:
    if text in [rule.value for rule in InFlightRule]:
        return InFlightRule(text)
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise UsageError(
            f"--keep {text!r} is unknown; expected rule, sustaining, or a number for each stage, as 5,2,1"
        ) from None


@dataclass(frozen=True)
class SimulateOptions:
    """What is simulated, and what is made of it."""

    schedule: ScheduleName | None = option(
        "NAME",
        "How each rank orders its passes; if not given as the plan says, else the input. 2bw, Piper's model, and "
        "pipedream never drain; gpipe, 1f1b, zb-h1, interleaved, looped-bfs, zb-v and dualpipe-v flush each batch. The "
        "latter four hold several of the plan's stages on a rank.",
    )
    chunks: int | None = option(
        "V", "Stages of the plan on each rank, for interleaved, looped-bfs (2 if not given) and zb-h1 (1)."
    )
    group: int | None = option(
        "G",
        "Microbatches that pass through a chunk before the next, for interleaved and zb-h1; the least allowed if not "
        "given.",
    )
    trace: Path | None = option("FILE", "Write every event, as JSON that ui.perfetto.dev opens.")
    plot: Path | None = option("FILE", "Draw the timeline, as FILE.svg, .png or .pdf.")
    latency: float | None = option("TIME", "Of each transfer between stages, as 5us.", parse=parse_time)
    overlap_transfers: bool = flag(
        "A transfer between two stages takes no time of their passes: a stage computes on while it sends and receives. "
        "Without this option, as in Piper's model, both stages stand still for each transfer."
    )
    keep: str = option(
        "Y",
        "Microbatches that a replica of each stage keeps in flight under 2bw, pipedream and 1f1b: rule, ceil(s / d); "
        "sustaining, the least that keep an asynchronous pipeline's slowest stage busy; or numbers, as 5,2,1.",
        default=InFlightRule.RULE.value,
    )
    samples_per_microbatch: int | None = option(
        "SAMPLES", "Samples of a microbatch, for samples/s, in place of the input's.", "--microbatch-size"
    )
    tokens_per_sample: int | None = option(
        "COUNT", "Tokens of a sample, for tokens/s, in place of the input's.", "--tokens"
    )

    def scheduled(self, own: Schedule) -> Schedule:
        """What is asked for; without a name that which the plan is for, with the chunks and the group asked for."""
        if self.schedule is not None:
            return Schedule(self.schedule, self.chunks, self.group)
        chunks, group = self.chunks, self.group
        return Schedule(own.name, own.chunks if chunks is None else chunks, own.group if group is None else group)

    def options(self, step: StepTerms) -> SimulationOptions:
        """Raises UsageError for figures that make no sense."""
        return SimulationOptions(
            latency_s=self.latency or 0.0,
            overlap_transfers=self.overlap_transfers,
            all_reduce=step.all_reduce,
            all_reduce_overlap=step.all_reduce_overlap,
            optimizer_s=step.optimizer_s,
            in_flight=_in_flight(self.keep),
            samples_per_microbatch=self.samples_per_microbatch,
            tokens_per_sample=self.tokens_per_sample,
        )


def simulate(planned: PlannedOptions, asked: SimulateOptions, charged: StepOptions, told_as: JsonOption) -> None:
    """Run PLAN for INPUT event by event under a schedule: step time, each rank's time and memory, what bounds it.

    A plan holds for one cluster: give the same --devices, --microbatches, --memory and --bandwidth as to solve.
    """
    trace, plot = asked.trace, asked.plot
    if plot is not None:
        from piper_ray.report.plots.style import refuse_other_formats

        refuse_other_formats(plot)
    instance, plan, claims = planned.load_all()
    named = asked.scheduled(Schedule.first_of(claims.schedule, instance.schedule))
    options = asked.options(charged.terms(claims.step_under(named)))

    from piper_ray.report.document import simulation_document, to_text
    from piper_ray.report.layout import console
    from piper_ray.report.simulation.table import print_simulation
    from piper_ray.report.summary import instance_lines

    with judged(planned.plan_file, instance), working("simulating"):
        simulation = current().run(lambda _: piper_ray.simulate(instance, plan, named, options=options))
    unwritten = Unwritten()
    if trace is not None:
        with unwritten.noted():
            piper_ray.write_trace(simulation, trace)
    if plot is not None:
        from piper_ray.report.simulation.picture import plot_timeline

        with unwritten.noted():
            plot_timeline(simulation, plot)
    if told_as.json:
        typer.echo(to_text(simulation_document(instance, simulation)), nl=False)
    else:
        screen = console()
        for line in instance_lines(instance):
            screen.print(line, soft_wrap=True)
        screen.print()
        print_simulation(screen, simulation)
    unwritten.report()
