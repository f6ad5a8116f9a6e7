"""A simulation for a person: a line for each rank or run of equal ranks, what it comes to, and what was found."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from rich.console import Console

from piper_ray.model.figures import share_text, size_scale, size_text, time_text
from piper_ray.model.schedule import ScheduleName
from piper_ray.report.layout import Column, print_lines, print_table
from piper_ray.report.simulation.findings import findings
from piper_ray.report.speed import rates_text
from piper_ray.simulate.result import RankSimulation, Simulation

_WHAT = {
    ScheduleName.TWO_BW: "asynchronous 1F1B with two versions of the weights: never drained, updates a batch late",
    ScheduleName.PIPEDREAM: "asynchronous 1F1B with stashed weights: never drained, an update for each microbatch",
    ScheduleName.GPIPE: "all forward passes, all backward passes, then a flush",
    ScheduleName.ONE_F_ONE_B: "one forward, one backward pass in turn, then a flush",
    ScheduleName.INTERLEAVED: "chunks in turn, one forward, one backward pass, then a flush",
    ScheduleName.LOOPED_BFS: "all microbatches chunk by chunk, forth and back, then a flush",
    ScheduleName.ZB_H1: "1F1B whose gradients of weights fill the bubble, then a flush",
    ScheduleName.ZB_V: "two chunks in a V whose gradients of weights fill the bubble, then a flush",
    ScheduleName.DUALPIPE_V: "two chunks in a V, forward of one with backward of the other, then a flush",
}

_HEADS = ("rank", "stages", "devices", "compute", "comm.", "waiting", "bubble", "in flight", "peak memory", "unused")


def print_simulation(console: Console, simulation: Simulation) -> None:
    """At the console's width."""
    columns = [Column(_HEADS[0]), Column(_HEADS[1], wrap=24), *(Column(head, right=True) for head in _HEADS[2:])]
    print_table(console, columns, list(_rows(simulation)))
    console.print()
    print_lines(console, summary_lines(simulation))


def summary_lines(simulation: Simulation) -> list[str]:
    """The schedule, the step, what was found and what stands for what: a line each."""
    schedule = simulation.schedule
    lines = [f"{schedule.text}: {_WHAT[schedule.name]}", f"step {time_text(simulation.step_s)}: {_rates(simulation)}"]
    if not simulation.steady:
        lines[-1] += " (no period was found: the average of a long run)"
    lines += [f"  {text}" for text in findings(simulation)]
    lines += [f"note: {text}" for text in simulation.notes]
    return lines


def _rates(simulation: Simulation) -> str:
    time_s = simulation.time_per_sample_s
    return f"{time_text(time_s)}/microbatch, {rates_text(simulation.batch, time_s)}"


def _rows(simulation: Simulation) -> Iterator[list[str]]:
    """Neighbouring ranks whose figures read alike share a line, their stages as a range."""
    cells = [_cells(simulation, rank) for rank in simulation.ranks]
    for _, group in groupby(range(len(cells)), key=lambda number: cells[number]):
        numbers = list(group)
        first, last = simulation.ranks[numbers[0]], simulation.ranks[numbers[-1]]
        stages = ", ".join(
            str(a + 1) if a == b else f"{min(a, b) + 1}-{max(a, b) + 1}"
            for a, b in zip(first.stages, last.stages, strict=True)
        )
        ranks = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
        yield [ranks, stages, *cells[numbers[0]]]


def _cells(simulation: Simulation, rank: RankSimulation) -> list[str]:
    length_s = simulation.length_s
    parts_s = (rank.compute_s, rank.communication_s, rank.waiting_s, rank.bubble_s)
    shares = [share_text(seconds / length_s) if length_s > 0 else "-" for seconds in parts_s]
    scale = size_scale(simulation.peak_memory_bytes)
    unused_bytes = simulation.memory_limit_bytes - rank.peak_memory_bytes
    over = unused_bytes < -1e-9 * simulation.memory_limit_bytes
    unused = f"over by {size_text(-unused_bytes, 3)}" if over else size_text(max(0.0, unused_bytes), 3)
    in_flight = "+".join(str(count) for count in rank.in_flight)
    return [str(rank.devices), *shares, in_flight, scale.with_unit(rank.peak_memory_bytes), unused]
