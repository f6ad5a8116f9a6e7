"""Pictures of a page, as SVG: where the stages run, and each rank's memory over time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from piper_ray.model.cluster import Cluster
from piper_ray.model.figures import held_text, plural, printable, share_text, time_scale
from piper_ray.model.instance import Instance
from piper_ray.model.plan import Plan
from piper_ray.model.schedule import FLUSHED
from piper_ray.report.page.tables import Group
from piper_ray.report.simulated import ranks_text
from piper_ray.simulate.borders import listed_places
from piper_ray.simulate.result import Simulation
from piper_ray.simulate.timeline import MemorySteps


def number(value: float) -> str:
    """``12``, ``12.3``: to a tenth."""
    return f"{value:.1f}".removesuffix(".0")


def rect(x: float, y: float, width: float, height: float, style: str) -> Markup:
    """A rectangle. style: its class."""
    return Markup('<rect x="{}" y="{}" width="{}" height="{}" class="{}"/>').format(
        number(x), number(y), number(width), number(height), style
    )


def label(x: float, y: float, text: str, style: str) -> Markup:
    """A text. x, y: where it begins, or its middle or end, as its class says; y is that of its base line."""
    return Markup('<text x="{}" y="{}" class="{}">{}</text>').format(number(x), number(y), style, text)


def titled(pieces: Iterable[Markup], title: str) -> Markup:
    """A group with what a pointer on it shows."""
    return Markup("<g><title>{}</title>{}</g>").format(title, Markup().join(pieces))


def picture(width: float, height: float, pieces: Iterable[Markup], text: str, style: str) -> Markup:
    """text: what it says to those who cannot see it."""
    return Markup('<svg class="{}" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        style, number(width), number(height), text, Markup().join(pieces)
    )


def ticks(until: float, most: int = 8) -> list[float]:
    """Round figures from 0 to ``until``, at most ``most`` apart from 0."""
    if not (until > 0 and math.isfinite(until)):
        return [0.0]
    size = 10.0 ** math.floor(math.log10(until / most))
    step = next(step for step in (size, 2 * size, 5 * size, 10 * size, 20 * size) if until / step <= most)
    return [step * number for number in range(int(until / step + 1e-9) + 1)]


COLOURS = 8
"""Classes c0, c1, ... of the style sheet; neighbouring stages differ."""

_MOST_CELLS = 1024
"""Devices that are drawn one by one. Of more, several share a cell."""

_WIDTH, _MARGIN = 960.0, 4.0
_CELL_HEIGHT = 20.0
_LEAST_CELL, _MOST_CELL = 13.0, 30.0
_NODE_GAP = 6.0
_ROW_GAP = 8.0
_LABEL_CHARACTER = 6.4


@dataclass(frozen=True)
class StagePlace:
    """What holds one stage, or the chunks of one rank of each pipeline: neighbouring devices.

    stages: from 0. degree: t, devices of a replica.
    """

    stages: tuple[int, ...]
    first_device: int
    devices: int
    degree: int

    @property
    def name(self) -> str:
        numbers = ", ".join(str(stage + 1) for stage in self.stages)
        return f"stage{'s' if len(self.stages) > 1 else ''} {numbers}"


def places_of(
    simulation: Simulation,
    cluster: Cluster,
    within: Sequence[int],
    sites: int = 1,
    behind: Sequence[int] | None = None,
) -> tuple[StagePlace, ...]:
    """Under a flush where launch files put them. behind: the places of a plan, from the back of whole groups, or from
    the first device on where groups would be more than there are. Else front to back, each after the one before; where
    there are nodes, the stages that come in the largest blocks of these first, so that no block is cut by a node's
    border. within: stages that are placed. sites: their number, where the cluster is one of several equal ones."""
    held = []
    for _, ranks in groupby(simulation.timeline.layout.ranks, key=lambda rank: rank.place):
        stages = next(ranks).stages
        if stages[0] not in within:
            continue
        figures = simulation.stages[stages[0]]
        held.append((stages, figures.data_parallel_degree * figures.tensor_parallel_degree // sites, figures))
    if behind is not None and len(cluster.links) > 1:
        size = cluster.links[-2].devices or cluster.devices
        total = -(-(behind[0] + held[0][1]) // size) * size
        is_turned = total <= cluster.devices
        lying = [
            StagePlace(stages, total - at - devices if is_turned else at, devices, figures.tensor_parallel_degree)
            for at, (stages, devices, figures) in zip(behind, held, strict=True)
        ]
        return tuple(sorted(lying, key=lambda one: one.first_device))
    if simulation.schedule.name in FLUSHED and len(cluster.links) > 1 and len(within) == len(simulation.stages):
        firsts = listed_places(cluster, held[0][1], len(held))
        return tuple(
            StagePlace(stages, first, devices, figures.tensor_parallel_degree)
            for first, (stages, devices, figures) in zip(firsts, held, strict=True)
        )
    if len(cluster.links) > 1:
        degrees = [(x.data_parallel_degree // sites, x.tensor_parallel_degree) for _, _, x in held]
        blocks = [cluster.shared_blocks(*pair) for pair in degrees]
        held = [place for _, place in sorted(zip(blocks, held, strict=True), key=lambda one: -max(one[0], default=0))]
    found: list[StagePlace] = []
    first = 0
    for stages, devices, figures in held:
        found.append(StagePlace(stages, first, devices, figures.tensor_parallel_degree))
        first += devices
    return tuple(found)


@dataclass(frozen=True)
class LegendedPicture:
    """A picture, and in words what one of its cells is, or how high its lanes are."""

    picture: Markup
    legend: str


@dataclass(frozen=True)
class _Grid:
    """Cells in rows, in blocks with a gap between them: the smallest groups that are more than a cell.

    cell_devices: of one cell. in_row: cells. framed: the cells of groups that have a frame, those of a block first. A
    row has whole groups, or a group whole rows. cell: width.
    """

    devices: int
    cell_devices: int
    in_row: int
    framed: tuple[int, ...]
    cell: float

    @classmethod
    def of(cls, devices: int, groups: Sequence[int]) -> _Grid:
        """A device a cell while those are few, else a node, or some of them. groups: sizes, in ascending order."""
        size = 1
        if devices > _MOST_CELLS:
            size = groups[0] if groups else 1
            while devices > size * _MOST_CELLS:
                size *= 2
        cells = -(-devices // size)
        framed = [group // size for group in groups if group > size and group % size == 0]
        framed = framed[:1] + [group for group in framed[1:] if group < cells]
        in_block = framed[0] if framed else 1
        gap = _NODE_GAP if framed else 0.0
        blocks = 1
        while blocks * in_block < cells and 2 * blocks * (in_block * _LEAST_CELL + gap) <= _WIDTH:
            blocks *= 2
        while any(blocks * in_block % group and group % (blocks * in_block) for group in framed):
            blocks -= 1
        cell = (_WIDTH - 2 * _MARGIN - (blocks - 1) * gap) / (blocks * in_block)
        return cls(devices, size, blocks * in_block, tuple(framed), min(_MOST_CELL, cell))

    @property
    def in_block(self) -> int:
        """The cells of a block; 1: there are none."""
        return self.framed[0] if self.framed else 1

    @property
    def cells(self) -> int:
        return -(-self.devices // self.cell_devices)

    @property
    def height(self) -> float:
        rows = -(-self.cells // self.in_row)
        return rows * (_CELL_HEIGHT + _ROW_GAP) - _ROW_GAP + 2 * _MARGIN

    def spans(self, first: int, end: int) -> Iterator[tuple[float, float, float]]:
        """x, y and width of the devices from first to end: a stretch for each block that they touch, or each row."""
        together = (self.in_block if self.in_block > 1 else self.in_row) * self.cell_devices
        while first < end:
            until = min(end, (first // together + 1) * together)
            x, y = self.corner(first)
            yield x, y, (until - first) / self.cell_devices * self.cell
            first = until

    def corner(self, device: int) -> tuple[float, float]:
        whole, inside = divmod(device, self.cell_devices)
        row, column = divmod(whole, self.in_row)
        gaps = column // self.in_block if self.framed else 0
        x = _MARGIN + (column + inside / self.cell_devices) * self.cell + gaps * _NODE_GAP
        return x, _MARGIN + row * (_CELL_HEIGHT + _ROW_GAP)


def placements(instance: Instance, plan: Plan, simulation: Simulation) -> list[LegendedPicture]:
    """A picture for each kind of devices, with its own frames and colour."""
    found = []
    for number, (name, cluster) in enumerate(zip(instance.cluster.kind_names, instance.cluster.alike, strict=True)):
        within = [k for k, stage in enumerate(plan.stages) if stage.kind == name]
        colour, sites = f"c{number % COLOURS}" if name else None, cluster.sites
        behind = plan.places if simulation.schedule.asynchronous else None
        own = placement(cluster.at_site, simulation, within, colour, len(sites) or 1, behind)
        name = f"At each of {cluster.sites_text}" if sites else name
        found.append(replace(own, legend=f"{printable(name)}. {own.legend}") if name else own)
    return found


def placement(
    cluster: Cluster,
    simulation: Simulation,
    within: Sequence[int],
    colour: str | None = None,
    sites: int = 1,
    behind: Sequence[int] | None = None,
) -> LegendedPicture:
    """The placement of some stages. Devices of no stage stay empty. colour: of all stages; None: each has its own.
    sites, behind: as in ``places_of``."""
    places = places_of(simulation, cluster, within, sites, behind)
    groups = [link.devices for link in cluster.links[:-1] if link.devices is not None]
    grid = _Grid.of(cluster.devices, groups)
    pieces = [_drawn(grid, place, colour or f"c{index % COLOURS}") for index, place in enumerate(places)]
    ends = [0, *(place.first_device + place.devices for place in places)]
    for first, end in zip(ends, [*(place.first_device for place in places), cluster.devices], strict=True):
        if first < end:
            boxes = [rect(x, y, width, _CELL_HEIGHT, "unused") for x, y, width in grid.spans(first, end)]
            pieces.append(titled(boxes, f"{plural(end - first, 'device')} left over: {first}-{end - 1}"))
    used = sum(place.devices for place in places)
    pieces += _frames(grid)
    words = f"{plural(len(within), 'stage')} on {used:,} of {plural(cluster.devices, 'device')}"
    name = "node" if cluster.node_devices is None else "domain"
    return LegendedPicture(picture(_WIDTH, grid.height, pieces, words, "placement"), _legend(name, groups, grid))


def _legend(name: str, groups: Sequence[int], grid: _Grid) -> str:
    size = grid.cell_devices
    told = "" if groups else "; the input does not say which of them share a node"
    if groups and size >= groups[0]:
        told = f", {plural(size // groups[0], name)} of {groups[0]}"
    framed = [f"{x * size:,}" for x in grid.framed]
    names = [f"{name}s of {framed.pop(0)}"] if groups and size < groups[0] else []
    names += [f"groups of {' and '.join(framed)}"] if framed else []
    frames = f"; frames are {' and '.join(names)}" if names else ""
    cell = "A cell is one device" if size == 1 else f"A cell is {size:,} devices"
    return f"{cell}{told}{frames}. Numbers are those of stages."


def _drawn(grid: _Grid, place: StagePlace, colour: str) -> Markup:
    """Replicas as boxes where a cell is a device, stretches where it is several; the stages' numbers on top."""
    end = place.first_device + place.devices
    boxes: list[Markup] = []
    if grid.cell_devices == 1:
        for first in range(place.first_device, end, place.degree):
            for x, y, width in grid.spans(first, first + place.degree):
                boxes.append(rect(x, y, width, _CELL_HEIGHT, colour))
    numbers = [str(stage + 1) for stage in place.stages]
    texts = [",".join(numbers), f"{numbers[0]}\N{HORIZONTAL ELLIPSIS}{numbers[-1]}"]
    for x, y, width in grid.spans(place.first_device, end):
        if grid.cell_devices > 1:
            boxes.append(rect(x, y, width, _CELL_HEIGHT, colour))
        # Within the first replica if any text fits there: no border goes through it.
        rooms = [width] if grid.cell_devices > 1 else [min(place.degree * grid.cell, width), width]
        for room, text in product(rooms, texts):
            if room >= _LABEL_CHARACTER * len(text) + 3.0:
                boxes.append(label(x + room / 2, y + _CELL_HEIGHT - 5.5, text, "middle"))
                break
    replicas = place.devices // place.degree
    title = (
        f"{place.name}: devices {place.first_device}-{end - 1}, {plural(replicas, 'replica')} of "
        f"{plural(place.degree, 'device')}"
    )
    return titled(boxes, title)


def _frames(grid: _Grid) -> Iterator[Markup]:
    """The frames of each group, around those of smaller ones."""
    for level, group in enumerate(grid.framed, start=1):
        for first in range(0, grid.cells, group):
            last = min(first + group, grid.cells) - 1
            ends = first, min(last, first + grid.in_row - 1), last
            (left, top), (right, _), (_, bottom) = (grid.corner(cell * grid.cell_devices) for cell in ends)
            width, height, out = right - left + grid.cell, bottom - top + _CELL_HEIGHT, 1.5 * level
            yield rect(left - out, top - out, width + 2 * out, height + 2 * out, "node")


_LITTLE = 0.25
"""Share of a device's memory below which the peaks are drawn at a scale of their own."""

_COLUMNS = 240
"""The columns of a lane; each shows the most that is held within it."""

_Height = Callable[[float], float]

_FIGURES = 170.0
_LEAST_LABEL, _CHARACTER = 110.0, 6.4
_MOST_STAGES = 6
"""Named of a rank; of more the first ones and the last."""
_LANE, _GAP, _AXIS = 30.0, 6.0, 24.0


def memory_picture(simulation: Simulation, lanes: Sequence[Group]) -> LegendedPicture:
    """For each group of ranks the most that any of them holds on a device. The top of a lane is the limit, or the
    highest peak where that is more, or far less."""
    until_s = simulation.window_s[1]
    limit_bytes = simulation.memory_limit_bytes
    peak_bytes = simulation.peak_memory_bytes
    top_bytes = peak_bytes if peak_bytes < _LITTLE * limit_bytes else max(limit_bytes, peak_bytes)
    names = [_name(simulation, group) for group in lanes]
    left = max(_LEAST_LABEL, 16.0 + _CHARACTER * max(map(len, names)))
    plot = _WIDTH - left - _FIGURES
    pieces: list[Markup] = []
    for number, group in enumerate(lanes):
        y = number * (_LANE + _GAP)
        held = [simulation.memory(rank) for rank in group]
        fixed_bytes = max(float(steps.bytes[0]) for steps in held)
        most = np.maximum.reduce([most_by_column(steps, until_s) for steps in held])
        pieces.append(_lane(simulation, group, names[number], (left, y), most, fixed_bytes, top_bytes, plot))
    bottom = len(lanes) * (_LANE + _GAP)
    pieces.append(_axis(until_s, left, bottom, plot))
    of_device = ", a device's" if top_bytes == limit_bytes else f"; a device has {held_text(limit_bytes)}"
    legend = f"The height of a lane is {held_text(top_bytes)}{of_device}."
    words = f"Memory of {plural(len(simulation.ranks), 'rank')} over time. {legend}"
    return LegendedPicture(picture(_WIDTH, bottom + _AXIS, pieces, words, "memory"), legend)


def most_by_column(steps: MemorySteps, until_s: float) -> npt.NDArray[np.float64]:
    """float64[columns], bytes: the most at any moment of each of equal parts of the time from 0 on."""
    if not until_s > 0.0:
        return np.full(_COLUMNS, steps.peak_bytes)
    edges_s = np.linspace(0.0, until_s, _COLUMNS + 1)
    # From the step that holds at a column's start to the last one within it.
    held = np.maximum(np.searchsorted(steps.time_s, edges_s, side="right") - 1, 0)
    first, end = held[:-1], held[1:] + 1
    padded = np.append(steps.bytes, -np.inf)
    return np.maximum.reduceat(padded, np.stack([first, end], axis=1).ravel())[::2]


def _name(simulation: Simulation, group: Group) -> str:
    """The name of a lane, with the stages of its ranks where they are the same."""
    stages = {simulation.ranks[rank].stages for rank in group}
    if len(stages) > 1:
        return ranks_text(group)
    numbers = [str(stage + 1) for stage in stages.pop()]
    if len(numbers) > _MOST_STAGES:
        numbers[_MOST_STAGES - 1 : -1] = ["\N{HORIZONTAL ELLIPSIS}"]
    return f"{ranks_text(group)}: stage{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"


def _lane(
    simulation: Simulation,
    group: Group,
    name: str,
    corner: tuple[float, float],
    most: npt.NDArray[np.float64],
    fixed_bytes: float,
    top_bytes: float,
    plot: float,
) -> Markup:
    left, y = corner
    limit_bytes = simulation.ranks[group[0]].memory_limit_bytes
    peak_bytes = max(simulation.ranks[rank].peak_memory_bytes for rank in group)

    def height(size: float) -> float:
        return _LANE * min(1.0, size / top_bytes) if top_bytes > 0 else 0.0

    over = peak_bytes > limit_bytes * (1.0 + 1e-9)
    share = f" ({share_text(peak_bytes / limit_bytes)})" if limit_bytes > 0 else ""
    base = y + _LANE
    pieces = [
        rect(left, y, plot, _LANE, "lane"),
        _area(most, height, left, base, plot, "activations over" if over else "activations"),
        rect(left, base - height(fixed_bytes), plot, height(fixed_bytes), "fixed"),
        label(left - 8.0, y + _LANE / 2 + 4.0, name, "end"),
        label(
            _WIDTH - _FIGURES + 8.0,
            y + _LANE / 2 + 4.0,
            f"{held_text(peak_bytes)}{share}",
            "warns" if over else "start",
        ),
    ]
    if limit_bytes <= top_bytes:
        limit = Markup('<path d="M{} {}h{}" class="limit"/>')
        pieces.append(limit.format(number(left), number(base - height(limit_bytes)), number(plot)))
    stages = ", ".join(dict.fromkeys(simulation.ranks[rank].name for rank in group))
    title = f"{ranks_text(group)}: {stages}: at most {held_text(peak_bytes)}, {held_text(fixed_bytes)} of it throughout"
    return titled(pieces, title)


def _area(most: npt.NDArray[np.float64], height: _Height, left: float, base: float, plot: float, style: str) -> Markup:
    """One path; columns of equal height in one go."""
    width = plot / len(most)
    parts = [f"M{number(left)} {number(base)}"]
    for column, size in enumerate(most.tolist()):
        if column == 0 or size != most[column - 1]:
            if column:
                parts.append(f"H{number(left + column * width)}")
            parts.append(f"V{number(base - height(size))}")
    parts.append(f"H{number(left + plot)}V{number(base)}Z")
    return Markup('<path d="{}" class="{}"/>').format("".join(parts), style)


def _axis(until_s: float, left: float, y: float, plot: float) -> Markup:
    scale = time_scale(until_s)
    pieces = []
    for at in ticks(until_s, 6):
        x = left + (plot * at / until_s if until_s > 0 else 0.0)
        pieces.append(Markup('<path d="M{} {}v4" class="tick"/>').format(number(x), number(y)))
        pieces.append(label(x, y + 17.0, f"{at / scale.size:.6g} {scale.unit}", "middle"))
    return Markup("<g>{}</g>").format(Markup().join(pieces))
