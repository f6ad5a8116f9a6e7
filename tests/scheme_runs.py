"""Schemes of traced layers under random prices, run by ranks over gloo."""

from __future__ import annotations

from typing import Any

from piper_ray.model.stop import Stop
from piper_ray.run.launch import launch
from piper_ray.run.schemes import SchemeJob, SchemeOutcome
from piper_ray.workloads.measure.operators import traced_programs
from piper_ray.workloads.schemes.document import digest_of, in_full
from piper_ray.workloads.schemes.layers import BORDERS
from piper_ray.workloads.schemes.names import known_divisions, name_of
from piper_ray.workloads.schemes.program import SchemeProgram
from piper_ray.workloads.schemes.scheme import PricedGraph
from tests.scheme_support import RandomPrices

FILE = "tests/scheme_modules.py"


def schemes_in_full(family: str, degree: int, seeds: range) -> list[dict[str, Any]]:
    """Of each layer of a family: those that runtimes have, and for each of some random prices the fastest one within
    much memory or little."""
    found = []
    for graph in (one.traced.graph for one in traced_programs(f"{FILE}:{family}", 2, exact=True)):
        if not graph.leaving:
            continue
        schemes = [
            (SchemeProgram(graph, degree, RandomPrices(0), border, only).fastest(1.0), 0)
            for border, only in known_divisions(graph, degree).values()
        ]
        for seed in seeds:
            program = SchemeProgram(graph, degree, RandomPrices(seed), BORDERS[seed % 2])
            schemes.append((program.fastest(8.0, (1.0001, 1.5)[seed // 2 % 2] * program.least_held_bytes(8.0)), seed))
        for scheme, seed in schemes:
            if scheme is not None:
                full = in_full(scheme, PricedGraph(graph, RandomPrices(seed)))
                found.append({**full, "id": digest_of(scheme), "name": name_of(scheme, graph)})
    return found


def outcomes(family: str, degree: int, documents: list[dict[str, Any]]) -> tuple[SchemeOutcome, ...]:
    job = SchemeJob(f"{FILE}:{family}", {}, (), 2, degree, 3, tuple(documents))
    found: tuple[SchemeOutcome, ...] = launch(job, lambda _done, _all: None, Stop()).outcomes
    return found
