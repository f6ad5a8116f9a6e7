"""A sweep as TOML: workloads, and the points to plan them at, as grids (every combination) and as a list.

    name = "A100"

    [workloads]                          # label = path, relative to this file
    bert32 = "../bert32-a100.toml"
    gnmt = { path = "gnmt/graph.txt", in_flight = "stashing" }

    [options]                            # of every solve; each may be left out
    gap = 0.01                           # stop within this share of the best; 0, a proof, if left out
    time_limit_s = 600

    [[grid]]                             # or [grid] if there is one; a value or a list for each
    workloads = ["bert32", "gnmt"]       # all if left out
    devices = ["8..64:8", "128..2048*2"] # from, to, and a step or a factor
    microbatches = [512, 1920]
    memory = ["8GiB", "80GB"]
    bandwidth = "25GB/s"
    tensor_parallelism = [true, false]   # allowed or not
    data_parallelism = true
    recompute = ["auto", "never"]        # auto, always, never, all-or-none
    schedules = ["2bw", "1f1b"]          # that plans are for; with chunks on each rank as "interleaved:4"
    planners = ["piper", "gpipe"]        # piper is the exact solver; the others are piper_ray.planners.PLANNERS

    [[points]]                           # the same keys, one value each
    workload = "bert32"
    devices = 96
    planner = "megatron"

    [models]                             # label = a name or an id as of the command plan, or the path of a config.json
    ours = "ours/config.json"

    [[plan]]                             # or [plan]; every combination is a plan of a model, over all that plan chooses
    models = ["ours", "llama3-8b"]       # labels of [models], or names that plan knows
    gpus = ["H100-SXM", "A100-80"]
    nodes = ["1..16*2", 12]
    gpus_per_node = 8                    # as the GPU is sold if left out
    batches = [256, 512]                 # in samples; the model's usual one if left out
    precisions = ["bf16", "fp8"]         # bf16 if left out
    runtimes = ["megatron", "torchtitan"] # megatron if left out
    tokens = 8192                        # of a sample; the model's own if left out
    schedules = ["1f1b", "interleaved"]  # no other one each; left out: one plan, the best of both

    [[plan]]
    models = ["llama3-8b"]
    kinds = { A100-80 = "1..4", H100-SXM = [2, 4] }  # in place of gpus and nodes: clusters of both kinds

Of devices, microbatches, memory, bandwidth and the schedule, what is left out is the workload's own. Memory and
bandwidth are texts with a unit, or numbers of bytes. ``hardware = "gpus.toml"`` at the top adds GPUs or corrects them,
as ``plan --hardware`` does.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field

from piper_ray.model import arguments, limits
from piper_ray.model.constraints import Recompute, Restrictions
from piper_ray.model.errors import InputError, UsageError
from piper_ray.model.forms import InFlight
from piper_ray.model.instance import Instance
from piper_ray.model.options import EXACT, SolveOptions
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.model.units import OnNote, doubtful
from piper_ray.planners import ALL_NAMES
from piper_ray.runtimes.runtime import RuntimeName
from piper_ray.sweep.plan_point import PlannedModel, PlanPoint
from piper_ray.sweep.point import AnyPoint, Point, Sweep, graph_hash
from piper_ray.workloads.estimate.config import ModelConfig, model_names, read_model
from piper_ray.workloads.estimate.hardware import Hardware, load_hardware
from piper_ray.workloads.formats.documents import advice, parse_json, parse_toml, read_text, refuse
from piper_ray.workloads.formats.faults import Faults, path_of, quoted, shown
from piper_ray.workloads.formats.fields import Closed, Count, Degree, OneOrSome, RateWithUnit, SizeWithUnit
from piper_ray.workloads.formats.load import load

POINTS = 1_000_000
"""The most points of one sweep."""

_RANGE = re.compile(r"\s*(\d{1,12})\s*\.\.\s*(\d{1,12})\s*(?:([:*])\s*(\d{1,12})\s*)?")
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{,99}")

_COUNTS_WORDS = "whole numbers from 1 to {}, or ranges such as 8..64:8 (step) and 8..2048*2 (factor)"
_DEVICES_WORDS = _COUNTS_WORDS.format(limits.DEVICES)
_MICROBATCHES_WORDS = _COUNTS_WORDS.format(limits.MICROBATCHES)
_SIZE_WORDS = "a size > 0 such as 8GiB or 80GB"
_RATE_WORDS = "a rate > 0 such as 25GB/s"
_RECOMPUTE_WORDS = "one of " + ", ".join(rule.value for rule in Recompute)
_SCHEDULE_WORDS = f"one of {', '.join(name.value for name in ScheduleName)}, chunks of a rank behind a colon"
_PLANNER_WORDS = "one of " + ", ".join(ALL_NAMES)
_RUNTIMES = tuple(name.value for name in RuntimeName)
_PRECISIONS = ("bf16", "fp16", "fp8")
_TRIED = tuple(name.value for name in ScheduleName)


def counts(text: str) -> tuple[int, ...]:
    """``8..64:8`` and ``8..2048*2`` written out; without a step, every number. Raises ValueError."""
    match = _RANGE.fullmatch(text)
    if match is None:
        raise ValueError(f"no range ({shown(text)})")
    first, last = int(match[1]), int(match[2])
    multiply, step = match[3] == "*", int(match[4] or 1)
    if first < 1 or last < first or step < 1 or (multiply and step < 2):
        raise ValueError(f"an empty or endless range ({shown(text)})")
    if multiply:
        found = [first]
        while found[-1] * step <= last:
            found.append(found[-1] * step)
        return tuple(found)
    if (last - first) // step >= POINTS:
        raise ValueError(f"a range of more than {POINTS:,} numbers ({shown(text)})")
    return tuple(range(first, last + 1, step))


def _counts_up_to(most: int) -> Callable[[object], tuple[int, ...]]:
    def convert(value: object) -> tuple[int, ...]:
        found: tuple[object, ...] = counts(value) if isinstance(value, str) else (value,)
        numbers = tuple(number for number in found if isinstance(number, int) and not isinstance(number, bool))
        if len(numbers) < len(found) or not all(1 <= number <= most for number in numbers):
            raise ValueError(f"out of range ({shown(value)})")
        return numbers

    return convert


def _known(names: tuple[str, ...]) -> Callable[[str], str]:
    def check(value: str) -> str:
        if value not in names:
            raise ValueError(f"unknown ({shown(value)})")
        return value

    return check


def schedule_named(text: str) -> Schedule:
    """``1f1b``, or ``interleaved:4`` for one with 4 chunks on each rank. Raises ValueError."""
    name, separator, chunks = text.partition(":")
    try:
        if separator and not chunks.isdecimal():
            raise ValueError(f"no number of chunks ({shown(text)})")
        named = Schedule.of(name)
        return Schedule(named.name, int(chunks)) if separator else named
    except UsageError as error:
        raise ValueError(f"{error} ({shown(text)})") from None


def _named_schedule(text: str) -> str:
    schedule_named(text)
    return text


_Devices = Annotated[tuple[int, ...], BeforeValidator(_counts_up_to(limits.DEVICES))]
_Batches = Annotated[tuple[int, ...], BeforeValidator(_counts_up_to(limits.MICROBATCHES))]
_Recompute = Annotated[str, AfterValidator(_known(tuple(rule.value for rule in Recompute)))]
_Schedule = Annotated[str, AfterValidator(_named_schedule)]
_Planner = Annotated[str, AfterValidator(_known(ALL_NAMES))]
_Runtime = Annotated[str, AfterValidator(_known(_RUNTIMES))]
_Precision = Annotated[str, AfterValidator(_known(_PRECISIONS))]
_Tried = Annotated[str, AfterValidator(_known(_TRIED))]


class Grid(Closed):
    """Every combination of its values."""

    workload: OneOrSome[str] | None = Field(default=None, alias="workloads", description="labels of [workloads]")
    devices: OneOrSome[_Devices] | None = Field(default=None, description=_DEVICES_WORDS)
    microbatches: OneOrSome[_Batches] | None = Field(default=None, description=_MICROBATCHES_WORDS)
    memory: OneOrSome[SizeWithUnit] | None = Field(default=None, description=f"{_SIZE_WORDS}, or a list of them")
    bandwidth: OneOrSome[RateWithUnit] | None = Field(default=None, description=f"{_RATE_WORDS}, or a list of them")
    tensor_parallelism: OneOrSome[bool] = Field(default=True, description="true, false, or [true, false]")
    data_parallelism: OneOrSome[bool] = Field(default=True, description="true, false, or [true, false]")
    recompute: OneOrSome[_Recompute] = Field(
        default=Recompute.AUTO.value, description=f"{_RECOMPUTE_WORDS}, or a list of them"
    )
    schedule: OneOrSome[_Schedule] | None = Field(
        default=None, alias="schedules", description=f"{_SCHEDULE_WORDS}, or a list of them"
    )
    planner: OneOrSome[_Planner] = Field(
        default=EXACT, alias="planners", description=f"{_PLANNER_WORDS}, or a list of them"
    )


class ListedPoint(Closed):
    """One point."""

    workload: str = Field(description="a label of [workloads]")
    devices: Degree | None = Field(default=None, description=f"a whole number from 1 to {limits.DEVICES}")
    microbatches: Count | None = Field(default=None, description=f"a whole number from 1 to {limits.MICROBATCHES}")
    memory: SizeWithUnit | None = Field(default=None, description=_SIZE_WORDS)
    bandwidth: RateWithUnit | None = Field(default=None, description=_RATE_WORDS)
    tensor_parallelism: bool = Field(default=True, description="true or false")
    data_parallelism: bool = Field(default=True, description="true or false")
    recompute: _Recompute = Field(default=Recompute.AUTO.value, description=_RECOMPUTE_WORDS)
    schedule: _Schedule | None = Field(default=None, description=_SCHEDULE_WORDS)
    planner: _Planner = Field(default=EXACT, description=_PLANNER_WORDS)


class PlanGrid(Closed):
    """Every combination of its values, each a plan."""

    model: OneOrSome[str] = Field(alias="models", description="labels of [models], or models known by name")
    gpu: OneOrSome[str] | None = Field(default=None, alias="gpus", description="GPUs, such as H100-SXM")
    nodes: OneOrSome[_Devices] = Field(default=(1,), description=_DEVICES_WORDS)
    kinds: dict[str, OneOrSome[_Devices]] | None = Field(
        default=None, min_length=2, description="in place of gpus and nodes: of each GPU of one cluster its nodes"
    )
    gpus_per_node: Degree | None = Field(default=None, description="a whole number >= 1")
    batch: OneOrSome[_Batches] | None = Field(default=None, alias="batches", description=_MICROBATCHES_WORDS)
    precision: OneOrSome[_Precision] = Field(
        default="bf16", alias="precisions", description=f"one of {', '.join(_PRECISIONS)}, or a list of them"
    )
    runtime: OneOrSome[_Runtime] = Field(
        default=RuntimeName.MEGATRON.value,
        alias="runtimes",
        description=f"one of {', '.join(_RUNTIMES)}, or a list of them",
    )
    tokens: OneOrSome[Count] | None = Field(default=None, description="whole numbers >= 1")
    schedule: OneOrSome[_Tried] | None = Field(
        default=None, alias="schedules", description=f"one of {', '.join(_TRIED)}, or a list of them"
    )


class NamedWorkload(Closed):
    """The input of a named workload, and how it is read."""

    path: str = Field(description="the path of an input, relative to the sweep's file")
    in_flight: Annotated[str, AfterValidator(_known(tuple(rule.value for rule in InFlight)))] | None = Field(
        default=None, description="one of " + ", ".join(rule.value for rule in InFlight)
    )


class SweepOptions(Closed):
    """Limits of every solve by the exact solver."""

    gap: float = Field(default=0.0, ge=0.0, lt=1.0, description="a share from 0 to below 1, such as 0.01")
    time_limit_s: float | None = Field(default=None, gt=0.0, allow_inf_nan=False, description="a number of seconds > 0")


_KEYS = ("name", "hardware", "workloads", "models", "options", "grid", "points", "plan")
_POINTS = frozenset(("grid", "points"))
"""Keys of points of workloads."""

_CLUSTER = {  # in the sweep's words, and in those of an instance
    "devices": "devices",
    "microbatches": "microbatches",
    "memory": "memory_bytes",
    "bandwidth": "bandwidth_bytes_per_s",
}
_PER_SECOND = {"memory": "", "bandwidth": "/s"}


class _Draft(NamedTuple):
    """A point. None: as the workload has it. What comes first changes slowest, so that neighbours share a lattice."""

    workload: str
    tensor_parallelism: bool
    recompute: str
    data_parallelism: bool
    schedule: str | None
    planner: str
    devices: int | None
    microbatches: int | None
    memory: float | None
    bandwidth: float | None


_Axes = list[list[Any]]
"""The values of each field of ``_Draft``, of which every combination is a point."""


def read_sweep(path: str | os.PathLike[str], on_note: OnNote = lambda text: None) -> Sweep:  # noqa: ARG005
    """The sweep that a TOML file describes. Points given twice count once. on_note: hears of what is
    doubtful in it, and of the notes of its workloads.

    Raises InputError with every fault found.
    """
    source = arguments.location("source", path)
    text = read_text(source)
    # A sweep is TOML; what is JSON is read as that, to say what it is.
    document = (parse_json if text.lstrip().startswith("{") else parse_toml)(source, text)
    faults = Faults()
    if not {"workloads", "plan", *_POINTS} & document.keys() and (kind := advice(document)) is not None:
        refuse(source, "", f"not a sweep but {kind}")
    for key in document:
        if key not in _KEYS:
            faults.at(path_of("", key), f"unknown key; expected one of {', '.join(_KEYS)}")
    name = document.get("name", Path(source).stem)
    if not isinstance(name, str):
        faults.at("name", f"not a text ({shown(name)}); expected a text")
    of_workloads = bool(_POINTS & document.keys()) or "plan" not in document
    workloads = _read_workloads(document.get("workloads"), faults) if of_workloads else {}
    options = faults.model(SweepOptions, document.get("options", {}), "options")
    listed = document.get("points", [])
    if not isinstance(listed, list):
        faults.at("points", f"not a list ({shown(listed)}); expected [[points]]")
        listed = []
    tables = [
        *_read_tables(Grid, document.get("grid", []), "grid", workloads, faults),
        *_read_tables(ListedPoint, listed, "points", workloads, faults),
    ]
    if not any(document.get(key, []) != [] for key in ("plan", *_POINTS)):
        faults.at("", "no points; expected [grid], [[points]] or [[plan]]")
    folder = Path(source).parent
    planned, plans = _read_plans(folder, document, set(workloads), faults, on_note)
    if faults:
        raise InputError(source, faults.found)
    drafts = [_Draft(*values) for axes in tables for values in product(*axes)]
    used = {draft.workload for draft in drafts}
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
    points: list[AnyPoint] = [_point(draft, found[draft.workload]) for draft in drafts]
    hashes = {label: graph_hash(graph) for label, graph in found.items()}
    return Sweep(
        name=str(name),
        points=tuple(dict.fromkeys([*points, *plans])),
        subjects={**found, **planned},
        hashes={**hashes, **{label: one.digest() for label, one in planned.items()}},
        options=SolveOptions(gap=options.gap, time_limit_s=options.time_limit_s, threads=1),
    )


def _read_workloads(table: object, faults: Faults) -> dict[str, NamedWorkload]:
    if not isinstance(table, Mapping) or not table:
        faults.at("workloads", "missing or no table; expected at least one label = path")
        return {}
    found: dict[str, NamedWorkload] = {}
    for label, value in table.items():
        path = path_of("workloads", label)
        if _LABEL.fullmatch(label) is None:  # it names a folder of the dataset
            faults.at(path, "cannot name a folder; expected letters, digits and any of . _ + - as a label")
        workload = faults.model(NamedWorkload, {"path": value} if isinstance(value, str) else value, path)
        # A faulty one still counts as there: one fault should not bring others.
        found[label] = workload or NamedWorkload(path="")
    return found


def _read_tables(
    kind: type[Grid | ListedPoint], value: object, key: str, workloads: Mapping[str, object], faults: Faults
) -> list[_Axes]:
    """The axes of one table, or of a list of tables."""
    found: list[_Axes] = []
    for index, table in enumerate(value) if isinstance(value, list) else [(None, value)]:
        path = key if index is None else f"{key}[{index}]"
        read = faults.model(kind, table, path)
        if read is None:
            continue
        for label in _values(read.workload):
            if workloads and label not in workloads:
                place = f"{path}.{kind.model_fields['workload'].alias or 'workload'}"
                faults.at(place, f"unknown ({quoted(label)}); expected one of {', '.join(workloads)}")
        for name, per_second in _PER_SECOND.items():
            doubts = (doubtful(size, per_second, with_units=True) for size in _values(getattr(read, name)))
            if (doubt := next(filter(None, doubts), None)) is not None:
                faults.note(f"{path}.{name}", doubt)
        axes = [_values(getattr(read, name)) or [None] for name in _Draft._fields]
        if read.workload is None:
            axes[0] = list(workloads)
        size = math.prod(map(len, axes))
        if size > POINTS:
            faults.at(path, f"{size:,} points; expected at most {POINTS:,}")
        found.append(axes)
    return found


def _read_plans(
    folder: Path, document: Mapping[str, object], taken: set[str], faults: Faults, on_note: OnNote
) -> tuple[dict[str, PlannedModel], list[PlanPoint]]:
    """The models of ``[[plan]]`` by label, and its points. taken: labels of workloads."""
    labels, given = document.get("models", {}), document.get("plan", [])
    if not isinstance(labels, Mapping):
        faults.at("models", f"no table ({shown(labels)}); expected label = name or path")
        labels = {}
    hardware = _read_hardware(folder, document.get("hardware"), faults, on_note)
    models: dict[str, PlannedModel] = {}
    points: list[PlanPoint] = []
    for index, table in enumerate(given) if isinstance(given, list) else [(None, given)]:
        path = "plan" if index is None else f"plan[{index}]"
        read = faults.model(PlanGrid, table, path)
        if read is None or hardware is None:
            continue
        axes = _plan_axes(read, path, faults)
        for label in axes[0]:
            if label not in models and (model := _model_of(folder, label, labels, taken, path, faults)) is not None:
                models[label] = PlannedModel(model, hardware)
                for text in model.notes:
                    on_note(text)
        asked = ((label, cluster, read.gpus_per_node, *others) for label, cluster, *others in product(*axes))
        try:
            points += [models[label].point(label, *others) for label, *others in asked if label in models]
        except UsageError as error:
            faults.at(path, str(error))
    return models, points


_PLAN_AXES = ("model", "batch", "precision", "runtime", "tokens", "schedule")


def _plan_axes(read: PlanGrid, path: str, faults: Faults) -> list[list[Any]]:
    """Models, clusters (of each GPU its nodes) and the rest; one without values where there is a fault."""
    kinds, gpus = read.kinds, _values(read.gpu)
    if (kinds is None) != bool(gpus) or (kinds and {"nodes", "gpus_per_node"} & read.model_fields_set):
        faults.at(path, "expected either gpus, with nodes, or kinds alone, which have their nodes")
        return [[]]
    if kinds is None:
        clusters = [{gpu: nodes} for gpu, nodes in product(gpus, _values(read.nodes))]
    else:
        clusters = [dict(zip(kinds, nodes, strict=True)) for nodes in product(*map(_values, kinds.values()))]
    models, *others = ([*(_values(getattr(read, name)) or [None])] for name in _PLAN_AXES)
    axes = [models, clusters, *others]
    if (size := math.prod(map(len, axes))) > POINTS:
        faults.at(path, f"{size:,} points; expected at most {POINTS:,}")
        return [[]]
    return axes


def _read_hardware(folder: Path, path: object, faults: Faults, on_note: OnNote) -> Hardware | None:
    if path is not None and not isinstance(path, str):
        faults.at("hardware", f"not a text ({shown(path)}); expected the path of a table of hardware")
        return None
    try:
        return load_hardware(None if path is None else folder / path, on_note)
    except InputError as error:
        for fault in error.faults:
            faults.at("hardware", f"{error.source}: {fault}")
    except UsageError as error:
        faults.at("hardware", str(error))
    return None


def _model_of(
    folder: Path, label: str, labels: Mapping[str, object], taken: set[str], path: str, faults: Faults
) -> ModelConfig | None:
    """The model that a label of ``[models]`` or a known name means."""
    given = labels.get(label, label)
    place = path_of("models", label) if label in labels else f"{path}.models"
    if label in taken:
        faults.at(place, f"{quoted(label)} is a label of [workloads] too; expected another one")
    elif not isinstance(given, str):
        faults.at(place, f"not a text ({shown(given)}); expected the name of a model or the path of a config.json")
    elif label not in labels and label not in model_names():
        known = ", ".join([*labels, *model_names()])
        faults.at(place, f"unknown ({quoted(str(given))}); expected a label of [models] or one of {known}")
    elif _LABEL.fullmatch(label) is None:
        faults.at(place, "cannot name a folder; expected letters, digits and any of . _ + - as a label")
    else:
        beside = folder / given
        try:
            return read_model(str(beside) if beside.is_file() else given)
        except InputError as error:
            for fault in error.faults:
                faults.at(place, f"{error.source}: {fault}")
        except UsageError as error:
            faults.at(place, str(error))
    return None


def _values(value: Any) -> list[Any]:
    """An axis as a list: of one value, or of several, ranges written out."""
    items = value if isinstance(value, list) else [] if value is None else [value]
    return [number for item in items for number in (item if isinstance(item, tuple) else (item,))]


def _load(
    folder: Path, label: str, workload: NamedWorkload, drafts: list[_Draft], faults: Faults, on_note: OnNote
) -> Instance | None:
    """The workload. What every point gives need not be in its file."""
    own = [draft for draft in drafts if draft.workload == label]
    given = {
        quantity: getattr(own[0], name)
        for name, quantity in _CLUSTER.items()
        if all(getattr(draft, name) is not None for draft in own)
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
    figures = [
        getattr(graph, quantity) if (given := getattr(draft, name)) is None else given
        for name, quantity in _CLUSTER.items()
    ]
    restrictions = Restrictions(draft.tensor_parallelism, draft.data_parallelism, Recompute(draft.recompute))
    asked = None if draft.schedule is None else schedule_named(draft.schedule)
    devices, microbatches, memory_bytes, bandwidth_bytes_per_s = figures
    return Point(
        draft.workload,
        draft.planner,
        devices,
        microbatches,
        float(memory_bytes),
        float(bandwidth_bytes_per_s),
        restrictions,
        Schedule.first_of(asked, graph.schedule).settled,
    )
