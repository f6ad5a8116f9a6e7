"""Reading a sweep's TOML file: all its faults at once, those of the workloads included; then every point in order."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

from piper_ray.model import arguments
from piper_ray.model.constraints import Recompute
from piper_ray.model.errors import InputError, UsageError
from piper_ray.model.instance import Instance
from piper_ray.model.options import SolveOptions
from piper_ray.model.restrictions import Restrictions
from piper_ray.model.schedule import Schedule
from piper_ray.model.units import OnNote, doubtful
from piper_ray.sweep.point import Point, Sweep, graph_hash
from piper_ray.sweep.schema import POINTS, Grid, ListedPoint, NamedWorkload, SweepOptions, check_label, schedule_named
from piper_ray.workloads.formats import load
from piper_ray.workloads.formats.documents import advice, parse_json, parse_toml, read_text, refuse
from piper_ray.workloads.formats.faults import Faults, path_of, quoted, shown

_KEYS = ("name", "workloads", "options", "grid", "points")
_CLUSTER = {  # in the sweep's words, and in those of an instance
    "devices": "devices",
    "microbatches": "microbatches",
    "memory": "memory_bytes",
    "bandwidth": "bandwidth_bytes_per_s",
}
_PER_SECOND = {"memory": "", "bandwidth": "/s"}

_Figures = tuple[Any, Any, Any, Any]
"""K, N, M and B; None: the workload's own."""


class _Draft:
    """A point whose cluster and schedule may still be the workload's own in parts."""

    __slots__ = ("figures", "planner", "restrictions", "schedule", "workload")

    def __init__(
        self, workload: str, planner: str, figures: _Figures, restrictions: Restrictions, schedule: str | None
    ) -> None:
        self.workload, self.planner, self.figures, self.restrictions = workload, planner, figures, restrictions
        self.schedule = None if schedule is None else schedule_named(schedule)


def read_sweep(path: str | os.PathLike[str], on_note: OnNote = lambda text: None) -> Sweep:  # noqa: ARG005
    """The sweep that a TOML file describes (``schema``). Points given twice count once. on_note: hears of what is
    doubtful in it, and of the notes of its workloads.

    Raises InputError with every fault found.
    """
    source = arguments.location("source", path)
    text = read_text(source)
    # A sweep is TOML; what is JSON is read as that, to say what it is.
    document = (parse_json if text.lstrip().startswith("{") else parse_toml)(source, text)
    faults = Faults()
    if not {"workloads", "grid", "points"} & document.keys() and (kind := advice(document)) is not None:
        refuse(source, "", f"not a sweep but {kind}")
    for key in document:
        if key not in _KEYS:
            faults.at(path_of("", key), f"unknown key; expected one of {', '.join(_KEYS)}")
    name = document.get("name", Path(source).stem)
    if not isinstance(name, str):
        faults.at("name", f"not a text ({shown(name)}); expected a text")
    workloads = _read_workloads(document.get("workloads"), faults)
    options = faults.model(SweepOptions, document.get("options", {}), "options")
    grids = _read_grids(document.get("grid", []), workloads, faults)
    listed = _read_points(document.get("points", []), workloads, faults)
    if "grid" not in document and "points" not in document:
        faults.at("", "no points; expected [grid] or [[points]]")
    if faults:
        raise InputError(source, faults.found)
    drafts = [*(draft for grid in grids for draft in _expanded(grid, tuple(workloads))), *map(_listed, listed)]
    used = {draft.workload for draft in drafts}
    folder = Path(source).parent
    graphs = {
        label: _load(folder, label, workload, drafts, faults, on_note)
        for label, workload in workloads.items()
        if label in used
    }
    if faults or options is None:
        raise InputError(source, faults.found)
    for note in faults.notes:
        on_note(f"{source}: {note}")
    found = {label: graph for label, graph in graphs.items() if graph is not None}
    return Sweep(
        name=str(name),
        points=tuple(dict.fromkeys(_point(draft, found[draft.workload]) for draft in drafts)),
        graphs=found,
        graph_hashes={label: graph_hash(graph) for label, graph in found.items()},
        options=SolveOptions(gap=options.gap, time_limit_s=options.time_limit_s, threads=1),
    )


def _read_workloads(table: object, faults: Faults) -> dict[str, NamedWorkload]:
    if not isinstance(table, Mapping) or not table:
        faults.at("workloads", "missing or no table; expected at least one label = path")
        return {}
    found: dict[str, NamedWorkload] = {}
    for label, value in table.items():
        path = path_of("workloads", label)
        if not check_label(label):
            faults.at(path, "cannot name a folder; expected letters, digits and any of . _ + - as a label")
        workload = faults.model(NamedWorkload, {"path": value} if isinstance(value, str) else value, path)
        # A faulty one still counts as there: one fault should not bring others.
        found[label] = workload or NamedWorkload(path="")
    return found


def _read_grids(value: object, workloads: Mapping[str, object], faults: Faults) -> list[Grid]:
    tables = list(enumerate(value)) if isinstance(value, list) else [(None, value)]
    grids: list[Grid] = []
    for index, table in tables:
        path = "grid" if index is None else f"grid[{index}]"
        grid = faults.model(Grid, table, path)
        if grid is None:
            continue
        for label in _values(grid.workloads):
            _check_workload(label, workloads, f"{path}.workloads", faults)
        for name in _PER_SECOND:
            _note_doubtful(_values(getattr(grid, name)), path, name, faults)
        size = math.prod(len(axis) for axis in _axes(grid, tuple(workloads)))
        if size > POINTS:
            faults.at(path, f"{size:,} points; expected at most {POINTS:,}")
        grids.append(grid)
    return grids


def _read_points(value: object, workloads: Mapping[str, object], faults: Faults) -> list[ListedPoint]:
    if not isinstance(value, list):
        faults.at("points", f"not a list ({shown(value)}); expected [[points]]")
        return []
    found = []
    for index, table in enumerate(value):
        point = faults.model(ListedPoint, table, f"points[{index}]")
        if point is not None:
            _check_workload(point.workload, workloads, f"points[{index}].workload", faults)
            for name in _PER_SECOND:
                _note_doubtful(_values(getattr(point, name)), f"points[{index}]", name, faults)
            found.append(point)
    return found


def _check_workload(label: str, workloads: Mapping[str, object], path: str, faults: Faults) -> None:
    if workloads and label not in workloads:
        faults.at(path, f"unknown ({quoted(label)}); expected one of {', '.join(workloads)}")


def _note_doubtful(sizes: list[float], path: str, name: str, faults: Faults) -> None:
    """Of an axis the first size that most likely lacks its unit."""
    doubts = (doubtful(size, _PER_SECOND[name], with_units=True) for size in sizes)
    doubt = next((doubt for doubt in doubts if doubt is not None), None)
    if doubt is not None:
        faults.note(f"{path}.{name}", doubt)


def _values(value: Any) -> list[Any]:
    """An axis as a list: of one value, or of several, ranges written out."""
    items = value if isinstance(value, list) else [] if value is None else [value]
    return [number for item in items for number in (item if isinstance(item, tuple) else (item,))]


def _axes(grid: Grid, workloads: tuple[str, ...]) -> list[list[Any]]:
    """Workload and restrictions change slowest: neighbours share a lattice."""
    return [
        _values(grid.workloads) or list(workloads),
        _values(grid.tensor_parallelism),
        _values(grid.recompute),
        _values(grid.data_parallelism),
        _values(grid.schedules) or [None],
        _values(grid.planners),
        *(_values(getattr(grid, name)) or [None] for name in _CLUSTER),
    ]


def _expanded(grid: Grid, workloads: tuple[str, ...]) -> Iterator[_Draft]:
    for workload, tensor, recompute, data, schedule, planner, *figures in product(*_axes(grid, workloads)):
        k, n, m, b = figures
        yield _Draft(workload, planner, (k, n, m, b), Restrictions(tensor, data, Recompute(recompute)), schedule)


def _listed(point: ListedPoint) -> _Draft:
    restrictions = Restrictions(point.tensor_parallelism, point.data_parallelism, Recompute(point.recompute))
    figures = (point.devices, point.microbatches, point.memory, point.bandwidth)
    return _Draft(point.workload, point.planner, figures, restrictions, point.schedule)


def _load(
    folder: Path, label: str, workload: NamedWorkload, drafts: list[_Draft], faults: Faults, on_note: OnNote
) -> Instance | None:
    """The workload. What every point gives need not be in its file."""
    own = [draft.figures for draft in drafts if draft.workload == label]
    given = {
        quantity: own[0][index]
        for index, quantity in enumerate(_CLUSTER.values())
        if all(figures[index] is not None for figures in own)
    }
    place = path_of("workloads", label)
    try:
        path = folder / workload.path
        graph = load(path, in_flight=workload.in_flight, **given)
    except InputError as error:
        for fault in error.faults:
            faults.at(place, f"{error.source}: {fault}")
    except UsageError as error:
        faults.at(place, str(error))
    else:
        for note in graph.notes:
            on_note(f"{path}: {note}")
        return graph
    return None


def _point(draft: _Draft, graph: Instance) -> Point:
    own = [getattr(graph, quantity) for quantity in _CLUSTER.values()]
    k, n, m, b = (mine if given is None else given for given, mine in zip(draft.figures, own, strict=True))
    schedule = Schedule.first_of(draft.schedule, graph.schedule).settled
    return Point(draft.workload, draft.planner, k, n, float(m), float(b), draft.restrictions, schedule)
