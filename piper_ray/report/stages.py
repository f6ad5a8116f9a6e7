"""A plan as two tables: which layers run where, and where each stage's time and memory go."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from rich.console import Console
from rich.text import Text

from piper_ray.evaluate import Evaluation, StageEvaluation
from piper_ray.model.figures import plural, printable, range_text, size_scale, size_text, time_scale
from piper_ray.model.instance import Instance
from piper_ray.model.plan import Plan, Stage
from piper_ray.model.schedule import PAPERS_SCHEDULE, Schedule
from piper_ray.report.layout import NO_BREAK, Column, draws_blocks, print_table, table_lines

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
    BarPart("resync", "░", ".", "magenta"),
)


def print_plan(console: Console, instance: Instance, plan: Plan, evaluation: Evaluation) -> None:
    """Both tables, at the console's width."""
    print_layers(console, instance, plan, evaluation.schedule)
    console.print()
    _print_costs(console, instance, evaluation)


def print_layers(console: Console, instance: Instance, plan: Plan, schedule: Schedule = PAPERS_SCHEDULE) -> None:
    """Which layers run where, and how."""
    print_table(console, *_layers_table(instance, plan, schedule, console.width))


def layers_text(instance: Instance, layers: tuple[int, ...], width: int) -> str:
    """``1 Embedding, 3-12 ParallelTransformerLayer x10``; where that fills more than two lines, ids and kinds apart."""
    names = {layer: printable(instance.layer_by_id[layer].name) for layer in layers}
    text = ", ".join(f"{range_text(run)} {_named(run, names)}".rstrip() for run in _runs(layers, names))
    if len(text) <= 2 * width:
        return text
    kinds = Counter(_kind(names[layer]) for layer in layers)
    listed = ", ".join(_unbroken(f"{kind} x{count}") if count > 1 else kind for kind, count in kinds.most_common())
    return _shortened(f"{_shortened(range_text(layers), width)}: {plural(len(layers), 'layer')}, {listed}", 2 * width)


def _named(run: tuple[int, ...], names: dict[int, str]) -> str:
    first = names[run[0]]
    return first if len(run) == 1 else _unbroken(f"{_kind(first)} x{len(run)}")


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
    """At most so long, and cut between entries of the list that it is, if it is one."""
    if len(text) <= width:
        return text
    kept, comma, _ = text[: width - 3].rpartition(", ")
    return f"{kept}, ..." if comma else text[: width - 3] + "..."


def _unbroken(text: str) -> str:
    """Kept on one line where it fits on one: wrapping takes place at plain spaces only."""
    return text.replace(" ", NO_BREAK)


def _tmpcs_text(stage: Stage) -> str:
    counts = Counter(printable(stage.tmpc_ids[layer]) for layer in stage.layers)
    return ", ".join(_unbroken(f"{name} x{count}") for name, count in counts.items())


def _layers_table(
    instance: Instance, plan: Plan, schedule: Schedule, width: int
) -> tuple[list[Column], list[list[str]]]:
    """Where ranks hold several stages it says which rank has each."""
    rank_of: dict[int, int] = {}
    if schedule.v > 1:
        ranks = len(plan.stages) // schedule.v
        rank_of = {stage: rank for rank in range(ranks) for stage in schedule.stages_of_rank(rank, ranks)}
    free = max(40, width - (10 if rank_of else 4) - len("d") - 3 - len("t") - 2 - len("devices") - 5 * 2)
    tmpcs_width = min(36, max(22, free * 2 // 5))
    layers_width = free - tmpcs_width
    columns = [
        Column("#", right=True),
        *([Column("rank", right=True)] if rank_of else []),
        Column("layers", wrap=layers_width),
        Column("d", right=True),
        Column("t", right=True),
        Column("devices", right=True),
        Column("TMPCs", wrap=tmpcs_width),
    ]
    rows = [
        [
            str(number),
            *([str(rank_of[number - 1])] if rank_of else []),
            layers_text(instance, stage.layers, layers_width),
            str(stage.data_parallel_degree),
            str(stage.tensor_parallel_degree),
            str(stage.devices),
            _tmpcs_text(stage),
        ]
        for number, stage in enumerate(plan.stages, start=1)
    ]
    return columns, rows


def _print_costs(console: Console, instance: Instance, evaluation: Evaluation) -> None:
    times = time_scale(evaluation.time_per_sample_s)
    sizes = size_scale(max([instance.memory_bytes, *(stage.memory_bytes for stage in evaluation.stages)]))
    columns = [
        Column(head, right=True)
        for head in ("#", f"time {times.unit}", "compute", "comm", "resync", f"mem {sizes.unit}", "acts", "%")
    ]
    rows = [
        [
            str(number),
            *(times.text(part) for part in (stage.time_s, stage.compute_s, stage.communication_s, stage.resync_s)),
            sizes.text(stage.memory_bytes),
            sizes.text(stage.activation_bytes),
            f"{100 * stage.memory_bytes / instance.memory_bytes:.1f}",
            "both" if len(binds) == 2 else "".join(binds),
        ]
        for number, stage in enumerate(evaluation.stages, start=1)
        for binds in [stage.binding]
    ]
    lines = table_lines([*columns, Column("binds")], rows)
    offset = max(len(line) for line in lines) + 2
    bar_width = min(_LONGEST_BAR, max(_SHORTEST_BAR, console.width - offset))
    blocks = draws_blocks(console)
    console.print(Text(lines[0], style="bold"), soft_wrap=True)
    for line, stage in zip(lines[1:], evaluation.stages, strict=True):
        bar = _bar(stage, evaluation.time_per_sample_s, bar_width, blocks)
        console.print(Text(line.ljust(offset)) + bar if bar.plain else Text(line), soft_wrap=True)
    legend = Text("bar: time/microbatch, ")
    for index, part in enumerate(BAR_PARTS):
        legend.append(", " if index else "")
        legend.append(part.block if blocks else part.ascii, part.style)
        legend.append(f" {part.name}")
    legend.append(f"; memory limit {size_text(instance.memory_bytes)}")
    console.print(legend, soft_wrap=True)
    console.print("acts: of mem, the activations in flight; the rest is there all the time", soft_wrap=True)


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
