"""Which model a workload trains: written, read back, and told where it is wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import piper_ray
from piper_ray.model.errors import InputError
from piper_ray.model.instance import TrainedModel
from piper_ray.workloads.estimate.decoder_shape import decoder_shape
from tests.estimate_support import estimated, model_of
from tests.report_cases import small_instance

ODD = TrainedModel(
    config={
        "model_type": "gemma3_text",
        "sliding_window": None,
        "rope_scaling": {"factor": 8.0, "rope type": "linear"},
        "layer_types": ["a", 'b"'],
        "tie_word_embeddings": True,
    },
    precision="fp8",
    lora_rank=16,
    fused_attention=False,
    gradient_bytes=2.0,
)


CONFIG = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 100,
    "moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts": 8, "num_local_experts": 8,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "first_k_dense_replace": 1, "num_key_value_heads": 2, "q_lora_rank": None,
}  # fmt: skip
"""Of a small mixture of experts, in the words of several families."""


@pytest.mark.parametrize("name", ["small.toml", "small.json"])
def test_it_is_written_and_read_back(tmp_path: Path, name: str) -> None:
    instance = replace(small_instance(), model=ODD)
    piper_ray.dump(instance, tmp_path / name)
    found = piper_ray.load(tmp_path / name)
    assert found.model == ODD
    assert found == instance
    assert found.digest == small_instance().digest  # no plan depends on it


def test_an_estimate_says_what_it_is_of() -> None:
    model = model_of(
        "llama", tokens=512, hidden_size=256, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512,
        vocab_size=100, rope_theta=500000.0, id2label={"0": "a"},
    )  # fmt: skip
    instance = estimated(model, "h100-sxm", precision="fp8", software="nemo", lora=8).instance
    found = instance.model
    assert found is not None
    assert (found.precision, found.software, found.gpu, found.lora_rank) == ("fp8", "nemo", "H100-SXM", 8)
    assert (found.weight_bytes, found.gradient_bytes, found.optimizer_bytes) == (2.0, 4.0, 12.0)
    assert found.config["rope_theta"] == 500000.0
    assert instance.replace(devices=4).model == found


ROUTERS: list[tuple[dict[str, object], bool, bool]] = [
    ({"model_type": "deepseek_v3"}, True, True),
    ({"model_type": "deepseek_v3", "scoring_func": "softmax", "norm_topk_prob": False}, False, False),
    ({"model_type": "glm4_moe"}, True, True),
    ({"model_type": "deepseek_v2", "scoring_func": "softmax"}, False, False),
    ({"model_type": "qwen3_moe"}, False, False),
    ({"model_type": "qwen3_moe", "scoring_func": "sigmoid", "norm_topk_prob": True}, True, True),
    ({"model_type": "mixtral"}, False, True),
]


@pytest.mark.parametrize(("said", "sigmoid", "renormalised"), ROUTERS)
def test_a_router_is_as_the_config_says_or_as_its_family_has_it(
    said: dict[str, object], sigmoid: bool, renormalised: bool
) -> None:
    known = decoder_shape(TrainedModel(CONFIG | said))
    assert known is not None
    assert (known.sigmoid_router, known.renormalised_router) == (sigmoid, renormalised)


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ("3", "model: not an object"),
        ('{ precison = "bf16" }', "model.precison: unknown key; expected one of config"),
        ("{ config = 3 }", "model.config: not an object"),
        ("{ config = { a = 2020-01-01 } }", "model.config.a"),
        ("{ config = { a = [[[[[[[[1]]]]]]]] } }", "model.config.a"),
        ("{ lora_rank = -1 }", "model.lora_rank"),
        ("{ gradient_bytes = -1 }", "model.gradient_bytes"),
    ],
)
def test_what_is_wrong_is_told(tmp_path: Path, table: str, told: str) -> None:
    path = tmp_path / "w.toml"
    piper_ray.dump(small_instance(), path)
    path.write_text(f"model = {table}\n" + path.read_text())
    with pytest.raises(InputError) as error:
        piper_ray.load(path)
    assert told in str(error.value)
