"""The lines around the tables: the instance before a solve, the outcome after it."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from piper_ray.model.cluster import Cluster
from piper_ray.model.figures import (
    PROOF_TOLERANCE,
    given_size_text,
    memory_text,
    percent_text,
    plural,
    printable,
    relative_gap,
    size_above,
    size_text,
    time_text,
)
from piper_ray.model.instance import Instance
from piper_ray.model.schedule import CHUNKED, Schedule
from piper_ray.model.solution import BlockStats, ClusterStats, Infeasibility, Solution, SolveStats, Status
from piper_ray.report.speed import batch_text, rates_text, speed_text
from piper_ray.simulate.result import Simulation

_AS_CLAIMED = 1e-6
"""Relative. A long run's average ends up to so far from what it comes to."""

_STYLES = {Status.OPTIMAL: "bold green", Status.FEASIBLE: "bold yellow"}


def instance_lines(instance: Instance) -> list[str]:
    """What is to be planned and on what: two lines."""
    name = f"{printable(instance.name)}: " if instance.name else ""
    degrees = ", ".join(str(degree) for degree in instance.degrees)
    workload = (
        f"Workload  {name}{plural(len(instance.layers), 'layer')}, {plural(len(instance.edges), 'edge')}, "
        f"tensor-parallel degrees {degrees or 'none'}"
    )
    cluster = (
        f"Cluster   K = {instance.devices:,} devices, N = {batch_text(instance.batch)}, "
        f"M = {memory_text(instance.memory_bytes)}, B = {links_text(instance.cluster)}"
    )
    return [workload, cluster]


def links_text(cluster: Cluster) -> str:
    """``85 GB/s, 702 GB/s within 8``."""
    *inner, outermost = cluster.links
    found = [f"{given_size_text(outermost.bandwidth_bytes_per_s)}/s"]
    found += [f"{given_size_text(link.bandwidth_bytes_per_s)}/s within {link.devices}" for link in reversed(inner)]
    return ", ".join(found)


def cost_text(instance: Instance, time_per_sample_s: float, devices: int) -> str:
    """``703.591 us/microbatch, 2048 of 2048 devices``."""
    return f"{time_text(time_per_sample_s)}/microbatch, {devices} of {instance.devices} devices"


def print_speed(console: Console, instance: Instance, time_per_sample_s: float) -> None:
    """``speed: 1421.28 microbatches/s, 1.35090 s/step``: the line after the plan's cost."""
    console.print(f"speed: {speed_text(instance.batch, time_per_sample_s)}", soft_wrap=True)


def schedule_line(schedule: Schedule, most_chunks: int | None = None) -> str:
    """Which schedule a plan is for, and what its time assumes. most_chunks: where their number is looked for."""
    text = schedule.text
    if most_chunks is not None:
        text = f"{schedule.name.value}, 1 to {most_chunks} chunks a rank"
    return f"Schedule  {text}: {schedule.assumption}"


def print_simulated(console: Console, instance: Instance, solution: Solution, simulation: Simulation) -> None:
    """A line that puts together what a step takes: ``step: promised 4.1 s, bound 4.1 s, simulated 4.2 s, gap 2.38 %``.

    The gap is that of the simulated step. Further lines say what is behind a difference.
    """
    batch, claimed_s, found_s = instance.batch, solution.time_per_sample_s, simulation.time_per_sample_s
    if claimed_s is None:
        return
    kept = found_s <= claimed_s * (1.0 + _AS_CLAIMED)
    gap = solution.gap or 0.0 if kept else relative_gap(found_s, solution.lower_bound_s)
    close = percent_text(gap) if gap <= PROOF_TOLERANCE else f"{100.0 * gap:.3g} %"
    promised, bound, simulated = (time_text(batch.step_s(x)) for x in (claimed_s, solution.lower_bound_s, found_s))
    console.print(f"step: promised {promised}, bound {bound}, simulated {simulated}, gap {close}", soft_wrap=True)
    if solution.plan is not None and solution.plan.in_flight is not None:
        listed = ", ".join(map(str, solution.plan.in_flight))
        console.print(f"sustained by replicas that take turns, with {listed} in flight")
    if not kept:
        console.print(f"simulated speed: {rates_text(batch, found_s)}", soft_wrap=True)
        console.print(_unkept_text(simulation, found_s / claimed_s - 1.0))


def _unkept_text(simulation: Simulation, slower: float) -> str:
    """Why an asynchronous plan does not keep its promise, and what would."""
    if len({stage.data_parallel_degree for stage in simulation.stages}) > 1:
        why = "stages differ in d, replicas take turns, and ceil(s / d) in flight leave the slowest stage idle"
    else:
        why = "passes and transfers wait for each other"
    text = f"{percent_text(slower)} slower than promised: {why}"
    if simulation.sustaining is None:
        return text
    kept = ", ".join(map(str, simulation.sustaining))
    return f"{text}; {kept} in flight would do (--sustained plans so, with the memory that it takes)"


def print_outcome(console: Console, instance: Instance, solution: Solution) -> None:
    """The status with what is proved: the last lines of a solve."""
    status = solution.status
    stopped = f" ({solution.stopped_by})" if solution.stopped_by is not None else ""
    plan, time_per_sample_s = solution.plan, solution.time_per_sample_s
    if plan is not None and time_per_sample_s is not None and solution.gap is not None:
        line = Text(f"{status.value}{stopped}", style=_STYLES.get(status, ""))
        devices = plan.by_rank(solution.schedule).devices
        cost = cost_text(instance, time_per_sample_s, devices)
        line.append(f": {cost}, gap {percent_text(solution.gap)}", style="default")
        console.print(line, soft_wrap=True)
        print_speed(console, instance, time_per_sample_s)
        if solution.gap > PROOF_TOLERANCE:
            console.print(f"no plan is faster than {time_text(solution.lower_bound_s)}/microbatch", soft_wrap=True)
    elif solution.infeasibility is not None:
        print_infeasibility(console, solution.infeasibility)
    else:
        console.print(
            f"{status.value}{stopped}: no plan found so far; none is faster than "
            f"{time_text(solution.lower_bound_s)}/microbatch",
            soft_wrap=True,
        )
    if solution.blocks is not None:
        console.print(_best_of_blocks_text(solution.blocks), soft_wrap=True)
    console.print(_work_text(solution), soft_wrap=True)
    if solution.stats.cluster is not None:
        for text in cluster_lines(solution.stats.cluster, solution.stats.search_s):
            console.print(text, soft_wrap=True)


def blocks_text(blocks: BlockStats) -> str:
    """What was given up when layers were merged into blocks."""
    before = "more than can be counted" if blocks.downsets_before is None else f"{blocks.downsets_before:,}"
    dropped = f", {blocks.choices_dropped:,} combinations of TMPCs left out" if blocks.choices_dropped else ""
    return (
        f"{blocks.layers:,} layers in {blocks.blocks:,} blocks: {blocks.downsets:,} downsets instead of {before}; the "
        f"largest block has {percent_text(blocks.largest_share)} of the work or memory{dropped}"
    )


def _best_of_blocks_text(blocks: BlockStats) -> str:
    if blocks.time_per_sample_s is None:
        best = "no plan of whole blocks was found; one that cuts through them may still exist"
    elif blocks.proved:
        best = f"no plan of whole blocks is faster than {time_text(blocks.time_per_sample_s)}/microbatch"
    else:
        best = f"a plan of whole blocks takes {time_text(blocks.time_per_sample_s)}/microbatch"
    return f"{blocks_text(blocks)}; {best}"


def print_infeasibility(console: Console, infeasibility: Infeasibility) -> None:
    """Why there is no plan, and the least memory that would change that; without a figure the reason says it all."""
    line = Text("infeasible", style="bold red")
    line.append(f": {printable(infeasibility.reason)}", style="default")
    console.print(line, soft_wrap=True)
    least = infeasibility.least_memory_bytes
    if least is not None:
        console.print(
            f"least memory per device with a plan: {size_text(least, 6)} (--memory {size_above(least)})", soft_wrap=True
        )


def cluster_lines(cluster: ClusterStats, search_s: float) -> list[str]:
    """What a cluster did and what moved: a line for all, and one for each machine."""
    if not cluster.batches:
        return [f"cluster: nothing was sent{f': {cluster.unused}' if cluster.unused else ''}"]
    share = 1.0 - cluster.waited_s / search_s if search_s > 0 else 0.0
    of_all = (
        f"cluster: {plural(cluster.workers, 'worker')}, {plural(cluster.chunks, 'chunk')} in "
        f"{cluster.batches:,} batches; put {size_text(cluster.put_bytes)}; "
        f"driver's own share {percent_text(max(0.0, share))}"
    )
    of_nodes = [
        f"  {node.host}: {plural(node.chunks, 'chunk')}, fetched {size_text(node.fetched_bytes)}, "
        f"held {size_text(node.held_bytes)}"
        for node in cluster.nodes
    ]
    return [of_all, *of_nodes]


def _work_text(solution: Solution) -> str:
    stats = solution.stats
    total_s = stats.lattice_s + stats.stage_costs_s + stats.search_s
    return (
        f"{total_s:.2f} s: lattice {stats.lattice_s:.2f} s, stage costs {stats.stage_costs_s:.2f} s, "
        f"search {stats.search_s:.2f} s {_looked_at_text(stats, solution.schedule)}"
    )


def _looked_at_text(stats: SolveStats, schedule: Schedule) -> str:
    if stats.degrees is None:
        return f"in {plural(len(stats.evaluations), 'evaluation')}"
    return f"in {stats.degrees.searched:,} of {_pairs_text(stats.degrees.pairs, schedule)}"


def _pairs_text(count: int, schedule: Schedule) -> str:
    if schedule.name in CHUNKED:
        return f"{plural(count, 'choice')} of degrees, ranks and chunks"
    return f"{plural(count, 'pair')} of degrees"
