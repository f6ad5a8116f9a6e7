"""Reading a plan: upstream's plan JSON, or the document of ``solve --json`` that holds one under "plan"."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from piper_ray.model import limits
from piper_ray.model.instance import Instance
from piper_ray.model.plan import Plan, Stage
from piper_ray.workloads.formats.faults import Faults, path_of, quoted, shown
from piper_ray.workloads.formats.fields import DEGREE_WORDS, Degree, LayerId, Open
from piper_ray.workloads.formats.plan_writer import SCHEMA_VERSION


class _Stage(Open):
    nodes: list[LayerId] = Field(min_length=1, description="a list of at least one layer id")
    dataParallelDegree: Degree = Field(description=DEGREE_WORDS)
    tensorParallelDegree: Degree = Field(description=DEGREE_WORDS)
    TMPCids: dict[str, str] = Field(description="an object of TMPC ids, one for each layer of the stage")


class _Rules(Open):
    keeps_order: bool | None = Field(default=None, description="true or false")
    in_flight: list[Degree] | None = Field(default=None, description="a list of a whole number > 0 for each stage")


def read_plan(document: Mapping[str, object], instance: Instance, faults: Faults) -> Plan | None:
    """The plan that ``document`` describes; None, with the faults noted, if it is not one for these layers."""
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
    rules = faults.model(_Rules, {key: document[key] for key in ("keeps_order", "in_flight") if key in document}, path)
    order = {layer.id: position for position, layer in enumerate(instance.layers)}
    read = [_read_stage(stage, f"{stages_path}[{index}]", order, faults) for index, stage in enumerate(stages)]
    if faults or rules is None:
        return None
    kept = None if rules.in_flight is None else tuple(rules.in_flight)
    return Plan(tuple(stage for stage in read if stage is not None), rules.keeps_order is True, kept)


def check_schema(document: Mapping[str, object], expected: str | None, faults: Faults) -> None:
    """Note a document of another kind than ``expected`` (None: any), and one of a later version than is known here."""
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
    )
