"""Measures what was chosen, one thing at a time, into ``Results`` that are valid whenever it stops."""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from piper_ray.model.cores import usable_cores
from piper_ray.planners.published.paper_table import TmpcChoice
from scripts.benchmarks.cases import SMALL, Row, Twin
from scripts.benchmarks.measure import paper_table_id, run_benchmarks, run_command, solve_id
from scripts.benchmarks.results import Compilation, PaperTable, Results, RowResult, Timing, TwinResult

LONG_RUN_S = 60.0
"""A command that takes longer is run once, and its own account of its steps is taken for the timing."""
SHORT_RUN_S = 10.0
SHORT_RUNS = 3

Tell = Callable[[str], None]


def describe_machine() -> dict[str, str]:
    """What the absolute times depend on."""
    return {
        "cores": str(usable_cores()),
        "processor": _processor(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "numba": version("numba"),
        "numpy": version("numpy"),
        "load average at the start": f"{os.getloadavg()[0]:.1f}",
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown"


def measure(
    rows: Sequence[Row], twins: Sequence[Twin], results: Results, tell: Tell, *, with_compilation: bool
) -> None:
    """Fills ``results``. with_compilation: measured too, which takes as long as compiling everything does."""
    with _kernel_cache(empty=with_compilation) as environment:
        tell("compiling" if with_compilation else "warming up")
        cold, _ = run_command(SMALL, environment)
        if with_compilation:
            warm, _ = run_command(SMALL, environment, runs=SHORT_RUNS)
            results.compilation = Compilation(cold.wall_s, warm.wall_s)
        for number, row in enumerate(rows, 1):
            tell(f"[{number}/{len(rows)}] {row.case.title}")
            result = _measure_row(row, environment)
            results.rows.append(result)
            tell(f"  {result.timing.answer}, in {result.timing.total_s:.4g} s")
        for number, twin in enumerate(twins, 1):
            tell(f"[{number}/{len(twins)}] {twin.case.title} against the paper's table")
            results.twins.append(_measure_twin(twin, environment))


@contextmanager
def _kernel_cache(*, empty: bool) -> Iterator[Mapping[str, str]]:
    """The environment of measured processes: with an empty folder for compiled kernels, or the one always used."""
    if not empty:
        yield dict(os.environ)
        return
    with tempfile.TemporaryDirectory(prefix="piper-ray-bench-") as folder:
        yield {**os.environ, "NUMBA_CACHE_DIR": folder}


def _measure_row(row: Row, environment: Mapping[str, str]) -> RowResult:
    command, document = run_command(row.case, environment, show_log=row.slow)
    if command.wall_s > LONG_RUN_S:
        return RowResult(row, Timing.of_document(document, command.cpu_s), command)
    ids = [solve_id(row.case)]
    if row.compare_threads and usable_cores() > 1:
        ids.append(solve_id(row.case, one_thread=True))
    timing, *others = (Timing.of_benchmark(record) for record in run_benchmarks(ids, environment))
    if command.wall_s < SHORT_RUN_S:
        command, _ = run_command(row.case, environment, runs=SHORT_RUNS)
    return RowResult(row, timing, command, others[0] if others else None)


def _measure_twin(twin: Twin, environment: Mapping[str, str]) -> TwinResult:
    ids = [solve_id(twin.case, one_thread=True), *(paper_table_id(twin.case, choice.value) for choice in TmpcChoice)]
    ours, greedy, exact = run_benchmarks(ids, environment)
    return TwinResult(twin, Timing.of_benchmark(ours), PaperTable.of_benchmark(greedy), PaperTable.of_benchmark(exact))
