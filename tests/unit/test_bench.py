"""scripts/bench: what it measures, and how it goes on when something is missing or fails. No timings."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import scripts.benchmarks.__main__ as command_line
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import divisors
from scripts.benchmarks import runner
from scripts.benchmarks.bench_solve import load_case
from scripts.benchmarks.cases import CASES, ROWS, SMALL, TWINS, Case, select
from scripts.benchmarks.measure import MeasurementError, run_benchmarks, run_command, solve_id
from scripts.benchmarks.results import CommandRun, Compilation, PaperTable, Results, Timing
from tests.support import GIB, published_goldens

MISSING = Case("missing", "Nothing", Path("/nowhere/nothing.json"), 4, 8, "1GiB")


# What is measured


def test_the_rows_are_the_yardsticks() -> None:
    assert [(row.case.workload, row.case.devices, row.case.microbatches, row.case.memory) for row in ROWS] == [
        ("BERT-32", 2048, 1920, "8GiB"),
        ("BERT-32", 2048, 512, "8GiB"),
        ("BERT-96", 2048, 1920, "8GiB"),
        ("ResNet-50", 64, 7680, "4GiB"),
        ("GNMT", 8, 256, "2.4GiB"),
        ("GNMT", 16, 256, "1.2GiB"),
        ("GNMT", 512, 1920, "2.4GiB"),
        ("Inception-v3", 64, 256, "16GiB"),
        ("Inception-v3", 128, 256, "16GiB"),
        ("Inception-v3", 48, 64, "2GiB"),
        ("Inception-v3", 48, 64, "4GiB"),
    ]


@pytest.mark.long
def test_known_values_are_those_of_the_published_implementation() -> None:
    published = {
        (golden.workload, golden.instance.devices, golden.instance.microbatches, golden.instance.memory_bytes): golden
        for golden in published_goldens()
    }
    names = {"BERT-32": "bert32a100", "ResNet-50": "resnet", "GNMT": "gnmt"}
    checked = 0
    for row in ROWS:
        if row.known_s is not None and not row.known_is_bound:
            case = row.case
            memory_bytes = float(case.memory.removesuffix("GiB")) * GIB
            golden = published[names[case.workload], case.devices, case.microbatches, memory_bytes]
            assert row.known_s == golden.time_per_sample_s
            checked += 1
    assert checked == 4


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_case_loads_as_its_title_says(case: Case) -> None:
    instance = load_case(case)
    assert (instance.devices, instance.microbatches) == (case.devices, case.microbatches)
    assert instance.memory_bytes == pytest.approx(float(case.memory.removesuffix("GiB")) * GIB, abs=1)
    assert instance.bandwidth_bytes_per_s == 25 * GIB
    assert case.title == f"{case.workload} K={instance.devices} N={instance.microbatches} M={case.memory}"


def test_all_is_chosen_without_names_and_the_slow_ones_not_when_quick() -> None:
    assert select([], quick=False) == (ROWS, TWINS)
    rows, twins = select([], quick=True)
    assert {row.case.id for row in ROWS} - {row.case.id for row in rows} == {"inception-k48", "inception-tight"}
    assert {twin.case.id for twin in TWINS} - {twin.case.id for twin in twins} == {"bert32"}


def test_a_name_is_an_id_or_its_beginning() -> None:
    rows, twins = select(["gnmt", "resnet50-k8"], quick=False)
    assert [row.case.id for row in rows] == ["gnmt-k8", "gnmt-k16", "gnmt-k512"]
    assert [twin.case.id for twin in twins] == ["resnet50-k8"]


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"there is no gnm, bert33; expected some of bert32, .*inception-k48"):
        select(["gnm", "bert32", "bert33"], quick=False)


# How it is measured: the real processes once, then stand-ins for them


@pytest.fixture(scope="module")
def environment() -> Mapping[str, str]:
    """Compiled kernels even where the rest of the suite runs without, and timings even where it runs in parallel."""
    return {
        name: value for name, value in os.environ.items() if name not in {"NUMBA_DISABLE_JIT", "PYTEST_XDIST_WORKER"}
    }


@pytest.mark.long
def test_the_command_is_run_and_weighed(environment: Mapping[str, str]) -> None:
    run, document = run_command(SMALL, environment, runs=2)
    assert run.runs == 2
    assert run.wall_s > 0.0
    assert run.cpu_s > 0.0
    assert 30e6 < run.peak_bytes < 2e9  # numba alone is over the one, all of this far below the other
    timing = Timing.of_document(document, run.cpu_s)
    assert timing.status == "optimal"
    assert timing.runs == 1
    assert timing.total_s == pytest.approx(timing.lattice_s + timing.stage_costs_s + timing.search_s)
    assert timing.time_per_sample_s == pytest.approx(0.020957337870016697, rel=1e-9)


@pytest.mark.long
def test_a_bench_reports_the_solve(environment: Mapping[str, str]) -> None:
    (record,) = run_benchmarks([solve_id(CASES["bert32-n512"], one_thread=True)], environment)
    timing = Timing.of_benchmark(record)
    assert timing.threads == 1
    assert timing.runs == len(record["stats"]["data"]) >= 1
    assert timing.downsets == 43
    assert timing.time_per_sample_s == pytest.approx(0.001221279945321381, rel=1e-9)
    assert any(evaluation["feasible"] is True for evaluation in timing.evaluations)


@pytest.mark.long
def test_no_plan_is_an_answer(environment: Mapping[str, str]) -> None:
    run, document = run_command(dataclasses.replace(SMALL, memory="1MiB"), environment)
    timing = Timing.of_document(document, run.cpu_s)
    assert (timing.status, timing.time_per_sample_s, timing.answer) == ("infeasible", None, "infeasible")


def test_the_row_without_a_plan_has_none() -> None:
    (row,) = (row for row in ROWS if not row.has_plan)
    instance = load_case(row.case)
    activations_bytes = sum(min(tmpc.activation_bytes for tmpc in layer.tmpcs[1]) for layer in instance.layers)
    # shares[s]: the greatest sum of 1/y over stages whose data-parallel degrees sum to s, y = ceil(s/d) for each.
    shares = [0.0]
    for s in range(1, instance.data_parallel_limit + 1):
        degrees = [d for d in divisors(instance.microbatches) if d <= s]
        shares.append(max(shares[s - d] + 1.0 / math.ceil(s / d) for d in degrees))
    assert activations_bytes > 1.7 * max(shares) * instance.memory_bytes


@pytest.mark.long
def test_a_process_that_fails_is_reported_with_its_words(environment: Mapping[str, str]) -> None:
    with pytest.raises(MeasurementError, match=r"piper-ray left with 3:\n.*nothing\.json"):
        run_command(MISSING, environment)
    with pytest.raises(MeasurementError, match=r"pytest left with 4:"):
        run_benchmarks([solve_id(MISSING)], environment)


class Processes:
    """Stands in for both kinds of process. Each takes wall_s; the interrupt comes in place of the run numbered so."""

    def __init__(self, *, wall_s: float = 1.0, interrupt_at: int | None = None) -> None:
        self.wall_s = wall_s
        self.interrupt_at = interrupt_at
        self.log: list[str] = []

    def run_command(
        self, case: Case, environment: Mapping[str, str], *, runs: int = 1, show_log: bool = False
    ) -> tuple[CommandRun, dict[str, Any]]:
        assert show_log == (case.id == "inception-k48")
        self._note(f"command {case.id} x{runs}" + (" cold" if "NUMBA_CACHE_DIR" in environment else ""))
        stats = {"threads": 2, "lattice_s": 1.0, "stage_costs_s": 2.0, "search_s": 97.0, "downsets": 3}
        document = {"status": "optimal", "time_per_sample_s": 0.5, "stats": {**stats, "evaluations": [{}, {}]}}
        return CommandRun(runs, self.wall_s, 123.0, 10**8), document

    def run_benchmarks(self, ids: Sequence[str], environment: Mapping[str, str]) -> list[dict[str, Any]]:
        del environment
        names = [name.partition("::")[2] for name in ids]
        self._note(" ".join(names))
        times = {"cpu_s": 0.3, "lattice_s": 0.1, "stage_costs_s": 0.05, "search_s": 0.1}
        info = {**times, "status": "optimal", "time_per_sample_s": 0.5, "downsets": 3, "evaluations": [{}]}
        return [
            {
                "extra_info": {**info, "threads": 1 if "-one" in name else 2, "table_bytes": 1000},
                "stats": {"rounds": 5, "median": 0.25},
            }
            for name in names
        ]

    def _note(self, line: str) -> None:
        if len(self.log) == self.interrupt_at:
            raise KeyboardInterrupt
        self.log.append(line)


def _install(monkeypatch: pytest.MonkeyPatch, processes: Processes) -> Processes:
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setattr(runner, "run_command", processes.run_command)
    monkeypatch.setattr(runner, "run_benchmarks", processes.run_benchmarks)
    monkeypatch.setattr(runner, "usable_cores", lambda: 2)
    return processes


def _measure(names: Sequence[str], *, with_compilation: bool = False) -> Results:
    results = Results({})
    runner.measure(*select(names, quick=False), results, list[str]().append, with_compilation=with_compilation)
    return results


def test_a_row_is_timed_inside_a_process_and_its_command_weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = _install(monkeypatch, Processes())
    (result,) = _measure(["gnmt-k16"]).rows
    assert processes.log == [
        "command small x1",
        "command gnmt-k16 x1",
        "bench_solve[gnmt-k16-all] bench_solve[gnmt-k16-one]",
        "command gnmt-k16 x3",
    ]
    assert (result.timing.total_s, result.timing.runs, result.command.runs) == (0.25, 5, 3)
    assert result.one_thread is not None
    assert (result.timing.threads, result.one_thread.threads) == (2, 1)


def test_a_long_row_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = _install(monkeypatch, Processes(wall_s=101.0))
    (result,) = _measure(["inception-k48"]).rows
    assert processes.log == ["command small x1", "command inception-k48 x1"]
    timing = result.timing
    assert (timing.total_s, timing.cpu_s, timing.runs, len(timing.evaluations)) == (100.0, 123.0, 1, 2)


def test_a_twin_is_measured_in_one_process_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = _install(monkeypatch, Processes())
    (result,) = _measure(["resnet50-k8"]).twins
    assert processes.log[1:] == [
        "bench_solve[resnet50-k8-one] bench_paper_table[resnet50-k8-greedy] bench_paper_table[resnet50-k8-exact]"
    ]
    assert result.ours.threads == 1
    assert result.exact == PaperTable(runs=5, seconds=0.25, time_per_sample_s=0.5, table_bytes=1000)


def test_compilation_is_measured_in_an_empty_cache_that_the_rest_then_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = _install(monkeypatch, Processes())
    results = _measure(["resnet50-k8"], with_compilation=True)
    assert processes.log[:2] == ["command small x1 cold", "command small x3 cold"]
    assert results.compilation == Compilation(cold_s=1.0, warm_s=1.0)


# The command line


def _bench(*arguments: str) -> tuple[int, str, str]:
    app = typer.Typer()
    app.command()(command_line.main)
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.stdout, result.stderr


def test_an_interrupt_prints_what_is_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, Processes(interrupt_at=5))  # the small one, three for BERT-32, and one for the next row
    code, out, err = _bench("--rows", "bert32", "--quick")
    assert code == 130
    assert "BERT-32 K=2048 N=1920 M=8GiB" in out
    assert "N=512" not in out
    assert "interrupted" in err


def test_a_wrong_answer_fails_and_tables_and_figures_are_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _install(monkeypatch, Processes())  # 0.5 s per sample, far above the known value
    code, out, err = _bench("--rows", "bert32-n512", "--quick", "--markdown", "--json", str(tmp_path / "out.json"))
    assert code == 1
    assert "BERT-32 K=2048 N=512 M=8GiB: 0.5 s per sample (optimal) is WORSE" in err
    assert "### Time" in out
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["rows"][0]["timing"]["total_s"] == 0.25
    assert document["twins"][0]["exact"]["seconds"] == 0.25


def test_a_failed_measurement_is_told_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, Processes())

    def fail(ids: Sequence[str], environment: Mapping[str, str]) -> None:
        del ids, environment
        raise MeasurementError("pytest left with 1:\nno luck")

    monkeypatch.setattr(runner, "run_benchmarks", fail)
    code, out, err = _bench("--rows", "bert32-n512")
    assert code == 1
    assert "no luck" in err
    assert "The command on a small instance: 1.00 s when it compiles" in out


@pytest.mark.parametrize(
    ("arguments", "words"), [(("--rows", "x"), "there is no x"), (("--json", "/nowhere/x"), "there is no folder")]
)
def test_arguments_that_make_no_sense_are_refused(arguments: tuple[str, ...], words: str) -> None:
    code, out, err = _bench(*arguments)
    assert (code, out) == (2, "")
    assert words in err
