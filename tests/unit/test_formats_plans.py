"""Plans: Piper's JSON and ours, read back as they were written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from piper_ray.model.errors import InputError
from piper_ray.model.instance import Edge, Instance, Layer, Tmpc
from piper_ray.model.plan import Plan, Stage
from piper_ray.workloads.formats.load import load_plan

TMPCS = {2: (Tmpc("vanilla", 1.0, 1.0, 1.0, 1.0),)}
INSTANCE = Instance(
    layers=(Layer(5, "a", TMPCS), Layer(3, "b", TMPCS), Layer(8, "c", TMPCS)),
    edges=(Edge(5, 3, 1.0),),
    devices=8,
    microbatches=4,
    memory_bytes=1.0,
    bandwidth_bytes_per_s=1.0,
)
PLAN = Plan((Stage((5, 3), 2, 1, {5: "vanilla", 3: "x"}), Stage((8,), 1, 4, {8: "vanilla"})))


def test_a_written_plan_reads_back() -> None:
    assert load_plan(PLAN.to_dict(), INSTANCE) == PLAN


def test_from_a_file_within_a_larger_document(tmp_path: Path) -> None:
    path = tmp_path / "solution.json"
    path.write_text(json.dumps({"version": 1, "status": "optimal", "plan": {**PLAN.to_dict(), "devices": 8}}))
    assert load_plan(path, INSTANCE) == PLAN


def test_layers_come_in_the_order_of_the_instance() -> None:
    document: Any = PLAN.to_dict()
    document["stages"][0]["nodes"] = [3, 5]
    assert load_plan(document, INSTANCE).stages[0].layers == (5, 3)


def test_rules_of_the_problem_are_not_checked_here() -> None:
    document: Any = PLAN.to_dict()
    document["stages"][1] = document["stages"][0]  # a layer twice, another nowhere, too many devices
    document["stages"][0]["dataParallelDegree"] = 77
    assert len(load_plan(document, INSTANCE).stages) == 2


def change(*path: str | int, to: object) -> Any:
    document: Any = PLAN.to_dict()
    inner = document
    for part in path[:-1]:
        inner = inner[part]
    inner[path[-1]] = to
    return document


@pytest.mark.parametrize(
    ("document", "path", "words"),
    [
        ({}, "stages", "missing; expected the list of stages"),
        ({"plan": None}, "plan", "holds no plan (null)"),
        ({"plan": {}}, "plan.stages", "missing"),
        (change("stages", to={}), "stages", "not a list (an object)"),
        (change("stages", 0, to=1), "stages[0]", "not an object (1)"),
        (change("stages", 0, "nodes", to=[]), "stages[0].nodes", "empty"),
        (change("stages", 0, "nodes", to=[5, 99]), "stages[0].nodes[1]", "unknown layer 99"),
        (change("stages", 0, "nodes", to=[5, 3, 5]), "stages[0].nodes[2]", "duplicate layer 5"),
        (change("stages", 0, "nodes", to=[5, "3"]), "stages[0].nodes[1]", 'not a whole number ("3")'),
        (change("stages", 0, "nodes", to=[5]), 'stages[0].TMPCids["3"]', "not a layer of this stage"),
        (change("stages", 0, "TMPCids", to={"5": "x"}), 'stages[0].TMPCids["3"]', "missing"),
        (change("stages", 0, "TMPCids", "5", to=1), 'stages[0].TMPCids["5"]', "not a text (1)"),
        (change("stages", 1, "dataParallelDegree", to=0), "stages[1].dataParallelDegree", "zero (0)"),
        (change("stages", 1, "tensorParallelDegree", to=1.5), "stages[1].tensorParallelDegree", "not a whole number"),
    ],
)
def test_a_fault_is_reported_at_its_place(document: dict[str, object], path: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        load_plan(document, INSTANCE)
    assert [fault for fault in caught.value.faults if fault.path == path and words in fault.message], str(caught.value)


def test_faults_of_several_stages_are_reported_at_once() -> None:
    document = change("stages", 1, "dataParallelDegree", to=-1)
    del document["stages"][0]["nodes"]
    with pytest.raises(InputError) as caught:
        load_plan(document, INSTANCE)
    assert [fault.path for fault in caught.value.faults] == ["stages[0].nodes", "stages[1].dataParallelDegree"]


def test_duplicate_keys(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{"stages": [], "stages": []}')
    with pytest.raises(InputError, match="stages: duplicate key"):
        load_plan(path, INSTANCE)
