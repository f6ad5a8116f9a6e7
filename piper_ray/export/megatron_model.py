"""A decoder as arguments of Megatron-LM's ``pretrain_gpt.py``, or the reasons why they cannot express it.

Names and meanings are those of Megatron-LM 0.16 to 0.20. Everything that changes a model's parameters or its work must
be expressed exactly, or the model is refused; otherwise Megatron would silently train another one.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from piper_ray.export.files import Target
from piper_ray.export.flags import Settings, Value, true_ones
from piper_ray.export.training import require_decoder
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import TrainedModel
from piper_ray.workloads.estimate.architectures.experts import Experts
from piper_ray.workloads.estimate.architectures.rules import LAYER_NORM
from piper_ray.workloads.estimate.decoder_shape import DecoderShape

_GELUS = frozenset({"gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh"})
_SWIGLU_LIMIT = 7.0
_SQUARED = "squared_relu"
_AUXILIARY_LOSS = 1e-3
_FIXED_STRETCHING = {
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    "yarn": {"beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 4096},
}
"""Figures of a stretching that are constants in Megatron, by its kind."""

_UNSAID = {"scale_attn_by_inverse_layer_idx": False, "router_jitter_noise": 0.0}
"""Keys of configs that no argument expresses, with their usual values."""


def require_megatron_model(model: TrainedModel) -> DecoderShape:
    """The decoder, for all exports to Megatron. Raises UsageError with every reason why Megatron cannot build it."""
    return require_decoder(model, Target.MEGATRON, _reasons)


def require_flagscale_model(model: TrainedModel) -> DecoderShape:
    """A decoder that FlagScale's Megatron builds. Raises UsageError for others."""
    shape = require_megatron_model(model)
    if shape.config.predictors:
        raise UsageError(
            "FlagScale's hetero_pipeline_layer_split counts decoder layers alone, and this model predicts further "
            "tokens (one whose config has num_nextn_predict_layers = 0 does not)"
        )
    return shape


def _reasons(shape: DecoderShape) -> Iterator[str]:
    rules = shape.rules
    if rules.norms != "before" or rules.parallel_norms or rules.embedding_norm or rules.norm not in ("h", LAYER_NORM):
        yield "its norms stand elsewhere than before attention and the feed-forward part"
    if not rules.rotary and not rules.positions:
        yield "its positions are neither rotary nor learned"
    if _biases(shape) not in _BIASES or rules.head_bias:
        yield "its biases are neither those of all products, nor of queries, keys and values, nor none"
    if _activation(shape) is None:
        gated = "gated " if rules.gated else ""
        yield f"Megatron-LM has no flag for its {gated}activation function {shape.activation}"
    if len(set(filter(None, shape.windows))) > 1:
        yield "its layers have sliding windows of several sizes"


def require_divided(shape: DecoderShape, t: int, each: int) -> None:
    """Raises UsageError for a size of its feed-forward parts that devices do not divide; Megatron would only refuse it
    when it builds them. t: devices of a replica's layers; each: devices of an expert."""
    experts = shape.experts
    sizes = [("intermediate size", shape.config.inner, t)]
    if experts is not None:
        sizes += [("experts' intermediate size", experts.inner, each), ("shared experts' size", experts.shared, t)]
    for what, size, devices in sizes:
        if size and size % devices:
            raise UsageError(f"Megatron divides no {what} of {size} by tensor parallelism {devices}")


_BIASES = {(False, False, False): ("disable_bias_linear",), (True, True, True): (),
           (True, False, False): ("disable_bias_linear", "add_qkv_bias")}  # fmt: skip
"""The switches for biases: of queries, keys and values, of attention's output, and of the feed-forward part."""


def _biases(shape: DecoderShape) -> tuple[bool, bool, bool]:
    """Whether there are biases of queries, keys and values, of attention's output, and of the feed-forward part."""
    rules, experts = shape.rules, shape.experts
    return rules.query_bias, rules.output_bias, rules.inner_bias if experts is None else experts.bias


def _activation(shape: DecoderShape) -> tuple[str, ...] | None:
    """The switches of the activation function; None if Megatron-LM does not have it."""
    if shape.model_type == "gpt_oss":
        return ("quick_geglu",)
    if shape.rules.gated:
        return ("swiglu",) if shape.activation in ("silu", "swish", "swiglu") else None
    if shape.activation in ("relu2", "squared_relu"):
        return (_SQUARED,)
    return () if shape.activation in _GELUS else None


def model_settings(shape: DecoderShape) -> Settings:
    """The arguments that determine the model, except its number of layers. Call ``require_megatron_model`` first."""
    config, rules = shape.config, shape.rules
    hidden_dropout, attention_dropout = shape.dropout
    found: dict[str, Value] = {
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.inner,
        "num_attention_heads": config.num_attention_heads,
        **_attention(shape),
        "max_position_embeddings": config.most_tokens,
        **_positions(shape),
        "normalization": "LayerNorm" if rules.norm == LAYER_NORM else "RMSNorm",
        "norm_epsilon": shape.norm_epsilon or 1e-5,
        **dict.fromkeys(_activation(shape) or (), True),
        **dict.fromkeys(_BIASES[_biases(shape)], True),
        "no_bias_gelu_fusion": _activation(shape) == (_SQUARED,),  # Megatron has no fused one of it
        "untie_embeddings_and_output_weights": not config.tied,
        "qk_layernorm": bool(rules.query_norm) or shape.latent is not None,
        "hidden_dropout": hidden_dropout,
        "attention_dropout": attention_dropout,
        "vocab_size": config.vocab_size,
    }
    if shape.model_type == "gpt_oss":
        found |= {"glu_linear_offset": 1.0, "activation_func_clamp_value": _SWIGLU_LIMIT, "softmax_type": "learnable"}
    if (experts := shape.experts) is not None:
        found |= _experts(shape, experts)
    return true_ones(found)


def _attention(shape: DecoderShape) -> dict[str, Value]:
    if (latent := shape.latent) is not None:
        ranks: dict[str, Value] = {} if latent.query_rank is None else {"q_lora_rank": latent.query_rank}
        return {
            "multi_latent_attention": True,
            **ranks,
            "kv_lora_rank": latent.rank,
            "qk_head_dim": latent.plain_size,
            "qk_pos_emb_head_dim": latent.rotary_size,
            "v_head_dim": latent.value_size,
        }
    config = shape.config
    found: dict[str, Value] = {"kv_channels": config.head_size}
    if config.key_heads != config.num_attention_heads:
        found |= {"group_query_attention": True, "num_query_groups": config.key_heads}
    if any(shape.windows):
        found["window_size"] = f"{next(filter(None, shape.windows)) - 1},0"
        if not all(shape.windows):
            found["window_attn_skip_freq"] = _runs([int(bool(window)) for window in shape.windows])
    return found


def _positions(shape: DecoderShape) -> dict[str, Value]:
    rotary = shape.rotary
    if rotary is None:
        return {"position_embedding_type": "learned_absolute"}
    found: dict[str, Value] = {"position_embedding_type": "rope", "rotary_base": int(rotary.base)}
    kind, factor = rotary.kind, rotary.scaling.get("factor")
    if rotary.share != 1.0:
        found["rotary_percent"] = rotary.share
    if shape.latent and (kind != "yarn" or not isinstance(factor, (int, float))):
        found["rope_type"] = "rope"
    elif shape.latent and isinstance(factor, (int, float)):
        found |= {"rope_type": "yarn", "rotary_scaling_factor": float(factor)}
        for key in ("mscale", "mscale_all_dim"):
            value = rotary.scaling.get(key)
            found |= {key: float(value)} if isinstance(value, (int, float)) else {}
    elif kind == "llama3" and isinstance(factor, (int, float)):
        found |= {"use_rope_scaling": True, "rope_scaling_factor": float(factor)}
    elif kind == "linear" and isinstance(factor, (int, float)) and float(factor).is_integer():
        found["rotary_seq_len_interpolation_factor"] = int(factor)
    return found


def unsaid(shape: DecoderShape) -> Iterator[str]:
    """Sentences on stretched rotary positions, scaled scores or routers that no argument expresses; they change no
    time."""
    rotary = shape.rotary
    kind = "default"
    if rotary is not None:
        kind = rotary.kind
        said = {"rope_scaling_factor", "rotary_scaling_factor", "rotary_seq_len_interpolation_factor"}
        if kind != "default" and not said & _positions(shape).keys():
            yield f"the config stretches rotary positions ({kind}), which pretrain_gpt.py has no argument for: left out"
            kind = "default"
        for key, own in _FIXED_STRETCHING.get(kind, {}).items():
            value = rotary.scaling.get(key, own)
            if value != own:
                yield f"the config's {key} is {value}, Megatron's {own:g}, which pretrain_gpt.py has no argument for"
    for key, usual in _UNSAID.items():
        if (value := shape.said(key)) is not None and value != usual:
            yield f"the config's {key} is {value}, which pretrain_gpt.py has no argument for: left out"


def _experts(shape: DecoderShape, experts: Experts) -> dict[str, Value]:
    found: dict[str, Value] = {
        "num_experts": experts.count,
        "moe_router_topk": experts.per_token,
        "moe_ffn_hidden_size": experts.inner,
        "moe_grouped_gemm": True,
    }
    dense = [int(isinstance(part, Experts)) for part in shape.feeding]
    if not all(dense):
        found["moe_layer_freq"] = _runs(dense)
    if experts.shared:
        found["moe_shared_expert_intermediate_size"] = experts.shared
        found["moe_shared_expert_gate"] = experts.shared_gate
    return found | _router(shape)


def _router(shape: DecoderShape) -> dict[str, Value]:
    """How tokens choose experts, as in the model's own code; it changes no time."""
    found: dict[str, Value] = {}
    if shape.router_scale != 1.0:
        found["moe_router_topk_scaling_factor"] = shape.router_scale
    if shape.router_groups is not None:
        found["moe_router_num_groups"], found["moe_router_group_topk"] = shape.router_groups
    if shape.sigmoid_router:
        return found | {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_load_balancing_type": "none",
        }
    if not shape.renormalised_router:
        found["moe_router_pre_softmax"] = True
    coefficient = shape.said("router_aux_loss_coef")
    return found | {
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": float(coefficient) if isinstance(coefficient, (int, float)) else _AUXILIARY_LOSS,
    }


def _runs(pattern: list[int]) -> str:
    """A list in the form that Megatron evaluates: ``([0]*3+[1]*58)``."""
    runs = [(value, len(list(same))) for value, same in groupby(pattern)]
    return f"({'+'.join(f'[{value}]*{count}' for value, count in runs)})"
