"""Formulas, the roofline and the costs of one layer, against the same worked out by hand."""

from __future__ import annotations

import pytest

from piper_ray.model.errors import UsageError
from piper_ray.workloads.estimate.build import planner_bytes_per_s
from piper_ray.workloads.estimate.formulas import evaluate, substituted
from piper_ray.workloads.estimate.hardware import load_hardware
from piper_ray.workloads.estimate.modes import Mode, Recomputation
from piper_ray.workloads.estimate.roofline import (
    MatrixProducts,
    achieved_fraction,
    all_reduce_s,
    all_to_all_s,
    product_s,
)
from piper_ray.workloads.estimate.working import backward_bytes
from tests.estimate_support import estimated, gpt, kind_of, model_of, tmpc_of

HARDWARE = load_hardware()
A100, H100, MI300X = (HARDWARE.gpu(key) for key in ("A100-80", "H100-SXM", "MI300X"))
SYMBOLS = {"s": 8, "b": 2, "h": 5, "E": 4}


@pytest.mark.parametrize(
    ("formula", "value", "text"),
    [
        ("0", 0, "0"),
        ("2 s b h", 160, "2*8*2*5"),
        ("h + 2 s", 21, "5 + 2*8"),
        ("s b / E", 4, "8*2/4"),
        ("0.5 s s", 32, "0.5*8*8"),
    ],
)
def test_formulas(formula: str, value: float, text: str) -> None:
    assert evaluate(formula, SYMBOLS) == value
    assert substituted(formula, SYMBOLS) == text


def test_an_unknown_symbol_is_no_number() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        evaluate("2 q", SYMBOLS)


def test_a_large_product_runs_at_the_stated_share_and_a_thin_one_at_the_memory_s_pace() -> None:
    large = MatrixProducts(8192, 8192, 8192, 1)
    share = 0.75 * (8192 / (8192 + 128)) ** 2 * (8192 / (8192 + 32))
    assert achieved_fraction(large, A100) == pytest.approx(share)
    assert product_s(large, A100) == pytest.approx(2 * 8192**3 / (312e12 * share))
    thin = MatrixProducts(1, 8192, 8192, 3)
    moved_bytes = 2 * 3 * (8192 + 8192 * 8192 + 8192)
    assert product_s(thin, A100) == pytest.approx(moved_bytes / (2039e9 * 0.85))
    assert product_s(thin, A100, on_chip=True) == pytest.approx(
        3 * 2 * 8192**2 / (312e12 * achieved_fraction(thin, A100))
    )


def test_rings() -> None:
    size = 64e6
    assert all_reduce_s(size, A100, 8) == pytest.approx(14 * (size / 8 / (300e9 * 0.78) + 5e-6))
    assert all_to_all_s(size, A100, 4) == pytest.approx(3 * (size / 16 / (300e9 * 0.78) + 5e-6))
    assert all_reduce_s(size, A100, 1) == 0.0
    # A mesh: two GPUs share one link of seven, four three of them.
    assert MI300X.ring_bytes_per_s(2) == pytest.approx(64e9 * 0.7)
    assert MI300X.ring_bytes_per_s(8) == pytest.approx(7 * 64e9 * 0.7)


def test_b_is_both_directions_of_the_network_or_of_one_node_s_links() -> None:
    assert planner_bytes_per_s(H100, 2) == pytest.approx(2 * 50e9 * 0.85)
    assert planner_bytes_per_s(H100, 1) == pytest.approx(2 * 450e9 * 0.78)


def test_one_gpt_layer_by_hand() -> None:
    """Every figure of a layer on 8 devices with sequence parallelism and full recomputation."""
    s, b, h, a, t = 2048, 2, 4096, 32, 8
    result = estimated(gpt(4, h, a), nodes=2, samples=b, batch=64, fused=False)
    tmpc = tmpc_of(result, Mode(t, True, Recomputation.FULL))
    memory = 2039e9 * 0.85

    def matmul(m: float, k: float, n: float, count: float = 1) -> float:
        share = 0.75 * m / (m + 128) * n / (n + 128) * k / (k + 32)
        return max(2 * m * k * n * count / (312e12 * share), 2 * count * (m * k + k * n + m * n) / memory)

    products = (
        matmul(s * b, h, 3 * h / t)
        + matmul(s, h / a, s, b * a / t)
        + matmul(s, s, h / a, b * a / t)
        + matmul(s * b, h / t, h)
        + matmul(s * b, h, 4 * h / t)
        + matmul(s * b, 4 * h / t, h)
    )
    hidden, scores = s * b * h / t, a * s * s * b / t
    forward = products + (2 * 4 * hidden + 2 * 7 * hidden + 4 * 4 * hidden + (4 + 5) * scores) / memory
    backward = 2 * products + (2 * 6 * hidden + 2 * 5 * hidden + 6 * 4 * hidden + (6 + 5) * scores) / memory
    exchange = 14 * (2 * s * b * h / t / (300e9 * 0.78) + 5e-6)
    assert tmpc.time_per_sample_s == pytest.approx(2 * forward + backward + 6 * exchange, rel=1e-5)
    norms, output_biases = 4 * h, 2 * h
    divided = 12 * h * h + 3 * h + 4 * h
    parameters = divided / t + norms + output_biases
    assert tmpc.weights_bytes == 4 * parameters
    assert tmpc.fixed_bytes == 18 * parameters
    assert tmpc.activation_bytes == 2 * hidden
    assert result.instance.edges[0].communication_bytes == 2 * s * b * h / t
    assert set(tmpc.forward_sync_bytes.values()) == {0.0}
    plain = tmpc_of(result, Mode(2))
    gather_s = s * b * h / (300e9 * 0.78) + 5e-6
    extra = 2 * s * b * h * (1 / 2 - 1 / t) + gather_s * 25e9 * 0.85
    assert plain.forward_sync_bytes[0] == pytest.approx(extra, abs=1)


def test_what_is_set_aside_is_one_layer_s_backward_pass_and_more_is_charged_to_b() -> None:
    s, b, h, a = 2048, 2, 4096, 32
    result = estimated(gpt(4, h, a), nodes=2, samples=b, batch=64, fused=False)
    sbh, scores = s * b * h, 5 * a * s / h
    # All that the layer keeps; the gradient of the residual stream and of dropout's input, with that of a bias.
    assert result.setting.workspace_bytes == pytest.approx(sbh * (10 + 24 / 8 + scores / 8) + 4 * sbh + 2 * h)
    costs = result.costs(kind_of(result), Mode(1, False, Recomputation.FULL))
    # At the scores' dropout: the residual stream's, those of scores and values there and back, less what was kept by
    # the feed-forward part and attention's output.
    gradients = 2 * sbh + 2 * (2 * a * s * s * b + 2 * sbh) - sbh * (1 + 8 + 8 + 2 + 2 + 1 + 2)
    assert costs.transient_bytes == pytest.approx(sbh * (34 + scores) + gradients)
    assert costs.fixed_bytes == costs.state_bytes + costs.transient_bytes - result.setting.workspace_bytes
    plain = result.costs(kind_of(result), Mode(1))
    assert plain.transient_bytes > result.setting.workspace_bytes / 4
    assert plain.fixed_bytes == plain.state_bytes  # gradients alone are not charged to each of equal layers


def test_memory_is_what_programs_find_less_what_is_left_free_and_set_aside() -> None:
    result = estimated(gpt(4, 1024, 16), nodes=2)
    found = 80 * 2**30 * 0.985
    communicators, context, workspace = 3 * 0.4 * 2**30, 0.75 * 2**30, 64 * 2**20
    assert A100.device_bytes == pytest.approx(found)
    assert result.setting.reserve_bytes == pytest.approx(communicators + context + workspace + 0.05 * 0.6 * found)
    assert result.instance.memory_bytes == int(found - result.setting.reserve_bytes - result.setting.workspace_bytes)
    mine = estimated(gpt(4, 1024, 16), nodes=2, reserve_bytes=1e9)
    assert mine.instance.memory_bytes == int(found - 1e9 - mine.setting.workspace_bytes)
    with pytest.raises(UsageError, match=r"--reserve 90,000,000,000B: a GPU has 84,610,855,\d\d\d; expected less"):
        estimated(gpt(4, 1024, 16), nodes=2, reserve_bytes=9e10)


def test_experts_lie_on_the_devices_of_a_node() -> None:
    result = estimated(
        model_of(
            "mixtral", tokens=1024, hidden_size=1024, num_hidden_layers=1, num_attention_heads=16,
            num_key_value_heads=8, intermediate_size=4096, vocab_size=1000, num_local_experts=4,
        ),
        "H100-SXM",
    )  # fmt: skip
    assert sorted({mode.degree for mode in result.modes["block"]}) == [1, 2, 4]  # 4 experts
    one, four = (result.costs(kind_of(result), Mode(t)) for t in (1, 4))
    experts, attention = 3 * 1024 * 4096 * 4, 1024 * (1024 + 2 * 512 + 1024)
    whole = 2 * 1024 + 1024 * 4  # norms and router
    assert one.parameters == experts + attention + whole
    assert four.parameters == (experts + attention) / 4 + whole
    # With sequence parallelism: all-to-all there and back of each token's 2 copies, once forward and once backward.
    sharded = result.costs(kind_of(result), Mode(4, True))
    ring = all_reduce_s(2 * 1024 * 1024, H100, 4)
    assert sharded.exchange_forward_s == pytest.approx(ring + all_to_all_s(2 * 2 * 2 * 1024 * 1024, H100, 4))
    assert four.exchange_forward_s == pytest.approx(2 * ring)


def test_zero_shards_the_optimizer_only_and_charges_the_gathering() -> None:
    result = estimated(gpt(2, 1024, 16), nodes=2, batch=64, zero_shards=4)
    plain, sharded = (result.costs(kind_of(result), Mode(8, True, zero_shards=shards)) for shards in (1, 4))
    assert plain.state_bytes == 18 * plain.parameters
    assert sharded.state_bytes == (2 + 4 + 12 / 4) * plain.parameters
    assert sharded.gradient_bytes == plain.gradient_bytes
    # A stage of d = 4 divides p by 4 and does 64 / 4 microbatches a batch: 4 gatherings' time in all over 64.
    gathering_s = 2 * plain.parameters * 3 / 4 / (25e9 * 0.85)
    assert sharded.zero_s * 64 / 4 == pytest.approx(gathering_s)


def test_offload_waits_where_the_host_is_slower_than_the_pass() -> None:
    result = estimated(gpt(2, 1024, 16), nodes=2, samples=8, batch=64, offload=True, fused=False)
    kind = kind_of(result)
    mode = Mode(1, offload=True)
    costs, kept = result.costs(kind, mode), result.costs(kind, Mode(1)).activation_bytes
    moved_s = kept / (32e9 * 0.8)
    assert moved_s > costs.backward_s > costs.forward_s
    assert costs.time_s == pytest.approx(2 * moved_s + 2 * kept / (2039e9 * 0.85))
    assert costs.activation_bytes == 0.0
    assert costs.transient_bytes == 2 * kept + backward_bytes(kind, mode)


def test_t5_s_encoder_feeds_every_layer_of_the_decoder() -> None:
    result = estimated(
        model_of("t5", d_model=256, d_kv=32, d_ff=512, num_layers=3, num_heads=8, vocab_size=1000, num_decoder_layers=4)
    )
    names = [layer.name for layer in result.instance.layers]
    norm = names.index("encoder norm")
    readers = [edge.target for edge in result.instance.edges if edge.source == norm]
    assert [names[reader] for reader in readers] == ["decoder layer"] * 4
    whole = 2 * 512 * 256
    assert {edge.communication_bytes for edge in result.instance.edges if edge.source == norm} == {whole / 8}
    assert "114 in the decoder" in result.architecture.sample
