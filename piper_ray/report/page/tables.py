"""The tables of a page as rows of cells: stages, ranks, and plans to compare with. Many rows are grouped."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby

from piper_ray.model.figures import plural, printable, range_text, share_text, size_scale, time_scale
from piper_ray.report.page.subject import Subject, Valued
from piper_ray.report.summary import layers_text
from piper_ray.report.terminal import NO_BREAK
from piper_ray.simulate.result import Simulation

MOST_ROWS = 48
"""Of a table that is read as a whole. What has more is grouped."""

_LAYERS_WIDTH = 60
_COUNT = re.compile(r" (x\d)")


@dataclass(frozen=True)
class Cell:
    """text: what is read. value: the figure itself (s, bytes, a share, a count); None of a text, and of several that
    differ. bar: its share of the longest bar, 0 to 1."""

    text: str
    value: float | int | None = None
    bar: float | None = None
    warns: bool = False


@dataclass(frozen=True)
class PageColumn:
    """name: what machines know its cells by. help: a sentence."""

    name: str
    head: str
    numeric: bool = True
    help: str = ""


@dataclass(frozen=True)
class PageTable:
    """Each row has a cell for each column."""

    columns: tuple[PageColumn, ...]
    rows: tuple[tuple[Cell, ...], ...]


Group = Sequence[int]


def singles(count: int) -> list[Group]:
    """Each number by itself."""
    return [[number] for number in range(count)]


def groups(keys: Sequence[Hashable], most: int = MOST_ROWS) -> list[Group]:
    """Neighbours with the same key together, and where those are still too many so many neighbouring groups as it
    takes."""
    alike = [list(run) for _, run in groupby(range(len(keys)), key=keys.__getitem__)]
    step = -(-len(alike) // most)
    return [list(chain.from_iterable(alike[first : first + step])) for first in range(0, len(alike), step)]


def stage_groups(found: Valued) -> list[Group]:
    """Each by itself while they are few; then those with the same degrees and kinds of configuration together."""
    if len(found.plan.stages) <= MOST_ROWS:
        return singles(len(found.plan.stages))
    return groups(
        [
            (
                stage.data_parallel_degree,
                stage.tensor_parallel_degree,
                len(stage.layers),
                frozenset(Counter(stage.tmpc_ids.values()).items()),
            )
            for stage in found.plan.stages
        ]
    )


def stage_table(found: Valued, rows: Sequence[Group]) -> PageTable:
    """A row for each group of stages: which layers, how many devices, and what a microbatch takes."""
    columns = [
        PageColumn("stage", "stage"),
        PageColumn("layers", "layers", numeric=False),
        PageColumn("tmpcs", "TMPCs", numeric=False, help="How each layer runs on the t devices of a replica"),
        PageColumn("d", "d", help="Data-parallel degree: replicas of the stage"),
        PageColumn("t", "t", help="Tensor-parallel degree: devices of a replica"),
        PageColumn("devices", "devices"),
    ]
    if found.evaluation is None:
        columns += [
            PageColumn("forward_s", "forward", help="Forward pass of one microbatch on one replica, without transfers"),
            PageColumn(
                "backward_s", "backward", help="Backward pass of one microbatch on one replica, without transfers"
            ),
            PageColumn("in_flight", "in flight", help="The most microbatches at once on one replica"),
        ]
    else:
        columns += [
            PageColumn("time_s", "time", help="Of a microbatch: compute, communication and resync, divided by d"),
            PageColumn("compute_s", "compute"),
            PageColumn("communication_s", "comm."),
            PageColumn("resync_s", "resync", help="A microbatch's share of summing gradients over the replicas"),
            PageColumn("in_flight", "in flight", help="Microbatches that a replica keeps in flight"),
            PageColumn("memory_bytes", "memory", help="On each device"),
            PageColumn("memory_share", "%", help="Of a device's memory"),
            PageColumn("binds", "binds", numeric=False, help="What limits the stage: time, memory, or both"),
        ]
    figures = _stage_figures(found)
    return PageTable(tuple(columns), tuple(_stage_row(found, group, figures) for group in rows))


def _stage_row(found: Valued, group: Group, figures: Sequence[_CellFigures]) -> tuple[Cell, ...]:
    stages = [found.plan.stages[number] for number in group]
    layers = tuple(layer for stage in stages for layer in stage.layers)
    kinds = Counter(printable(stage.tmpc_ids[layer]) for stage in stages for layer in stage.layers)
    cells = [
        _numbered(group, 1),
        Cell(_breakable(layers_text(found.instance, layers, _LAYERS_WIDTH))),
        Cell(", ".join(f"{name}{NO_BREAK}x{count}" for name, count in kinds.items())),
        _spread([stage.data_parallel_degree for stage in stages], str),
        _spread([stage.tensor_parallel_degree for stage in stages], str),
        _sum_or_each([stage.devices for stage in stages]),
    ]
    cells += [_spread([x.values[number] for number in group], x.text, bar=x.largest) for x in figures]
    if found.evaluation is not None:
        binds = Counter(name for number in group for name in found.evaluation.stages[number].binding)
        cells.append(Cell(", ".join(sorted(binds)), warns=bool(binds)))
    return tuple(cells)


def _breakable(text: str) -> str:
    """Names may be longer than the column is wide: only a count stays with the word in front of it."""
    return _COUNT.sub(rf"{NO_BREAK}\1", text.replace(NO_BREAK, " "))


@dataclass(frozen=True)
class _CellFigures:
    """A column's values, how they are written, and the largest where they are drawn as bars."""

    values: Sequence[float]
    text: Callable[[float], str]
    largest: float | None = None


def _times(values: Sequence[float], of: Iterable[float], *, bars: bool = False) -> _CellFigures:
    """of: all values that are to have the same unit."""
    largest = max(of)
    scale = time_scale(largest)
    return _CellFigures(values, scale.with_unit, largest if bars else None)


def _sizes(values: Sequence[float], largest_bytes: float) -> _CellFigures:
    return _CellFigures(values, size_scale(largest_bytes).with_unit)


def _stage_figures(found: Valued) -> list[_CellFigures]:
    simulation = found.simulation
    if found.evaluation is None:
        forward = [stage.forward_s for stage in simulation.stages]
        backward = [stage.input_s + stage.weight_s for stage in simulation.stages]
        in_flight = [0] * len(simulation.stages)
        for rank in simulation.ranks:
            for stage, held in zip(rank.stages, rank.in_flight, strict=True):
                in_flight[stage] = max(in_flight[stage], held)
        both = [*forward, *backward]
        return [_times(forward, both, bars=True), _times(backward, both, bars=True), _CellFigures(in_flight, _whole)]
    stages = found.evaluation.stages
    slowest = [stage.time_s for stage in stages]
    memory = [stage.memory_bytes for stage in stages]
    limit_bytes = found.instance.memory_bytes
    return [
        _times([stage.time_s for stage in stages], slowest, bars=True),
        _times([stage.compute_s for stage in stages], slowest),
        _times([stage.communication_s for stage in stages], slowest),
        _times([stage.resync_s for stage in stages], slowest),
        _CellFigures([stage.in_flight_microbatches for stage in stages], _whole),
        _sizes(memory, max(limit_bytes, *memory)),
        _CellFigures([size / limit_bytes for size in memory], share_text),
    ]


def rank_groups(found: Valued) -> list[Group]:
    """Replicas of the same stages do the same but for when."""
    return groups([rank.stages for rank in found.simulation.ranks])


def rank_table(found: Valued, rows: Sequence[Group]) -> PageTable:
    """A row for each group of ranks: where their time goes, and their memory."""
    columns = (
        PageColumn("rank", "rank"),
        PageColumn("stages", "stages", numeric=False),
        PageColumn("devices", "devices", help="Each rank stands for the t devices of a replica, which go in step"),
        PageColumn("compute_s", "compute", help="Passes and the optimizer, without transfers"),
        PageColumn("communication_s", "comm.", help="Transfers that hold up passes, and all-reduce"),
        PageColumn("waiting_s", "waiting", help="Nothing to do while what is next is on its way"),
        PageColumn("bubble_s", "bubble", help="Nothing to do otherwise"),
        PageColumn("peak_memory_bytes", "peak memory", help="On each device"),
        PageColumn("unused_bytes", "unused", help="Of a device's memory; less than nothing where it does not do"),
    )
    simulation = found.simulation
    ranks, limit_bytes = simulation.ranks, simulation.memory_limit_bytes
    length_s = simulation.length_s

    def share(value: float) -> str:
        return share_text(value / length_s) if length_s > 0 else "-"

    peak = [rank.peak_memory_bytes for rank in ranks]
    unused = [limit_bytes - size for size in peak]
    largest_bytes = max(limit_bytes, *peak)
    figures = [
        _CellFigures([rank.compute_s for rank in ranks], share, length_s),
        _CellFigures([rank.communication_s for rank in ranks], share),
        _CellFigures([rank.waiting_s for rank in ranks], share),
        _CellFigures([rank.bubble_s for rank in ranks], share),
        _sizes(peak, largest_bytes),
        _sizes(unused, largest_bytes),
    ]
    over = {number for number, size in enumerate(unused) if size < -1e-9 * limit_bytes}
    found_rows = []
    for group in rows:
        stages = sorted({stage + 1 for number in group for stage in ranks[number].stages})
        cells = [
            _numbered(group, 0),
            Cell(_shortened(range_text(stages))),
            _sum_or_each([ranks[number].devices for number in group]),
            *(_spread([x.values[number] for number in group], x.text, bar=x.largest) for x in figures[:-2]),
            *(
                _spread([x.values[number] for number in group], x.text, warns=not over.isdisjoint(group))
                for x in figures[-2:]
            ),
        ]
        found_rows.append(tuple(cells))
    return PageTable(columns, tuple(found_rows))


def comparison_table(subject: Subject) -> PageTable:
    """This plan first, then the others."""
    columns = (
        PageColumn("planner", "planner", numeric=False),
        PageColumn("step_s", "simulated step"),
        PageColumn("relative", "relative", help="Its step over this plan's"),
        PageColumn("stages", "stages"),
        PageColumn("devices", "devices"),
        PageColumn("bubble_share", "idle"),
        PageColumn("peak_memory_bytes", "peak memory", help="Of the rank that holds most, on each device"),
        PageColumn("note", "its plan", numeric=False),
    )
    own = subject.valued
    runs = [own.simulation, *(x.simulation for x in subject.compared if x.simulation is not None)]
    longest_s = max(run.step_s for run in runs)
    times = time_scale(longest_s)
    sizes = size_scale(max(run.peak_memory_bytes for run in runs))

    def row(name: str, run: Simulation | None, note: str) -> tuple[Cell, ...]:
        if run is None:
            return (Cell(name), *[Cell("-")] * 6, Cell(note, warns=True))
        peak_bytes = run.peak_memory_bytes
        ratio = run.step_s / own.simulation.step_s if own.simulation.step_s > 0 else None
        share = run.step_s / longest_s if longest_s > 0 else None
        return (
            Cell(name),
            Cell(_unbroken(times.with_unit(run.step_s)), run.step_s, share),
            Cell("-" if ratio is None else f"{ratio:.3f}", ratio),
            Cell(f"{len(run.stages):,}", len(run.stages)),
            Cell(f"{run.devices:,}", run.devices),
            Cell(_unbroken(share_text(run.bubble_share)), run.bubble_share),
            Cell(_unbroken(sizes.with_unit(peak_bytes)), peak_bytes, warns=bool(run.memory_violations)),
            Cell(note),
        )

    rows = [row("this plan", own.simulation, "")]
    rows += [row(x.planner, x.simulation, printable(x.note)) for x in subject.compared]
    return PageTable(columns, tuple(rows))


def _numbered(group: Group, first: int) -> Cell:
    numbers = [number + first for number in group]
    if len(numbers) == 1:
        return Cell(str(numbers[0]), numbers[0])
    return Cell(_shortened(range_text(numbers)))


def _spread(
    values: Sequence[float], text: Callable[[float], str], *, bar: float | None = None, warns: bool = False
) -> Cell:
    """One figure, or from the least to the largest."""
    least, largest = min(values), max(values)
    share = largest / bar if bar else None
    from_text, to_text = (_unbroken(text(value)) for value in (least, largest))
    if from_text == to_text:
        return Cell(to_text, largest if least == largest else None, share, warns)
    return Cell(f"{from_text} to {to_text}", None, share, warns)


def _sum_or_each(values: Sequence[int]) -> Cell:
    if len(values) == 1:
        return Cell(f"{values[0]:,}", values[0])
    each = f"{len(values)}{NO_BREAK}x{NO_BREAK}{values[0]:,}" if len(set(values)) == 1 else f"{sum(values):,} of all"
    return Cell(each, sum(values))


def _unbroken(text: str) -> str:
    return text.replace(" ", NO_BREAK)


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _shortened(text: str, width: int = 24) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."


def count_text(table: PageTable, what: str, count: int) -> str:
    """What a grouped table says of itself."""
    return f"{plural(count, what)} in {plural(len(table.rows), 'row')}"
