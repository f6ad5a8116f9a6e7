"""The JSON documents and the plan file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from piper_ray import Restrictions, SolveOptions, UsageError, __version__, evaluate, load_plan
from piper_ray.model.solution import Infeasibility, Solution, Status
from piper_ray.report.document import plan_document, proof_document, solution_document, to_text
from piper_ray.storage.files import write_atomically
from tests.report_cases import small_instance, small_plan, solution


def _document(outcome: Solution) -> dict[str, Any]:
    instance = small_instance()
    evaluation = None if outcome.plan is None else evaluate(instance, outcome.plan)
    document = solution_document(instance, Restrictions(), SolveOptions(), outcome, evaluation)
    read: dict[str, Any] = json.loads(to_text(document), parse_constant=pytest.fail)
    return read


def test_a_solved_instance() -> None:
    document = _document(solution(plan=small_plan()))
    instance = small_instance()
    assert document["schema"] == "piper-ray/solution"
    assert document["schema_version"] == 1
    assert document["tool_version"] == __version__
    assert document["instance"] == {
        "name": "small",
        "digest": instance.digest,
        "layers": 6,
        "edges": 5,
        "devices": 4,
        "microbatches": 8,
        "samples_per_microbatch": None,
        "tokens_per_sample": None,
        "measured_threads": None,
        "memory_bytes": 8 * 2**30,
        "bandwidth_bytes_per_s": 25 * 2**30,
    }
    assert document["restrictions"] == {"tensor_parallelism": True, "data_parallelism": True, "recompute": "auto"}
    assert (document["status"], document["stopped_by"], document["gap"]) == ("optimal", None, 0.0)
    assert document["time_per_sample_s"] == document["lower_bound_s"] == 0.01004
    assert document["evaluation"]["bottleneck"] == 0
    assert document["plan"]["stages"][0] == {
        **small_plan().to_dict()["stages"][0],  # type: ignore[index]
        "names": [small_instance().layer_by_id[layer].name for layer in small_plan().stages[0].layers],
        "paths": [""] * len(small_plan().stages[0].layers),
        "recompute": [False, True, True, False],
        "ranks": [0, 1],
        "figures": {
            "devices": 2,
            "time_s": 0.01004,
            "compute_s": 0.0075,
            "communication_s": 4e-05,
            "resync_s": 0.0025,
            "memory_bytes": 6.5 * 2**30,
            "in_flight_microbatches": 2,
            "binds": ["time"],
        },
    }
    assert len(document["stats"]["evaluations"]) == 2
    assert document["infeasibility"] is None


def test_an_infeasible_instance_has_no_infinity_in_its_document() -> None:
    infeasible = solution(Status.INFEASIBLE, lower_bound_s=float("inf"), infeasibility=Infeasibility("too small", 9.0))
    document = _document(infeasible)
    assert (document["status"], document["lower_bound_s"], document["plan"]) == ("infeasible", None, None)
    assert document["infeasibility"] == {"reason": "too small", "least_memory_bytes": 9.0}
    assert document["evaluation"] is None


def test_plan_file_and_document_hold_the_same_plan_for_a_reader(tmp_path: Path) -> None:
    instance, plan = small_instance(), small_plan()
    written = plan_document(instance, plan, evaluate(instance, plan), proof_document(solution(plan=plan)))
    assert written["time_per_sample_s"] == 0.01004
    assert next(iter(written)) == "stages"
    assert written["status"] == solution(plan=plan).status.value
    path = tmp_path / "plan.json"
    write_atomically(path, to_text(written))
    assert load_plan(path, instance) == plan
    assert load_plan(_document(solution(plan=plan)), instance) == plan


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.mkdir()  # a file cannot take a folder's place
    with pytest.raises(UsageError, match="cannot be written"):
        write_atomically(path, "{}")
    assert list(tmp_path.iterdir()) == [path]
