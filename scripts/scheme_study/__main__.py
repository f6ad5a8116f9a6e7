"""Found schemes against Megatron's and against context parallelism: per block, and for whole plans.

Run from the root: python -m scripts.scheme_study [MODEL:GPU ...]. It prints two tables in Markdown.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

import piper_ray
from piper_ray.model.instance import Instance
from piper_ray.workloads.estimate.build import Estimate, EstimateRequest, estimate
from piper_ray.workloads.estimate.config import read_model
from piper_ray.workloads.estimate.hardware import load_hardware
from piper_ray.workloads.estimate.modes import Offer
from piper_ray.workloads.schemes.frontier import KindSchemes, find_schemes
from piper_ray.workloads.schemes.tmpcs import with_schemes

_CASES = [
    f"{model}:{gpu}"
    for model in ("llama3-8b", "gpt3-175b", "mixtral-8x7b")
    for gpu in ("A100-80", "H100-SXM", "B200-SXM")
]
_NODES = {"llama3-8b": 4, "gpt3-175b": 32, "mixtral-8x7b": 8}
_BATCH = 256
_IN_FLIGHT = 8
_DEGREES = (2, 4, 8)
_LIMIT_S = 60


@dataclass(frozen=True)
class _Case:
    """A model on a cluster: estimates without and with context parallelism and spread experts; schemes."""

    name: str
    megatron: Estimate
    context: Estimate
    found: list[KindSchemes]


def _case(name: str) -> _Case:
    model, gpu = name.split(":")
    hardware = load_hardware(None, lambda _: None)

    def estimated(offer: Offer) -> Estimate:
        return estimate(
            read_model(model), hardware, gpu, EstimateRequest(nodes=_NODES[model], batch=_BATCH, offer=offer)
        )

    megatron = estimated(Offer(zero=0))
    spreads = tuple((ranks, each) for ranks in (1, 2, 4, 8) for each in (1, 2, 4, 8) if ranks * each <= 8)
    has_experts = any(kind.experts for kind in megatron.architecture.kinds)
    context = estimated(Offer(zero=0, contexts=(1, 2, 4, 8), spreads=spreads if has_experts else ()))
    kinds = [kind for kind in megatron.architecture.kinds if kind.recomputable]
    found = [find_schemes(megatron, kind, t, (float(_IN_FLIGHT),), lambda _: None) for kind in kinds for t in _DEGREES]
    return _Case(name, megatron, context, found)


def _blocks(case: _Case) -> list[str]:
    """A row for each degree and memory: that of sequence parallelism, and of it with everything recomputed."""
    rows = []
    for of in case.found:
        assert of.kind is not None
        sizes: dict[str, Any] = {}
        times: dict[str, Any] = {}
        for words, result in (("Megatron", case.megatron), ("context", case.context)):
            for mode in result.modes[of.kind.key]:
                if mode.devices == of.degree and mode.optimizer_shards == 1:
                    costs = result.costs(of.kind, mode)
                    held = _IN_FLIGHT * costs.activation_bytes + costs.state_bytes
                    times.setdefault(words, []).append((held, costs.planned_s))
                    if words == "Megatron":
                        sizes[mode.id] = held
        for limit in ("sp", "sp+full"):
            if limit not in sizes:
                continue
            most = sizes[limit] * (1.0 + 1e-6)
            best = {words: min(s for held, s in pairs if held <= most) for words, pairs in times.items()}
            fits = [one for one in of.found if one.scheme.figures.held_bytes(_IN_FLIGHT) <= most]
            mine = min(fits, key=lambda one: one.scheme.figures.time_s)
            time_s = mine.scheme.figures.time_s
            gains = " | ".join(f"{100.0 * (1.0 - time_s / best[words]):.1f} %" for words in ("Megatron", "context"))
            rows.append(
                f"| {case.name.replace(':', ', ')} | {of.degree} | {limit} | {1e3 * best['Megatron']:.2f} | "
                f"{1e3 * time_s:.2f} | {gains} | {mine.name} |"
            )
    return rows


def _plan(case: _Case) -> str:
    """The steps of the best plans under 1f1b, and their bounds."""

    def step(instance: Instance) -> tuple[float, float]:
        solution = piper_ray.solve(instance, schedule="1f1b", time_limit=_LIMIT_S)
        assert solution.time_per_sample_s is not None
        return tuple(x * instance.microbatches for x in (solution.time_per_sample_s, solution.lower_bound_s))  # type: ignore[return-value]

    instances = [case.megatron.instance, case.context.instance, _joined(case)]
    (first, _), (second, _), (third, bound) = map(step, instances)
    second = min(first, second)  # plans of fewer TMPCs are plans of more, too
    third = min(second, third)
    return (
        f"| {case.name.replace(':', ', ')} | {case.megatron.devices} | {first:.3f} | {second:.3f} | {third:.3f} | "
        f"{bound:.3f} | {100.0 * (1.0 - third / first):.1f} % | {100.0 * (1.0 - third / second):.1f} % |"
    )


def _joined(case: _Case) -> Instance:
    """The workload with context parallelism and with found schemes, whose optimizer's state all replicas share."""
    added = with_schemes(case.megatron, case.found, zero=True)
    layers = []
    for layer, more, plain in zip(
        case.context.instance.layers, added.layers, case.megatron.instance.layers, strict=True
    ):
        rows = dict(layer.tmpcs)
        for t, row in more.tmpcs.items():
            more_rows = row[len(plain.tmpcs.get(t, ())) :]
            rows[t] = (*rows.get(t, ()), *(tmpc for tmpc in more_rows if tmpc.shared_bytes))
        layers.append(replace(layer, tmpcs=rows))
    return replace(case.context.instance, layers=tuple(layers))


def _main(names: list[str]) -> None:
    blocks, plans = [], []
    for name in names or _CASES:
        case = _case(name)
        blocks += _blocks(case)
        plans.append(_plan(case))
        print(*blocks[-6:], plans[-1], sep="\n", file=sys.stderr, flush=True)
    print("| model, GPU | t | memory of | Megatron, ms | found, ms | over it | over context parallelism | scheme |")
    print("|---|---:|---|---:|---:|---:|---:|---|", *blocks, sep="\n")
    print("\n| model, GPU | GPUs | Megatron, s | with context, s | with found, s | bound, s | over it | over context |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|", *plans, sep="\n")


_main(sys.argv[1:])
