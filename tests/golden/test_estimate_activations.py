"""What a layer's microbatch keeps, against Korthikanti et al.: Reducing Activation Recomputation in Large Transformer
Models, 2022: the formulas of table 2 for the models of table 3, and what section 5 and figure 7 make of them."""

from __future__ import annotations

import pytest

from piper_ray.model.mode import Recomputation
from piper_ray.workloads.estimate.memory import kept_bytes
from piper_ray.workloads.estimate.modes import LayerMode
from tests.estimate_support import estimated, gpt, kind_of
from tests.lengths import long_after

# Table 3: attention heads, width, layers, tensor-parallel degree, samples of a microbatch; 2,048 tokens each.
MODELS = {
    "22B": (64, 6144, 48, 8, 4),
    "175B": (96, 12288, 96, 8, 1),
    "530B": (128, 20480, 105, 8, 1),
    "1T": (160, 25600, 128, 8, 1),
}
TOKENS = 2048
NONE, SELECTIVE, FULL = Recomputation.NONE, Recomputation.SELECTIVE, Recomputation.FULL


def kept(name: str, mode: LayerMode) -> float:
    heads, width, layers, _, samples = MODELS[name]
    result = estimated(gpt(layers, width, heads), samples=samples, batch=64 * samples, fused=False)
    return kept_bytes(kind_of(result), mode)


@pytest.mark.parametrize("name", long_after(2, MODELS))
def test_table_2(name: str) -> None:
    a, h, _, t, b = MODELS[name]
    s = TOKENS
    sbh, scores = s * b * h, a * s / h
    assert kept(name, LayerMode(degree=1)) == pytest.approx(sbh * (34 + 5 * scores))
    assert kept(name, LayerMode(degree=t)) == pytest.approx(sbh * (10 + 24 / t + 5 * scores / t))
    assert kept(name, LayerMode(degree=t, sequence_parallel=True)) == pytest.approx(sbh * (34 / t + 5 * scores / t))
    assert kept(name, LayerMode(degree=t, recomputation=SELECTIVE)) == pytest.approx(sbh * (10 + 24 / t))
    assert kept(name, LayerMode(degree=t, sequence_parallel=True, recomputation=SELECTIVE)) == pytest.approx(
        sbh * 34 / t
    )
    assert kept(name, LayerMode(degree=t, recomputation=FULL)) == pytest.approx(sbh * 2)


@pytest.mark.parametrize(("name", "scores", "saved"), [("175B", 80, 0.70), ("530B", 64, 0.65)])
def test_section_5_selective_recomputation_saves_70_and_65_percent(name: str, scores: int, saved: float) -> None:
    a, h, _, _, _ = MODELS[name]
    assert 5 * a * TOKENS / h == scores
    plain, selective = kept(name, LayerMode(degree=1)), kept(name, LayerMode(degree=1, recomputation=SELECTIVE))
    assert 1 - selective / plain == pytest.approx(saved, abs=0.005)


@pytest.mark.parametrize("name", long_after(1, MODELS))
def test_figure_7_both_together_keep_less_than_a_fifth_of_tensor_parallelism_alone(name: str) -> None:
    t = MODELS[name][3]
    plain = kept(name, LayerMode(degree=t))
    assert 0.4 < kept(name, LayerMode(degree=t, sequence_parallel=True)) / plain < 0.7  # each alone: about half
    assert 0.4 < kept(name, LayerMode(degree=t, recomputation=SELECTIVE)) / plain < 0.65
    assert kept(name, LayerMode(degree=t, sequence_parallel=True, recomputation=SELECTIVE)) / plain < 0.21
    assert kept(name, LayerMode(degree=t, recomputation=FULL)) / plain < 0.11


def test_one_layer_of_gpt3_in_numbers() -> None:
    """Section 4.1's count for a layer, as bytes: 34 + 80 times 2,048 x 12,288."""
    assert kept("175B", LayerMode(degree=1)) == 114 * 2048 * 12288 == 2_868_903_936


def test_fused_attention_keeps_what_selective_recomputation_keeps() -> None:
    heads, width, layers, t, samples = MODELS["175B"]
    fused = estimated(gpt(layers, width, heads), samples=samples, fused=True)
    denominators = 4 * TOKENS * heads / t
    assert kept_bytes(kind_of(fused), LayerMode(degree=t, sequence_parallel=True)) == pytest.approx(
        kept("175B", LayerMode(degree=t, sequence_parallel=True, recomputation=SELECTIVE)) + denominators
    )
