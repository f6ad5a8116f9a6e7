"""``piper-ray frontier``: the fastest plan for every number of devices."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

import piper_ray
from piper_ray.cli.common import (
    Bandwidth,
    Input,
    Json,
    KeptInFlight,
    Memory,
    Microbatches,
    Unwritten,
    counts_text,
    load_instance,
    say,
)
from piper_ray.cli.interrupts import current
from piper_ray.cli.search_options import (
    Chunks,
    Gap,
    MemoryLimit,
    NoDataParallel,
    NoTensorParallel,
    PlannedSchedule,
    RecomputeRule,
    SameForAll,
    Stages,
    TensorParallel,
    Threads,
    TimeLimit,
    UseAllDevices,
    asked_schedule,
    constraints_of,
)
from piper_ray.cli.solve import check_own_plan, simulate_own_plan
from piper_ray.engine.frontier.ranges import parse_numbers
from piper_ray.model.constraints import Recompute
from piper_ray.model.errors import EXIT_INTERRUPTED, EXIT_SOLVED, InfeasibleError, LimitError, UsageError
from piper_ray.model.options import SolveOptions
from piper_ray.model.restrictions import Restrictions
from piper_ray.model.schedule import CHUNKED, Schedule
from piper_ray.model.solution import Status
from piper_ray.model.stop import Stop, StoppedBy

if TYPE_CHECKING:
    from piper_ray.engine.frontier.frontier import Frontier
    from piper_ray.engine.frontier.points import FrontierPoint
    from piper_ray.engine.frontier.table import PlanEntry

    _Curves: TypeAlias = tuple[Frontier, tuple[FrontierPoint, ...]]


def frontier(
    source: Input,
    devices: Annotated[
        str | None,
        typer.Option(
            "--devices",
            metavar="RANGE",
            help="Numbers of devices, as 8..2048, 8..2k:8 or 8,16,32; 1 to the input's number if not given.",
        ),
    ] = None,
    budgets: Annotated[
        str | None,
        typer.Option(
            "--budgets",
            metavar="RANGE",
            help="Bounds on the sum of data-parallel degrees too, on the most devices: as --devices, or all.",
        ),
    ] = None,
    microbatches: Microbatches = None,
    memory: Memory = None,
    bandwidth: Bandwidth = None,
    in_flight: KeptInFlight = None,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="FILE", help="Write all points to FILE: a table, .parquet or .csv."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Draw the curves to FILE: .png, .svg or .pdf."),
    ] = None,
    plans: Annotated[
        Path | None,
        typer.Option("--plans", metavar="DIR", help="Write the plan of each step to DIR, made if it is not there."),
    ] = None,
    json: Json = False,
    no_tensor_parallel: NoTensorParallel = False,
    no_data_parallel: NoDataParallel = False,
    recompute: RecomputeRule = Recompute.AUTO,
    schedule: PlannedSchedule = None,
    chunks: Chunks = None,
    same_degrees: SameForAll = False,
    stages: Stages = None,
    use_all_devices: UseAllDevices = False,
    tensor_parallel: TensorParallel = None,
    gap: Gap = 0.0,
    time_limit: TimeLimit = None,
    threads: Threads = None,
    memory_limit: MemoryLimit = None,
) -> None:
    """Find the least time per microbatch for INPUT on every number of devices, and prove each.

    Ctrl-C stops the search and prints what is known so far, with its gaps.
    """
    options = SolveOptions(gap=gap, time_limit_s=time_limit, threads=threads, memory_limit_bytes=memory_limit)
    restrictions = Restrictions(
        tensor_parallelism=not no_tensor_parallel,
        data_parallelism=not no_data_parallel,
        recompute=recompute,
        constraints=constraints_of(
            tensor_parallel=tensor_parallel, same_degrees=same_degrees, stages=stages, all_devices=use_all_devices
        ),
    )
    _refuse_unwritable(out, plot, plans)
    wanted = None if devices is None else parse_numbers(counts_text(devices), "--devices")
    bounds = None if budgets in (None, "all") else parse_numbers(counts_text(str(budgets)), "--budgets")
    most = None if wanted is None else wanted[-1]
    instance = load_instance(source, most, microbatches, memory, bandwidth, in_flight)

    from piper_ray.engine.chunks.counts import most_chunks
    from piper_ray.engine.request import is_by_degrees
    from piper_ray.report.document import frontier_document, to_text
    from piper_ray.report.frontier import FrontierLog, print_frontier
    from piper_ray.report.layout import console
    from piper_ray.report.summary import schedule_line

    asked = asked_schedule(schedule, chunks, instance.schedule)
    planned_for = Schedule.of(asked)
    if budgets is not None and (planned_for.name in CHUNKED or is_by_degrees(planned_for, restrictions)):
        raise UsageError("--budgets: bounds on the sum of d are for plans whose stages may differ in d (schedule 2bw)")
    screen = console(stderr=json)
    log = FrontierLog(screen, time_limit if budgets is None else None)

    def search(stop: Stop[_Curves]) -> _Curves:
        """Both curves, the second once the first is done."""
        first: Stop[Frontier] = stop.part()
        stop.offer(lambda: _without_budgets(first.answer()))
        found = piper_ray.frontier(
            instance,
            devices=wanted,
            restrictions=restrictions,
            options=options,
            listener=log,
            stop=first,
            schedule=asked,
        )
        if budgets is None or found.stopped_by is not None:
            return found, ()
        stop.offer(lambda: (found, ()))
        return found, found.budget_points(bounds)

    with log:
        log.begin(instance)
        log.line(schedule_line(planned_for, most_chunks(asked)))
        found, of_budgets = current().run(search)
    print_frontier(screen, found, of_budgets)
    if json:
        document = frontier_document(instance, restrictions, options, found, of_budgets)
        typer.echo(to_text(document), nl=False)
    unwritten = Unwritten()
    entries: dict[int, PlanEntry] = {}
    if plans is not None:
        with unwritten.noted(), log:
            entries = _write_plans(found, plans)
    if out is not None:
        with unwritten.noted():
            _write_table(out, found, of_budgets, entries)
    if plot is not None:
        with unwritten.noted():
            _draw(plot, found, of_budgets)
    unwritten.report()
    code = exit_code(found)
    if code != EXIT_SOLVED:
        raise typer.Exit(code)


def _without_budgets(found: Frontier | None) -> _Curves | None:
    return None if found is None else (found, ())


def exit_code(found: Frontier) -> int:
    """Some plan is a success; infeasible only where no number of devices has one."""
    points = found.points()
    if found.stopped_by is StoppedBy.INTERRUPT:
        return EXIT_INTERRUPTED
    if all(point.status is Status.INFEASIBLE for point in points):
        return InfeasibleError.exit_code
    return EXIT_SOLVED if any(point.time_per_sample_s is not None for point in points) else LimitError.exit_code


def _refuse_unwritable(out: Path | None, plot: Path | None, plans: Path | None) -> None:
    """Said before the search, not after hours of it."""
    from piper_ray.engine.frontier.table import FORMATS
    from piper_ray.report.plots.style import refuse_other_formats

    if out is not None and out.suffix.lower() not in FORMATS:
        raise UsageError(f"{out}: tables are written as {' or '.join(FORMATS)}")
    if plot is not None:
        refuse_other_formats(plot)
    for option, path in (("--out", out), ("--plot", plot), ("--plans", plans)):
        if path is not None and not path.parent.is_dir():
            raise UsageError(f"{option} {path}: there is no folder {path.parent}")
        if path is not None and path is not plans and path.is_dir():
            raise UsageError(f"{option} {path}: is a folder; expected the path of a file")
    if plans is not None and plans.exists() and not plans.is_dir():
        raise UsageError(f"--plans {plans}: is a file; expected a folder")


def _write_plans(found: Frontier, folder: Path) -> dict[int, PlanEntry]:
    """The plan of each step, checked, as solve writes it; by the number of devices at which the step begins.

    After a signal those that are quickly made: each is an evaluation. Raises UsageError if one cannot be written.
    """
    steps = [point for point in found.points() if point.is_step]
    entries: dict[int, PlanEntry] = {}

    def write(stop: Stop[dict[int, PlanEntry]]) -> dict[int, PlanEntry]:
        stop.offer(lambda: dict(entries))
        for point in steps:
            entries[point.devices] = _write_step(found, point, folder)
        return entries

    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise UsageError(f"--plans {folder}: cannot be made: {error.strerror or error}") from error
    written = current().run(write)
    if len(written) < len(steps):
        say(f"plans are written of {len(written):,} steps of {len(steps):,}")
    return written


def _write_step(found: Frontier, point: FrontierPoint, folder: Path) -> PlanEntry:
    from piper_ray.engine.frontier.table import PlanEntry
    from piper_ray.report.document import plan_document, proof_document, to_text, write_atomically

    solution = found.solution(point.devices)
    instance = found.instance.replace(devices=point.devices)
    evaluation = check_own_plan(instance, solution, found.restrictions, simulate_own_plan(instance, solution))
    assert solution.plan is not None
    name, proof = f"devices-{point.devices:05}.json", proof_document(solution)
    write_atomically(folder / name, to_text(plan_document(instance, solution.plan, evaluation, proof)))
    return PlanEntry(solution.plan, name)


def _write_table(
    out: Path, found: Frontier, of_budgets: tuple[FrontierPoint, ...], entries: dict[int, PlanEntry]
) -> None:
    from piper_ray.engine.frontier.table import BUDGETS, DEVICES, frontier_table, write_table

    curves = {DEVICES: found.points(), BUDGETS: of_budgets}
    write_table(frontier_table(found.instance, curves, entries, found.schedule), out)


def _draw(plot: Path, found: Frontier, of_budgets: tuple[FrontierPoint, ...]) -> None:
    from piper_ray.report.plots.curves import figure_of
    from piper_ray.report.plots.frontier import frontier_panels
    from piper_ray.report.plots.style import save

    panels = frontier_panels(found.instance, found.points(), of_budgets, found.schedule)
    if not panels:
        say(f"there is no plan to plot to {plot}")
        return
    save(figure_of(panels, found.instance.name), plot)
