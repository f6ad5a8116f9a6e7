"""A plan's stages as its document names them: what they run, for whom who has not the instance at hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import Field

from piper_ray.model.schedule import Schedule
from piper_ray.workloads.formats.faults import Faults, path_of
from piper_ray.workloads.formats.fields import Count, Degree, Figure, LayerId, Open
from piper_ray.workloads.formats.plans import check_schema, read_claims


@dataclass(frozen=True)
class PlannedLayer:
    """path: of its module in the user's model."""

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
class Planned:
    """microbatches, samples_per_microbatch, time_per_sample_s, schedule, measured_threads: None where the document does
    not say."""

    name: str
    stages: tuple[PlannedStage, ...]
    microbatches: int | None
    samples_per_microbatch: int | None
    time_per_sample_s: float | None
    schedule: Schedule | None
    measured_threads: int | None


class _Stage(Open):
    nodes: list[LayerId] = Field(min_length=1, description="a list of at least one layer id")
    dataParallelDegree: Degree
    tensorParallelDegree: Degree
    paths: list[str] | None = Field(default=None, description="a list of module paths, one for each layer")
    recompute: list[bool] | None = Field(default=None, description="a list of true or false, one for each layer")


class _Instance(Open):
    name: str = Field(default="", description="a text")
    microbatches: Count | None = None
    samples_per_microbatch: Count | None = None
    measured_threads: Count | None = None


class _Header(Open):
    instance: _Instance = Field(default=_Instance(), description="an object")
    time_per_sample_s: Figure | None = None


class _Stages(Open):
    stages: list[_Stage] = Field(min_length=1, description="a list of stages, front to back")


def read_planned(document: Mapping[str, object], faults: Faults) -> Planned | None:
    """Of a plan document, or of ``solve --json`` with a plan in it; None, with the faults noted, for anything else.

    Piper's own plans name no modules: that is a fault here.
    """
    check_schema(document, None, faults)
    nested = "stages" not in document and "plan" in document
    header = faults.model(_Header, document, "")
    read = faults.model(_Stages, document["plan"] if nested else document, "plan" if nested else "")
    claims = read_claims(document, faults)
    if faults or header is None or read is None or claims is None:
        return None
    stages = [
        _stage(stage, path_of("plan" if nested else "", "stages", index), faults)
        for index, stage in enumerate(read.stages)
    ]
    seen: set[int] = set()
    for stage in stages:
        for layer in stage.layers:
            if layer.id in seen:
                faults.at("stages", f"layer {layer.id} is there twice; expected each layer once")
            seen.add(layer.id)
    if faults:
        return None
    return Planned(
        header.instance.name,
        tuple(stages),
        header.instance.microbatches,
        header.instance.samples_per_microbatch,
        header.time_per_sample_s,
        claims.schedule,
        header.instance.measured_threads,
    )


def _stage(read: _Stage, path: str, faults: Faults) -> PlannedStage:
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
