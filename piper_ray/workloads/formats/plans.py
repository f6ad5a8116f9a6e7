"""Writes and reads plans: upstream's plan JSON, or the document of ``solve --json`` that contains one under "plan".

Written plans have Piper's ``stages``, with names, paths and ranks in each, under a header that describes their
instance. ``PlanClaims`` holds what a document states in addition to its plan: the schedule, the planner, and what was
proved. ``PlannedDocument`` is a plan for programs without the instance: its stages with the names in the document.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Annotated

from pydantic import Field

from piper_ray.model import limits
from piper_ray.model.errors import UsageError
from piper_ray.model.figures import plural, size_option
from piper_ray.model.instance import Instance, Layer
from piper_ray.model.plan import Plan, Stage
from piper_ray.model.plan_rules import stage_borders
from piper_ray.model.schedule import PAPERS_SCHEDULE, AllReduce, Schedule, StepTerms
from piper_ray.model.solution import Solution
from piper_ray.version import __version__
from piper_ray.workloads.formats.faults import Faults, path_of, quoted, shown
from piper_ray.workloads.formats.fields import Count, Degree, Figure, LayerId, Open, Place
from piper_ray.workloads.formats.surroundings import read_schedule

SCHEMA_VERSION = 2
"""Rises when a field changes its meaning or is removed, not for new fields. 2: a plan may have pipelines of one kind of
devices each (``microbatches``); other documents are of version 1."""

Document = dict[str, object]


def header(kind: str, instance: Instance, plan: Plan | None = None) -> Document:
    """The header of all our documents: kind, version and instance. plan: what the document holds, if it holds one."""
    return {
        "schema": f"piper-ray/{kind}",
        "schema_version": SCHEMA_VERSION if plan is not None and plan.shares else 1,
        "tool_version": __version__,
        "instance": {
            "name": instance.name,
            "digest": instance.digest,
            "layers": len(instance.layers),
            "edges": len(instance.edges),
            "devices": instance.devices,
            "microbatches": instance.microbatches,
            "samples_per_microbatch": instance.batch.samples_per_microbatch,
            "tokens_per_sample": instance.batch.tokens_per_sample,
            "measured_threads": instance.measured_threads,
            "memory_bytes": instance.memory_bytes,
            "bandwidth_bytes_per_s": instance.bandwidth_bytes_per_s,
        },
    }


def stage_documents(instance: Instance, plan: Plan, schedule: Schedule = PAPERS_SCHEDULE) -> list[Document]:
    """Piper's stages with the names and paths of their layers, if the instance has them, the layers that recompute
    activations, their ranks, and the schemes of their layers in full.

    schedule: the schedule of the plan.
    """
    documents: list[Document] = []
    borders = stage_borders(instance.cluster, plan, schedule)
    of_stages = zip_longest(plan.stage_dicts(), plan.stages, plan.ranks_under(schedule), borders)
    for document, stage, ranks, border in of_stages:
        layers = [instance.layer_by_id.get(layer) for layer in stage.layers]
        document["names"] = ["" if layer is None else layer.name for layer in layers]
        document["paths"] = ["" if layer is None else layer.path for layer in layers]
        recompute = [layer is not None and _recomputes(layer, stage) for layer in layers]
        if any(recompute):
            document["recompute"] = recompute
        words = {word for tmpc_id in stage.tmpc_ids.values() for word in tmpc_id.split("+")}
        if found := {word: instance.schemes[word] for word in sorted(words & instance.schemes.keys())}:
            document["schemes"] = found
        document["ranks"] = [ranks.start, ranks.stop - 1]
        if border is not None:
            document["to_next"] = {
                "bandwidth_bytes_per_s": border.bandwidth_bytes_per_s,
                "group_devices": border.group_devices,
            }
        documents.append(document)
    return documents


def _recomputes(layer: Layer, stage: Stage) -> bool:
    chosen = stage.tmpc_ids[layer.id], stage.kind
    row = layer.tmpcs.get(stage.tensor_parallel_degree, ())
    return any(tmpc.recompute for tmpc in row if (tmpc.id, tmpc.kind) == chosen)


def plan_document(instance: Instance, plan: Plan, schedule: Schedule | None) -> Document:
    """The plan file without the figures of an evaluation. schedule: the plan's schedule; None if unknown."""
    stages = stage_documents(instance, plan, Schedule.first_of(schedule))
    planned_for = {} if schedule is None else schedule.to_dict()
    return {"stages": stages, **plan.rule_dict(), **header("plan", instance, plan), **planned_for}


class _StageOfLayers(Open):
    nodes: list[LayerId] = Field(min_length=1, description="a list of at least one layer id")
    dataParallelDegree: Degree
    tensorParallelDegree: Degree


class _Stage(_StageOfLayers):
    TMPCids: dict[str, str] = Field(description="an object of TMPC ids, one for each layer of the stage")
    kind: str = Field(default="", description="the name of a kind of devices")


class _Rules(Open):
    keeps_order: bool | None = Field(default=None, description="true or false")
    in_flight: list[Degree] | None = Field(default=None, description="a list of a whole number > 0 for each stage")
    places: list[Place] | None = Field(default=None, description="a list of a whole number >= 0 for each stage")
    microbatches: dict[str, Degree] | None = Field(
        default=None, description="a whole number > 0 for each kind of devices"
    )


def read_plan(document: Mapping[str, object], instance: Instance, faults: Faults) -> Plan | None:
    """The plan that ``document`` describes; None, with the faults noted, if it is not a plan for these layers."""
    check_schema(document, None, faults)
    path = ""
    if "stages" not in document and "plan" in document:
        path, plan = "plan", document["plan"]
        if not isinstance(plan, Mapping):
            faults.at(path, f"holds no plan ({shown(plan)}); expected an object with stages")
            return None
        document = plan
    stages_path = path_of(path, "stages")
    stages = document.get("stages")
    if not isinstance(stages, (list, tuple)):
        problem = f"not a list ({shown(stages)})" if "stages" in document else "missing"
        faults.at(stages_path, f"{problem}; expected the list of stages, front to back")
        return None
    if len(stages) > limits.LAYERS:
        faults.at(stages_path, f"{len(stages)} stages; expected at most {limits.LAYERS}")
        return None
    rules = faults.model(_Rules, {key: document[key] for key in _Rules.model_fields if key in document}, path)
    order = {layer.id: position for position, layer in enumerate(instance.layers)}
    read = [_read_stage(stage, f"{stages_path}[{index}]", order, faults) for index, stage in enumerate(stages)]
    if faults or rules is None:
        return None
    kept = None if rules.in_flight is None else tuple(rules.in_flight)
    found, shared = tuple(stage for stage in read if stage is not None), rules.microbatches or {}
    kinds = dict.fromkeys([*(stage.kind for stage in found if stage.kind in shared), *shared])
    places = None if rules.places is None else tuple(rules.places)
    return Plan(found, rules.keeps_order is True, kept, tuple((kind, shared[kind]) for kind in kinds), places)


def check_schema(document: Mapping[str, object], expected: str | None, faults: Faults) -> None:
    """Notes a document of another kind than ``expected`` (None: any), and one with a later version than is known
    here."""
    kind, version = document.get("schema"), document.get("schema_version")
    if expected is not None and kind != expected:
        faults.at("schema", f"{'missing' if kind is None else shown(kind)}; expected {quoted(expected)}")
    known = isinstance(kind, str) and kind.startswith("piper-ray/")
    if known and isinstance(version, int) and version > SCHEMA_VERSION:
        faults.at("schema_version", f"{version}, of a later piper-ray; expected at most {SCHEMA_VERSION}")


def _read_stage(raw: object, path: str, order: Mapping[int, int], faults: Faults) -> Stage | None:
    stage = faults.model(_Stage, raw, path)
    if stage is None:
        return None
    found_before = len(faults.found)
    seen: set[int] = set()
    for index, layer in enumerate(stage.nodes):
        where = f"{path}.nodes[{index}]"
        if layer not in order:
            faults.at(where, f"unknown layer {layer}; expected the id of a layer of the instance")
        if layer in seen:
            faults.at(where, f"duplicate layer {layer}; expected each layer once")
        seen.add(layer)
        if str(layer) not in stage.TMPCids:
            faults.at(path_of(path, "TMPCids", str(layer)), f"missing; expected the TMPC id of layer {layer}")
    for key in sorted(stage.TMPCids.keys() - {str(layer) for layer in stage.nodes}):
        faults.at(path_of(path, "TMPCids", key), "not a layer of this stage; expected its layers only")
    if len(faults.found) > found_before:
        return None
    layers = tuple(sorted(stage.nodes, key=order.__getitem__))
    return Stage(
        layers=layers,
        data_parallel_degree=stage.dataParallelDegree,
        tensor_parallel_degree=stage.tensorParallelDegree,
        tmpc_ids={layer: stage.TMPCids[str(layer)] for layer in layers},
        kind=stage.kind,
    )


_SAME_TIME = 1e-6
"""Relative. Smaller differences of times are ignored, since figures are summed in several orders."""


@dataclass(frozen=True)
class PlanClaims:
    """What a document claims in addition to its plan. None or empty: the document does not state it; Piper's own
    documents state none of this.

    digest, step: the instance and the terms of a step for the other figures. time_per_sample_s: the plan's time.
    lower_bound_s: no plan is faster. status: "optimal" or "feasible".
    planner, note: the planner, if it is not the exact solver, and its remark. schemes: the schemes of its layers, in
    full, by the words of TMPCs' ids. ranks: the first and last of each stage, if stated.
    """

    schedule: Schedule | None = None
    digest: str | None = None
    lower_bound_s: float | None = None
    status: str | None = None
    planner: str | None = None
    note: str | None = None
    step: StepTerms = StepTerms()
    time_per_sample_s: float | None = None
    schemes: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    ranks: tuple[list[int] | None, ...] = ()

    def step_under(self, schedule: Schedule) -> StepTerms:
        """Its terms of a step if ``schedule`` flushes each batch; the usual terms if it does not."""
        return StepTerms() if schedule.asynchronous else self.step

    def made_otherwise(self, instance: Instance, schedule: Schedule, step: StepTerms) -> str | None:
        """Why its figures do not apply under these conditions, as the end of "it is of ..."; None if they apply."""
        if self.digest != instance.digest:
            return "another input, or of another cluster"
        if self.schedule != schedule:
            return "no schedule" if self.schedule is None else f"schedule {self.schedule.text}"
        return None if self.step_under(schedule) == step else "other terms of a step"

    def contradicted_by(self, time_s: float, ranks: Sequence[range]) -> list[str]:
        """The claims that contradict the plan's time, ``time_s`` per microbatch, or its stages' ranks, in words."""
        slack_s = _SAME_TIME * time_s
        found = [
            f"stages[{index}].ranks is {said}, where the order of the stages gives {[own.start, own.stop - 1]}"
            for index, (said, own) in enumerate(zip(self.ranks, ranks, strict=False))
            if said not in (None, [own.start, own.stop - 1])
        ]
        if self.time_per_sample_s is not None and abs(self.time_per_sample_s - time_s) > slack_s:
            found.append(f"time_per_sample_s is {self.time_per_sample_s:.6g} s, where the plan takes {time_s:.6g} s")
        if self.lower_bound_s is not None and self.lower_bound_s > time_s + slack_s:
            found.append(f"lower_bound_s is {self.lower_bound_s:.6g} s, where the plan takes {time_s:.6g} s")
        if self.status == "optimal" and self.lower_bound_s is not None and self.lower_bound_s < time_s - slack_s:
            found.append(f'status is "optimal", where lower_bound_s is only {self.lower_bound_s:.6g} s')
        return found


@dataclass(frozen=True)
class MadeFor:
    """The instance of a plan that was given with another instance, in words.

    other_workload: whether its layers or their figures differ; if not, only K, N, M or B differ.
    """

    text: str
    other_workload: bool

    def __str__(self) -> str:
        return self.text


class _Facts(Open):
    name: str
    digest: str
    layers: int
    devices: int
    microbatches: int
    memory_bytes: float
    bandwidth_bytes_per_s: float


class _Instance(Open):
    digest: str | None = Field(default=None, description="a text")


class _Step(Open):
    all_reduce: AllReduce = Field(strict=False, description=f"one of {', '.join(x.value for x in AllReduce)}")
    all_reduce_overlap: Annotated[float, Field(ge=0.0, le=1.0)] = Field(description="a number from 0 to 1")
    optimizer_s: Figure


class _StageClaims(Open):
    schemes: dict[str, dict[str, object]] = Field(default={}, description="an object of schemes")
    ranks: list[int] | None = Field(default=None, description="a list of the first and the last rank")


class _StagesClaims(Open):
    stages: list[_StageClaims] = Field(default=[], description="a list of stages")


class _Claims(_StagesClaims):
    plan: _StagesClaims | None = None
    step: _Step | None = Field(default=None, description="an object")
    instance: _Instance | None = Field(default=None, description="an object")
    time_per_sample_s: Figure | None = None
    lower_bound_s: Figure | None = None
    status: str | None = Field(default=None, description="a text")
    planner: str | None = Field(default=None, description="a text")
    note: str | None = Field(default=None, description="a text")


def made_for_another(document: Mapping[str, object], instance: Instance) -> MadeFor | None:
    """The instance that the plan was made for; None if it is ``instance``, or if the document does not state one."""
    if not str(document.get("schema", "")).startswith("piper-ray/"):
        return None
    facts = Faults().model(_Facts, document.get("instance"), "instance")
    if facts is None or facts.digest == instance.digest:
        return None
    options = {
        "devices": f"--devices {facts.devices}",
        "microbatches": f"--microbatches {facts.microbatches}",
        "memory_bytes": f"--memory {size_option(facts.memory_bytes)}",
        "bandwidth_bytes_per_s": f"--bandwidth {size_option(facts.bandwidth_bytes_per_s)}/s",
    }
    try:
        there = instance.replace(**facts.model_dump(include=set(options)))
    except UsageError:
        there = instance
    if there.digest == facts.digest:
        changed = (text for name, text in options.items() if getattr(facts, name) != getattr(instance, name))
        return MadeFor(f"the plan was made for another cluster or batch: {' '.join(changed)}", other_workload=False)
    return MadeFor(
        f"a plan of another workload: of {quoted(facts.name)}, {plural(facts.layers, 'layer')}, digest "
        f"{facts.digest[:12]}...; this is {quoted(instance.name)}, {plural(len(instance.layers), 'layer')}, digest "
        f"{instance.digest[:12]}...",
        other_workload=True,
    )


def read_claims(document: Mapping[str, object], faults: Faults) -> PlanClaims | None:
    """The claims of a document; None, with the faults noted, if their types are wrong.

    In a document that is not ours only the schedule is read, because other names may have any meaning there.
    """
    schedule_name, chunks, group, ahead = map(document.get, ("schedule", "chunks", "group", "ahead"))
    schedule = read_schedule(schedule_name, chunks, group, "schedule", faults, ahead)
    ours = str(document.get("schema", "")).startswith("piper-ray/")
    read = faults.model(_Claims, document, "") if ours else _Claims()
    if faults or read is None:
        return None
    digest = None if read.instance is None else read.instance.digest
    step = StepTerms() if read.step is None else StepTerms(**read.step.model_dump())
    bound_s, time_s = read.lower_bound_s, read.time_per_sample_s
    stages = read.stages if read.plan is None else read.plan.stages
    schemes = {word: one for stage in stages for word, one in stage.schemes.items()}
    ranks = tuple(stage.ranks for stage in stages)
    return PlanClaims(schedule, digest, bound_s, read.status, read.planner, read.note, step, time_s, schemes, ranks)


_OLD_NAMES = (
    ("candidates_tested", "blocks_tested", "buckets_tested"),
    ("put_bytes", "blocks", "chunks"),
    ("held_bytes", "blocks", "chunks"),
    ("choices_dropped", "time_per_sample", "time_per_sample_s"),
)
"""Renamed fields of solutions: a neighbouring field that identifies the table, the old name, and the new name."""


def _as_named_now(fields: dict[str, object]) -> dict[str, object]:
    for beside, old, new in _OLD_NAMES:
        if beside in fields and fields.get(new) is None and old in fields:
            fields[new] = fields[old]
    return fields


def read_solution(document: Mapping[str, object], instance: Instance, faults: Faults) -> Solution | None:
    """The solution that ``document`` describes; None, with the faults noted, if it is not one for this instance."""
    from piper_ray.workloads.formats.plan_schema import SolutionDocument  # pydantic looks through its source, for 0.1 s

    check_schema(document, "piper-ray/solution", faults)
    if faults:
        return None
    try:
        now = json.loads(json.dumps(document, default=shown), object_hook=_as_named_now)
    except ValueError as error:  # a program's own dict that contains itself, or a number of thousands of digits
        faults.at("", f"no JSON ({error}); expected what solve --json prints")
        return None
    read = faults.model_of_json(SolutionDocument, json.dumps(now))
    if read is None:
        return None
    if read.instance.digest != instance.digest:
        faults.at("instance.digest", f"{read.instance.digest[:12]}..., of another instance; expected this one's")
    plan = None if read.plan is None else read_plan(document, instance, faults)
    if faults:
        return None
    return Solution(
        status=read.status,
        time_per_sample_s=read.time_per_sample_s,
        lower_bound_s=math.inf if read.lower_bound_s is None else read.lower_bound_s,
        plan=plan,
        stats=read.stats,
        infeasibility=read.infeasibility,
        stopped_by=read.stopped_by,
        blocks=read.blocks,
        schedule=Schedule(read.schedule, read.chunks, read.group, read.ahead),
        step=read.step or StepTerms(),
    )


@dataclass(frozen=True)
class PlannedLayer:
    """path: the path of its module in the user's model."""

    id: int
    path: str
    recompute: bool


@dataclass(frozen=True)
class PlannedStage:
    """layers: in the order of their ids."""

    layers: tuple[PlannedLayer, ...]
    data_parallel_degree: int
    tensor_parallel_degree: int


@dataclass(frozen=True)
class PlannedDocument:
    """A plan's stages, and other figures of its document; None for those that the document does not state."""

    stages: tuple[PlannedStage, ...]
    microbatches: int | None
    samples_per_microbatch: int | None
    measured_threads: int | None
    time_per_sample_s: float | None
    in_flight: tuple[int, ...] | None


class _NamedStage(_StageOfLayers):
    paths: list[str] | None = Field(default=None, description="a list of module paths, one for each layer")
    recompute: list[bool] | None = Field(default=None, description="a list of true or false, one for each layer")


class _NamedInstance(Open):
    microbatches: Count | None = None
    samples_per_microbatch: Count | None = None
    measured_threads: Count | None = None


class _Header(Open):
    instance: _NamedInstance = Field(default=_NamedInstance(), description="an object")
    time_per_sample_s: Figure | None = None


class _Stages(_Rules):
    stages: list[_NamedStage] = Field(min_length=1, description="a list of stages, front to back")


def read_planned(document: Mapping[str, object], faults: Faults) -> PlannedDocument | None:
    """Reads a plan document, or ``solve --json`` with a plan in it; None, with the faults noted, for other documents.

    Piper's own plans name no modules, which is a fault here.
    """
    check_schema(document, None, faults)
    nested = "stages" not in document and "plan" in document
    header = faults.model(_Header, document, "")
    read = faults.model(_Stages, document["plan"] if nested else document, "plan" if nested else "")
    if faults or header is None or read is None:
        return None
    stages = [
        _stage(stage, path_of("plan" if nested else "", "stages", index), faults)
        for index, stage in enumerate(read.stages)
    ]
    counts = Counter(layer.id for stage in stages for layer in stage.layers)
    for layer, count in counts.items():
        if count > 1:
            faults.at("stages", f"layer {layer} is there twice; expected each layer once")
    if faults:
        return None
    kept = None if read.in_flight is None else tuple(read.in_flight)
    return PlannedDocument(
        tuple(stages), **vars(header.instance), time_per_sample_s=header.time_per_sample_s, in_flight=kept
    )


def _stage(read: _NamedStage, path: str, faults: Faults) -> PlannedStage:
    count = len(read.nodes)
    paths, recompute = read.paths or [], read.recompute or [False] * count
    if len(paths) != count or not all(paths):
        what = "module paths of all layers; expected a plan of a workload with paths, as profile writes it"
        faults.at(path_of(path, "paths"), f"not the {what}")
        paths = [""] * count
    if len(recompute) != count:
        faults.at(path_of(path, "recompute"), "not as many as nodes; expected true or false for each layer")
        recompute = [False] * count
    layers = sorted(zip(read.nodes, paths, recompute, strict=True))
    return PlannedStage(
        tuple(PlannedLayer(*layer) for layer in layers), read.dataParallelDegree, read.tensorParallelDegree
    )
