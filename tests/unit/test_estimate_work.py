"""FLOP by the usual definitions, against 6 N and attention written out."""

from __future__ import annotations

from typing import Any

import pytest

from piper_ray.model.figures import flop_text
from piper_ray.model.mode import Recomputation
from piper_ray.workloads.estimate.roofline import hardware_flop, model_flop
from tests.estimate_support import estimated, gpt, kind_of, model_of

LLAMA: dict[str, Any] = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192,
}  # fmt: skip


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("samples", [1, 4])
def test_six_for_each_parameter_and_token_and_causal_attention(fused: bool, samples: int) -> None:
    """Norms have parameters and no products; the embedding is looked up."""
    result = estimated(model_of("llama", **LLAMA, tokens=8192), "H100-SXM", batch=64, samples=samples, fused=fused)
    matrices = result.architecture.parameters - 128256 * 4096 - 65 * 4096
    attention = 6 * 32 * 8192 * 32 * 128
    assert result.model_flop == pytest.approx(64 * 8192 * (6 * matrices + attention))


def test_experts_count_as_often_as_tokens_go_to_them() -> None:
    experts = model_of("mixtral", **LLAMA, num_local_experts=8, num_experts_per_tok=2)
    result, dense = (estimated(model, "H100-SXM", batch=1) for model in (experts, model_of("llama", **LLAMA)))
    tokens, blocks, router = 8192, 32, 4096 * 8
    more = 6 * tokens * blocks * (3 * 4096 * 14336 + router)
    assert result.model_flop == pytest.approx(dense.model_flop + more)


def test_full_recomputation_does_the_forward_pass_of_layers_again() -> None:
    """Korthikanti et al. 2022, appendix A: 72 B L s h^2 (1 + s / 6h + V / 12 h L) and a third of the layers' more; its
    attention is not causal."""
    result = estimated(gpt(8, 1024, 16, vocabulary=51200, tokens=2048), batch=4, samples=2)
    layers = 72 * 4 * 8 * 2048 * 1024**2 * (1 + 2048 / (12 * 1024))
    head = 6 * 4 * 2048 * 1024 * 51200
    assert result.model_flop == pytest.approx(layers + head)
    assert result.hardware_flop == pytest.approx(4 / 3 * layers + head)


def test_selective_recomputation_does_scores_and_weighted_values_again() -> None:
    kind = kind_of(estimated(gpt(2, 1024, 16, tokens=2048), fused=False))
    again = hardware_flop(kind, Recomputation.SELECTIVE) - model_flop(kind)
    assert again == pytest.approx(4 * 2048 * 2048 * 1024)
    assert hardware_flop(kind, Recomputation.NONE) == model_flop(kind)


def test_utilisation_is_measured_against_all_gpus_in_bf16() -> None:
    result = estimated(model_of("llama", **LLAMA), "H100-SXM", nodes=4)
    assert result.peak_flop_per_s == 32 * 989e12


@pytest.mark.parametrize(
    ("flop", "text"), [(0, "0 FLOP"), (999, "999 FLOP"), (1.5e15, "1.5 PFLOP"), (3.141592e30, "3.142e+09 ZFLOP")]
)
def test_texts(flop: float, text: str) -> None:
    assert flop_text(flop) == text
