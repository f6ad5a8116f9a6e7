"""Subjects measured in processes of their own, in turns on this working tree and on another version."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from piper_ray.model.figures import percent_text, relative_gap
from piper_ray.workloads.formats.load import dump
from scripts.benchmarks.bench_solve import load_case
from scripts.benchmarks.cases import SMALL
from scripts.benchmarks.measure import MeasurementError
from scripts.benchmarks.results import SAME_VALUE
from scripts.benchmarks.runner import Tell
from scripts.benchmarks.subjects import Subject
from scripts.benchmarks.table import seconds, size
from scripts.benchmarks.trees import Tree

_WORKER = Path(__file__).with_name("worker.py").read_text(encoding="utf-8")
SHORT_S, SHORT_RUNS = 5.0, 3
"""Subjects that take less wall time are measured in this many processes of each version."""
BEFORE_LIMIT_S = 100.0
"""Solves of the other version are stopped after this time."""
_COMPILING_RUNS = 3


@dataclass(frozen=True)
class Answer:
    """status: as ``piper_ray.Status``. lower_bound_s: None where there is no plan. Both times per sample."""

    status: str
    time_per_sample_s: float | None
    lower_bound_s: float | None

    @property
    def proved(self) -> bool:
        return self.status in ("optimal", "infeasible")

    @property
    def gap(self) -> float | None:
        if self.time_per_sample_s is None or self.lower_bound_s is None:
            return None
        return relative_gap(self.time_per_sample_s, self.lower_bound_s)

    def agrees(self, other: Answer) -> bool:
        """Whether both can be true of one instance."""
        if "infeasible" in (self.status, other.status):
            return self.time_per_sample_s is None and other.time_per_sample_s is None
        return self._may_reach(other) and other._may_reach(self)

    def _may_reach(self, other: Answer) -> bool:
        if other.time_per_sample_s is None or self.lower_bound_s is None:
            return True
        return self.lower_bound_s <= other.time_per_sample_s * (1.0 + SAME_VALUE)


@dataclass(frozen=True)
class Run:
    """What a subject took, in s: medians over ``rounds`` in all, solved ``processes`` times from a process's start.

    cpu_s: of all threads. peak_bytes: resident memory of the process, the most. listed: downsets that were made. live:
    the most that an evaluation kept states of. evaluations_s: of wall time; lattice_s: with stage costs. refused: why
    nothing was solved, and all else is empty then. commit: of the version. load: of the machine beforehand.
    """

    wall_s: float = 0.0
    cpu_s: float = 0.0
    peak_bytes: int = 0
    rounds: int = 0
    processes: int = 0
    answers: tuple[Answer, ...] = ()
    listed: int = 0
    live: int | None = None
    evaluations: int = 0
    evaluations_s: float | None = None
    lattice_s: float | None = None
    refused: str | None = None
    commit: str = ""
    load: float = 0.0

    @property
    def proved(self) -> bool:
        return bool(self.answers) and all(answer.proved for answer in self.answers)


@dataclass(frozen=True)
class Comparison:
    """A subject on this working tree, and on the other version if there is one.

    forecast_s: CPU seconds that this version expects; None if it expects nothing, or for a frontier. downsets: all of
    them; None where they were not counted.
    """

    subject: str
    this: Run
    before: Run | None = None
    downsets: int | None = None
    forecast_s: float | None = None

    @property
    def faults(self) -> Iterator[str]:
        """Answers that cannot both be true."""
        if self.before is None or not self.before.answers or not self.this.answers:
            return
        for this, before in zip(self.this.answers, self.before.answers, strict=True):
            if not this.agrees(before):
                yield f"{self.subject}: {this} here, {before} before"


@dataclass(frozen=True)
class Compared:
    """All finished comparisons. machine: key and words."""

    machine: dict[str, str]
    rows: list[Comparison] = field(default_factory=list)

    def faults(self) -> Iterator[str]:
        for row in self.rows:
            yield from row.faults


def compare(subjects: Sequence[Subject], trees: Sequence[Tree], results: Compared, tell: Tell) -> None:
    """Fills ``results``, valid whenever it stops. trees: this one, and perhaps another.

    Raises MeasurementError if a process fails.
    """
    with tempfile.TemporaryDirectory(prefix="piper-ray-bench-") as folder:
        warm_up, file = Path(folder) / "warm-up.json", Path(folder) / "subject.json"
        dump(load_case(SMALL), warm_up)
        for number, subject in enumerate(subjects, 1):
            tell(f"[{number}/{len(subjects)}] {subject.title}")
            instance = subject.make()
            dump(instance, file)
            order = {
                "warm_up": str(warm_up),
                "file": str(file),
                "threads": subject.threads,
                "devices": subject.devices,
                "limit_s": subject.limit_s,
                "forecast": False,
            }
            runs = _in_turns(trees, order, tell)
            downsets = forecast_s = None
            if subject.devices is None:
                expected = _worker(trees[0], {**order, "forecast": True})
                downsets, forecast_s = expected.get("downsets"), expected.get("seconds")
            results.rows.append(
                Comparison(subject.id, runs[0], runs[1] if len(runs) > 1 else None, downsets, forecast_s)
            )


def _in_turns(trees: Sequence[Tree], order: dict[str, Any], tell: Tell) -> list[Run]:
    runs: list[list[Run]] = [[] for _ in trees]
    load = os.getloadavg()[0]
    while len(runs[0]) < SHORT_RUNS:
        for tree, done in zip(trees, runs, strict=True):
            limit_s = order["limit_s"] if tree is trees[0] else min(order["limit_s"], BEFORE_LIMIT_S)
            done.append(_run(tree, {**order, "limit_s": limit_s}))
            tell(f"  {tree.name}: {in_words(done[-1])}")
        if max(done[-1].wall_s for done in runs) > SHORT_S or any(done[-1].refused for done in runs):
            break
    return [replace(_medians(done), load=load) for done in runs]


def _run(tree: Tree, order: dict[str, Any]) -> Run:
    """The measured run; repeated if kernels were compiled during it, since then they are on disk."""
    for _ in range(_COMPILING_RUNS):
        kernels = tree.compiled()
        found = _worker(tree, order)
        if tree.compiled() == kernels:
            break
    found.pop("package")
    answers = tuple(Answer(**answer) for answer in found.pop("answers", ()))
    return Run(**found, answers=answers, processes=1, commit=tree.commit)


def _worker(tree: Tree, order: dict[str, Any]) -> dict[str, Any]:
    finished = subprocess.run(
        [sys.executable, "-c", _WORKER, json.dumps(order)],
        cwd=tree.root,
        env=tree.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if finished.returncode != 0:
        raise MeasurementError(f"{tree.name}: a process left with {finished.returncode}:\n{finished.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(finished.stdout)
    if found["package"] != str(tree.root / "piper_ray"):
        raise MeasurementError(f"{tree.name}: the package of {found['package']} ran, not that of {tree.root}")
    return found


def in_words(run: Run) -> str:
    """The run in words, for the waiting user."""
    if run.refused:
        return f"refused: {run.refused}"
    return f"{proof_text(run)}, CPU {seconds(run.cpu_s)}, wall {seconds(run.wall_s)}, {size(run.peak_bytes)}"


def proof_text(run: Run) -> str:
    """What the run proved: "optimal", "gap 0.3 %", "no plan", "no plan found", "93 of 121 points"."""
    if run.refused:
        return "refused"
    if len(run.answers) > 1:
        return f"{sum(answer.proved for answer in run.answers)} of {len(run.answers)} points"
    (answer,) = run.answers
    if answer.gap is not None and not answer.proved:
        return f"gap {percent_text(answer.gap)}"
    return {"infeasible": "no plan", "unknown": "no plan found"}.get(answer.status, answer.status)


def _medians(runs: Sequence[Run]) -> Run:
    return replace(
        runs[-1],
        wall_s=statistics.median(run.wall_s for run in runs),
        cpu_s=statistics.median(run.cpu_s for run in runs),
        peak_bytes=max(run.peak_bytes for run in runs),
        rounds=sum(run.rounds for run in runs),
        processes=len(runs),
    )
