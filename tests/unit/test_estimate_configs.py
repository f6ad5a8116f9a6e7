"""Configs as people have them: keys under other names, nulls, parts, families that nobody told of; and their layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from piper_ray.model.errors import InputError
from piper_ray.workloads.estimate.config import ModelConfig, read_model
from piper_ray.workloads.estimate.families import Microbatch
from piper_ray.workloads.estimate.memory import parameters_on_device
from piper_ray.workloads.estimate.modes import LayerMode
from piper_ray.workloads.estimate.operators import Architecture
from tests.estimate_support import estimated, kind_of, model_of

SHAPE: dict[str, Any] = {
    "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 2,
    "intermediate_size": 640, "vocab_size": 1000,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "num_key_value_heads": 8,
}  # fmt: skip


def read(folder: Path, document: dict[str, Any]) -> ModelConfig:
    path = folder / "model.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    return read_model(str(path))


def layers(model: ModelConfig, tokens: int = 64) -> Architecture:
    return model.architecture(Microbatch(1, tokens))


def parameters(folder: Path, document: dict[str, Any]) -> int:
    return layers(read(folder, document)).parameters


def test_keys_under_other_names(tmp_path: Path) -> None:
    """As llm-foundry, Megatron and Llama's own code call them."""
    names = {
        "hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
        "num_key_value_heads": "n_kv_heads", "intermediate_size": "ffn_hidden_size", "vocab_size": "padded_vocab_size",
    }  # fmt: skip
    renamed = {names[key]: value for key, value in SHAPE.items()}
    assert parameters(tmp_path, renamed) == parameters(tmp_path, {"model_type": "llama", **SHAPE})


def test_null_is_as_good_as_missing(tmp_path: Path) -> None:
    nulls = {"head_dim": None, "attention_bias": None, "tie_word_embeddings": None, "sliding_window": None}
    llama = {"model_type": "llama", **SHAPE}
    assert parameters(tmp_path, {**llama, **nulls}) == parameters(tmp_path, llama)


def test_null_means_something_where_it_may_stand(tmp_path: Path) -> None:
    """DeepSeek-V2 has queries of low rank unless its config says that it has not."""
    shape = {**SHAPE, **EXPERTS, "model_type": "deepseek_v2"}
    for change, low_rank in (({}, True), ({"q_lora_rank": None}, False)):
        operators = layers(read(tmp_path, {**shape, **change})).kinds[1].operators
        assert any("Q" in operator.parameters.split() for operator in operators) == low_rank


@pytest.mark.parametrize("spelling", ["GPT-NeoX", "gpt_neox", "GPTNeoX"])
def test_the_type_is_known_in_any_spelling(tmp_path: Path, spelling: str) -> None:
    model = read(tmp_path, {"model_type": spelling, **SHAPE})
    assert model.notes == ()
    assert layers(model).nodes[0].path == "gpt_neox.embed_in"


def test_the_class_tells_the_family_where_no_type_is(tmp_path: Path) -> None:
    model = read(tmp_path, {"architectures": ["Qwen2MoeForCausalLM"], **SHAPE, **EXPERTS})
    assert model.notes == ()
    assert layers(model).parameters == parameters(tmp_path, {"model_type": "qwen2_moe", **SHAPE, **EXPERTS})


def test_whole_numbers_may_have_a_point(tmp_path: Path) -> None:
    llama = {"model_type": "llama", **SHAPE}
    assert parameters(tmp_path, {**llama, "hidden_size": 256.0}) == parameters(tmp_path, llama)


def test_a_missing_vocabulary_is_the_family_s_with_a_note(tmp_path: Path) -> None:
    model = read(tmp_path, {"model_type": "gemma2", **{key: SHAPE[key] for key in SHAPE if key != "vocab_size"}})
    assert model.notes == (f"{tmp_path / 'model.json'}: vocab_size is missing; 256,000 taken, as the family has it",)
    assert layers(model).nodes[0].kind.parameters == 256_000 * 256


@pytest.mark.parametrize(
    ("keys", "same"),
    [
        ({"rms_norm_eps": 1e-6}, {"model_type": "llama"}),
        ({"qkv_bias": True}, {"model_type": "qwen2"}),
        ({"attention_bias": True, "mlp_bias": True}, {"model_type": "llama", "attention_bias": True, "mlp_bias": True}),
        ({"use_qk_norm": True}, {"model_type": "qwen3", "head_dim": 32}),
        ({"layer_norm_eps": 1e-5, "hidden_act": "gelu", "rope_theta": 1e4}, {"model_type": "starcoder2"}),
        (
            {"hidden_act": "relu2", "layer_norm_eps": 1e-5, "use_bias": False, "tie_word_embeddings": False},
            {"model_type": "nemotron"},
        ),
        (EXPERTS, {"model_type": "mixtral", **EXPERTS, "intermediate_size": 96}),
        ({**EXPERTS, **LATENT}, {"model_type": "deepseek_v3", **EXPERTS, **LATENT, "q_lora_rank": None}),
    ],
)
def test_an_unknown_family_is_what_its_keys_tell(tmp_path: Path, keys: dict[str, Any], same: dict[str, Any]) -> None:
    """starcoder2 and GPT-2 tie embedding and projection; Llama's line does not."""
    model = read(tmp_path, {**SHAPE, "model_type": "none-such", **keys})
    assert len(model.notes) == 1
    assert 'model_type unknown ("none-such"); taken as a decoder by its keys' in model.notes[0]
    if "model_type" in same and same["model_type"] == "starcoder2":
        same = {**same, "tie_word_embeddings": True}
    assert layers(model).parameters == parameters(tmp_path, {**SHAPE, **same})


@pytest.mark.parametrize(
    "keys",
    [
        {"mamba_d_ssm": 3072, "mamba_d_state": 256, "mamba_n_heads": 24},  # Falcon-H1
        {"linear_num_key_heads": 16, "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention"]},  # Qwen3-Next
        {"layer_types": ["conv", "full_attention"]},  # LFM2
        {"attn_type_list": [0, 0, 0, 1]},  # MiniMax-Text-01
        {"index_n_heads": 64, "index_topk": 2048},  # DeepSeek-V3.2
        {"lru_width": 2560, "conv1d_width": 4},  # RecurrentGemma
        {"hybrid_override_pattern": "M-M*"},
        {"decoder_sparse_step": 2},
        {"encoder_layers": 12},
    ],
)
def test_an_unknown_family_with_other_layers_is_refused(tmp_path: Path, keys: dict[str, Any]) -> None:
    with pytest.raises(InputError) as error:
        read(tmp_path, {**SHAPE, "model_type": "none-such", **keys})
    assert len(error.value.faults) == len(keys)
    for key in keys:
        assert f'{key}: describes layers that are not Llama\'s, and model_type is unknown ("none-such")' in str(
            error.value
        )


@pytest.mark.parametrize(
    "keys",
    [
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"layer_types": None, "mamba_d_ssm": None, "mlp_only_layers": [], "decoder_sparse_step": 1},
        {"pretraining_tp": 1, "auto_map": {}, "attention_multiplier": 0.1},
    ],
)
def test_keys_that_tell_of_no_other_layers_change_nothing(tmp_path: Path, keys: dict[str, Any]) -> None:
    shape = {**SHAPE, "model_type": "none-such"}
    assert parameters(tmp_path, {**shape, **keys}) == parameters(tmp_path, shape)


def test_layers_without_experts_in_an_unknown_family(tmp_path: Path) -> None:
    mixture = {**SHAPE, **EXPERTS, "model_type": "none-such"}
    kinds = ["dense", *["sparse"] * (SHAPE["num_hidden_layers"] - 1)]
    first = parameters(tmp_path, {**mixture, "first_k_dense_replace": 1})
    assert first != parameters(tmp_path, mixture)
    assert parameters(tmp_path, {**mixture, "num_dense_layers": 1}) == first
    assert parameters(tmp_path, {**mixture, "mlp_layer_types": kinds}) == first


@pytest.mark.parametrize("part", ["text_config", "language_config", "llm_config"])
def test_an_unknown_model_of_several_parts_is_its_decoder(tmp_path: Path, part: str) -> None:
    decoder = {"model_type": "qwen2", **SHAPE}
    model = read(tmp_path, {"model_type": "new_vl", part: decoder})
    assert [note.partition(": ")[2] for note in model.notes] == [
        f"a model of several parts; only its {part} is estimated"
    ]
    assert layers(model).parameters == parameters(tmp_path, decoder)


@pytest.mark.parametrize(
    "document",
    [
        {"model_type": "none-such"},
        {"model_type": "new_vit", "hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 4},
        {"_class_name": "FluxTransformer2DModel", "num_layers": 2, "num_attention_heads": 4},
        {},
    ],
)
def test_what_is_no_decoder_is_refused(tmp_path: Path, document: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"model_type: .*; expected one of gpt2.* or the usual keys of a decoder"):
        read(tmp_path, document)


def test_parts_of_qwen2_vl_side_by_side_or_nested(tmp_path: Path) -> None:
    vision = {"model_type": "qwen2_vl", "vision_config": {"depth": 2, "embed_dim": 64, "num_heads": 4}}
    assert parameters(tmp_path, {**vision, **SHAPE}) == parameters(tmp_path, {**vision, "text_config": SHAPE})


@pytest.mark.parametrize(
    ("document", "path"),
    [
        ({"text_config": {**SHAPE, "hidden_size": 0}}, "text_config.hidden_size"),
        ({"text_config": {**SHAPE, "num_attention_heads": 7}}, "text_config.hidden_size"),
        (
            {"text_config": SHAPE, "vision_config": {"hidden_size": 10, "num_attention_heads": 3}},
            "vision_config.hidden_size",
        ),
        ({"text_config": SHAPE, "vision_config": {"image_size": []}}, "vision_config.image_size"),
        ({"text_config": 3}, "text_config"),
    ],
)
def test_faults_of_parts_have_their_path(tmp_path: Path, document: dict[str, Any], path: str) -> None:
    with pytest.raises(InputError) as caught:
        read(tmp_path, {"model_type": "llava", **document})
    assert path in [fault.path for fault in caught.value.faults]


def test_a_fault_is_at_the_key_that_the_config_has(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="n_embd: 10 is no multiple of n_head = 3"):
        read(tmp_path, {"model_type": "gpt2", "n_embd": 10, "n_layer": 2, "n_head": 3})


@pytest.mark.parametrize(
    ("model_type", "keys", "windows"),
    [
        ("gemma2", {"sliding_window": 16}, [16, 0, 16, 0, 16, 0]),
        ("gemma3_text", {"sliding_window": 16}, [16, 16, 16, 16, 16, 0]),
        ("gpt_oss", {"sliding_window": 16, "num_local_experts": 4}, [16, 0, 16, 0, 16, 0]),
        ("cohere2", {"sliding_window": 16}, [16, 16, 16, 0, 16, 16]),
        ("qwen2", {"sliding_window": 16}, [0] * 6),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 4}, [0, 0, 0, 0, 16, 16]),
        ("mistral", {"sliding_window": 16}, [16] * 6),
        ("mistral", {"sliding_window": None}, [0] * 6),
        ("llama4_text", {"attention_chunk_size": 16, "num_local_experts": 4}, [16, 16, 16, 0, 16, 16]),
        ("gpt_neo", {"window_size": 16}, [0, 16, 0, 16, 0, 16]),
        (
            "gemma2",
            {"sliding_window": 16, "layer_types": ["full_attention", "sliding_attention"] * 3},
            [0, 16, 0, 16, 0, 16],
        ),
    ],
)
def test_which_layers_have_a_sliding_window(
    tmp_path: Path, model_type: str, keys: dict[str, Any], windows: list[int]
) -> None:
    model = read(tmp_path, {"model_type": model_type, **SHAPE, **keys})
    assert [node.kind.symbols.get("W", 0) for node in layers(model).nodes[1:-1]] == windows


@pytest.mark.parametrize(("tokens", "window"), [(64, 16), (64, 64), (64, 200), (100, 1)])
def test_attention_computes_what_the_window_and_the_mask_leave(tokens: int, window: int) -> None:
    """Against counting; of each row's last pair the formula has half, as it has of the diagonal without a window."""
    kind = layers(model_of("mistral", **SHAPE, sliding_window=window), tokens).kinds[1]
    core = next(operator for operator in kind.operators if operator.on_chip)
    pairs = sum(min(position + 1, window) for position in range(tokens)) - min(window, tokens) / 2
    for product in core.products:
        rows, columns, depth, count = (
            kind.value(side) for side in (product.rows, product.columns, product.depth, product.count)
        )
        assert rows * columns * depth * count == pytest.approx(pairs * 32 * 8)


def test_keys_and_values_of_fewer_heads_than_devices_are_copied() -> None:
    """2 heads of keys on 8 devices: each has a copy of one, as if there were 8."""
    few, many = (
        estimated(model_of("llama", **{**SHAPE, "num_key_value_heads": heads}), "H100-SXM") for heads in (2, 8)
    )
    assert few.instance.degrees == many.instance.degrees == (1, 2, 4, 8)
    kind, wide = kind_of(few), kind_of(many)
    for degree, heads_of_keys in ((1, 2), (2, 1), (4, 1), (8, 1)):
        attention = 256 * (2 * 8 * 32 // degree + 2 * heads_of_keys * 32)
        held = attention + 3 * 640 * 256 // degree + 2 * 256
        assert parameters_on_device(kind.on(degree), LayerMode(degree=degree)) == held
    assert few.costs(kind, LayerMode(degree=8)) == many.costs(wide, LayerMode(degree=8))
    assert few.costs(kind, LayerMode(degree=2)) != many.costs(wide, LayerMode(degree=2))


def test_heads_of_keys_that_do_not_go_with_the_degree_rule_it_out() -> None:
    shape = {**SHAPE, "num_attention_heads": 24, "num_key_value_heads": 3, "hidden_size": 768}
    assert {mode.degree for mode in estimated(model_of("llama", **shape), "H100-SXM").modes["block"]} == {1}


def test_predictors_of_further_tokens_are_counted_apart() -> None:
    shape = {**SHAPE, **EXPERTS, "first_k_dense_replace": 1, "num_key_value_heads": 8}
    plain, ahead = (layers(model_of("deepseek_v3", **shape, num_nextn_predict_layers=count)) for count in (0, 2))
    assert ahead.parameters == plain.parameters
    assert len(ahead.nodes) == len(plain.nodes) + 2
    block = plain.nodes[-2].kind.parameters
    assert ahead.predictor_parameters == 2 * (block + 2 * 256 * 256 + 3 * 256)
    for architecture, tokens in ((plain, 64), (ahead, 3 * 64)):
        head = architecture.nodes[-1].kind
        assert [head.value(p.rows) for operator in head.operators for p in operator.products] == [tokens]


def test_a_hybrid_s_predictor_is_a_whole_block() -> None:
    """Attention and the last feed-forward part, as no layer of the pattern has both."""
    shape = {**SHAPE, "num_hidden_layers": 4, "hybrid_override_pattern": "M*M-", "mamba_num_heads": 8}
    ahead = layers(model_of("nemotron_h", **shape, num_nextn_predict_layers=1))
    attention, feeding, predictor = (ahead.nodes[place].kind for place in (2, 4, 5))
    assert predictor.name == "predictor"
    joined = 2 * 256 * 256 + 3 * 256
    assert predictor.parameters - predictor.value(predictor.tied) == joined + attention.parameters + feeding.parameters


def test_a_vision_tower_a_projector_and_a_decoder_are_a_chain(tmp_path: Path) -> None:
    tower = {"model_type": "clip_vision_model", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
             "intermediate_size": 128, "image_size": 56, "patch_size": 14}  # fmt: skip
    architecture = layers(read(tmp_path, {"model_type": "llava", "text_config": SHAPE, "vision_config": tower}))
    assert [node.kind.key for node in architecture.nodes] == [
        "vision-embedding", "vision-block", "vision-block", "vision-norm", "projector", "embedding", *["block"] * 6,
        "head",
    ]  # fmt: skip
    assert [node.inputs for node in architecture.nodes] == [(), *((index,) for index in range(12))]
    projector = architecture.nodes[4].kind
    assert projector.value(projector.output) == 2 * 16 * 256
    assert architecture.sample == "1 sequence of 64 tokens, 16 of each from an image"


NEMOTRON: dict[str, Any] = {
    "model_type": "nemotron_h", "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "hidden_size": 2688, "num_hidden_layers": 52, "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128,
    "intermediate_size": 1856, "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
    "n_routed_experts": 128, "num_experts_per_tok": 6, "mamba_num_heads": 64, "mamba_head_dim": 64, "n_groups": 8,
    "ssm_state_size": 128, "vocab_size": 131072,
}  # fmt: skip
"""Nemotron 3 Nano."""


def test_hybrids_have_experts_by_their_pattern(tmp_path: Path) -> None:
    """31.6 billion parameters by its model card; experts have two matrices, as relu2 takes no gate."""
    nano = layers(read(tmp_path, NEMOTRON))
    assert nano.parameters == pytest.approx(31.6e9, rel=0.001)
    assert [kind.name for kind in nano.kinds if kind.experts] == ["feed-forward decoder layer with experts"]


def test_experts_on_a_latent_width_have_less_to_compute_and_to_send(tmp_path: Path) -> None:
    """Nemotron 3 Super projects tokens to a quarter of its width before it sends them to experts: 120.6 billion
    parameters."""
    blocks = "MEMEMEM*E" * 3 + "MEMEMEMEM*E" * 4 + "MEMEMEM*E" + "MEMEMEME"
    wide = {
        **NEMOTRON, "hybrid_override_pattern": blocks, "num_hidden_layers": 88, "hidden_size": 4096,
        "moe_intermediate_size": 2688, "moe_shared_expert_intermediate_size": 5376, "n_routed_experts": 512,
        "num_experts_per_tok": 22, "mamba_num_heads": 128, "moe_latent_size": 1024,
    }  # fmt: skip
    model = read(tmp_path, wide)
    assert layers(model).parameters == pytest.approx(120.6e9, rel=0.001)
    (kind,) = (kind for kind in layers(model).kinds if kind.experts)
    assert kind.value(next(exchange.expert_bytes for exchange in kind.exchanges if exchange.expert_bytes)) == (
        4 * 64 * 22 * 1024
    )


def test_layers_with_experts_need_some(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="n_routed_experts: missing or zero, and some layers have experts"):
        read(tmp_path, {key: value for key, value in NEMOTRON.items() if key != "n_routed_experts"})
