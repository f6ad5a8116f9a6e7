"""What ``piper-ray plan`` does once it is asked: the searches, what is compared with their plan, and the answer.

Loaded when the search begins, so that help and complaints come at once.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import typer

from piper_ray import Stop
from piper_ray.cli.for_runtime import with_room
from piper_ray.cli.interrupts import current
from piper_ray.cli.plan_files import launch_of, write_candidates, write_page, write_plan, write_search
from piper_ray.cli.plan_options import PlanAsked, runtimes_that
from piper_ray.cli.telling import kernels_told, note, say, show_document
from piper_ray.export.files import Export, Target
from piper_ray.export.launched import LaunchFacts, facts_of, import_launched
from piper_ray.export.targets import exportable
from piper_ray.launches.launch import Asked, Dialect
from piper_ray.model.constraints import WholeNodesAtSites
from piper_ray.model.errors import EXIT_INTERRUPTED, InfeasibleError, InputError, InvalidPlan, UsageError
from piper_ray.model.headroom import NO_HEADROOM
from piper_ray.model.options import SolveOptions
from piper_ray.planners.apart import KindsApart, kinds_apart
from piper_ray.proposal.cells import LISTED
from piper_ray.proposal.clusters import ClusterPlan, batches_between, plans_of
from piper_ray.proposal.demand import PlanDemand, Proposed, figures_of
from piper_ray.proposal.propose import FoundPlans, Help, Theirs, demand_of, priced_theirs, propose, what_would_help
from piper_ray.report import proposal
from piper_ray.report.apart import apart_lines
from piper_ray.report.clusters import all_used_text, clusters_csv, print_clusters, print_spare
from piper_ray.report.proposal_document import planned_document
from piper_ray.report.terminal import console, print_lines, print_within
from piper_ray.runtimes.meshes import gpus_per_node_of
from piper_ray.storage.files import write_atomically
from piper_ray.workloads.estimate.build import EstimateRequest, trained_model
from piper_ray.workloads.estimate.config import ModelConfig
from piper_ray.workloads.estimate.hardware import Hardware
from piper_ray.workloads.estimate.refusals import reasons_against
from piper_ray.workloads.estimate.software import Overlap

_APART_GAP = 5e-4
"""Gap of each solve for pipelines of one kind."""


class _Unfinished(Exception):
    """An interrupt came before the first plan. known: what had been searched."""

    def __init__(self, known: FoundPlans) -> None:
        super().__init__()
        self.known = known


def _tell_unfinished(known: FoundPlans, out: Path | None) -> None:
    """What is known without a plan, in a sentence; and search.json."""
    kept = [] if out is None or not known.cells.cells else [f"{write_search(known, out)} has them"]
    current().tell(proposal.unfinished_text(known), *kept)


def plan_one(asked: PlanAsked, demand: PlanDemand, command: str) -> None:
    """The plan on one cluster: searched, written and told. command: what the user typed, for the files."""

    written = asked.written
    facts = _refuse_at_once(demand, written.against, asked.launched.asked())
    _tell_what_is_not_written(demand)
    helps: list[Help] = []
    with kernels_told(), proposal.ProposalLog(console(stderr=True)) as log:
        try:
            by_precision, unfit = _by_precision(asked, demand, log)
        except _Unfinished as unfinished:
            _tell_unfinished(unfinished.known, written.out)
            raise typer.Exit(EXIT_INTERRUPTED) from None
        found, launch = min(by_precision.values(), key=lambda pair: pair[0].best.step_s)
        own = found.demand.request.precision
        others = {name: one.best for name, (one, _) in by_precision.items() if name != own} | unfit

        def helped(stop: Stop[list[Help]]) -> list[Help]:
            stop.offer(lambda: helps)
            for one in what_would_help(found, stop, log, () if others else _others(found.demand)):
                helps.append(one)  # noqa: PERF402 - an interrupt leaves those that are known
            return helps

        if not _interrupted():
            log.begin("what would help")
            current().run(helped)
        apart: tuple[KindsApart | None, str] = None, ""
        mixed, parts = bool(found.best.instance.cluster.kinds), found.demand.parts
        if mixed and len(parts) != len(found.demand.kinds) and not _interrupted():
            log.begin("pipelines of one kind each")
            apart = current().run(lambda stop: _apart(found, stop))
        theirs, refused = None, None
        if written.against is not None:
            try:
                theirs = _against(found, written.against, facts, asked.launched.asked())
            except (UsageError, InputError) as fault:
                refused = fault  # the plan itself is shown all the same
        fewer, folders = _with_fewer_nodes(asked, found, log, command)
    price_per_hour = _price_of_gpu(asked, found.demand)
    told = proposal.AskedOfPlan(asked.trained.train_tokens, price_per_hour, others, written.candidates, *apart)
    files = [*_files(asked, found, launch, told, command), *folders]
    _tell(asked, found, helps, told, (theirs, fewer, files))
    if refused is not None:
        note(f"the plan is on stdout, but is not compared with {written.against}:")
        raise refused
    if _interrupted():
        current().tell("this is the best plan so far")
        raise typer.Exit(EXIT_INTERRUPTED)


def _apart(found: FoundPlans, stop: Stop[tuple[KindsApart | None, str]]) -> tuple[KindsApart | None, str]:
    """Pipelines of one kind each, whose layers run as in the plan, and a line on their step, or that none is faster.
    Empty after an interrupt."""
    stop.offer(lambda: (None, ""))
    best, schedule, options = found.best, found.best.solution.schedule.name, SolveOptions(gap=_APART_GAP)
    within_s = best.instance.microbatches * (best.solution.time_per_sample_s or 0.0)
    each = kinds_apart(
        best.instance, schedule=schedule, step=found.demand.step, options=options, stop=stop, within_s=within_s
    )
    return each, next(apart_lines(best.instance, each, best.solution))


def _price_of_gpu(asked: PlanAsked, demand: PlanDemand) -> float | None:
    """The price of one GPU for an hour; for several kinds, that of the average GPU."""
    counts = [one.devices_of(demand.hardware.gpu(gpu)) for _, gpu, one in demand.kinds]
    known = [price for price in asked.trained.prices(len(counts)) if price is not None]
    return sum(map(operator.mul, known, counts)) / sum(counts) if known else None


def _tell(
    asked: PlanAsked,
    found: FoundPlans,
    helps: list[Help],
    told: proposal.AskedOfPlan,
    more: tuple[Theirs | None, list[ClusterPlan], list[Path]],
) -> None:
    """The answer on stdout. more: the plan of people's own, those for fewer nodes, and the files."""
    theirs, fewer, files = more
    if asked.written.verbose:
        for text in proposal.verbose_lines(found):
            say(text)
    if asked.written.json:
        figures = figures_of(found.best, told.tokens, told.price_per_hour)
        document = planned_document(found, figures, told.others, helps, theirs, fewer, files, told.apart)
        show_document(document)
        return
    screen = console()

    def draw(size: proposal.AnswerSize) -> None:
        proposal.print_plan(screen, found, helps, told, size)
        if theirs is not None:
            proposal.print_against(screen, found, theirs)
        if fewer:
            screen.print()
            print_spare(screen, fewer)
        if files:
            out = asked.written.out
            names = ", ".join(str(file.relative_to(out) if out is not None else file) for file in files)
            begun = "; README.md has the launch command" if "README.md" in names else ""
            print_lines(screen, ["", f"written to {out}: {names}{begun}"])

    print_within(screen, draw, proposal.ANSWER_SIZES)


def _interrupted() -> bool:
    return current().number is not None


def _refuse_at_once(demand: PlanDemand, against: str | None, launched: Asked) -> LaunchFacts | None:
    """What a launch file says. Raises UsageError or InfeasibleError for what the config and that file alone tell, in
    hundredths of a second."""
    reasons = reasons_against(demand.model, demand.hardware, demand.gpu, demand.request, demand.runtime)
    if reasons and demand.further is None:  # which may hold what this kind does not
        raise InfeasibleError("\n".join([*reasons, demand.nothing_fits]))
    facts = None if against is None else facts_of(against, launched)
    if facts is not None:
        batch = demand.with_batch(lambda _: None).request.batch or demand.model.batch
        for option, theirs, ours in (
            ("--global-batch", facts.global_batch_samples, batch),
            ("--tokens", facts.tokens_per_sample, demand.request.tokens or demand.model.tokens),
        ):
            if theirs is not None and ours is not None and theirs != ours:
                raise UsageError(
                    f"--against {against}: it has {option} {theirs}, and {ours} is planned; give {option} {theirs}"
                )
    return facts


def _tell_what_is_not_written(demand: PlanDemand) -> None:
    """Says what is not written for a model that the runtime's launch files cannot express: it is planned in any
    case."""
    trained = trained_model(demand.model, demand.request, demand.hardware.training)
    if (reason := exportable(trained, Target(demand.runtime.name.value))) is None:
        return
    others = runtimes_that(lambda target: exportable(trained, target) is None)
    note(f"no launch files: {reason}" + (f"; {others} writes some" if others else ""))


def _by_precision(
    asked: PlanAsked, demand: PlanDemand, log: proposal.ProposalLog
) -> tuple[dict[str, tuple[FoundPlans, Export]], dict[str, Proposed | None]]:
    """The best plan in each precision, and those in which none fits. Raises InfeasibleError where none fits in any."""
    found: dict[str, tuple[FoundPlans, Export]] = {}
    unfit: dict[str, Proposed | None] = {}
    for name in asked.running.precisions:
        if _interrupted():
            break
        request = replace(demand.request, precision=name)
        try:
            found[name] = _found(asked, replace(demand, request=request), log)
        except _Unfinished:
            if not found:
                raise
        except InfeasibleError as error:
            if len(asked.running.precisions) == 1 + len(unfit):
                raise
            note(f"{name}: {error}")
            unfit[name] = None
    return found, unfit


def _found(asked: PlanAsked, demand: PlanDemand, log: proposal.ProposalLog) -> tuple[FoundPlans, Export]:
    """The best plan whose launch fits. Raises InfeasibleError where there is none."""
    before: list[tuple[FoundPlans, Export]] = []

    def proposed(set_aside_bytes: float) -> tuple[FoundPlans, Export]:
        roomy, listed = replace(demand, set_aside_bytes=set_aside_bytes), max(LISTED, asked.written.candidates)
        try:
            best = current().run(lambda stop: propose(roomy, stop, asked.tell, log, listed))
        except KeyboardInterrupt:
            if not before:
                raise
            return before[-1]
        if best.found:
            before.append((best, launch_of(best, best.best)))
        elif not before:
            raise _Unfinished(best)
        return before[-1]

    found, launch = with_room(
        demand.runtime.title, proposed, lambda one: 0.0 if _interrupted() else one[1].missing_bytes
    )
    if launch.excess and not _interrupted():
        raise InfeasibleError("\n".join(["the launch takes more memory than the plan's figures:", *launch.excess]))
    return found, launch


def _files(asked: PlanAsked, found: FoundPlans, launch: Export, told: proposal.AskedOfPlan, command: str) -> list[Path]:
    """The files that were written; none where none were requested."""
    written, out = asked.written, asked.written.out
    if out is None:
        return []
    if written.candidates > 1 and not _interrupted():
        return [*write_candidates(found, written.candidates, out, command), write_search(found, out)]
    files = write_plan(found, found.best, launch, out, command)
    for text in launch.notes:
        note(text)
    files.append(write_search(found, out))
    with contextlib.suppress(KeyboardInterrupt):  # a plan without the page is a plan
        files += write_page(found, figures_of(found.best, told.tokens, told.price_per_hour), out)
    return files


def _against(found: FoundPlans, layout: str, facts: LaunchFacts | None, launched: Asked) -> Theirs | None:
    """A plan of people's own under the same model. Raises UsageError or InputError."""
    if _interrupted():
        return None
    demand = found.demand
    figures: Mapping[str, object] = {} if facts is None else facts.figures

    def degree(*names: str) -> int:
        return next((value for name in names if isinstance(value := figures.get(name), int)), 1)

    samples = found.best.samples if facts is None or facts.microbatch_samples is None else facts.microbatch_samples
    context = degree("context_parallel_size", "context_parallel_degree")
    expert = degree("expert_model_parallel_size", "expert_parallel_degree")
    # Megatron divides each expert as it divides all other layers, where a launch does not say.
    usual = ("tensor_model_parallel_size",) if expert > 1 else ()
    tensor = degree("expert_tensor_parallel_size", "expert_tensor_parallel_degree", *usual)
    experts, on_host = (expert,) if expert * tensor > 1 else (), bool(figures.get("optimizer_cpu_offload"))
    asked = demand_of(_as_launched(demand, facts), samples, (context,), experts, tensor, on_host)
    ways, faults = list[Theirs](), dict[str, None]()
    for way in replace(asked, set_aside_bytes=0.0, headroom=NO_HEADROOM).ways:
        estimate = way.estimated(samples)
        try:
            imported = import_launched(estimate.instance, layout, asked=launched)
            schedule = replace(imported.schedule, ahead=asked.scheduled(imported.schedule.name).ahead)
            theirs = priced_theirs(
                found, estimate, samples, imported.plan, schedule, imported.transfers, imported.flushes
            )
        except (UsageError, InvalidPlan) as error:
            faults[str(error)] = None
            continue
        placed = WholeNodesAtSites(len(theirs.instance.cluster.sites), gpus_per_node_of(theirs.instance))
        if wrong := [*placed.violations(theirs.instance, theirs.plan)] if placed.sites else []:
            faults |= dict.fromkeys(wrong)
            continue
        notes = dict.fromkeys((*(() if facts is None else facts.notes), *imported.notes))
        ways.append(Theirs(layout, theirs, tuple(notes), demand.hosts_hold(theirs)))
    if not ways:
        raise UsageError(f"--against {layout}: {'; '.join(faults)}")
    return min(ways, key=lambda one: one.plan.step_s)  # it does not say where its ranks are


def _as_launched(demand: PlanDemand, facts: LaunchFacts | None) -> PlanDemand:
    """The demand with a launch's own recomputation, and its ways to send tokens to experts."""
    if facts is None:
        return demand
    known = facts

    def launched(request: EstimateRequest) -> EstimateRequest:
        request = replace(request, recomputations=(*request.recomputations, known.recomputation))
        if known.dispatcher is not None:
            request = replace(request, dispatcher=known.dispatcher.value)
        if known.dialect is not Dialect.TORCHTITAN:
            others = [name for name in request.overlaps if name != Overlap.EXPERTS.value]
            overlapped = bool(known.figures.get("overlap_moe_expert_parallel_comm"))
            request = replace(request, overlaps=(*others, *[Overlap.EXPERTS.value] * overlapped))
        return request

    return demand.changed(launched)


def _with_fewer_nodes(
    asked: PlanAsked, found: FoundPlans, log: proposal.ProposalLog, command: str
) -> tuple[list[ClusterPlan], list[Path]]:
    """The plan, and those for each number of nodes that is left; the folders of their files, next to its own."""
    spare, plans = asked.written.spare, [ClusterPlan(found.demand, found)]
    folders: list[Path] = []
    if not spare or _interrupted():
        return [], folders
    names, nodes = [*plans[0].nodes], [*plans[0].nodes.values()]
    losses = product(*(range(min(spare, count) + 1) for count in nodes))
    demands = [
        _on_fewer(asked, found, [count - lost for count, lost in zip(nodes, losses_of, strict=True)])
        for losses_of in sorted(losses, key=lambda lost: (sum(lost), [-x for x in lost]))
        if 0 < sum(losses_of) <= spare and sum(losses_of) < sum(nodes)
    ]
    log.begin("fewer nodes")
    plans += current().run(lambda stop: list(plans_of(demands, stop, asked.tell, log, found)))
    if asked.written.out is not None:
        for one in plans[1:]:
            if one.found is not None:
                left = "-".join(str(one.nodes.get(name, 0)) for name in names)
                folder = asked.written.out / f"nodes-{left}"
                launch = launch_of(one.found, one.found.best)
                if launch.excess:
                    note(f"{folder} is not written: {launch.excess[0]}")
                else:
                    write_plan(one.found, one.found.best, launch, folder, command)
                    folders.append(folder)
    return plans, folders


def _on_fewer(asked: PlanAsked, found: FoundPlans, nodes: Sequence[int]) -> PlanDemand:
    """The same batch in the same precision on fewer nodes, with what the runtime can be offered on them. nodes: of each
    kind."""
    demand = found.demand
    question = asked.question(demand.model, demand.hardware)
    (name, gpu, own), *others = [
        (name, gpu, question.request(gpu, count))
        for (name, gpu, _), count in zip(demand.kinds, nodes, strict=True)
        if count > 0
    ]
    request = replace(own, batch=found.best.batch, precision=demand.request.precision)
    further = None if demand.further is None else replace(demand.further, name=name, others=tuple(others))
    fewer = replace(demand, gpu=gpu, request=request, further=further)
    return fewer.changed(lambda request: replace(request, calibration=demand.request.calibration))


def _demands(asked: PlanAsked, model: ModelConfig, hardware: Hardware) -> list[PlanDemand]:
    """The demands of a table: for each GPU type and number of nodes, or each batch, or from the least room to the
    most."""
    demands = asked.calibrated([asked.demand(model, hardware, *one) for one in asked.modelled.clusters])
    first = demands[0]
    if asked.tables["--global-batch"]:
        spans = [batches_between(low, high, first.devices) for low, high in asked.trained.batches]
        batches = sorted({batch for span in spans for batch in span})
        return [replace(first, request=replace(first.request, batch=batch)) for batch in batches]
    if asked.tables["--headroom"]:
        first = first.with_batch(asked.tell)
        whole_bytes = first.whole_bytes(first.estimated(first.smallest).instance.memory_bytes)
        rooms = [replace(first, headroom=room) for room in asked.room.headroom]
        return sorted(rooms, key=lambda one: -one.planned_bytes(whole_bytes))
    return demands


def plan_clusters(asked: PlanAsked, model: ModelConfig, hardware: Hardware) -> None:
    """A table over GPU types and numbers of nodes, batches, or rooms, each by the same search."""
    demands = _demands(asked, model, hardware)
    gpus = dict(asked.modelled.clusters)
    of_gpu = dict(zip(gpus, asked.trained.prices(len(gpus)), strict=True))
    plans: list[ClusterPlan] = []

    def tabled(stop: Stop[list[ClusterPlan]]) -> list[ClusterPlan]:
        stop.offer(lambda: plans or None)
        for one in plans_of(demands, stop, asked.tell, log):
            plans.append(one)  # noqa: PERF402 - an interrupt leaves those that are known
        return plans

    with kernels_told(), proposal.ProposalLog(console(stderr=True)) as log:
        current().run(tabled)
    tokens, prices = asked.trained.train_tokens, [of_gpu[one.demand.gpu] for one in plans]
    along = "batches" if asked.tables["--global-batch"] else "rooms" if asked.tables["--headroom"] else "clusters"
    print_clusters(console(), plans, prices, tokens, along)
    print_lines(console(), all_used_text(plans))
    if asked.written.out is not None:
        asked.written.out.mkdir(parents=True, exist_ok=True)
        write_atomically(asked.written.out / "clusters.csv", clusters_csv(plans, prices, tokens))
        typer.echo(str(asked.written.out / "clusters.csv"))
    if _interrupted():
        current().tell("these are the rows so far")
        raise typer.Exit(EXIT_INTERRUPTED)


def _others(demand: PlanDemand) -> tuple[str, ...]:
    """fp8, where the GPU has units for it, the plan is in another precision, and the runtime's files can say it."""
    request = replace(demand.request, precision="fp8")
    if demand.request.precision == "fp8" or demand.hardware.gpu(demand.gpu).matrix_fp8_flop_per_s <= 0.0:
        return ()
    trained = trained_model(demand.model, request, demand.hardware.training)
    return ("fp8",) if exportable(trained, Target(demand.runtime.name.value)) is None else ()
