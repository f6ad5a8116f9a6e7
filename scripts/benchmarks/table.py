"""Results as tables, for a terminal or in Markdown. Only words: nothing here measures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from scripts.benchmarks.results import Results, RowResult, TwinResult

ELSEWHERE = "Prototype and reference C++: published figures (the reference's in CPU time), from another machine."

_MIB = 2.0**20


@dataclass(frozen=True)
class Table:
    """The first column is words, the others are figures."""

    title: str
    note: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def to_text(self) -> str:
        """In columns of equal width."""
        lines = [self.header, *self.rows]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.header))]
        padded = [[cell.rjust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
        body = "\n".join(
            "  ".join([line[0].ljust(widths[0]), *cells[1:]]) for line, cells in zip(lines, padded, strict=True)
        )
        return f"{self.title}\n{self.note}\n\n{body}\n"

    def to_markdown(self) -> str:
        """As a heading, a sentence and a table."""
        return f"### {self.title}\n\n{self.note}\n\n{self.body()}\n"

    def body(self) -> str:
        """The table alone, in Markdown."""
        rule = ["---", *["---:"] * (len(self.header) - 1)]
        return "\n".join(f"| {' | '.join(line)} |" for line in (self.header, tuple(rule), *self.rows))


def render(results: Results, *, markdown: bool) -> str:
    """Everything that was measured; what was not has no table."""
    tables = [table.to_markdown() if markdown else table.to_text() for table in tables_of(results)]
    return "\n".join([*(f"{remark}\n" for remark in remarks(results)), *tables])


def remarks(results: Results) -> list[str]:
    """What the absolute times depend on, and what compilation takes if it was measured."""
    words = ["Machine: " + ", ".join(f"{key} {value}" for key, value in results.machine.items()) + "."]
    if results.compilation is not None:
        cold, warm = seconds(results.compilation.cold_s), seconds(results.compilation.warm_s)
        words.append(f"The command on a small instance: {cold} when it compiles its kernels first, then {warm}.")
    return words


def tables_of(results: Results) -> Iterator[Table]:
    """The tables for which something was measured, in the order in which they are shown."""
    if results.rows:
        yield _answers(results.rows)
        yield _times(results.rows)
        yield _commands(results.rows)
    compared = [result for result in results.rows if result.one_thread is not None]
    if compared:
        yield _threads(compared)
    if results.twins:
        yield _twins(results.twins)


def _answers(rows: Sequence[RowResult]) -> Table:
    def line(result: RowResult) -> tuple[str, ...]:
        row, timing = result.row, result.timing
        known = "-" if row.known_s is None else ("at most " if row.known_is_bound else "") + repr(row.known_s)
        value = timing.time_per_sample_s
        return (
            row.case.title,
            "-" if value is None else repr(value),
            timing.status,
            known if row.has_plan else "no plan",
            result.verdict,
            f"{timing.downsets:,}",
            f"{len(timing.evaluations):,}",
        )

    return Table(
        "Answers",
        "Known: by the published C++ or an earlier search. Ours must be at most that.",
        ("instance", "time per sample (s)", "status", "known (s)", "ours is", "downsets", "evaluations"),
        tuple(map(line, rows)),
    )


def _times(rows: Sequence[RowResult]) -> Table:
    def line(result: RowResult) -> tuple[str, ...]:
        row, timing = result.row, result.timing
        return (
            row.case.title,
            seconds(timing.lattice_s),
            seconds(timing.stage_costs_s),
            seconds(timing.search_s),
            seconds(timing.total_s),
            seconds(timing.cpu_s),
            str(timing.runs),
            seconds(row.goal_s),
            ratio(row.goal_s, timing.total_s),
            row.prototype.text,
            _times_faster(row.prototype.seconds, timing.total_s),
            row.reference.text,
            _times_faster(row.reference.seconds, timing.total_s),
        )

    header = ("instance", "lattice", "stage costs", "search", "total", "CPU", "runs", "goal", "goal / total")
    return Table(
        "Time",
        f"Medians of the runs, all threads, kernels loaded; wall times but for CPU. {ELSEWHERE}",
        (*header, "prototype", "/ total", "reference", "/ total"),
        tuple(map(line, rows)),
    )


def _commands(rows: Sequence[RowResult]) -> Table:
    def line(result: RowResult) -> tuple[str, ...]:
        row, command = result.row, result.command
        return (
            row.case.title,
            seconds(command.wall_s),
            "-" if row.process_goal_s is None else seconds(row.process_goal_s),
            str(command.runs),
            size(command.peak_bytes),
            "-" if row.memory_goal_bytes is None else size(row.memory_goal_bytes),
        )

    return Table(
        "The whole command",
        "`piper-ray solve --json` from start to exit, compiled kernels on disk: wall time and peak resident memory.",
        ("instance", "wall time", "goal", "runs", "peak memory", "goal"),
        tuple(map(line, rows)),
    )


def _threads(rows: Sequence[RowResult]) -> Table:
    def line(result: RowResult) -> tuple[str, ...]:
        one, several = result.one_thread or result.timing, result.timing
        return (
            result.row.case.title,
            seconds(one.total_s),
            seconds(several.total_s),
            str(several.threads),
            ratio(one.total_s, several.total_s),
            seconds(one.cpu_s),
            seconds(several.cpu_s),
        )

    return Table(
        "Threads",
        "On one thread and on all, one after the other in one process. Little gain: short levels, or a busy machine.",
        ("instance", "one thread", "all threads", "threads", "ratio", "CPU of one", "CPU of all"),
        tuple(map(line, rows)),
    )


def _twins(twins: Sequence[TwinResult]) -> Table:
    def line(result: TwinResult) -> tuple[str, ...]:
        ours_s = result.ours.total_s
        return (
            result.twin.case.title,
            seconds(ours_s),
            seconds(result.greedy.seconds),
            ratio(result.greedy.seconds, ours_s),
            seconds(result.exact.seconds),
            ratio(result.exact.seconds, ours_s),
            f"{result.ours.runs} / {result.exact.runs}",
            size(result.exact.table_bytes),
            result.verdict,
        )

    return Table(
        "Beside the paper's own table",
        "Measured in this run, in one process, on one thread each: the solver, and Piper's published dynamic program, "
        "compiled, with its greedy TMPC choice and with an exact one.",
        ("instance", "ours", "greedy table", "/ ours", "exact table", "/ ours", "runs", "table's size", "values"),
        tuple(map(line, twins)),
    )


def _times_faster(elsewhere_s: float | None, ours_s: float) -> str:
    return "-" if elsewhere_s is None else ratio(elsewhere_s, ours_s)


def seconds(value: float) -> str:
    """In ms below 0.1 s: "4.72 ms", "0.47 s", "12.3 s", "1,204 s"."""
    if value < 0.0995:
        return f"{_three_figures(value * 1e3)} ms"
    return f"{_three_figures(value)} s"


def ratio(dividend: float, divisor: float) -> str:
    """Two figures, or all before the point: "0.21", "1.9", "660", "12,300"."""
    value = dividend / divisor
    if value < 0.995:
        return f"{value:.2f}"
    return f"{value:.1f}" if value < 9.95 else f"{value:,.0f}"


def size(value: float) -> str:
    """In MiB or GiB (powers of 1024), as memory is given: "187 MiB", "1.35 GiB"."""
    if value < 999.5 * _MIB:
        return f"{_three_figures(value / _MIB)} MiB"
    return f"{_three_figures(value / (1024 * _MIB))} GiB"


def _three_figures(value: float) -> str:
    if value < 9.995:
        return f"{value:.2f}"
    return f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"
