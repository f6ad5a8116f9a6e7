"""Where the stages run: the cluster's devices in rows, node by node, in the colours of their stages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, product

from markupsafe import Markup

from piper_ray.model.cluster import Cluster
from piper_ray.model.figures import plural
from piper_ray.model.instance import Instance
from piper_ray.report.page import svg
from piper_ray.simulate.result import Simulation

COLOURS = 8
"""Classes c0, c1, ... of the style sheet; neighbouring stages differ."""

_MOST_CELLS = 1024
"""Devices that are drawn one by one. Of more, several share a cell."""

_WIDTH, _MARGIN = 960.0, 3.0
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


def places_of(simulation: Simulation, cluster: Cluster) -> tuple[StagePlace, ...]:
    """Front to back, the devices of each beside those of the one before; where there are nodes, the stages that come in
    the largest blocks of these first, so that no block is cut by a node's border."""
    held = []
    for _, ranks in groupby(simulation.timeline.layout.ranks, key=lambda rank: rank.place):
        stages = next(ranks).stages
        figures = simulation.stages[stages[0]]
        held.append((stages, figures.data_parallel_degree * figures.tensor_parallel_degree, figures))
    if len(cluster.links) > 1:
        blocks = [cluster.shared_blocks(x.data_parallel_degree, x.tensor_parallel_degree) for _, _, x in held]
        held = [place for _, place in sorted(zip(blocks, held, strict=True), key=lambda one: -max(one[0], default=0))]
    found: list[StagePlace] = []
    first = 0
    for stages, devices, figures in held:
        found.append(StagePlace(stages, first, devices, figures.tensor_parallel_degree))
        first += devices
    return tuple(found)


def node_devices(instance: Instance) -> int | None:
    """Devices of a node: of the smallest group with a link of its own; None where the input knows no groups."""
    inner = instance.cluster.links[:-1]
    return inner[0].devices if inner else None


@dataclass(frozen=True)
class Placement:
    """The picture, and in words what one of its cells is."""

    picture: Markup
    legend: str


@dataclass(frozen=True)
class _Grid:
    """Cells in rows, in blocks (nodes) with a gap between them where a cell is less than a node.

    cell_devices: of one cell. in_block, in_row: cells. cell, gap: widths.
    """

    devices: int
    cell_devices: int
    in_block: int
    in_row: int
    cell: float
    gap: float

    @classmethod
    def of(cls, devices: int, node: int | None) -> _Grid:
        """A device a cell while those are few, else a node, or some of them."""
        size = 1
        if devices > _MOST_CELLS:
            size = node or 1
            while devices > size * _MOST_CELLS:
                size *= 2
        cells = -(-devices // size)
        in_block = node // size if node is not None and size < node else 1
        gap = _NODE_GAP if in_block > 1 else 0.0
        blocks = 1
        while blocks * in_block < cells and 2 * blocks * (in_block * _LEAST_CELL + gap) <= _WIDTH:
            blocks *= 2
        cell = (_WIDTH - 2 * _MARGIN - (blocks - 1) * gap) / (blocks * in_block)
        return cls(devices, size, in_block, blocks * in_block, min(_MOST_CELL, cell), gap)

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
        x = _MARGIN + (column + inside / self.cell_devices) * self.cell + column // self.in_block * self.gap
        return x, _MARGIN + row * (_CELL_HEIGHT + _ROW_GAP)


def placement(instance: Instance, simulation: Simulation) -> Placement:
    """Devices of no stage stay empty."""
    places = places_of(simulation, instance.cluster)
    node = node_devices(instance)
    grid = _Grid.of(instance.devices, node)
    pieces = [_drawn(grid, place, f"c{index % COLOURS}") for index, place in enumerate(places)]
    used = places[-1].first_device + places[-1].devices
    if used < instance.devices:
        boxes = [svg.rect(x, y, width, _CELL_HEIGHT, "unused") for x, y, width in grid.spans(used, instance.devices)]
        left_over = instance.devices - used
        pieces.append(svg.titled(boxes, f"{plural(left_over, 'device')} left over: {used}-{instance.devices - 1}"))
    if grid.in_block > 1:
        pieces += list(_frames(grid))
    words = f"{plural(len(simulation.stages), 'stage')} on {used:,} of {plural(instance.devices, 'device')}"
    return Placement(svg.picture(_WIDTH, grid.height, pieces, words, "placement"), _legend(node, grid.cell_devices))


def _legend(node: int | None, cell_devices: int) -> str:
    if node is None:
        of_nodes = "; the input does not say which of them share a node"
    elif cell_devices < node:
        of_nodes = f"; frames are nodes of {node}"
    else:
        of_nodes = f", {plural(cell_devices // node, 'node')} of {node}"
    cell = "A cell is one device" if cell_devices == 1 else f"A cell is {cell_devices:,} devices"
    return f"{cell}{of_nodes}. Numbers are those of stages."


def _drawn(grid: _Grid, place: StagePlace, colour: str) -> Markup:
    """Replicas as boxes where a cell is a device, stretches where it is several; the stages' numbers on top."""
    end = place.first_device + place.devices
    boxes: list[Markup] = []
    if grid.cell_devices == 1:
        for first in range(place.first_device, end, place.degree):
            for x, y, width in grid.spans(first, first + place.degree):
                boxes.append(svg.rect(x, y, width, _CELL_HEIGHT, colour))
    numbers = [str(stage + 1) for stage in place.stages]
    texts = [",".join(numbers), f"{numbers[0]}\N{HORIZONTAL ELLIPSIS}{numbers[-1]}"]
    for x, y, width in grid.spans(place.first_device, end):
        if grid.cell_devices > 1:
            boxes.append(svg.rect(x, y, width, _CELL_HEIGHT, colour))
        # Within the first replica if any text fits there: no border goes through it.
        rooms = [width] if grid.cell_devices > 1 else [min(place.degree * grid.cell, width), width]
        for room, text in product(rooms, texts):
            if room >= _LABEL_CHARACTER * len(text) + 3.0:
                boxes.append(svg.label(x + room / 2, y + _CELL_HEIGHT - 5.5, text, "middle"))
                break
    replicas = place.devices // place.degree
    title = (
        f"{place.name}: devices {place.first_device}-{end - 1}, {plural(replicas, 'replica')} of "
        f"{plural(place.degree, 'device')}"
    )
    return svg.titled(boxes, title)


def _frames(grid: _Grid) -> Iterator[Markup]:
    for first in range(0, grid.cells, grid.in_block):
        x, y = grid.corner(first)
        width = min(grid.in_block, grid.cells - first) * grid.cell
        yield svg.rect(x - 1.5, y - 1.5, width + 3.0, _CELL_HEIGHT + 3.0, "node")
