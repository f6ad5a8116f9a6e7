"""The workloads of the evaluation, and what the authors' code answers on them."""

from __future__ import annotations

from piper_ray.model.instance import Instance
from piper_ray.workloads.formats.load import load
from tests.data import INPUTS, WORKLOADS, Record, goldens

GIB = 2**30
BANDWIDTH = 25 * GIB
"""What the paper calls 25 GB/s, in bytes per s."""


def bert(blocks: int, devices: int, microbatches: int, memory_gib: float) -> Instance:
    """BERT on A100s; with 32 blocks it is the published one figure for figure."""
    return load(
        INPUTS / f"bert{blocks}-a100.toml",
        devices=devices,
        microbatches=microbatches,
        memory_bytes=memory_gib * GIB,
        bandwidth_bytes_per_s=BANDWIDTH,
    )


def published(name: str, devices: int, memory_gib: float, microbatches: int | None = None) -> Instance:
    """One of the authors' workloads, with its own N unless one is given."""
    return load(
        WORKLOADS[name],
        devices=devices,
        microbatches=microbatches,
        memory_bytes=memory_gib * GIB,
        bandwidth_bytes_per_s=BANDWIDTH,
    )


def reference(name: str) -> dict[tuple[int, int | None, float], Record]:
    """By (K, N, M in GiB), N None for the workload's own: what the authors' code answers on one of their workloads."""
    found = (record for record in goldens("published") if record["workload"] == name)
    return {(record["devices"], record["microbatches"], record["memory_gib"]): record for record in found}
