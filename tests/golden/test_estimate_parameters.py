"""Parameter counts by formula against published ones.

An exact count is that of the published checkpoint or of its reference implementation (Hugging Face transformers,
torchvision); a rounded one is the paper's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from piper_ray.model.errors import UsageError
from piper_ray.workloads.estimate.config import known_models, read_model
from piper_ray.workloads.estimate.families import Microbatch
from tests.data import published_models
from tests.estimate_support import model_of

LLAMA = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000}
BERT = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
EXACT: list[tuple[str, str, int, dict[str, Any]]] = [
    # name, model type, parameters, config
    ("gpt2", "gpt2", 124_439_808, {"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}),
    ("gpt-neox-20b", "gpt_neox", 20_554_567_680,
     {"hidden_size": 6144, "num_hidden_layers": 44, "num_attention_heads": 64, "intermediate_size": 24576,
      "vocab_size": 50432}),
    ("llama-2-7b", "llama", 6_738_415_616, {**LLAMA, "intermediate_size": 11008}),
    ("mistral-7b-v0.1", "mistral", 7_241_732_096, {**LLAMA, "intermediate_size": 14336, "num_key_value_heads": 8}),
    ("qwen2-7b", "qwen2", 7_615_616_512,
     {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
      "intermediate_size": 18944, "vocab_size": 152064}),
    ("qwen3-8b", "qwen3", 8_190_735_360,
     {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
      "intermediate_size": 12288, "vocab_size": 151936}),
    ("deepseek-v2", "deepseek_v2", 235_741_434_880,
     {"hidden_size": 5120, "num_hidden_layers": 60, "num_attention_heads": 128, "intermediate_size": 12288,
      "moe_intermediate_size": 1536, "n_routed_experts": 160, "n_shared_experts": 2, "num_experts_per_tok": 6,
      "q_lora_rank": 1536, "vocab_size": 102400}),
    ("deepseek-v2-lite", "deepseek_v2", 15_706_484_224,
     {"hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16, "intermediate_size": 10944,
      "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
      "q_lora_rank": None, "vocab_size": 102400}),
    ("bert-base, for pretraining", "bert", 110_106_428, {**BERT, "vocab_size": 30522}),
    ("roberta-base, for masked words", "roberta", 124_697_433,
     {**BERT, "vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1}),
    ("t5-base", "t5", 222_903_552,
     {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "vocab_size": 32128}),
    ("t5-v1.1-base", "t5", 247_577_856,
     {"d_model": 768, "d_kv": 64, "d_ff": 2048, "num_layers": 12, "num_heads": 12, "vocab_size": 32128,
      "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    ("vit-base-patch16-224", "vit", 86_567_656, BERT),
    ("clip-vit-base-patch32", "clip", 151_277_313, {}),
    ("resnet-18", "resnet", 11_689_512,
     {"layer_type": "basic", "hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2]}),
]  # fmt: skip

KNOWN: list[tuple[str, float, float]] = [
    # built-in name, parameters, relative tolerance: 0 where the count is exact, 0.5 % where the paper rounds
    ("gpt3-175b", 175.0e9, 0.005),  # Brown et al. 2020, table 2.1
    ("llama3-8b", 8_030_261_248, 0),
    ("llama3-70b", 70_553_706_496, 0),
    ("llama3-405b", 405_853_388_800, 0),
    ("mixtral-8x7b", 46_702_792_704, 0),
    ("mixtral-8x22b", 140_620_634_112, 0),
    ("deepseek-v3", 671.0e9, 0.005),  # DeepSeek-V3, 2024, section 4.2, without the extra predictor
    ("bert-large", 336_226_108, 0),
    ("t5-11b", 11_307_321_344, 0),
    ("vit-22b", 21_743e6, 0.005),  # Dehghani et al. 2023, table 1
    ("clip-vit-l-14", 427_616_513, 0),
    ("imagebind-huge", 1.2e9, 0.005),  # Girdhar et al. 2023, of the code's imagebind_huge
    ("resnet50", 25_557_032, 0),
    ("inception-v3", 23_834_568, 0),  # without the auxiliary classifier
]


@pytest.mark.parametrize(("name", "model_type", "expected", "config"), EXACT, ids=[row[0] for row in EXACT])
def test_published_checkpoints(name: str, model_type: str, expected: int, config: dict[str, Any]) -> None:
    model = model_of(model_type, **config)
    assert model.architecture(Microbatch(2, model.tokens)).parameters == expected, name


PUBLISHED = published_models()


def test_published_models(tmp_path: Path) -> None:
    """Read as a config.json is, with the defaults of its family."""
    path = tmp_path / "config.json"
    for name, entry in PUBLISHED.items():
        path.write_text(json.dumps(entry["config"]), encoding="utf-8")
        model = read_model(str(path))
        found = model.architecture(Microbatch(1, model.tokens)).parameters
        within = 0.0 if entry.get("exact") else entry.get("within", 0.005)
        assert abs(found - entry["parameters"]) <= within * entry["parameters"], name


def test_ids_of_the_hub() -> None:
    for name, entry in known_models().items():
        for hub_id in entry.get("ids", ()):
            assert entry["source"], name
            assert read_model(hub_id).name == name
            assert read_model(hub_id.lower()).document == read_model(name).document


def test_twenty_models_of_today_are_known() -> None:
    assert sum("parameters" in entry for entry in known_models().values()) >= 20


def test_other_ids_are_read_from_where_the_hub_s_tools_keep_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UsageError, match=r"`hf download some/Model-7B config.json` brings it there"):
        read_model("some/Model-7B")
    kept = tmp_path / "models--some--Model-7B"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("abc123\n")
    (kept / "snapshots" / "abc123").mkdir(parents=True)
    (kept / "snapshots" / "abc123" / "config.json").write_text(
        json.dumps({"model_type": "llama", "intermediate_size": 11008, **LLAMA})
    )
    found = read_model("some/Model-7B")
    assert found.name == "Model-7B"
    assert found.architecture(Microbatch(1, 512)).parameters > 1e9


@pytest.mark.parametrize(("name", "expected", "tolerance"), KNOWN, ids=[row[0] for row in KNOWN])
def test_known_models(name: str, expected: float, tolerance: float) -> None:
    model = read_model(name)
    found = model.architecture(Microbatch(model.samples, model.tokens)).parameters
    assert abs(found - expected) <= tolerance * expected


def test_tied_weights_count_once_but_lie_in_both_layers() -> None:
    config = {**LLAMA, "intermediate_size": 11008}
    untied, tied = (model_of("llama", **config, tie_word_embeddings=tied) for tied in (False, True))
    before, after = (model.architecture(Microbatch(1, 512)) for model in (untied, tied))
    assert before.parameters - after.parameters == 32000 * 4096
    assert [node.kind.parameters for node in before.nodes] == [node.kind.parameters for node in after.nodes]
