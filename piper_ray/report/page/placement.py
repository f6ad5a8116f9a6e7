"""Where the stages run: the cluster's devices in rows, node by node, in the colours of their stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from markupsafe import Markup

from piper_ray.model.figures import plural
from piper_ray.model.instance import Instance
from piper_ray.report.page import svg
from piper_ray.simulate.result import Simulation

COLOURS = 8
"""Classes c0, c1, ... of the style sheet; neighbouring stages differ."""

_MOST_CELLS = 1024
"""Devices that are drawn one by one. Of more, several share a cell."""

_WIDTH = 960.0
_CELL = 20.0
_NODE_GAP = 6.0
_ROW_GAP = 8.0
_LABEL_CHARACTER = 7.0


@dataclass(frozen=True)
class Place:
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


def places_of(simulation: Simulation) -> tuple[Place, ...]:
    """Front to back, the devices of each beside those of the one before."""
    found: list[Place] = []
    first = 0
    for _, ranks in groupby(simulation.timeline.layout.ranks, key=lambda rank: rank.place):
        stages = next(ranks).stages
        figures = simulation.stages[stages[0]]
        devices = figures.data_parallel_degree * figures.tensor_parallel_degree
        found.append(Place(stages, first, devices, figures.tensor_parallel_degree))
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


def placement(instance: Instance, simulation: Simulation) -> Placement:
    """Devices of no stage stay empty."""
    places = places_of(simulation)
    node = node_devices(instance)
    cell_devices = _cell_devices(instance.devices, node)
    cells = -(-instance.devices // cell_devices)
    in_block = node // cell_devices if node is not None and cell_devices < node else 1
    blocks_in_row, gap = _row_shape(cells, in_block)
    pieces: list[Markup] = []
    in_row = blocks_in_row * in_block
    rows = -(-cells // in_row)
    height = rows * (_CELL + _ROW_GAP) - _ROW_GAP + 4.0
    for index, place in enumerate(places):
        pieces.append(_drawn(index, place, cell_devices, in_row, in_block, gap))
    used = places[-1].first_device + places[-1].devices
    if used < instance.devices:
        spans = list(_spans(used, instance.devices, cell_devices, in_row, in_block, gap))
        boxes = [svg.rect(x, y, width, _CELL, "unused") for x, y, width in spans]
        left_over = f"{plural(instance.devices - used, 'device')} left over: {used}-{instance.devices - 1}"
        pieces.append(svg.titled(boxes, left_over))
    if in_block > 1:
        pieces += list(_frames(cells, in_row, in_block, gap))
    words = f"{plural(len(simulation.stages), 'stage')} on {used:,} of {plural(instance.devices, 'device')}"
    width = in_row * _CELL + (blocks_in_row - 1) * gap + 4.0
    return Placement(svg.picture(max(width, _WIDTH), height, pieces, words, "placement"), _legend(node, cell_devices))


def _legend(node: int | None, cell_devices: int) -> str:
    if node is None:
        of_nodes = "; the input does not say which of them share a node"
    elif cell_devices < node:
        of_nodes = f"; frames are nodes of {node}"
    else:
        of_nodes = f", {plural(cell_devices // node, 'node')}"
    cell = "A square is one device" if cell_devices == 1 else f"A square is {cell_devices:,} devices"
    return f"{cell}{of_nodes}. The number is the stage's."


def _cell_devices(devices: int, node: int | None) -> int:
    """1, or a whole node, or so many nodes (or devices) that the cells are few enough."""
    if devices <= _MOST_CELLS:
        return 1
    size = node or 1
    while devices > size * _MOST_CELLS:
        size *= 2
    return size


def _row_shape(cells: int, in_block: int) -> tuple[int, float]:
    """Blocks in a row, and the gap between them."""
    gap = _NODE_GAP if in_block > 1 else 0.0
    fitting = int((_WIDTH + gap - 4.0) // (in_block * _CELL + gap))
    blocks = -(-cells // in_block)
    most = max(1, fitting)
    if in_block == 1 and most > 32 and cells > most:
        most = most // 8 * 8
    return min(most, blocks), gap


def _spans(
    first: int, end: int, cell_devices: int, in_row: int, in_block: int, gap: float
) -> Iterator[tuple[float, float, float]]:
    """x, y and width of the devices from first to end: a stretch for each block of each row that they touch."""
    device = first
    block_devices = in_block * cell_devices if in_block > 1 else in_row * cell_devices
    while device < end:
        until = min(end, (device // block_devices + 1) * block_devices)
        start_cell = device / cell_devices
        row, column = divmod(int(start_cell), in_row)
        inside = start_cell - int(start_cell)
        x = 2.0 + (column + inside) * _CELL + column // in_block * gap
        yield x, 2.0 + row * (_CELL + _ROW_GAP), (until - device) / cell_devices * _CELL
        device = until


def _drawn(index: int, place: Place, cell_devices: int, in_row: int, in_block: int, gap: float) -> Markup:
    """Replicas as boxes where a cell is a device, stretches where it is several; the stages' numbers on top."""
    end = place.first_device + place.devices
    boxes: list[Markup] = []
    if cell_devices == 1:
        for first in range(place.first_device, end, place.degree):
            for x, y, width in _spans(first, first + place.degree, 1, in_row, in_block, gap):
                boxes.append(svg.rect(x + 0.5, y, width - 1.0, _CELL, f"c{index % COLOURS}"))
    else:
        spans = _spans(place.first_device, end, cell_devices, in_row, in_block, gap)
        boxes = [svg.rect(x, y, width, _CELL, f"c{index % COLOURS} joined") for x, y, width in spans]
    text = ",".join(str(stage + 1) for stage in place.stages)
    for x, y, width in _joined(list(_spans(place.first_device, end, cell_devices, in_row, in_block, gap)), gap):
        if width >= _LABEL_CHARACTER * len(text) + 2.0:
            boxes.append(svg.label(x + width / 2, y + _CELL - 5.5, text, "middle"))
    replicas = place.devices // place.degree
    title = (
        f"{place.name}: devices {place.first_device}-{end - 1}, {plural(replicas, 'replica')} of "
        f"{plural(place.degree, 'device')}"
    )
    return svg.titled(boxes, title)


def _joined(spans: Sequence[tuple[float, float, float]], gap: float) -> list[tuple[float, float, float]]:
    """Stretches of one row as one, over the gaps between blocks."""
    found: list[tuple[float, float, float]] = []
    for x, y, width in spans:
        if found and found[-1][1] == y and x - (found[-1][0] + found[-1][2]) <= gap + 0.1:
            found[-1] = (found[-1][0], y, x + width - found[-1][0])
        else:
            found.append((x, y, width))
    return found


def _frames(cells: int, in_row: int, in_block: int, gap: float) -> Iterator[Markup]:
    for first in range(0, cells, in_block):
        row, column = divmod(first, in_row)
        x = 2.0 + column * _CELL + column // in_block * gap
        width = min(in_block, cells - first) * _CELL
        yield svg.rect(x - 1.5, 0.5 + row * (_CELL + _ROW_GAP), width + 3.0, _CELL + 3.0, "node")
