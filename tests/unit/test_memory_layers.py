"""What a layer keeps and what its backward pass needs, against the same worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from piper_ray.model.mode import Recomputation
from piper_ray.workloads.estimate.config import ModelConfig
from piper_ray.workloads.estimate.families import Microbatch
from piper_ray.workloads.estimate.memory import backward_bytes, kept_bytes, needed_bytes, working_bytes
from piper_ray.workloads.estimate.modes import LayerMode
from piper_ray.workloads.estimate.operators import LayerKind
from piper_ray.workloads.estimate.ranks import gradient_shapes
from piper_ray.workloads.estimate.runtimes import Loss, Traits
from tests.estimate_support import FSDP, MEGATRON_CORE, gpt, model_of

S, B, H, F, A, G, D, V = 4096, 2, 1024, 3584, 16, 4, 64, 32000
HIDDEN = 2.0 * S * B * H
INNER = 2.0 * S * B * F
LOGITS = 2.0 * S * B * V

FUSED_LOSS = replace(MEGATRON_CORE, loss=Loss.FUSED)


def llama(**more: object) -> ModelConfig:
    return model_of(
        "llama", tokens=S, hidden_size=H, num_hidden_layers=2, num_attention_heads=A, num_key_value_heads=G,
        intermediate_size=F, vocab_size=V, max_position_embeddings=S, **more,
    )  # fmt: skip


def kinds(model: ModelConfig, samples: int = B, *, fused: bool = True) -> dict[str, LayerKind]:
    return {kind.key: kind for kind in model.architecture(Microbatch(samples, model.tokens, fused)).kinds}


@pytest.mark.parametrize("t", [1, 4, 8])
def test_a_gpt_layer_is_the_published_figure(t: int) -> None:
    """Korthikanti et al. 2022, table 2: tensor parallelism, with sequence parallelism, with selective recomputation."""
    s, h, a = 2048, 4096, 32
    block = kinds(gpt(2, h, a, tokens=s), fused=False)["block"]
    sbh, scores = s * B * h, 5 * a * s / h
    assert kept_bytes(block, LayerMode(degree=t)) == pytest.approx(sbh * (10 + (24 + scores) / t))
    assert kept_bytes(block, LayerMode(degree=t, sequence_parallel=True)) == pytest.approx(sbh / t * (34 + scores))
    selective = LayerMode(degree=t, sequence_parallel=True, recomputation=Recomputation.SELECTIVE)
    assert kept_bytes(block, selective) == pytest.approx(34 * sbh / t)
    full = LayerMode(degree=t, sequence_parallel=True, recomputation=Recomputation.FULL)
    assert kept_bytes(block, full) == pytest.approx(2 * sbh / t)


def test_a_llama_layer_with_flash_attention() -> None:
    """Inputs and outputs of two norms, queries, keys, values, the result and its denominators, three inner tensors."""
    block = kinds(llama())["block"]
    by_hand = 4 * HIDDEN + 2 * S * B * (2 * A * D + 2 * G * D) + 4 * S * B * A + 3 * INNER
    assert kept_bytes(block, LayerMode(degree=1)) == by_hand
    assert kept_bytes(block, LayerMode(degree=4, sequence_parallel=True)) == by_hand / 4
    assert kept_bytes(block, LayerMode(degree=1, context=2)) == by_hand / 2
    assert kept_bytes(block, LayerMode(degree=4)) == pytest.approx((by_hand - 4 * HIDDEN) / 4 + 4 * HIDDEN)


def test_gradients_of_a_gated_feed_forward_part_are_its_worst_moment() -> None:
    """At SwiGLU: the gradients of its result and of its two inputs, less the second product's input, which is gone; and
    the gradient of the residual stream."""
    block = kinds(llama())["block"]
    assert backward_bytes(block, LayerMode(degree=1)) == HIDDEN + INNER + 2 * INNER - INNER


def test_at_a_high_degree_what_is_gathered_is_the_worst() -> None:
    """At the first product of the part: the gradient of its result, its input gathered, its input's gradient whole and
    scattered; the second product's input and the function's are gone."""
    t = 8
    block = kinds(llama())["block"]
    by_hand = HIDDEN / t + 2 * INNER / t + (HIDDEN + HIDDEN + HIDDEN / t) - 3 * INNER / t
    assert backward_bytes(block, LayerMode(degree=t, sequence_parallel=True)) == by_hand
    kept_gathered = LayerMode(degree=t, sequence_parallel=True, gathered=True)
    # At the second product: the gradient of its result gathered, and that of its input.
    assert backward_bytes(block, kept_gathered) == HIDDEN / t + HIDDEN + INNER / t


def test_an_ungated_part_has_one_inner_gradient_less() -> None:
    """At GELU: the gradients of its result and of its input, less the second product's input."""
    s, h = 1024, 512
    dropless = model_of("gpt2", tokens=s, n_embd=h, n_layer=2, n_head=8, vocab_size=1000, resid_pdrop=0.0)
    inner = 2.0 * s * B * 4 * h
    assert backward_bytes(kinds(dropless)["block"], LayerMode(degree=1)) == 2.0 * s * B * h + inner + inner - inner


def test_logits_are_in_fp32_beside_their_gradient_or_give_way_to_it() -> None:
    head = kinds(llama())["head"]
    assert kept_bytes(head, LayerMode(degree=1)) == 2 * HIDDEN + 2 * LOGITS
    assert working_bytes(head, LayerMode(degree=1)) == LOGITS
    assert kept_bytes(head, LayerMode(degree=1), FUSED_LOSS) == 2 * HIDDEN + LOGITS
    assert working_bytes(head, LayerMode(degree=1), FUSED_LOSS) == HIDDEN
    assert kept_bytes(head, LayerMode(degree=1), FSDP) == 2 * HIDDEN + 2 * LOGITS
    assert working_bytes(head, LayerMode(degree=1), FSDP) == 2 * LOGITS + 2 * LOGITS
    shared = LayerMode(degree=4, sequence_parallel=True)
    assert kept_bytes(head, shared, FUSED_LOSS) == (2 * HIDDEN + LOGITS) / 4
    assert working_bytes(head, shared, FUSED_LOSS) == 2 * HIDDEN + HIDDEN / 4
    assert working_bytes(head, shared, FSDP) == 3 * 2 * LOGITS / 4


def test_an_embedding_s_gradient_is_a_whole_table() -> None:
    assert working_bytes(kinds(llama())["embedding"], LayerMode(degree=4)) == HIDDEN + 2 * V * H / 4


def test_what_is_made_again_is_there_for_one_layer() -> None:
    block = kinds(llama())["block"]
    plain = LayerMode(degree=1)
    gradients = backward_bytes(block, plain)
    full = replace(plain, recomputation=Recomputation.FULL)
    assert kept_bytes(block, full) == HIDDEN
    assert working_bytes(block, full) == needed_bytes(block, plain) + gradients
    selective = replace(plain, recomputation=Recomputation.SELECTIVE)
    assert kept_bytes(block, selective) == kept_bytes(block, plain) - 2 * HIDDEN - INNER
    assert working_bytes(block, selective) == 2 * HIDDEN + INNER + gradients


def test_torchtitan_keeps_every_second_product_s_result() -> None:
    """Of seven products those of queries, values and the gate; nobody reads the last one's result again."""
    block = kinds(llama())["block"]
    results = 2 * S * B * (A + 2 * G) * D + HIDDEN + 2 * INNER
    assert results / 2 == 2 * S * B * (A + G) * D + INNER
    selective = LayerMode(degree=1, recomputation=Recomputation.of("selective-op"))
    assert kept_bytes(block, selective, FSDP) == HIDDEN + results / 2 + 2 * S * B * A * D


def test_core_attention_frees_denominators_or_scores() -> None:
    """Its denominators if it is fused, and its scores if it is not (Korthikanti et al. 2022)."""
    core = LayerMode(degree=1, recomputation=Recomputation.of("selective-core_attn"))
    block = kinds(llama())["block"]
    assert kept_bytes(block, LayerMode(degree=1)) - kept_bytes(block, core) == 4 * S * B * A
    unfused = kinds(gpt(2, 4096, 32, tokens=2048), fused=False)["block"]
    assert kept_bytes(unfused, core) == 34 * 2048 * B * 4096


def test_the_feed_forward_part_keeps_its_input_alone() -> None:
    """Norm's output, gate and up, their product; the norm's input stays, as the checkpoint's own."""
    block = kinds(llama())["block"]
    mlp = LayerMode(degree=1, recomputation=Recomputation.of("selective-mlp"))
    assert kept_bytes(block, LayerMode(degree=1)) - kept_bytes(block, mlp) == HIDDEN + 3 * INNER


def test_parts_of_latent_attention_and_experts() -> None:
    """By hand, of one sample of 8 tokens: Megatron's modules, each alone."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
             "v_head_dim": 16, "q_lora_rank": 24, "kv_lora_rank": 32}  # fmt: skip
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 20}
    model = model_of(
        "deepseek_v3", tokens=8, num_hidden_layers=1, first_k_dense_replace=0, intermediate_size=96, vocab_size=50,
        **sizes, **experts,
    )  # fmt: skip
    (block,) = (kind for kind in model.architecture(Microbatch(1, 8)).kinds if kind.experts)

    def freed(*parts: str) -> float:
        return kept_bytes(block, LayerMode(degree=1)) - kept_bytes(
            block, LayerMode(degree=1, recomputation=Recomputation.of_parts(parts))
        )

    tokens, heads = 8, 4
    assert freed("layernorm") == 2 * (2 * tokens * 64)  # inputs of the latent vectors, and of router and experts
    queries, keys, values = heads * 24, heads * 24, heads * 16
    assert freed("mla_up_proj") == 2 * tokens * (queries + keys + values + 24 + 32)
    assert freed("moe_act") == 2 * tokens * 2 * 20
    assert freed("shared_experts") == 2 * tokens * 3 * 20
    routed = tokens * (19 * 8 + 2 * 2 * 64 + 2 * 2 * 3 * 20)
    assert freed("moe") == freed("moe", "moe_act", "shared_experts") == routed + freed("shared_experts")
    assert freed("mlp") == 0  # there is no dense feed-forward part


def test_fp8_halves_the_inputs_of_products_but_not_attention_s_result() -> None:
    """Norm outputs and the inner product's input in a byte a number; attention's result in bf16, and in fp8 besides."""
    block, plain = kinds(llama())["block"], LayerMode(degree=1)
    fp8 = Traits(fp8=True)
    saved = kept_bytes(block, plain) - kept_bytes(block, plain, fp8)
    assert saved == (2 * HIDDEN + INNER) / 2 - S * B * A * D
    head = kinds(llama())["head"]
    assert kept_bytes(head, plain, fp8) == kept_bytes(head, plain)  # stays in bf16


def test_context_parallelism_by_all_to_all_keeps_attention_s_result_twice() -> None:
    block, mode = kinds(llama())["block"], LayerMode(degree=2, sequence_parallel=True, context=4)
    ring, all_to_all = (kept_bytes(block, mode, Traits(context_all_to_all=one)) for one in (False, True))
    assert all_to_all - ring == 2 * S * B * A * D / 8
    assert kept_bytes(block, LayerMode(degree=2), Traits(context_all_to_all=True)) == kept_bytes(
        block, LayerMode(degree=2)
    )


def test_a_layer_with_experts() -> None:
    """Mixtral's layer: experts keep what is dispatched to them, gate and up, and the second product's input."""
    experts, per_token = 8, 2
    mixtral = model_of(
        "mixtral", tokens=S, hidden_size=H, num_hidden_layers=2, num_attention_heads=A, num_key_value_heads=G,
        intermediate_size=F, vocab_size=V, max_position_embeddings=S, num_local_experts=experts,
    )  # fmt: skip
    block, mode = kinds(mixtral)["block"], LayerMode(degree=1, experts=4)
    dense = kept_bytes(kinds(llama())["block"], LayerMode(degree=1))
    dispatched, inner = per_token * HIDDEN, per_token * INNER
    assert kept_bytes(block, mode) == dense - 3 * INNER + dispatched + 3 * inner + 19 * S * B * experts
    assert backward_bytes(block, mode) == HIDDEN + inner + 2 * inner - inner + 2 * dispatched + 6 * inner


def test_one_tensor_for_the_gradients_of_all_weights_of_a_shape() -> None:
    block = kinds(llama())["block"]
    assert gradient_shapes(block, LayerMode(degree=1)) == {
        ((A + 2 * G) * D, H): 2.0 * (A + 2 * G) * D * H,
        (H, A * D): 2.0 * H * A * D,
        (2 * F, H): 4.0 * F * H,
        (H, F): 2.0 * F * H,
    }
    assert (
        sum(gradient_shapes(block, LayerMode(degree=4)).values())
        == sum(gradient_shapes(block, LayerMode(degree=1)).values()) / 4
    )
