"""Instances for tests of schedules with a flush."""

from __future__ import annotations

from random import Random

from piper_ray.model.instance import Instance, Tmpc
from tests.instances import RECOMPUTE, VANILLA, build, with_extras


def uneven_layers(seed: int) -> Instance:
    """Three to six layers, mostly in a chain, with many devices for few microbatches."""
    rng = Random(f"uneven {seed}")
    count, shortcuts = rng.randint(3, 6), rng.choice([0.0, 0.3])
    pairs = [(u, v) for u in range(count) for v in range(u + 1, count) if v == u + 1 or rng.random() < shortcuts]
    ids = (VANILLA, RECOMPUTE)[: rng.choice([1, 2])]

    def tmpc(name: str) -> Tmpc:
        time_s = 0.1 + rng.uniform(0, 12) ** rng.choice([1, 2])
        recompute = name != VANILLA
        return Tmpc(name, time_s, rng.uniform(0, 6), rng.uniform(0, 3), rng.uniform(0, 3), recompute=recompute)

    tmpcs = {v: {1: [tmpc(name) for name in ids]} for v in range(count)}
    instance = build(
        tmpcs,
        {pair: rng.uniform(0, 3) for pair in pairs},
        devices=rng.randint(3, 12),
        microbatches=rng.choice([2, 3, 4, 5, 6, 8, 10, 16]),
        memory_bytes=rng.choice([1e6, rng.uniform(5, 40)]),
        bandwidth_bytes_per_s=float(rng.choice([2, 16, 100])),
    )
    return with_extras(rng, instance)
