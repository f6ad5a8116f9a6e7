"""``piper-ray plan``: from a model's config to the files that launch its training."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

import piper_ray
from piper_ray import ScheduleName, Status, Stop
from piper_ray.cli.estimate import ModelOptions, OfferOptions, RunningOptions, parse_replicas
from piper_ray.cli.for_runtime import with_room
from piper_ray.cli.interrupts import current
from piper_ray.cli.options import REQUIRED, of_options, option
from piper_ray.cli.shared import StepOptions
from piper_ray.cli.telling import kernels_told, note, working
from piper_ray.cli.values import command_text
from piper_ray.export.files import Target
from piper_ray.model.errors import EXIT_INTERRUPTED, InfeasibleError, UsageError
from piper_ray.model.units import parse_count
from piper_ray.runtimes.runtime import RUNTIMES, RuntimeName
from piper_ray.storage.files import write_atomically

if TYPE_CHECKING:
    from piper_ray import Instance, TrainedModel
    from piper_ray.export.files import Export
    from piper_ray.proposal.demand import PlanDemand
    from piper_ray.proposal.propose import FoundPlans, Help

WORKLOAD, PLAN = "workload.toml", "plan.json"


@dataclass(frozen=True)
class PlanOfferOptions(OfferOptions):
    """The offered ways with the optimizer's state over all replicas, if nothing else is asked for."""

    zero: int = option(
        "SHARDS",
        "Offer sharding the optimizer's state (ZeRO-1) over so many replicas, in stages of as many or more; over "
        "however many a stage has: all; 1: not.",
        default="all",  # read as an option's text is, and shown in the help
        parse=parse_replicas,
    )


@dataclass(frozen=True)
class ProposalOptions:
    """What is planned."""

    out: Path = option("DIR", "The folder for workload, plan, report and launch.", "-o", "--out", default=REQUIRED)
    runtime: RuntimeName = option(
        None,
        "The training framework that is to run the plan: the plan keeps to what it can run, and launch files are "
        "written for it.",
        default=RuntimeName.MEGATRON,
    )
    batch: int | None = option(
        "SAMPLES",
        "Samples of a batch, over all replicas; near the usual, divisible by the GPUs, if left out.",
        "--global-batch",
        min=1,
    )
    software: str | None = option(
        "NAME", "The generation of training software that times are of, in place of the runtime's own."
    )
    samples: int | None = option("SAMPLES", "This size alone; else 1, 2, 4, 8 and 16.", "--microbatch-size", min=1)
    schedule: ScheduleName | None = option(
        "NAME", "This schedule alone; else 1f1b, and interleaved where the runtime has it."
    )
    train_tokens: int | None = option("COUNT", "Of the whole training, as 15T: tells days.", parse=parse_count)
    price: float | None = option(
        "MONEY",
        "What one GPU costs for one hour, in any currency, as 2.5: with --train-tokens the cost of the whole training "
        "is shown.",
        min=0.0,
    )

    def refuse_mistakes(self) -> None:
        """Raises UsageError for what does not go together, before any work."""
        if self.out.exists() and not self.out.is_dir():
            raise UsageError(f"--out {self.out}: is a file; expected a folder")
        if self.train_tokens is not None and self.train_tokens < 1:
            raise UsageError(f"--train-tokens must be at least 1, not {self.train_tokens}")
        if self.price is not None and not math.isfinite(self.price):
            raise UsageError(f"--price {self.price}: expected an amount of money")
        if self.price is not None and self.train_tokens is None:
            raise UsageError("--price needs --train-tokens: of how long a training is the cost asked")


def plan(
    context: typer.Context,
    modelled: ModelOptions,
    training: ProposalOptions,
    offered: PlanOfferOptions,
    running: RunningOptions,
    charged: StepOptions,
) -> None:
    """Plan the training of MODEL on a cluster: workload, plan, report and launch files, and the figures people ask for.

    Tries every sensible microbatch size, d, t, p, recomputation and schedule under the runtime's rules, at the
    times of its software; context parallelism of sequences from 16,384 tokens, and experts over the GPUs of one, two
    and four nodes, where nothing else is asked for.
    """
    from piper_ray.proposal.demand import PlanDemand
    from piper_ray.proposal.plan import schedules_of, with_offers
    from piper_ray.proposal.propose import propose, what_would_help
    from piper_ray.report.proposal import Asked, ProposalLog, print_plan
    from piper_ray.report.terminal import console
    from piper_ray.workloads.estimate.build import EstimateRequest, trained_model
    from piper_ray.workloads.estimate.modes import Offer

    training.refuse_mistakes()
    out, gpu = training.out, modelled.gpu
    named = RUNTIMES[training.runtime]
    schedules = schedules_of(named, training.schedule)
    model, hardware = modelled.read()
    if (chosen := hardware.choice_note(gpu)) is not None:
        note(chosen)
    node = modelled.gpus_per_node or hardware.gpu(gpu).gpus_per_node
    request = of_options(
        EstimateRequest,
        modelled,
        running,
        batch=training.batch,
        samples=training.samples,
        offer=Offer(zero=offered.zero, expert_tensor=offered.expert_tensor),
    )
    contexts = offered.contexts if offered.context_parallel else None
    experts = offered.experts if offered.expert_parallel else None
    request = with_offers(request, model, named, node, contexts, experts, training.software)
    _require_files(trained_model(model, request, hardware.training), training.runtime)
    request = modelled.calibrated(model, hardware, request)
    demand = PlanDemand(model, hardware, gpu, request, named, schedules, charged.terms())
    helps: list[Help] = []

    def helped(stop: Stop[list[Help]]) -> list[Help]:
        stop.offer(lambda: helps)
        for one in what_would_help(found, stop, log, _others(found.demand)):
            helps.append(one)  # noqa: PERF402 - an interrupt leaves those that are known
        return helps

    def interrupted() -> bool:
        return current().number is not None

    before: list[tuple[FoundPlans, Export]] = []

    def proposed(set_aside_bytes: float) -> tuple[FoundPlans, Export]:
        asked = replace(demand, set_aside_bytes=set_aside_bytes)
        try:
            best = current().run(lambda stop: propose(asked, stop, note, log))
        except KeyboardInterrupt:
            if not before:
                raise
            return before[-1]
        before.append((best, _launch(best)))
        return before[-1]

    with kernels_told(), ProposalLog(console(stderr=True)) as log:
        found, launch = with_room(named.title, proposed, lambda one: 0.0 if interrupted() else one[1].missing_bytes)
        if launch.excess and not interrupted():
            raise InfeasibleError("\n".join(["the launch takes more memory than the plan's figures:", *launch.excess]))
        if not interrupted():
            log.begin("what would help")
            current().run(helped)
    written = _write(found, launch, out, command_text(context))
    with contextlib.suppress(KeyboardInterrupt):  # a plan without the page is a plan
        written += _write_page(found, out)
    ended = interrupted()

    print_plan(console(), found, helps, Asked(training.train_tokens, training.price))
    for path in written:
        typer.echo(str(path))
    if ended:
        current().tell("this is the best plan so far")
        raise typer.Exit(EXIT_INTERRUPTED)


def _others(demand: PlanDemand) -> tuple[str, ...]:
    """fp8, where the GPU has units for it, the plan is in another precision, and the runtime's files can say it."""
    from piper_ray.export.targets import exportable
    from piper_ray.workloads.estimate.build import trained_model

    request = replace(demand.request, precision="fp8")
    if demand.request.precision == "fp8" or demand.hardware.gpu(demand.gpu).matrix_fp8_flop_per_s <= 0.0:
        return ()
    trained = trained_model(demand.model, request, demand.hardware.training)
    return ("fp8",) if exportable(trained, Target(demand.runtime.name.value)) is None else ()


def _require_files(model: TrainedModel, runtime: RuntimeName) -> None:
    """Raises UsageError, before any search, where the runtime's launch files cannot say the model."""
    from piper_ray.export.targets import exportable

    if (reason := exportable(model, Target(runtime.value))) is None:
        return
    others = [f"--runtime {name.value}" for name in RuntimeName if exportable(model, Target(name.value)) is None]
    instead = f"{' or '.join(others)} may do; " if others else ""
    raise UsageError(f"{reason}; {instead}estimate and solve --runtime {runtime.value} plan it without launch files")


def _on_whole_gpus(found: FoundPlans) -> Instance:
    """The instance with the memory that was set aside."""
    instance = found.best.instance
    return instance.replace(memory_bytes=found.demand.whole_bytes(instance.memory_bytes))


def _launch(found: FoundPlans) -> Export:
    """What the runtime reads of the best plan."""
    from piper_ray.export.targets import export_plan
    from piper_ray.runtimes.runtime import gpus_per_node_of

    best, demand = found.best, found.demand
    node = gpus_per_node_of(best.instance, demand.request.gpus_per_node)
    target = Target(demand.runtime.name.value)
    return export_plan(_on_whole_gpus(found), best.plan, best.solution.schedule, target, node)


def _write(found: FoundPlans, launch: Export, out: Path, command: str) -> list[Path]:
    """Workload, plan, and what the runtime reads. Raises UsageError where a file cannot be."""
    from piper_ray.report.document import plan_document, proof_document, to_text
    from piper_ray.report.estimate import file_text

    best, demand, solution = found.best, found.demand, found.best.solution
    instance, schedule = _on_whole_gpus(found), solution.schedule
    if demand.set_aside_bytes or demand.headroom:  # nothing is proved of plans that leave less
        solution = replace(solution, status=Status.FEASIBLE, lower_bound_s=0.0)
    written = launch.write(out)
    for text in launch.notes:
        note(text)
    workload, plan_file = out / WORKLOAD, out / PLAN
    write_atomically(workload, file_text(replace(best.estimate, instance=instance), command))
    evaluation = piper_ray.evaluate(instance, best.plan, schedule=schedule, step=demand.step)
    document = plan_document(instance, best.plan, evaluation, proof_document(solution), schedule)
    write_atomically(plan_file, to_text(document))
    return [workload, plan_file, *written]


def _write_page(found: FoundPlans, out: Path) -> list[Path]:
    """The files written; none after an interrupt. Raises KeyboardInterrupt for one meanwhile."""
    if current().number is not None:
        return []

    from piper_ray.report.page.render import write_page
    from piper_ray.report.page.subject import report_subject
    from piper_ray.workloads.formats.load import plan_claims

    best, page = found.best, out / "report.html"
    claims = plan_claims(out / PLAN)
    with working("report.html: other planners") as line:
        subject = current().run(
            lambda _: report_subject(best.instance, best.plan, best.solution.schedule, claims, line)
        )
    write_page(subject, page)
    return [page]
