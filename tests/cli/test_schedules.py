"""``solve --schedule`` and what narrows a plan as a whole; ``verify`` under the schedule that a plan is for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import piper_ray
from piper_ray.model.constraints import AllDevices, SameDegrees, StageCount, TensorParallelDegrees
from tests.cli_cases import run, write_small
from tests.data import goldens
from tests.instances import equal_chain
from tests.solver_support import ONE_THREAD

GOLDENS = [record for record in goldens("schedules") if record["value_s"]["1f1b"] is not None][:4]


def solved(source: Path, *arguments: object) -> dict[str, Any]:
    result = run("solve", source, "--json", *arguments)
    assert result.returncode == 0, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    return document


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_value_bound_and_simulation_meet(tmp_path: Path, schedule: str) -> None:
    record = next(record for record in GOLDENS if record["value_s"][schedule] is not None)
    source, out = tmp_path / "instance.json", tmp_path / "plan.json"
    source.write_text(json.dumps(record["instance"]), encoding="utf-8")
    found = solved(source, "--schedule", schedule, "--out", out)
    expected = pytest.approx(record["value_s"][schedule], rel=1e-9)
    assert (found["schedule"], found["status"]) == (schedule, "optimal")
    assert found["time_per_sample_s"] == expected
    assert found["lower_bound_s"] == expected
    assert found["simulated"]["time_per_sample_s"] == expected
    verified = run("verify", source, out)
    assert verified.returncode == 0, verified.stderr
    assert f"Schedule  {schedule}:" in verified.stdout
    assert "valid: " in verified.stdout
    tight = run("verify", source, out, "--memory", "1B")
    assert tight.returncode == piper_ray.InvalidPlan.exit_code
    assert "more than it has" in tight.stderr


def test_a_file_may_say_the_schedule(tmp_path: Path) -> None:
    record = GOLDENS[0]
    source = tmp_path / "instance.json"
    source.write_text(json.dumps(record["instance"] | {"schedule": "1f1b"}), encoding="utf-8")
    instance = piper_ray.load(source)
    assert instance.schedule == piper_ray.Schedule("1f1b")  # type: ignore[arg-type]
    for name in ("again.json", "again.toml"):
        piper_ray.dump(instance, tmp_path / name)
        assert piper_ray.load(tmp_path / name).schedule == instance.schedule
    solution = piper_ray.solve(source, options=ONE_THREAD)
    assert solution.schedule == instance.schedule
    assert solution.time_per_sample_s == pytest.approx(record["value_s"]["1f1b"], rel=1e-9)
    assert piper_ray.solve(source, schedule="2bw", options=ONE_THREAD).schedule.name.value == "2bw"
    source.write_text(json.dumps(record["instance"] | {"schedule": "1f2b"}), encoding="utf-8")
    with pytest.raises(piper_ray.InputError, match="schedule"):
        piper_ray.load(source)


@pytest.mark.parametrize("schedule", ["interleaved", "looped-bfs", "zb-h1", "zb-v", "dualpipe-v"])
def test_a_plan_with_chunks_is_what_verify_and_simulate_take(tmp_path: Path, schedule: str) -> None:
    source, out = tmp_path / "chain.json", tmp_path / "plan.json"
    piper_ray.dump(equal_chain(6, devices=4, microbatches=8, memory_bytes=500, bandwidth_bytes_per_s=8.0), source)
    found = solved(source, "--schedule", schedule, "--out", out, "--stages", 2, "--time-limit", 20)
    assert found["schedule"] == schedule
    chunks = found["chunks"]
    assert len(found["plan"]["stages"]) == 2 * chunks
    assert found["simulated"]["time_per_sample_s"] == pytest.approx(found["time_per_sample_s"], rel=1e-9)
    assert 0.0 < found["lower_bound_s"] <= found["time_per_sample_s"]
    instance = piper_ray.load(source)
    answer = tmp_path / "solution.json"
    answer.write_text(json.dumps(found), encoding="utf-8")
    assert piper_ray.load_solution(answer, instance).schedule.v == chunks
    assert max(stage["ranks"][1] for stage in found["plan"]["stages"]) < 4
    verified = run("verify", source, out)
    assert verified.returncode == 0, verified.stderr
    assert f"Schedule  {schedule}" in verified.stdout
    assert ("rank  layers" in verified.stdout) == (chunks > 1)
    simulated = run("simulate", source, out, "--schedule", schedule, "--chunks", chunks, "--json")
    assert simulated.returncode == 0, simulated.stderr
    assert json.loads(simulated.stdout)["step_s"] == pytest.approx(8 * found["time_per_sample_s"], rel=1e-9)


def test_chunks_may_be_given(tmp_path: Path) -> None:
    source = tmp_path / "chain.json"
    piper_ray.dump(equal_chain(6, devices=4, microbatches=8, memory_bytes=500, bandwidth_bytes_per_s=8.0), source)
    result = run("solve", source, "--schedule", "interleaved", "--chunks", 3, "--stages", 2)
    assert result.returncode == 0, result.stderr
    assert "Schedule  interleaved, 3 chunks a rank:" in result.stdout
    table = next(part for part in result.stdout.split("\n\n") if "rank  layers" in part)
    assert [line.split()[1] for line in table.splitlines()] == ["rank", *["0", "1"] * 3]
    assert "1 to 8 chunks a rank" in run("solve", source, "--schedule", "interleaved", "--time-limit", 5).stdout
    in_a_v = run("solve", source, "--schedule", "zb-v", "--time-limit", 5).stdout
    assert "Schedule  zb-v, 2 chunks a rank:" in in_a_v


@pytest.mark.parametrize("schedule", ["2bw", "1f1b"])
def test_constraints_on_the_whole_plan_are_kept(tmp_path: Path, schedule: str) -> None:
    source = write_small(tmp_path)
    instance = piper_ray.load(source)
    rules = [SameDegrees(), StageCount(2), AllDevices(), TensorParallelDegrees((1,))]
    found = solved(
        source, "--schedule", schedule, "--same-degrees", "--stages", 2, "--use-all-devices", "--tensor-parallel", "1"
    )
    plan = piper_ray.load_plan(found, instance)
    assert [*piper_ray.Restrictions(constraints=rules).violations(instance, plan)] == []
    assert len(plan.stages) == 2
    assert plan.devices == instance.devices


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--stages", 2), "add SameDegrees (--same-degrees)"),
        (("--schedule", "pipedream", "--stages", 2), "add SameDegrees (--same-degrees)"),
        (("--schedule", "zb-v", "--chunks", 3), "has two chunks on each rank, not 3"),
        (("--chunks", 2), "schedule 2bw has one stage on each rank"),
        (("--chunks", 2, "--planner", "megatron"), "--chunks is for the exact planner"),
        (("--schedule", "1f1b", "--planner", "megatron", "--gap", "1%"), "--gap is for the exact planner"),
        (("--tensor-parallel", "two"), "'two' are not degrees"),
        (("--stages", 0), "stages must be"),
    ],
)
def test_what_is_not_known_yet_is_refused_by_name(tmp_path: Path, arguments: tuple[object, ...], words: str) -> None:
    result = run("solve", write_small(tmp_path), *arguments)
    assert result.returncode == 2
    assert words in " ".join(result.stderr.split())


def test_terms_of_a_step_are_kept_with_the_plan(tmp_path: Path) -> None:
    source, out = write_small(tmp_path), tmp_path / "plan.json"
    terms = ("--all-reduce", "ring", "--all-reduce-overlap", "0.5", "--optimizer", "20ms")
    found = solved(source, "--schedule", "1f1b", "--out", out, *terms)
    assert found["step"] == {"all_reduce": "ring", "all_reduce_overlap": 0.5, "optimizer_s": 0.02}
    for command in ("verify", "simulate"):
        again = json.loads(run(command, source, out, "--json").stdout)
        assert again["time_per_sample_s"] == pytest.approx(found["time_per_sample_s"], rel=1e-9)
    other = json.loads(run("verify", source, out, "--json", "--optimizer", "30ms").stdout)
    more_s = 0.01 / piper_ray.load(source).microbatches
    assert other["time_per_sample_s"] == pytest.approx(found["time_per_sample_s"] + more_s, rel=1e-9)
    assert piper_ray.load_solution(found, piper_ray.load(source)).step.optimizer_s == 0.02
    for schedule in ("gpipe", "2bw", "pipedream"):
        asked = (source, out, "--schedule", schedule, "--json", "--memory", "1TB")
        values = [json.loads(run(command, *asked).stdout)["time_per_sample_s"] for command in ("verify", "simulate")]
        assert values[0] == pytest.approx(values[1], rel=1e-9)
    refused = run("solve", source, "--schedule", "2bw", "--optimizer", "20ms")
    assert refused.returncode == 2
    assert "are for schedules with a flush" in refused.stderr


def test_what_runtimes_can_be_told(tmp_path: Path) -> None:
    """Each constraint, kept under both kinds of schedule, said in the plan and checked by verify."""
    source, out = write_small(tmp_path), tmp_path / "plan.json"
    instance = piper_ray.load(source)
    for schedule in ("2bw", "1f1b"):
        for rule in ("all-or-none", "first-k", "one-for-all"):
            found = solved(source, "--schedule", schedule, "--per-stage-recompute", rule, "--keep-order", "--out", out)
            plan = piper_ray.load_plan(out, instance)
            assert plan.keeps_order
            rules = piper_ray.Restrictions(recompute=rule, constraints=[piper_ray.KeepOrder()])
            assert [*rules.violations(instance, plan)] == []
            assert found["restrictions"]["recompute"] == rule
            verified = json.loads(run("verify", source, out, "--json").stdout)
            assert verified["time_per_sample_s"] == pytest.approx(found["time_per_sample_s"], rel=1e-9)
    both = run("solve", source, "--recompute", "never", "--per-stage-recompute", "first-k")
    assert both.returncode == 2
    assert "contradict each other" in both.stderr


def test_a_sustained_plan_is_said_so(tmp_path: Path) -> None:
    source = write_small(tmp_path)
    result = run("solve", source, "--schedule", "2bw", "--sustained")
    assert result.returncode == 0, result.stderr
    assert "sustained by replicas that take turns, with" in result.stdout
    assert "step: " in result.stdout
    refused = run("solve", source, "--schedule", "1f1b", "--sustained")
    assert refused.returncode == 2
    assert "a sustained rate is planned for under 2bw alone" in refused.stderr


def test_ranks_of_another_planners_chunks(tmp_path: Path) -> None:
    source, out = tmp_path / "chain.json", tmp_path / "plan.json"
    piper_ray.dump(equal_chain(8, devices=2, microbatches=8, memory_bytes=500, bandwidth_bytes_per_s=8.0), source)
    command = ("solve", source, "--schedule", "interleaved", "--planner", "megatron", "--no-data-parallel")
    found = json.loads(run(*command, "--json", "--out", out).stdout)
    written = json.loads(out.read_text())
    assert found["chunks"] == written["chunks"] == 2
    for stages in (found["plan"]["stages"], written["stages"]):
        assert [stage["ranks"] for stage in stages] == [[0, 0], [1, 1]] * 2


@pytest.mark.parametrize("planner", ["megatron", "pipedream-2bw", "gpipe", "pipedream", "piper-published", "piper"])
def test_planners_are_valued_under_the_schedule(tmp_path: Path, planner: str) -> None:
    """By simulation; a plan with uneven degrees is refused by name."""
    source, out = write_small(tmp_path), tmp_path / "plan.json"
    result = run("solve", source, "--schedule", "gpipe", "--planner", planner, "--json", "--out", out)
    document = json.loads(result.stdout)
    assert document["schedule"] == "gpipe"
    if document["plan"] is None:
        assert result.returncode == piper_ray.InfeasibleError.exit_code
        assert "degrees" in document["note"] or "does not run under gpipe" in document["note"]
        return
    verified = json.loads(run("verify", source, out, "--json").stdout)
    assert verified["schedule"] == "gpipe"
    assert verified["time_per_sample_s"] == pytest.approx(document["time_per_sample_s"], rel=1e-9)
    simulated = json.loads(run("simulate", source, out, "--json").stdout)
    assert simulated["schedule"] == "gpipe"
    assert simulated["time_per_sample_s"] == pytest.approx(document["time_per_sample_s"], rel=1e-9)
