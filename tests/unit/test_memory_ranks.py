"""The most that a rank holds: against a closed form of Megatron-Core's runs, and moment by moment."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest

from piper_ray.model.mode import Recomputation, Sharding
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.simulate.actions import ActionKind, flush_lists
from piper_ray.workloads.estimate.architectures import FAMILIES
from piper_ray.workloads.estimate.families import Microbatch
from piper_ray.workloads.estimate.memory import kept_bytes, parameters_on_device, working_bytes
from piper_ray.workloads.estimate.modes import LayerMode
from piper_ray.workloads.estimate.operators import LayerKind
from piper_ray.workloads.estimate.ranks import Chunk, RankLayout, RankMemory, memory_of_rank
from piper_ray.workloads.estimate.runtimes import GIB, MIB, Loss, Traits
from tests.estimate_support import FSDP, MEGATRON_CORE, NEMO, model_of

S, H, F, A, G, D, V, LAYERS = 2048, 2048, 5632, 32, 8, 64, 65536, 8
"""TinyLlama's shape, with a vocabulary whose loss stands out."""

MODEL = model_of(
    "llama", tokens=S, hidden_size=H, num_hidden_layers=LAYERS, num_attention_heads=A, num_key_value_heads=G,
    intermediate_size=F, vocab_size=V, max_position_embeddings=S,
)  # fmt: skip
LAYER_PARAMETERS = H * (A + 2 * G) * D + A * D * H + 3 * H * F
KINDS = [Recomputation.NONE, Recomputation.of("selective-mlp"), Recomputation.SELECTIVE, Recomputation.FULL]
FUSED_LOSS = replace(MEGATRON_CORE, loss=Loss.FUSED)

Passes = Iterable[tuple[str, int]]


def layers_of(mode: LayerMode) -> list[tuple[LayerKind, LayerMode]]:
    nodes = MODEL.architecture(Microbatch(1, S)).nodes
    plain = replace(mode, recomputation=Recomputation.NONE)
    return [(node.kind, mode if node.kind.recomputable else plain) for node in nodes]


def passes_of(schedule: Schedule, ranks: int, microbatches: int, rank: int) -> list[tuple[str, int]]:
    return [(ActionKind(kind).name, int(chunk)) for kind, chunk, _ in flush_lists(schedule, ranks, microbatches)[rank]]


def ranks_of(
    mode: LayerMode, schedule: Schedule, ranks: int, replicas: int, runtime: Traits, microbatches: int = 8,
    sharding: Sharding = Sharding.OPTIMIZER,
) -> list[RankMemory]:  # fmt: skip
    """Layers evenly over chunks, with the embedding in the first and the projection in the last."""
    layers, count = layers_of(mode), ranks * schedule.v
    size = LAYERS // count
    chunks: list[Chunk] = [layers[1 + size * place : 1 + size * (place + 1)] for place in range(count)]
    chunks[0] = [layers[0], *chunks[0]]
    chunks[-1] = [*chunks[-1], layers[-1]]
    found = []
    for rank in range(ranks):
        mine = [chunks[stage] for stage in schedule.stages_of_rank(rank, ranks)]
        layout = RankLayout(mine, replicas, 1, sharding, ranks, rank)
        found.append(memory_of_rank(layout, passes_of(schedule, ranks, microbatches, rank), runtime))
    return found


def megatron_bytes(t: int, p: int, rank: int, d: int) -> float:
    """Megatron-Core with TransformerEngine, SP, 1F1B and the fused loss, term by term and in one formula each."""
    sequence = 2.0 * S * H / t  # a tensor of the residual stream
    inner = 2.0 * S * F / t
    layers = LAYERS // p
    first, last = rank == 0, rank == p - 1
    parameters = layers * (LAYER_PARAMETERS / t + 2 * H) + (first + last) * V * H / t + last * H
    state = parameters * (2 + 4 + 12 / d)
    layer = 4 * sequence + (4 * S * (A + G) * D + 4 * S * A) / t + 3 * inner
    kept = min(8, p - rank) * (layers * layer + first * 8 * S)
    reused = 2 * (LAYER_PARAMETERS + last * V * H) / t
    whole = 2.0 * S * H
    shared = t > 1
    gathered = whole + sequence if shared else 0.0
    swiglu = sequence + 2 * inner
    first_product = sequence + 2 * inner + whole + gathered - 3 * inner
    second_product = sequence + inner + (whole if shared else 0.0)
    working = max(swiglu, first_product, second_product)
    logits = 2.0 * S * V / t
    if last:
        head = 2 * sequence + logits
        kept += head
        working = max(whole + gathered, working - head)
    return state + kept + reused + working + 64 * MIB + (sequence if rank else 0.0)


@pytest.mark.parametrize(("t", "p", "d"), [(1, 1, 8), (8, 1, 1), (1, 2, 4), (2, 4, 1), (4, 2, 16)])
def test_ranks_of_megatron_core_in_closed_form(t: int, p: int, d: int) -> None:
    mode = LayerMode(degree=t, sequence_parallel=t > 1)
    found = ranks_of(mode, Schedule(ScheduleName.ONE_F_ONE_B), p, d, FUSED_LOSS)
    assert [rank.allocated_bytes for rank in found] == pytest.approx([megatron_bytes(t, p, r, d) for r in range(p)])


def test_each_item_is_told_and_they_sum_up() -> None:
    first, last = ranks_of(LayerMode(degree=1), Schedule(ScheduleName.ONE_F_ONE_B), 2, 4, FUSED_LOSS)
    parameters = 4 * (LAYER_PARAMETERS + 2 * H) + V * H
    assert first.items["weights"] == 2 * parameters
    assert first.items["gradients"] == 4 * parameters
    assert first.items["optimizer state"] == 3 * parameters
    assert first.items["activations: decoder layer"] == 2 * last.items["activations: decoder layer"]
    assert first.moment == "decoder layer"
    assert last.moment == "vocabulary projection"
    assert last.items["logits and loss"] == 2 * 2 * S * H + 2 * S * V
    for rank in (first, last):
        assert rank.allocated_bytes == sum(rank.items.values())
        assert all(size > 0 for size in rank.items.values())


def test_what_the_device_must_have_beside_what_is_allocated() -> None:
    (rank,) = ranks_of(LayerMode(degree=1), Schedule(ScheduleName.ONE_F_ONE_B), 1, 8, FUSED_LOSS)
    states = sum(rank.items[name] for name in ("weights", "gradients", "optimizer state"))
    passing = rank.allocated_bytes - states
    assert rank.reserved_bytes == pytest.approx(rank.allocated_bytes + 0.18 * passing)
    assert rank.device_bytes == pytest.approx(rank.allocated_bytes + 0.05 * passing + 0.75 * GIB + 0.4 * GIB)


@pytest.mark.parametrize("rank", range(4))
def test_chunks_in_flight_when_they_are_interleaved(rank: int) -> None:
    """Megatron: (v - 1) p + 2 (p - 1 - r) + 1 chunks, of a layer each."""
    found = ranks_of(LayerMode(degree=1), Schedule(ScheduleName.INTERLEAVED, 2), 4, 1, FUSED_LOSS)[rank]
    kind, mode = layers_of(LayerMode(degree=1))[1]
    chunks = 4 + 2 * (3 - rank) + 1
    assert found.items["activations: decoder layer"] == chunks * kept_bytes(kind, mode)
    assert found.items["tensors between stages"] == 2 * 2 * S * H


def test_a_batch_of_few_microbatches_has_no_more_in_flight() -> None:
    few = ranks_of(LayerMode(degree=1), Schedule(ScheduleName.ONE_F_ONE_B), 4, 1, FUSED_LOSS, microbatches=2)
    kind, mode = layers_of(LayerMode(degree=1))[1]
    assert few[0].items["activations: decoder layer"] == 2 * 2 * kept_bytes(kind, mode)


def test_weights_gradients_wait_with_what_they_need() -> None:
    """I leaves all that W reads; only after W is a microbatch gone."""
    layers = layers_of(LayerMode(degree=1))[1:3]
    layout = RankLayout([layers], 1, 1, Sharding.NONE)
    split = [("F", 0), ("I", 0), ("F", 0), ("I", 0), ("W", 0), ("W", 0)]
    whole = [("F", 0), ("B", 0), ("F", 0), ("B", 0)]
    kept = sum(kept_bytes(kind, mode) for kind, mode in layers)
    two, one = (memory_of_rank(layout, passes, MEGATRON_CORE) for passes in (split, whole))
    assert two.allocated_bytes - one.allocated_bytes == kept


def test_half_precision_gradients_are_copied_for_the_step() -> None:
    """Where activations are few the step is the worst moment."""
    mode = LayerMode(degree=8, sequence_parallel=True, recomputation=Recomputation.FULL)
    wide = layers_of(mode)
    layout = RankLayout([wide[1:2] * 40], 1, 1, Sharding.NONE)
    rank = memory_of_rank(layout, [("F", 0), ("B", 0)], NEMO)
    parameters = 40 * parameters_on_device(*wide[1])
    assert rank.moment == "the optimizer's step"
    assert rank.allocated_bytes == pytest.approx(20 * parameters + NEMO.workspace_bytes)


def test_experts_states_are_shared_by_their_own_replicas() -> None:
    mixtral = model_of(
        "mixtral", tokens=512, hidden_size=512, num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=8,
        intermediate_size=1024, vocab_size=1000, num_local_experts=8,
    )  # fmt: skip
    kind = mixtral.architecture(Microbatch(1, 512)).nodes[1].kind
    mode = LayerMode(degree=1, experts=4)
    rank = memory_of_rank(RankLayout([[(kind, mode)]], 8, 2, Sharding.OPTIMIZER), [("F", 0), ("B", 0)], MEGATRON_CORE)
    experts = 3 * 512 * 1024 * 2  # two of the eight
    dense = 4 * 512 * 512 + 2 * 512 + 512 * 8
    assert rank.items["optimizer state"] == 12 * (experts / 2 + dense / 8)
    assert rank.items["weights"] == 2 * (experts + dense)
    assert rank.items["workspace of products"] == (64 + 128) * MIB


def test_fully_sharded_weights_are_gathered_by_layers() -> None:
    (rank,) = ranks_of(LayerMode(degree=1), Schedule(ScheduleName.ONE_F_ONE_B), 1, 64, FSDP, sharding=Sharding.WEIGHTS)
    layer, table = LAYER_PARAMETERS + 2 * H, V * H + H
    assert rank.items["gathered weights"] == 2 * (2 * layer + V * H + table)
    assert rank.items["weights"] == pytest.approx(4 * (LAYERS * layer + 2 * V * H + H) / 64)
    first, _ = ranks_of(LayerMode(degree=1), Schedule(ScheduleName.ONE_F_ONE_B), 2, 64, FSDP, sharding=Sharding.WEIGHTS)
    assert first.items["gathered weights"] == 2 * (4 * layer + V * H)
    assert first.items["gradients until they are reduced"] == 4 * (4 * layer + V * H)
    (alone,) = ranks_of(LayerMode(degree=1), Schedule(ScheduleName.ONE_F_ONE_B), 1, 1, FSDP, sharding=Sharding.WEIGHTS)
    assert "gathered weights" not in alone.items


def test_a_layer_s_gradients_are_there_while_they_are_reduced() -> None:
    """In half precision and in fp32, at the worst moment of layers alone; without sharded weights there are none."""
    blocks, passes = [layer for layer in layers_of(LayerMode(degree=1)) if layer[0].recomputable], [("F", 0), ("B", 0)]
    layer = LAYER_PARAMETERS + 2 * H
    sharded, whole = (
        memory_of_rank(RankLayout([blocks], 8, 8, sharding), passes, FSDP)
        for sharding in (Sharding.WEIGHTS, Sharding.OPTIMIZER)
    )
    assert sharded.moment == whole.moment
    work = [rank.items[f"backward pass: {rank.moment}"] for rank in (sharded, whole)]
    assert work[0] - work[1] == (2 + 4) * layer


def slow_worst_bytes(chunks: Sequence[Chunk], passes: Passes, runtime: Traits) -> float:
    """Layer by layer: what is there before each layer's backward pass, with what that needs."""
    held: list[tuple[int, float]] = []
    worst = 0.0
    for kind, chunk in passes:
        layers = chunks[chunk]
        if kind == "F":
            held += [(chunk, kept_bytes(layer, mode, runtime)) for layer, mode in layers]
            continue
        first = next(place for place, (owner, _) in enumerate(held) if owner == chunk)
        mine, held = held[first : first + len(layers)], held[:first] + held[first + len(layers) :]
        others = sum(size for _, size in held)
        for (layer, mode), _ in zip(reversed(layers), reversed(mine), strict=True):
            worst = max(worst, others + sum(size for _, size in mine) + working_bytes(layer, mode, runtime))
            mine = mine[:-1]
    return worst


@pytest.mark.parametrize("recomputation", KINDS, ids=lambda kind: kind.id)
@pytest.mark.parametrize("name", [ScheduleName.GPIPE, ScheduleName.ONE_F_ONE_B, ScheduleName.INTERLEAVED])
def test_the_worst_moment_is_that_of_the_slow_twin(name: ScheduleName, recomputation: Recomputation) -> None:
    layers = layers_of(LayerMode(degree=2, sequence_parallel=True, recomputation=recomputation))
    schedule = Schedule(name)
    chunks: Sequence[Chunk] = [layers[:4], layers[4:]][: schedule.v]
    for rank in range(4):
        passes = passes_of(schedule, 4, 8, rank)
        memory = memory_of_rank(RankLayout(chunks, 1, 1, Sharding.NONE, 4, rank), passes, MEGATRON_CORE)
        found = sum(memory.terms[term] for term in ("activations", "logits and loss", "backward pass"))
        assert found == pytest.approx(slow_worst_bytes(chunks, passes, MEGATRON_CORE))


SAMPLES = {
    "vit": {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 128},
    "bert": {
        "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 99,
    },
    "resnet": {},
    "t5": {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 1, "num_heads": 4, "vocab_size": 99},
}  # fmt: skip


@pytest.mark.parametrize("model_type", SAMPLES)
def test_all_kinds_of_layers_have_figures(model_type: str) -> None:
    assert model_type in FAMILIES
    model = model_of(model_type, **SAMPLES[model_type])
    for node in model.architecture(Microbatch(2, model.tokens)).nodes:
        for recomputation in KINDS if node.kind.recomputable else (Recomputation.NONE,):
            mode = LayerMode(degree=1, recomputation=recomputation)
            kept = kept_bytes(node.kind, mode)
            assert kept >= 0
            assert working_bytes(node.kind, mode) >= 0
