"""A plan in words: the instance before a solve; which layers run where, and where each stage's time and memory go; the
outcome, and how fast it is in the user's own units.

The planner's sample is a microbatch, so its times are said as those of a microbatch.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from piper_ray.cost.tolerances import MEMORY_TOLERANCE
from piper_ray.evaluate import Evaluation, StageEvaluation
from piper_ray.model.cluster import Cluster, DeviceKind
from piper_ray.model.figures import (
    NEAR_DIGITS,
    PROOF_TOLERANCE,
    given_size_text,
    least_text,
    memory_text,
    percent_text,
    plural,
    printable,
    range_text,
    relative_gap,
    rounded,
    size_above,
    size_scale,
    size_text,
    time_scale,
    time_text,
)
from piper_ray.model.instance import Batch, Instance
from piper_ray.model.plan import Plan, Stage
from piper_ray.model.plan_rules import stage_borders
from piper_ray.model.schedule import CHUNKED, PAPERS_SCHEDULE, Schedule
from piper_ray.model.solution import BlockStats, ClusterStats, Infeasibility, Solution, Status
from piper_ray.report.terminal import (
    NO_BREAK,
    Column,
    draws_blocks,
    left_out_text,
    print_lines,
    print_table,
    shortened,
    table_lines,
)

if TYPE_CHECKING:
    from piper_ray.simulate.result import Simulation
    from piper_ray.workloads.estimate.doubt import Doubt

_AS_CLAIMED = 1e-6
"""Relative. A long run's average ends up to so far from what it comes to."""

_STYLES = {Status.OPTIMAL: "bold green", Status.FEASIBLE: "bold yellow"}


def instance_lines(instance: Instance) -> list[str]:
    """What is to be planned and on what: two lines, and one for each kind of devices where there are several."""
    name = f"{printable(instance.name)}: " if instance.name else ""
    degrees = ", ".join(str(degree) for degree in instance.degrees)
    workload = (
        f"Workload  {name}{plural(len(instance.layers), 'layer')}, {plural(len(instance.edges), 'edge')}, "
        f"tensor-parallel degrees {degrees or 'none'}"
    )
    head = f"Cluster   K = {instance.devices:,} devices, N = {batch_text(instance.batch)}"
    kinds, sites = instance.cluster.kinds, instance.cluster.sites
    between = given_size_text(instance.cluster.between_bytes_per_s or 0.0)
    if not kinds:
        own = f"{head}, M = {memory_text(instance.memory_bytes)}, B = {links_text(instance.cluster)}"
        if not sites:
            return [workload, own]
        each = f"{instance.devices // len(sites):,} devices and pipelines of its own at each, B = {between}/s between"
        return [workload, own, f"Sites     {printable(instance.cluster.sites_text)}: {each}"]
    label = f"{instance.kind_word.capitalize():10}"
    of_kinds = [
        f"{label}{printable(x.name)}: K = {x.cluster.devices:,}, M = {memory_text(x.cluster.memory_bytes)}, "
        f"B = {links_text(x.cluster)}"
        for x in kinds
    ]
    return [workload, f"{head}, B = {between}/s between {instance.kind_word}s", *of_kinds]


def links_text(cluster: Cluster) -> str:
    """``85 GB/s, 702 GB/s within 8``."""
    *inner, outermost = cluster.links
    found = [f"{given_size_text(outermost.bandwidth_bytes_per_s)}/s"]
    for link in reversed(inner):
        out = (
            "" if link.uplink_bytes_per_s is None else f" with {given_size_text(link.uplink_bytes_per_s)}/s out of them"
        )
        found.append(f"{given_size_text(link.bandwidth_bytes_per_s)}/s within {link.devices}{out}")
    return ", ".join(found)


def cost_text(instance: Instance, time_per_sample_s: float, devices: int) -> str:
    """``704 us/microbatch, 2048 of 2048 devices``."""
    return f"{time_text(time_per_sample_s)}/microbatch, {devices} of {instance.devices} devices"


def speed_line(instance: Instance, time_per_sample_s: float, schedule: Schedule) -> str:
    """``speed: 1,420 microbatches/s, 1.35 s/step``: the line after the plan's cost."""
    from piper_ray.workloads.estimate.doubt import workload_doubt

    return f"speed: {speed_text(instance.batch, time_per_sample_s, workload_doubt(instance, schedule))}"


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
    times_s = [batch.step_s(x) for x in (claimed_s, solution.lower_bound_s, found_s)]
    promised, bound, simulated = map(time_text, times_s)
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
    how = " (--sustained plans so, with the memory that it takes)" if simulation.schedule == PAPERS_SCHEDULE else ""
    return f"{text}; {kept} in flight would do{how}"


def print_outcome(console: Console, instance: Instance, solution: Solution) -> None:
    """The status with what is proved: the first lines of an answer."""
    print_lines(console, _outcome_lines(instance, solution))


def _outcome_lines(instance: Instance, solution: Solution) -> Iterator[str | Text]:
    status = solution.status
    stopped = f" ({solution.stopped_by})" if solution.stopped_by is not None else ""
    plan, time_per_sample_s = solution.plan, solution.time_per_sample_s
    bound = f"{least_text(solution.lower_bound_s)}/microbatch"
    if plan is not None and time_per_sample_s is not None and solution.gap is not None:
        line = Text(f"{status.value}{stopped}", style=_STYLES.get(status, ""))
        devices = plan.by_rank(solution.schedule).devices
        cost = cost_text(instance, time_per_sample_s, devices)
        yield line.append(f": {cost}, gap {percent_text(solution.gap)}", style="default")
        yield speed_line(instance, time_per_sample_s, solution.schedule)
        if solution.gap > PROOF_TOLERANCE:
            yield f"no plan is faster than {bound}"
        for kind in instance.cluster.kinds:
            if kind.name not in {stage.kind for stage in plan.stages}:
                where = f"{'at' if instance.kind_word == 'site' else 'on'} {printable(kind.name)}"
                yield f"no stage is {where}: {_why_idle(instance, kind, status)}"
    elif solution.infeasibility is not None:
        yield from _infeasibility_lines(solution.infeasibility)
    else:
        yield f"{status.value}{stopped}: no plan found so far; none is faster than {bound}"
    if solution.blocks is not None:
        yield _best_of_blocks_text(solution.blocks)
    yield _work_text(solution)
    if solution.stats.cluster is not None:
        yield from cluster_lines(solution.stats.cluster, solution.stats.search_s)


def _why_idle(instance: Instance, kind: DeviceKind, status: Status) -> str:
    """Why a kind of devices has no stage."""
    idle, memory_bytes = plural(kind.cluster.devices, "device"), kind.cluster.memory_bytes * (1.0 + MEMORY_TOLERANCE)
    rows = [(t, x) for layer in instance.layers for t, row in layer.tmpcs.items() for x in row if x.kind == kind.name]
    held = [tmpc.activation_bytes + tmpc.fixed_bytes for t, tmpc in rows if t <= kind.cluster.devices]
    if not any(size_bytes <= memory_bytes for size_bytes in held):
        why = (
            "whose memory is too small for any layer"
            if held
            else f"as its TMPCs take {min(t for t, _ in rows)} or more"
        )
        return f"no plan can use its {idle}, {why}"
    return f"the plan is faster without its {idle}" if status is Status.OPTIMAL else f"its {idle} are idle"


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
        best = f"no plan of whole blocks is faster than {least_text(blocks.time_per_sample_s)}/microbatch"
    else:
        best = f"a plan of whole blocks takes {time_text(blocks.time_per_sample_s)}/microbatch"
    return f"{blocks_text(blocks)}; {best}"


def _infeasibility_lines(infeasibility: Infeasibility) -> Iterator[str | Text]:
    """Why there is no plan, and the least memory that would change that; without a figure the reason says it all."""
    line = Text("infeasible", style="bold red")
    yield line.append(f": {printable(infeasibility.reason)}", style="default")
    least = infeasibility.least_memory_bytes
    if least is not None:
        yield f"least memory per device with a plan: {size_text(least, 6)} (--memory {size_above(least)})"


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
    if stats.degrees is None:
        looked_at = plural(len(stats.evaluations), "evaluation")
    elif solution.schedule.name in CHUNKED:
        choices = plural(stats.degrees.pairs, "choice")
        looked_at = f"{stats.degrees.searched:,} of {choices} of degrees, ranks and chunks"
    else:
        looked_at = f"{stats.degrees.searched:,} of {plural(stats.degrees.pairs, 'pair')} of degrees"
    return (
        f"{total_s:.2f} s: lattice {stats.lattice_s:.2f} s, stage costs {stats.stage_costs_s:.2f} s, "
        f"search {stats.search_s:.2f} s in {looked_at}"
    )


_LONGEST_BAR = 48
_SHORTEST_BAR = 8
_ARGUMENTS_OR_NUMBER = re.compile(r"\(.*|[-_. ]?\d+$")


@dataclass(frozen=True)
class BarPart:
    """One part of a stage's time: its name, and how its share of the bar is drawn."""

    name: str
    block: str
    ascii: str
    style: str


BAR_PARTS = (
    BarPart("compute", "█", "#", "cyan"),
    BarPart("communication", "▒", "+", "yellow"),
    BarPart("gradients", "░", ".", "magenta"),
)


def print_plan(
    console: Console, instance: Instance, plan: Plan, evaluation: Evaluation, most: int | None = None
) -> None:
    """Both tables, at the console's width. most: rows of each; None for all."""
    print_layers(console, instance, plan, evaluation.schedule, most)
    console.print()
    _print_costs(console, instance, evaluation, most)


def print_layers(
    console: Console, instance: Instance, plan: Plan, schedule: Schedule = PAPERS_SCHEDULE, most: int | None = None
) -> None:
    """Prints which layers run where, and how. most: rows; of more stages those that are alike share one."""
    alike = most is not None and len(plan.stages) > most and schedule.v == 1
    print_table(console, *_layers_table(instance, plan, schedule, console.width, alike=alike), most)


def layers_text(instance: Instance, layers: tuple[int, ...], width: int) -> str:
    """``1 Embedding, 3-12 ParallelTransformerLayer x10``; where that fills more than two lines, ids and kinds apart."""
    names = {layer: printable(instance.layer_by_id[layer].name) for layer in layers}
    text = ", ".join(
        f"{range_text(run)} {names[run[0]] if len(run) == 1 else _counted(_kind(names[run[0]]), len(run))}".rstrip()
        for run in _runs(layers, names)
    )
    if len(text) <= 2 * width:
        return text
    kinds = Counter(_kind(names[layer]) for layer in layers)
    listed = ", ".join(_counted(kind, count) if count > 1 else kind for kind, count in kinds.most_common())
    return _shortened(f"{_shortened(range_text(layers), width)}: {plural(len(layers), 'layer')}, {listed}", 2 * width)


def _kind(name: str) -> str:
    """``Conv2d`` of ``Conv2d(3, 64)``, ``node`` of ``node17``."""
    return _ARGUMENTS_OR_NUMBER.sub("", name) or name


def _runs(layers: tuple[int, ...], names: dict[int, str]) -> Iterator[tuple[int, ...]]:
    """Stretches of consecutive ids with names of one kind."""
    start = 0
    for index, (before, after) in enumerate(pairwise(layers), start=1):
        if after != before + 1 or _kind(names[before]) != _kind(names[after]):
            yield layers[start:index]
            start = index
    if layers:
        yield layers[start:]


def _shortened(text: str, width: int) -> str:
    """A text of at most ``width`` characters, cut between entries of the list that it is, if it is one."""
    if len(text) <= width:
        return text
    kept, comma, _ = text[: width - 3].rpartition(", ")
    return f"{kept}, ..." if comma else text[: width - 3] + "..."


def _counted(name: str, count: int) -> str:
    """Kept on one line where it fits on one: wrapping takes place at plain spaces only."""
    return f"{name} x{count}".replace(" ", NO_BREAK)


def _tmpcs_text(stage: Stage) -> str:
    counts = Counter(printable(stage.tmpc_ids[layer]) for layer in stage.layers)
    return ", ".join(_counted(name, count) for name, count in counts.items())


def border_texts(instance: Instance, plan: Plan, schedule: Schedule) -> list[str]:
    """What each stage hands over to the next at, ``702 GB/s within 8``, ``25 GB/s to H100``; nothing behind the last
    stage. None, where links do not differ: see ``stage_borders``."""
    found = []
    for border in stage_borders(instance.cluster, plan, schedule):
        where = "" if border.group_devices is None else f" within {border.group_devices:,}"
        where = where if border.kinds is None else f" to {printable(border.kinds[1])}"
        found.append(f"{given_size_text(border.bandwidth_bytes_per_s)}/s{where}")
    return [*found, ""] if found else []


def _layers_table(
    instance: Instance, plan: Plan, schedule: Schedule, width: int, *, alike: bool
) -> tuple[list[Column], list[list[str]]]:
    """The table of layers. Where ranks hold several stages it says which rank has each. alike: neighbouring stages with
    equal degrees and TMPCs share a row."""
    rank_of: dict[int, int] = {}
    if schedule.v > 1:
        ranks = len(plan.stages) // schedule.v
        rank_of = {stage: rank for rank in range(ranks) for stage in schedule.stages_of_rank(rank, ranks)}
    borders = border_texts(instance, plan, schedule)
    free = max(40, width - (10 if rank_of else 4) - len("d") - 3 - len("t") - 2 - len("devices") - 5 * 2)
    tmpcs_width = min(36, max(22, free * 2 // 5))
    layers_width = free - tmpcs_width
    tmpcs_width = max(22, tmpcs_width - max((len(text) + 2 for text in borders), default=0))
    numbers = [Column(head, right=True) for head in (("#", "rank") if rank_of else ("#",))]
    degrees = [Column(head, right=True) for head in ("d", "t", "devices")]
    has_kinds = any(stage.kind for stage in plan.stages)
    if has_kinds:
        numbers.append(Column(instance.kind_word))
    if borders:
        degrees.append(Column("to next"))
    columns = [*numbers, Column("layers", wrap=layers_width), *degrees, Column("TMPCs", wrap=tmpcs_width)]
    rows = [
        (
            [printable(stage.kind)] if has_kinds else [],
            [
                *map(str, (stage.data_parallel_degree, stage.tensor_parallel_degree, stage.devices)),
                *borders[place : place + 1],
            ],
            _tmpcs_text(stage),
        )
        for place, stage in enumerate(plan.stages)
    ]
    found = []
    for _, group in groupby(range(len(rows)), key=lambda place: rows[place] if alike else place):
        first, *others = group
        kind, own, tmpcs = rows[first]
        layers = tuple(layer for place in (first, *others) for layer in plan.stages[place].layers)
        found.append([
            range_text([place + 1 for place in (first, *others)]),
            *([str(rank_of[first])] if rank_of else []),
            *kind,
            layers_text(instance, layers, layers_width),
            *own,
            f"{tmpcs} each" if others else tmpcs,
        ])  # fmt: skip
    return columns, found


def _print_costs(console: Console, instance: Instance, evaluation: Evaluation, most: int | None) -> None:
    times = time_scale(evaluation.time_per_sample_s, NEAR_DIGITS)
    sizes = size_scale(max([instance.memory_bytes, *(stage.memory_bytes for stage in evaluation.stages)]))
    columns = [
        Column(head, right=True)
        for head in ("#", f"time {times.unit}", "compute", "comm", "grads", f"mem {sizes.unit}", "acts", "%")
    ]
    rows = [
        [
            str(number),
            *(times.text(part) for part in (stage.time_s, stage.compute_s, stage.communication_s, stage.resync_s)),
            sizes.text(stage.memory_bytes),
            sizes.text(stage.activation_bytes),
            f"{100 * stage.memory_bytes / stage.memory_limit_bytes:.1f}",
            "both" if len(binds) == 2 else "".join(binds),
        ]
        for number, stage in enumerate(evaluation.stages, start=1)
        for binds in [stage.binding]
    ]
    head, *lines = table_lines([*columns, Column("binds")], rows)
    offset = max(map(len, [head, *lines])) + 2
    bar_width = min(_LONGEST_BAR, max(_SHORTEST_BAR, console.width - offset))
    blocks = draws_blocks(console)
    drawn = []
    for line, stage in zip(lines, evaluation.stages, strict=True):
        bar = _bar(stage, evaluation.time_per_sample_s, bar_width, blocks)
        drawn.append(Text(line.ljust(offset)) + bar if bar.plain else Text(line))
    shown = [Text(head, style="bold"), *shortened(drawn, Text(left_out_text(len(drawn), most or 0)), most)]
    legend = Text("bar: time, ")
    for index, part in enumerate(BAR_PARTS):
        legend.append(", " if index else "")
        legend.append(part.block if blocks else part.ascii, part.style)
        legend.append(f" {part.name}")
    legend.append(f"; memory limit {size_text(instance.memory_bytes)}")
    acts = "grads: summed over replicas; acts: the part of mem for activations in flight"
    print_lines(console, [*shown, legend, acts])


def _bar(stage: StageEvaluation, longest_s: float, width: int, blocks: bool) -> Text:
    """The three parts on the scale of the slowest stage. Rounding their ends, not their lengths, keeps the whole."""
    bar = Text()
    end_s, drawn = 0.0, 0
    parts_s = (stage.compute_s, stage.communication_s, stage.resync_s)
    for part, seconds in zip(BAR_PARTS, parts_s, strict=True):
        end_s += seconds
        end = round(width * end_s / longest_s) if longest_s > 0 else 0
        bar.append((part.block if blocks else part.ascii) * (end - drawn), part.style)
        drawn = max(drawn, end)
    return bar


@dataclass(frozen=True)
class Throughput:
    """A unit ("samples", or "microbatches" where nobody says how many samples one holds), and how many in each."""

    unit: str
    per_microbatch: int

    @classmethod
    def of(cls, batch: Batch) -> Throughput:
        samples = batch.samples_per_microbatch
        return cls("microbatches", 1) if samples is None else cls("samples", samples)

    def per_s(self, time_per_sample_s: float) -> float:
        return self.per_microbatch / time_per_sample_s


def speed_text(batch: Batch, time_per_sample_s: float, doubt: Doubt | None = None) -> str:
    """``10,700 samples/s, 10,900,000 tokens/s, 3.07 s/step``."""
    from piper_ray.workloads.estimate.doubt import step_text

    if time_per_sample_s <= 0:
        return "no time at all"
    step = step_text(batch.step_s(time_per_sample_s), doubt, "/step")
    return f"{rates_text(batch, time_per_sample_s)}, {step}"


def rates_text(batch: Batch, time_per_sample_s: float) -> str:
    """``10,700 samples/s, 10,900,000 tokens/s``."""
    if time_per_sample_s <= 0:
        return "no time at all"
    throughput = Throughput.of(batch)
    parts = [f"{rounded(throughput.per_s(time_per_sample_s))} {throughput.unit}/s"]
    if batch.tokens_per_microbatch is not None:
        parts.append(f"{rounded(batch.tokens_per_microbatch / time_per_sample_s)} tokens/s")
    return ", ".join(parts)


def batch_text(batch: Batch) -> str:
    """``1,024 microbatches of 16 samples of 1,024 tokens``."""
    text = f"{batch.microbatches:,} microbatches"
    for count, unit in ((batch.samples_per_microbatch, "samples"), (batch.tokens_per_sample, "tokens")):
        text += "" if count is None else f" of {count:,} {unit if count != 1 else unit.removesuffix('s')}"
    return text
