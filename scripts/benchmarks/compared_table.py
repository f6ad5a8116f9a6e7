"""What was measured of the families, and of two versions in turns, as tables. Only words: nothing here measures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from scripts.benchmarks.cases import ROWS
from scripts.benchmarks.paired import Compared, Comparison, Run, proof_text
from scripts.benchmarks.subjects import FAMILIES, KINDS, ONE_KIND, Subject, of_rows
from scripts.benchmarks.table import Table, ratio, seconds, size

SUBJECTS: Mapping[str, Subject] = {subject.id: subject for subject in (*of_rows(ROWS), *FAMILIES)}


def render_compared(results: Compared, *, markdown: bool) -> str:
    """Everything that was measured."""
    tables = [table.to_markdown() if markdown else table.to_text() for table in compared_tables(results.rows)]
    return "\n".join([f"{origin(results)}\n", *tables])


def origin(results: Compared) -> str:
    """The machine, its load, and the versions."""
    machine = ", ".join(f"{key} {value}" for key, value in results.machine.items())
    loads = [row.this.load for row in results.rows]
    words = f"Machine: {machine}."
    if loads:
        words += f" Load average when solves began: {min(loads):.1f} to {max(loads):.1f}."
    for name, commits in (
        ("Version", [row.this.commit for row in results.rows]),
        ("Before", [row.before.commit for row in results.rows if row.before is not None]),
    ):
        if commits:
            words += f" {name}: {', '.join(dict.fromkeys(commits))}."
    return words


def compared_tables(rows: Sequence[Comparison]) -> Iterator[Table]:
    """The tables with any measurement, in the order in which they are shown."""
    for table in (measured_table(rows), goals_table(rows), kinds_table(rows), versions_table(rows)):
        if table.rows:
            yield table


def measured_table(rows: Sequence[Comparison]) -> Table:
    """The table of each subject's time and its forecast."""

    def line(row: Comparison) -> tuple[str, ...]:
        run = row.this
        return (
            SUBJECTS[row.subject].title,
            _count(row.downsets),
            _count(run.listed),
            _count(run.live),
            f"{run.evaluations:,}",
            _time(run, run.cpu_s),
            _time(run, run.wall_s),
            size(run.peak_bytes),
            proof_text(run),
            _forecast(row),
            _forecast_ratio(row),
        )

    return Table(
        "Solves",
        "Listed: downsets that were made; live: those that kept a state, at most in one evaluation. CPU of all "
        "threads, kernels loaded. Forecast: the CPU time that `info` tells; /CPU only of what was proved.",
        (
            *("instance", "downsets", "listed", "live", "evaluations", "CPU", "wall", "peak memory", "proved"),
            *("forecast", "/ CPU"),
        ),
        tuple(map(line, rows)),
    )


def goals_table(rows: Sequence[Comparison]) -> Table:
    """The measurement of each case that has a goal, and the goal."""

    def line(row: Comparison) -> tuple[str, ...]:
        subject = SUBJECTS[row.subject]
        goal = subject.goal
        assert goal is not None
        return (
            subject.title,
            seconds(goal.seconds),
            "CPU" if subject.threads == 1 else "wall",
            "-" if goal.before_s is None else seconds(goal.before_s),
            seconds(_judged_s(subject, row.this)),
            proof_text(row.this),
            "met" if is_met(row) else "missed",
        )

    return Table(
        "Goals",
        "CPU seconds of one thread, or wall time on two cores, with proof. When set: what instances of that kind took "
        "then.",
        ("instance", "goal", "of", "when set", "measured", "proved", "goal is"),
        tuple(line(row) for row in rows if SUBJECTS[row.subject].goal is not None),
    )


def is_met(row: Comparison) -> bool:
    """Proved within the goal's time."""
    subject = SUBJECTS[row.subject]
    return subject.goal is not None and row.this.proved and _judged_s(subject, row.this) <= subject.goal.seconds


def _judged_s(subject: Subject, run: Run) -> float:
    return run.cpu_s if subject.threads == 1 else run.wall_s


def kinds_table(rows: Sequence[Comparison]) -> Table:
    """Devices of several kinds against those of one kind; empty if the latter were not measured."""
    one_s = next((row.this.cpu_s for row in rows if row.subject == ONE_KIND), None)

    def line(row: Comparison) -> tuple[str, ...]:
        run = row.this
        return (SUBJECTS[row.subject].title, _time(run, run.cpu_s), ratio(run.cpu_s, one_s or 0.0), proof_text(run))

    return Table(
        "Several kinds of devices",
        "CPU seconds of one thread, and how many times those of the first row they are.",
        ("instance", "CPU", "/ one kind", "proved"),
        tuple(line(row) for row in rows if one_s is not None and SUBJECTS[row.subject].family == KINDS),
    )


def versions_table(rows: Sequence[Comparison]) -> Table:
    """The table of subjects that were measured on both versions."""

    def line(row: Comparison) -> tuple[str, ...]:
        this, before = row.this, row.before
        assert before is not None
        return (
            SUBJECTS[row.subject].title,
            *(_time(before, before.cpu_s), _time(this, this.cpu_s), _ratio(row, before.cpu_s, this.cpu_s)),
            *(_time(before, before.wall_s), _time(this, this.wall_s), _ratio(row, before.wall_s, this.wall_s)),
            *(size(before.peak_bytes), size(this.peak_bytes)),
            *(proof_text(before), proof_text(this)),
        )

    return Table(
        "Against the version before",
        "In turns in one run, the same instances: medians of CPU and wall time, the most memory. Ratio: before / now, "
        "above 1 where it is faster now; > and < where one was stopped without a proof, - where both were.",
        (
            *("instance", "CPU before", "now", "ratio", "wall before", "now", "ratio"),
            *("peak before", "now", "proved before", "now"),
        ),
        tuple(line(row) for row in rows if row.before is not None),
    )


def _time(run: Run, value_s: float) -> str:
    return "-" if run.refused else seconds(value_s)


def _ratio(row: Comparison, before_s: float, now_s: float) -> str:
    assert row.before is not None
    proved = row.before.proved, row.this.proved
    if row.before.refused or row.this.refused or not any(proved):
        return "-"
    return {(True, True): "", (False, True): "> ", (True, False): "< "}[proved] + ratio(before_s, now_s)


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _forecast(row: Comparison) -> str:
    return "-" if row.forecast_s is None else seconds(row.forecast_s)


def _forecast_ratio(row: Comparison) -> str:
    if row.forecast_s is None or row.this.refused:
        return "-"
    if row.this.proved:
        return ratio(row.forecast_s, row.this.cpu_s)
    return "-"
