"""A decoder in torchtitan's terms: which of its models, with which sizes, or the reasons why it has none.

Names and meanings are those of torchtitan 0.3 and of its main branch of August 2026, whose builders of layers agree.

Also a found scheme of a PyTorch module as torchtitan's sharding by module path: a Python file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from piper_ray.export.files import Target, rendered
from piper_ray.export.training import require_decoder
from piper_ray.model.instance import TrainedModel
from piper_ray.workloads.estimate.architectures.experts import Experts
from piper_ray.workloads.estimate.architectures.layers import Dense, LatentAttention
from piper_ray.workloads.estimate.config import model_of_config
from piper_ray.workloads.estimate.decoder_shape import DecoderShape, Rotary
from piper_ray.workloads.estimate.families import Microbatch
from piper_ray.workloads.estimate.operators import with_adapters
from piper_ray.workloads.schemes.document import digest_of
from piper_ray.workloads.schemes.scheme import Scheme

Fields = Mapping[str, object]

_LATENT = frozenset({"deepseek_v2", "deepseek_v3", "kimi_k2"})
_GPT_OSS = "gpt_oss"
_GPT_OSS_WINDOW = 128
_GPT_OSS_HEADS = 64, 8, 64
"""The heads of queries, the heads of keys and values, and their size."""
_USUAL_EPSILON = {"mixtral": 1e-5, _GPT_OSS: 1e-5}
"""The epsilon of families whose config does not state it; for all others it is 1e-6."""
_ADAPTED = ("wq", "wkv", "wo", "w1", "w2", "w3")
"""Linear layers of a dense block, by torchtitan's names."""


def require_titan_model(model: TrainedModel) -> DecoderShape:
    """The decoder. Raises UsageError with every reason why torchtitan cannot build it, or train it in the planned
    way."""
    return require_decoder(model, Target.TORCHTITAN, partial(_reasons, model))


def _reasons(model: TrainedModel, shape: DecoderShape) -> Iterator[str]:
    rules, config, experts = shape.rules, shape.config, shape.experts
    if rules.norms != "before" or rules.parallel_norms or rules.embedding_norm or rules.norm != "h":
        yield "it has other norms than RMS norms before attention and before the feed-forward part"
    if not rules.rotary or rules.positions or (shape.rotary is not None and shape.rotary.share != 1.0):
        yield "its positions are not those of rotary heads as a whole"
    if shape.model_type != _GPT_OSS:
        if rules.output_bias or rules.inner_bias or rules.head_bias or (experts is not None and experts.bias):
            yield "it has biases other than those of queries, keys and values"
        if not rules.gated or shape.activation not in ("silu", "swish"):
            yield f"its feed-forward part is no SwiGLU ({shape.activation})"
    yield from _attention_reasons(shape)
    if experts is not None:
        yield from _experts_reasons(shape, experts)
    if any(shape.dropout):
        yield "it has dropout, which torchtitan's models have not"
    if config.predictors:
        yield (
            f"it predicts {config.predictors + 1} tokens at once, and the launch trains it without "
            "(num_nextn_predict_layers = 0 plans so)"
        )
    yield from _training_reasons(model, experts)


def _attention_reasons(shape: DecoderShape) -> Iterator[str]:
    gpt_oss, rotary = shape.model_type == _GPT_OSS, shape.rotary
    windows = shape.windows
    expected = tuple(_GPT_OSS_WINDOW if gpt_oss and layer % 2 == 0 else None for layer in range(len(windows)))
    config = shape.config
    if gpt_oss and (config.num_attention_heads, config.key_heads, config.head_size) != _GPT_OSS_HEADS:
        heads, key_heads, size = _GPT_OSS_HEADS
        yield f"torchtitan's gpt_oss has {heads} heads of {size}, {key_heads} of them of keys and values"
    if windows and windows != expected:
        yield "torchtitan's attention has not its sliding windows"
    if rotary is not None and _scaling(shape, rotary) is None:
        yield f"its rotary positions are stretched in a way that torchtitan has not ({rotary.kind})"


def _experts_reasons(shape: DecoderShape, experts: Experts) -> Iterator[str]:
    sparse = [isinstance(part, Experts) for part in shape.feeding]
    first = sparse.index(True)
    if not all(sparse[first:]) or (first and shape.model_type not in _LATENT):
        yield "layers with experts and layers without take turns"
    if any(part != experts for part in shape.feeding if isinstance(part, Experts)):
        yield "its layers have experts of several sizes"
    if experts.shared_gate:
        yield "its shared experts have a gate"
    if experts.shared % experts.inner or (experts.shared and shape.model_type not in _LATENT):
        yield "torchtitan has not its shared experts"


def _training_reasons(model: TrainedModel, experts: Experts | None) -> Iterator[str]:
    if model.lora_rank and experts is not None:
        yield "its adapters (LoRA) are of linear layers alone, and the plan's of experts, too"
    if model.lora_rank and model.precision == "fp8":
        yield "adapters (LoRA) are planned in fp8, and torchtitan's are in bf16"


OPTIMIZERS = {12.0: "fused", 8.0: "fused_opt_states_bf16"}
"""AdamW's implementation by the bytes of fp32 weights and moments."""


def model_fields(shape: DecoderShape, model: TrainedModel, tokens: int | None) -> Fields:
    """The data from which ``piper_plan.py`` builds the model, and the number of parameters that it must have. Call
    ``require_titan_model`` first. tokens: of a sample."""
    config, rotary = shape.config, shape.rotary
    assert rotary is not None
    latent = shape.latent
    module, usual, builder, layers = _layers(shape, model)
    size = latent.rotary_size if latent is not None else config.head_size
    architecture = model_of_config("model", model.config).architecture(Microbatch(1, tokens, fused=True))
    found: dict[str, object] = {
        "module": module,
        "usual": usual,
        "builder": builder,
        "parameters": architecture.parameters,
        "dim": config.hidden_size,
        "vocab_size": config.vocab_size,
        "tied": config.tied,
        "norm_eps": shape.norm_epsilon or _USUAL_EPSILON.get(shape.model_type, 1e-6),
        "query_bias": shape.rules.query_bias,
        "query_norm": bool(shape.rules.query_norm),
        "layers": layers,
        "rope_class": "CosSinRoPE" if module in ("qwen3", _GPT_OSS) else "ComplexRoPE",
        "rope": {"dim": size, "theta": rotary.base, **(_scaling(shape, rotary) or {})},
        "positions": max(config.most_tokens, tokens or 1),
        "precision": model.precision,
        "optimizer": OPTIMIZERS[model.optimizer_bytes],
    }
    if module == "qwen3" and shape.experts is not None:
        found["route_norm"] = shape.renormalised_router
    if latent is not None:
        found["shared_experts"] = bool(shape.experts and shape.experts.shared)
    if model.precision == "fp8" and model.on_blackwell:
        found["precision"] = "mxfp8"
    if model.lora_rank:
        adapted = with_adapters(architecture, model.lora_rank)
        found |= {"lora_rank": model.lora_rank, "trained": adapted.trained_parameters, "adapted": list(_ADAPTED)}
    return found


def _layers(shape: DecoderShape, model: TrainedModel) -> tuple[str, str, str, dict[str, object]]:
    """torchtitan's module, its config of usual figures, the function that builds layers, and the arguments of that
    function."""
    config, experts = shape.config, shape.experts
    common: dict[str, object] = {"n_layers": config.layers, "dim": config.hidden_size, "attn_backend": "flex"}
    if (latent := shape.latent) is not None:
        return "deepseek_v3", "deepseek_v3_16b", "_build_dsv3_layers", common | _latent(shape, latent, experts)
    if shape.model_type == _GPT_OSS and experts is not None:
        sizes = {"hidden_dim": experts.inner, "num_experts": experts.count, "top_k": experts.per_token}
        return _GPT_OSS, "gpt_oss_20b", "_build_gptoss_layers", common | sizes | _COMMUNICATION | _BALANCE
    heads = {"n_heads": config.num_attention_heads, "n_kv_heads": config.key_heads, "fuse_qkv": not model.lora_rank}
    if experts is not None:
        sizes = {"moe_hidden_dim": experts.inner, "num_experts": experts.count, "top_k": experts.per_token}
        found = common | heads | {"head_dim": config.head_size} | sizes | _COMMUNICATION
        return "qwen3", "qwen3_30b_a3b", "_build_qwen3_moe_layers", found
    found = common | heads | {"hidden_dim": config.inner}
    if _plain_heads(shape):
        return "llama3", "llama3_8b", "_build_llama3_layers", found
    return "qwen3", "qwen3_14b", "_build_qwen3_layers", found | {"head_dim": config.head_size}


BACKEND = "moe_comm_backend"
"""The argument of builders of layers that states how tokens reach experts."""

_COMMUNICATION: dict[str, object] = {BACKEND: "standard", "non_blocking_capacity_factor": None}
_BALANCE: dict[str, object] = {"load_balance_coeff": 1e-3}


def _latent(shape: DecoderShape, latent: LatentAttention, experts: Experts | None) -> dict[str, object]:
    config = shape.config
    dense = sum(isinstance(part, Dense) for part in shape.feeding)
    groups, chosen = shape.router_groups or (None, None)
    stretch = shape.rotary.figure("mscale_all_dim", 0.0) if shape.rotary is not None else 0.0
    count, per_token, inner = (experts.count, experts.per_token, experts.inner) if experts else (1, 1, 1)
    return {
        "n_dense_layers": dense,
        "n_heads": latent.heads,
        "q_lora_rank": latent.query_rank or 0,
        "kv_lora_rank": latent.rank,
        "qk_nope_head_dim": latent.plain_size,
        "qk_rope_head_dim": latent.rotary_size,
        "v_head_dim": latent.value_size,
        "mscale": stretch,
        "dense_hidden_dim": config.inner,
        "moe_hidden_dim": inner,
        "num_experts": count,
        "num_shared_experts": max(1, experts.shared // experts.inner) if experts else 1,
        "router_top_k": per_token,
        "router_score_func": "sigmoid" if shape.sigmoid_router else "softmax",
        "router_num_expert_groups": groups,
        "router_num_limited_groups": chosen,
        "router_route_scale": shape.router_scale,
        "router_route_norm": shape.renormalised_router,
        **_COMMUNICATION,
    }


def _plain_heads(shape: DecoderShape) -> bool:
    """Whether heads divide the width and have no norms, as in llama3; qwen3 has other heads, and no stretching like
    Llama's."""
    config = shape.config
    return not shape.rules.query_norm and config.head_size * config.num_attention_heads == config.hidden_size


def _scaling(shape: DecoderShape, rotary: Rotary) -> dict[str, object] | None:
    """The stretching of rotary positions in torchtitan's terms; None if torchtitan cannot express it."""
    kind, said = rotary.kind, rotary.scaling
    if kind == "default":
        return {}
    if kind == "llama3" and shape.experts is None and _plain_heads(shape):
        return {
            "scaling": "llama",
            "scaling_factor": rotary.figure("factor", 8.0),
            "low_freq_factor": rotary.figure("low_freq_factor", 1.0),
            "high_freq_factor": rotary.figure("high_freq_factor", 4.0),
            "original_max_position_embeddings": int(rotary.figure("original_max_position_embeddings", 8192)),
        }
    if kind != "yarn" or shape.model_type not in (*_LATENT, _GPT_OSS):
        return None
    if shape.model_type in _LATENT and said.get("mscale") != said.get("mscale_all_dim"):
        return None
    return {
        "scaling": "yarn",
        "rope_factor": rotary.figure("factor", 1.0),
        "beta_fast": rotary.figure("beta_fast", 32.0),
        "beta_slow": rotary.figure("beta_slow", 1.0),
        "original_seq_len": int(rotary.figure("original_max_position_embeddings", 4096)),
        "truncate": said.get("truncate") is not False,
    }


__all__ = ["sharding_text"]


def sharding_text(spec: str, samples: int, name: str, scheme: Scheme) -> str:
    """The file's text. spec, samples: what the scheme was found with. name: the scheme's. Raises UsageError with all
    that torchtitan's shardings cannot say of it."""
    from piper_ray.workloads.measure.module_sharding import module_shardings
    from piper_ray.workloads.measure.operators import traced_programs

    program = next(one for one in traced_programs(spec, samples) if one.traced.graph.name == scheme.kind)
    return rendered(
        "torchtitan_sharding.py.jinja",
        layer=f"{scheme.kind} of {spec}",
        degree=scheme.degree,
        id=digest_of(scheme),
        name=name,
        modules=module_shardings(spec, program, scheme),
    )
