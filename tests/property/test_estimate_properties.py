"""What must hold of the estimator's figures for any model and any GPU of the table."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper_ray.model.mode import Recomputation
from piper_ray.workloads.estimate.build import Estimate
from piper_ray.workloads.estimate.config import ModelConfig
from piper_ray.workloads.estimate.costs import LayerCosts
from piper_ray.workloads.estimate.hardware import load_hardware
from piper_ray.workloads.estimate.modes import LayerMode
from piper_ray.workloads.estimate.operators import LayerKind
from tests.estimate_support import estimated, model_of
from tests.formats_support import assert_consistent

GPUS = sorted(load_hardware().gpus)


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    """A small model of any family that has tensor parallelism."""
    heads = draw(st.sampled_from([4, 8, 12, 16]))
    width = heads * draw(st.sampled_from([32, 64, 128]))
    layers = draw(st.integers(1, 3))
    common = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    inner = draw(st.sampled_from([2, 3, 4])) * width
    text = {"intermediate_size": inner, "vocab_size": draw(st.sampled_from([1000, 32000]))}
    tokens = draw(st.sampled_from([64, 512, 4096]))
    groups = draw(st.sampled_from([heads, heads // 2, heads // 4]))
    family = draw(st.sampled_from(["gpt_neox", "llama", "bert", "t5", "mixtral", "deepseek_v3", "vit", "clip"]))
    if family == "t5":
        shape = {"d_model": width, "d_kv": 64, "d_ff": inner, "num_layers": layers, "num_heads": heads}
        return model_of("t5", tokens=tokens, vocab_size=1000, **shape)
    if family == "vit":
        return model_of("vit", intermediate_size=inner, **common)
    if family == "clip":
        return model_of("clip", vision_config={"intermediate_size": inner, **common})
    if family in ("bert", "gpt_neox"):
        return model_of(family, tokens=tokens, max_position_embeddings=4096, **common, **text)
    experts = {} if family == "llama" else {"num_local_experts": 8}
    if family == "deepseek_v3":
        experts = {"n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "q_lora_rank": 256}
    return model_of(
        family, tokens=tokens, max_position_embeddings=4096, num_key_value_heads=groups, **experts, **common, **text
    )


@st.composite
def estimates(draw: st.DrawFn) -> Estimate:
    samples = draw(st.sampled_from([1, 2, 8]))
    return estimated(
        draw(models()),
        draw(st.sampled_from(GPUS)),
        nodes=draw(st.sampled_from([1, 4])),
        samples=samples,
        batch=samples * 16,
        fused=draw(st.booleans()),
        zero_shards=draw(st.sampled_from([1, 4])),
        offload=draw(st.booleans()),
    )


def all_costs(result: Estimate) -> list[tuple[LayerKind, dict[LayerMode, LayerCosts]]]:
    return [
        (kind, {mode: result.costs(kind, mode) for mode in result.modes[kind.key]})
        for kind in result.architecture.kinds
    ]


def same_but(mode: LayerMode, **changes: object) -> LayerMode:
    fields = {name: getattr(mode, name) for name in LayerMode.__dataclass_fields__}
    return LayerMode(**{**fields, **changes})


@given(estimates())
def test_more_devices_never_compute_longer_nor_need_more_memory(result: Estimate) -> None:
    for _, costs in all_costs(result):
        for few, many in itertools.combinations(sorted({mode.degree for mode in costs}), 2):
            for mode in [mode for mode in costs if mode.degree == few]:
                larger = same_but(mode, degree=many, sequence_parallel=mode.sequence_parallel)
                before, after = costs[mode], costs[larger]
                assert after.compute_s <= before.compute_s
                assert after.activation_bytes <= before.activation_bytes
                assert after.fixed_bytes <= before.fixed_bytes
                assert after.gradient_bytes <= before.gradient_bytes


@given(estimates())
@pytest.mark.long
def test_sequence_parallelism_costs_no_more(result: Estimate) -> None:
    for _, costs in all_costs(result):
        for mode, with_it in costs.items():
            if mode.sequence_parallel:
                without = costs[same_but(mode, sequence_parallel=False)]
                assert with_it.compute_s <= without.compute_s
                assert with_it.activation_bytes <= without.activation_bytes
                # What it does not keep it gathers while a pass runs.
                held_bytes = with_it.activation_bytes + with_it.fixed_bytes
                assert held_bytes <= without.activation_bytes + without.fixed_bytes


@given(estimates())
@pytest.mark.long
def test_recomputation_keeps_less_and_takes_longer(result: Estimate) -> None:
    for kind, costs in all_costs(result):
        for mode, plain in costs.items():
            if not kind.recomputable or mode.recomputation != Recomputation.NONE or mode.offload:
                continue
            selective = costs.get(same_but(mode, recomputation=Recomputation.SELECTIVE))
            full = costs[same_but(mode, recomputation=Recomputation.FULL)]
            assert full.activation_bytes < plain.activation_bytes
            assert full.time_s > plain.time_s
            if selective is not None:
                assert full.activation_bytes <= selective.activation_bytes < plain.activation_bytes
                assert plain.time_s < selective.time_s < full.time_s


@given(estimates())
def test_sharding_saves_memory_and_offload_is_never_faster(result: Estimate) -> None:
    for _, costs in all_costs(result):
        for mode, found in costs.items():
            if mode.offload:
                kept = costs[same_but(mode, offload=False)]
                assert found.activation_bytes == 0.0
                assert found.time_s >= kept.time_s
                assert found.state_bytes == kept.state_bytes
            if mode.optimizer_shards > 1:
                whole = costs[same_but(mode, optimizer_shards=1)]
                assert found.state_bytes < whole.state_bytes
                assert found.time_s == whole.time_s
                assert found.synchronised_bytes <= whole.synchronised_bytes
                assert found.activation_bytes == whole.activation_bytes


@given(estimates())
def test_the_instance_is_sound_and_its_figures_are_those_of_the_costs(result: Estimate) -> None:
    assert_consistent(result.instance)
    for layer, node in zip(result.instance.layers, result.architecture.nodes, strict=True):
        tmpcs = [(t, tmpc) for t, listed in layer.tmpcs.items() for tmpc in listed]
        assert [(mode.degree, mode.id) for mode in result.modes[node.kind.key]] == [(t, x.id) for t, x in tmpcs]
        for mode, (_, tmpc) in zip(result.modes[node.kind.key], tmpcs, strict=True):
            found = result.costs(node.kind, mode)
            assert abs(tmpc.time_per_sample_s - found.time_s) <= 1e-5 * found.time_s
            assert 0 <= tmpc.activation_bytes - found.activation_bytes < 1
            assert 0 <= tmpc.fixed_bytes - found.fixed_bytes < 1
            assert tmpc.recompute == (mode.recomputation != Recomputation.NONE)
    assert result.instance.memory_bytes + result.setting.workspace_bytes <= result.setting.gpu.device_bytes


@given(estimates())
def test_what_a_device_sends_falls_with_the_degree(result: Estimate) -> None:
    """c + fw with sequence parallelism is the tensor's share; at the largest degree fw is nothing."""
    cost = {(edge.source, edge.target): edge.communication_bytes for edge in result.instance.edges}
    output = {index: node.kind.value(node.kind.output) for index, node in enumerate(result.architecture.nodes)}
    for layer in result.instance.layers:
        for t, tmpcs in layer.tmpcs.items():
            for tmpc in tmpcs:
                for source, extra in tmpc.forward_sync_bytes.items():
                    share = output[source] / t
                    assert cost[source, layer.id] + extra >= share - 1
                    if tmpc.id.startswith("sp") or t == 1:
                        assert cost[source, layer.id] + extra <= share + 2
