"""Where the workloads and the published figures come from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from piper_ray.formats import load
from piper_ray.model import Instance

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30
BANDWIDTH = 25 * GIB
"""What the paper calls 25 GB/s, in bytes per s."""


@dataclass(frozen=True)
class Sources:
    """published: a folder with piper/ (the authors' inputs) and goldens/ (what their code answers), if it is there."""

    published: Path

    @property
    def is_there(self) -> bool:
        return (self.published / "piper").is_dir()

    def bert(self, blocks: int, devices: int, microbatches: int, memory_gib: float) -> Instance:
        """BERT on A100s; the inputs of this project equal the published ones figure for figure."""
        return load(
            ROOT / "inputs" / f"bert{blocks}-a100.toml",
            devices=devices,
            microbatches=microbatches,
            memory_bytes=memory_gib * GIB,
            bandwidth_bytes_per_s=BANDWIDTH,
        )

    def piper(self, name: str, devices: int, memory_gib: float, microbatches: int | None = None) -> Instance:
        """One of the authors' inputs, with the file's own N unless one is given."""
        return load(
            self.published / "piper" / name,
            devices=devices,
            microbatches=microbatches,
            memory_bytes=memory_gib * GIB,
            bandwidth_bytes_per_s=BANDWIDTH,
        )

    def records(self, name: str) -> list[dict[str, Any]]:
        """Of a file of the goldens, a line each; none if it is not there."""
        path = self.published / "goldens" / name
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []

    def reference(self, name: str) -> dict[tuple[int, int, float], dict[str, Any]]:
        """By (K, N, M in GiB), N = 0 for the file's own: what the authors' code answers on one of their inputs."""
        found = (record for record in self.records("published.jsonl") if record["input"] == name)
        return {(record["K"], record["N"], record["M_GiB"]): record for record in found}
