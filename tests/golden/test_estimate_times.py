"""Times against published runs: layers on one node, and the throughput of whole trainings as the planner sees them.

The planner's time per sample is that of a pipeline that never drains, so the flush at the end of a batch (the bubble),
the optimizer and the loader, which the published figures include, are not in it.
"""

from __future__ import annotations

import pytest

from piper_ray.evaluate import Evaluation, evaluate
from piper_ray.model.mode import Recomputation
from piper_ray.model.plan import Plan, Stage
from piper_ray.workloads.estimate.build import Estimate
from piper_ray.workloads.estimate.config import read_model
from piper_ray.workloads.estimate.modes import LayerMode
from tests.estimate_support import estimated, gpt, kind_of

TOKENS, VOCABULARY = 2048, 51200


# Korthikanti et al. 2022, table 4: forward and backward time of one layer of the 22B model, t = 8, 4 samples, A100.
@pytest.mark.parametrize(
    ("mode", "forward_ms", "backward_ms"),
    [
        (LayerMode(degree=8), 7.7, 11.9),
        (LayerMode(degree=8, sequence_parallel=True), 7.2, 11.8),
        (LayerMode(degree=8, recomputation=Recomputation.FULL), 7.7, 19.5),
        (LayerMode(degree=8, recomputation=Recomputation.SELECTIVE), 7.7, 13.2),
        (LayerMode(degree=8, sequence_parallel=True, recomputation=Recomputation.SELECTIVE), 7.2, 13.1),
    ],
    ids=lambda value: value.id if isinstance(value, LayerMode) else "",
)
def test_a_layer_within_6_percent(mode: LayerMode, forward_ms: float, backward_ms: float) -> None:
    result = estimated(gpt(48, 6144, 64), samples=4, batch=4, fused=False, software="megatron-2022")
    costs = result.costs(kind_of(result), mode)
    forward_s = costs.passes.forward_s + costs.passes.talk.forward_s
    backward_s = (
        costs.passes.backward_s + costs.passes.again_s + costs.passes.talk.backward_s + costs.passes.talk.again_s
    )
    assert 1e3 * forward_s == pytest.approx(forward_ms, rel=0.06)
    assert 1e3 * backward_s == pytest.approx(backward_ms, rel=0.06)


# Narayanan et al. 2021, table 1: parameters in billions, heads, width, layers, t, stages, GPUs, batch, TFLOP/s on each
# GPU; then the samples of a microbatch, from the scripts published with it (Megatron-LM, examples/sc21).
MEGATRON = [
    (1.7, 24, 2304, 24, 1, 1, 32, 512, 137, 16),
    (3.6, 32, 3072, 30, 2, 1, 64, 512, 138, 16),
    (7.5, 32, 4096, 36, 4, 1, 128, 512, 142, 16),
    (18.4, 48, 6144, 40, 8, 1, 256, 1024, 135, 8),
    (39.1, 64, 8192, 48, 8, 2, 512, 1536, 138, 4),
    (76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140, 2),
    (145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148, 2),
    (310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155, 1),
    (529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163, 1),
    (1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163, 1),
]


@pytest.mark.parametrize("row", MEGATRON, ids=[f"{row[0]}B" for row in MEGATRON])
def test_megatrons_runs_within_15_percent(row: tuple[float, ...]) -> None:
    billions, *whole, published = row[0], *map(int, row[1:8]), row[8]
    heads, width, layers, t, stages, gpus, batch = whole
    samples = int(row[9])
    result = estimated(
        gpt(layers, width, heads),
        nodes=gpus // t,
        gpus_per_node=t,
        samples=samples,
        batch=batch,
        fused=False,
        software="megatron-2021",
    )
    assert result.architecture.parameters == pytest.approx(billions * 1e9, rel=0.03)
    found = cost(result, equal_stages(layers, stages), gpus // (t * stages), t, "full")
    assert max(stage.memory_bytes for stage in found.stages) <= result.instance.memory_bytes
    # The paper's own count of a batch with full recomputation, equation 3.
    flop = 96 * batch * TOKENS * layers * width**2 * (1 + TOKENS / (6 * width) + VOCABULARY / (16 * layers * width))
    batch_s = found.time_per_sample_s * result.instance.microbatches
    assert flop / batch_s / gpus / 1e12 == pytest.approx(published, rel=0.15)


# Llama Team 2024, table 4: GPUs, data-parallel degree, TFLOP/s on each GPU; t = 8, 16 stages, batches of 16 M tokens.
@pytest.mark.parametrize(("gpus", "d", "published"), [(8192, 64, 430), (16384, 128, 400)])
def test_llama3s_runs_within_20_percent(gpus: int, d: int, published: float) -> None:
    result = estimated(read_model("llama3-405b"), "H100-SXM", nodes=gpus // 8)
    found = cost(result, equal_stages(126, 16), d, 8, "sp")
    tokens, parameters = 8192, result.architecture.parameters
    flop = 6 * parameters * tokens + 126 * 6 * tokens**2 * 16384  # causal: half of the square of scores
    assert flop / found.time_per_sample_s / gpus / 1e12 == pytest.approx(published, rel=0.20)


def equal_stages(layers: int, stages: int) -> list[list[int]]:
    """Layers 1 to ``layers`` cut as evenly as they can be, the embedding (0) and the head with the first and last."""
    bounds = [round(layers * stage / stages) for stage in range(stages + 1)]
    cut = [list(range(1 + bounds[stage], 1 + bounds[stage + 1])) for stage in range(stages)]
    cut[0].insert(0, 0)
    cut[-1].append(layers + 1)
    return cut


def cost(result: Estimate, cut: list[list[int]], d: int, t: int, tmpc: str) -> Evaluation:
    """The plan of these stages, each layer with the TMPC of that id (or plain, where it has none), whatever memory."""
    layers = result.instance.layers
    chosen = [
        {layer: tmpc if any(x.id == tmpc for x in layers[layer].tmpcs[t]) else "plain" for layer in stage}
        for stage in cut
    ]
    plan = Plan(tuple(Stage(tuple(stage), d, t, ids) for stage, ids in zip(cut, chosen, strict=True)))
    return evaluate(result.instance.replace(memory_bytes=1e15), plan, schedule="2bw")
