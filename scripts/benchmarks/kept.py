"""Measured figures that the repository keeps (docs/performance/*.json), and the tables and the picture made of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from piper_ray.model.figures import time_text
from piper_ray.report.plots.style import save
from piper_ray.storage.files import write_atomically
from scripts.benchmarks.cases import ROOT, ROWS, TWINS
from scripts.benchmarks.compared_plot import time_against_downsets
from scripts.benchmarks.compared_table import (
    SUBJECTS,
    goals_table,
    kinds_table,
    measured_table,
    origin,
    versions_table,
)
from scripts.benchmarks.paired import Compared
from scripts.benchmarks.results import CommandRun, Compilation, PaperTable, Results, RowResult, Timing, TwinResult
from scripts.benchmarks.subjects import YARDSTICKS
from scripts.benchmarks.table import Table, ratio, remarks, seconds, size, tables_of

FOLDER = ROOT / "docs" / "performance"
PICTURE = FOLDER / "time-downsets.svg"
PAGES = (ROOT / "README.md", ROOT / "docs" / "performance.md")


@dataclass(frozen=True)
class _Row:
    """``RowResult`` with its row by id."""

    id: str
    timing: Timing
    command: CommandRun
    one_thread: Timing | None


@dataclass(frozen=True)
class _Twin:
    """``TwinResult`` with its twin by id."""

    id: str
    ours: Timing
    greedy: PaperTable
    exact: PaperTable


@dataclass(frozen=True)
class _Yardsticks:
    """``Results`` as a file has them."""

    machine: dict[str, str]
    compilation: Compilation | None = None
    rows: tuple[_Row, ...] = ()
    twins: tuple[_Twin, ...] = ()


_YARDSTICKS: TypeAdapter[_Yardsticks] = TypeAdapter(_Yardsticks)
_COMPARED: TypeAdapter[Compared] = TypeAdapter(Compared)


def read_yardsticks(folder: Path = FOLDER) -> Results:
    """The kept yardsticks in the order of the cases; none without a file."""
    path = folder / "yardsticks.json"
    if not path.exists():
        return Results({})
    kept = _YARDSTICKS.validate_json(path.read_bytes())
    rows, twins = {row.id: row for row in kept.rows}, {twin.id: twin for twin in kept.twins}
    found = Results(kept.machine, kept.compilation)
    for row in ROWS:
        if (one := rows.get(row.case.id)) is not None:
            found.rows.append(RowResult(row, one.timing, one.command, one.one_thread))
    for twin in TWINS:
        if (other := twins.get(twin.case.id)) is not None:
            found.twins.append(TwinResult(twin, other.ours, other.greedy, other.exact))
    return found


def keep_yardsticks(results: Results, folder: Path = FOLDER) -> None:
    """Replaces the kept figures of the measured cases."""
    known = read_yardsticks(folder)
    rows = {row.row.case.id: row for row in (*known.rows, *results.rows)}
    twins = {twin.twin.case.id: twin for twin in (*known.twins, *results.twins)}
    document = _Yardsticks(
        results.machine,
        results.compilation or known.compilation,
        tuple(_Row(name, row.timing, row.command, row.one_thread) for name, row in rows.items()),
        tuple(_Twin(name, twin.ours, twin.greedy, twin.exact) for name, twin in twins.items()),
    )
    _write(folder / "yardsticks.json", _YARDSTICKS.dump_json(document, indent=1))


def read_compared(folder: Path = FOLDER) -> Compared:
    """The kept comparisons in the order of the subjects; none without a file."""
    path = folder / "compared.json"
    if not path.exists():
        return Compared({})
    kept = _COMPARED.validate_json(path.read_bytes())
    rows = {row.subject: row for row in kept.rows}
    return Compared(kept.machine, [rows[name] for name in SUBJECTS if name in rows])


def keep_compared(results: Compared, folder: Path = FOLDER) -> None:
    """Replaces the kept figures of the measured subjects."""
    rows = {row.subject: row for row in (*read_compared(folder).rows, *results.rows)}
    _write(folder / "compared.json", _COMPARED.dump_json(Compared(results.machine, list(rows.values())), indent=1))


def _write(path: Path, document: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, document.decode() + "\n")


def write_pages() -> None:
    """README's table, those of docs/performance.md and the picture, made anew from what is kept."""
    parts = parts_of_pages(read_yardsticks(), read_compared())
    for page in PAGES:
        write_atomically(page, filled(page.read_text(encoding="utf-8"), parts))
    families = [row for row in read_compared().rows if SUBJECTS[row.subject].family != YARDSTICKS]
    save(time_against_downsets(families), PICTURE)


def filled(page: str, parts: Mapping[str, str]) -> str:
    """The page with each part after its mark, ``<!-- measured: NAME -->``, up to an empty line; the others stay."""

    def part(found: re.Match[str]) -> str:
        return f"{found[1]}\n{parts[found[2]]}\n" if found[2] in parts else found[0]

    return re.sub(r"(<!-- measured: ([a-z-]+) -->)\n(?:[^\n]+\n)*", part, page)


def parts_of_pages(yardsticks: Results, compared: Compared) -> dict[str, str]:
    """Markdown without empty lines, by the names that pages call it; without what was not measured."""
    families = [row for row in compared.rows if SUBJECTS[row.subject].family != YARDSTICKS]
    of_yardsticks = {table.title: table for table in tables_of(yardsticks)}
    tables = {
        "readme": _short(yardsticks.twins),
        "yardsticks": _long(yardsticks),
        "commands": of_yardsticks.get("The whole command"),
        "threads": of_yardsticks.get("Threads"),
        "paper": of_yardsticks.get("Beside the paper's own table"),
        "families": measured_table(families),
        "goals": goals_table(families),
        "kinds": kinds_table(families),
        "versions": versions_table(compared.rows),
    }
    parts = {name: table.body() for name, table in tables.items() if table is not None and table.rows}
    if yardsticks.rows:
        parts["yardsticks-machine"] = "\n".join(remarks(yardsticks))
    if families:
        parts["families-machine"] = origin(compared)
    return parts


def _short(twins: Sequence[TwinResult]) -> Table:
    """Ratios of what was measured in one process."""

    def line(result: TwinResult) -> tuple[str, ...]:
        ours_s, tables_s = result.ours.total_s, (result.greedy.seconds, result.exact.seconds)
        in_words = (seconds(ours_s), *map(seconds, tables_s))
        return (result.twin.case.title, *(ratio(table_s, ours_s) for table_s in tables_s), *in_words)

    head = ("instance", "greedy / solve", "exact / solve", "solve", "the paper's, greedy", "the paper's, exact")
    return Table("", "", head, tuple(map(line, twins)))


def _long(results: Results) -> Table:
    head = ("instance", "time per microbatch", "solve", "goal", "reference C++", "reference / solve", "peak memory")
    return Table("", "", head, tuple(map(_line, results.rows)))


def _line(result: RowResult) -> tuple[str, ...]:
    row, timing = result.row, result.timing
    case = row.case
    value, reference = timing.time_per_sample_s, row.reference
    return (
        f"{case.workload}, K={case.devices} N={case.microbatches} M={case.memory.replace('GiB', ' GiB')}",
        "no plan" if value is None else time_text(value, 5),
        seconds(timing.total_s),
        seconds(row.goal_s),
        reference.text,
        "-" if reference.seconds is None else ratio(reference.seconds, timing.total_s),
        size(result.command.peak_bytes),
    )
