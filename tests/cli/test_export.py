"""``solve --runtime``, ``--plans``, ``export``, ``import-plan`` and ``compare``, as a person uses them."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

import piper_ray
from piper_ray.cli.finished_plans import plan_names
from piper_ray.workloads.formats.plan_schema import SolutionDocument
from tests.cli_cases import run, without_notes, write_small
from tests.export_support import ROOT, llama, plan_of, runtime_says
from tests.lengths import long_after

LAYOUT = "Et*3|(t*3|)*2,t*3L"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "llama.json"
    piper_ray.dump(llama(), path)
    return path


def good(*arguments: object) -> subprocess.CompletedProcess[str]:
    result = run(*arguments)
    assert result.returncode == 0, result.stderr
    return result


def test_a_plan_is_run_as_the_launch_that_it_is_compared_with(source: Path, tmp_path: Path) -> None:
    """Megatron's interleaved schedule overlaps transfers, in warm-up and flush where a flag says so."""
    launch, flagged, plan = (tmp_path / name for name in ("launch.sh", "flagged.sh", "plan.json"))
    text = "torchrun --nproc-per-node 8 pretrain_gpt.py --pipeline-model-parallel-size 2"
    launch.write_text(f"{text} --num-virtual-stages-per-pipeline-rank 3\n")
    flagged.write_text(f"{launch.read_text().strip()} --overlap-p2p-communication-warmup-flush\n")
    good("import-plan", source, launch, "-o", plan)

    def steps_s(*files: Path) -> list[float]:
        return [one["step_s"] for one in json.loads(good("compare", source, *files, "--json").stdout)["plans"]]

    usual, overlapped = steps_s(plan, launch), steps_s(plan, flagged)
    assert usual[0] == usual[1] > overlapped[0] == overlapped[1]
    assert json.loads(good("simulate", source, plan, "--json").stdout)["step_s"] > usual[0]


def test_a_recipe_is_called_by_its_own_name() -> None:
    files = [Path("models/config_registry.py"), Path("best.json")]
    assert plan_names(files, "llama3_8b") == ["llama3_8b", "best"]
    assert plan_names(files, None) == ["config_registry", "best"]
    assert plan_names([Path("a/run.sh"), Path("b/run.sh")], None) == ["a/run.sh", "b/run.sh"]


def test_a_layout_that_runs_today_against_the_best(source: Path, tmp_path: Path) -> None:
    yours, best = tmp_path / "yours.json", tmp_path / "best.json"
    good("import-plan", source, LAYOUT, "--tensor-parallel", 2, "--data-parallel", 1, "-o", yours)
    solved = good("solve", source, "--runtime", "megatron", "--out", best)
    assert "Megatron's rules" in solved.stdout
    assert "pipeline rank 0: stage 1; ranks 0-" in solved.stdout
    compared = good("compare", source, yours, best)
    assert f"yours: {LAYOUT}" in compared.stdout
    verdict = compared.stdout.splitlines()[-1]
    assert verdict.startswith("yours ")
    assert " a step, best " in verdict
    document = json.loads(good("compare", source, yours, best, "--json").stdout)
    mine, other = document["plans"]
    assert mine["step_s"] > other["step_s"]
    for plan in document["plans"]:
        assert sum(plan["parts"].values()) == pytest.approx(plan["step_s"])
    assert document["verdict"] == verdict
    verified = good("verify", source, yours)
    assert "valid" in verified.stdout


def test_plans_of_several_shapes(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    result = good("solve", source, "--runtime", "megatron", "--plans", 3, "--out", out, "--json")
    document = json.loads(result.stdout)
    SolutionDocument.model_validate_json(result.stdout)
    assert document["runtime"]["name"] == "megatron"
    alternatives = document["alternatives"]
    assert [one["name"] for one in alternatives] == ["1", "2", "3"]
    steps = [one["step_s"] for one in alternatives]
    assert steps[0] == pytest.approx(document["time_per_sample_s"] * 32, rel=2e-3)
    assert steps[1:] == sorted(steps[1:])
    shapes = {(s["dataParallelDegree"], s["tensorParallelDegree"]) for x in alternatives for s in x["plan"]["stages"]}
    assert len(shapes) == 3
    good("verify", source, tmp_path / "plan-2.json")
    assert (tmp_path / "plan-3.json").exists()
    assert "the best 3 plans of different degrees and chunks" in result.stderr
    assert re.search(r"against 1 +step +work +transfers +uneven +draining +memory left\n +2 +[+-]", result.stderr)


def test_nothing_is_slower_without_rules(source: Path) -> None:
    document = json.loads(good("solve", source, "--runtime", "torch", "--json").stdout)
    free = document["runtime"]["without_rules"]
    assert free["time_per_sample_s"] <= document["time_per_sample_s"] * (1 + 1e-3)
    assert free["lower_bound_s"] <= document["lower_bound_s"] * (1 + 1e-3)
    assert {s["tensorParallelDegree"] for s in document["plan"]["stages"]} == {1}


def test_round_trip_by_files(source: Path, tmp_path: Path) -> None:
    plan, again = tmp_path / "plan.json", tmp_path / "again.json"
    good("solve", source, "--runtime", "megatron", "--stages", 4, "--out", plan)
    exported = good("export", source, plan, "--to", "megatron", "-o", tmp_path / "m")
    assert exported.stdout.splitlines()[-1] == "bash launch.sh DATA [ARGUMENTS...]"
    assert "piper-ray: note: Megatron derives DP itself: " in exported.stderr
    d = json.loads(plan.read_text())["stages"][0]["dataParallelDegree"]
    good("import-plan", source, tmp_path / "m" / "megatron.args", "--data-parallel", d, "-o", again)
    mine, theirs = (json.loads(path.read_text())["stages"] for path in (plan, again))
    for one, other in zip(mine, theirs, strict=True):
        assert {key: one[key] for key in other} == other


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("solve", "SMALL", "--runtime", "megatron", "--schedule", "2bw"), 2, "Megatron has no schedule 2bw"),
        (("solve", "SMALL", "--runtime", "nemo"), 2, "megatron"),
        (("solve", "SMALL", "--plans", 2), 2, "--plans is for schedules with a flush"),
        (("solve", "SMALL", "--planner", "gpipe", "--runtime", "torch"), 2, "--runtime is for the exact planner"),
        (("export", "SMALL", "PLAN", "--to", "megatron", "-o", "OUT"), 2, "a plan for 2bw, which no runtime has"),
        (("export", "SMALL", "PLAN", "--to", "yaml", "-o", "OUT", "--schedule", "1f1b"), 6, "differ in their degrees"),
        (("import-plan", "SMALL", "Et*3|tL|", "-o", "OUT"), 2, "stage 3 holds nothing"),
        (("import-plan", "SMALL", "E(t", "-o", "OUT"), 2, 'layout "E(t": character 2 opens a group'),
        (("import-plan", "SMALL", "Et*2|t*2L", "-o", "nowhere/plan.json"), 2, "there is no folder nowhere"),
        (("compare", "SMALL", "OUT"), 3, "OUT"),
    ],
)
def test_faults_are_told(tmp_path: Path, arguments: tuple[object, ...], code: int, told: str) -> None:
    from tests.report_cases import small_instance, small_plan

    small, plan = write_small(tmp_path), tmp_path / "plan.json"
    piper_ray.dump_plan(small_plan(), plan, small_instance())
    places = {"SMALL": small, "PLAN": plan, "OUT": tmp_path / "OUT"}
    result = run(*(places.get(str(argument), argument) for argument in arguments))
    assert result.returncode == code, result.stderr
    assert told in " ".join(without_notes(result.stderr).split())


@pytest.mark.long
def test_exports_of_an_estimate_are_taken(tmp_path: Path) -> None:
    """From a config to what torchtitan reads."""
    source, plan = tmp_path / "small.toml", tmp_path / "plan.json"
    config = {
        "model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16,
        "intermediate_size": 2816, "vocab_size": 32000, "max_position_embeddings": 2048,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    good("estimate", tmp_path / "config.json", "--gpu", "H100-SXM", "--nodes", 1, "--batch", 16, "--out", source)
    good("solve", source, "--runtime", "torchtitan", "--stages", 2, "--out", plan)
    good("export", source, plan, "--to", "torchtitan", "-o", tmp_path / "t")
    (found,) = runtime_says("torchtitan", ("torchtitan", tmp_path / "t", 12))
    assert found["parallelism"]["pipeline_parallel_degree"] == 2


def test_a_plan_with_first_layers_recomputed_comes_back(source: Path, tmp_path: Path) -> None:
    plan, again = tmp_path / "plan.json", tmp_path / "again.json"
    piper_ray.dump_plan(plan_of(llama(), [7, 7], first_k=2), plan, llama())
    good("export", source, plan, "--to", "megatron", "-o", tmp_path / "m")
    good("import-plan", source, tmp_path / "m" / "megatron.args", "--data-parallel", 1, "-o", again)
    assert piper_ray.load_plan(again, llama()).stages == piper_ray.load_plan(plan, llama()).stages


def test_arguments_of_megatron_are_one_argument_of_ours(source: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    found = good("import-plan", source, "--tensor-model-parallel-size 2 --use-distributed-optimizer", "-o", plan)
    assert "piper-ray: note: the optimizer's state in 8 shards: the workload has no such TMPCs" in found.stderr
    assert piper_ray.load_plan(plan, llama()).stages[0].tensor_parallel_degree == 2
    unknown = run("import-plan", source, "Et*12L", "--tensor-parallell", 2, "-o", plan)
    assert unknown.returncode == 2
    assert "did you mean --tensor-parallel?" in " ".join(unknown.stderr.split())


def test_arguments_may_be_longer_than_a_path(source: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    long = "--pipeline-model-parallel-size 2 " + " ".join(f"--data-path /data/{number:05d}" for number in range(400))
    assert "2 stages, 16 devices" in good("import-plan", source, long, "-o", plan).stdout
    assert run("import-plan", source, "x" * 5000, "-o", plan).returncode == 2


@pytest.mark.parametrize(
    "target",
    long_after(3, ["megatron", "torch", "yaml", "megatron-bridge", "torchtitan", "deepspeed", "flagscale"]),
)
def test_a_folder_that_was_exported_is_read_with_its_ranks(source: Path, tmp_path: Path, target: str) -> None:
    plan, again = tmp_path / "plan.json", tmp_path / "again.json"
    one = plan_of(llama(), [7, 7], d=2) if target == "torch" else plan_of(llama(), [7, 7], d=2, t=2)
    piper_ray.dump_plan(one, plan, llama())
    good("export", source, plan, "--to", target, "-o", tmp_path / target)
    good("import-plan", source, tmp_path / target, "-o", again)
    assert piper_ray.load_plan(again, llama()) == one


def test_what_is_no_folder_of_one_export_is_told(source: Path, tmp_path: Path) -> None:
    plan, again = tmp_path / "plan.json", tmp_path / "again.json"
    piper_ray.dump_plan(plan_of(llama(), [7, 7], d=2, t=2), plan, llama())
    (tmp_path / "nothing").mkdir()
    for target in ("torchtitan", "flagscale"):
        good("export", source, plan, "--to", target, "-o", tmp_path / "torchtitan")
    for name, told in (
        ("nothing", "a folder without megatron.args"),
        ("none.yaml", "there is no such file or folder"),
        ("torchtitan", "a folder with torchtitan.json, system.yaml and piper_plan.py, of several exports"),
    ):
        refused = run("import-plan", source, tmp_path / name, "-o", again)
        assert refused.returncode == 2
        assert told in refused.stderr


def test_a_plan_that_does_not_fit_is_written_only_if_asked(source: Path, tmp_path: Path) -> None:
    plan, out = tmp_path / "plan.json", tmp_path / "out"
    piper_ray.dump_plan(plan_of(llama(), [7, 7]), plan, llama())
    little = ("--to", "megatron", "-o", out, "--memory", "500MiB")
    refused = run("export", source, plan, *little)
    assert refused.returncode == 6
    assert "nothing is written (--despite-memory writes it anyway):\n  stage 1 needs " in refused.stderr
    assert not out.exists()
    written = good("export", source, plan, *little, "--despite-memory")
    assert "note: more memory is needed than there is: stage 1 needs" in written.stderr
    assert "more memory is needed than there is: stage 1 needs" in (out / "README.md").read_text()


def test_a_plan_for_deepspeed_leaves_what_it_holds_beside_the_figures(tmp_path: Path) -> None:
    """Tensors between stages: the plan that is fastest by the figures alone would be refused."""
    source, plan = str(ROOT / "inputs" / "llama3-70b.toml"), tmp_path / "plan.json"
    words = ("--devices", "64", "--runtime", "deepspeed", "--gap", "1%")
    finished = good("solve", source, *words, "--out", plan)
    assert "than the 3.75 GiB that DeepSpeed needs for itself: the search" in finished.stderr
    document = json.loads(plan.read_text())
    assert document["status"] == "feasible"
    assert 0.0 < document["gap"] < 0.02
    good("export", source, plan, "--devices", "64", "--to", "deepspeed", "-o", tmp_path / "launch")


def test_a_plan_of_another_workload_is_one_line_that_names_it(source: Path, tmp_path: Path) -> None:
    mine, other = tmp_path / "mine.json", tmp_path / "other.json"
    piper_ray.dump_plan(plan_of(llama(), [7, 7]), mine, llama())
    wider = llama(nodes=4, zero_shards=2)
    piper_ray.dump_plan(plan_of(wider, [7, 7], d=2, t=8), other, wider)
    document = json.loads(other.read_text())
    for stage in document["stages"]:  # as one whose layers are called the same
        stage["dataParallelDegree"] = 16
    other.write_text(json.dumps(document))
    for words in (("compare", source, mine, other), ("export", source, other, "--to", "yaml", "-o", tmp_path / "y")):
        refused = run(*words)
        assert refused.returncode in (3, 6)
        lines = without_notes(refused.stderr).strip().splitlines()
        assert len(lines) == 2, lines
        assert "a plan of another workload" in lines[1]
    assert lines
    assert str(other) in run("compare", source, mine, other).stderr


def test_a_model_whose_ends_are_tied_is_told_and_kept_on_one_rank(tmp_path: Path) -> None:
    source, plan = tmp_path / "tied.json", tmp_path / "plan.json"
    piper_ray.dump(llama(tied=True), source)
    solved = good("solve", source, "--runtime", "torchtitan", "--out", plan)
    assert "have a weight in common: plans have one rank" in " ".join(solved.stderr.split())
    assert len(piper_ray.load_plan(plan, llama(tied=True)).stages) == 1
    good("solve", source, "--runtime", "megatron", "--stages", 2, "--out", plan)
    refused = run("export", source, plan, "--to", "torchtitan", "-o", tmp_path / "t")
    assert refused.returncode == 6
    assert refused.stderr.startswith("piper-ray: torchtitan cannot run this plan:")


@pytest.mark.parametrize("runtime", ["megatron", "torchtitan", "deepspeed", "flagscale"])
@pytest.mark.parametrize("rule", long_after(1, ["always", "never", "all-or-none"]))
def test_a_runtime_keeps_to_rules_of_recomputation(source: Path, tmp_path: Path, runtime: str, rule: str) -> None:
    """The plan is valid (exit 6 otherwise), keeps both, and can be exported."""
    out = tmp_path / "plan.json"
    good("solve", source, "--runtime", runtime, "--recompute", rule, "--out", out)
    chosen = [tmpc for stage in json.loads(out.read_text())["stages"] for tmpc in stage["TMPCids"].values()]
    recomputing = [tmpc for tmpc in chosen if "full" in tmpc or "selective" in tmpc]
    assert len(recomputing) in {"always": {12}, "never": {0}}.get(rule, {0, 12})
    good("export", source, out, "--to", runtime, "-o", tmp_path / "launch")
