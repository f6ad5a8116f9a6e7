"""Memory of each rank over time as a picture: a lane for each rank, or for neighbours where those are many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from piper_ray.model.figures import plural, share_text, size_text, time_scale
from piper_ray.report.page import svg
from piper_ray.report.page.tables import Group
from piper_ray.report.simulation.findings import ranks_text
from piper_ray.simulate.result import Simulation
from piper_ray.simulate.timeline import MemorySteps

_LITTLE = 0.25
"""Share of a device's memory below which the peaks are drawn at a scale of their own."""

_COLUMNS = 240
"""Of a lane; each shows the most that is held within it."""

_Height = Callable[[float], float]

_FIGURES, _WIDTH = 170.0, 960.0
_LEAST_LABEL, _CHARACTER = 110.0, 6.4
_MOST_STAGES = 6
"""Named of a rank; of more the first ones and the last."""
_LANE, _GAP, _AXIS = 30.0, 6.0, 24.0


@dataclass(frozen=True)
class MemoryPicture:
    """The picture, and in words how high its lanes are."""

    picture: Markup
    legend: str


def memory_picture(simulation: Simulation, lanes: Sequence[Group]) -> MemoryPicture:
    """Of each group of ranks the most that any of them holds on a device. The top of a lane is the limit, or the
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
    of_device = ", a device's" if top_bytes == limit_bytes else f"; a device has {size_text(limit_bytes)}"
    legend = f"The height of a lane is {size_text(top_bytes)}{of_device}."
    words = f"Memory of {plural(len(simulation.ranks), 'rank')} over time. {legend}"
    return MemoryPicture(svg.picture(_WIDTH, bottom + _AXIS, pieces, words, "memory"), legend)


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
    """Of a lane, with the stages of its ranks where they are the same."""
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
    limit_bytes = simulation.memory_limit_bytes
    peak_bytes = max(simulation.ranks[rank].peak_memory_bytes for rank in group)

    def height(size: float) -> float:
        return _LANE * min(1.0, size / top_bytes) if top_bytes > 0 else 0.0

    over = peak_bytes > limit_bytes * (1.0 + 1e-9)
    share = f" ({share_text(peak_bytes / limit_bytes)})" if limit_bytes > 0 else ""
    base = y + _LANE
    pieces = [
        svg.rect(left, y, plot, _LANE, "lane"),
        _area(most, height, left, base, plot, "activations over" if over else "activations"),
        svg.rect(left, base - height(fixed_bytes), plot, height(fixed_bytes), "fixed"),
        svg.label(left - 8.0, y + _LANE / 2 + 4.0, name, "end"),
        svg.label(
            _WIDTH - _FIGURES + 8.0,
            y + _LANE / 2 + 4.0,
            f"{size_text(peak_bytes)}{share}",
            "warns" if over else "start",
        ),
    ]
    if limit_bytes <= top_bytes:
        limit = Markup('<path d="M{} {}h{}" class="limit"/>')
        pieces.append(limit.format(svg.number(left), svg.number(base - height(limit_bytes)), svg.number(plot)))
    stages = ", ".join(dict.fromkeys(simulation.ranks[rank].name for rank in group))
    title = f"{ranks_text(group)}: {stages}: at most {size_text(peak_bytes)}, {size_text(fixed_bytes)} of it throughout"
    return svg.titled(pieces, title)


def _area(most: npt.NDArray[np.float64], height: _Height, left: float, base: float, plot: float, style: str) -> Markup:
    """One path; columns of equal height in one go."""
    width = plot / len(most)
    parts = [f"M{svg.number(left)} {svg.number(base)}"]
    for column, size in enumerate(most.tolist()):
        if column == 0 or size != most[column - 1]:
            if column:
                parts.append(f"H{svg.number(left + column * width)}")
            parts.append(f"V{svg.number(base - height(size))}")
    parts.append(f"H{svg.number(left + plot)}V{svg.number(base)}Z")
    return Markup('<path d="{}" class="{}"/>').format("".join(parts), style)


def _axis(until_s: float, left: float, y: float, plot: float) -> Markup:
    scale = time_scale(until_s)
    pieces = []
    for at in svg.ticks(until_s, 6):
        x = left + (plot * at / until_s if until_s > 0 else 0.0)
        pieces.append(Markup('<path d="M{} {}v4" class="tick"/>').format(svg.number(x), svg.number(y)))
        pieces.append(svg.label(x, y + 17.0, f"{at / scale.size:.6g} {scale.unit}", "middle"))
    return Markup("<g>{}</g>").format(Markup().join(pieces))
