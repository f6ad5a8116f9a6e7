"""The tables of a page as rows of cells: stages, ranks, and plans to compare with. Many rows are grouped."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby

from piper_ray.evaluate import Evaluation
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


@dataclass(frozen=True)
class _FigureColumn:
    """A column of figures: its values, how they are written, the largest where they are drawn as bars, and the numbers
    of those that warn."""

    column: PageColumn
    values: Sequence[float]
    text: Callable[[float], str]
    largest: float | None = None
    over: frozenset[int] = frozenset()

    def cell(self, group: Group) -> Cell:
        """One figure, or from the least to the largest."""
        values = [self.values[number] for number in group]
        return _spread(values, self.text, bar=self.largest, warns=not self.over.isdisjoint(group))


def stage_table(found: Valued, rows: Sequence[Group]) -> PageTable:
    """A row for each group of stages: which layers, how many devices, and what a microbatch takes."""
    figures = _forecast_figures(found) if found.evaluation is None else _valued_figures(found, found.evaluation)
    columns = [
        PageColumn("stage", "stage"),
        PageColumn("layers", "layers", numeric=False),
        PageColumn("tmpcs", "TMPCs", numeric=False, help="How each layer runs on the t devices of a replica"),
        PageColumn("d", "d", help="Data-parallel degree: replicas of the stage"),
        PageColumn("t", "t", help="Tensor-parallel degree: devices of a replica"),
        PageColumn("devices", "devices"),
        *(figure.column for figure in figures),
    ]
    if found.evaluation is not None:
        columns.append(PageColumn("binds", "binds", numeric=False, help="What limits the stage: time, memory, or both"))
    return PageTable(tuple(columns), tuple(_stage_row(found, group, figures) for group in rows))


def _stage_row(found: Valued, group: Group, figures: Sequence[_FigureColumn]) -> tuple[Cell, ...]:
    stages = [found.plan.stages[number] for number in group]
    layers = tuple(layer for stage in stages for layer in stage.layers)
    kinds = Counter(printable(stage.tmpc_ids[layer]) for stage in stages for layer in stage.layers)
    # Names may be longer than the column is wide: only a count stays with the word in front of it.
    named = _COUNT.sub(rf"{NO_BREAK}\1", layers_text(found.instance, layers, _LAYERS_WIDTH).replace(NO_BREAK, " "))
    cells = [
        _numbered(group, 1),
        Cell(named),
        Cell(", ".join(f"{name}{NO_BREAK}x{count}" for name, count in kinds.items())),
        _spread([stage.data_parallel_degree for stage in stages], str),
        _spread([stage.tensor_parallel_degree for stage in stages], str),
        _sum_or_each([stage.devices for stage in stages]),
        *(figure.cell(group) for figure in figures),
    ]
    if found.evaluation is not None:
        binds = Counter(name for number in group for name in found.evaluation.stages[number].binding)
        cells.append(Cell(", ".join(sorted(binds)), warns=bool(binds)))
    return tuple(cells)


def _forecast_figures(found: Valued) -> list[_FigureColumn]:
    """Of a plan that breaks a rule."""
    simulation = found.simulation
    forward = [stage.forward_s for stage in simulation.stages]
    backward = [stage.input_s + stage.weight_s for stage in simulation.stages]
    in_flight = [0] * len(simulation.stages)
    for rank in simulation.ranks:
        for stage, held in zip(rank.stages, rank.in_flight, strict=True):
            in_flight[stage] = max(in_flight[stage], held)
    longest_s = max([*forward, *backward])
    seconds = time_scale(longest_s).with_unit
    of_one = "pass of one microbatch on one replica, without transfers"
    most = "The most microbatches at once on one replica"
    return [
        _FigureColumn(PageColumn("forward_s", "forward", help=f"Forward {of_one}"), forward, seconds, longest_s),
        _FigureColumn(PageColumn("backward_s", "backward", help=f"Backward {of_one}"), backward, seconds, longest_s),
        _FigureColumn(PageColumn("in_flight", "in flight", help=most), in_flight, _whole),
    ]


def _valued_figures(found: Valued, evaluation: Evaluation) -> list[_FigureColumn]:
    stages, limit_bytes = evaluation.stages, found.instance.memory_bytes
    slowest_s = max(stage.time_s for stage in stages)
    seconds = time_scale(slowest_s).with_unit
    memory = [stage.memory_bytes for stage in stages]
    sizes = size_scale(max(limit_bytes, *memory)).with_unit
    in_flight = [stage.in_flight_microbatches for stage in stages]
    time = "Of a microbatch: compute, communication and resync, divided by d"
    resync = "A microbatch's share of summing gradients over the replicas"
    kept = "Microbatches that a replica keeps in flight"
    return [
        _FigureColumn(PageColumn("time_s", "time", help=time), [stage.time_s for stage in stages], seconds, slowest_s),
        _FigureColumn(PageColumn("compute_s", "compute"), [stage.compute_s for stage in stages], seconds),
        _FigureColumn(PageColumn("communication_s", "comm."), [stage.communication_s for stage in stages], seconds),
        _FigureColumn(PageColumn("resync_s", "resync", help=resync), [stage.resync_s for stage in stages], seconds),
        _FigureColumn(PageColumn("in_flight", "in flight", help=kept), in_flight, _whole),
        _FigureColumn(PageColumn("memory_bytes", "memory", help="On each device"), memory, sizes),
        _FigureColumn(
            PageColumn("memory_share", "%", help="Of a device's memory"), [x / limit_bytes for x in memory], share_text
        ),
    ]


def rank_groups(found: Valued) -> list[Group]:
    """Replicas of the same stages do the same but for when."""
    return groups([rank.stages for rank in found.simulation.ranks])


def rank_table(found: Valued, rows: Sequence[Group]) -> PageTable:
    """A row for each group of ranks: where their time goes, and their memory."""
    simulation = found.simulation
    ranks, limit_bytes = simulation.ranks, simulation.memory_limit_bytes
    length_s = simulation.length_s

    def share(value: float) -> str:
        return share_text(value / length_s) if length_s > 0 else "-"

    peak = [rank.peak_memory_bytes for rank in ranks]
    unused = [limit_bytes - size for size in peak]
    sizes = size_scale(max(limit_bytes, *peak)).with_unit
    over = frozenset(number for number, size in enumerate(unused) if size < -1e-9 * limit_bytes)
    times = (
        ("compute_s", "compute", "Passes and the optimizer, without transfers", length_s),
        ("communication_s", "comm.", "Transfers that hold up passes, and all-reduce", None),
        ("waiting_s", "waiting", "Nothing to do while what is next is on its way", None),
        ("bubble_s", "bubble", "Nothing to do otherwise", None),
    )
    of_peak = PageColumn("peak_memory_bytes", "peak memory", help="On each device")
    of_unused = "Of a device's memory; less than nothing where it does not do"
    figures = [
        *(
            _FigureColumn(PageColumn(name, head, help=text), [getattr(rank, name) for rank in ranks], share, largest)
            for name, head, text, largest in times
        ),
        _FigureColumn(of_peak, peak, sizes, over=over),
        _FigureColumn(PageColumn("unused_bytes", "unused", help=of_unused), unused, sizes, over=over),
    ]
    columns = (
        PageColumn("rank", "rank"),
        PageColumn("stages", "stages", numeric=False),
        PageColumn("devices", "devices", help="Each rank stands for the t devices of a replica, which go in step"),
        *(figure.column for figure in figures),
    )
    found_rows = []
    for group in rows:
        stages = sorted({stage + 1 for number in group for stage in ranks[number].stages})
        devices = _sum_or_each([ranks[number].devices for number in group])
        cells = (figure.cell(group) for figure in figures)
        found_rows.append((_numbered(group, 0), Cell(_shortened(range_text(stages))), devices, *cells))
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
