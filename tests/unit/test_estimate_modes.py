"""Further ways to run layers: context and expert parallelism, sharding, kept gathers; their TMPCs by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from piper_ray.model.errors import UsageError
from piper_ray.model.instance import Tmpc
from piper_ray.model.mode import ALL_REPLICAS, Recomputation, Sharding
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.proposal.offers import usual_contexts, usual_spreads
from piper_ray.runtimes.runtime import RUNTIMES, RuntimeName
from piper_ray.workloads.estimate.build import Estimate, EstimateRequest, estimate
from piper_ray.workloads.estimate.config import ModelConfig, read_model
from piper_ray.workloads.estimate.exchanges import Group, all_gather_s, all_to_all_s, reduced
from piper_ray.workloads.estimate.hardware import load_hardware
from piper_ray.workloads.estimate.layout import Layout, priced
from piper_ray.workloads.estimate.modes import LayerMode, Offer
from piper_ray.workloads.estimate.software import software_named
from tests.estimate_support import estimated, gpt, kind_of, model_of, tmpc_of

HARDWARE = load_hardware()
H100 = HARDWARE.gpu("H100-SXM")
RICH = Offer(
    zero=ALL_REPLICAS,
    zero2=8,
    fsdp=8,
    offload=True,
    contexts=(1, 2, 4),
    experts=(4,),
    expert_tensor=2,
    gathered=True,
)


def mixtral(experts: int = 16) -> ModelConfig:
    return model_of(
        "mixtral", tokens=1024, hidden_size=1024, num_hidden_layers=2, num_attention_heads=16, num_key_value_heads=8,
        intermediate_size=4096, vocab_size=1000, num_local_experts=experts,
    )  # fmt: skip


@cache
def rich() -> Estimate:
    """All that is offered, in thousands of modes."""
    return estimated(mixtral(), "H100-SXM", nodes=2, offer=RICH)


@pytest.mark.long
def test_ids_say_how_layers_run() -> None:
    seen = set()
    for mode in (mode for modes in rich().modes.values() for mode in modes):
        found = Tmpc(mode.id, 1.0, recompute=mode.recomputation != Recomputation.NONE).mode
        assert found == mode.without_degree
        seen.add(mode.id)
    assert {"sp+cp2+ep4+etp2+fsdp8", "sp+gathered", "plain+zero", "full+zero2x8", "cp4+zero+offload"} <= seen


def test_each_mode_stands_at_the_devices_that_it_takes_and_none_twice() -> None:
    result = rich()
    for layer, node in zip(result.instance.layers, result.architecture.nodes, strict=True):
        listed = {t: [tmpc.id for tmpc in row] for t, row in layer.tmpcs.items()}
        assert list(listed) == sorted(listed)
        assert all(len(set(ids)) == len(ids) for ids in listed.values())
        expected: dict[int, list[str]] = {}
        for mode in result.modes[node.kind.key]:
            expected.setdefault(mode.degree * mode.context, []).append(mode.id)
        assert listed == expected
        assert max(listed) == 32  # t = 8 in 4 groups, whatever the number of nodes


@pytest.mark.parametrize(
    ("mode", "least"),
    [
        (LayerMode(degree=8), 1),
        (LayerMode(degree=8, optimizer_shards=ALL_REPLICAS), 1),
        (LayerMode(degree=2, optimizer_shards=8), 8),
        (LayerMode(degree=2, optimizer_shards=8, context=2), 4),
        (LayerMode(degree=2, optimizer_shards=6, context=4), 2),
        (LayerMode(degree=2, experts=8), 4),
        (LayerMode(degree=2, experts=8, expert_tensor=2), 8),
        (LayerMode(degree=2, experts=8, context=4), 1),
        (LayerMode(degree=1, experts=4, optimizer_shards=16, sharding=Sharding.WEIGHTS), 16),
    ],
)
def test_replicas_that_a_mode_needs(mode: LayerMode, least: int) -> None:
    assert mode.least_data_parallel_degree == least


@pytest.mark.parametrize(
    "mode",
    [
        LayerMode(degree=1),
        LayerMode(degree=2, optimizer_shards=ALL_REPLICAS),
        LayerMode(degree=1, context=2),
        LayerMode(degree=2, context=2, optimizer_shards=4),
        LayerMode(degree=1, experts=4),
        LayerMode(degree=2, experts=4, context=2, optimizer_shards=4),
        LayerMode(degree=1, optimizer_shards=4, sharding=Sharding.WEIGHTS),
        LayerMode(degree=1, optimizer_shards=4, sharding=Sharding.GRADIENTS),
    ],
)
def test_what_the_planner_charges_is_what_the_replicas_links_take(mode: LayerMode) -> None:
    """2 (d - 1) / d of w, and so much in each of N / d microbatches: a ring of all that have a weight, at every d."""
    result = estimated(mixtral(), "H100-SXM", nodes=1, batch=512)
    costs, setting, kind = result.costs(kind_of(result), mode), result.setting, kind_of(result)
    for d in (1, 2, 4, 8):
        if d < mode.least_data_parallel_degree or mode.devices * d > 8:
            continue
        link = result.instance.cluster.replicas_link(d, mode.devices)
        charged_s = 4.0 * (d - 1) / d * costs.synchronised_bytes / link.bandwidth_bytes_per_s
        within_s = setting.microbatches / d * costs.unsaid_s
        ring_s = sum(x.ring_s(d, setting.stack) for x in reduced(kind, mode, setting.stack, setting.training))
        assert charged_s + within_s == pytest.approx(ring_s, rel=1e-9, abs=1e-12)


def test_gradients_of_groups_that_share_a_sequence_by_hand() -> None:
    result = estimated(read_model("llama3-8b"), "H100-SXM", nodes=2, batch=64, offer=Offer(contexts=(1, 2)))
    plain, two = (
        tmpc_of(result, mode)
        for mode in (
            LayerMode(degree=4, sequence_parallel=True),
            LayerMode(degree=4, sequence_parallel=True, context=2),
        )
    )
    numbers = plain.fixed_bytes / 18
    assert two.weights_bytes == plain.weights_bytes == 4 * numbers
    assert two.fixed_bytes == plain.fixed_bytes
    assert two.activation_bytes == pytest.approx(plain.activation_bytes / 2, abs=1)
    costs = result.costs(kind_of(result), LayerMode(degree=4, sequence_parallel=True, context=2))
    # Over both groups in a node, once in 64 microbatches: half of 4 bytes a number there and back.
    assert costs.unsaid_s == pytest.approx(2 * 0.5 * 4 * numbers / (450e9 * 0.78) / 64)
    assert two.time_per_sample_s == pytest.approx(costs.time_s + costs.unsaid_s, rel=1e-5)


def test_ways_to_attend_to_all_tokens_by_hand() -> None:
    """Llama 3 8B: 8 heads of keys and values of 128, 32 of queries; 8,192 tokens over 8 groups of 1."""
    mode, s = LayerMode(degree=1, context=8), 8192
    keys_bytes, queries_bytes = 4 * s * 8 * 128, 4 * s * 32 * 128
    message_s = software_named("megatron-core").message_s
    found = {}
    for name in ("ring", "all-gather", "all-to-all"):
        result = estimated(read_model("llama3-8b"), "H100-SXM", context_exchange=name, offer=Offer(contexts=(1, 8)))
        costs = result.costs(kind_of(result), mode)
        found[name] = (costs.passes.talk.forward_s, costs.passes.talk.backward_s)
    gather_s = all_gather_s(keys_bytes, Group(8), H100, 8) + message_s
    heads_s = all_to_all_s((keys_bytes + queries_bytes) / 8, Group(8), H100, 8) + 2 * message_s
    assert found["all-gather"] == pytest.approx((gather_s, 2 * gather_s))
    assert found["all-to-all"] == pytest.approx((heads_s, heads_s))
    assert found["ring"][0] < gather_s
    between = all_gather_s(keys_bytes, Group(2, 8), H100, 8)
    assert between == pytest.approx(keys_bytes / 2 / (50e9 * 0.85), rel=0.03)  # a group in another node: the network


def test_an_all_to_all_of_heads_needs_whole_heads() -> None:
    few = model_of(
        "llama", tokens=1024, hidden_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        intermediate_size=1024, vocab_size=1000,
    )  # fmt: skip
    for name, most in (("ring", 16), ("all-to-all", 4)):
        result = estimated(few, "H100-SXM", nodes=2, context_exchange=name, offer=Offer(contexts=(1, 2, 4)))
        assert max(mode.devices for mode in result.modes["block"]) == most


def test_states_shared_by_replicas_by_hand() -> None:
    """18 bytes a parameter: 2 of weights, 4 of gradients, 12 of the optimizer."""
    result = estimated(gpt(2, 4096, 32), "H100-SXM", nodes=8, batch=64, offer=Offer(ALL_REPLICAS, 8, 16))
    plain = tmpc_of(result, LayerMode(degree=8))
    numbers = plain.fixed_bytes / 18
    everywhere = tmpc_of(result, LayerMode(degree=8, optimizer_shards=ALL_REPLICAS))
    assert (everywhere.fixed_bytes, everywhere.shared_bytes) == (6 * numbers, 12 * numbers)
    assert (everywhere.least_data_parallel_degree, everywhere.weights_bytes) == (1, 3 * numbers)
    gradients = tmpc_of(result, LayerMode(degree=8, optimizer_shards=8, sharding=Sharding.GRADIENTS))
    assert gradients.fixed_bytes == pytest.approx((2 + 16 / 8) * numbers, abs=1)
    assert gradients.weights_bytes == pytest.approx((1 + 4 / 8) * numbers, abs=1)
    whole = tmpc_of(result, LayerMode(degree=8, optimizer_shards=16, sharding=Sharding.WEIGHTS))
    assert whole.fixed_bytes == pytest.approx(18 / 16 * numbers, abs=1)
    assert whole.weights_bytes == pytest.approx(4 / 16 * numbers, abs=1)
    assert [x.least_data_parallel_degree for x in (gradients, whole)] == [8, 16]
    assert plain.time_per_sample_s < gradients.time_per_sample_s < whole.time_per_sample_s
    # Set aside of every device: two layers' weights, one's gradients in half precision and in fp32, its backward pass.
    kinds = result.architecture.kinds
    assert result.setting.workspace_bytes > max(10 * kind.parameters for kind in kinds if kind.key == "block")


def test_weights_over_all_replicas_are_over_as_many_as_a_stage_may_have() -> None:
    """On 64 devices stages of t = 8 have 8, 4 or 2 replicas; each is priced as if it were asked for alone."""
    every = estimated(gpt(2, 4096, 32), "H100-SXM", nodes=8, batch=64, offer=Offer(fsdp=ALL_REPLICAS))
    found = {mode for mode in every.modes["block"] if mode.degree == 8 and mode.sharding is Sharding.WEIGHTS}
    assert {mode.optimizer_shards for mode in found} == {2, 4, 8}
    alone = estimated(gpt(2, 4096, 32), "H100-SXM", nodes=8, batch=64, offer=Offer(fsdp=4))
    mode = LayerMode(degree=8, optimizer_shards=4, sharding=Sharding.WEIGHTS)
    assert every.costs(kind_of(every), mode).planned_s == alone.costs(kind_of(alone), mode).planned_s


def test_scattered_gradients_and_gathered_weights_hide_beside_passes() -> None:
    result = estimated(gpt(2, 4096, 32), "H100-SXM", nodes=8, batch=64)
    kind = kind_of(result)
    costs = result.costs(kind, LayerMode(degree=8, optimizer_shards=8, sharding=Sharding.GRADIENTS))
    scatter_s = all_gather_s(4 * costs.trained, Group(8, 8), H100, 8)
    backward_s = costs.passes.backward_s + costs.passes.talk.backward_s + costs.passes.idle_backward_s
    exposed_s = max(0.0, scatter_s - backward_s)
    assert costs.gather_forward_s == 0.0
    assert costs.gather_backward_s == pytest.approx(exposed_s + 0.25 * min(scatter_s, backward_s))


def test_experts_have_replicas_and_shards_of_their_own() -> None:
    result = estimated(mixtral(), "H100-SXM", nodes=2, batch=64)
    kind, training = kind_of(result), result.setting.training
    experts, others = 3 * 1024 * 4096 * 16, kind.parameters - 3 * 1024 * 4096 * 16
    mode = LayerMode(degree=1, experts=4, expert_tensor=2, optimizer_shards=16)
    costs = result.costs(kind, mode)
    assert costs.parameters == others + experts / 8
    # 16 replicas of all else; 2 of each expert, which lies on 8 of the 16 ranks.
    assert costs.state_bytes == pytest.approx(others * (6 + 12 / 16) + experts / 8 * (6 + 12 / 2))
    dense, routed = reduced(kind, mode, result.setting.stack, training)
    assert (dense.group(16), routed.group(16)) == (Group(16, 1), Group(2, 8))
    assert routed.size_bytes == 3 * experts / 8
    shared = result.costs(kind, LayerMode(degree=1, experts=4, optimizer_shards=ALL_REPLICAS))
    assert shared.shared_bytes == 12 * (others + 4 * experts / 4)
    assert shared.state_bytes == 6 * (others + experts / 4)


def test_busier_experts_take_longer() -> None:
    hardware, model = HARDWARE, mixtral()
    even, usual, uneven = (
        estimate(model, hardware, "H100-SXM", EstimateRequest(nodes=1, offer=Offer(experts=(8,)), expert_imbalance=x))
        for x in (1.0, None, 2.0)
    )
    times = [x.costs(kind_of(x), LayerMode(degree=1, experts=8)).time_s for x in (even, usual, uneven)]
    assert times == sorted(times)
    assert usual.setting.stack.imbalance == 1.25


def test_what_is_kept_gathered_is_not_gathered_again() -> None:
    t, s, h = 4, 2048, 4096
    result = estimated(gpt(2, h, 32), "H100-SXM", offer=Offer(gathered=True))
    kind = kind_of(result)
    again, kept = (
        result.costs(kind, LayerMode(degree=t, sequence_parallel=True, gathered=gathered)) for gathered in (False, True)
    )
    tensor_bytes = 2 * s * h
    gather_s = all_gather_s(tensor_bytes, Group(t), H100, 8)
    hidden = software_named("megatron-core").backward_overlap
    assert again.passes.talk.backward_s - kept.passes.talk.backward_s == pytest.approx(2 * (1 - hidden) * gather_s)
    assert kept.activation_bytes - again.activation_bytes == pytest.approx(2 * tensor_bytes * (1 - 1 / t))
    ids = {tmpc.id for tmpc in result.instance.layers[1].tmpcs[t]}
    assert {"sp", "sp+gathered", "sp+full"} <= ids
    assert not any("gathered" in x and ("full" in x or "selective" in x) for x in ids)


@pytest.mark.parametrize(
    ("layout", "mode"),
    [
        ({"tensor": 2, "context": 2, "data": 2}, LayerMode(degree=2, context=2)),
        ({"tensor": 2, "data": 4, "expert": 4, "expert_tensor": 2}, LayerMode(degree=2, experts=4, expert_tensor=2)),
        (
            {"tensor": 1, "data": 8, "sharding": Sharding.WEIGHTS},
            LayerMode(degree=1, optimizer_shards=8, sharding=Sharding.WEIGHTS),
        ),
        (
            {"tensor": 2, "data": 4, "sharding": Sharding.GRADIENTS, "shards": 2},
            LayerMode(degree=2, optimizer_shards=2, sharding=Sharding.GRADIENTS),
        ),
    ],
)
def test_a_given_layout_is_priced_by_the_same_figures(layout: dict[str, object], mode: LayerMode) -> None:
    result = estimated(mixtral(), "H100-SXM", nodes=1, batch=16)
    asked = Layout(pipeline=1, samples=1, batch=16, schedule=Schedule(ScheduleName.ONE_F_ONE_B), tokens=1024, **layout)  # type: ignore[arg-type]
    found = priced(mixtral(), result.setting.stack, HARDWARE.training, asked)
    costs = result.costs(kind_of(result), mode)
    (tmpc,) = found.instance.layers[1].tmpcs[mode.devices]
    assert tmpc.id == mode.id
    assert tmpc.time_per_sample_s == pytest.approx(costs.time_s, rel=1e-5)
    assert tmpc.activation_bytes == pytest.approx(costs.activation_bytes, abs=1)


@pytest.mark.parametrize(
    ("offer", "model", "words"),
    [
        (Offer(contexts=(1, 3)), mixtral(), "--context-parallel 3: 1,024 tokens are no multiple of 6"),
        (Offer(contexts=(1, 2)), read_model("resnet50"), "has no attention over a sequence"),
        (Offer(experts=(3,)), mixtral(), "--expert-parallel 3: the 16 experts of"),
        (Offer(experts=(8,)), read_model("llama3-8b"), "--expert-parallel: llama3-8b has no experts"),
        (Offer(experts=(4,), expert_tensor=5), mixtral(), "--expert-tensor-parallel 5: the inner width of"),
    ],
)
def test_what_a_model_cannot_have_is_refused(offer: Offer, model: ModelConfig, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        estimated(model, "H100-SXM", nodes=2, offer=offer)


def test_weights_that_fill_a_device_when_gathered_are_not_sharded() -> None:
    result = estimated(read_model("llama3-405b"), "H100-SXM", nodes=64, offer=Offer(fsdp=64))
    sharded = {mode.degree for mode in result.modes["block"] if mode.sharding is Sharding.WEIGHTS}
    assert sharded
    assert 1 not in sharded
    (said,) = result.instance.notes
    assert said.startswith("weights are not sharded at t = 1")
    assert result.setting.workspace_bytes < 0.25 * H100.device_bytes
    small = estimated(read_model("llama3-8b"), "H100-SXM", nodes=2, offer=replace(RICH, experts=(), expert_tensor=1))
    assert small.instance.notes == ()


MIXTRAL_SPREADS = ((8, 1), (8, 2), (8, 4), (8, 8), (1, 8))
DEEPSEEK_SPREADS = ((8, 1), (16, 1), (32, 1), (64, 1), (1, 8))


@pytest.mark.parametrize(
    ("model", "tokens", "name", "contexts", "spreads"),
    [
        ("llama3-8b", 8192, RuntimeName.MEGATRON, (1, 2, 4), ()),
        ("llama3-8b", 32768, RuntimeName.MEGATRON, (1, 2, 4, 8), ()),
        ("llama3-8b", 131072, RuntimeName.TORCHTITAN, (1, 2, 4, 8), ()),
        ("llama3-8b", 131072, RuntimeName.DEEPSPEED, (1,), ()),
        ("mixtral-8x22b", 8192, RuntimeName.MEGATRON, (1, 2, 4), MIXTRAL_SPREADS),
        ("mixtral-8x22b", 8192, RuntimeName.TORCHTITAN, (1, 2, 4), ((8, 1),)),
        ("mixtral-8x22b", 8192, RuntimeName.DEEPSPEED, (1,), ()),
        ("deepseek-v3", 4096, RuntimeName.MEGATRON, (1, 2), DEEPSEEK_SPREADS),
        ("resnet50", None, RuntimeName.MEGATRON, (1,), ()),
    ],
)
def test_what_plan_tries_if_nobody_says(
    model: str, tokens: int | None, name: RuntimeName, contexts: tuple[int, ...], spreads: tuple[tuple[int, int], ...]
) -> None:
    read, runtime = read_model(model), RUNTIMES[name]
    assert usual_contexts(read, tokens, runtime, runtime.context_exchanges[0]) == contexts
    assert usual_spreads(read, tokens, runtime, 8, 8, 256) == spreads
    within = tuple((ranks, each) for ranks, each in spreads if ranks * each <= 16)
    assert usual_spreads(read, tokens, runtime, 8, 8, 16) == within


def test_experts_are_spread_within_a_domain_of_several_nodes() -> None:
    """Of 72 GPUs in nodes of 4: by doublings of a node, as the published layouts of GB200 have it (64)."""
    megatron, mixture = RUNTIMES[RuntimeName.MEGATRON], read_model("deepseek-v3")
    found = ((4, 1), (8, 1), (16, 1), (32, 1), (64, 1), (1, 4))
    assert usual_spreads(mixture, 4096, megatron, 4, 72, 256) == found
    assert usual_spreads(mixture, 4096, megatron, 4, 72, 16) == (*found[:3], (1, 4))
