"""``piper-ray frontier``: the fastest plan for every number of devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias, TypeVar

import typer

import piper_ray
from piper_ray import Instance, Restrictions, ScheduleName, Solution, SolveOptions, Status, Stop, StoppedBy
from piper_ray.cli.interrupts import current
from piper_ray.cli.options import Without, option
from piper_ray.cli.shared import JsonOption, RestrictionOptions, ScheduleOptions, SearchOptions, WorkloadOptions
from piper_ray.cli.solve import check_own_plan, simulate_own_plan
from piper_ray.cli.telling import Unwritten, refuse_unwritable, say, show_document, working, write_document
from piper_ray.cli.values import counts_text
from piper_ray.engine.frontier.result import parse_numbers
from piper_ray.model.errors import EXIT_INTERRUPTED, EXIT_SOLVED, InfeasibleError, LimitError, UsageError
from piper_ray.model.schedule import CHUNKED, Schedule
from piper_ray.storage.files import write_atomically

if TYPE_CHECKING:
    from piper_ray.engine.frontier.result import Frontier, FrontierPoint
    from piper_ray.report.frontier_table import PlanEntry

    _Curves: TypeAlias = tuple[Frontier, tuple[FrontierPoint, ...]]

_Key = TypeVar("_Key")


@dataclass(frozen=True)
class CurveOptions:
    """What frontier alone takes: which points, and where they go."""

    devices: str | None = option(
        "RANGE",
        "Numbers of devices, such as 8..2048, 8..2k:8 or 8,16,32; 1 to the input's number if left out. Of two "
        "kinds, as in 'A100-80=0,8,16 H100-SXM=8..64:8', a table is shown (0: the other kind alone); whole nodes if "
        "left out.",
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
        _table_of_kinds(instance, scheduled.asked(instance.schedule), restrictions, options, curves, told_as.json)
        return

    from piper_ray.cost.schedules import most_chunks
    from piper_ray.engine.request import is_by_degrees
    from piper_ray.report.document import frontier_document
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
        show_document(document)
    unwritten = Unwritten()
    entries: dict[int, PlanEntry] = {}
    if plans is not None:
        with unwritten.noted(), log:
            steps = [point.devices for point in found.points() if point.is_step]
            entries = _write_plans(
                plans,
                restrictions,
                [(k, f"devices-{k:05}.json", instance.replace(devices=k), found.solution(k)) for k in steps],
            )
    if out is not None:
        from piper_ray.report.frontier_table import BUDGETS, DEVICES, frontier_table, write_table

        with unwritten.noted():
            curves_of = {DEVICES: found.points(), BUDGETS: of_budgets}
            write_table(frontier_table(instance, curves_of, entries, found.schedule), out)
    if plot is not None:
        with unwritten.noted():
            _draw(plot, found, of_budgets)
    unwritten.report()
    if (code := exit_code(found.points(), found.stopped_by is StoppedBy.INTERRUPT)) != EXIT_SOLVED:
        raise typer.Exit(code)


def exit_code(points: Sequence[FrontierPoint | Solution], interrupted: bool) -> int:
    """If any number of devices has a plan, that is a success; infeasible only if none has a plan."""
    if interrupted:
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


def _write_plans(
    folder: Path, restrictions: Restrictions, steps: Sequence[tuple[_Key, str, Instance, Solution]]
) -> dict[_Key, PlanEntry]:
    """Plans, checked, as solve writes them: by its key each one's file, instance and solution.

    After a signal those that are quickly made: each is an evaluation. Raises UsageError if one cannot be written.
    """
    entries: dict[_Key, PlanEntry] = {}

    def write(stop: Stop[dict[_Key, PlanEntry]]) -> dict[_Key, PlanEntry]:
        stop.offer(lambda: dict(entries))
        for key, name, instance, solution in steps:
            entries[key] = _write_step(folder / name, instance, solution, restrictions)
        return entries

    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise UsageError(f"--plans {folder}: cannot be made: {error.strerror or error}") from error
    written = current().run(write)
    if len(written) < len(steps):
        say(f"plans are written of {len(written):,} steps of {len(steps):,}")
    return written


def _write_step(path: Path, instance: Instance, solution: Solution, restrictions: Restrictions) -> PlanEntry:
    from piper_ray.report.document import plan_document, proof_document
    from piper_ray.report.frontier_table import PlanEntry

    evaluation = check_own_plan(instance, solution, restrictions, simulate_own_plan(instance, solution))
    assert solution.plan is not None
    document = plan_document(instance, solution.plan, evaluation, proof_document(solution), solution.schedule)
    write_document(path, document)
    return PlanEntry(solution.plan, path.name)


def _table_of_kinds(
    instance: Instance,
    asked: Schedule | ScheduleName,
    restrictions: Restrictions,
    options: SolveOptions,
    curves: CurveOptions,
    json: bool,
) -> None:
    """The table for each number of the one kind with each of the other. Raises UsageError, and typer.Exit unless it
    succeeds."""
    from piper_ray.engine.frontier.kinds import KindPoint, kind_table, numbers_of, with_devices
    from piper_ray.report.document import kind_document
    from piper_ray.report.frontier import kind_csv, kind_figure, kind_rows, print_kind_table
    from piper_ray.report.plots.style import save
    from piper_ray.report.summary import instance_lines, schedule_line
    from piper_ray.report.terminal import console, print_lines

    if curves.budgets is not None:
        raise UsageError("--budgets: bounds on the sum of d are for plans whose stages may differ in d (schedule 2bw)")
    if curves.out is not None and curves.out.suffix.lower() != ".csv":
        raise UsageError(f"--out {curves.out}: a table of two kinds of devices is written as .csv")
    numbers = numbers_of(instance, curves.devices)
    kinds, screen, known = [*numbers], console(stderr=json), list[KindPoint]()
    print_lines(screen, [*instance_lines(instance), schedule_line(Schedule.of(asked)), ""])
    with working("each number of devices of the one kind with each of the other"):

        def found(stop: Stop[tuple[KindPoint, ...]]) -> tuple[KindPoint, ...]:
            stop.offer(lambda: tuple(sorted(known, key=lambda one: one.devices)) or None)
            return kind_table(instance, numbers, restrictions, asked, options, stop=stop, tell=known.append)

        points = current().run(found)
    print_kind_table(screen, kinds, points)
    plans: dict[tuple[int, int], PlanEntry] = {}
    unwritten = Unwritten()
    if curves.plans is not None:
        distinct = {id(point.solution.plan): point for point in reversed(points) if point.solution.plan is not None}
        steps = []
        for (one, other), solution in sorted((x.devices, x.solution) for x in distinct.values()):
            on = with_devices(instance.cluster, {kinds[0]: one, kinds[1]: other})
            steps.append(((one, other), f"devices-{one:05}-{other:05}.json", instance.replace(cluster=on), solution))
        with unwritten.noted():
            plans = _write_plans(curves.plans, restrictions, steps)
    rows = kind_rows(kinds, points, {devices: entry.file for devices, entry in plans.items()})
    if json:
        document = kind_document(instance, restrictions, options, Schedule.of(asked), rows)
        show_document(document)
    if curves.out is not None:
        with unwritten.noted():
            write_atomically(curves.out, kind_csv(rows))
    if curves.plot is not None:
        with unwritten.noted():
            figure = kind_figure(instance, kinds, points)
            if figure is None:
                say(f"there is no plan to plot to {curves.plot}")
            else:
                save(figure, curves.plot)
    unwritten.report()
    if (code := exit_code([x.solution for x in points], current().number is not None)) != EXIT_SOLVED:
        raise typer.Exit(code)


def _draw(plot: Path, found: Frontier, of_budgets: tuple[FrontierPoint, ...]) -> None:
    from piper_ray.report.plots.curves import frontier_figure
    from piper_ray.report.plots.style import save

    figure = frontier_figure(found.instance, found.points(), of_budgets, found.schedule)
    if figure is None:
        say(f"there is no plan to plot to {plot}")
        return
    save(figure, plot)
