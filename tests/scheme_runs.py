"""Schemes of traced layers under random prices, run by ranks over gloo."""

from __future__ import annotations

import json
import os
import pickle
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from piper_ray.run.scheme_ranks import follow
from piper_ray.run.schemes import SchemeJob
from piper_ray.workloads.measure.operators import traced_programs
from piper_ray.workloads.schemes.document import digest_of, in_full
from piper_ray.workloads.schemes.layers import BORDERS
from piper_ray.workloads.schemes.names import known_divisions, name_of
from piper_ray.workloads.schemes.program import SchemeProgram
from piper_ray.workloads.schemes.scheme import PricedGraph
from tests.run_support import loopback
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


def job_of(family: str, degree: int, documents: list[dict[str, Any]]) -> SchemeJob:
    return SchemeJob(f"{FILE}:{family}", {}, (), 2, degree, 3, tuple(documents))


def main(job_file: str, rank: int) -> None:
    """A rank of jobs in turn, for tests.ranks: the document has the path of them, pickled. The first one's results are
    the outcomes of each.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = loopback()
    read: dict[str, Any] = json.loads(Path(job_file).read_text())
    rendezvous = Path(read["rendezvous"]).as_uri()
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=read["ranks"])
    runs = [follow(job, lambda _: None) for job in pickle.loads(Path(read["jobs"]).read_bytes())]
    dist.barrier()
    dist.destroy_process_group()
    found = [[asdict(one) for one in run.outcomes] for run in runs if run is not None]
    Path(read["results"], f"{rank}.json").write_text(json.dumps(found))
