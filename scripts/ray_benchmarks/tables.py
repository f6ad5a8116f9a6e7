"""Results and predictions as tables. Only words: nothing here measures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from scripts.benchmarks.table import Table, seconds, size
from scripts.ray_benchmarks import simulation as events
from scripts.ray_benchmarks.model import CALL_ACROSS_S, CALL_HERE_S, NODES, Constants, crossing, predict
from scripts.ray_benchmarks.results import CHOSEN, LOCAL, ONE, TWO, RayResult

if TYPE_CHECKING:
    from scripts.ray_benchmarks.machines import Checked

_HOUR_HEIGHT, _THREADS = 500, 8
_NEAR = 0.4
"""The time of a bound among the next few levels, relative to one over finished levels; what is known by then excludes
most of it."""

_LEVEL_S = 2e-4
"""Seconds of the solver for a level."""

GOAL_EFFICIENCY, GOAL_SPEED_UP, GOAL_CHOSEN = 0.95, 1.8, 0.95


def tables_of(results: Sequence[RayResult], constants: Constants, workers_per_node: int) -> Iterator[Table]:
    """Times, traffic, the model compared with measurements, and the model of many machines for each case."""
    yield _times(results)
    yield _traffic(results)
    yield _check(results, constants)
    for result in results:
        if result.middle(ONE).batches:
            yield _nodes(result, constants.across(), workers_per_node)


def simulated(constants: Constants, s_per_bound: float) -> Table:
    """An hour's search on one machine, on many: event by event. s_per_bound: of a thread on the hard towers."""
    across = constants.across()
    call_s, batch_s = constants.call_s / 2, across.round_trip_s - CALL_ACROSS_S
    each_way = events.Constants(call_s, call_s, CALL_ACROSS_S / 2, 0.0, batch_s, _LEVEL_S)
    lattice = events.towers_lattice(_HOUR_HEIGHT, s_per_bound, _NEAR * s_per_bound)

    def run(machines: int) -> float:
        return events.Simulation(lattice, machines, _THREADS, _THREADS, each_way).run()

    alone_s = run(1)
    rows = ((str(machines), seconds(run(machines)), f"{alone_s / run(machines):.1f}") for machines in (1, 2, 4, 16, 64))
    return Table(
        f"Model, event by event: an evaluation of two towers of {_HOUR_HEIGHT}",
        f"Machines of {_THREADS} threads, {s_per_bound * 1e6:.2g} us for a bound as measured on the hard towers; a "
        "dozen such evaluations take one machine an hour or so. Goal: 40 times as fast on 64.",
        ("machines", "time", "faster"),
        tuple(rows),
    )


def checked_table(found: Sequence[Checked]) -> Table:
    """The event model compared with real runs."""
    rows = [(str(one.machines), seconds(one.measured_s), seconds(one.modelled_s), f"{one.ratio:.2f}") for one in found]
    return Table(
        "The event model and real runs on machines of one core",
        "An evaluation whose work takes a given time, on sets of Linux namespaces. Goal: within 10 %.",
        ("machines", "measured", "model", "ratio"),
        tuple(rows),
    )


def constants_line(constants: Constants) -> str:
    across = constants.across()
    return (
        f"Constants: a batch's round trip {constants.round_trip_s * 1e3:.2f} ms here, "
        f"{across.round_trip_s * 1e3:.2f} ms to other machines "
        f"(a call takes {CALL_ACROSS_S * 1e3:g} ms instead of {CALL_HERE_S * 1e3:g}); "
        f"{constants.call_s * 1e3:.2f} ms of the driver for each chunk; a table reaches n other machines after "
        f"{constants.fetch_s_per_byte * 1e9:.2f} + {constants.fetch_s_per_byte_and_node * 1e9:.2f} n ns for each byte."
    )


def _times(results: Sequence[RayResult]) -> Table:
    def line(result: RayResult) -> tuple[str, ...]:
        solution, slower = result.runs[LOCAL][0].solution, result.slower_work
        return (
            result.case.title,
            f"{solution.stats.pairs or 0:,}",
            solution.status.value + (", limit" if result.bounded else ""),
            str(result.common_evaluations),
            str(result.case.repeats),
            *(seconds(result.seconds(name)) for name in (LOCAL, ONE, TWO, CHOSEN)),
            _against(result.efficiency, GOAL_EFFICIENCY),
            _against(result.speed_up, GOAL_SPEED_UP),
            _against(result.chosen, GOAL_CHOSEN),
            "-" if slower is None else f"{slower:.2f}",
        )

    header = ("instance", "pairs", "answer", "evaluations", "runs", "local", "1 worker", "2 workers", "if it pays")
    return Table(
        "One local thread, one worker, two",
        "Medians of the search, in turns in one process; where the limit came first, of the evaluations that all "
        f"finished. Goals: local / 1 worker {GOAL_EFFICIENCY}, 1 / 2 workers {GOAL_SPEED_UP}, local / "
        f"two workers where they pay {GOAL_CHOSEN} (never slower); ! marks a miss. "
        "Same work: its time with two workers busy against one; - where the limit came first, or the two did not send "
        "the same levels.",
        (*header, "local / 1", "1 / 2", "local / if", "same work"),
        tuple(map(line, results)),
    )


def _traffic(results: Sequence[RayResult]) -> Table:
    def lines(result: RayResult) -> Iterator[tuple[str, ...]]:
        for name in (ONE, TWO):
            run = result.middle(name)
            levels = run.later_levels
            longest = max((batch.put_bytes for batch in run.batches if not batch.first), default=0)
            yield (
                f"{result.case.title}, {name}",
                f"{len(run.batches):,}",
                f"{sum(batch.levels for batch in run.batches):,}",
                f"{sum(batch.chunks for batch in run.batches):,}",
                size(run.tables_bytes),
                size(run.levels_bytes),
                f"{run.levels_bytes / levels / 1e3:,.1f} kB" if levels else "-",
                f"{longest / 1e3:,.0f} kB",
                f"{run.driver_share:.1%}",
            )

    return Table(
        "What moves",
        "Of the run of median time, all of its evaluations. Each table is put once and fetched once by each other "
        "machine. Driver: its share of the search, while no batch is under way.",
        ("instance", "batches", "levels", "chunks", "tables", "states", "for a level", "largest", "driver"),
        tuple(line for result in results for line in lines(result)),
    )


def _check(results: Sequence[RayResult], constants: Constants) -> Table:
    def lines(result: RayResult) -> Iterator[tuple[str, ...]]:
        one, slower = result.middle(ONE), result.slower_work
        if slower is None:
            return
        for workers, name in ((1, ONE), (2, TWO)):
            measured_s = result.middle(name).search_s
            modelled_s = predict(one, constants, 1, workers, slower if workers == 2 else 1.0).seconds
            yield (
                f"{result.case.title}, {name}",
                seconds(measured_s),
                seconds(modelled_s),
                f"{modelled_s / measured_s:.2f}",
            )

    return Table(
        "The model and what was measured here",
        "The work is measured, with one worker, and for two made slower as it was found to be: what this checks is the "
        "rest. Searches that ended by themselves and sent about the same work.",
        ("instance", "measured", "model", "ratio"),
        tuple(line for result in results for line in lines(result)),
    )


def _nodes(result: RayResult, constants: Constants, workers_per_node: int) -> Table:
    run = result.middle(ONE)
    alone_s = predict(run, constants, 1, 1).seconds
    rows = []
    for nodes in NODES:
        found = predict(run, constants, nodes, workers_per_node)
        faster = alone_s / found.seconds
        rows.append(
            (
                str(nodes),
                f"{found.workers:,}",
                seconds(found.seconds),
                f"{faster:.1f}",
                f"{faster / found.workers:.0%}",
                *(seconds(part) for part in (found.work_s, found.driver_s, found.calls_s, found.fetched_s)),
                f"{found.share:.0%}",
            )
        )
    return Table(
        f"Model: {result.case.title}",
        _crossing(result, constants, workers_per_node),
        ("machines", "workers", "time", "faster", "of ideal", "work", "driver", "calls", "fetches", "communication"),
        tuple(rows),
    )


def _crossing(result: RayResult, constants: Constants, workers_per_node: int) -> str:
    found = crossing(result.middle(ONE), constants, workers_per_node)
    bounded = " As far as the time limit let it come." if result.middle(ONE).bounded else ""
    if found is None:
        return f"Communication and the driver stay below half up to {NODES[-1]} machines.{bounded}"
    machines = "1 machine" if found.nodes == 1 else f"{found.nodes} machines"
    return f"Communication and the driver take more than half from {machines} ({found.workers:,} workers) on.{bounded}"


def _against(value: float, goal: float) -> str:
    return f"{value:.2f}" + ("" if value >= goal else " !")
