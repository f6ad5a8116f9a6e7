"""Folders for torchtitan: the planned model, of torchtitan's own parts, or a refusal; a step by its Trainer."""

from __future__ import annotations

import json
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from piper_ray.export.files import Target
from piper_ray.export.import_plan import import_plan
from piper_ray.export.run_as import RunAs
from piper_ray.export.targets import export_plan
from piper_ray.model.errors import UnsupportedPlan, UsageError
from piper_ray.model.instance import Instance
from piper_ray.model.mode import Mode, Recomputation
from piper_ray.model.one_mode import tmpcs_under
from piper_ray.model.plan import Plan, Stage
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.runtimes.runtime import RUNTIMES, RuntimeName
from piper_ray.workloads.estimate.build import Estimate
from piper_ray.workloads.estimate.config import ModelConfig, model_of_config
from tests.estimate_support import estimated, model_of
from tests.export_support import runtime_says
from tests.run_support import imported, results_of_ranks
from tests.titan_ranks import TOKENS, WORDS
from tests.unit.test_export_models import PUBLISHED, REFUSED_BY_ALL, blocks, models, planned, shallow

ONE = Schedule(ScheduleName.ONE_F_ONE_B)
TITAN = RUNTIMES[RuntimeName.TORCHTITAN]

REFUSED = REFUSED_BY_ALL | {
    "it has other norms than RMS norms before attention": {
        "gemma-2-9b", "gemma-2-27b", "gemma-3-1b", "phi-2", "falcon-7b", "falcon-40b", "OLMo-7B", "OLMo-2-7B", "bloom",
        "gpt-j-6b", "pythia-6.9b", "c4ai-command-r-v01", "Nemotron-4-340B", "starcoder", "starcoder2-15b", "opt-6.7b",
        "stablelm-3b-4e1t", "gpt3-175b", "Phi-3.5-MoE",
    },
    "its positions are not those of rotary heads as a whole": {"mpt-7b", "GLM-4.5", "GLM-4.5-Air"},
    "its layers are not known to be torchtitan's own": {
        "granite-3.0-8b", "dbrx", "SmolLM3-3B", "OLMoE-1B-7B", "Qwen1.5-MoE-A2.7B", "Qwen2-57B-A14B", "dots.llm1",
        "gemma-7b", "MiniMax-M2", "Hunyuan-A13B",
    },
    "torchtitan's attention has not its sliding windows": {"Mistral-7B-v0.1"},
    "it predicts 2 tokens at once": {"DeepSeek-V3", "deepseek-v3"},
}  # fmt: skip
"""Why torchtitan cannot train it, in words of the refusal."""


def exported(folder: Path, result: Estimate, plan: Plan) -> Path:
    export_plan(result.instance, plan, ONE, Target.TORCHTITAN, 8).write(folder)
    return folder


def whole(model: ModelConfig, **options: Any) -> tuple[Estimate, Plan]:
    """One stage on 8 replicas."""
    result = estimated(model, "H100-SXM", nodes=1, batch=model.samples * 16, **{"software": "fsdp"} | options)
    row = {layer.id: layer.tmpcs[1][0].id for layer in result.instance.layers}
    return result, Plan((Stage(tuple(row), 8, 1, row),), True)


def of_published(name: str, **changes: Any) -> ModelConfig:
    return model_of_config(name, shallow(PUBLISHED[name]["config"]) | changes)


def test_every_model_is_the_planned_one_or_refused(tmp_path: Path, few: bool) -> None:
    """As many parameters in torchtitan's own model, which its config makes, as in the estimate."""
    accepted: dict[str, Estimate] = {}
    refused: dict[str, str] = {}
    asked = models(few)
    for name, model in asked.items():
        result, plan = planned(model, software="fsdp")
        try:
            if TITAN.on_one_rank(result.instance) is not None:
                result, plan = whole(model)
            exported(tmp_path / name, result, plan)
        except (UsageError, UnsupportedPlan) as error:
            refused[name] = str(error)
            continue
        accepted[name] = result
    for words, names in REFUSED.items():
        for name in names & asked.keys():
            assert words in refused.pop(name), name
    assert refused == {}
    known = {"Llama-3.2-1B", "Qwen3-0.6B", "llama3-70b", "llama3-405b", "Kimi-K2", "DeepSeek-V2-Lite", "gpt-oss-120b"}
    assert known & asked.keys() <= accepted.keys()
    alone = {
        "without predictors": of_published("DeepSeek-V3", num_nextn_predict_layers=0),
        "adapters": of_published("Qwen2.5-7B"),
    }
    for name, model in alone.items():
        accepted[name], plan = whole(model, lora=8 if name == "adapters" else 0)
        exported(tmp_path / name, accepted[name], plan)
    answers = runtime_says(
        "torchtitan", *(("torchtitan_parameters", tmp_path / name, blocks(accepted[name])) for name in accepted)
    )
    found = dict(zip(accepted, answers, strict=True))
    for name, result in accepted.items():
        architecture = result.architecture
        assert isinstance(found[name], dict), f"{name}: {found[name]}"
        frozen = sum(node.kind.frozen_parameters for node in architecture.nodes)
        assert found[name]["trained"] == architecture.parameters - frozen, name
        assert found[name]["parameters"] == architecture.parameters, name
        assert found[name]["loss"] == result.instance.model.config["vocab_size"], name  # type: ignore[union-attr]
    llama = found["Llama-3.1-8B"]
    assert (llama["name"], llama["theta"], llama["scaling"], llama["epsilon"]) == ("llama3", 5e5, "llama", 1e-6)
    assert llama["compile"] == [["model", "loss"], False]
    assert found["mixtral-8x22b"]["name"] == "qwen3"
    assert found["mixtral-8x22b"]["compile"] == [["loss"], False]


@pytest.mark.long
def test_a_step_of_its_trainer_is_that_of_the_model_in_one_piece(tmp_path: Path) -> None:
    """Two pipeline ranks over gloo, with recomputation, biases of queries, and four microbatches of two samples."""
    runtime_says("torchtitan")  # or skips
    model = model_of(
        "qwen2", tokens=TOKENS, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, vocab_size=WORDS,
    )  # fmt: skip
    result = estimated(model, "H100-SXM", nodes=1, samples=2, batch=8, software="fsdp")
    setting = Mode(Recomputation.of("selective-op"))
    row = {layer.id: tmpcs_under(layer.tmpcs[1], setting)[0].id for layer in result.instance.layers}
    ids = list(row)
    stages = (Stage(tuple(part), 1, 1, {layer: row[layer] for layer in part}) for part in (ids[:2], ids[2:]))
    exported(tmp_path, result, Plan(tuple(stages), True))
    first, last = results_of_ranks("titan_ranks", tmp_path, 2, {"folder": str(tmp_path)}, strict=False)
    assert first["parameters"] + last["parameters"] == first["of"]
    assert first["loss"] is None
    assert last["loss"] == pytest.approx(last["expected"], rel=1e-5)
    assert max(first["difference"], last["difference"]) < 1e-5


def documents(instance: Instance, plan: Plan) -> dict[str, Any]:
    text = export_plan(instance, plan, ONE, Target.TORCHTITAN, 8).files["torchtitan.json"]
    found: dict[str, Any] = json.loads(text)
    return found


@pytest.mark.parametrize(
    ("kept", "told"),
    [
        ({"precision": "fp16"}, "in bf16 or fp8, and this plan in fp16"),
        ({"gradient_bytes": 2.0}, "sums gradients in 4 bytes, and the plan in 2"),
        ({"optimizer_bytes": 6.0}, "state of a parameter in 12 or 8 bytes, and the plan in 6"),
        ({"lora_rank": 8, "precision": "fp8"}, "are planned in fp8, and torchtitan's are in bf16"),
    ],
)
def test_what_torchtitan_does_not_train_is_refused(kept: dict[str, Any], told: str) -> None:
    result, plan = planned(of_published("Llama-3.1-8B"), software="fsdp")
    assert result.instance.model is not None
    instance = replace(result.instance, model=replace(result.instance.model, **kept))
    with pytest.raises(UsageError, match=told):
        documents(instance, plan)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, "stretched in a way that torchtitan has not"),
        ({"attention_dropout": 0.1}, "it has dropout"),
        ({"mlp_bias": True}, "biases other than those of queries, keys and values"),
        ({"hidden_act": "gelu"}, "its feed-forward part is no SwiGLU"),
    ],
)
def test_what_its_models_have_not_is_refused(changes: dict[str, Any], told: str) -> None:
    result, plan = planned(of_published("Llama-3.1-8B", **changes), software="fsdp")
    with pytest.raises(UsageError, match=told):
        documents(result.instance, plan)


def test_precision_optimizer_and_overlaps_are_said() -> None:
    result, plan = planned(of_published("Llama-3.1-8B"), software="fsdp", precision="fp8")
    assert documents(result.instance, plan)["model"]["precision"] == "fp8"
    assert result.instance.model is not None
    other = replace(result.instance.model, optimizer_bytes=8.0, gpu="B200", software="megatron-core")
    found = documents(replace(result.instance, model=other), plan)
    assert (found["model"]["precision"], found["model"]["optimizer"]) == ("mxfp8", "fused_opt_states_bf16")
    notes = export_plan(replace(result.instance, model=other), plan, ONE, Target.TORCHTITAN, 8).notes
    assert any("the plan's times are of Megatron-Core and NeMo, from 2023, not of torchtitan" in note for note in notes)
    layers, setting = result.instance.layers, Mode(sequence_parallel=True)
    row = {layer.id: tmpcs_under(layer.tmpcs[8], setting)[0].id for layer in layers}
    sequence = Plan((Stage(tuple(row), 1, 8, row),), True)
    assert documents(replace(result.instance, model=other), sequence)["compile"]["enable_async_tensor_parallel"]
    assert not documents(result.instance, sequence)["compile"]["enable_async_tensor_parallel"]


def test_a_model_that_nobody_knows_is_the_users_own() -> None:
    result, plan = planned(of_published("Llama-3.1-8B"), software="fsdp")
    found = export_plan(replace(result.instance, model=None), plan, ONE, Target.TORCHTITAN, 8)
    assert "model" not in json.loads(found.files["torchtitan.json"])
    assert "PIPER_BASE" in found.command
    assert any("set PIPER_BASE to your own config function" in note for note in found.notes)


def test_another_model_s_folder_is_refused() -> None:
    result, plan = planned(of_published("Llama-3.1-8B"), software="fsdp")
    document = documents(result.instance, plan)
    again = import_plan(result.instance, json.dumps(document), RunAs())
    assert (again.plan, again.notes) == (plan, ())
    document["model"]["layers"]["hidden_dim"] += 1
    with pytest.raises(UsageError, match=r"model\.layers\.hidden_dim: 14337; the workload's is 14336"):
        import_plan(result.instance, json.dumps(document), RunAs())


def test_products_of_8_bits_are_torchtitan_s_own(tmp_path: Path) -> None:
    """Rowwise before Blackwell, by blocks of 32 there; experts, too, and neither head nor routers."""
    folders = []
    for name, gpu in (("Qwen3-30B-A3B", "H100-SXM"), ("Qwen3-30B-A3B", "B200"), ("Llama-3.1-8B", "H100-SXM")):
        result, plan = planned(of_published(name), software="fsdp", precision="fp8")
        assert result.instance.model is not None
        instance = replace(result.instance, model=replace(result.instance.model, gpu=gpu))
        folders.append(tmp_path / f"{name}-{gpu}")
        export_plan(instance, plan, ONE, Target.TORCHTITAN, 8).write(folders[-1])
    hopper, blackwell, dense = runtime_says("torchtitan", *(("torchtitan_converters", x, 5) for x in folders))
    assert [name for name, _ in hopper] == ["Float8LinearConverter.Config", "Float8GroupedExpertsConverter.Config"]
    assert [name for name, _ in blackwell] == ["MXFP8LinearConverter.Config", "MXFP8GroupedExpertsConverter.Config"]
    assert [name for name, _ in dense] == ["Float8LinearConverter.Config"]
    assert dense[0][1]["filter_fqns"] == ["lm_head", "router.gate"]
    assert blackwell[0][1]["fqns"] == ["attention", "feed_forward", "shared_experts"]
    assert all(settings["model_compile_enabled"] for _, settings in (*hopper, *blackwell, *dense))


class Fields(types.SimpleNamespace):
    """A section of a config."""


def titan_config(training: dict[str, object], parallelism: dict[str, object]) -> Any:
    section = dict.fromkeys(("enable", "components", "enable_async_tensor_parallel"))
    model = types.SimpleNamespace(layers=[None] * 5)
    common = dict.fromkeys(("disable_cuda_graphs", "dtype", "mixed_precision_param", "mixed_precision_reduce"))
    return types.SimpleNamespace(
        model_spec=types.SimpleNamespace(model=model),
        training=Fields(**common, **training),
        parallelism=Fields(
            **parallelism,
            **dict.fromkeys(
                f"{name}_degree"
                for name in (
                    "pipeline_parallel", "data_parallel_replicate", "data_parallel_shard", "tensor_parallel",
                    "context_parallel",
                )
            ),
            enable_sequence_parallel=None,
            pipeline_parallel_schedule=None,
            module_fqns_per_model_part=None,
        ),
        compile=Fields(**section),
        activation_checkpoint="as it was",
    )  # fmt: skip


def test_fields_have_the_names_of_the_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchtitan 0.3 counts samples, its main branch tokens; another version is refused."""
    result, plan = planned(of_published("Llama-3.1-8B"), software="fsdp", samples=2)
    exported(tmp_path, result, plan)
    module = imported(tmp_path / "piper_plan.py")
    samples, tokens = result.instance.microbatches * 2, result.instance.batch.tokens_per_sample
    assert tokens is not None
    local = samples // 8
    old = module.apply(
        titan_config(
            {"local_batch_size": 8, "global_batch_size": -1, "seq_len": 2048},
            {"pipeline_parallel_microbatch_size": 1},
        )
    )
    assert (old.training.local_batch_size, old.training.global_batch_size) == (local, samples)
    assert (old.training.seq_len, old.parallelism.pipeline_parallel_microbatch_size) == (tokens, 2)
    assert old.activation_checkpoint is None
    new = module.apply(
        titan_config(
            {"num_tokens_per_microbatch_per_dp_rank": 1, "num_tokens_per_train_step": -1, "max_context_length": 2048},
            {"num_pp_microbatches": 1},
        )
    )
    assert new.training.num_tokens_per_microbatch_per_dp_rank == 2 * tokens
    assert (new.training.num_tokens_per_train_step, new.training.max_context_length) == (samples * tokens, tokens)
    assert new.parallelism.num_pp_microbatches == local // 2
    assert not hasattr(new.training, "seq_len")
    other = types.ModuleType("torchtitan")
    vars(other)["__version__"] = "9.9"
    monkeypatch.setitem(sys.modules, "torchtitan", other)
    with pytest.raises(ValueError, match=r"torchtitan 9\.9 is not the one .* it has no parallelism\.pipeline_parallel"):
        module.apply(titan_config({}, {}))
