"""Fresh processes, one for each thing measured: pytest-benchmark's for times, the plain command for wall and memory."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from resource import struct_rusage
from typing import IO, Any

from piper_ray.model.errors import EXIT_SOLVED, InfeasibleError
from scripts.benchmarks.cases import BANDWIDTH, ROOT, Case
from scripts.benchmarks.results import CommandRun

_MAXRSS_UNIT_BYTES = 1 if sys.platform == "darwin" else 1024
_PYTEST_ARGUMENTS = [
    *("-q", "-s", "-p", "no:cacheprovider", "-W", "default"),  # -s: progress comes through on stderr
    *("-o", "python_functions=bench_*", "--benchmark-quiet"),
]
_BENCHES = "scripts/benchmarks/bench_solve.py"


class MeasurementError(Exception):
    """A measured process failed; the message ends with what it said."""


def solve_id(case: Case, *, one_thread: bool = False) -> str:
    return f"{_BENCHES}::bench_solve[{case.id}-{'one' if one_thread else 'all'}]"


def paper_table_id(case: Case, choice: str) -> str:
    return f"{_BENCHES}::bench_paper_table[{case.id}-{choice}]"


def run_benchmarks(ids: Sequence[str], environment: Mapping[str, str]) -> list[dict[str, Any]]:
    """Records of pytest-benchmark for the benches named, in this order, all in one process."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        finished = subprocess.run(
            [sys.executable, "-m", "pytest", *_PYTEST_ARGUMENTS, f"--benchmark-json={report}", *ids],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        if finished.returncode != 0:
            raise MeasurementError(f"pytest left with {finished.returncode}:\n{finished.stdout[-4000:]}")
        records: dict[str, dict[str, Any]] = {
            record["fullname"]: record for record in json.loads(report.read_text(encoding="utf-8"))["benchmarks"]
        }
    return [records[name] for name in ids]


def run_command(
    case: Case, environment: Mapping[str, str], *, runs: int = 1, show_log: bool = False
) -> tuple[CommandRun, dict[str, Any]]:
    """``piper-ray solve --json`` on the case, ``runs`` times, and the document it printed last.

    show_log: its progress goes to our stderr.
    """
    walls_s, cpus_s, peaks_bytes = [], [], []
    for _ in range(runs):
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as log:
            wall_s, usage, code = _timed(_command(case), environment, out, None if show_log else log)
            if code not in (EXIT_SOLVED, InfeasibleError.exit_code):
                log.seek(0)
                raise MeasurementError(f"piper-ray left with {code}:\n{log.read().decode(errors='replace')[-4000:]}")
            out.seek(0)
            document: dict[str, Any] = json.load(out)
        walls_s.append(wall_s)
        cpus_s.append(usage.ru_utime + usage.ru_stime)
        peaks_bytes.append(usage.ru_maxrss * _MAXRSS_UNIT_BYTES)
    return CommandRun(runs, statistics.median(walls_s), statistics.median(cpus_s), max(peaks_bytes)), document


def _command(case: Case) -> list[str]:
    arguments = {
        "--devices": str(case.devices),
        "--microbatches": str(case.microbatches),
        "--memory": case.memory,
        "--bandwidth": BANDWIDTH,
    }
    options = [text for pair in arguments.items() for text in pair]
    return [sys.executable, "-m", "piper_ray", "solve", str(case.input), *options, "--json"]


def _timed(
    command: Sequence[str], environment: Mapping[str, str], out: IO[bytes], log: IO[bytes] | None
) -> tuple[float, struct_rusage, int]:
    """Wall time in s, what the process used, exit code.

    Linux counts the parent's memory at the start towards a child's peak, so this process must stay a small one.
    """
    began = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=log)
    try:
        _, status, usage = os.wait4(process.pid, 0)
    except BaseException:
        process.kill()
        process.wait()
        raise
    wall_s = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    return wall_s, usage, process.returncode
