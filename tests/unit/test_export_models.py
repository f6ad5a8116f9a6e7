"""Published models through Megatron's arguments: each is the model that was planned, or is refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from piper_ray.export.files import Target
from piper_ray.export.targets import export_plan
from piper_ray.model.errors import InputError, UnsupportedPlan, UsageError
from piper_ray.model.instance import Instance, TrainedModel
from piper_ray.model.mode import ALL_REPLICAS, Mode
from piper_ray.model.one_mode import tmpcs_under
from piper_ray.model.plan import Plan, Stage
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.workloads.estimate.build import Estimate
from piper_ray.workloads.estimate.config import ModelConfig, model_names, model_of_config, read_model
from piper_ray.workloads.estimate.families import Microbatch
from piper_ray.workloads.estimate.modes import Offer
from tests.data import published_models
from tests.estimate_support import estimated
from tests.export_support import mixture, plan_in, runtime_says

ONE = Schedule(ScheduleName.ONE_F_ONE_B)
PUBLISHED = published_models()

REFUSED_BY_ALL = {
    "some of its layers mix tokens otherwise than by attention": {
        "Qwen3-Next-80B-A3B", "Nemotron-H-8B", "mamba-2.8b", "Mamba-Codestral-7B", "Jamba-v0.1", "Bamba-9B",
    },
    "text decoders": {
        "bert-large", "vit-22b", "vit-large-patch16-224", "DiT-XL/2", "gemma-3-4b", "gemma-3-12b", "gemma-3-27b",
        "Llama-4-Scout", "Llama-4-Maverick", "llava-1.5-7b", "Qwen2-VL-7B", "Qwen2.5-VL-7B", "Qwen2.5-VL-72B",
        "paligemma-3b", "Qwen3-VL-8B", "Qwen3-VL-30B-A3B", "Qwen3-VL-235B-A22B", "Mistral-Small-3.1-24B", "GLM-4.5V",
        "Kimi-VL-A3B", "Qwen3-VL-4B", "Qwen2.5-VL-3B", "Qwen2.5-VL-32B", "pixtral-12b", "InternVL3-8B",
        "InternVL3-78B", "llava-onevision-7b", "Idefics3-8B", "SmolVLM2-2.2B", "GLM-4.1V-9B", "deepseek-vl2",
    },
    "stands between blocks": {"imagebind-huge"},
    "several rows of blocks": {"bart-large", "t5-11b", "whisper-large-v3", "clip-vit-l-14"},
    "no row of equal blocks": {"inception-v3"},
    "not made of the same layers": {"resnet50"},
}  # fmt: skip
"""Why neither Megatron-LM nor torchtitan can train it, in words of the refusal."""

REFUSED = REFUSED_BY_ALL | {
    "its norms stand elsewhere": {
        "gemma-2-9b", "gemma-2-27b", "gemma-3-1b", "phi-2", "falcon-7b", "falcon-40b", "OLMo-7B", "OLMo-2-7B", "bloom",
        "gpt-j-6b", "pythia-6.9b", "c4ai-command-r-v01",
    },
    "its layers are not known to be Megatron-LM's own": {
        "gemma-7b", "granite-3.0-8b", "opt-6.7b", "dbrx", "SmolLM3-3B", "Hunyuan-A13B",
    },
    "its biases are neither": {"Phi-3.5-MoE"},
    "its norms of queries and keys go over all heads": {"OLMoE-1B-7B", "MiniMax-M2"},
    "its positions are neither rotary nor learned": {"mpt-7b"},
}  # fmt: skip
"""Why Megatron-LM cannot train it, in words of the refusal."""

LAYERS = 5
"""Of each model, in place of its own number, so that all are soon built."""


FEW = {"Llama-3.1-8B", "mixtral-8x22b", "Qwen3-Next-80B-A3B", "bert-large"}
"""Models of a quick run, two of which runtimes take."""


def models(few: bool = False) -> dict[str, ModelConfig]:
    known = [name for name in model_names() if name not in ("llama3-8b", "mixtral-8x7b", *PUBLISHED)]
    names = [name for name in (*PUBLISHED, *known) if not few or name in FEW]
    return {
        name: read_model(name) if name in known else model_of_config(name, shallow(PUBLISHED[name]["config"]))
        for name in names
    }


def shallow(config: dict[str, Any]) -> dict[str, Any]:
    listed = {"attn_layer_indices", "hybrid_override_pattern"}.intersection(config)
    return config if listed else config | {key: LAYERS for key in ("num_hidden_layers", "n_layer") if key in config}


def planned(model: ModelConfig, **options: Any) -> tuple[Estimate, Plan]:
    """Two stages on two replicas of each; experts over eight ranks where they can be."""
    kinds = model.architecture(Microbatch(model.samples, model.tokens, fused=True)).kinds
    spread = any(kind.experts and kind.experts % 8 == 0 for kind in kinds)
    offer = Offer(experts=(8,)) if spread else Offer()
    result = estimated(model, "H100-SXM", nodes=2, batch=model.samples * 16, offer=offer, **options)
    instance = result.instance
    setting = Mode(experts=8 if spread else None)
    chosen = {layer.id: tmpcs_under(layer.tmpcs[1], setting)[0].id for layer in instance.layers}
    ids = list(chosen)
    halves = (ids[: len(ids) // 2], ids[len(ids) // 2 :])
    return result, Plan(tuple(Stage(tuple(x), 8, 1, {layer: chosen[layer] for layer in x}) for x in halves), True)


def test_every_model_is_the_planned_one_or_refused(tmp_path: Path, few: bool) -> None:
    """As many parameters in Megatron-Core's own GPTModel as in the estimate."""
    accepted: dict[str, Estimate] = {}
    refused: dict[str, str] = {}
    asked = models(few)
    for name, model in asked.items():
        result, plan = planned(model)
        try:
            found = export_plan(result.instance, plan, ONE, Target.MEGATRON, 8)
        except (UsageError, UnsupportedPlan) as error:
            refused[name] = str(error)
            continue
        found.write(tmp_path / name)
        accepted[name] = result
    for words, names in REFUSED.items():
        for name in names & asked.keys():
            assert words in refused.pop(name), name
    assert refused == {}
    assert len(accepted) > (1 if few else 32)
    answers = runtime_says(
        "megatron", *(("megatron_parameters", tmp_path / name, blocks(accepted[name])) for name in accepted)
    )
    for (name, result), answer in zip(accepted.items(), answers, strict=True):
        architecture = result.architecture
        assert answer == [architecture.parameters, architecture.predictor_parameters], name


def blocks(result: Estimate) -> int:
    return sum(node.path.rpartition(".")[2].isdecimal() and not node.predictor for node in result.architecture.nodes)


def arguments(instance: Instance, plan: Plan, target: Target = Target.MEGATRON) -> list[str]:
    return export_plan(instance, plan, ONE, target, 8).files["megatron.args"].splitlines()


def llama() -> ModelConfig:
    return model_of_config("llama", shallow(PUBLISHED["Llama-3.2-1B"]["config"]))


@pytest.mark.parametrize(
    ("options", "said", "unsaid"),
    [
        ({}, {"--bf16"}, {"--fp16", "--fp8-format"}),
        ({"precision": "fp16"}, {"--fp16", "--accumulate-allreduce-grads-in-fp32"}, {"--bf16"}),
        ({"precision": "fp8"}, {"--bf16", "--fp8-format hybrid", "--fp8-recipe tensorwise"}, {"--fp16"}),
        ({"software": "megatron-2021"}, {"--bf16"}, {"--overlap-grad-reduce", "--tp-comm-overlap"}),
        ({"software": "nemo"}, {"--overlap-grad-reduce"}, {"--tp-comm-overlap"}),
    ],
)  # fmt: skip
def test_precision_and_overlaps_are_said(options: dict[str, Any], said: set[str], unsaid: set[str]) -> None:
    result, plan = planned(llama(), **options)
    lines = arguments(result.instance, plan)
    assert said <= set(lines)
    assert not any(line.partition(" ")[0] in {text.partition(" ")[0] for text in unsaid} for line in lines)


def test_blackwell_scales_by_blocks() -> None:
    model = llama()
    instance = estimated(model, "B200", nodes=1, batch=8, precision="fp8").instance
    row = {layer.id: layer.tmpcs[1][0].id for layer in instance.layers}
    plan = Plan((Stage(tuple(row), 8, 1, row),), True)
    assert "--fp8-recipe mxfp8" in arguments(instance, plan)


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        ({"gradient_bytes": 2.0}, "--grad-reduce-in-bf16"),
        ({"gradient_bytes": 4.0}, "--bf16"),
    ],
)
def test_bytes_of_a_parameter_are_said(kept: dict[str, Any], said: str) -> None:
    result, plan = planned(llama())
    assert result.instance.model is not None
    instance = replace(result.instance, model=replace(result.instance.model, **kept))
    assert said in arguments(instance, plan)
    assert (said in arguments(result.instance, plan)) is (instance == result.instance)


def test_moments_in_bf16_take_a_distributed_optimizer() -> None:
    result, plan = planned(llama())
    alone = Plan(tuple(replace(stage, data_parallel_degree=1) for stage in plan.stages), True)
    assert result.instance.model is not None
    instance = replace(result.instance, model=replace(result.instance.model, optimizer_bytes=8.0))
    assert {"--use-precision-aware-optimizer", "--use-distributed-optimizer"} <= set(arguments(instance, alone))
    with pytest.raises(UsageError, match="keeps 8 bytes of optimizer state a parameter where replicas share it"):
        arguments(instance, plan)


@pytest.mark.parametrize(
    ("kept", "told"),
    [
        ({"weight_bytes": 4.0}, "Megatron-LM keeps weights in 2 bytes, and the plan in 4"),
        ({"gradient_bytes": 1.0}, "Megatron-LM sums gradients in 2 or 4 bytes, and the plan in 1"),
        ({"optimizer_bytes": 6.0}, "state of a parameter in 12 or 8 bytes, and the plan in 6"),
        ({"lora_rank": 16}, "Megatron-LM trains no adapters"),
        ({"config": {"model_type": "llama"}}, "hidden_size"),
    ],
)
def test_what_megatron_cannot_keep_is_refused(kept: dict[str, Any], told: str) -> None:
    result, plan = planned(llama())
    assert result.instance.model is not None
    instance = replace(result.instance, model=replace(result.instance.model, **kept))
    with pytest.raises((UsageError, InputError), match=told):
        arguments(instance, plan)


def test_activations_that_megatron_has_no_fused_kernel_of() -> None:
    nemotron = model_of_config("n", shallow(PUBLISHED["Nemotron-4-340B"]["config"]))
    result, plan = planned(nemotron)
    assert {"--squared-relu", "--no-bias-gelu-fusion"} <= set(arguments(result.instance, plan))
    result, plan = planned(llama())
    assert "--no-bias-gelu-fusion" not in arguments(result.instance, plan)


def test_sizes_that_t_does_not_divide_are_refused() -> None:
    config = shallow(PUBLISHED["Llama-3.2-1B"]["config"]) | {"intermediate_size": 4099}
    instance = estimated(model_of_config("odd", config), "H100-SXM", nodes=1, batch=8).instance
    row = {layer.id: layer.tmpcs[2][0].id for layer in instance.layers}
    with pytest.raises(UsageError, match="divides no intermediate size of 4099 by tensor parallelism 2"):
        arguments(instance, Plan((Stage(tuple(row), 4, 2, row),), True))


def test_context_parallelism_that_no_kernel_has_is_refused() -> None:
    config = shallow(PUBLISHED["Mistral-7B-v0.1"]["config"])
    offer = Offer(contexts=(1, 2))
    for exchange, told in (("ring", "as a ring takes no sliding windows"), ("all-gather", "")):
        result = estimated(
            model_of_config("m", config), "H100-SXM", nodes=1, batch=8, offer=offer, context_exchange=exchange
        )
        instance = result.instance
        chosen = {layer.id: tmpcs_under(layer.tmpcs[2], Mode(context=2))[0].id for layer in instance.layers}
        plan = Plan((Stage(tuple(chosen), 4, 2, chosen),), True)
        if told:
            with pytest.raises(UsageError, match=told):
                arguments(instance, plan)
        else:
            assert "--cp-comm-type all_gather" in arguments(instance, plan)


STRETCHED: dict[str, Any] = {"factor": 8.0}


@pytest.mark.parametrize(
    ("name", "changed", "told"),
    [
        ("Llama-3.2-1B", STRETCHED | {"rope_type": "llama3", "low_freq_factor": 2.0}, "low_freq_factor is 2.0, Megat"),
        ("Llama-3.2-1B", STRETCHED | {"rope_type": "dynamic"}, "stretches rotary positions (dynamic)"),
        ("DeepSeek-V3", STRETCHED | {"type": "yarn", "beta_fast": 16}, "beta_fast is 16, Megatron's 32"),
    ],
)  # fmt: skip
def test_what_no_argument_says_is_noted(name: str, changed: dict[str, Any], told: str) -> None:
    config = shallow(PUBLISHED[name]["config"])
    for extra, expected in (({"rope_scaling": changed}, True), ({}, False)):
        result, plan = planned(model_of_config("changed", config | extra))
        found = export_plan(result.instance, plan, ONE, Target.MEGATRON, 8)
        assert any(told in note for note in found.notes) is expected


def test_a_model_that_nobody_knows_is_the_users_own() -> None:
    result, plan = planned(llama())
    found = export_plan(replace(result.instance, model=None), plan, ONE, Target.MEGATRON, 8)
    assert not any(line.startswith(("--hidden-size", "--bf16")) for line in found.files["megatron.args"].splitlines())
    assert "training.args" not in found.files
    assert found.command == "bash launch.sh MODEL-ARGUMENTS..."
    assert any("does not say which model it is" in note for note in found.notes)


def test_predictors_are_written_and_read_back() -> None:
    """DeepSeek-V3's, in the stage of the loss; without them it is another model."""
    from piper_ray.export.import_plan import import_plan
    from piper_ray.export.run_as import RunAs

    result, plan = planned(model_of_config("v3", shallow(PUBLISHED["DeepSeek-V3"]["config"])))
    found = export_plan(result.instance, plan, ONE, Target.MEGATRON, 8)
    text = found.files["megatron.args"]
    assert {"--num-layers 5", "--mtp-num-layers 1", "--pipeline-model-parallel-layout Et*3|t*2mL"} <= set(
        text.splitlines()
    )
    assert "--moe-layer-freq ([0]*3+[1]*2)" in text.splitlines()
    again = import_plan(result.instance, text, RunAs(data_parallel=8))
    assert again.plan == plan
    without = text.replace("--mtp-num-layers 1\n", "--mtp-num-layers 2\n")
    with pytest.raises(UsageError, match="--mtp-num-layers 2, but the model has 1"):
        import_plan(result.instance, without, RunAs(data_parallel=8))
    for layout, told in (
        ("Et*3m|t*2L", "a transformer layer (t) stands behind"),
        ("Et*5|L", "0 multi-token-prediction layers (m); the model has 1"),
        ("Et*5|mmL", "2 multi-token-prediction layers (m); the model has 1"),
    ):
        with pytest.raises(UsageError) as error:
            import_plan(result.instance, layout, RunAs(data_parallel=8))
        assert told in str(error.value)
    with pytest.raises(UsageError, match="FlagScale's hetero_pipeline_layer_split"):
        export_plan(result.instance, plan, ONE, Target.FLAGSCALE, 8)


def test_flagscale_says_what_megatron_says() -> None:
    """Precision, overlaps and the model by the same names; what its Megatron, 0.15, has no argument for is refused."""
    result, plan = planned(llama(), precision="fp8")
    found = yaml.safe_load(export_plan(result.instance, plan, ONE, Target.FLAGSCALE, 8).files["system.yaml"])
    said = {"bf16": True, "fp8_format": "hybrid", "fp8_recipe": "tensorwise", "overlap_grad_reduce": True}
    assert said.items() <= found["system"].items()
    assert found["model"]["hidden_size"] == 2048
    adapted = replace(result.instance, model=replace(result.instance.model or TrainedModel(), lora_rank=8))
    with pytest.raises(UsageError, match="FlagScale trains no adapters"):
        export_plan(adapted, plan, ONE, Target.FLAGSCALE, 8)
    gated, spread = planned(model_of_config("gated", shallow(PUBLISHED["Qwen1.5-MoE-A2.7B"]["config"])))
    with pytest.raises(UsageError, match="no gate of shared experts"):
        export_plan(gated.instance, spread, ONE, Target.FLAGSCALE, 8)
    assert "--moe-shared-expert-gate" in arguments(gated.instance, spread)


def test_flagscale_is_told_its_nodes() -> None:
    """Without a hostfile it starts the node that it is on, alone; OmegaConf stops where HOSTFILE is not set."""
    result, plan = planned(llama())
    two = export_plan(result.instance, plan, ONE, Target.FLAGSCALE, 8)
    runner = yaml.safe_load(two.files["experiment.yaml"])["experiment"]["runner"]
    assert runner == {
        "backend": "torchrun", "nnodes": 2, "nproc_per_node": 8, "hostfile": "${oc.env:HOSTFILE}",
    }  # fmt: skip
    assert any("without one FlagScale starts this node alone" in note for note in two.notes)
    half = Plan(tuple(replace(stage, data_parallel_degree=4) for stage in plan.stages), True)
    one = yaml.safe_load(export_plan(result.instance, half, ONE, Target.FLAGSCALE, 8).files["experiment.yaml"])
    assert one == {"experiment": {"runner": {"backend": "torchrun", "nnodes": 1, "nproc_per_node": 8}}}


@pytest.mark.parametrize(("exchange", "said"), [("ring", "p2p"), ("all-gather", "all_gather")])
def test_flagscale_exchanges_a_sequence_as_planned(exchange: str, said: str) -> None:
    instance = mixture()
    instance = replace(instance, model=replace(instance.model or TrainedModel(), context_exchange=exchange))
    plan = plan_in(
        instance, Mode(sequence_parallel=True, optimizer_shards=ALL_REPLICAS, context=2, experts=8), t=8, d=2
    )
    found = yaml.safe_load(export_plan(instance, plan, ONE, Target.FLAGSCALE, 8).files["system.yaml"])
    assert found["system"]["cp_comm_type"] == said
