"""What is measured: searches long enough for a cluster, three from files and one of two towers."""

from __future__ import annotations

from dataclasses import dataclass

from piper_ray.model.instance import Edge, Instance, Layer, Tmpc
from piper_ray.model.units import parse_bytes, parse_bytes_per_s
from scripts.benchmarks.bench_solve import load_case
from scripts.benchmarks.cases import BANDWIDTH, CASES, Case
from scripts.benchmarks.families import tower_edges

MB = 1e6

TOWERS, TIGHT_TOWERS = "towers", "towers-tight"
TOWER_HEIGHT = 130
"""17,163 downsets, 74,770,478 nested pairs."""


@dataclass(frozen=True)
class RayCase:
    """One search. limit_s: of each solve. repeats: of each executor, in turns. quick: part of a short run."""

    id: str
    title: str
    limit_s: float
    repeats: int = 1
    quick: bool = True

    @property
    def file_case(self) -> Case | None:
        """Where it comes from; None for one that is made here."""
        return CASES.get(self.id)

    def load(self) -> Instance:
        case = self.file_case
        if case is None:
            memory = "2.5GiB" if self.id == TIGHT_TOWERS else "8GiB"
            return towers(2, TOWER_HEIGHT, devices=16, microbatches=64, memory=memory)
        return load_case(case)


def _from_file(case_id: str, limit_s: float, repeats: int = 1, *, quick: bool = True) -> RayCase:
    return RayCase(case_id, CASES[case_id].title, limit_s, repeats, quick)


RAY_CASES = (
    _from_file("gnmt-k16", 30.0, 3),
    RayCase(TOWERS, f"two towers of {TOWER_HEIGHT} K=16 N=64 M=8GiB", 60.0),
    RayCase(TIGHT_TOWERS, f"two towers of {TOWER_HEIGHT} K=16 N=64 M=2.5GiB", 120.0, quick=False),
    _from_file("inception-k128", 60.0, 3),
    _from_file("inception-tight", 150.0, quick=False),
    _from_file("inception-k48", 20.0, quick=False),
)


def towers(count: int, height: int, *, devices: int, microbatches: int, memory: str) -> Instance:
    """Chains of ``height`` layers side by side between a first and a last one: (height + 1)^count + 2 downsets.

    Layers differ, each with four TMPCs on 1, 2 and 4 devices, so that no two stages cost the same.
    """
    edges = tower_edges(count, height, lambda: 4 * MB, lambda: 8 * MB)
    return Instance(
        layers=tuple(
            Layer(layer, f"layer{layer}", {degree: _tmpcs(layer, degree, list(edges)) for degree in (1, 2, 4)})
            for layer in range(count * height + 2)
        ),
        edges=tuple(Edge(source, target, size) for (source, target), size in edges.items()),
        devices=devices,
        microbatches=microbatches,
        memory_bytes=parse_bytes(memory),
        bandwidth_bytes_per_s=parse_bytes_per_s(BANDWIDTH),
        name=TOWERS,
    )


def _tmpcs(layer: int, degree: int, edges: list[tuple[int, int]]) -> tuple[Tmpc, ...]:
    """From all activations kept to all recomputed. The remainders spread the figures over the layers."""
    time_s = 4e-3 * (1 + layer * 37 % 11 / 20) * (1 + 0.08 * (degree - 1) ** 0.5) / degree
    activation = (60 + layer * 53 % 17 * 4) * MB / degree
    weights = (20 + layer * 29 % 13 * 3) * MB / degree
    sync = MB if degree > 1 else 0.0
    forward = {source: sync for source, target in edges if target == layer}
    backward = {target: sync for source, target in edges if source == layer}

    def tmpc(name: str, slower: float, kept: float, fixed: float) -> Tmpc:
        return Tmpc(
            name, time_s * slower, weights, activation * kept, fixed, forward, backward, recompute=name == "recompute"
        )

    return (
        tmpc("vanilla", 1.0, 1.0, 2 * weights),
        tmpc("selective", 1.07, 0.55, 2 * weights),
        tmpc("offload", 1.12, 0.35, 2.2 * weights),
        tmpc("recompute", 1.33, 0.08, 2 * weights + activation),
    )
