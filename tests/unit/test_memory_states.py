"""What is kept for each parameter, against the figures that its sources print."""

from __future__ import annotations

import pytest

from piper_ray.model.mode import Sharding
from piper_ray.workloads.estimate.runtimes import StateBytes, held_by


def states_of(software: str) -> StateBytes:
    found = held_by(software)
    assert found is not None
    return found.states


MEGATRON, HALF_GRADIENTS = states_of("megatron-core"), states_of("nemo")
DEEPSPEED_BF16, FULLY_SHARDED = states_of("deepspeed-2021"), states_of("fsdp")


def total(states: StateBytes, sharding: Sharding, shards: int) -> float:
    return sum(states.held(sharding, shards).values())


@pytest.mark.parametrize("d", [1, 2, 8, 64])
def test_megatron_s_distributed_optimizer(d: int) -> None:
    """Megatron-Core's guide: 18 and 6 + 12/d with fp32 gradients; 20 and 4 + 16/d with half-precision ones, of which 4
    are there for the step alone."""
    assert total(MEGATRON, Sharding.NONE, d) == 18
    assert total(MEGATRON, Sharding.OPTIMIZER, d) == pytest.approx(6 + 12 / d)
    assert MEGATRON.step_bytes(Sharding.OPTIMIZER, d) == 0
    for sharding, whole in ((Sharding.NONE, 20.0), (Sharding.OPTIMIZER, 4 + 16 / d)):
        held = total(HALF_GRADIENTS, sharding, d) + HALF_GRADIENTS.step_bytes(sharding, d)
        assert held == pytest.approx(whole)


@pytest.mark.parametrize(
    ("sharding", "gigabytes"),
    [(Sharding.NONE, 120.0), (Sharding.OPTIMIZER, 31.4), (Sharding.GRADIENTS, 16.6), (Sharding.WEIGHTS, 1.9)],
)
def test_zero_on_64_gpus(sharding: Sharding, gigabytes: float) -> None:
    """Rajbhandari et al. 2020, figure 1: 7.5 billion parameters over 64 GPUs."""
    assert total(HALF_GRADIENTS, sharding, 64) * 7.5 == pytest.approx(gigabytes, abs=0.05)


def test_bf16_gradients_may_have_an_fp32_sum_beside_them() -> None:
    assert total(DEEPSPEED_BF16, Sharding.NONE, 1) == 20
    assert total(DEEPSPEED_BF16, Sharding.OPTIMIZER, 8) == pytest.approx(8 + 12 / 8)
    assert total(DEEPSPEED_BF16, Sharding.GRADIENTS, 8) == pytest.approx(2 + 18 / 8)


def test_fully_sharded_is_fp32_throughout() -> None:
    assert total(FULLY_SHARDED, Sharding.WEIGHTS, 32) == pytest.approx(16 / 32)
    assert FULLY_SHARDED.held(Sharding.WEIGHTS, 4) == {"weights": 1.0, "gradients": 1.0, "optimizer state": 2.0}
