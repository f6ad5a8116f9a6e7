"""``piper-ray frontier``: the fastest plan for every number of devices."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

import piper_ray
from piper_ray import Status, Stop, StoppedBy
from piper_ray.cli.interrupts import current
from piper_ray.cli.options import Without, option
from piper_ray.cli.shared import JsonOption, RestrictionOptions, ScheduleOptions, SearchOptions, WorkloadOptions
from piper_ray.cli.solve import check_own_plan, simulate_own_plan
from piper_ray.cli.telling import Unwritten, refuse_unwritable, say
from piper_ray.cli.values import counts_text
from piper_ray.engine.frontier.ranges import parse_numbers
from piper_ray.model.errors import EXIT_INTERRUPTED, EXIT_SOLVED, InfeasibleError, LimitError, UsageError
from piper_ray.model.schedule import CHUNKED, Schedule

if TYPE_CHECKING:
    from piper_ray.engine.frontier.result import Frontier, FrontierPoint
    from piper_ray.report.frontier_table import PlanEntry

    _Curves: TypeAlias = tuple[Frontier, tuple[FrontierPoint, ...]]


@dataclass(frozen=True)
class CurveOptions:
    """What frontier alone takes: which points, and where they go."""

    devices: str | None = option(
        "RANGE",
        "Numbers of devices, as 8..2048, 8..2k:8 or 8,16,32; 1 to the input's number if not given. Of two kinds, as "
        "'A100-80=8,16 H100-SXM=8..64:8', a table is shown; whole nodes if not given.",
    )
    budgets: str | None = option(
        "RANGE", "Bounds on the sum of data-parallel degrees too, on the most devices: as --devices, or all."
    )
    out: Path | None = option("FILE", "Write all points to FILE: a table, .parquet or .csv.", "-o", "--out")
    plot: Path | None = option("FILE", "Draw the curves to FILE: .png, .svg or .pdf.")
    plans: Path | None = option("DIR", "Write the plan of each step to DIR, made if it is not there.")


def frontier(
    workload: Annotated[WorkloadOptions, Without("devices")],
    curves: CurveOptions,
    told_as: JsonOption,
    kept: Annotated[RestrictionOptions, Without("per_stage_recompute", "keep_order", "sustained")],
    scheduled: ScheduleOptions,
    ends: SearchOptions,
) -> None:
    """Find the least time per microbatch for INPUT on every number of devices, and prove each.

    Ctrl-C stops the search and prints what is known so far, with its gaps.
    """
    options, restrictions = ends.options(), kept.restrictions()
    devices, budgets, out, plot, plans = curves.devices, curves.budgets, curves.out, curves.plot, curves.plans
    _refuse_unwritable(out, plot, plans)
    of_kinds = devices is not None and "=" in devices
    wanted = None if devices is None or of_kinds else parse_numbers(counts_text(devices), "--devices")
    bounds = None if budgets in (None, "all") else parse_numbers(counts_text(str(budgets)), "--budgets")
    instance = workload.load(None if wanted is None else wanted[-1])
    if instance.cluster.kinds or of_kinds:
        others = {"--budgets": budgets, "--plot": plot, "--plans": plans, "--json": told_as.json or None}
        for name in (name for name, given in others.items() if given is not None):
            raise UsageError(f"{name}: not of devices of several kinds, whose table is shown, and written by --out")
        from piper_ray.cli.kind_table import table_of_kinds

        table_of_kinds(instance, scheduled.asked(instance.schedule), restrictions, options, devices, out)
        return

    from piper_ray.cost.schedules import most_chunks
    from piper_ray.engine.request import is_by_degrees
    from piper_ray.report.document import frontier_document, to_text
    from piper_ray.report.frontier import FrontierLog, print_frontier
    from piper_ray.report.summary import schedule_line
    from piper_ray.report.terminal import console

    asked = scheduled.asked(instance.schedule)
    planned_for = Schedule.of(asked)
    if budgets is not None and (planned_for.name in CHUNKED or is_by_degrees(planned_for, restrictions)):
        raise UsageError("--budgets: bounds on the sum of d are for plans whose stages may differ in d (schedule 2bw)")
    screen = console(stderr=told_as.json)
    log = FrontierLog(screen, ends.time_limit_s if budgets is None else None)

    def search(stop: Stop[_Curves]) -> _Curves:
        """Both curves, the second once the first is done."""
        first: Stop[Frontier] = stop.part()
        stop.offer(lambda: None if (so_far := first.answer()) is None else (so_far, ()))
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
    if told_as.json:
        document = frontier_document(instance, restrictions, options, found, of_budgets)
        typer.echo(to_text(document), nl=False)
    unwritten = Unwritten()
    entries: dict[int, PlanEntry] = {}
    if plans is not None:
        with unwritten.noted(), log:
            entries = _write_plans(found, plans)
    if out is not None:
        from piper_ray.report.frontier_table import BUDGETS, DEVICES, frontier_table, write_table

        with unwritten.noted():
            curves_of = {DEVICES: found.points(), BUDGETS: of_budgets}
            write_table(frontier_table(instance, curves_of, entries, found.schedule), out)
    if plot is not None:
        with unwritten.noted():
            _draw(plot, found, of_budgets)
    unwritten.report()
    if (code := exit_code(found)) != EXIT_SOLVED:
        raise typer.Exit(code)


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
    if out is not None:
        from piper_ray.report.frontier_table import refuse_other_formats

        refuse_other_formats(out)
    if plot is not None:
        from piper_ray.report.plots import style

        style.refuse_other_formats(plot)
    for name, path in (("--out", out), ("--plot", plot)):
        if path is not None:
            refuse_unwritable(name, path)
    if plans is not None and not plans.parent.is_dir():
        raise UsageError(f"--plans {plans}: there is no folder {plans.parent}")
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
    from piper_ray.report.document import plan_document, proof_document, to_text, write_atomically
    from piper_ray.report.frontier_table import PlanEntry

    solution = found.solution(point.devices)
    instance = found.instance.replace(devices=point.devices)
    evaluation = check_own_plan(instance, solution, found.restrictions, simulate_own_plan(instance, solution))
    assert solution.plan is not None
    name, proof = f"devices-{point.devices:05}.json", proof_document(solution)
    write_atomically(folder / name, to_text(plan_document(instance, solution.plan, evaluation, proof)))
    return PlanEntry(solution.plan, name)


def _draw(plot: Path, found: Frontier, of_budgets: tuple[FrontierPoint, ...]) -> None:
    from piper_ray.report.plots.curves import frontier_figure
    from piper_ray.report.plots.style import save

    figure = frontier_figure(found.instance, found.points(), of_budgets, found.schedule)
    if figure is None:
        say(f"there is no plan to plot to {plot}")
        return
    save(figure, plot)
