"""Formulas, the roofline and the costs of one layer, against the same worked out by hand."""

from __future__ import annotations

import math

import pytest

from piper_ray.model.errors import UsageError
from piper_ray.model.mode import Recomputation, Sharding
from piper_ray.workloads.estimate.build import links_of
from piper_ray.workloads.estimate.config import read_model
from piper_ray.workloads.estimate.exchanges import (
    Group,
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    exchange_s,
    regather_s,
    ring_bytes_per_s,
)
from piper_ray.workloads.estimate.hardware import Gpu, load_hardware
from piper_ray.workloads.estimate.memory import backward_bytes
from piper_ray.workloads.estimate.modes import LayerMode
from piper_ray.workloads.estimate.operators import evaluate, substituted
from piper_ray.workloads.estimate.roofline import MatrixProducts, achieved_fraction, forward_s, product_s
from piper_ray.workloads.estimate.software import Precision, load_software, software_named, stack_of
from tests.estimate_support import estimated, gpt, kind_of, model_of, tmpc_of

HARDWARE = load_hardware()
A100, H100, MI300X = (HARDWARE.gpu(key) for key in ("A100-80", "H100-SXM", "MI300X"))
LLAMA = model_of(
    "llama", tokens=2048, hidden_size=2048, num_hidden_layers=2, num_attention_heads=16, num_key_value_heads=8,
    intermediate_size=8192, vocab_size=1000,
)  # fmt: skip
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
    share = 0.875 * (8192 / (8192 + 96)) ** 2 * (8192 / (8192 + 64))
    assert achieved_fraction(large, A100) == pytest.approx(share)
    assert product_s(large, A100) == pytest.approx(2 * 8192**3 / (312e12 * share))
    thin = MatrixProducts(1, 8192, 8192, 3)
    moved_bytes = 2 * 3 * (8192 + 8192 * 8192 + 8192)
    assert product_s(thin, A100) == pytest.approx(moved_bytes / (2039e9 * 0.85))


def test_products_of_attention_have_the_rate_of_their_heads_size() -> None:
    scores, values = MatrixProducts(2048, 2048, 128, 4), MatrixProducts(2048, 128, 2048, 4)
    for product in (scores, values):
        assert achieved_fraction(product, H100, on_chip=True) == pytest.approx(0.67 * 0.92 * 128 / (128 + 32))
        assert product_s(product, H100, on_chip=True) == pytest.approx(
            4 * 2 * 2048**2 * 128 / (989e12 * 0.67 * 0.92 * 0.8)
        )


def test_a_scan_by_chunks_has_a_rate_of_its_own_whatever_its_sides() -> None:
    for sides in ((8192, 128, 128, 32), (8192, 64, 256, 128)):
        product = MatrixProducts(*sides, scan=True)
        assert product_s(product, H100, on_chip=True) == pytest.approx(product.flop / 27e12)


def test_eight_bits_gain_less_where_tiles_are_small() -> None:
    large, small = MatrixProducts(16384, 16384, 16384, 1), MatrixProducts(1024, 1024, 1024, 1)
    gain = H100.fp8_gain
    of_large, of_small = (product_s(x, H100) / product_s(x, H100, gain=gain) for x in (large, small))
    assert 1.0 < of_small < of_large < gain


def test_rings() -> None:
    size = 64e6
    assert all_reduce_s(size, Group(8), A100, 8) == pytest.approx(14 * (size / 8 / (300e9 * 0.78) + 2.5e-6))
    assert all_to_all_s(size, Group(4), A100, 8) == pytest.approx(3 * (size / 4 / (300e9 * 0.78) + 2.5e-6))
    assert all_reduce_s(size, Group(1), A100, 8) == all_to_all_s(size, Group(1), A100, 8) == 0.0
    # A mesh: two GPUs share one link of seven, four three of them.
    assert MI300X.ring_bytes_per_s(2) == pytest.approx(64e9 * 0.7)
    assert MI300X.ring_bytes_per_s(8) == pytest.approx(7 * 64e9 * 0.7)


@pytest.mark.parametrize(
    ("group", "rate"),
    [
        (Group(8), 450e9 * 0.78),  # within a node
        (Group(2, 4), 450e9 * 0.78),
        (Group(16), 8 * 50e9 * 0.85),  # 8 members in each node share out its traffic over their 8 links
        (Group(16, 2), 4 * 50e9 * 0.85),  # 4 of a node, 2 ranks apart
        (Group(16, 8), 50e9 * 0.85),  # one of each node
        (Group(4, 16), 50e9 * 0.85),
    ],
)
def test_a_ring_over_several_nodes_has_the_links_of_all_its_members_in_a_node(group: Group, rate: float) -> None:
    assert ring_bytes_per_s(group, H100, 8) == pytest.approx(rate)
    gather_s = all_gather_s(1e9, group, H100, 8)
    assert gather_s == pytest.approx(1e9 * (group.size - 1) / group.size / rate, rel=0.05)


def test_tokens_for_other_nodes_go_over_a_gpu_s_own_network_link() -> None:
    assert all_to_all_s(1e9, Group(64), H100, 16) == pytest.approx(48 / 64 * 1e9 / (50e9 * 0.85), rel=0.01)


def test_links_are_the_node_s_and_the_network_s_in_both_directions() -> None:
    node, network = links_of(H100, 8)
    assert (node.devices, network.devices) == (8, None)
    assert node.bandwidth_bytes_per_s == pytest.approx(2 * 450e9 * 0.78)
    assert network.bandwidth_bytes_per_s == pytest.approx(2 * 50e9 * 0.85)
    assert links_of(H100, 1) == (network,), "a node of one GPU"


@pytest.mark.parametrize(("b", "a", "steps", "traffic"), [(2, 32, 1, 1), (1, 16, 5, 8)], ids=["fused", "in steps"])
def test_one_gpt_layer_by_hand(b: int, a: int, steps: int, traffic: int) -> None:
    """Every figure of a layer on 8 devices with sequence parallelism and full recomputation. The softmax of 2 matrices
    on each is of 5 steps, as its kernel takes 4 at once."""
    s, h, t = 2048, 4096, 8
    result = estimated(gpt(4, h, a), nodes=2, samples=b, batch=64, fused=False, software="megatron-2021")
    software = load_software()["megatron-2021"]
    tmpc = tmpc_of(result, LayerMode(degree=t, sequence_parallel=True, recomputation=Recomputation.FULL))
    memory, kernel = 2039e9 * 0.85, 2e-6

    def matmul(m: float, k: float, n: float, count: float = 1) -> float:
        share = 0.77 * m / (m + 96) * n / (n + 96) * k / (k + 64)
        return kernel + max(2 * m * k * n * count / (312e12 * share), 2 * count * (m * k + k * n + m * n) / memory)

    products = (
        matmul(s * b, h, 3 * h / t)
        + matmul(s, h / a, s, b * a / t)
        + matmul(s, s, h / a, b * a / t)
        + matmul(s * b, h / t, h)
        + matmul(s * b, h, 4 * h / t)
        + matmul(s * b, 4 * h / t, h)
    )
    hidden, scores = s * b * h / t, a * s * s * b / t
    softmax, its_backward = 4 * traffic * scores, 6 * traffic * scores
    others = 7 * kernel  # 2 norms, 2 residuals, softmax, dropout, activation function
    forward = products + others + (2 * 4 * hidden + 2 * 7 * hidden + 4 * 4 * hidden + softmax + 5 * scores) / memory
    backward = (
        2 * products + others + (2 * 6 * hidden + 2 * 5 * hidden + 6 * 4 * hidden + its_backward + 5 * scores) / memory
    )
    half = 7 * (2 * s * b * h / t / (300e9 * 0.78) + 2.5e-6)
    exchange = 2 * half + 2 * software.message_s
    there = forward / software.efficiency + 2 * exchange
    back = (forward + backward) / software.efficiency + 4 * exchange + 2 * half  # gathered again for two products

    launch_s = software.host_s * (1.25 if t == 8 else 1.0)  # the group fills a node

    def with_host(device_s: float, launches: int) -> float:
        return float(math.hypot(device_s**1.5, (launches * launch_s) ** 1.5) ** (1 / 1.5))

    assert tmpc.forward_s == pytest.approx(with_host(there, 12 + steps), rel=1e-5)
    assert tmpc.backward_s == pytest.approx(with_host(back, 6 * 2 + 6 + 12 + 2 * steps), rel=1e-5)
    norms, output_biases = 4 * h, 2 * h
    divided = 12 * h * h + 3 * h + 4 * h
    parameters = divided / t + norms + output_biases
    assert tmpc.weights_bytes == 4 * parameters
    assert tmpc.fixed_bytes == 18 * parameters
    assert tmpc.activation_bytes == 2 * hidden
    assert result.instance.edges[0].communication_bytes == 2 * s * b * h / t
    assert set(tmpc.forward_sync_bytes.values()) == {0.0}
    plain = tmpc_of(result, LayerMode(degree=2))
    gather_s = s * b * h / (300e9 * 0.78) + 2.5e-6
    extra = 2 * s * b * h * (1 / 2 - 1 / t) + gather_s * 25e9 * 0.85
    assert plain.forward_sync_bytes[0] == pytest.approx(extra, abs=1)


def test_what_is_set_aside_is_one_layer_s_backward_pass_and_more_is_charged_to_b() -> None:
    s, b, h, a = 2048, 2, 4096, 32
    result = estimated(gpt(4, h, a), nodes=2, samples=b, batch=64, fused=False)
    sbh, scores = s * b * h, 5 * a * s / h
    # All that the layer keeps; the gradient of the residual stream and of dropout's input, with that of a bias.
    assert result.setting.workspace_bytes == pytest.approx(sbh * (10 + 24 / 8 + scores / 8) + 4 * sbh + 2 * h)
    costs = result.costs(kind_of(result), LayerMode(degree=1, recomputation=Recomputation.FULL))
    # At the scores' dropout: the residual stream's, those of scores and values there and back, less what was kept by
    # the feed-forward part and attention's output.
    gradients = 2 * sbh + 2 * (2 * a * s * s * b + 2 * sbh) - sbh * (1 + 8 + 8 + 2 + 2 + 1 + 2)
    assert costs.transient_bytes == pytest.approx(sbh * (34 + scores) + gradients)
    assert costs.fixed_bytes == costs.state_bytes + costs.transient_bytes - result.setting.workspace_bytes
    plain = result.costs(kind_of(result), LayerMode(degree=1))
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
    with pytest.raises(UsageError, match=r"--reserve 83.82 GiB: a GPU has 78.8 GiB; expected less"):
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
    one, four = (result.costs(kind_of(result), LayerMode(degree=t)) for t in (1, 4))
    experts, attention = 3 * 1024 * 4096 * 4, 1024 * (1024 + 2 * 512 + 1024)
    whole = 2 * 1024 + 1024 * 4  # norms and router
    assert one.parameters == experts + attention + whole
    assert four.parameters == (experts + attention) / 4 + whole
    # With sequence parallelism: all-to-all there and back of each token's 2 copies, once forward and once backward.
    sharded = result.costs(kind_of(result), LayerMode(degree=4, sequence_parallel=True))
    software = load_software()["megatron-core"]
    ring = all_reduce_s(2 * 1024 * 1024, Group(4), H100, 8)
    sent_bytes, copies = 2 * 2 * 2 * 1024 * 1024 / 4, 2 * 1024 / 4
    sent_s = sent_bytes * 3 / 4 / (450e9 * software.dispatch_fraction) + 3 * H100.link_latency_s
    there = 1.25 * (sent_s + copies * H100.sorting_s) + 2 * software.message_s
    exposed = 1 - software.forward_overlap
    assert sharded.passes.talk.forward_s == pytest.approx(exposed * (ring + 2 * software.message_s) + there)
    assert four.passes.talk.forward_s == pytest.approx(exposed * 2 * (ring + software.message_s))


def test_zero_shards_the_optimizer_only_and_gathers_weights_in_place_of_gradients() -> None:
    result = estimated(gpt(2, 1024, 16), nodes=2, batch=64, zero_shards=4)
    plain, sharded = (
        result.costs(kind_of(result), LayerMode(degree=8, sequence_parallel=True, optimizer_shards=shards))
        for shards in (1, 4)
    )
    assert plain.state_bytes == 18 * plain.parameters
    assert sharded.state_bytes == (2 + 4 + 12 / 4) * plain.parameters
    assert sharded.time_s == plain.time_s
    # Around a ring: 4 bytes of a gradient twice, or once and then 2 bytes of a weight.
    assert plain.synchronised_bytes == 4 * plain.parameters
    assert sharded.synchronised_bytes == (4 + 2) / 2 * plain.parameters


def test_sharded_weights_are_gathered_beside_the_passes() -> None:
    result = estimated(gpt(2, 4096, 32), nodes=8, batch=64)
    kind = kind_of(result)
    plain, sharded = (
        result.costs(kind, LayerMode(degree=1, optimizer_shards=n, sharding=Sharding.WEIGHTS)) for n in (1, 64)
    )
    gather_s = all_gather_s(2 * plain.parameters, Group(64), A100, 8)
    scatter_s = all_gather_s(4 * plain.parameters, Group(64), A100, 8)
    forward_s, backward_s = plain.forward_pass_s, plain.time_s - plain.forward_pass_s
    moved_s = gather_s + scatter_s
    assert gather_s < forward_s
    assert sharded.gather_forward_s == pytest.approx(0.25 * gather_s)
    assert sharded.gather_backward_s == pytest.approx(max(0.0, moved_s - backward_s) + 0.25 * min(moved_s, backward_s))
    # Groups of 64 replicas reduce their shards among each other, as one group does not: w says so, p takes it back.
    assert sharded.synchronised_bytes == 4 * plain.parameters / 64
    rate = 8 * 25e9 * 0.85  # 8 links out of each node
    assert sharded.unsaid_s * 64 == pytest.approx(-63 / 64 * 64 * 2 * sharded.synchronised_bytes / rate)
    assert sharded.state_bytes == 18 / 64 * plain.parameters


def test_context_parallelism_splits_tokens_and_attention_and_passes_keys_on() -> None:
    result = estimated(read_model("llama3-8b"), "H100-SXM", nodes=2)
    kind = kind_of(result)
    one, two = (result.costs(kind, LayerMode(degree=1, context=c)) for c in (1, 2))
    assert one.compute_s / 2 < two.compute_s < 0.53 * one.compute_s
    assert two.parameters == one.parameters
    assert 2 * two.activation_bytes == one.activation_bytes
    assert two.passes.talk.forward_s == 0.0  # keys and values pass while attention works
    assert LayerMode(degree=4, sequence_parallel=True, context=2).id == "sp+cp2"


def test_experts_apart_from_tensor_parallelism() -> None:
    result = estimated(
        model_of(
            "mixtral", tokens=1024, hidden_size=1024, num_hidden_layers=1, num_attention_heads=16,
            num_key_value_heads=8, intermediate_size=4096, vocab_size=1000, num_local_experts=16,
        ),
        "H100-SXM", nodes=2,
    )  # fmt: skip
    kind = kind_of(result)
    near, far = (result.costs(kind, LayerMode(degree=1, experts=ranks)) for ranks in (8, 16))
    alone = result.costs(kind, LayerMode(degree=1))
    experts = 3 * 1024 * 4096 * 16
    assert alone.parameters - near.parameters == experts * 7 / 8
    assert alone.parameters - far.parameters == experts * 15 / 16
    assert alone.passes.talk.forward_s == 0.0
    # Over two nodes a token's two copies cross once, in three of four cases; within one they are sorted row by row.
    software = load_software()["megatron-core"]
    far_s = 4 * 1024 * 1024 * (1 - 1 / 4) / (50e9 * 0.85) + 14 * H100.link_latency_s + 2 * H100.network_latency_s
    assert far.passes.talk.forward_s == pytest.approx(1.25 * far_s + 2 * software.message_s)
    sorted_s = 2 * 1024 * H100.sorting_s
    near_s = 4 * 1024 * 2 * 1024 * 7 / 8 / (450e9 * 0.8) + 7 * H100.link_latency_s + sorted_s
    assert near.passes.talk.forward_s == pytest.approx(1.25 * near_s + 2 * software.message_s)


def test_offload_waits_where_the_host_is_slower_than_the_pass() -> None:
    result = estimated(gpt(2, 1024, 16), nodes=2, samples=8, batch=64, offload=True, fused=False)
    kind = kind_of(result)
    mode = LayerMode(degree=1, offload=True)
    costs, kept = result.costs(kind, mode), result.costs(kind, LayerMode(degree=1)).activation_bytes
    moved_s = kept / (32e9 * 0.8)
    assert moved_s > costs.passes.backward_s > costs.passes.forward_s
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


@pytest.mark.parametrize(
    ("software", "gpu", "products", "attention"),
    [
        ("megatron-core", A100, 0.875, 0.9),
        ("megatron-2021", A100, 0.875 * 0.88, 0.9),
        ("megatron-core", H100, 0.67, 0.92),
        ("torchtitan", A100, 0.875, 0.9),
        ("torchtitan", H100, 0.67, 0.92 * 0.68),
        ("llm-foundry-fsdp", A100, 0.875, 0.9 * 0.54),
        ("llm-foundry-fsdp", H100, 0.67, 0.92 * 0.68 * 0.54),
    ],
)
def test_products_and_attention_reach_what_the_software_s_kernels_do(
    software: str, gpu: Gpu, products: float, attention: float
) -> None:
    reached = stack_of(gpu, software_named(software), Precision.BF16, 8).gpu
    assert reached.matrix_fraction == pytest.approx(products)
    assert reached.attention_fraction == pytest.approx(attention)


def test_without_fused_kernels_all_but_products_and_attention_moves_more_bytes() -> None:
    kind = kind_of(estimated(LLAMA, nodes=1))
    fused, eager = (stack_of(H100, software_named(name), Precision.BF16, 8) for name in ("torchtitan", "fsdp"))
    for operator in kind.operators:
        once_s, more_s = (forward_s(operator, kind, LayerMode(), one) for one in (fused, eager))
        moves = not operator.products and kind.value(operator.forward_bytes) > 0.0
        kernel_s = H100.kernel_s if moves else 0.0
        assert more_s - kernel_s == pytest.approx((3.0 if moves else 1.0) * (once_s - kernel_s))


def test_what_products_of_8_bits_read_is_gathered_in_8_bits() -> None:
    kind = kind_of(estimated(LLAMA, nodes=1))
    half, eight = (
        stack_of(H100, software_named("nemo"), precision, 8) for precision in (Precision.BF16, Precision.FP8)
    )
    (exchange, *_), mode = kind.exchanges, LayerMode(degree=4, sequence_parallel=True)
    size_bytes = kind.value(exchange.bytes)
    gather_s = all_gather_s(size_bytes, Group(4), H100, 8)
    messages_s = 2 * half.software.message_s
    assert exchange_s(exchange, kind, mode, half) == pytest.approx(2 * gather_s + messages_s)
    assert exchange_s(exchange, kind, mode, eight) == pytest.approx(1.5 * gather_s + messages_s)
    assert regather_s(exchange, kind, mode, eight) == pytest.approx(all_gather_s(0.5 * size_bytes, Group(4), H100, 8))
