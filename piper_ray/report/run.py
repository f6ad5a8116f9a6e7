"""A run in words and as JSON: the measured step and the promised one, and each rank's share of both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from rich.console import Console

from piper_ray.model.cores import load_text
from piper_ray.model.fields import plain_fields
from piper_ray.model.figures import Scale, plural, size_scale, size_text, time_scale, time_text
from piper_ray.model.instance import Batch
from piper_ray.report.summary import batch_text, rates_text
from piper_ray.report.terminal import Column, print_lines, print_table
from piper_ray.run.job import Run
from piper_ray.version import __version__

_HEADS = ("rank", "stages", "compute", "waiting", "gradients", "optimizer", "peak memory")
_ROUNDED = 1e-12


@dataclass(frozen=True)
class RankShare:
    """What a rank does with a step, in s, and the most bytes that it holds.

    waiting_s: all that is left, transfers included. gradients_s: their sum over replicas.
    """

    compute_s: float
    waiting_s: float
    gradients_s: float
    optimizer_s: float
    peak_memory_bytes: float


def measured_share(run: Run, rank: int) -> RankShare:
    """How a rank spent the shown step."""
    found = run.ranks[rank]
    return RankShare(
        found.compute_s, run.waiting_s(rank), found.all_reduce_s, found.optimizer_s, found.peak_memory_bytes
    )


def promised_share(run: Run, rank: int) -> RankShare | None:
    """How a rank spends the simulated step; None where there is none. Replicas of a place are promised the same."""
    simulation = run.simulation
    if simulation is None:
        return None
    measured, layout = run.ranks[rank], simulation.timeline.layout
    number = layout.first_rank[measured.stages[0]] + measured.replica // layout.lanes  # a lane's stands for all
    found = simulation.ranks[number]
    steps = simulation.step_s / (simulation.window_s[1] - simulation.window_s[0])
    sums = simulation.all_reduces[number] if simulation.all_reduces else None
    gradients_s, optimizer_s = 0.0 if sums is None else sums.end_s - sums.start_s, simulation.options.optimizer_s
    compute_s = found.compute_s * steps - optimizer_s
    waiting_s = simulation.step_s - compute_s - gradients_s - optimizer_s
    waiting_s = 0.0 if abs(waiting_s) < _ROUNDED * simulation.step_s else waiting_s
    return RankShare(compute_s, waiting_s, gradients_s, optimizer_s, found.peak_memory_bytes)


def print_run(console: Console, run: Run) -> None:
    """Prints the run at the console's width."""
    print_lines(console, head_lines(run))
    console.print()
    columns = [Column(_HEADS[0]), Column(_HEADS[1]), Column(""), *(Column(head, right=True) for head in _HEADS[2:])]
    print_table(console, columns, list(_rows(run)))
    console.print()
    print_lines(console, summary_lines(run))


def head_lines(run: Run) -> list[str]:
    """What was run."""
    job = run.job
    if len(set(job.degrees)) > 1:
        replicas = f" of {', '.join(map(str, job.degrees))} replicas in turn"
    else:
        replicas = f" x {plural(job.replicas, 'replica')} ({job.sharing.value})" if job.replicas > 1 else ""
    synced = ", vertical sync" if job.vertical_sync else ""
    batch = Batch(job.microbatches, job.microbatch)
    each = f"{len(run.ranks)} on {run.device}, {plural(run.threads, 'thread')} each"
    return [
        f"Model     {job.model}",
        f"Ranks     {each}: {plural(len(job.stages), 'stage')}{replicas}, {job.schedule.text}{synced}",
        f"Batch     {batch_text(batch)}",
        *([] if run.load is None else [f"Machine   {load_text(run.load)}"]),
    ]


def summary_lines(run: Run) -> list[str]:
    """Steps against the promise, losses, and what stands for what."""
    steps_s, job = run.steps_s, run.job
    batch = Batch(job.microbatches, job.microbatch)
    spread = ""
    if len(steps_s) > 1:
        spread = f", {time_text(min(steps_s), 4)} to {time_text(max(steps_s), 4)}, spread {time_text(run.spread_s, 3)}"
    rates = rates_text(batch, run.step_s / job.microbatches)
    lines = [f"step {time_text(run.step_s, 4)} (median of {plural(len(steps_s), 'step')}{spread}): {rates}"]
    if run.promised_s is not None:
        lines.append(f"promised {time_text(run.promised_s, 4)}: measured {_against(run.step_s, run.promised_s)}")
        share = optimizer_share_s(run)
        if share is not None:
            lines.append(f"  of it the optimizer's {time_text(share, 4)}, which the promise leaves out")
    lines.append(f"loss {run.losses[0]:.6g} in the first step, {run.losses[-1]:.6g} in the last of {len(run.losses)}")
    if run.is_bare:
        lines.append("weights were drawn anew on each rank, as the whole model takes more than half of the memory")
    if job.schedule.asynchronous:
        held = ", ".join(str(rank.versions) for rank in run.ranks)
        lines.append(f"versions of the weights on each rank, at most: {held}")
    border_bytes = max(rank.border_bytes for rank in run.ranks)
    if border_bytes > 0:
        lines.append(
            f"note: torch keeps room to receive all microbatches of a batch: up to {size_text(border_bytes, 3)} of a "
            "rank's memory, not in the promise"
        )
    measured = run.measured_threads
    if job.device == "cpu" and measured is not None and measured != run.threads:
        lines.append(
            f"note: the plan's times were measured with {plural(measured, 'thread')}, and each rank had {run.threads}: "
            f"OMP_NUM_THREADS={run.threads} piper-ray profile measures times for such ranks"
        )
    return lines


def optimizer_share_s(run: Run) -> float | None:
    """The longest optimizer's step of a rank, where the promise has none."""
    if run.simulation is not None and run.simulation.options.optimizer_s > 0.0:
        return None
    return max(rank.optimizer_s for rank in run.ranks)


def _against(measured: float, promised: float) -> str:
    if promised <= 0.0:
        return "longer"
    percent = 100.0 * (measured / promised - 1.0)
    return f"{abs(percent):.1f} % {'longer' if percent >= 0.0 else 'shorter'}"


def _rows(run: Run) -> Iterator[list[str]]:
    shares = [(measured_share(run, rank), promised_share(run, rank)) for rank in range(len(run.ranks))]
    there = [share for pair in shares for share in pair if share is not None]
    seconds = time_scale(max([run.step_s, *(share.compute_s for share in there)]), 4)
    sizes = size_scale(max(share.peak_memory_bytes for share in there))
    for rank, (measured, promised) in enumerate(shares):
        stages = ", ".join(str(stage + 1) for stage in run.ranks[rank].stages)
        yield [str(rank), stages, "measured", *_cells(measured, seconds, sizes)]
        if promised is not None:
            yield ["", "", "promised", *_cells(promised, seconds, sizes)]


def _cells(share: RankShare, seconds: Scale, sizes: Scale) -> list[str]:
    times_s = (share.compute_s, share.waiting_s, share.gradients_s, share.optimizer_s)
    return [
        *map(seconds.with_unit, times_s),
        sizes.with_unit(share.peak_memory_bytes),
    ]


_OF_RUN = ("device", "threads", "measured_threads", "load", "step_s", "spread_s", "steps_s", "promised_s", "losses")


def run_document(run: Run) -> dict[str, object]:
    """Everything but the passes: the trace has those. Times in s, sizes in bytes."""
    job = run.job
    return {
        "schema": "piper-ray/run",
        "schema_version": 1,
        "tool_version": __version__,
        "model": job.model,
        **job.schedule.to_dict(),
        "stages": len(job.stages),
        "replicas": list(job.degrees) if len(set(job.degrees)) > 1 else job.replicas,
        "sharing": job.sharing.value,
        "microbatches": job.microbatches,
        "samples_per_microbatch": job.microbatch,
        **plain_fields(run, _OF_RUN),
        "ranks": [_rank_document(run, rank) for rank in range(len(run.ranks))],
    }


def _rank_document(run: Run, rank: int) -> dict[str, object]:
    found, promised = run.ranks[rank], promised_share(run, rank)
    return {
        "stages": [stage + 1 for stage in found.stages],
        "replica": found.replica,
        "measured": vars(measured_share(run, rank)),
        "promised": None if promised is None else vars(promised),
        "passes_median_s": {what: median(times_s) for what, times_s in sorted(_passes(run, rank).items())},
        **plain_fields(found, ("border_bytes", "versions")),
    }


def _passes(run: Run, rank: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for one in run.ranks[rank].stretches:
        if one.stage is not None and one.microbatch is not None:
            found.setdefault(f"{one.what} stage {one.stage + 1}", []).append(one.duration_s)
    return found
