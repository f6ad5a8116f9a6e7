"""Launch files as people have them, read: scripts, recipes, registries and documents, with nothing of them executed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from piper_ray.export.launched import facts_of, import_launched
from piper_ray.export.megatron_layout import plan_layout
from piper_ray.launches.launch import THE_ONE, Asked, Dialect, Launch, Source, causes, readable
from piper_ray.launches.read import read_launch
from piper_ray.launches.shell import follow
from piper_ray.launches.shell_words import Outside
from piper_ray.model.errors import UsageError
from tests.export_support import llama

MEGATRON = """#!/bin/bash
#SBATCH --nodes=4
GPUS_PER_NODE=8
TP=${TP:-2}; PP=$((TP * 2))
if [ -z "$2" ] && [ "$1" = "help" ]; then echo usage; exit 1; fi
MODEL=(
    --num-layers 12   # of a small one
    --hidden-size 1024 --num-attention-heads 16
)
if [[ $PP -gt 2 ]]; then MODEL+=(--num-layers-per-virtual-pipeline-stage 1); else EXTRA=1; fi
case $TP in 1) MODEL+=(--bf16);; *) MODEL+=(--sequence-parallel);; esac
launch() {
    local count=$1
    CMD="pretrain_gpt.py ${MODEL[@]} --micro-batch-size 1 --global-batch-size $count \\
        --tensor-model-parallel-size $TP --pipeline-model-parallel-size ${PP} \\
        --data-path $DATA --save ${OUT%/}/x"
    torchrun --nproc_per_node=$GPUS_PER_NODE --nnodes $SLURM_NNODES $CMD "$@" 2>&1 | tee log
}
launch 32
"""


def read(text: str, asked: Asked = THE_ONE, path: Path | None = None) -> Launch:
    found = read_launch(Source(text, path), asked)
    assert found is not None
    return found


def test_a_script_is_followed_without_running_it() -> None:
    found = read(MEGATRON)
    assert found.dialect is Dialect.MEGATRON
    expected = {
        "num_layers": "12", "hidden_size": "1024", "num_attention_heads": "16", "sequence_parallel": True,
        "num_layers_per_virtual_pipeline_stage": "1", "micro_batch_size": "1", "global_batch_size": "32",
        "tensor_model_parallel_size": "2", "pipeline_model_parallel_size": "4",
    }  # fmt: skip
    assert {name: found.settings[name] for name in expected} == expected
    assert found.ranks == 32
    assert any("TP (as 2)" in note for note in found.notes)
    one = read(MEGATRON, Asked(variables={"TP": "1"}))
    assert (one.settings["pipeline_model_parallel_size"], one.settings.get("sequence_parallel")) == ("2", None)
    assert one.settings["bf16"] is True


WORDS = """
A="one two"
B=(x "y z" $A)
declare -a C=("${B[@]}" '$A')
D=${E:-"d e"}
F=$((7 / 2 * 3 - -1))
G=file.tar.gz
H=$(echo $A $F)
run "$A" $A "${B[@]}" ${C[@]} $D "$D" $F ${G%.*} ${G##*.} ${G/tar/zip} ${#B[@]} "${A}-${F}" $H ${NONE:+x} a\\ b "c\\"d"
for I in 1 2; do run $I ${B[1]}; done
if [ "$A" = "one two" ] && [[ $F -eq 10 ]] && [[ $G == *.gz ]]; then run yes; elif true; then run no; fi
run ${F:+set} "$@" $'t\\tx' "${A}" \\
    last
"""


def own_words(script: str) -> list[list[str]]:
    return [list(one.words[1:]) for one in follow(script, Outside()).commands if one.words[0] == "run"]


def test_words_expand_as_in_bash(tmp_path: Path) -> None:
    file = tmp_path / "script"
    file.write_text('run() { for word in "$@"; do printf "%s\\1" "$word"; done; printf "\\2"; }\n' + WORDS)
    said = subprocess.run(["bash", file], capture_output=True, text=True, check=True, env={}).stdout
    expected = [call.split("\1")[:-1] for call in said.split("\2")[:-1]]
    assert own_words(WORDS) == expected
    assert len(expected) == 5


_PIECES = st.sampled_from([
    "$A", '"$A"', "${A}", "'$A'", "-x", " ", "  ", '"a  b"', "${B[@]}", '"${B[@]}"', "${N:-u v}", '"${N:-u v}"',
    "$((3*2))", "-x\\ y", "${A#a}", '"-${B[0]}-"', "--x=", '""', "${N}", '"$N"',
])  # fmt: skip


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(_PIECES, min_size=1, max_size=6).map("".join), min_size=1, max_size=6))
def test_words_of_random_pieces_expand_as_in_bash(words: list[str]) -> None:
    script = "".join(f'A="a b"\nB=(p "q r")\nN=\nrun {word}\n' for word in words)
    definition = 'run() { for word in "$@"; do printf "%s\\1" "$word"; done; printf "\\2"; }\n'
    said = subprocess.run(["bash", "-c", definition + script], capture_output=True, text=True, check=True).stdout
    expected = [call.split("\1")[:-1] for call in said.split("\2")[:-1]]
    try:
        own = own_words(script)
    except UsageError:
        return  # of what the parser does not know, nothing is told
    if not any(causes(word) for words_of_one in own for word in words_of_one):
        assert own == expected


def test_what_hangs_on_the_unknown_is_unseen() -> None:
    (one,) = own_words("if [ $HOSTS -gt 1 ]; then P=2; Q=1; else P=4; Q=1; fi\nrun $P $Q ${HOSTS}x $(date)")
    assert list(map(readable, one)) == ["P (see line 1)", "1", "$HOSTSx", "$(date)"]
    assert [bool(causes(word)) for word in one] == [True, False, True, True]
    kept = own_words("while read line; do P=3; done\nfor i in 1 2; do (P=9); done\nP=${P:-1}\nrun $P")
    assert list(map(readable, kept[0])) == ["P (see line 1)"]
    (quiet,) = own_words("C='run 1'\nsbatch <<EOF\nsrun -l bash -x -c \"$C\"\nEOF")
    assert quiet == ["1"]


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (
            "torchrun x.py --tensor-model-parallel-size 2 $EXTRA_ARGS",
            "the value of $EXTRA_ARGS is not known here; say it",
        ),
        ("for t in 2 4; do torchrun x.py --tensor-model-parallel-size $t; done", "comes to 2 launches; say which"),
        ("echo hello --tensor-model-parallel-size", "no command of the script has options of Megatron"),
        ("f() { f; }; f --zero-stage 1", "its loops are too long"),
        ("deepspeed x.py --zero-stage 5", "zero stage 5: expected 0, 1, 2 or 3"),
        (
            "torchrun -m torchtitan.train --config llama3_8b --module nothing",
            "does not say how the model is divided",
        ),
    ],
)
def test_a_script_that_leaves_a_launch_open_is_refused(script: str, told: str) -> None:
    with pytest.raises(UsageError) as error:
        read("#!/bin/bash\n" + script)
    assert told in str(error.value)


def test_one_of_several_launches_is_asked_for() -> None:
    script = "#!/bin/bash\nfor t in 2 4; do torchrun x.py --tensor-model-parallel-size $t; done"
    assert read(script, Asked(number=2)).settings["tensor_model_parallel_size"] == "4"
    with pytest.raises(UsageError, match="launch 3: the script has 2"):
        read(script, Asked(number=3))


def test_files_beside_a_script_are_followed(tmp_path: Path) -> None:
    (tmp_path / "sizes.sh").write_text("TP=4\n")
    (tmp_path / "inner.sh").write_text("torchrun x.py --tensor-model-parallel-size $TP --micro-batch-size $1 $@\n")
    script = tmp_path / "outer.sh"
    script.write_text('HERE=$(dirname "$0")\nsource $HERE/sizes.sh\nexport TP\nPP=2 bash ./inner.sh 3 --lr 1\n')
    found = read(script.read_text(), path=script)
    assert (found.settings["tensor_model_parallel_size"], found.settings["lr"]) == ("4", "1")
    (tmp_path / "train.args").write_text("--tensor-model-parallel-size 8\n  --lr 2\n")
    script.write_text('given="$(cat "$(dirname "$0")/train.args")"\ntorchrun x.py $given --micro-batch-size 1\n')
    found = read(script.read_text(), path=script)
    names = ("tensor_model_parallel_size", "lr", "micro_batch_size")
    assert [found.settings[name] for name in names] == ["8", "2", "1"]
    gone = read("#!/bin/bash\n. env.sh\ntorchrun x.py --tensor-model-parallel-size 2")
    assert "the script reads env.sh, which is not there: what it sets is not known" in gone.notes


def test_a_script_that_a_queue_is_given_is_followed(tmp_path: Path) -> None:
    (tmp_path / "train.slurm").write_text('torchrun --nproc_per_node 8 x.py --tensor-model-parallel-size ${TP:-1} "$@"')
    for queued in ("sbatch --nodes=4 train.slurm", "srun --export=ALL bash train.slurm", "bash ./train.slurm"):
        script = tmp_path / "all.sh"
        script.write_text(f"export TP=4\n{queued} --seq-length 4096")
        found = read(script.read_text(), path=script)
        assert (found.settings["tensor_model_parallel_size"], found.settings["seq_length"]) == ("4", "4096")


def test_a_configuration_that_a_command_names_is_read_and_what_it_sets_over_it(tmp_path: Path) -> None:
    (tmp_path / "conf.yaml").write_text(
        "system: {tensor_model_parallel_size: 1, pipeline_model_parallel_size: 2}\nmodel: {micro_batch_size: 2}\n"
    )
    script = tmp_path / "run.sh"
    for command in (
        "python run.py --config-path . --config-name conf action=run system.tensor_model_parallel_size=4",
        "torchrun train.py --config-file conf.yaml ++model.tensor_model_parallel_size=4",
        "runner train --config conf.yaml --tensor_model_parallel_size 4",
    ):
        script.write_text(command)
        found = read(command, path=script)
        names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "micro_batch_size")
        assert [int(str(found.settings[name])) for name in names] == [4, 2, 2], command
    script.write_text("python run_recipe.py --recipe small model.tensor_model_parallel_size=4")
    found = read(script.read_text(), path=script)
    assert (found.dialect, found.model) == (Dialect.BRIDGE, "small")
    assert found.notes == ("what small sets is in another file, which is not read",)
    with pytest.raises(UsageError, match="small is not there, and the command itself does not say how the model is"):
        read("python run_recipe.py --recipe small checkpoint.load=x train.micro_batch_size=1", path=script)
    script.write_text("runner train --config gone.yaml --tensor_model_parallel_size 4")
    assert "gone.yaml is not there: what it sets is not known" in read(script.read_text(), path=script).notes


def test_a_script_that_takes_its_options_out_of_yaml_is_refused_with_a_way_out(tmp_path: Path) -> None:
    script = tmp_path / "bench.sh"
    script.write_text("PARAMS=$(yq '.MODEL_ARGS | to_entries' conf.yaml)\nsrun bash -c \"$PARAMS\"")
    with pytest.raises(
        UsageError, match="yq takes its options out of a YAML file: give that file, with --set NAME=VALUE for each"
    ):
        read(script.read_text(), path=script)


def test_recomputation_by_its_older_names() -> None:
    found = read("torchrun x.py --tensor-model-parallel-size 8 --activations-checkpoint-method block "
                 "--activations-checkpoint-num-layers 3").settings  # fmt: skip
    names = ("recompute_granularity", "recompute_method", "recompute_num_layers")
    assert [found[name] for name in names] == ["full", "block", "3"]
    assert "activations_checkpoint_method" not in found


def test_deepspeed_by_its_file_and_its_options() -> None:
    script = (
        "#!/bin/bash\nZERO=1\ncat <<EOT > ds.json\n"
        '{"train_batch_size": 64, "zero_optimization": {"stage": $ZERO}}\nEOT\n'
        "deepspeed --num_gpus 8 pretrain_gpt.py --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
        "--deepspeed --deepspeed_config=ds.json --checkpoint-activations --num-key-value-heads 4"
    )
    found = read(script)
    assert found.dialect is Dialect.DEEPSPEED
    assert found.settings["use_distributed_optimizer"] is True
    assert (found.settings["global_batch_size"], found.settings["num_query_groups"], found.ranks) == (64, "4", 8)
    assert found.settings["recompute_granularity"] == "full"
    alone = read('{"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 2}')
    assert alone.settings["data_parallel_sharding_strategy"] == "optim_grads_params"


def test_all_that_the_file_of_deepspeed_or_gpt_neox_says_is_read_or_noted() -> None:
    """Pipelines of GPT-NeoX stand in the same file as DeepSpeed's own settings."""
    neox = (
        "pipe-parallel-size: 4\nmodel-parallel-size: 2\nnum-layers: 8\ncheckpoint-activations: true\n"
        "train-micro-batch-size-per-gpu: 3\ngradient-accumulation-steps: 16\nfp16: {enabled: true}\n"
        "optimizer: {type: OneBitAdam}\nzero-optimization: {stage: 1, zero_quantized_weights: true}\n"
        "activation_checkpointing: {cpu_checkpointing: true}\n"
    )
    found = facts_of(neox)
    assert found is not None
    names = ("pipeline_model_parallel_size", "tensor_model_parallel_size", "num_layers", "recompute_granularity")
    assert [found.figures[name] for name in names] == [4, 2, 8, "full"]
    assert (found.microbatch_samples, found.global_batch_samples) == (3, None)
    assert any(
        "--gradient-accumulation-steps 16 is of each replica: global_batch_size is not compared" in one
        for one in found.notes
    )
    for name in ("--zero-quantized-weights", "--optimizer-onebitadam", "--cpu-checkpointing"):
        assert any(name in note for note in found.notes), name
    shared = facts_of(neox.replace("stage: 1", "stage: 0").replace("fp16", "bf16"))
    assert shared is not None
    assert shared.figures["use_distributed_optimizer"] is True  # as its optimizer of pipelines in bf16 does
    none = facts_of(neox.replace("pipe-parallel-size: 4", "pipe-parallel-size: 0"))
    assert none is not None
    assert none.figures["pipeline_model_parallel_size"] == 1


def test_a_trainer_of_hugging_face_is_given_the_file_of_deepspeed(tmp_path: Path) -> None:
    (tmp_path / "zero.json").write_text('{"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": "auto"}')
    found = read(
        "deepspeed --num_gpus 8 run.py --model_name_or_path acme/a --per_device_train_batch_size 4 "
        "--gradient_checkpointing true --deepspeed zero.json",
        path=tmp_path / "run.sh",
    )
    assert (found.dialect, found.model, found.ranks) == (Dialect.DEEPSPEED, "acme/a", 8)
    assert found.settings["data_parallel_sharding_strategy"] == "optim_grads_params"
    assert (found.settings["micro_batch_size"], found.settings["recompute_granularity"]) == ("4", "full")
    assert "layers are not divided, as nothing but DeepSpeed's own settings says how" in found.notes


def test_the_command_of_ms_swift_has_its_own_usual_settings() -> None:
    found = read("megatron sft --model acme/a --tensor_model_parallel_size 2 --recompute_granularity none")
    assert found.model == "acme/a"
    assert (found.settings["use_distributed_optimizer"], found.settings["moe_token_dispatcher_type"]) == (
        True,
        "alltoall",
    )
    assert found.settings["recompute_granularity"] is None
    assert read("megatron sft --tensor_model_parallel_size 2").settings["recompute_granularity"] == "selective"


def test_an_array_that_a_script_leaves_out_is_empty_where_it_sets_others() -> None:
    found = read('MORE=(--lr 1)\ntorchrun x.py --tensor-model-parallel-size 2 "${MORE[@]}" ${EVAL[@]}')
    assert found.settings == {"tensor_model_parallel_size": "2", "lr": "1"}
    assert any("EVAL" in note for note in found.notes)
    for hidden in ("mapfile -t EVAL < args.txt", "read -r -a EVAL"):
        with pytest.raises(UsageError, match="is not known here"):
            read(f'MORE=(--lr 1)\n{hidden}\ntorchrun x.py --tensor-model-parallel-size 2 "${{EVAL[@]}}"')


RECIPES = '''
from megatron.bridge.recipes.common import _pretrain_common
SIZES = {("a", 2): [["embedding"] + ["decoder"] * 6, ["decoder"] * 6 + ["loss"]]}
def _base(name, *, samples=1):
    cfg = _pretrain_common()
    cfg.model = AutoBridge.from_hf_pretrained(name).to_megatron_provider(load_weights=False)
    cfg.train = TrainingConfig(micro_batch_size=samples, global_batch_size=16 * 2)
    cfg.optimizer.use_distributed_optimizer = True
    cfg.ddp.use_distributed_optimizer = False
    return cfg
def small_config() -> ConfigContainer:
    """A docstring with cfg.model.tensor_model_parallel_size = 9."""
    cfg = _base("acme/Small-1B")
    cfg.model.tensor_model_parallel_size = 2 if cfg.train.micro_batch_size == 1 else 4  # not 8
    cfg.model.pipeline_model_parallel_size = len_of = 2
    cfg.model._pipeline_model_parallel_layout_builder = _base
    cfg.model.pipeline_model_parallel_layout = SIZES[("a", 2)]
    cfg.model.pipeline_model_parallel_layout = [list(x) for x in cfg.model.pipeline_model_parallel_layout]
    if FAST:
        cfg.model.recompute_granularity = "full"
    return cfg
def large_config():
    cfg = small_config()
    cfg.model.tensor_model_parallel_size *= 4
    return cfg
'''


def test_a_recipe_of_a_file_in_python() -> None:
    found = read(RECIPES, Asked("large_config"))
    assert found.dialect is Dialect.BRIDGE
    assert (found.settings["tensor_model_parallel_size"], found.settings["global_batch_size"]) == (8, 32)
    assert found.model == "acme/Small-1B"
    assert not [name for name in found.settings if name.startswith("_")]
    assert any("what _pretrain_common sets is not read: its file is neither here" in note for note in found.notes)
    assert causes(found.settings["recompute_granularity"]) == ("a value that depends on line 19",)
    assert found.settings["use_distributed_optimizer"] is True  # as Megatron-Bridge has it where one section has
    assert found.settings["pipeline_model_parallel_layout"] == [
        ["embedding", *["decoder"] * 6],
        [*["decoder"] * 6, "loss"],
    ]
    with pytest.raises(UsageError, match="2 recipes; say which with --recipe: small_config, large_config"):
        read(RECIPES)
    with pytest.raises(UsageError, match="recipe tiny: the file has none of that name; it has small_config"):
        read(RECIPES, Asked("tiny"))


def test_recipes_of_mixtures_set_their_dispatcher_by_a_call() -> None:
    text = (
        "def mixture():\n    cfg = _pretrain_common()\n    cfg.model.tensor_model_parallel_size = 2\n"
        '    cfg.model.moe_token_dispatcher_type = "alltoall"\n    apply_flex_dispatcher_backend(cfg.model, {})\n'
        "    return cfg\n"
    )
    for backend, dispatcher in (('"deepep"', "flex"), ("None", "alltoall")):
        assert read(text.format(backend)).settings["moe_token_dispatcher_type"] == dispatcher


REGISTRY = """
from torchtitan.trainer import Trainer
SPEC = model_registry("1B", attn_backend="varlen")
def small():
    return Trainer.Config(
        model_spec=model_registry("1B"),
        training=TrainingConfig(num_tokens_per_microbatch_per_dp_rank=2 * 1024, max_context_length=1024),
        parallelism=ParallelismConfig(pipeline_parallel_degree=2, pipeline_parallel_schedule="1F1B"),
        activation_checkpoint=FullAC.Config(),
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(SPEC))),
        optimizer=default_adamw(lr=3e-4),
    )
def wide():
    config = small()
    config.parallelism.tensor_parallel_degree = 4
    return config
"""


def test_a_registry_of_torchtitan_and_its_command_line(tmp_path: Path) -> None:
    folder = tmp_path / "torchtitan" / "models" / "acme"
    folder.mkdir(parents=True)
    (folder / "config_registry.py").write_text(REGISTRY)
    script = tmp_path / "run_train.sh"
    script.write_text(
        'NGPU=${NGPU:-"8"}\nCONFIG=${CONFIG:-"small"}\nif [ -n "$COMM_MODE" ]; then\n  exit 0\nfi\n'
        'torchrun --nproc_per_node=${NGPU} -m torchtitan.train --module acme --config ${CONFIG} "$@"\n'
    )
    found = read("CONFIG=wide NGPU=16 ./run_train.sh --parallelism.pipeline-parallel-degree=4", path=tmp_path / "typed")
    assert found.dialect is Dialect.TORCHTITAN
    assert found.notes == ("environment variables, read as unset: COMM_MODE; --set NAME=VALUE sets one",)
    parallelism, training = found.settings["parallelism"], found.settings["training"]
    assert isinstance(parallelism, dict)
    assert isinstance(training, dict)
    assert (parallelism["tensor_parallel_degree"], parallelism["pipeline_parallel_degree"]) == (4, 4)
    assert (training["microbatch_samples"], training["seq_len"]) == (2, 1024)
    assert (found.settings["activation_checkpoint"], found.ranks, found.model) == ("full", 16, "1B")
    old = read("[training]\nbatch_size = 4\nseq_len = 128\ntensor_parallel_degree = 2\n[model]\nname = 'llama3'\n")
    assert old.settings["parallelism"] == {"tensor_parallel_degree": 2}


def test_a_command_that_starts_a_script_is_read_with_its_variables(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("torchrun pretrain_gpt.py --tensor-model-parallel-size $TP --num-layers $1\n")
    found = read("TP=4 bash run.sh 8", path=tmp_path / "a command")
    assert found.settings == {"tensor_model_parallel_size": "4", "num_layers": "8"}


def test_documents_of_megatron_primus_and_flagscale(tmp_path: Path) -> None:
    dashed = "MODEL_ARGS:\n  --tensor-model-parallel-size: ${TP}\n  --recompute-modules: '[mlp, moe]'\n  --bf16: true\n"
    found = read(dashed, Asked(variables={"TP": "2"}))
    assert found.settings == {"tensor_model_parallel_size": 2, "recompute_modules": ["mlp", "moe"], "bf16": True}
    with pytest.raises(UsageError, match=r"\$TP is not known here \(--set TP=VALUE\)"):
        facts_of(dashed)
    files = {
        "primus/configs/modules/megatron/pre_trainer.yaml": "context_parallel_size: 1\nshiny: 3\nlr: 1\n",
        "primus/configs/models/megatron/base.yaml": "num_layers: 2\n",
        "primus/configs/models/megatron/small.yaml": "extends: [base.yaml]\nhidden_size: 64\n",
        "examples/run.yaml": "modules:\n  pre_trainer:\n    framework: megatron\n    config: pre_trainer.yaml\n"
        "    model: small.yaml\n    overrides:\n      tensor_model_parallel_size: ${TP:4}\n",
        "conf/train.yaml": "defaults:\n  - train: small\n"
        "experiment: {seed: 1, runner: {nnodes: 2, nproc_per_node: 8}}\n",
        "conf/train/small.yaml": "system: {tensor_model_parallel_size: 2}\nmodel: {seed: '${experiment.seed}'}\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    primus = facts_of(str(tmp_path / "examples" / "run.yaml"))
    assert primus is not None
    assert primus.figures == {
        "context_parallel_size": 1,
        "hidden_size": 64,
        "num_layers": 2,
        "tensor_model_parallel_size": 4,
    }
    assert primus.notes == ("environment variables, read as unset: TP (as 4); --set NAME=VALUE sets one",)
    flagscale = read((tmp_path / "conf/train.yaml").read_text(), path=tmp_path / "conf/train.yaml")
    assert (flagscale.settings["tensor_model_parallel_size"], flagscale.ranks) == (2, 16)
    nemo = read("model: {tensor_model_parallel_size: 2, micro_batch_size: 1, optim: {name: distributed_fused_adam}}")
    assert nemo.settings["use_distributed_optimizer"] is True


def test_a_launch_becomes_a_plan_and_its_model_is_held_against_the_workload(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        MEGATRON.replace("launch 32", "launch 32 --use-distributed-optimizer").replace("nodes=4", "nodes=2")
    )
    found = import_launched(llama(), str(script))
    assert plan_layout(llama(), found.plan) == "Et|(t|)*10,tL"
    assert (found.schedule.text, found.plan.stages[0].data_parallel_degree) == ("interleaved, 3 chunks a rank", 2)
    script.write_text(MEGATRON.replace("--hidden-size 1024", "--hidden-size 2048"))
    with pytest.raises(UsageError, match="--hidden-size 2048, but the workload's model has 1024"):
        import_launched(llama(), str(script))
    recipes = tmp_path / "recipes.py"
    recipes.write_text(
        RECIPES.replace("1B", "70B").replace(
            "    if FAST:\n        cfg.model.rec", "    if False:\n        cfg.model.rec"
        )
    )
    with pytest.raises(UsageError, match=r"the model is acme/Small-70B by its name, and the workload's has 0\.\d+B"):
        import_launched(llama(), str(recipes), asked=Asked("small_config"))
