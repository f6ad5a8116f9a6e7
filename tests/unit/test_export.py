"""Exports: what is written, what is refused by name, and layouts read back."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
import yaml

import piper_ray
from piper_ray.export.files import Target
from piper_ray.export.import_plan import import_plan
from piper_ray.export.megatron_layout import check_layout, layout_text, parse_layout
from piper_ray.export.run_as import RunAs
from piper_ray.export.targets import export_plan
from piper_ray.model.constraints import Restrictions
from piper_ray.model.errors import InputError, InvalidPlan, PiperRayError, UnsupportedPlan, UsageError
from piper_ray.model.instance import Instance
from piper_ray.model.mode import Mode, Recomputation
from piper_ray.model.plan import Plan, Stage
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.runtimes.pieces import ModelPieces
from piper_ray.runtimes.runtime import RUNTIMES, RuntimeName
from tests.export_support import llama, mixture, plan_in, plan_of
from tests.report_cases import small_instance

NVIDIA = "Et*2|(t*2|)*34,t*3|(t*2|)*3,tL"
ONE_F_ONE_B = Schedule(ScheduleName.ONE_F_ONE_B)
FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
BOTH_COUNT = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
FULL, PARTS = Mode(Recomputation.FULL), Mode(Recomputation.of("selective-mlp"))


def export(plan: Plan, target: Target, schedule: Schedule = ONE_F_ONE_B, instance: Instance | None = None) -> list[str]:
    return list(export_plan(instance or llama(), plan, schedule, target, 8).notes)


def test_layouts_by_hand() -> None:
    stages = parse_layout(NVIDIA)
    assert (len(stages), stages[0], stages[35], stages[-1], "".join(stages).count("t")) == (40, "Ett", "ttt", "tL", 80)
    assert layout_text(stages) == NVIDIA
    assert parse_layout("E|t*0|tL") == ("E", "", "tL")
    assert layout_text(("EttL",)) == "Et*2L"
    check_layout(stages, NVIDIA, ModelPieces(((0,), *((layer,) for layer in range(1, 81)), (81,))), 8)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("Et)L", "character 3 closes no parenthesis"),
        ("E(t|L", "character 2 opens a group that is not closed"),
        ("E((t)*2)*2L", "character 3 opens a group within a group"),
        ("Et*L", "character 3 is not followed by a number"),
        ("E()*2L", "character 3 closes an empty group"),
        ("E(t)L", "character 4 ends a group that is not repeated"),
        ("E(t)*2*3L", "character 6 ends a group that is repeated twice"),
        ("Et tL", "character 3 is ' '; expected one of E, t, L, m, |"),
        ("Et*99999999999999999999L", "repeats to more than"),
        ("E(t*9999|)*9999L", "repeats to more than"),
        ("tE|t*11L", "the embedding (E) stands in stage 1 and is not the first of all"),
        ("Et*13|L", "13 transformer layers (t); the model has 12"),
        ("Et*11|Lt", "the loss layer (L) stands in stage 2 and is not the last of all"),
        ("t*12|L", "0 times the embedding (E)"),
        ("EE|t*12L", "2 times the embedding (E)"),
        ("Et*12|mL", "1 multi-token-prediction layers (m); the model has 0"),
        ("Et*6||t*6L", "stage 2 holds nothing"),
        ("", "0 times the embedding"),
    ],
)  # fmt: skip
def test_hostile_layouts_are_told_where_they_are_wrong(text: str, told: str) -> None:
    with pytest.raises(UsageError) as error:
        import_plan(llama(), text, RunAs(data_parallel=1))
    assert told in str(error.value)


def test_stages_and_ranks_must_agree() -> None:
    with pytest.raises(UsageError, match="3 stages are no multiple of 2 pipeline ranks"):
        import_plan(llama(), "Et*4|t*4|t*4L", RunAs(pipeline_ranks=2, data_parallel=1))
    with pytest.raises(UsageError, match=r"2 replicas .* are 24; the workload has 16 devices"):
        import_plan(llama(), "Et*4|t*4|t*4L", RunAs(tensor_parallel=4, data_parallel=2))
    with pytest.raises(UsageError, match="3 replicas do not divide the 32 microbatches"):
        import_plan(llama(), "Et*6|t*6L", RunAs(data_parallel=3))
    with pytest.raises(UsageError, match="no configuration at tensor-parallel degree 3"):
        import_plan(llama(), "Et*6|t*6L", RunAs(tensor_parallel=3, data_parallel=1))


@pytest.mark.parametrize(
    ("flags", "layout", "chunks"),
    [
        ("--pipeline-model-parallel-size 4", "Et*3|(t*3|)*2,t*3L", 1),
        ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2", "Et*2|(t*2|)*4,t*2L", 3),
        ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2", "Et*3|(t*3|)*2,t*3L", 2),
        (
            f"--pipeline-model-parallel-size 4 {FIRST} 2 {LAST} 4",
            "Et*2|(t*3|)*2,t*4L",
            1,
        ),
        (f"--pipeline-model-parallel-size 3 {LAST} 2", "Et*5|t*5|t*2L", 1),
        (
            f"--pipeline-model-parallel-size 2 {BOTH_COUNT}",
            "Et*6|t*6L",
            1,
        ),
    ],
)
def test_older_flags_of_megatron(flags: str, layout: str, chunks: int) -> None:
    ours = import_plan(llama(), f"{flags} --lr 1e-4 --swiglu", RunAs(data_parallel=1))
    ranks = len(ours.plan.stages) // chunks
    assert ours.plan == import_plan(llama(), layout, RunAs(pipeline_ranks=ranks, data_parallel=1)).plan
    assert ours.schedule.v == chunks


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("--pipeline-model-parallel-size 5", "12 layers do not divide evenly over 5 pipeline ranks"),
        ("--pipeline-model-parallel-size x", "argument --pipeline-model-parallel-size: invalid int"),
        ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 4", "no multiple of 4 layers"),
        ("--num-layers 10", "--num-layers 10, but the model has 12"),
        ("--context-parallel-size 2", "the workload has no such TMPCs (estimate --context-parallel 2)"),
        ("--recompute-granularity half", "--recompute-granularity half: expected full or selective"),
        ("--micro-batch-size 2", "microbatches of 2 samples, but the workload's times are of"),
        ("--global-batch-size 64", "a batch of 64 samples; the workload's has 32 (--microbatches 64)"),
        ("--pipeline-model-parallel-layout 'Et", "No closing quotation"),
        ("--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 20", "do not fall on 2 pipeline ranks"),
        ("--pipeline-model-parallel-size -1", "expected a positive number"),
    ],
)
def test_arguments_that_are_wrong_are_named(text: str, told: str) -> None:
    with pytest.raises(UsageError) as error:
        import_plan(llama(), text, RunAs(data_parallel=1))
    assert told in str(error.value)


def titan_parts() -> list[list[object]]:
    return [["tok_embeddings", *(f"layers.{i}" for i in range(6))], [*(f"layers.{i}" for i in range(6, 12)), "norm",
            "output"]]  # fmt: skip


def test_lists_of_torchtitan() -> None:
    found = import_plan(llama(), json.dumps(titan_parts()), RunAs(data_parallel=1))
    assert [len(stage.layers) for stage in found.plan.stages] == [7, 7]


@pytest.mark.parametrize(
    ("at", "value", "told"),
    [
        ((0, 1), "layers.1", "[0][1]: layers.1 stands where layers.0 is due"),
        ((0, 1), "layer.0", "[0][1]: 'layer.0' is no module here"),
        ((0, 1), 7, "[0][1]: 7 is no module here"),
        ((1, 0), "layers.12", "[1][0]: 'layers.12' is no module here"),
        ((1, 7), "norm", "[1][7]: norm stands where lm_head is due"),
        ((0, 0), "layers.0", "[0][0]: layers.0 stands where tok_embeddings is due"),
    ],
)
def test_hostile_lists_are_told_where_they_are_wrong(at: tuple[int, int], value: object, told: str) -> None:
    parts = titan_parts()
    parts[at[0]][at[1]] = value
    with pytest.raises(InputError) as error:
        import_plan(llama(), json.dumps(parts), RunAs(data_parallel=1))
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[[", "not JSON"),
        ("[]", "no list of lists"),
        ('[["tok_embeddings"], []]', "no list of lists"),
        ('["tok_embeddings"]', "no list of lists"),
        ("{}", "parallelism is missing"),
        (
            '{"parallelism": {"pipeline_parallel_degree": 2, "pipeline_parallel_layers_per_stage": 5}}',
            "divides 12 layers and 1 and 1 for the ends into 3 stages, no multiple of 2 pipeline ranks",
        ),
        (
            '{"parallelism": {"pipeline_parallel_degree": 2, "pipeline_parallel_layers_per_stage": 4}}',
            "into 4 stages, and the schedule has one stage on each rank",
        ),
        (
            '{"parallelism": {"pipeline_parallel_degree": 2, "pipeline_parallel_first_stage_less_layers": 20}}',
            "leave too little for 2 stages",
        ),
        (
            '{"parallelism": {"pipeline_parallel_degree": 2, "pipeline_parallel_last_stage_less_layers": "x"}}',
            "pipeline_parallel_last_stage_less_layers: 'x' is no whole number of at least 0",
        ),
        (
            '{"parallelism": {}, "training": {"local_batch_size": 2}}',
            "microbatches of 2 samples, but the workload's times are of",
        ),
        (
            '{"parallelism": {"tensor_parallel_degree": 0}}',
            "tensor_parallel_degree: 0 is no whole number of at least 1",
        ),
        (
            '{"parallelism": {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "1F2B"}}',
            "'1F2B'; expected one of",
        ),
        ('{"parallelism": {}, "activation_checkpoint": "some"}', "expected none, selective, full"),
    ],
)
def test_other_documents_are_told_apart(text: str, told: str) -> None:
    with pytest.raises(PiperRayError) as error:
        import_plan(llama(), text, RunAs(data_parallel=1))
    assert told in str(error.value)


def test_mutated_layouts_end_in_words() -> None:
    """Whatever a text is, it is a plan or told what is wrong."""
    rng, instance = Random(7), llama()
    texts = ["Et*2|(t*2|)*4,t*2L", json.dumps(titan_parts()), "--pipeline-model-parallel-size 4 --num-layers 12"]
    plans = 0
    for _ in range(600):
        text = list(rng.choice(texts))
        for _ in range(rng.randint(1, 3)):
            place = rng.randrange(len(text))
            text[place : place + rng.randint(0, 2)] = rng.choice(["", "t", "|", "(", "*3", '"', "]", "9", "-", "é"])
        try:
            import_plan(instance, "".join(text), RunAs(data_parallel=1))
            plans += 1
        except PiperRayError:
            pass  # which has words; anything else fails the test
    assert 20 < plans < 580


def test_what_a_form_cannot_hold_is_refused_by_name() -> None:
    instance = llama()
    mixed = plan_of(instance, [7, 7], first_k=2)
    uneven = Plan((*plan_of(instance, [7, 7], first_k=3).stages[:1], *plan_of(instance, [7, 7]).stages[1:]), True)
    with pytest.raises(UsageError, match="stage 2 recomputes 0 of 6, another one 3"):
        export(uneven, Target.MEGATRON)
    with pytest.raises(UsageError, match="torchtitan has one activation-checkpoint setting"):
        export(mixed, Target.TORCHTITAN)
    with pytest.raises(UsageError, match="DeepSpeed recomputes all layers in full or none"):
        export(mixed, Target.DEEPSPEED)
    with pytest.raises(UnsupportedPlan, match="recomputation of mlp is not possible; layer 1 runs as 'selective-mlp'"):
        export(plan_of(instance, [7, 7], setting=PARTS), Target.FLAGSCALE)
    with pytest.raises(UsageError, match="Megatron has no schedule gpipe"):
        export(mixed, Target.MEGATRON, Schedule(ScheduleName.GPIPE))
    with pytest.raises(UsageError, match="DeepSpeed has no schedule interleaved"):
        export(mixed, Target.DEEPSPEED, Schedule(ScheduleName.INTERLEAVED, 2))
    with pytest.raises(InvalidPlan, match="tensor-parallel degree 2, not one of 1"):
        export(plan_of(instance, [7, 7], t=2), Target.TORCH)
    one, two = plan_of(instance, [7, 7]).stages
    with pytest.raises(InvalidPlan, match="stages differ in their degrees"):
        export(Plan((one, replace(two, data_parallel_degree=2))), Target.YAML)
    with pytest.raises(InvalidPlan, match="2 chunks on a single rank are no pipeline"):
        export(plan_of(instance, [7, 7]), Target.MEGATRON, Schedule(ScheduleName.INTERLEAVED, 2))
    few = llama(batch=2)
    with pytest.raises(InvalidPlan, match="2 microbatches a replica do not fill a pipeline of 4 ranks"):
        export(plan_of(few, [2, 2, 2, 2, 2, 2, 1, 1]), Target.MEGATRON, Schedule(ScheduleName.INTERLEAVED, 2), few)
    swapped = Plan((two, one))
    with pytest.raises(InvalidPlan, match="comes after layer 6"):
        export(swapped, Target.YAML)


def test_models_without_paths() -> None:
    instance = small_instance()
    plan = Plan(tuple(Stage((v,), 1, 1, {v: "vanilla"}) for v in range(6)))
    plan = Plan((replace(plan.stages[0], layers=(0, 1, 2, 3, 4, 5), tmpc_ids=dict.fromkeys(range(6), "vanilla")),))
    with pytest.raises(UsageError, match=r'layer 0 \("Embedding"\) has no path'):
        export(plan, Target.TORCH, instance=instance)
    notes = export(plan, Target.YAML, instance=instance)
    assert any("6 layers have no path" in note for note in notes)
    assert any("does not say how many samples" in note for note in notes)


def test_flagscale_and_yaml_say_the_plan(tmp_path: Path) -> None:
    instance = llama()
    plan = Plan(
        (*plan_of(instance, [6, 8], first_k=3, d=2, t=2).stages[:1], *plan_of(instance, [6, 8], d=2, t=2).stages[1:])
    )
    export_plan(instance, plan, ONE_F_ONE_B, Target.FLAGSCALE, 8).write(tmp_path)
    system = yaml.safe_load((tmp_path / "system.yaml").read_text())["system"]
    assert system["hetero"]["hetero_process_meshes"] == [2, 1, 1, 2, 2]
    assert system["hetero"]["hetero_pipeline_layer_split"] == [5, 7]
    recompute = system["recompute"]
    assert recompute["recompute_num_layers_per_stage_micro_batch"] == [[1, 16, 3], [1, 16, 0]]
    assert recompute["recompute_granularity_per_stage_micro_batch"] == [[1, 16, 1], [1, 16, 0]]
    found = yaml.safe_load(export_plan(instance, plan, ONE_F_ONE_B, Target.YAML, 8).files["plan.yaml"])
    assert [len(stage["modules"]) for stage in found["stages"]] == [6, 8]
    assert found["stages"][0]["modules"][1] == {
        "path": "model.layers.0", "configuration": "full", "recomputation": "full",
    }  # fmt: skip
    assert (found["data_parallel_degree"], found["microbatches_per_replica"]) == (2, 16)


def test_ranks_and_readme() -> None:
    instance = llama()
    plan = plan_of(instance, [5, 5, 4], d=2, t=2)
    found = export_plan(instance, plan, ONE_F_ONE_B, Target.MEGATRON, 8)
    rows = list(csv.DictReader(found.files["ranks.csv"].splitlines()))
    assert len(rows) == 12
    # Two stages of 4 devices share a node of 8, as the plan's borders count on: the first stage is alone.
    assert [row["node"] for row in rows] == ["0"] * 4 + ["1"] * 8
    assert [row["local_rank"] for row in rows[3:6]] == ["3", "0", "1"]
    told = "runs 2 pipeline ranks, the first group the first 1: list the nodes in this order"
    assert f"each group of 8 GPUs that share a fast link {told}" in found.notes
    readme = found.files["README.md"]
    assert found.command in readme
    assert all(f"- {note}" in readme for note in found.notes)
    assert "pipeline rank 2: stage 3; ranks 8-11 on node 1" in readme


def test_ranks_of_a_plan_with_chunks_fill_nodes_from_the_front() -> None:
    """12 ranks are not whole nodes of 8: they fill one, and the rest of them the other."""
    plan, schedule = plan_of(llama(), [3, 3, 2, 2, 2, 2], d=2, t=2), Schedule(ScheduleName.INTERLEAVED, 2)
    found = export_plan(llama(), plan, schedule, Target.MEGATRON, 8)
    rows = list(csv.DictReader(found.files["ranks.csv"].splitlines()))
    assert [row["node"] for row in rows] == ["0"] * 8 + ["1"] * 4
    assert "12 ranks are not whole nodes of 8 GPUs: the last of 2 nodes runs 4 ranks" in found.notes
    assert "--nproc-per-node $((${NODE_RANK:?} == 1 ? 4 : 8)) " in found.files["launch.sh"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_megatrons_script_starts_fewer_on_the_first_node(tmp_path: Path) -> None:
    """Run as on each of its nodes, with a torchrun that tells what it is given."""
    plan = plan_of(llama(), [5, 5, 4], d=2, t=2)
    export_plan(llama(), plan, ONE_F_ONE_B, Target.MEGATRON, 8).write(tmp_path)
    (tmp_path / "torchrun").write_text('#!/bin/sh\necho "$CUDA_DEVICE_MAX_CONNECTIONS"\nprintf "%s\\n" "$@"\n')
    (tmp_path / "torchrun").chmod(0o755)
    told = []
    for node in ("0", "1"):
        finished = subprocess.run(
            ["bash", str(tmp_path / "launch.sh"), "mock", "--train-iters", "7"],
            capture_output=True, text=True, check=True, cwd=tmp_path,
            env={
                "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "NODE_RANK": node, "MASTER_ADDR": "first",
                "MEGATRON": "/megatron",
            },
        )  # fmt: skip
        connections, *words = finished.stdout.splitlines()
        assert connections == "1"
        assert words[-3:] == ["--mock-data", "--train-iters", "7"]
        given = dict(pairwise(words))
        assert given["--pipeline-model-parallel-layout"] == "Et*4|t*5|t*3L"
        told.append([given[name] for name in ("--nnodes", "--nproc-per-node", "--node-rank", "--master-addr")])
    assert told == [["2", "4", "0", "first"], ["2", "8", "1", "first"]]


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_megatrons_script_ends_in_words_where_something_is_not_said(tmp_path: Path) -> None:
    """Of several nodes none takes itself for the first one."""
    export_plan(llama(), plan_of(llama(), [5, 5, 4], d=2, t=2), ONE_F_ONE_B, Target.MEGATRON, 8).write(tmp_path)
    (tmp_path / "torchrun").write_text("#!/bin/sh\necho started\n")
    (tmp_path / "torchrun").chmod(0o755)
    whole = {"NODE_RANK": "1", "MASTER_ADDR": "first", "MEGATRON": "/megatron"}
    for missing in (*whole, "data"):
        said = {name: value for name, value in whole.items() if name != missing}
        finished = subprocess.run(
            ["bash", str(tmp_path / "launch.sh"), *(["mock"] if missing != "data" else [])],
            capture_output=True, text=True, check=False, cwd=tmp_path,
            env={"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", **said},
        )  # fmt: skip
        assert finished.returncode != 0
        assert "started" not in finished.stdout
        assert ("give the prefix of a Megatron dataset" if missing == "data" else missing) in finished.stderr


def test_deepspeed_and_torch_are_told_of_a_first_node_with_fewer_ranks() -> None:
    plan = plan_of(llama(), [5, 5, 4], d=4)
    found = {target: export_plan(llama(), plan, ONE_F_ONE_B, target, 8) for target in (Target.DEEPSPEED, Target.TORCH)}
    told = "torchrun --nnodes 2 --nproc-per-node $((${NODE_RANK:?} >= 1 ? 8 : 4)) "
    assert told in found[Target.DEEPSPEED].files["launch.sh"]
    assert told in found[Target.TORCH].command
    whole = export_plan(llama(), plan_of(llama(), [7, 7], d=8), ONE_F_ONE_B, Target.DEEPSPEED, 8)
    assert "torchrun --nnodes 2 --nproc-per-node 8 " in whole.files["launch.sh"]


@pytest.mark.parametrize(("t", "asked"), [(1, False), (2, True)])
def test_what_megatron_asks_of_the_environment_is_set(t: int, asked: bool) -> None:
    """validate_args of Megatron-LM refuses t > 1 without, up to Hopper."""
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    plan = plan_of(llama(), [7, 7], t=t)
    found = {
        target: export_plan(llama(), plan, ONE_F_ONE_B, target, 8)
        for target in (Target.MEGATRON, Target.MEGATRON_BRIDGE, Target.FLAGSCALE)
    }
    assert (f'export {name}="${{{name}:-1}}"\n' in found[Target.MEGATRON].files["launch.sh"]) == asked
    assert found[Target.MEGATRON_BRIDGE].command.startswith(f"{name}=1 torchrun") == asked
    experiment = yaml.safe_load(found[Target.FLAGSCALE].files["experiment.yaml"])["experiment"]
    assert experiment.get("envs") == ({name: 1} if asked else None)
    model = llama().model
    assert model is not None
    blackwell = replace(llama(), model=replace(model, gpu="B200"))
    assert name not in export_plan(blackwell, plan, ONE_F_ONE_B, Target.MEGATRON, 8).files["launch.sh"]


def test_folders_that_cannot_be(tmp_path: Path) -> None:
    found = export_plan(llama(), plan_of(llama(), [14]), ONE_F_ONE_B, Target.YAML, 8)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be made a folder"):
        found.write(tmp_path / "file")


@pytest.mark.parametrize(
    ("target", "told"),
    [
        (Target.MEGATRON, "Megatron sums their gradients"),
        (Target.MEGATRON_BRIDGE, "Megatron sums their gradients"),
        (Target.FLAGSCALE, "FlagScale sums their gradients"),
        (Target.DEEPSPEED, "give numbers 0 and 13 of layers as deepspeed.pipe.TiedLayerSpec"),
        (Target.YAML, "whoever runs the plan keeps them alike"),
    ],
)
def test_weights_in_common_are_told_where_they_are_on_several_ranks(target: Target, told: str) -> None:
    tied = llama(tied=True)
    (note,) = [text for text in export(plan_of(tied, [7, 7]), target, instance=tied) if "in common" in text]
    assert note.startswith("model.embed_tokens and lm_head have weights in common, on different pipeline ranks")
    assert told in note
    assert not any("in common" in text for text in export(plan_of(tied, [14]), target, instance=tied))
    assert not any("in common" in text for text in export(plan_of(llama(), [7, 7]), target))


def test_more_memory_than_there_is_is_told_by_rank() -> None:
    plan = plan_of(llama(), [10, 4])
    first, second = (rank.peak_memory_bytes for rank in piper_ray.simulate(llama(), plan, ONE_F_ONE_B).ranks)
    assert first > second
    small = llama().replace(memory_bytes=(first + second) / 2)
    found = export_plan(small, plan, ONE_F_ONE_B, Target.MEGATRON, 8)
    (told,) = found.excess
    assert told.startswith("stage 1 needs ")
    assert found.notes[0] == f"more memory is needed than there is: {told}"
    assert f"- {found.notes[0]}" in found.files["README.md"]
    assert export_plan(llama(), plan_of(llama(), [10, 4]), ONE_F_ONE_B, Target.MEGATRON, 8).excess == ()


def test_experts_are_in_every_form() -> None:
    """Over the t = 4 devices, as the workload's TMPCs have them where nothing is said."""
    instance = mixture()
    plan = plan_in(instance, Mode(sequence_parallel=True), t=4, d=4)
    found = {target: export_plan(instance, plan, ONE_F_ONE_B, target, 8) for target in (
        Target.MEGATRON, Target.MEGATRON_BRIDGE, Target.TORCHTITAN, Target.FLAGSCALE, Target.YAML,
    )}  # fmt: skip
    lines = found[Target.MEGATRON].files["megatron.args"].splitlines()
    assert {"--expert-model-parallel-size 4", "--expert-tensor-parallel-size 1"} <= set(lines)
    assert "cfg.model.expert_model_parallel_size = 4" in found[Target.MEGATRON_BRIDGE].files["piper_plan.py"]
    titan = json.loads(found[Target.TORCHTITAN].files["torchtitan.json"])["parallelism"]
    assert titan["expert_parallel_degree"] == 4
    system = yaml.safe_load(found[Target.FLAGSCALE].files["system.yaml"])["system"]
    assert (system["expert_model_parallel_size"], system["expert_tensor_parallel_size"]) == (4, 1)
    assert system["hetero"]["hetero_process_meshes"] == [4, 1, 4, 4, 2]
    assert yaml.safe_load(found[Target.YAML].files["plan.yaml"])["expert_parallel_degree"] == 4
    with pytest.raises(UnsupportedPlan, match="no sequence parallelism is not possible"):
        export_plan(instance, plan_in(instance, Mode(), t=4, d=4), ONE_F_ONE_B, Target.MEGATRON, 8)
    assert (
        "--expert"
        not in export_plan(llama(), plan_of(llama(), [7, 7]), ONE_F_ONE_B, Target.MEGATRON, 8).files["megatron.args"]
    )


def test_figures_that_a_config_does_not_say_are_told() -> None:
    """A launch with another base of its rotary positions trains another model."""
    instance = piper_ray.estimate("llama3-8b", "H100-SXM", nodes=1, global_batch=16)
    assert instance.model is not None
    plan = piper_ray.solve(
        instance,
        schedule="1f1b",
        restrictions=RUNTIMES[RuntimeName.MEGATRON].restricted(Restrictions(), instance, ScheduleName.ONE_F_ONE_B, 8),
    ).plan
    assert plan is not None
    unsaid = {key: value for key, value in instance.model.config.items() if key not in ("rope_theta", "rms_norm_eps")}
    without = replace(instance, model=replace(instance.model, config=unsaid))
    for given, told in ((instance, False), (without, True)):
        notes = export_plan(given, plan, Schedule(ScheduleName.ONE_F_ONE_B), Target.MEGATRON, 8).notes
        assert any("does not say rope_theta, rms_norm_eps: usual" in note for note in notes) is told
