"""LoRA: what is trained, kept and computed, against counts by hand and against the model itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import piper_ray
from piper_ray.cli.app import app
from piper_ray.workloads.estimate.build import EstimateRequest, estimate
from piper_ray.workloads.estimate.config import model_names, read_model
from piper_ray.workloads.estimate.hardware import load_hardware
from piper_ray.workloads.estimate.modes import LayerMode
from tests.estimate_support import estimated, kind_of, model_of
from tests.lengths import long_after

LLAMA3 = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192,
}  # fmt: skip


def test_llama_3_8b_with_rank_16_trains_what_peft_counts() -> None:
    """print_trainable_parameters for target_modules="all-linear": 41,943,040 of 8,072,204,288."""
    architecture = estimated(model_of("llama", **LLAMA3), "H100-SXM", lora=16).architecture
    assert architecture.parameters == 8_072_204_288
    assert architecture.trained_parameters == 41_943_040


def test_each_expert_and_the_router_have_adapters() -> None:
    config = {**LLAMA3, "num_local_experts": 8, "num_experts_per_tok": 2}
    result = estimated(model_of("mixtral", **config), "H100-SXM", lora=4)
    attention = (4096 + 4096) * 2 + (4096 + 1024) * 2
    experts = 8 * 3 * (4096 + 14336) + 4096 + 8
    kind = kind_of(result)
    assert kind.parameters - kind.frozen_parameters == 4 * (attention + experts)


def test_state_gradients_and_times_of_a_layer() -> None:
    model = model_of("llama", **LLAMA3)
    own, adapted = estimated(model, "H100-SXM"), estimated(model, "H100-SXM", lora=16)
    mode = LayerMode(degree=1)
    before, after = own.costs(kind_of(own), mode), adapted.costs(kind_of(adapted), mode)
    trained = 16 * 81_920
    assert after.gradient_bytes == 4 * trained
    assert after.state_bytes == 2 * (before.parameters + trained) + 16 * trained
    assert after.passes.forward_s > before.passes.forward_s
    assert after.passes.backward_s < 0.8 * before.passes.backward_s  # no gradients of the model's own weights
    assert after.passes.weight_s < 0.2 * before.passes.weight_s
    assert before.trained == before.parameters


@pytest.mark.parametrize("name", long_after(3, model_names()))
def test_every_model_can_have_adapters(name: str) -> None:
    result = estimate(read_model(name), load_hardware(), "H100-SXM", EstimateRequest(nodes=1, lora=8))
    assert 0 < result.architecture.trained_parameters < 0.05 * result.architecture.parameters


def test_the_option_says_what_is_trained(tmp_path: Path) -> None:
    config, out = tmp_path / "tiny.json", tmp_path / "tiny.toml"
    config.write_text(json.dumps({**LLAMA3, "model_type": "llama"}), encoding="utf-8")
    arguments = ["estimate", str(config), "--gpu", "H100-SXM", "--nodes", "1", "--lora", "16"]
    result = CliRunner().invoke(app, [*arguments, "-o", str(out)])
    assert (result.exit_code, result.stderr) == (0, "")
    assert "8,072,204,288 parameters, 41,943,040 of them trained" in result.output
    assert "2 bytes a parameter and 16 more a trained one" in out.read_text()
    explained = CliRunner().invoke(app, [*arguments, "--explain", "decoder-layer"]).output
    assert "LoRA of queries, keys, values: 3 L h + L a d + L 2 g d = 3*16*4096 + 16*32*128 + 16*2*8*128" in explained
    assert " trained x (4 gradients + 12 optimizer)" in explained
    assert piper_ray.estimate(config, "h100", lora=16).digest == piper_ray.load(out).digest
