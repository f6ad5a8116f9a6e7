"""Layouts that people run, read as plans: what is chosen of the workload's TMPCs, what is noted, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
import yaml

from piper_ray.export.files import Target
from piper_ray.export.import_plan import Imported, import_plan
from piper_ray.export.launched import import_launched
from piper_ray.export.megatron_layout import plan_layout
from piper_ray.export.run_as import RunAs
from piper_ray.export.targets import export_plan
from piper_ray.model.errors import PiperRayError, UsageError
from piper_ray.model.instance import Instance
from piper_ray.model.mode import ALL_REPLICAS, Mode, Recomputation
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.runtimes.runtime import RUNTIMES, RuntimeName
from piper_ray.simulate.run import Transfers
from piper_ray.workloads.estimate.modes import Offer
from tests.estimate_support import estimated, model_of
from tests.export_support import llama, mixture, plan_in, plan_of, random_case, random_counts
from tests.lengths import long_after

ONE = Schedule(ScheduleName.ONE_F_ONE_B)
TWO = "--pipeline-model-parallel-size 2"


def read(text: str, **given: object) -> Imported:
    return import_plan(llama(), text, RunAs(**{"data_parallel": 4, **given}))  # type: ignore[arg-type]


def ids(found: Imported) -> set[str]:
    return {tmpc_id for stage in found.plan.stages for tmpc_id in stage.tmpc_ids.values()}


def sharing(zero: int, fsdp: int = 1) -> Instance:
    model = model_of(
        "llama", tokens=1024, hidden_size=1024, num_hidden_layers=4, num_attention_heads=16,
        num_key_value_heads=8, intermediate_size=2816, vocab_size=32000,
    )  # fmt: skip
    offer = Offer(zero=zero, fsdp=fsdp)
    return estimated(model, "H100-SXM", nodes=2, samples=1, batch=32, offer=offer).instance


@pytest.mark.parametrize(
    ("text", "given", "told"),
    [
        (f"{TWO} --use-distributed-optimizer", {}, "the optimizer's state in 4 shards: the workload has no such TMPCs"),
        ("Et*6|t*6L", {"optimizer_shards": 2}, "the optimizer's state in 2 shards: the workload has no such TMPCs"),
        (f"{TWO} --sequence-parallel", {}, "sequence parallelism has no effect at tensor-parallel degree 1"),
        (f"{TWO} --recompute-num-layers 3", {}, "--recompute-num-layers 3 does nothing in Megatron without"),
        (f"{TWO} --recompute-method block", {}, "--recompute-method block does nothing in Megatron without"),
        (
            f"{TWO} --recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
            {},
            "uniform over groups of 2 layers keeps the input of each group",
        ),
        (
            f"{TWO} --use-torch-fsdp2",
            {},
            "optimizer state in 4 shards: the workload has no such",
        ),
        (f"{TWO} --optimizer-cpu-offload", {}, "the optimizer's state is in host memory: the workload has it on GPUs"),
        (f"{TWO} --shiny-new-thing 3", {}, "unknown, and ignored: --shiny-new-thing"),
        ("Et*6|t*6L", {"data_parallel": 2}, "it leaves 12 of the 16 devices idle"),
    ],
)
def test_what_a_plan_does_not_hold_is_noted(text: str, given: dict[str, object], told: str) -> None:
    found = read(text, **given)
    assert sum(told in note for note in found.notes) == 1, found.notes
    assert ids(found) <= {"plain", "full"}


@pytest.mark.parametrize(
    ("text", "given", "told"),
    [
        (
            f"{TWO} --recompute-granularity full --recompute-method block --recompute-num-layers 99",
            {},
            "99 layers of a stage are recomputed; no stage has more than 6 layers",
        ),
        (f"{TWO} --recompute-granularity full --recompute-num-layers 1", {}, "full without --recompute-method"),
        (f"{TWO} --recompute-granularity full --recompute-method block", {}, "full without --recompute-num-layers"),
        (f"{TWO} --recompute-activations --recompute-num-layers 1", {}, "with selective recomputation"),
        (f"{TWO} --recompute-granularity full --recompute-method rows", {}, "expected uniform or block"),
        ("Et*6|t*6L", {"recomputed_layers": 2}, "are for full recomputation alone"),
        ("Et*6|t*6L", {"optimizer_shards": 8}, "8 shards of the optimizer's state, but 4 replicas"),
        ("Et*6|t*6L", {"tensor_parallel": 3, "data_parallel": None}, "no configuration at tensor-parallel degree 3; "),
        (
            "Et*4|t*4|t*4L",
            {"data_parallel": None},
            "5 replicas do not divide the 32 microbatches of a batch (of 16 devices, 3 in each)",
        ),
        (f"{TWO} --seq-length 4096", {}, "samples of 4096 tokens, but the workload's have 1024"),
        ("--pipeline-model-parallel-size 99999999999", {}, "99999999999 pipeline ranks, but the workload has 16"),
    ],
)
def test_what_cannot_be_is_refused(text: str, given: dict[str, object], told: str) -> None:
    with pytest.raises(UsageError) as error:
        read(text, **given)
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("zero", "fsdp", "text", "expected", "noted"),
    [
        (ALL_REPLICAS, 1, f"{TWO} --use-distributed-optimizer", "plain+zero", False),
        (4, 1, f"{TWO} --use-distributed-optimizer", "plain+zero4", False),
        (2, 1, f"{TWO} --use-distributed-optimizer", "plain+zero2", True),
        (2, 1, TWO, "plain", False),
        (ALL_REPLICAS, 4, '{"parallelism": {"data_parallel_shard_degree": 4}}', "plain+fsdp4", False),
        (ALL_REPLICAS, 1, '{"parallelism": {"data_parallel_shard_degree": 4}}', "plain+zero", True),
    ],
)
def test_the_sharding_that_a_run_has_is_chosen(zero: int, fsdp: int, text: str, expected: str, noted: bool) -> None:
    found = import_plan(sharing(zero, fsdp), text, RunAs(data_parallel=4))
    assert expected in ids(found)
    assert any("shards" in note for note in found.notes) == noted, found.notes


def test_experts_lie_as_megatron_lays_them_by_default() -> None:
    megatron = f"{TWO} --tensor-model-parallel-size 4 --sequence-parallel --moe-token-dispatcher-type alltoall"
    over_t = import_plan(
        mixture(), f"{megatron} --expert-model-parallel-size 4 --expert-tensor-parallel-size 1", RunAs()
    )
    assert not any("ep" in tmpc_id for tmpc_id in ids(over_t))
    assert not any("expert" in note for note in over_t.notes)
    divided = import_plan(mixture(), megatron, RunAs())
    assert divided.plan == over_t.plan
    assert any("expert parallelism 1, each expert on 4 devices" in note for note in divided.notes)
    over_8 = f"{megatron} --expert-model-parallel-size 8 --expert-tensor-parallel-size 1"
    assert any("ep8" in tmpc_id for tmpc_id in ids(import_plan(mixture(), over_8, RunAs())))
    with pytest.raises(UsageError, match="needs 8 devices of a stage, or a multiple of that; each stage has 4"):
        import_plan(mixture(), over_8, RunAs(data_parallel=1))


def test_torchtitan_keeps_what_sequence_parallelism_gathers() -> None:
    """Where nothing is recomputed; a workload without TMPCs that keep it is noted to have none, in both directions."""
    model = model_of(
        "llama", tokens=1024, hidden_size=1024, num_hidden_layers=4, num_attention_heads=16,
        num_key_value_heads=8, intermediate_size=2816, vocab_size=32000,
    )  # fmt: skip
    both = estimated(model, "H100-SXM", nodes=2, samples=1, batch=32, offer=Offer(gathered=True)).instance
    for recomputation, expected in ((Recomputation.NONE, "sp+gathered"), (Recomputation.FULL, "sp+full")):
        known = RUNTIMES[RuntimeName.TORCHTITAN].setting.modes(both)
        kept = [x for x in known if x.sequence_parallel and x.recomputation == recomputation]
        assert {x.gathered for x in kept if recomputation == Recomputation.NONE} <= {True}
        plan = plan_in(both, kept[0], t=2, d=1)
        assert plan.stages[0].tmpc_ids[1] == expected
        exported = export_plan(both, plan, ONE, Target.TORCHTITAN, 8)
        assert not any("gathers" in note for note in exported.notes)
        found = import_plan(both, exported.files["torchtitan.json"], RunAs())
        assert (found.plan, found.notes) == (plan, ("it leaves 12 of the 16 devices idle",))
    again = plan_of(llama(), [7, 7], t=2, setting=Mode(sequence_parallel=True))
    exported = export_plan(llama(), again, ONE, Target.TORCHTITAN, 8)
    assert any("torchtitan keeps what sequence parallelism gathers" in note for note in exported.notes)
    found = import_plan(llama(), exported.files["torchtitan.json"], RunAs())
    assert found.plan == again
    assert "read without gathered tensors kept: layers have no such configuration at these degrees" in found.notes


def test_the_group_of_an_interleaved_schedule_comes_back_from_torchtitan() -> None:
    schedule = Schedule(ScheduleName.INTERLEAVED, 2, 8)
    plan = plan_of(llama(), [4, 3, 3, 4], d=2)
    exported = export_plan(llama(), plan, schedule, Target.TORCHTITAN, 8).files["torchtitan.json"]
    assert import_plan(llama(), exported, RunAs()).schedule == schedule
    with pytest.raises(UsageError, match="group: 0 is no positive number"):
        import_plan(llama(), exported.replace('"group": 8', '"group": 0'), RunAs())


@pytest.mark.parametrize(
    "target", long_after(1, [Target.MEGATRON, Target.MEGATRON_BRIDGE, Target.TORCHTITAN, Target.YAML])
)
def test_what_is_exported_is_read_back(target: Target) -> None:
    names = {
        Target.MEGATRON: "megatron.args",
        Target.MEGATRON_BRIDGE: "piper_plan.py",
        Target.TORCHTITAN: "torchtitan.json",
        Target.YAML: "plan.yaml",
    }
    rng, read_back = Random(3), 0
    for _ in range(20):
        instance, plan, schedule = random_case(rng)
        try:
            exported = export_plan(instance, plan, schedule, target, 8)
        except PiperRayError:
            continue
        d = plan.stages[0].data_parallel_degree
        known = RunAs() if target in (Target.YAML, Target.TORCHTITAN) else RunAs(data_parallel=d)
        found = import_plan(instance, exported.files[names[target]], known)
        if target is not Target.TORCHTITAN:  # which shards weights where the plan shards state
            assert found.plan == plan
            assert found.schedule == schedule
        assert [stage.layers for stage in found.plan.stages] == [stage.layers for stage in plan.stages]
        read_back += 1
    assert read_back > 5


def test_a_launch_script_of_ours_is_read_back(tmp_path: Path) -> None:
    instance = llama()
    plan = plan_of(instance, [7, 7], d=2, t=2, first_k=2)
    for name, text in export_plan(instance, plan, ONE, Target.MEGATRON, 8).files.items():
        (tmp_path / name).write_text(text)
    found = import_launched(instance, str(tmp_path / "launch.sh"))
    assert (found.plan, found.schedule) == (plan, ONE)


def test_flagscale_and_torch_are_read_back() -> None:
    instance = llama()
    plan = plan_of(instance, [7, 7], d=2, t=2, first_k=2)
    system = export_plan(instance, plan, ONE, Target.FLAGSCALE, 8).files["system.yaml"]
    assert import_plan(instance, system, RunAs()).plan == plan
    alone = plan_of(instance, [14], d=2, t=2)
    system = export_plan(instance, alone, ONE, Target.FLAGSCALE, 8).files["system.yaml"]
    assert import_plan(instance, system, RunAs()).plan == alone
    spread = plan_in(mixture(), Mode(sequence_parallel=True, experts=8), t=4, d=4)
    system = export_plan(mixture(), spread, ONE, Target.FLAGSCALE, 8).files["system.yaml"]
    assert yaml.safe_load(system)["system"]["hetero"]["hetero_process_meshes"] == [4, 1, 8, 4, 2]
    read_back = import_plan(mixture(), system, RunAs())
    assert (read_back.plan, read_back.notes) == (spread, ())
    full = plan_of(instance, [7, 7], d=2, setting=Mode(Recomputation.FULL))
    stages = export_plan(instance, full, ONE, Target.TORCH, 8).files["stages.json"]
    assert import_plan(instance, stages, RunAs()).plan == full


@pytest.mark.parametrize("target", long_after(2, [Target.DEEPSPEED, Target.TORCH]))
@pytest.mark.parametrize(("zero", "fsdp", "shards"), [(1, 1, 1), (2, 1, 2), (ALL_REPLICAS, 2, ALL_REPLICAS)])
def test_deepspeed_and_torch_are_read_back_with_what_replicas_share(
    target: Target, zero: int, fsdp: int, shards: int
) -> None:
    rng, instance = Random(8), sharing(zero, fsdp)
    for _ in range(8):
        setting = Mode(rng.choice([Recomputation.NONE, Recomputation.FULL]), optimizer_shards=shards)
        t = 1 if target is Target.TORCH else rng.choice([1, 2])
        plan = plan_of(
            instance, random_counts(rng, len(instance.layers), rng.choice([1, 2, 4])), d=2, t=t, setting=setting
        )
        text = export_plan(instance, plan, ONE, target, 8).files["stages.json"]
        found = import_plan(instance, text, RunAs(world=16))
        assert (found.plan, found.schedule) == (plan, ONE)


def test_a_launch_script_and_a_config_of_megatron_bridge() -> None:
    expected = read("Et*6|t*6L").plan
    script = (
        "#!/bin/bash\nTP=1\ntorchrun pretrain_gpt.py \\\n  --tensor-model-parallel-size 1 \\\n  " + TWO + "  # ok\n"
    )
    assert read(script).plan == expected
    layout = [["embedding", *["decoder"] * 6], [*["decoder"] * 6, "loss"]]
    model = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 2}
    config = yaml.safe_dump({"model": {**model, "pipeline_model_parallel_layout": layout}, "train": {}})
    assert read(config).plan == expected
    with pytest.raises(UsageError, match=r"pipeline_model_parallel_layout\[0\]: 'head'; expected one of embedding"):
        read(yaml.safe_dump({"model": {**model, "pipeline_model_parallel_layout": ["head"]}}))
    with pytest.raises(UsageError, match=r"pipeline-model-parallel-size: ranks\(\) is not known here"):
        read("def apply(cfg):\n    cfg.model.pipeline_model_parallel_size = ranks()\n")


def test_a_toml_of_torchtitan_and_shards_that_are_left() -> None:
    text = (
        "[parallelism]\ntensor_parallel_degree = 2\ndata_parallel_shard_degree = -1\n"
        '[activation_checkpoint]\nmode = "full"\n'
    )
    found = import_plan(sharing(ALL_REPLICAS, 8), text, RunAs())
    assert found.plan.stages[0].data_parallel_degree == 8
    assert any(tmpc_id.endswith("full+fsdp8") for tmpc_id in ids(found))
    with pytest.raises(UsageError, match="with 2 replicas; expected the number"):
        read('{"parallelism": {"data_parallel_shard_degree": -1, "data_parallel_replicate_degree": 2}}')


@pytest.mark.parametrize(
    ("said", "layout", "schedule"),
    [
        ({"pipeline_parallel_degree": 2}, "Et*6|t*6L", "1f1b"),
        ({"pipeline_parallel_degree": 4}, "Et*3|t*4|t*3|t*2L", "1f1b"),
        ({"pipeline_parallel_degree": 4, "pipeline_parallel_layers_per_stage": 4}, "Et*3|t*4|t*3|t*2L", "1f1b"),
        (
            {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "Interleaved1F1B"},
            "Et*3|t*4|t*3|t*2L",
            "interleaved",
        ),
        (
            {
                "pipeline_parallel_degree": 2,
                "pipeline_parallel_first_stage_less_layers": 0,
                "pipeline_parallel_last_stage_less_layers": 3,
            },
            "Et*8|t*4L",
            "1f1b",
        ),
    ],
)
def test_torchtitan_may_divide_the_model_itself(said: dict[str, object], layout: str, schedule: str) -> None:
    found = import_plan(llama(), json.dumps({"parallelism": said}), RunAs(data_parallel=4))
    assert plan_layout(llama(), found.plan) == layout
    assert found.schedule.name.value == schedule


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: &a {x: 1}\nb: {p: *a, q: *a}\n", "parallelism is missing"),
        ("a: [1,\nb: 2", "line 2: not YAML"),
        ('# a workload\n[cluster]\ndevices = 8\n[layers]\nfirst = { type = "in" }', "not a layout but a workload"),
        ("E: 2001-99-99\nb: 1", "not YAML"),
        ("Et:tL", "character 3 is ':'"),
        ("[" * 100_000, "not JSON"),
        ("a:\n" + "".join(" " * depth + "a:\n" for depth in range(1, 1500)), "layout: "),
        ("- a\n- b: 1\n", "no list of lists of module names"),
        ("stages: 3\ndata_parallel_degree: x\n", "stages: not a list (3)"),
        ("stages: [{modules: [foo, {path: 3}]}]\ndata_parallel_degree: 1\n", "'foo' is no layer here"),
        ("model_type: llama\nhidden_size: 4096\n", "not a layout but a Hugging Face config"),
        ("system: {tensor_model_parallel_size: x}\n", "invalid int value: 'x'"),
        (
            "system: {tensor_model_parallel_size: 1, hetero_process_meshes: [1, 1, 1, 1]}\n",
            "hetero_process_meshes: [1, 1, 1, 1]; expected [t, cp, ep, dp, pp] of each mesh",
        ),
        (
            "system: {tensor_model_parallel_size: 1, hetero_process_meshes: [1, 1, 1, 1, 2]}\n",
            "hetero_pipeline_layer_split: None; expected 2 numbers, 12 together",
        ),
        ("name = 1\n# several lines\n", "several lines that are no layout"),
        ("1: 2", "parallelism is missing"),
    ],
)
def test_documents_of_other_kinds_are_told(text: str, told: str) -> None:
    with pytest.raises(PiperRayError) as error:
        import_plan(llama(), text, RunAs())
    assert told in str(error.value)


SCRIPT = (
    "#!/bin/bash\nset -e\n{}\ntorchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 2 ${{ARGS[@]}}\n"
)
ONE_MESH = "hetero_process_meshes: [1, 1, 1, 1, 1], hetero_pipeline_layer_split: [12]"
TITAN = '{{"parallelism": {{"pipeline_parallel_degree": 2, {}}}}}'


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("--tensor-model-parallel-siz 8", "--tensor-model-parallel-siz is not understood; did you mean --"),
        ("--tensor-model-paralel-size 8", "did you mean --tensor-model-parallel-size?"),
        ("--sequence-paralel", "did you mean --sequence-parallel?"),
        ("--recompute-granularty full", "did you mean --recompute-granularity?"),
        (f"{TWO} --tp 8", "--tp 8 is not understood"),
        (f"{TWO} -tp 8", "--tp 8 is not understood"),
        (f"{TWO} \N{EN DASH}\N{EN DASH}tensor-model-parallel-size 8", "invalid int value: ['2', "),
        (f"{TWO} --tp-size=8", "--tp-size 8 is not understood"),
        (f"{TWO} --num-stages 4", "--num-stages 4 is not understood"),
        (f"{TWO} --model-parallel-size 8", "--model-parallel-size 8 is not understood"),
        (f"{TWO} --$KIND", "the value of --$KIND is not known here"),
        (SCRIPT.format("ARGS='--recompute-granularity full'"), "full without --recompute-method"),
        (SCRIPT.format("ARGS=(--tensor-model-parallel-size $T)"), "--tensor-model-parallel-size: $T is not known here"),
        (SCRIPT.format(""), "the value of $ARGS[@] is not known here"),
        (SCRIPT.format("ARGS=(--lr 1e-4 $MORE)"), "$MORE is not known here; say it with --set MORE=VALUE"),
        (SCRIPT.format("ARGS=(--lr 1e-4 $MORE"), "line 4 is not understood as bash"),
        (f"torchrun pretrain_gpt.py $(cat plan.args) {TWO}", "the value of $(cat plan.args) is not known here"),
        (f"torchrun pretrain_gpt.py {TWO} --yaml-cfg run.yaml", "the value of --yaml-cfg is not known here"),
        (
            "model: {tensor_model_parallel_size: 1, activations_checkpoint_granularity: full}",
            "activations-checkpoint-granularity full is not understood",
        ),
        (
            f"torchrun --nproc-per-node 3 --nnodes 1 pretrain_gpt.py {TWO}",
            "the launch starts 3 ranks, no multiple of the 2 of a replica",
        ),
        ("model: {tensor_model_parallel_size: 1, pipeline_model_parallel_siz: 2}", "did you mean --pipeline-model"),
        ("model: {tensor_model_parallel_size: 1, pp: 2}", "pp 2 is not understood"),
        ("a: {tensor_model_parallel_size: 1}\nb: {tensor_model_parallel_size: 2}", "is said as 1 and as 2"),
        ("system: {tensor_model_parallel_size: 1, sequence_parallel: 'on'}", "sequence_parallel: 'on'; expected true"),
        (
            "cfg.model.tensor_model_parallel_size = 1\ncfg.model.pipeline_model_parallel_size *= ranks()\n",
            "is not known here",
        ),
        ("import os\ncfg.model.tensor_model_parallel_size = int(os.environ['T'])\n", "os.environ['T'] is not known"),
        (TITAN.format('"tensor_parallel_degre": 2'), "did you mean tensor_parallel_degree?"),
        (
            TITAN.format('"pipeline_parallel_split_points": ["layers.4"]'),
            "pipeline_parallel_split_points is not underst",
        ),
        (
            "system: {tensor_model_parallel_size: 2, hetero_process_meshes: [1, 1, 1, 1, 1]}",
            "tensor_model_parallel_size: 2, but hetero_process_meshes has 1",
        ),
        (
            f"system: {{tensor_model_parallel_size: 1, {ONE_MESH}, expert_tensor_parallel_size_per_process_mesh: 2}}",
            "expert_tensor_parallel_size_per_process_mesh: 2; expected [1]",
        ),
        (f"{TWO} --hidden-size 4096", "--hidden-size 4096, but the workload's model has 1024"),
        (
            f"{TWO} --hidden-size 1024 --num-attention-heads 16 --num-experts 8",
            "the launch's model has --num-experts 8",
        ),
        (
            "model: {tensor_model_parallel_size: 1, num_query_groups: 2}",
            "--num-query-groups 2, but the workload's model",
        ),
    ],
)
def test_what_was_not_understood_is_refused(text: str, told: str) -> None:
    """Else it would be read as 1, or as not there."""
    with pytest.raises(UsageError) as error:
        read(text)
    assert told in str(error.value)


HARMLESS = (
    "--tp-comm-overlap --tp-comm-overlap-cfg tp.yaml --no-async-tensor-model-parallel-allreduce --hidden-size 1024 "
    "--pipeline-model-parallel-comm-backend nccl --eval-micro-batch-size 2 --data-parallel-random-init "
    "--overlap-grad-reduce --cp-comm-type p2p --use-tp-pp-dp-mapping --delta-offload-bytes-across-pp-ranks 8 "
    "--rl-inference-tensor-model-parallel-size 8 --fp16-lm-cross-entropy --log-interval 1 --lr 1e-4 --nnodes 2"
)


@pytest.mark.parametrize(
    "text",
    [
        f"{TWO} {HARMLESS}",
        f"# --tensor-model-parallel-size 8 was slower\n  {TWO} \\\n  {HARMLESS}  # --tp 8",
        f"torchrun $DISTRIBUTED x.py {TWO} --overlap-grad-reduce --data-path $DATA --save ${{CHECK}} 2>&1 | tee $LOG",
        f"TP=1\nPP_SIZE=2\nPATH=/data/tp=8/pp8 torchrun --nproc-per-node 8 pretrain_gpt.py --overlap-grad-reduce {TWO}",
        "a:\n  tensor_model_parallel_size: 1\n  pipeline_model_parallel_size: 2\n  exp_name: llama-tp-8\nx: {}",
    ],
)
def test_what_decides_nothing_of_a_plan_is_left_aside(text: str) -> None:
    found = read(text)
    expected = read("Et*6|t*6L")
    assert (found.plan, found.notes) == (expected.plan, expected.notes)


def test_what_times_count_as_hidden_and_a_launch_does_not_hide_is_said() -> None:
    told = "{} is not set, but the workload's times count {} as overlapped: this launch may take longer"
    launch = "--tensor-model-parallel-size 2 --sequence-parallel"
    assert [told.format(name, what) in read(f"torchrun x.py {launch} {flags}").notes
            for name, what in (("--overlap-grad-reduce", "sums of gradients"),
                               ("--tp-comm-overlap", "tensor-parallel exchanges"))
            for flags in ("", name)] == [True, False, True, False]  # fmt: skip


@pytest.mark.parametrize(
    "said",
    [
        "--num-experts 1",  # Megatron-DeepSpeed
        "--recompute-granularity full --recompute-method block --recompute-num-layers 0",  # Primus
    ],
)
def test_what_says_that_there_is_nothing_is_not_refused(said: str) -> None:
    shape = "--hidden-size 1024 --num-attention-heads 16"
    assert read(f"{TWO} {shape} {said}").plan == read(f"{TWO} {shape}").plan


def test_ranks_of_latent_attention_count_where_a_model_has_it() -> None:
    """Primus says them for all models."""
    shape = "pipeline_model_parallel_size: 2\nhidden_size: 1024\nnum_attention_heads: 16\nkv_lora_rank: 32\n"
    assert read(f"{shape}multi_latent_attention: false").plan == read(TWO).plan
    with pytest.raises(UsageError, match="the launch's model has --kv-lora-rank 32, the workload's none"):
        read(shape)


def test_beside_a_decoders_tokens_the_others_are_an_images() -> None:
    told = "samples of 3200 tokens, but the workload's have"
    with pytest.raises(UsageError, match=told):
        read(f"{TWO} --seq-length 261 --decoder-seq-length 3200")


def test_megatrons_transfers_are_those_of_its_schedule() -> None:
    """Interleaved overlaps them, in warm-up and flush by a flag alone, which Megatron refuses elsewhere."""
    flag, chunks = "--overlap-p2p-communication-warmup-flush", "--num-virtual-stages-per-pipeline-rank 3"
    assert read(TWO).transfers is Transfers.IN_PASSES
    assert read(f"{TWO} {chunks}").transfers is Transfers.OVERLAPPED_STEADY
    assert read(f"{TWO} {chunks} --no-overlap-p2p-communication").transfers is Transfers.IN_PASSES
    found = read(f"{TWO} {chunks} {flag}")
    assert found.transfers is Transfers.OVERLAPPED
    assert not [note for note in found.notes if "p2p" in note]
    for said in ("", f"{chunks} --no-overlap-p2p-communication"):
        with pytest.raises(UsageError, match=r"warmup-flush .* which Megatron refuses"):
            read(f"{TWO} {said} {flag}")


def test_ranks_that_torchrun_starts_are_the_replicas() -> None:
    """Whatever the workload's cluster has."""
    found = read(f"torchrun --nproc_per_node=4 --nnodes 2 pretrain_gpt.py {TWO}")
    assert found.plan.devices == 8
    assert "it leaves 8 of the 16 devices idle" in found.notes


def test_modules_without_a_granularity_are_noted() -> None:
    told = "--recompute-modules mlp does nothing in Megatron without --recompute-granularity: nothing is recomputed"
    assert told in read(f"{TWO} --recompute-modules mlp").notes


@pytest.mark.parametrize(
    "text",
    [
        f"A=(--recompute-granularity full --recompute-method block {TWO} --recompute-num-layers 2)\nrun x.py ${{A[@]}}",
        f"A=({TWO} --recompute-method block --recompute-num-layers 2\n--recompute-granularity full)\nx.py ${{A[@]}}",
        f"run x.py {TWO} --recompute-granularity full --recompute-method block --recompute-num-layers 2; echo done 5",
        f"run x.py {TWO} --recompute-granularity full --recompute-method block --recompute-num-layers 2 | tee $LOG",
    ],
)
def test_what_ends_a_list_or_a_command_is_no_part_of_an_option(text: str) -> None:
    plain = read(f"{TWO} --recompute-granularity full --recompute-method block --recompute-num-layers 2")
    assert read(text).plan == plain.plan
    switch = text.replace("--recompute-num-layers 2", "--recompute-num-layers 2 --use-distributed-optimizer")
    assert read(switch).plan == read(switch.replace(")", " )").replace(";", " ;")).plan


def test_other_precision_and_schedules_of_ones_own_are_noted() -> None:
    told = "the launch trains in fp8, and times and memory are for bf16; --precision fp8 is for that"
    assert told in read(f"{TWO} --fp8-format hybrid").notes
    assert told.replace("fp8", "fp16") in read(f"{TWO} --fp16").notes
    bridge = (
        "cfg.model.tensor_model_parallel_size = 1\ncfg.model.pipeline_model_parallel_size = 2\ncfg.mixed_precision = "
    )
    assert any(told in note for note in read(f"{bridge}'bf16_with_fp8_mixed'\n").notes)
    assert not any("mixed" in note or told in note for note in read(f"{bridge}'bf16_mixed'\n").notes)
    text = TITAN.format('"data_parallel_shard_degree": 1, "pipeline_parallel_schedule_csv": "mine.csv"')
    own = read(f'{text[:-1]}, "loss": {{"made_by": "ChunkedLossWrapper.Config"}}}}')
    assert sum("pipeline_parallel_schedule_csv is ignored" in note for note in own.notes) == 1
    assert sum("loss in chunks of a sequence" in note for note in own.notes) == 1


def test_launches_of_torchtitan_receive_in_torchs_own_order() -> None:
    text = TITAN.format('"data_parallel_shard_degree": 1, "pipeline_parallel_schedule": "Interleaved1F1B"')
    found = read(text)
    assert found.transfers is Transfers.ONE_STREAM
    assert any("torch posts receives early" in note for note in found.notes)
    assert read(TWO).transfers is Transfers.IN_PASSES


def test_local_batches_of_torchtitan_run_its_pipelines_empty_several_times() -> None:
    text = TITAN.format('"data_parallel_shard_degree": 4')
    whole = llama().microbatches // 4
    for local in (whole // 4, whole):
        found = read(text.rstrip().removesuffix("}") + f', "training": {{"local_batch_size": {local}}}}}')
        assert found.flushes == whole // local
        assert any("gradients of 4 local batches are summed" in note for note in found.notes) == (local < whole)


def test_torchtitan_shards_over_all_ranks_where_it_is_not_told_otherwise() -> None:
    with pytest.raises(UsageError, match="-1 with 2 replicas; expected the number"):
        read('{"parallelism": {"data_parallel_replicate_degree": 2}}')
    found = import_plan(sharing(ALL_REPLICAS, 8), '{"parallelism": {"tensor_parallel_degree": 2}}', RunAs())
    assert ids(found) <= {"plain+fsdp8", "sp+gathered+fsdp8", "sp+fsdp8"}, ids(found)
