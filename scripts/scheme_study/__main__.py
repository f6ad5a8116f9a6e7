"""Found schemes against Megatron's and against context parallelism: per block, and for whole plans.

Run from the root: python -m scripts.scheme_study [MODEL:GPU ...]. It prints two tables in Markdown, a row of each for
each case as soon as it is known.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from piper_ray.workloads.estimate.build import Estimate, EstimateRequest, estimate
from piper_ray.workloads.estimate.config import read_model
from piper_ray.workloads.estimate.hardware import load_hardware
from piper_ray.workloads.estimate.modes import Offer
from piper_ray.workloads.schemes.layers import BORDERS, graph_of
from piper_ray.workloads.schemes.names import name_of
from piper_ray.workloads.schemes.prices import EstimatedPrices
from piper_ray.workloads.schemes.program import SchemeProgram

_CASES = [
    f"{model}:{gpu}"
    for model in ("llama3-8b", "gpt3-175b", "mixtral-8x7b")
    for gpu in ("A100-80", "H100-SXM", "B200-SXM")
]
_NODES = {"llama3-8b": 4, "gpt3-175b": 32, "mixtral-8x7b": 8}
_BATCH = 256
_IN_FLIGHT = 8.0
_DEGREE = 4
_UPTO_8 = "1,2,4,8"


@dataclass(frozen=True)
class _Case:
    """A model on a cluster."""

    model: str
    gpu: str

    @property
    def name(self) -> str:
        return f"{self.model}, {self.gpu}"

    def estimated(self, offer: Offer) -> Estimate:
        hardware = load_hardware(None, lambda _: None)
        request = EstimateRequest(nodes=_NODES[self.model], batch=_BATCH, offer=offer)
        return estimate(read_model(self.model), hardware, self.gpu, request)

    def blocks(self) -> Iterator[str]:
        """A row for each memory: that of sequence parallelism, and of it with everything recomputed."""
        megatron = self.estimated(Offer(zero=0))
        spreads = tuple((ranks, each) for ranks in (1, 2, 4, 8) for each in (1, 2, 4, 8) if ranks * each <= 8)
        has_experts = any(kind.experts for kind in megatron.architecture.kinds)
        context = self.estimated(Offer(zero=0, contexts=(1, 2, 4, 8), spreads=spreads if has_experts else ()))
        kind = next(kind for kind in megatron.architecture.kinds if kind.recomputable)
        of = graph_of(kind, _DEGREE)
        prices = EstimatedPrices(_DEGREE, megatron.setting, of)
        programs = [SchemeProgram(of.graph, _DEGREE, prices, border) for border in BORDERS]
        times: list[list[tuple[float, float, str]]] = []
        for result in (megatron, context):
            modes = (one for one in result.modes[kind.key] if (one.devices, one.optimizer_shards) == (_DEGREE, 1))
            costs = [(result.costs(kind, mode), mode.id) for mode in modes]
            times.append([(_IN_FLIGHT * x.activation_bytes + x.state_bytes, x.planned_s, name) for x, name in costs])
        for limit in ("sp", "sp+full"):
            most = next(held for held, _, name in times[0] if name == limit) * (1.0 + 1e-6)
            best = [min(seconds for held, seconds, _ in rows if held <= most) for rows in times]
            within = [one for one in (program.fastest(_IN_FLIGHT, most) for program in programs) if one is not None]
            mine = min(within, key=lambda one: one.figures.time_s)
            time_s = mine.figures.time_s
            gains = " | ".join(f"{100.0 * (1.0 - time_s / one):.1f} %" for one in best)
            yield (
                f"| {self.name} | {limit} | {1e3 * best[0]:.2f} | {1e3 * time_s:.2f} | {gains} | "
                f"{name_of(mine, of.graph)} |"
            )

    def plan(self) -> str:
        """The steps of the best plans that ``plan`` finds, and what is proved of the last one."""

        def planned(*more: str) -> dict[str, Any]:
            asked = ["plan", self.model, "--gpu", self.gpu, "--nodes", str(_NODES[self.model]), "--headroom", "0"]
            asked += ["--global-batch", str(_BATCH), "--microbatch-size", "1", "--schedule", "1f1b", "--dry-run"]
            command = [sys.executable, "-m", "piper_ray", *asked, "--json", *more]
            found: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
            return dict(found["search"])

        everything = "--context-parallel", _UPTO_8
        first, second, third = (
            planned("--context-parallel", "1"),
            planned(*everything),
            planned(*everything, "--schemes"),
        )
        steps = [float(one["step_s"]) for one in (first, second, third)]
        save = "-" if third["schemes"] is None else f"{100.0 * third['schemes']['save_at_most']:.1f} %"
        gains = " | ".join(f"{100.0 * (1.0 - steps[2] / one):.1f} %" for one in steps[:2])
        texts = " | ".join(f"{one:.3f}" for one in steps)
        return f"| {self.name} | {_NODES[self.model] * 8} | {texts} | {gains} | {100.0 * third['gap']:.1f} % | {save} |"


def _main(names: list[str]) -> None:
    cases = [_Case(*name.split(":")) for name in names or _CASES]
    print("| model, GPU, t = 4 | memory of | Megatron, ms | found, ms | over it | over all of `estimate` | scheme |")
    print("|---|---|---:|---:|---:|---:|---|", flush=True)
    for case in cases:
        print(*case.blocks(), sep="\n", flush=True)
    print("\n| model, GPU | GPUs | Megatron, s | all of `estimate`, s | with found, s | over Megatron | over ", end="")
    print("`estimate` | gap | schemes save |\n|---|---:|---:|---:|---:|---:|---:|---:|---:|", flush=True)
    for case in cases:
        print(case.plan(), flush=True)


_main(sys.argv[1:])
