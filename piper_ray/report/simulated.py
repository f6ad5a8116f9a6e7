"""A simulation in words: a line for each rank or run of equal ranks, what it comes to, what bounds the step, what is
lost, what memory is left over or missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from rich.console import Console

from piper_ray.model.figures import SHOWN_DIGITS, held_text, plural, share_text, size_scale, time_text
from piper_ray.model.instance import Instance
from piper_ray.model.plan import Plan
from piper_ray.model.schedule import ScheduleName
from piper_ray.report.summary import rates_text
from piper_ray.report.terminal import Column, print_lines, print_table
from piper_ray.simulate.result import RankSimulation, Simulation
from piper_ray.simulate.run import Transfers, simulate
from piper_ray.workloads.estimate.doubt import step_text, workload_doubt

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

_MOST_CHUNKS = 4
"""More would make the column of microbatches in flight too wide."""


def print_simulation(
    console: Console, instance: Instance, simulation: Simulation, most: int | None = None, *, headed: bool = True
) -> None:
    """Prints the simulation at the console's width. most: rows of ranks; None for all. headed: with the schedule and
    the step, where no line above has them."""
    columns = [Column(_HEADS[0]), Column(_HEADS[1], wrap=18), *(Column(head, right=True) for head in _HEADS[2:])]
    print_table(console, columns, list(_rows(simulation)), most)
    if simulation.schedule.v > 1:
        v = simulation.schedule.v
        chunks = "+".join(f"chunk {number}" for number in range(1, v + 1)) if v <= _MOST_CHUNKS else "of all its chunks"
        print_lines(console, [f"in flight: the most microbatches whose activations a rank keeps, {chunks}"])
    console.print()
    lines = summary_lines(instance, simulation)
    print_lines(console, lines if headed else [line.strip() for line in lines[2:]])


def summary_lines(instance: Instance, simulation: Simulation) -> list[str]:
    """The schedule, the step, what was found and what stands for what: a line each."""
    schedule, doubt = simulation.schedule, workload_doubt(instance, simulation.schedule)
    time_s = simulation.time_per_sample_s
    rates = f"{time_text(time_s)}/microbatch, {rates_text(simulation.batch, time_s)}"
    step = step_text(simulation.step_s, doubt)
    lines = [f"{schedule.text}: {_WHAT[schedule.name]}", f"step {step}: {rates}"]
    if not simulation.steady:
        lines[-1] += " (no period was found: the average of a long run)"
    unused = {*_unused(simulation)}  # the table has them
    lines += [f"  {text}" for text in findings(simulation) if text not in unused]
    lines += [f"note: {text}" for text in simulation.notes]
    return lines


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
    scale = size_scale(simulation.peak_memory_bytes, SHOWN_DIGITS)
    unused_bytes = rank.memory_limit_bytes - rank.peak_memory_bytes
    over = unused_bytes < -1e-9 * rank.memory_limit_bytes
    unused = f"over by {held_text(-unused_bytes)}" if over else held_text(max(0.0, unused_bytes))
    in_flight = "+".join(map(str, rank.in_flight if len(rank.in_flight) <= _MOST_CHUNKS else [sum(rank.in_flight)]))
    return [str(rank.devices), *shares, in_flight, scale.with_unit(rank.peak_memory_bytes), unused]


_WORTH_SAYING = 0.01
"""Share of the time from which a loss is shown."""

_NONE = 5e-4
"""Shares below it read as 0.0 %."""

_UNUSED = 0.05
"""Share of a device's memory from which unused memory is shown."""

_ALIKE = 0.1
"""Steps of memory to which unused memory is rounded."""

_MOST_UNUSED = 4

_TOLD_EARLY = 5e-4
"""Share of the step from which the cost of receives that are posted early is shown."""

_UNEVEN = 1.05
"""The busiest rank's time over the average from which the stages are called uneven."""


def findings(simulation: Simulation) -> tuple[str, ...]:
    """Most important first; each a clause without a full stop."""
    return (
        *_promise(simulation),
        *_bound(simulation),
        *_bubble(simulation),
        *_communication(simulation),
        *_missing(simulation),
        *_unused(simulation),
        *_versions(simulation),
    )


def _promise(simulation: Simulation) -> Iterator[str]:
    promised_s, step_s = simulation.promised_s, simulation.step_s
    if promised_s is None or simulation.in_flight is None:
        return
    if simulation.keeps_promise:
        yield f"the promised {time_text(promised_s)} a batch are kept"
        return
    slower = f"{share_text(step_s / promised_s - 1.0)} slower than the promised {time_text(promised_s)} a batch"
    least = simulation.sustaining
    if least is None:
        yield f"{slower}: transfers take too long to hide"
        return
    uneven = len(set(simulation.timeline.layout.replicas)) > 1
    why = "with round-robin replicas " if uneven else ""
    kept = _listed(simulation.in_flight)
    yield f"{slower}: {why}{kept} microbatches in flight do not keep the slowest stage busy"
    more = max(
        stage.activation_bytes * max(0, wanted - held)
        for stage, wanted, held in zip(simulation.stages, least, simulation.in_flight, strict=True)
    )
    yield f"{_listed(least)} in flight would keep the promise, for up to {held_text(more)} more on a device"


def _bound(simulation: Simulation) -> Iterator[str]:
    length_s = simulation.length_s
    if length_s <= 0.0:
        return
    busiest = simulation.ranks[simulation.busiest]
    busy_s = busiest.compute_s + busiest.communication_s
    one = len(busiest.stages) == 1
    bounds, has = ("bounds", "has") if one else ("bound", "have")
    yield f"{busiest.name} {bounds}: busy {share_text(busy_s / length_s)} of the time"
    average_s = sum((r.compute_s + r.communication_s) * r.devices for r in simulation.ranks)
    average_s /= sum(rank.devices for rank in simulation.ranks)
    if average_s > 0.0 and busy_s > _UNEVEN * average_s:
        times = f"{busy_s / average_s:.2f}"
        yield f"ranks are uneven: {busiest.name} {has} {times} times the average work; move layers off it first"


def _bubble(simulation: Simulation) -> Iterator[str]:
    share = simulation.bubble_share
    if share < _NONE:
        return
    places = simulation.timeline.layout.places
    line = f"{share_text(share)} bubble"
    if not simulation.schedule.asynchronous and share >= _WORTH_SAYING:
        ranks = len(set(places))
        chunks = simulation.timeline.microbatches * simulation.schedule.v / max(simulation.timeline.layout.replicas)
        filling = (ranks - 1) / (chunks + ranks - 1)
        if filling >= share / 2:
            shape = f"{plural(ranks, 'rank')}, {simulation.timeline.microbatches:,} microbatches"
            line += (
                f", most of it as the pipeline fills and drains ({shape}): more microbatches or fewer stages shrink it"
            )
    yield line


def _communication(simulation: Simulation) -> Iterator[str]:
    length_s = simulation.length_s
    if length_s <= 0.0:
        return
    devices = sum(rank.devices for rank in simulation.ranks)
    all_reduce_s = [0.0] * len(simulation.ranks)
    for interval in simulation.all_reduces:
        all_reduce_s[interval.rank] = interval.end_s - interval.start_s
    transfers_s = sum(
        (rank.communication_s - hidden_s + rank.waiting_s) * rank.devices
        for rank, hidden_s in zip(simulation.ranks, all_reduce_s, strict=True)
    )
    share = transfers_s / (devices * length_s)
    if share >= _WORTH_SAYING:
        what = "transfers and all-reduce" if simulation.schedule.asynchronous else "transfers"
        yield f"{what} take {share_text(share)} of the ranks' time"
    longest_s = max(all_reduce_s)
    if longest_s >= _WORTH_SAYING * length_s:
        rank = all_reduce_s.index(longest_s)
        yield (
            f"the all-reduce of {simulation.ranks[rank].name} takes {time_text(longest_s)} after its last backward "
            f"pass, {share_text(longest_s / length_s)} of the step"
        )


def _unused_bytes(simulation: Simulation) -> list[float]:
    return [rank.memory_limit_bytes - rank.peak_memory_bytes for rank in simulation.ranks]


def _missing(simulation: Simulation) -> Iterator[str]:
    limit_bytes, unused = simulation.memory_limit_bytes, _unused_bytes(simulation)
    for short, ranks in _runs([x < -1e-9 * limit_bytes for x in unused]):
        if short:
            yield f"{held_text(-min(unused[rank] for rank in ranks))} too little memory on {ranks_text(ranks)}"


def _unused(simulation: Simulation) -> Iterator[str]:
    """The largest amounts, of neighbouring ranks with about as much."""
    limit_bytes, unused = simulation.memory_limit_bytes, _unused_bytes(simulation)
    alike = [
        (min(unused[rank] for rank in ranks), ranks)
        for step, ranks in _runs(
            [int(x / (_ALIKE * limit_bytes)) if x >= _UNUSED * limit_bytes else -1 for x in unused]
        )
        if step >= 0
    ]
    largest = sorted(alike, key=lambda found: -found[0] * len(found[1]))[:_MOST_UNUSED]
    for size, ranks in sorted(largest, key=lambda found: found[1]):
        yield f"{held_text(size)} unused on {ranks_text(ranks)}"


def _versions(simulation: Simulation) -> Iterator[str]:
    kept = [rank.versions for rank in simulation.ranks]
    known = [versions for versions in kept if versions is not None]
    if not known:
        return

    def most_bytes(numbers: Sequence[int]) -> float:
        return max(
            number * simulation.stages[rank.stages[0]].weights_bytes
            for number, rank in zip(numbers, simulation.ranks, strict=True)
        )

    stashed = [versions.stashed for versions in known]
    synced = [versions.vertical_sync for versions in known]
    yield (
        f"weight stashing keeps {_spread(stashed)} versions of the weights, up to {held_text(most_bytes(stashed))}; "
        f"vertical sync {_spread(synced)}, up to {held_text(most_bytes(synced))}; the peaks have those of "
        + ("vertical sync" if simulation.options.vertical_sync else "stashing")
    )


def _runs(values: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    for value, group in groupby(range(len(values)), key=values.__getitem__):
        yield value, list(group)


def ranks_text(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 3-5``."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"


def _spread(numbers: Sequence[int]) -> str:
    return f"{min(numbers)}" if min(numbers) == max(numbers) else f"{min(numbers)} to {max(numbers)}"


def _listed(numbers: Sequence[int]) -> str:
    shown = [str(number) for number in numbers]
    return ", ".join(shown if len(shown) <= 12 else [*shown[:6], "...", *shown[-5:]])


def overlapped_text(instance: Instance, plan: Plan, simulation: Simulation) -> str:
    """What a step takes where transfers overlap with passes, as Megatron's interleaved schedule has it."""
    default_s, flagged_s = (
        simulate(instance, plan, simulation.schedule, options=replace(simulation.options, transfers=how)).step_s
        for how in (Transfers.OVERLAPPED_STEADY, Transfers.OVERLAPPED)
    )
    default, flagged = time_text(default_s, 3), time_text(flagged_s, 3)
    return (
        "the step and any bound count transfers between stages in full; Megatron makes them during passes, except in "
        f"warm-up and flush, and so takes {default} (modelled)"
        + (f", {flagged} with --overlap-p2p-communication-warmup-flush" if flagged != default else "")
    )


def early_receives_text(instance: Instance, plan: Plan, simulation: Simulation) -> str:
    """What a step takes where torch's own order posts receives early, and not the lists that are exported; empty where
    that is the same."""
    options = replace(simulation.options, transfers=Transfers.ONE_STREAM)
    early_s = simulate(instance, plan, simulation.schedule, options=options).step_s
    longer = early_s / simulation.step_s - 1.0
    if longer < _TOLD_EARLY:
        return ""
    return (
        "are posted in time by the exported list; torch's own order posts them early, which delays other transfers on "
        f"NCCL's one stream: {time_text(early_s, 3)} a step, {100.0 * longer:.1f} % longer (modelled)"
    )
