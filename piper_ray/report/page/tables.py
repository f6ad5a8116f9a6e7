"""The tables of a page as rows of cells: stages, ranks, and plans to compare with. Many rows are grouped."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Generic, TypeVar

from piper_ray.evaluate import Evaluation
from piper_ray.model.figures import SHOWN_DIGITS, plural, printable, range_text, share_text, size_scale, time_scale
from piper_ray.model.plan import Stage
from piper_ray.report.page.subject import Compared, Subject, Valued
from piper_ray.report.summary import border_texts, layers_text
from piper_ray.report.terminal import NO_BREAK
from piper_ray.simulate.result import Simulation

MOST_ROWS = 16
"""The most rows of a table that is read as a whole. A table with more is grouped."""

_LAYERS_WIDTH = 60
_COUNT = re.compile(r" (x\d)")


@dataclass(frozen=True)
class TableCell:
    """text: what is read. value: the figure itself (s, bytes, a share, a count); None of a text, and of several that
    differ. bar: its share of the longest bar, 0 to 1."""

    text: str
    value: float | int | None = None
    bar: float | None = None
    warns: bool = False


Row = TypeVar("Row")


@dataclass(frozen=True)
class PageColumn(Generic[Row]):
    """name: what machines know its cells by. cell: that of a row. help: a sentence."""

    name: str
    head: str
    cell: Callable[[Row], TableCell]
    numeric: bool = True
    help: str = ""


@dataclass(frozen=True)
class PageTable(Generic[Row]):
    """Each row has a cell for each column."""

    columns: tuple[PageColumn[Row], ...]
    rows: tuple[tuple[TableCell, ...], ...]

    @classmethod
    def of(cls, columns: Iterable[PageColumn[Row]], rows: Iterable[Row]) -> PageTable[Row]:
        declared = tuple(columns)
        return cls(declared, tuple(tuple(column.cell(row) for column in declared) for row in rows))


Group = Sequence[int]


def singles(count: int) -> list[Group]:
    """Each number by itself."""
    return [[number] for number in range(count)]


def groups(keys: Sequence[Hashable], most: int = MOST_ROWS) -> list[Group]:
    """Neighbours with the same key together, and where those are still too many as many neighbouring groups as it
    takes."""
    alike = [list(run) for _, run in groupby(range(len(keys)), key=keys.__getitem__)]
    step = -(-len(alike) // most)
    return [list(chain.from_iterable(alike[first : first + step])) for first in range(0, len(alike), step)]


def stage_groups(found: Valued) -> list[Group]:
    """Each by itself while they are few; then those with the same degrees and kinds of configuration together."""
    if len(found.plan.stages) <= MOST_ROWS:
        return singles(len(found.plan.stages))
    return groups([_alike(stage) for stage in found.plan.stages])


def _alike(stage: Stage) -> Hashable:
    """What stages that share a row have in common."""
    configurations = frozenset(Counter(stage.tmpc_ids.values()).items())
    return stage.data_parallel_degree, stage.tensor_parallel_degree, len(stage.layers), configurations


def _spreads(
    values: Sequence[float],
    text: Callable[[float], str],
    largest: float | None = None,
    over: frozenset[int] = frozenset(),
) -> Callable[[Group], TableCell]:
    """Cells of a figure: one, or from the least to the largest of a group.

    largest: the largest figure of the column, where its figures are drawn as bars. over: the numbers of those that
    warn.
    """

    def cell(group: Group) -> TableCell:
        of_group = [values[number] for number in group]
        low, high = min(of_group), max(of_group)
        share = high / largest if largest else None
        warns = not over.isdisjoint(group)
        from_text, to_text = (_unbroken(text(value)) for value in (low, high))
        if from_text == to_text:
            return TableCell(to_text, high if low == high else None, share, warns)
        return TableCell(f"{from_text} to {to_text}", None, share, warns)

    return cell


def stage_table(found: Valued, rows: Sequence[Group]) -> PageTable[Group]:
    """A row for each group of stages: which layers, how many devices, and what a microbatch takes."""
    stages = found.plan.stages
    data_parallel, tensor_parallel = zip(
        *((stage.data_parallel_degree, stage.tensor_parallel_degree) for stage in stages), strict=True
    )

    def layers(group: Group) -> TableCell:
        text = layers_text(found.instance, tuple(chain(*(stages[n].layers for n in group))), _LAYERS_WIDTH)
        # Names may be longer than the column is wide: only a count stays with the word in front of it.
        return TableCell(_COUNT.sub(rf"{NO_BREAK}\1", text.replace(NO_BREAK, " ")))

    def tmpcs(group: Group) -> TableCell:
        kinds = Counter(printable(stages[n].tmpc_ids[layer]) for n in group for layer in stages[n].layers)
        return TableCell(", ".join(f"{name}{NO_BREAK}x{count}" for name, count in kinds.items()))

    def of_kind(group: Group) -> TableCell:
        return TableCell(", ".join(sorted({printable(stages[n].kind) for n in group})))

    costs = _forecast_columns(found) if found.evaluation is None else _valued_columns(found, found.evaluation)
    columns = [
        PageColumn("stage", "stage", _numbers(1)),
        PageColumn("layers", "layers", layers, numeric=False),
        PageColumn("tmpcs", "TMPCs", tmpcs, numeric=False, help="How each layer runs on the t devices of a replica"),
        PageColumn("d", "d", _spreads(data_parallel, str), help="Data-parallel degree: replicas of the stage"),
        PageColumn("t", "t", _spreads(tensor_parallel, str), help="Tensor-parallel degree: devices of a replica"),
        PageColumn("devices", "devices", _sums([stage.devices for stage in stages])),
        *costs,
    ]
    borders = border_texts(found.instance, found.plan, found.simulation.schedule)
    if borders:

        def to_next(group: Group) -> TableCell:
            # The row below says its own kind.
            texts = dict.fromkeys(borders[n].partition(" to ")[0] for n in group if borders[n])
            return TableCell(", ".join(text.replace(" ", NO_BREAK, 1) for text in texts))

        columns.insert(6, PageColumn("to_next", "to next", to_next, numeric=False, help="Link to the next stage"))
    if found.instance.cluster.kinds:
        columns.insert(
            1, PageColumn("kind", found.instance.kind_word, of_kind, numeric=False, help="Where its devices are")
        )
    return PageTable.of(columns, rows)


def _forecast_columns(found: Valued) -> list[PageColumn[Group]]:
    """The columns of a plan that breaks a rule."""
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
        PageColumn("forward_s", "forward", _spreads(forward, seconds, longest_s), help=f"Forward {of_one}"),
        PageColumn("backward_s", "backward", _spreads(backward, seconds, longest_s), help=f"Backward {of_one}"),
        PageColumn("in_flight", "in flight", _spreads(in_flight, _whole), help=most),
    ]


def _valued_columns(found: Valued, evaluation: Evaluation) -> list[PageColumn[Group]]:
    stages = evaluation.stages
    slowest_s = max(stage.time_s for stage in stages)
    memory = [stage.memory_bytes for stage in stages]
    sizes = size_scale(max(found.instance.memory_bytes, *memory), SHOWN_DIGITS).with_unit

    def seconds(name: str, largest_s: float | None = None) -> Callable[[Group], TableCell]:
        times_s = [getattr(stage, name) for stage in stages]
        return _spreads(times_s, time_scale(max(times_s)).with_unit, largest_s)

    def binds(group: Group) -> TableCell:
        names = sorted({name for number in group for name in stages[number].binding})
        return TableCell(", ".join(names), warns=bool(names))

    in_flight = _spreads([stage.in_flight_microbatches for stage in stages], _whole)
    shares = _spreads([stage.memory_bytes / stage.memory_limit_bytes for stage in stages], share_text)
    time = "Of a microbatch: compute, communication and gradients, divided by d"
    resync = "A microbatch's share of summing gradients over the replicas"
    return [
        PageColumn("time_s", "time", seconds("time_s", slowest_s), help=time),
        PageColumn("compute_s", "compute", seconds("compute_s")),
        PageColumn("communication_s", "comm.", seconds("communication_s")),
        PageColumn("resync_s", "gradients", seconds("resync_s"), help=resync),
        PageColumn("in_flight", "in flight", in_flight, help="Microbatches that a replica keeps in flight"),
        PageColumn("memory_bytes", "memory", _spreads(memory, sizes), help="On each device"),
        PageColumn("memory_share", "%", shares, help="Of a device's memory"),
        PageColumn("binds", "binds", binds, numeric=False, help="What limits the stage: time, memory, or both"),
    ]


def rank_groups(found: Valued) -> list[Group]:
    """Replicas of the same stages do the same but for when; of many ranks those whose stages are alike share a row."""
    ranks = [rank.stages for rank in found.simulation.ranks]
    if len(set(ranks)) <= MOST_ROWS:
        return groups(ranks)
    return groups([tuple(_alike(found.plan.stages[stage]) for stage in stages) for stages in ranks])


def rank_table(found: Valued, rows: Sequence[Group]) -> PageTable[Group]:
    """A row for each group of ranks: where their time goes, and their memory."""
    simulation = found.simulation
    ranks = simulation.ranks
    length_s = simulation.length_s

    def stages(group: Group) -> TableCell:
        return TableCell(_shortened(range_text({stage + 1 for number in group for stage in ranks[number].stages})))

    def share(value: float) -> str:
        return share_text(value / length_s) if length_s > 0 else "-"

    def shares(name: str, largest_s: float | None = None) -> Callable[[Group], TableCell]:
        return _spreads([getattr(rank, name) for rank in ranks], share, largest_s)

    peak = [rank.peak_memory_bytes for rank in ranks]
    unused = [rank.memory_limit_bytes - rank.peak_memory_bytes for rank in ranks]
    sizes = size_scale(max(simulation.memory_limit_bytes, *peak), SHOWN_DIGITS).with_unit
    over = frozenset(k for k, rank in enumerate(ranks) if unused[k] < -1e-9 * rank.memory_limit_bytes)
    devices = _sums([rank.devices for rank in ranks])
    of_devices = "Each rank stands for the t devices of a replica, which go in step"
    of_compute = "Passes and the optimizer, without transfers"
    of_transfers = "Transfers that hold up passes, and all-reduce"
    of_unused = "Of a device's memory; less than nothing where it does not do"
    columns = [
        PageColumn("rank", "rank", _numbers(0)),
        PageColumn("stages", "stages", stages, numeric=False),
        PageColumn("devices", "devices", devices, help=of_devices),
        PageColumn("compute_s", "compute", shares("compute_s", length_s), help=of_compute),
        PageColumn("communication_s", "comm.", shares("communication_s"), help=of_transfers),
        PageColumn("waiting_s", "waiting", shares("waiting_s"), help="Nothing to do while what is next is on its way"),
        PageColumn("bubble_s", "bubble", shares("bubble_s"), help="Nothing to do otherwise"),
        PageColumn("peak_memory_bytes", "peak memory", _spreads(peak, sizes, over=over), help="On each device"),
        PageColumn("unused_bytes", "unused", _spreads(unused, sizes, over=over), help=of_unused),
    ]
    return PageTable.of(columns, rows)


def comparison_table(subject: Subject) -> PageTable[Compared]:
    """The table with this plan first, then the others."""
    own = subject.valued.simulation
    plans = [Compared("this plan", "", own), *subject.compared]
    runs = [x.simulation for x in plans if x.simulation is not None]
    longest_s, own_s = max(run.step_s for run in runs), own.step_s
    times = time_scale(longest_s).with_unit
    sizes = size_scale(max(run.peak_memory_bytes for run in runs), SHOWN_DIGITS).with_unit

    def figures(of: Callable[[Simulation], TableCell]) -> Callable[[Compared], TableCell]:
        return lambda one: TableCell("-") if one.simulation is None else of(one.simulation)

    def step(run: Simulation) -> TableCell:
        share = run.step_s / longest_s if longest_s > 0 else None
        return TableCell(_unbroken(times(run.step_s)), run.step_s, share)

    def relative(run: Simulation) -> TableCell:
        return TableCell(f"{run.step_s / own_s:.3f}", run.step_s / own_s) if own_s > 0 else TableCell("-")

    def peak(run: Simulation) -> TableCell:
        peak_bytes = run.peak_memory_bytes
        return TableCell(_unbroken(sizes(peak_bytes)), peak_bytes, warns=bool(run.memory_violations))

    stages = figures(lambda run: TableCell(f"{len(run.stages):,}", len(run.stages)))
    devices = figures(lambda run: TableCell(f"{run.devices:,}", run.devices))
    idle = figures(lambda run: TableCell(_unbroken(share_text(run.bubble_share)), run.bubble_share))
    of_peak = "Of the rank that holds most, on each device"
    columns: list[PageColumn[Compared]] = [
        PageColumn("planner", "planner", lambda one: TableCell(one.planner), numeric=False),
        PageColumn("step_s", "simulated step", figures(step)),
        PageColumn("relative", "relative", figures(relative), help="Its step over this plan's"),
        PageColumn("stages", "stages", stages),
        PageColumn("devices", "devices", devices),
        PageColumn("bubble_share", "idle", idle),
        PageColumn("peak_memory_bytes", "peak memory", figures(peak), help=of_peak),
        PageColumn(
            "note", "its plan", lambda one: TableCell(printable(one.note), warns=one.simulation is None), numeric=False
        ),
    ]
    return PageTable.of(columns, plans)


def _numbers(first: int) -> Callable[[Group], TableCell]:
    def cell(group: Group) -> TableCell:
        text = _shortened(range_text(number + first for number in group))
        return TableCell(text, group[0] + first if len(group) == 1 else None)

    return cell


def _sums(values: Sequence[int]) -> Callable[[Group], TableCell]:
    """Cells of one count, or of what a group has together."""

    def cell(group: Group) -> TableCell:
        of_group = [values[number] for number in group]
        if len(of_group) == 1:
            return TableCell(f"{of_group[0]:,}", of_group[0])
        alike = f"{len(of_group)}{NO_BREAK}x{NO_BREAK}{of_group[0]:,}"
        return TableCell(alike if len(set(of_group)) == 1 else f"{sum(of_group):,} of all", sum(of_group))

    return cell


def _unbroken(text: str) -> str:
    return text.replace(" ", NO_BREAK)


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _shortened(text: str, width: int = 24) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."


def count_text(table: PageTable[Group], what: str, count: int) -> str:
    """What a grouped table says of itself."""
    return f"{plural(count, what)} in {plural(len(table.rows), 'row')}"
