"""Plan and solution documents: described field by field by their schemas, with names, paths and ranks, read back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import piper_ray
from piper_ray.model.constraints import Constraint
from piper_ray.model.errors import InputError
from piper_ray.model.instance import Instance
from piper_ray.model.plan import Plan, Stage
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.model.solution import BlockStats, ClusterStats, Infeasibility, NodeStats, Solution, Status
from piper_ray.model.stop import StoppedBy
from piper_ray.report.document import (
    baseline_facts,
    plan_document,
    proof_document,
    solution_document,
    to_text,
)
from piper_ray.workloads.formats.load import plan_claims
from scripts.documentation.schemas import FOLDER, schema_of
from scripts.documentation.schemas import SCHEMAS as MODELS
from tests.instances import equal_chain
from tests.report_cases import small_instance, small_plan, solution

SCHEMAS: dict[str, Any] = {name: json.loads((FOLDER / name).read_text("utf-8")) for name in MODELS}
CLUSTER = ClusterStats(2, 3, 4, 5, 6.0, 7.0, (NodeStats("here", 1, 2, 3),))
BLOCKS = BlockStats(9, 3, None, 12, 0.5, 2, 0.02, True)


def written(found: Solution, instance: Instance | None = None) -> dict[str, Any]:
    instance = instance or small_instance()
    evaluation = None if found.plan is None else piper_ray.evaluate(instance, found.plan)
    options = piper_ray.SolveOptions(time_limit_s=1.5)
    document = solution_document(instance, piper_ray.Restrictions(recompute="never"), options, found, evaluation)
    read: dict[str, Any] = json.loads(to_text(document))
    return read


def solutions() -> Iterator[Solution]:
    base = solution(plan=small_plan())
    yield base
    yield replace(base, status=Status.FEASIBLE, lower_bound_s=0.0, stopped_by=StoppedBy.INTERRUPT)
    yield replace(base, blocks=BLOCKS, stats=replace(base.stats, cluster=CLUSTER, pairs=None))
    yield solution(Status.INFEASIBLE, lower_bound_s=float("inf"), infeasibility=Infeasibility("too small", None))
    yield solution(Status.UNKNOWN, lower_bound_s=0.001, stopped_by=StoppedBy.TIME_LIMIT)


def undescribed(document: Any, schema: dict[str, Any], defs: dict[str, Any], path: str = "") -> Iterator[str]:
    """Fields that a document has and its schema does not describe."""
    options = schema.get("anyOf", [schema])
    for option in options:
        option = defs[option["$ref"].rpartition("/")[2]] if "$ref" in option else option
        if isinstance(document, list) and "items" in option:
            for item in document:
                yield from undescribed(item, option["items"], defs, f"{path}[]")
        if isinstance(document, dict) and "properties" in option:
            for key, value in document.items():
                if not option["properties"].get(key, {}).get("description"):
                    yield f"{path}.{key}"
                else:
                    yield from undescribed(value, option["properties"][key], defs, f"{path}.{key}")


def assert_described(document: dict[str, Any], name: str) -> None:
    jsonschema.validate(document, SCHEMAS[name], jsonschema.Draft202012Validator)
    assert list(undescribed(document, SCHEMAS[name], SCHEMAS[name]["$defs"])) == []


@pytest.mark.parametrize("name", MODELS)
def test_the_schemas_in_the_package_are_those_of_the_models(name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMAS[name])
    assert SCHEMAS[name] == schema_of(MODELS[name]), "run scripts/schemas"


@pytest.mark.parametrize("found", list(solutions()), ids=lambda found: f"{found.status.value}")
def test_solutions_keep_their_schema_and_read_back(found: Solution, tmp_path: Path) -> None:
    instance = small_instance()
    document = written(found)
    assert_described(document, "solution.schema.json")
    assert piper_ray.load_solution(document, instance) == found
    path = tmp_path / "solution.json"
    path.write_text(json.dumps(document), "utf-8")
    assert piper_ray.load_solution(path, instance) == found


def test_a_solve_s_document_reads_back_as_the_solution() -> None:
    instance = small_instance()
    found = piper_ray.solve(instance, restrictions=piper_ray.Restrictions(recompute="never"))
    assert found.plan is not None
    assert piper_ray.load_solution(written(found), instance) == found


def test_older_documents_are_read() -> None:
    instance = small_instance()
    found = solution(plan=small_plan())
    found = replace(found, blocks=BLOCKS, stats=replace(found.stats, cluster=CLUSTER))
    document = written(found)
    for fields in (document["stats"]["cluster"], *document["stats"]["cluster"]["nodes"]):
        fields["blocks"] = fields.pop("chunks")
    for fields in document["stats"]["evaluations"]:
        fields["blocks_tested"] = fields.pop("buckets_tested")
    assert document["blocks"]["time_per_sample"] == document["blocks"]["time_per_sample_s"] == 0.02
    del document["blocks"]["time_per_sample_s"], document["evaluation"]["step_s"]
    del document["instance"]["samples_per_microbatch"], document["instance"]["tokens_per_sample"]
    for stage in document["plan"]["stages"]:
        del stage["names"], stage["paths"], stage["ranks"]
    assert piper_ray.load_solution(document, instance) == found
    assert piper_ray.load_plan(document, instance) == found.plan


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (lambda document: document.update(schema="a solution"), "schema"),
        (lambda document: document.update(schema="piper-ray/plan"), ""),
        (lambda document: document.pop("schema"), "schema"),
        (lambda document: document.update(schema_version=3), "schema_version"),
        (lambda document: document["instance"].update(digest="0" * 64), "instance.digest"),
        (lambda document: document.update(status="best"), "status"),
        (lambda document: document["stats"].pop("levels"), "stats.levels"),
        (lambda document: document["plan"]["stages"][0].update(nodes=[77]), "plan.stages[0].nodes[0]"),
        (lambda document: document.pop("lower_bound_s"), "lower_bound_s"),
        (lambda document: document["stats"].update(threads=10**5000), ""),
        (lambda document: document["stats"].update(itself=document), ""),
        (lambda document: document["stats"].update(threads=object()), "stats.threads"),
        (lambda document: document["stats"].update(threads="2"), "stats.threads"),
        (lambda document: document.update(gap="0"), "gap"),
    ],
)
def test_what_is_wrong_with_a_solution_is_told(change: Any, path: str) -> None:
    document = written(solution(plan=small_plan()))
    change(document)
    with pytest.raises(InputError) as caught:
        piper_ray.load_solution(document, small_instance())
    assert path in [fault.path for fault in caught.value.faults], str(caught.value)


def test_plan_files_keep_their_schema() -> None:
    instance, plan = small_instance(), small_plan()
    evaluation = piper_ray.evaluate(instance, plan)
    from_solve = plan_document(instance, plan, evaluation, proof_document(solution(plan=plan)))
    assert_described(json.loads(to_text(from_solve)), "plan.schema.json")
    result = piper_ray.baselines.plan(instance, "megatron")
    assert result.plan is not None
    assert result.evaluation is not None
    baseline = plan_document(instance, result.plan, result.evaluation, baseline_facts(result))
    assert_described(json.loads(to_text(baseline)), "plan.schema.json")


def with_paths(instance: Instance) -> Instance:
    layers = tuple(replace(layer, path=f"model.layers.{layer.id}") for layer in instance.layers)
    return replace(instance, layers=layers)


def test_a_dumped_plan_reads_back_with_names_paths_and_ranks(tmp_path: Path) -> None:
    instance, plan, path = with_paths(small_instance()), small_plan(), tmp_path / "plan.json"
    piper_ray.dump_plan(plan, path, instance)
    document = json.loads(path.read_text("utf-8"))
    assert_described(document, "plan.schema.json")
    assert piper_ray.load_plan(path, instance) == plan
    first = 0
    for written_stage, stage in zip(document["stages"], plan.stages, strict=True):
        assert written_stage["names"] == [instance.layer_by_id[layer].name for layer in stage.layers]
        assert written_stage["paths"] == [f"model.layers.{layer}" for layer in stage.layers]
        assert written_stage["ranks"] == [first, first + stage.devices - 1]
        first += stage.devices
    assert first == plan.devices
    assert [len(ranks) for ranks in plan.ranks] == [stage.devices for stage in plan.stages]


@pytest.mark.parametrize(
    ("plan", "path"),
    [
        (Plan((Stage((0, 99), 1, 1, {0: "vanilla", 99: "vanilla"}),)), "stages[0].nodes[1]"),
        (Plan((Stage((0, 1), 1, 1, {0: "vanilla"}),)), "stages[0].tmpc_ids[1]"),
        (Plan((Stage((0,), 0, 1, {0: "vanilla"}),)), "stages[0].dataParallelDegree"),
    ],
)
def test_a_plan_of_other_layers_is_not_dumped(plan: Plan, path: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        piper_ray.dump_plan(plan, tmp_path / "plan.json", small_instance())
    assert path in [fault.path for fault in caught.value.faults]
    assert list(tmp_path.iterdir()) == []


def test_a_plan_of_a_later_version_is_refused() -> None:
    document = {**small_plan().to_dict(), "schema": "piper-ray/plan", "schema_version": 3}
    with pytest.raises(InputError, match="of a later piper-ray; expected at most 2"):
        piper_ray.load_plan(document, small_instance())
    assert piper_ray.load_plan({**document, "schema": "another/plan"}, small_instance()) == small_plan()


def test_restrictions_are_told_by_name() -> None:
    class Few(Constraint):
        """Some other constraint."""

        def __init__(self, stages: int) -> None:
            self.stages = stages

        def violations(self, instance: Instance, plan: Plan) -> Iterator[str]:  # noqa: ARG002
            if len(plan.stages) > self.stages:
                yield "too many"

    told = piper_ray.Restrictions(False, constraints=[Few(3)]).to_dict()
    assert told == {
        "tensor_parallelism": False,
        "data_parallelism": True,
        "recompute": "auto",
        "constraints": [{"kind": "Few", "stages": 3}],
    }


def test_groups_of_a_schedule_come_back(tmp_path: Path) -> None:
    """Another group makes another step: plans, solutions and both forms of workloads keep it."""
    schedule = Schedule(ScheduleName.INTERLEAVED, 2, group=5)
    instance, plan, path = small_instance(), small_plan(), tmp_path / "plan.json"
    found = replace(solution(plan=plan), schedule=schedule)
    document = json.loads(to_text(plan_document(instance, plan, None, proof_document(found), schedule)))
    assert_described(document, "plan.schema.json")
    assert plan_claims(document).schedule == schedule
    assert piper_ray.load_solution(written(found), instance) == found
    piper_ray.dump_plan(plan, path, instance, schedule)
    assert plan_claims(path).schedule == schedule
    for name in ("small.toml", "small.json"):
        piper_ray.dump(instance.replace(schedule=schedule), tmp_path / name)
        assert piper_ray.load(tmp_path / name).schedule == schedule
        piper_ray.dump(instance.replace(schedule="interleaved"), tmp_path / name)
        assert piper_ray.load(tmp_path / name).schedule == Schedule.of("interleaved")


def test_a_written_plan_has_the_ranks_of_its_schedule(tmp_path: Path) -> None:
    instance, path = equal_chain(4, devices=2, microbatches=4), tmp_path / "plan.json"
    plan = Plan(tuple(Stage((v,), 1, 1, {v: "vanilla"}) for v in range(4)))
    for where, schedule in ((instance, "interleaved"), (instance.replace(schedule="interleaved"), None)):
        piper_ray.dump_plan(plan, path, where, schedule)
        assert [stage["ranks"] for stage in json.loads(path.read_text())["stages"]] == [[0, 0], [1, 1]] * 2
        assert plan_claims(path).schedule == Schedule.of("interleaved")
