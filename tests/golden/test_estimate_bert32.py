"""BERT-32 as published with Piper against our estimate of it: how far off, and why.

The published file says no shape; its figures do. 12 h h + 13 h = 176,997,120 makes h = 3,840; tokens of 8,192 and a
mask of 16 MiB are 2,048 x 4 and 2,048 x 2,048 x 4 bytes: one sample of 2,048 tokens, 4 bytes a number; the activations
fit 16 heads, dropout and scores that are kept.

- activations: 1 % off, at every t.
- weights: published are as many bytes as there are parameters (1 byte each); ours are gradients, 4 bytes each.
- fixed: published are 2 bytes a parameter: weights, without gradients and optimizer. Ours are 18.
- tensors between layers: published have 4 bytes a number, ours 2.
- time: measured were 78 TFLOP/s at t = 1, a quarter of the peak of A100. Megatron's kernels of that time reached about
  67 with one sample on one GPU (Narayanan et al. 2021, figure 7) and 137 in whole runs with 16 (table 1); the estimate
  is calibrated on larger samples and later kernels. So it is 2.4 times faster at t = 1, and 3.7 times at t = 8, where
  launches take much of the measured time and no roofline knows them. What recomputation adds is the same: a third.
"""

from __future__ import annotations

import pytest

from piper_ray.model.instance import Tmpc
from piper_ray.model.mode import Recomputation
from piper_ray.workloads.estimate.build import Estimate
from piper_ray.workloads.estimate.modes import LayerMode
from piper_ray.workloads.formats.load import load
from tests.data import WORKLOADS
from tests.estimate_support import estimated, model_of, tmpc_of

PUBLISHED_BLOCK = 5
FULL = Recomputation.FULL


@pytest.fixture(scope="module")
def published() -> dict[tuple[int, str], Tmpc]:
    layer = load(WORKLOADS["bert32a100"]).layer_by_id[PUBLISHED_BLOCK]
    return {(t, tmpc.id): tmpc for t, tmpcs in layer.tmpcs.items() for tmpc in tmpcs}


@pytest.fixture(scope="module")
def ours() -> Estimate:
    model = model_of(
        "bert",
        tokens=2048,
        hidden_size=3840,
        num_hidden_layers=32,
        num_attention_heads=16,
        intermediate_size=4 * 3840,
        vocab_size=50248,
        max_position_embeddings=2048,
    )
    return estimated(model, nodes=2, samples=1, batch=1920, fused=False)


@pytest.mark.parametrize("t", [1, 2, 4, 8])
def test_activations_within_one_percent(ours: Estimate, published: dict[tuple[int, str], Tmpc], t: int) -> None:
    assert tmpc_of(ours, LayerMode(degree=t)).activation_bytes == pytest.approx(
        published[t, "vanilla"].activation_bytes, rel=0.011
    )


@pytest.mark.parametrize("t", [1, 2, 4, 8])
def test_weights_and_state_differ_by_the_bytes_of_a_parameter(
    ours: Estimate, published: dict[tuple[int, str], Tmpc], t: int
) -> None:
    found, theirs = tmpc_of(ours, LayerMode(degree=t)), published[t, "vanilla"]
    assert found.weights_bytes / theirs.weights_bytes == pytest.approx(4, rel=1e-3)
    assert found.fixed_bytes / theirs.fixed_bytes == pytest.approx(18 / 2, rel=1e-3)


def test_recomputation_keeps_the_input_and_the_published_one_the_mask_too(
    ours: Estimate, published: dict[tuple[int, str], Tmpc]
) -> None:
    hidden, mask = 2048 * 3840, 2048 * 2048
    assert published[1, "activation recomp"].activation_bytes == 4 * (hidden + mask)
    assert tmpc_of(ours, LayerMode(degree=1, recomputation=FULL)).activation_bytes == 2 * hidden


def test_times_are_off_by_a_factor_that_grows_with_t(ours: Estimate, published: dict[tuple[int, str], Tmpc]) -> None:
    factors = {
        t: published[t, "vanilla"].time_per_sample_s / tmpc_of(ours, LayerMode(degree=t)).time_per_sample_s
        for t in (1, 2, 4, 8)
    }
    assert factors[1] == pytest.approx(2.8, abs=0.1)
    assert factors[8] == pytest.approx(4.5, abs=0.2)
    assert factors[1] < factors[2] < factors[4] < factors[8]
    flop = 3 * 24 * 2048 * 3840**2 * (1 + 2048 / (6 * 3840))
    assert flop / published[1, "vanilla"].time_per_sample_s == pytest.approx(78e12, rel=0.02)


@pytest.mark.parametrize("t", [1, 2])
def test_recomputation_adds_the_same_share(ours: Estimate, published: dict[tuple[int, str], Tmpc], t: int) -> None:
    theirs = published[t, "activation recomp"].time_per_sample_s / published[t, "vanilla"].time_per_sample_s
    found = (
        tmpc_of(ours, LayerMode(degree=t, recomputation=FULL)).time_per_sample_s
        / tmpc_of(ours, LayerMode(degree=t)).time_per_sample_s
    )
    assert found == pytest.approx(theirs, rel=0.03)
