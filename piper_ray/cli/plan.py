"""``piper-ray plan``: from a model's config to the files that launch its training."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import piper_ray
from piper_ray.cli.calibration import Calibrate, calibrated_request
from piper_ray.cli.common import command_text, load_model, note, parse_number
from piper_ray.cli.interrupts import current
from piper_ray.cli.offers import ContextParallel, ExpertParallel, ShardedState, contexts_of, experts_of
from piper_ray.cli.progress import kernels_told, working
from piper_ray.cli.search_options import OptimizerTime, SumOfGradients, SumOverlap, step_terms
from piper_ray.export.target import Target
from piper_ray.model.errors import EXIT_INTERRUPTED, InfeasibleError, UsageError
from piper_ray.model.schedule import ScheduleName
from piper_ray.model.solution import Status
from piper_ray.model.stop import Stop
from piper_ray.runtimes.named import RUNTIMES
from piper_ray.runtimes.runtime import RuntimeName
from piper_ray.storage.files import write_atomically

if TYPE_CHECKING:
    from piper_ray.export.files import Export
    from piper_ray.model.instance import Instance
    from piper_ray.model.trained_model import TrainedModel
    from piper_ray.proposal.propose import Demand, Help, Proposal

WORKLOAD, PLAN = "workload.toml", "plan.json"
_ALL: Any = "all"  # read as an option's text is, and shown in the help


def plan(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            show_default=False,
            help="A Hugging Face config.json, or the name of a known model, such as llama3-70b; - reads a config from "
            "stdin.",
        ),
    ],
    gpu: Annotated[
        str, typer.Option("--gpu", metavar="NAME", show_default=False, help="The GPU, such as H100-SXM or A100-80.")
    ],
    nodes: Annotated[
        int, typer.Option("--nodes", metavar="COUNT", min=1, show_default=False, help="Nodes of the cluster.")
    ],
    out: Annotated[
        Path,
        typer.Option(
            "-o", "--out", metavar="DIR", show_default=False, help="The folder for workload, plan, report and launch."
        ),
    ],
    runtime: Annotated[RuntimeName, typer.Option("--runtime", help="Who is to run it.")] = RuntimeName.MEGATRON,
    global_batch: Annotated[
        int | None,
        typer.Option(
            "--global-batch",
            metavar="SAMPLES",
            min=1,
            help="Samples of a batch, over all replicas; near the usual, divisible by the GPUs, if left out.",
        ),
    ] = None,
    microbatch_size: Annotated[
        int | None,
        typer.Option("--microbatch-size", metavar="SAMPLES", min=1, help="This size alone; else 1, 2, 4, 8 and 16."),
    ] = None,
    tokens: Annotated[int | None, typer.Option("--tokens", metavar="COUNT", min=1, help="Tokens of a sample.")] = None,
    gpus_per_node: Annotated[
        int | None,
        typer.Option("--gpus-per-node", metavar="COUNT", min=1, help="GPUs of a node, in place of the table's."),
    ] = None,
    schedule: Annotated[
        ScheduleName | None,
        typer.Option("--schedule", help="This schedule alone; else 1f1b, and interleaved where the runtime has it."),
    ] = None,
    zero: ShardedState = _ALL,
    context_parallel: ContextParallel = None,
    expert_parallel: ExpertParallel = None,
    all_reduce: SumOfGradients = None,
    all_reduce_overlap: SumOverlap = None,
    optimizer: OptimizerTime = None,
    train_tokens: Annotated[
        int | None,
        typer.Option(
            "--train-tokens", metavar="COUNT", parser=parse_number, help="Of the whole training, as 15T: tells days."
        ),
    ] = None,
    price: Annotated[
        float | None,
        typer.Option("--price", metavar="MONEY", min=0.0, help="Of a GPU for an hour: the training's cost is told."),
    ] = None,
    hardware: Annotated[
        Path | None,
        typer.Option("--hardware", metavar="FILE", help="A TOML file of constants over those of the built-in table."),
    ] = None,
    calibrate: Calibrate = None,
) -> None:
    """Plan the training of MODEL on a cluster: workload, plan, report and launch files, and the figures people ask for.

    Tries every sensible microbatch size, d, t, p, recomputation and schedule under the runtime's rules, at the
    times of its software; context parallelism of sequences from 16,384 tokens, and experts over a node's GPUs,
    where nothing else is asked for.
    """
    from piper_ray.proposal.plan import schedules_of, with_offers
    from piper_ray.proposal.propose import Demand, propose, what_would_help
    from piper_ray.report.layout import console
    from piper_ray.report.proposal_log import ProposalLog
    from piper_ray.workloads.estimate.build import EstimateRequest, trained_model
    from piper_ray.workloads.estimate.hardware import load_hardware
    from piper_ray.workloads.estimate.modes import Offer

    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out}: is a file; expected a folder")
    if train_tokens is not None and train_tokens < 1:
        raise UsageError(f"--train-tokens must be at least 1, not {train_tokens}")
    if price is not None and not math.isfinite(price):
        raise UsageError(f"--price {price}: expected an amount of money")
    if price is not None and train_tokens is None:
        raise UsageError("--price needs --train-tokens: of how long a training is the cost asked")
    named = RUNTIMES[runtime]
    schedules = schedules_of(named, schedule)
    read = load_model(model)
    table = load_hardware(hardware, note)
    if (chosen := table.choice_note(gpu)) is not None:
        note(chosen)
    node = gpus_per_node or table.gpu(gpu).gpus_per_node
    contexts = contexts_of(context_parallel) if context_parallel else None
    experts = experts_of(expert_parallel) if expert_parallel else None
    request = EstimateRequest(
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        tokens=tokens,
        samples=microbatch_size,
        batch=global_batch,
        offer=Offer(zero=zero),
    )
    request = with_offers(request, read, named, node, contexts, experts)
    _require_files(trained_model(read, request, table.training), runtime)
    request = calibrated_request(calibrate, read, table, gpu, request)
    demand = Demand(
        read,
        table,
        gpu,
        request,
        named,
        schedules,
        step_terms(all_reduce, all_reduce_overlap, optimizer),
    )
    helps: list[Help] = []

    def helped(stop: Stop[list[Help]]) -> list[Help]:
        stop.offer(lambda: helps)
        for one in what_would_help(found, stop, log):
            helps.append(one)  # noqa: PERF402 - an interrupt leaves those that are known
        return helps

    with kernels_told(), ProposalLog(console(stderr=True)) as log:
        found = current().run(lambda stop: propose(demand, stop, note, log))
        launch = _launch(found)
        if launch.excess and current().number is None:
            demand = _with_room(demand, max(launch.beyond_bytes))
            found = current().run(lambda stop: propose(demand, stop, note, log))
            launch = _launch(found)
        if launch.excess:
            raise InfeasibleError("\n".join(["the launch takes more memory than the plan's figures:", *launch.excess]))
        if current().number is None:
            log.begin("what would help")
            current().run(helped)
    written = _write(found, launch, out, command_text(context))
    with contextlib.suppress(KeyboardInterrupt):  # a plan without the page is a plan
        written += _write_page(found, out)
    interrupted = current().number is not None

    from piper_ray.proposal.figures import figures_of
    from piper_ray.report.proposal import print_figures, print_help, print_memory, print_others
    from piper_ray.report.stages import print_layers

    screen = console()
    best = found.best
    print_layers(screen, best.instance, best.plan, best.simulation.schedule)
    screen.print()
    print_others(screen, found)
    screen.print()
    print_help(screen, best, helps)
    print_memory(screen, best)
    screen.print()
    print_figures(screen, found, figures_of(best, train_tokens, price))
    for path in written:
        typer.echo(str(path))
    if interrupted:
        current().tell("this is the best plan so far")
        raise typer.Exit(EXIT_INTERRUPTED)


def _require_files(model: TrainedModel, runtime: RuntimeName) -> None:
    """Raises UsageError, before any search, where the runtime's launch files cannot say the model."""
    from piper_ray.export.targets import exportable

    if (reason := exportable(model, Target(runtime.value))) is None:
        return
    others = [f"--runtime {name.value}" for name in RuntimeName if exportable(model, Target(name.value)) is None]
    instead = f"{' or '.join(others)} may do; " if others else ""
    raise UsageError(f"{reason}; {instead}estimate and solve --runtime {runtime.value} plan it without launch files")


def _on_whole_gpus(found: Proposal) -> Instance:
    """With the memory that was set aside."""
    instance = found.best.instance
    return instance.replace(memory_bytes=instance.memory_bytes + found.demand.set_aside_bytes)


def _launch(found: Proposal) -> Export:
    """What the runtime reads of the best plan."""
    from piper_ray.export.targets import export_plan
    from piper_ray.runtimes.runtime import gpus_per_node_of

    best, demand = found.best, found.demand
    node = gpus_per_node_of(best.instance, demand.request.gpus_per_node)
    target = Target(demand.runtime.name.value)
    return export_plan(_on_whole_gpus(found), best.plan, best.solution.schedule, target, node)


def _with_room(demand: Demand, beyond_bytes: float) -> Demand:
    from piper_ray.model.figures import size_text

    note(
        f"the best plan leaves less than the {size_text(beyond_bytes)} that {demand.runtime.title} holds beside its "
        "figures: planned anew with that set aside"
    )
    return replace(demand, set_aside_bytes=beyond_bytes)


def _write(found: Proposal, launch: Export, out: Path, command: str) -> list[Path]:
    """Workload, plan, and what the runtime reads. Raises UsageError where a file cannot be."""
    from piper_ray.report.document import plan_document, proof_document, to_text
    from piper_ray.report.estimate_summary import file_text

    best, demand, solution = found.best, found.demand, found.best.solution
    instance, schedule = _on_whole_gpus(found), solution.schedule
    if demand.set_aside_bytes:  # nothing is proved of plans that leave less
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


def _write_page(found: Proposal, out: Path) -> list[Path]:
    """None after an interrupt; raises KeyboardInterrupt for one meanwhile."""
    if current().number is not None:
        return []

    from piper_ray.report.page.build import report_subject, write_page
    from piper_ray.workloads.formats.load import plan_claims

    best, page = found.best, out / "report.html"
    claims = plan_claims(out / PLAN)
    with working("report.html: other planners") as line:
        subject = current().run(
            lambda _: report_subject(best.instance, best.plan, best.solution.schedule, claims, line)
        )
    write_page(subject, page)
    return [page]
