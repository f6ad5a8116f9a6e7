"""``piper-ray verify``, ``simulate``, ``compare`` and ``report``: what finished plans cost and deliver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import piper_ray
from piper_ray import InFlightRule, Instance, Plan, SimulationOptions, StepTerms, Transfers
from piper_ray.cli import certificates
from piper_ray.cli.interrupts import current
from piper_ray.cli.options import REQUIRED, argument, flag, of_options, option
from piper_ray.cli.shared import (
    JsonOption,
    LaunchOptions,
    PlannedOptions,
    ScheduleOptions,
    StepOptions,
    WorkloadOptions,
)
from piper_ray.cli.telling import Unwritten, judged, note, refuse_unwritable, show_document, working
from piper_ray.cli.values import parse_time
from piper_ray.evaluate import Evaluation, evaluate, evaluation_of
from piper_ray.model.constraints import SameDegreesByKind
from piper_ray.model.errors import CertificateRefused, InvalidPlan, UsageError
from piper_ray.model.mode import found_schemes
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.workloads.formats.load import plan_claims
from piper_ray.workloads.formats.plans import PlanClaims

if TYPE_CHECKING:
    from piper_ray import CertifiedBound, Simulation
    from piper_ray.report.comparison import ComparedPlan
    from piper_ray.report.terminal import Working


@dataclass(frozen=True)
class VerifyOptions:
    """How the plan is valued."""

    simulated: bool = flag("Also run the plan event by event, if it is not valued that way already.", "--simulate")


def verify(
    planned: PlannedOptions,
    scheduled: ScheduleOptions,
    charged: StepOptions,
    valued: VerifyOptions,
    proved: certificates.CertificateInput,
    told_as: JsonOption,
) -> None:
    """Check PLAN against INPUT and show what it costs, under the schedule that PLAN is for.

    A plan holds for one cluster: give the same --devices, --microbatches, --memory and --bandwidth as to solve.
    """
    json, certificate = told_as.json, proved.certificate
    if proved.unrestricted and certificate is None:
        raise UsageError("--unrestricted is for --certificate")
    instance, plan, claims = planned.load_all()
    valued_for = scheduled.valued(claims.schedule or instance.schedule)
    step = charged.terms(claims.step_under(valued_for))

    from piper_ray.report.document import verification_document
    from piper_ray.report.simulated import print_simulation
    from piper_ray.report.summary import cost_text, instance_lines, print_plan, schedule_line, speed_line
    from piper_ray.report.terminal import console, print_lines

    with judged(planned.plan_file, instance):
        try:
            with working("checking the plan"):
                evaluation, simulation = current().run(
                    lambda _: _valued(instance, plan, valued_for, step, simulated=valued.simulated)
                )
        except InvalidPlan as error:
            if json:
                found = verification_document(instance, plan, valued_for, None, None, tuple(error.violations))
                show_document(found)
            raise
    time_s = evaluation.time_per_sample_s
    schemes = _checked_schemes(planned.plan_file, instance, plan, claims)
    if claims.made_otherwise(instance, valued_for, step) is None:
        for text in claims.contradicted_by(time_s, plan.ranks_under(valued_for)):
            note(f"{planned.plan_file}: {text}")
    certified: CertifiedBound | None = None
    silent_on: tuple[str, ...] = ()
    offered: Mapping[str, object] | None = None
    offered_lines: list[str] = []
    if certificate is not None:
        certified = certificates.checked_certificate(certificate, instance, unrestricted=proved.unrestricted)
        offered, offered_lines = certificates.certified_schemes(planned.source, instance)
        silent_on = certified.silent_on(instance, plan, time_s, valued_for, step)
    if json:
        found = verification_document(instance, plan, valued_for, evaluation, simulation, ())
        if certified is not None:
            found |= certificates.certified_document(certified, silent_on, time_s, offered)
        show_document(found)
    else:
        screen = console()
        print_lines(screen, [*instance_lines(instance), schedule_line(valued_for), ""])
        print_plan(screen, instance, plan, evaluation)
        if simulation is not None:
            screen.print()
            print_simulation(screen, instance, simulation)
        cost = cost_text(instance, time_s, evaluation.devices)
        print_lines(screen, ["", f"valid: {cost}", speed_line(instance, time_s, valued_for)])
        if schemes:
            print_lines(screen, [f"schemes: {', '.join(schemes)} hold by the rule table, at the prices they state"])
        if certified is not None:
            print_lines(screen, [*certificates.certified_text(certified, silent_on, time_s), *offered_lines])
        if not valued_for.asynchronous:
            uneven = SameDegreesByKind().violations(instance, plan)
            print_lines(screen, (f"note: {text}: no runtime runs such a plan under a flush" for text in uneven))
    if silent_on:
        raise CertificateRefused("\n  ".join([f"{certificate}: says nothing of {planned.plan_file}:", *silent_on]))


def _checked_schemes(path: Path, instance: Instance, plan: Plan, claims: PlanClaims) -> list[str]:
    if not found_schemes(tmpc_id for stage in plan.stages for tmpc_id in stage.tmpc_ids.values()):
        return []
    from piper_ray.workloads.schemes.check import require_schemes

    return require_schemes(instance, plan, claims.schemes, path)


def _valued(
    instance: Instance, plan: Plan, schedule: Schedule, step: StepTerms, *, simulated: bool
) -> tuple[Evaluation, Simulation | None]:
    """Values the plan by formulas where it never drains, else by events. Raises InvalidPlan with every rule that is
    broken."""
    if schedule.asynchronous or plan.shares:
        evaluation = evaluate(instance, plan, schedule=schedule, step=step)
        return evaluation, piper_ray.simulate(instance, plan, schedule) if simulated else None
    simulation = piper_ray.simulate(instance, plan, schedule, options=SimulationOptions.of(step))
    return evaluation_of(instance, plan, simulation), simulation


def _in_flight(text: str) -> InFlightRule | tuple[int, ...]:
    if text in [rule.value for rule in InFlightRule]:
        return InFlightRule(text)
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise UsageError(
            f"--keep {text!r} is unknown; expected rule, sustaining, or a number for each stage, such as 5,2,1"
        ) from None


@dataclass(frozen=True)
class SimulateOptions:
    """What is simulated, and what is made of it."""

    schedule: ScheduleName | None = option(
        "NAME",
        "How each rank orders its passes; if not given as the plan says, else the input. 2bw, Piper's model, and "
        "pipedream never drain; gpipe, 1f1b, zb-h1, interleaved, looped-bfs, zb-v and dualpipe-v flush each batch. The "
        "last four hold several of the plan's stages on a rank.",
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
    latency_s: float | None = option("TIME", "Latency of a transfer between stages, such as 5us.", parse=parse_time)
    transfers: Transfers = option(
        "HOW",
        "How stages pass on tensors. in-passes (Piper's model): both stages wait during a transfer. overlapped: stages "
        "compute during transfers. overlapped-steady (interleaved, Megatron's default): as overlapped, but in the "
        "warm-up and the flush a stage waits until its send is done. one-stream (torch on NCCL): as in-passes, and a "
        "receive that is posted early delays the transfers after it.",
        default=Transfers.IN_PASSES,
    )
    pass_overlap: float = option(
        "SHARE",
        "For dualpipe-v, which runs some forward and backward passes in pairs: the share of the shorter pass that "
        "overlaps with the longer one, from 0 to 1.",
        default=0.0,
    )
    keep: str = option(
        "Y",
        "Microbatches that a replica of each stage keeps in flight under 2bw, pipedream and 1f1b: rule, ceil(s / d); "
        "sustaining, the least that keep an asynchronous pipeline's slowest stage busy; or numbers, such as 5,2,1.",
        default=InFlightRule.RULE.value,
    )
    vertical_sync: bool = flag(
        "Under pipedream, count the versions of the weights that vertical sync keeps, in place of those of stashing."
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
        chunks = own.chunks if self.chunks is None else self.chunks
        return replace(own, chunks=chunks, group=own.group if self.group is None else self.group)

    def options(self, step: StepTerms) -> SimulationOptions:
        """Raises UsageError for figures that make no sense."""
        in_flight = _in_flight(self.keep)
        return of_options(SimulationOptions, step, self, latency_s=self.latency_s or 0.0, in_flight=in_flight)


def simulate(planned: PlannedOptions, asked: SimulateOptions, charged: StepOptions, told_as: JsonOption) -> None:
    """Run PLAN for INPUT event by event under a schedule: step time, each rank's time and memory, what bounds it.

    A plan holds for one cluster: give the same --devices, --microbatches, --memory and --bandwidth as to solve.
    """
    trace, plot = asked.trace, asked.plot
    if plot is not None:
        from piper_ray.report.plots.style import refuse_other_formats

        refuse_other_formats(plot)
    instance, plan, claims = planned.load_at_sites()
    named = asked.scheduled(Schedule.first_of(claims.schedule, instance.schedule))
    options = asked.options(charged.terms(claims.step_under(named)))

    from piper_ray.report.document import simulation_document
    from piper_ray.report.simulated import print_simulation
    from piper_ray.report.summary import instance_lines
    from piper_ray.report.terminal import console, print_lines

    with judged(planned.plan_file, instance), working("simulating"):
        simulation = current().run(lambda _: piper_ray.simulate(instance, plan, named, options=options))
    unwritten = Unwritten()
    if trace is not None:
        with unwritten.noted():
            piper_ray.write_trace(simulation, trace)
    if plot is not None:
        from piper_ray.report.plots.timeline import plot_timeline

        with unwritten.noted():
            plot_timeline(simulation, plot)
    if told_as.json:
        show_document(simulation_document(instance, simulation))
    else:
        screen = console()
        print_lines(screen, [*instance_lines(instance), ""])
        print_simulation(screen, instance, simulation)
    unwritten.report()


@dataclass(frozen=True)
class PlanFiles:
    """The plans that are compared."""

    plan_files: list[Path] = argument(
        "PLAN...",
        "Plans, yours first: Piper's JSON, what solve or import-plan wrote, or a launch that import-plan reads.",
    )


def compare(
    workload: WorkloadOptions,
    compared: PlanFiles,
    launched: LaunchOptions,
    charged: StepOptions,
    told_as: JsonOption,
) -> None:
    """Simulate PLANs for INPUT, each under the schedule that it is for, and say what separates the first from the best.

    All are charged the same terms of a step: those given here, else those of the first plan.
    """
    instance, plan_files = workload.load(), compared.plan_files
    read = [_read_plan(instance, plan_file, launched) for plan_file in plan_files]

    from piper_ray.report.comparison import (
        comparison_document,
        print_comparison,
        print_difference,
        print_layouts,
        verdict,
    )
    from piper_ray.report.summary import instance_lines
    from piper_ray.report.terminal import console, print_lines

    names = plan_names(plan_files, launched.recipe)
    with working("simulating") as progress:
        plans = current().run(lambda _: _compared(instance, plan_files, read, names, charged, progress))
    if told_as.json:
        document: dict[str, object] = {
            "plans": comparison_document(instance, plans),
            "verdict": verdict(plans),
        }
        show_document(document)
        return
    screen = console()
    print_lines(screen, [*instance_lines(instance), ""])
    print_comparison(screen, instance, plans)
    print_layouts(screen, instance, plans)
    screen.print()
    print_difference(screen, plans)
    print_lines(screen, ["", verdict(plans)])


def _compared(
    instance: Instance,
    plan_files: list[Path],
    read: list[tuple[Plan, PlanClaims, Transfers | None]],
    names: list[str],
    charged: StepOptions,
    progress: Working,
) -> list[ComparedPlan]:
    from piper_ray.report.comparison import ComparedPlan

    found = []
    _, first, _ = read[0]
    launched = next((how for _, _, how in read if how is not None and how.overlaps), Transfers.IN_PASSES)
    for done, (name, plan_file, (plan, claims, transfers)) in enumerate(zip(names, plan_files, read, strict=True)):
        progress(done, len(names), name)
        schedule = Schedule.first_of(claims.schedule, instance.schedule)
        if transfers is None:  # a plan does not say: it is run as the launches that it is held against
            transfers = launched if schedule.name is ScheduleName.INTERLEAVED else Transfers.IN_PASSES
        options = replace(SimulationOptions.of(charged.terms(first.step_under(schedule))), transfers=transfers)
        with judged(plan_file, instance, f"{plan_file}: {InvalidPlan.HEADING}"):
            simulation = piper_ray.simulate(instance, plan, schedule, options=options)
        found.append(ComparedPlan(name, plan, simulation))
    return found


def _read_plan(instance: Instance, path: Path, launched: LaunchOptions) -> tuple[Plan, PlanClaims, Transfers | None]:
    """A plan that is written down, or that of a launch: files in JSON without a launch's settings are plans."""
    if not path.exists() or (path.suffix.lower() == ".json" and not _is_launch(path)):
        return piper_ray.load_plan(path, instance), plan_claims(path), None
    from piper_ray.export.launched import import_launched

    found = import_launched(instance, str(path), asked=launched.asked())
    for text in found.notes:
        note(f"{path}: {text}")
    return found.plan, PlanClaims(found.schedule), found.transfers


def _is_launch(path: Path) -> bool:
    """Whether a file in JSON is a configuration that runtimes read."""
    from piper_ray.launches.launch import Source
    from piper_ray.launches.read import read_launch

    return path.is_file() and read_launch(Source(path.read_text(encoding="utf-8-sig"), path)) is not None


def plan_names(plan_files: list[Path], recipe: str | None) -> list[str]:
    """The recipe's name for a Python file, else the file's name without its folder; paths where names are equal."""
    names = [recipe if recipe is not None and path.suffix == ".py" else path.stem for path in plan_files]
    return names if len(set(names)) == len(names) else [str(path) for path in plan_files]


@dataclass(frozen=True)
class PageOutput:
    """Where the page goes."""

    out: Path = option("FILE", "The page to write, such as report.html.", "-o", "--out", default=REQUIRED)


def report(planned: PlannedOptions, page: PageOutput, scheduled: ScheduleOptions) -> None:
    """Write one HTML page about PLAN for INPUT: where stages run, timeline, memory, what binds, other planners' plans.

    The page opens offline and prints. A plan holds for one cluster: give the same --devices, --microbatches, --memory
    and --bandwidth as to solve.
    """
    refuse_unwritable("--out", page.out)
    instance, plan, claims = planned.load_at_sites()
    shown_for = scheduled.valued(claims.schedule or instance.schedule)

    from piper_ray.report.page.render import write_page
    from piper_ray.report.page.subject import report_subject
    from piper_ray.report.terminal import console, print_lines
    from piper_ray.workloads.estimate.doubt import step_text

    with judged(planned.plan_file, instance), working("other planners") as line:
        subject = current().run(lambda _: report_subject(instance, plan, shown_for, claims, line))
    write_page(subject, page.out)
    simulation = subject.valued.simulation
    text = simulation.text_of(step_text(simulation.step_s, subject.valued.doubt))
    print_lines(console(), [f"{page.out}: {text}"])
