"""The results of the measurements, and what must hold of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from scripts.benchmarks.cases import Row, Twin

SAME_VALUE = 1e-9
"""Relative difference below which two times per sample are the same."""


@dataclass(frozen=True)
class Timing:
    """Solves in one process, kernels loaded. Times are medians over ``runs``, in s.

    total_s: of the whole call; lattice_s, stage_costs_s and search_s are its steps. cpu_s: of all threads; on a busy
    machine it says more than the wall time. evaluations: the last run's, each with its figures.
    """

    threads: int
    runs: int
    total_s: float
    cpu_s: float
    lattice_s: float
    stage_costs_s: float
    search_s: float
    status: str
    time_per_sample_s: float | None
    downsets: int
    evaluations: tuple[Mapping[str, Any], ...]

    @property
    def answer(self) -> str:
        """The answer in words, for the waiting user."""
        if self.time_per_sample_s is None:
            return self.status
        return f"{self.time_per_sample_s} s per sample ({self.status})"

    @classmethod
    def of_benchmark(cls, record: Mapping[str, Any]) -> Timing:
        """From one benchmark in pytest-benchmark's JSON."""
        info = record["extra_info"]
        return cls(
            threads=info["threads"],
            runs=record["stats"]["rounds"],
            total_s=record["stats"]["median"],
            cpu_s=info["cpu_s"],
            lattice_s=info["lattice_s"],
            stage_costs_s=info["stage_costs_s"],
            search_s=info["search_s"],
            status=info["status"],
            time_per_sample_s=info["time_per_sample_s"],
            downsets=info["downsets"],
            evaluations=tuple(info["evaluations"]),
        )

    @classmethod
    def of_document(cls, document: Mapping[str, Any], cpu_s: float) -> Timing:
        """From what ``piper-ray solve --json`` says of its one run, and the CPU time of that process."""
        stats = document["stats"]
        return cls(
            threads=stats["threads"],
            runs=1,
            total_s=stats["lattice_s"] + stats["stage_costs_s"] + stats["search_s"],
            cpu_s=cpu_s,
            lattice_s=stats["lattice_s"],
            stage_costs_s=stats["stage_costs_s"],
            search_s=stats["search_s"],
            status=document["status"],
            time_per_sample_s=document["time_per_sample_s"],
            downsets=stats["downsets"],
            evaluations=tuple(stats["evaluations"]),
        )


@dataclass(frozen=True)
class CommandRun:
    """The whole command, from start to exit, compiled kernels on disk.

    wall_s, cpu_s: medians over ``runs``; peak_bytes: resident memory, the largest.
    """

    runs: int
    wall_s: float
    cpu_s: float
    peak_bytes: int


@dataclass(frozen=True)
class RowResult:
    row: Row
    timing: Timing
    command: CommandRun
    one_thread: Timing | None = None

    @property
    def verdict(self) -> str:
        """Our value against the known one; in capitals when it is wrong."""
        value, known = self.timing.time_per_sample_s, self.row.known_s
        if not self.row.has_plan:
            return "equal" if self.timing.status == "infeasible" else "AT ODDS"
        if value is None or self.timing.status != "optimal":
            return "NOT PROVED"
        if known is None:
            return "-"
        if value > known and not _same(value, known):
            return "WORSE"
        if self.row.known_is_bound:
            return "within"
        return "equal" if _same(value, known) else "better"


@dataclass(frozen=True)
class PaperTable:
    """The paper's table, filled on one thread. seconds: wall time, median over ``runs``."""

    runs: int
    seconds: float
    time_per_sample_s: float | None
    table_bytes: int

    @classmethod
    def of_benchmark(cls, record: Mapping[str, Any]) -> PaperTable:
        """From one benchmark in pytest-benchmark's JSON."""
        info = record["extra_info"]
        return cls(
            runs=record["stats"]["rounds"],
            seconds=record["stats"]["median"],
            time_per_sample_s=info["time_per_sample_s"],
            table_bytes=info["table_bytes"],
        )


@dataclass(frozen=True)
class TwinResult:
    """Our solver on one thread and the paper's table, one after the other in one process."""

    twin: Twin
    ours: Timing
    greedy: PaperTable
    exact: PaperTable

    @property
    def verdict(self) -> str:
        """The exact table must say what we say, the greedy one no less; in capitals when they do not."""
        ours, exact, greedy = (
            math.inf if found.time_per_sample_s is None else found.time_per_sample_s
            for found in (self.ours, self.exact, self.greedy)
        )
        if not _same(ours, exact) or (greedy < ours and not _same(greedy, ours)):
            return "AT ODDS"
        return "equal" if _same(greedy, ours) else "greedy is above"


def _same(left: float, right: float) -> bool:
    return math.isclose(left, right, rel_tol=SAME_VALUE)


@dataclass(frozen=True)
class Compilation:
    """The command on a small instance: with no compiled kernel on disk, and again with all of them."""

    cold_s: float
    warm_s: float


@dataclass
class Results:
    """What is finished so far. machine: key and words, to print above the tables."""

    machine: dict[str, str]
    compilation: Compilation | None = None
    rows: list[RowResult] = field(default_factory=list)
    twins: list[TwinResult] = field(default_factory=list)

    def faults(self) -> Iterator[str]:
        """Answers that are wrong. A missed time is none: that is for the reader to judge."""
        for result in self.rows:
            if result.verdict.isupper():
                yield f"{result.row.case.title}: {result.timing.answer} is {result.verdict}"
        for twin in self.twins:
            if twin.verdict.isupper():
                yield f"{twin.twin.case.title}: the solver and the paper's table are at odds"
