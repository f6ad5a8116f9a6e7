"""Timings inside one process, by pytest-benchmark: the solver at one thread and at all, and the paper's table.

``scripts/bench`` runs these and compares them with the yardsticks. Alone:

    python -m pytest scripts/benchmarks/bench_solve.py -o "python_functions=bench_*" -k resnet50
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from typing import Protocol

import pytest

import piper_ray
from piper_ray.model.events import EvaluationFinished, Event
from piper_ray.model.instance import Instance
from piper_ray.model.options import SolveOptions
from piper_ray.model.solution import Solution
from piper_ray.model.units import parse_bytes, parse_bytes_per_s
from piper_ray.planners.published.paper_table import PaperTableResult, TmpcChoice, paper_table
from scripts.benchmarks.cases import BANDWIDTH, CASES, SMALL, TWINS, Case

TIMED_S = 3.0
"""A case is repeated for about this long, but MOST_ROUNDS times at most."""
MOST_ROUNDS = 15
WARM_UP_LIMIT_S = 5.0


class Benchmark(Protocol):
    """What is used here of pytest-benchmark's fixture."""

    extra_info: dict[str, object]

    def pedantic(self, target: Callable[[], None], *, rounds: int) -> None:
        """Runs ``target`` and keeps the time of each round."""


def load_case(case: Case) -> Instance:
    return piper_ray.load(
        case.input,
        devices=case.devices,
        microbatches=case.microbatches,
        memory_bytes=parse_bytes(case.memory),
        bandwidth_bytes_per_s=parse_bytes_per_s(BANDWIDTH),
    )


@pytest.mark.parametrize("threads", ["one", "all"])
@pytest.mark.parametrize("case_id", CASES)
def bench_solve(benchmark: Benchmark, case_id: str, threads: str) -> None:
    instance = load_case(CASES[case_id])
    options = SolveOptions(threads=1 if threads == "one" else None)
    rounds = _rounds(_warm_up_s(instance, options))
    solutions: list[Solution] = []
    cpus_s: list[float] = []

    def solve() -> None:
        began_s = time.process_time()
        solution = piper_ray.solve(instance, options=options, listener=_tell_of_long_evaluations)
        if solution.stopped_by == "interrupt":
            raise KeyboardInterrupt
        solutions.append(solution)
        cpus_s.append(time.process_time() - began_s)

    benchmark.pedantic(solve, rounds=rounds)
    last = solutions[-1]
    benchmark.extra_info.update(
        kind="solve",
        case=case_id,
        status=last.status.value,
        time_per_sample_s=last.time_per_sample_s,
        threads=last.stats.threads,
        downsets=last.stats.downsets,
        cpu_s=statistics.median(cpus_s),
        lattice_s=statistics.median(solution.stats.lattice_s for solution in solutions),
        stage_costs_s=statistics.median(solution.stats.stage_costs_s for solution in solutions),
        search_s=statistics.median(solution.stats.search_s for solution in solutions),
        evaluations=[dataclasses.asdict(evaluation) for evaluation in last.stats.evaluations],
    )


@pytest.mark.parametrize("choice", [choice.value for choice in TmpcChoice])
@pytest.mark.parametrize("case_id", [twin.case.id for twin in TWINS])
def bench_paper_table(benchmark: Benchmark, case_id: str, choice: str) -> None:
    (twin,) = (twin for twin in TWINS if twin.case.id == case_id)
    instance = load_case(twin.case)
    paper_table(load_case(SMALL), choice=TmpcChoice(choice))
    results: list[PaperTableResult] = []

    def fill() -> None:
        results.append(paper_table(instance, choice=TmpcChoice(choice)))

    benchmark.pedantic(fill, rounds=twin.runs)
    benchmark.extra_info.update(
        kind=choice,
        case=case_id,
        time_per_sample_s=results[-1].time_per_sample_s,
        table_bytes=results[-1].table_bytes,
    )


def _warm_up_s(instance: Instance, options: SolveOptions) -> float:
    """Seconds for the instance with every kernel loaded; cut short when it is a long one."""
    piper_ray.solve(load_case(SMALL))
    began = time.perf_counter()
    first = piper_ray.solve(instance, options=dataclasses.replace(options, time_limit_s=WARM_UP_LIMIT_S))
    if first.stopped_by == "interrupt":
        raise KeyboardInterrupt
    return time.perf_counter() - began


def _rounds(seconds: float) -> int:
    return max(1, min(MOST_ROUNDS, int(TIMED_S / seconds)))


def _tell_of_long_evaluations(event: Event) -> None:
    if isinstance(event, EvaluationFinished) and event.seconds > 1.0:
        answer = "feasible" if event.feasible else "infeasible"
        sys.stderr.write(f"  evaluation {event.index}: {event.threshold_s:.9g} s {answer}, {event.seconds:.1f} s\n")
