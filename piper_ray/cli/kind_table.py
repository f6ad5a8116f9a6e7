"""``piper-ray frontier`` of devices of two kinds: a table."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import typer

from piper_ray import Instance, Restrictions, Schedule, ScheduleName, SolveOptions, Status, Stop
from piper_ray.cli.interrupts import current
from piper_ray.cli.telling import working
from piper_ray.model.errors import EXIT_INTERRUPTED, EXIT_SOLVED, InfeasibleError, LimitError, UsageError
from piper_ray.model.figures import percent_text, plural, printable, relative_gap, time_text
from piper_ray.planners.kind_table import KindPoint, kind_table, numbers_of
from piper_ray.report.terminal import Column, console, print_lines, print_table
from piper_ray.storage.files import write_atomically


def table_of_kinds(
    instance: Instance,
    asked: Schedule | ScheduleName,
    restrictions: Restrictions,
    options: SolveOptions,
    devices: str | None,
    out: Path | None,
) -> None:
    """Prints the table, and writes its rows as CSV. Raises UsageError, and typer.Exit for all but a success."""
    from piper_ray.report.summary import instance_lines, schedule_line

    if out is not None and out.suffix.lower() != ".csv":
        raise UsageError(f"--out {out}: a table of two kinds of devices is written as .csv")
    numbers = numbers_of(instance, devices)
    screen, known = console(), list[KindPoint]()
    print_lines(screen, [*instance_lines(instance), schedule_line(Schedule.of(asked)), ""])
    with working("each number of devices of the one kind with each of the other"):

        def found(stop: Stop[tuple[KindPoint, ...]]) -> tuple[KindPoint, ...]:
            stop.offer(lambda: tuple(sorted(known, key=lambda one: one.devices)) or None)
            return kind_table(instance, numbers, restrictions, asked, options, stop=stop, tell=known.append)

        points = current().run(found)
    first, second = map(printable, numbers)
    columns = [Column(f"{first} \\ {second}", right=True)]
    columns += [Column(f"{count:,}", right=True) for count in sorted({one.devices[1] for one in points})]
    of_pair = {one.devices: _cell(one) for one in points}
    rows = [
        [f"{count:,}", *(of_pair.get((count, other), "?") for other in sorted({one.devices[1] for one in points}))]
        for count in sorted({one.devices[0] for one in points})
    ]
    print_table(screen, columns, rows)
    proved = sum(one.status in (Status.OPTIMAL, Status.INFEASIBLE) for one in points)
    solved = sum(one.solved for one in points)
    print_lines(screen, ["", f"{proved:,} of {plural(len(points), 'point')} proved, by {plural(solved, 'solve')}"])
    if out is not None:
        write_atomically(out, _csv(points, (first, second)))
        typer.echo(str(out))
    if (code := _exit_code(points)) != EXIT_SOLVED:
        raise typer.Exit(code)


def _cell(point: KindPoint) -> str:
    """Per microbatch; with what is not proved of it."""
    if point.time_per_sample_s is None:
        return "none fits" if point.status is Status.INFEASIBLE else "?"
    text = time_text(point.time_per_sample_s)
    if point.status is Status.OPTIMAL:
        return text
    return f"{text} (gap {percent_text(relative_gap(point.time_per_sample_s, point.lower_bound_s))})"


def _csv(points: tuple[KindPoint, ...], kinds: tuple[str, str]) -> str:
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow([*kinds, "time_per_sample_s", "lower_bound_s", "status"])
    for one in points:
        bound_s = None if one.status is Status.INFEASIBLE else one.lower_bound_s
        rows.writerow([*one.devices, one.time_per_sample_s, bound_s, one.status.value])
    return text.getvalue()


def _exit_code(points: tuple[KindPoint, ...]) -> int:
    if current().number is not None:
        return EXIT_INTERRUPTED
    if all(one.status is Status.INFEASIBLE for one in points):
        return InfeasibleError.exit_code
    return EXIT_SOLVED if any(one.time_per_sample_s is not None for one in points) else LimitError.exit_code
