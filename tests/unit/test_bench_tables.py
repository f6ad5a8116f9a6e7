"""The tables of scripts/bench, and its judgement of what was found."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from scripts.benchmarks.cases import ROWS, TWINS
from scripts.benchmarks.results import CommandRun, Compilation, PaperTable, Results, RowResult, Timing, TwinResult
from scripts.benchmarks.table import Table, ratio, render, seconds, size, tables_of

TIMING = Timing(
    threads=2,
    runs=15,
    total_s=0.0147,
    cpu_s=0.0212,
    lattice_s=0.001,
    stage_costs_s=0.002,
    search_s=0.0117,
    status="optimal",
    time_per_sample_s=0.5,
    downsets=1234,
    evaluations=({"feasible": True},),
)
COMMAND = CommandRun(runs=3, wall_s=0.8, cpu_s=0.9, peak_bytes=187_400_000)


def _twin(ours: float | None, greedy: float | None, exact: float | None) -> TwinResult:
    return TwinResult(
        TWINS[0],
        dataclasses.replace(TIMING, time_per_sample_s=ours),
        PaperTable(runs=3, seconds=1.47, time_per_sample_s=greedy, table_bytes=22_720_856),
        PaperTable(runs=3, seconds=2.94, time_per_sample_s=exact, table_bytes=22_720_856),
    )


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *[(0.0, "0.00 ms"), (0.00472, "4.72 ms"), (0.04, "40.0 ms"), (0.0994, "99.4 ms"), (0.0996, "0.10 s")],
        *[(0.467, "0.47 s"), (9.994, "9.99 s"), (9.996, "10.0 s"), (12.34, "12.3 s"), (99.96, "100 s")],
        (1204, "1,204 s"),
    ],
)
def test_seconds(value: float, expected: str) -> None:
    assert seconds(value) == expected


@pytest.mark.parametrize(
    ("dividend", "divisor", "expected"),
    [(1, 5, "0.20"), (99.4, 100, "0.99"), (99.6, 100, "1.0"), (19, 10, "1.9"), (99.6, 10, "10"), (24600, 2, "12,300")],
)
def test_ratios(dividend: float, divisor: float, expected: str) -> None:
    assert ratio(dividend, divisor) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [(156_816, "0.15 MiB"), (187.4 * 2**20, "187 MiB"), (999.6 * 2**20, "0.98 GiB"), (35.9e9, "33.4 GiB")],
)
def test_sizes(value: float, expected: str) -> None:
    assert size(value) == expected


TABLE = Table("Time", "Medians.", ("instance", "total", "runs"), (("a b", "1.0 s", "15"), ("longer name", "2 ms", "1")))


def test_a_table_as_text() -> None:
    assert TABLE.to_text() == (
        "Time\nMedians.\n\ninstance     total  runs\na b          1.0 s    15\nlonger name   2 ms     1\n"
    )


def test_a_table_as_markdown() -> None:
    assert TABLE.to_markdown() == (
        "### Time\n\nMedians.\n\n"
        "| instance | total | runs |\n| --- | ---: | ---: |\n| a b | 1.0 s | 15 |\n| longer name | 2 ms | 1 |\n"
    )


@pytest.mark.parametrize(
    ("value", "status", "known", "verdict"),
    [
        (0.5, "optimal", {"known_s": None}, "-"),
        (0.5, "optimal", {"known_s": 0.5 * (1 + 5e-10)}, "equal"),
        (0.5, "optimal", {"known_s": 0.5 * (1 - 5e-10)}, "equal"),
        (0.5, "optimal", {"known_s": 0.501}, "better"),
        (0.5, "optimal", {"known_s": 0.499}, "WORSE"),
        (0.5, "optimal", {"known_s": 0.501, "known_is_bound": True}, "within"),
        (0.5, "optimal", {"known_s": 0.499, "known_is_bound": True}, "WORSE"),
        (0.5, "feasible", {"known_s": 0.5}, "NOT PROVED"),
        (None, "infeasible", {"known_s": 0.5}, "NOT PROVED"),
        (None, "infeasible", {"known_s": None, "has_plan": False}, "equal"),
        (0.5, "optimal", {"known_s": None, "has_plan": False}, "AT ODDS"),
    ],
)
def test_our_value_is_held_to_the_known_one(
    value: float | None, status: str, known: dict[str, Any], verdict: str
) -> None:
    timing = dataclasses.replace(TIMING, time_per_sample_s=value, status=status)
    result = RowResult(dataclasses.replace(ROWS[0], **known), timing, COMMAND)
    assert result.verdict == verdict
    assert len(list(Results({}, rows=[result]).faults())) == (verdict in ("WORSE", "NOT PROVED", "AT ODDS"))


@pytest.mark.parametrize(
    ("ours", "greedy", "exact", "verdict"),
    [
        (0.5, 0.5, 0.5, "equal"),
        (0.5, 0.51, 0.5, "greedy is above"),
        (0.5, None, 0.5, "greedy is above"),
        (0.5, 0.49, 0.5, "AT ODDS"),
        (0.5, 0.5, 0.49, "AT ODDS"),
        (0.5, 0.5, None, "AT ODDS"),
        (None, 0.5, 0.5, "AT ODDS"),
        (None, None, None, "equal"),
    ],
)
def test_the_twin_must_agree(ours: float | None, greedy: float | None, exact: float | None, verdict: str) -> None:
    result = _twin(ours, greedy, exact)
    assert result.verdict == verdict
    assert len(list(Results({}, twins=[result]).faults())) == (verdict == "AT ODDS")


def test_the_tables_of_a_row_and_a_twin() -> None:
    row, one_thread = dataclasses.replace(ROWS[0], known_s=0.5), dataclasses.replace(TIMING, threads=1, total_s=0.0294)
    results = Results({"cores": "2"}, Compilation(31.0, 0.81), [RowResult(row, TIMING, COMMAND, one_thread)])
    results.twins.append(_twin(0.5, 0.5, 0.5))
    lines = {table.title: table.rows for table in tables_of(results)}
    name = "BERT-32 K=2048 N=1920 M=8GiB"
    times = (name, "1.00 ms", "2.00 ms", "11.7 ms", "14.7 ms", "21.2 ms", "15", "10.0 ms", "0.68")
    assert lines == {
        "Answers": ((name, "0.5", "optimal", "0.5", "equal", "1,234", "1"),),
        "Time": ((*times, "0.01 s", "0.68", "44.7 s", "3,041"),),
        "The whole command": ((name, "0.80 s", "-", "3", "179 MiB", "-"),),
        "Threads": ((name, "29.4 ms", "14.7 ms", "2", "2.0", "21.2 ms", "21.2 ms"),),
        "Beside the paper's own table": (
            ("BERT-32 K=256 N=1920 M=8GiB", "14.7 ms", "1.47 s", "100", "2.94 s", "200", "15 / 3", "21.7 MiB", "equal"),
        ),
    }
    for table in tables_of(results):
        assert {len(row) for row in table.rows} == {len(table.header)}
    text = render(results, markdown=False)
    assert "Machine: cores 2.\n" in text
    assert "The command on a small instance: 31.0 s when it compiles its kernels first, then 0.81 s.\n" in text
    assert "from another machine" in text


def test_nothing_measured_has_no_tables() -> None:
    assert render(Results({"cores": "2"}), markdown=True) == "Machine: cores 2.\n"
