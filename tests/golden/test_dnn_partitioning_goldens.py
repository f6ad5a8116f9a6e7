"""dnn-partitioning's own optima, without CPUs and replication, on its throughput inputs."""

from __future__ import annotations

from typing import Any

import pytest

from piper_ray.engine.solve import solve
from piper_ray.model.constraints import Restrictions
from piper_ray.model.instance import Instance
from piper_ray.model.options import SolveOptions
from piper_ray.model.solution import Status
from piper_ray.workloads.formats.load import load
from tests.data import goldens
from tests.lengths import long_after

GOLDENS = {record["name"]: record for record in goldens("dnn_partitioning")}


def document(record: dict[str, Any]) -> dict[str, Any]:
    """The record in dnn-partitioning's own form."""
    nodes = [
        {"id": number, "supportedOnFpga": 1, "cpuLatency": 0.0, "fpgaLatency": latency_ms, "isBackwardNode": backward,
         "size": size_bytes} | ({} if colour is None else {"colorClass": colour})
        for number, latency_ms, backward, colour, size_bytes in record["nodes"]
    ]  # fmt: skip
    edges = [
        {"sourceId": source, "destId": target, "cost": cost}
        for source, cost, *targets in record["sends"]
        for target in targets
    ]
    return {
        "maxSizePerFPGA": record["memory_bytes"],
        "maxFPGAs": record["accelerators"],
        "maxCPUs": 0,
        "nodes": nodes,
        "edges": edges,
    }


def read(name: str) -> Instance:
    return load(document(GOLDENS[name]))


@pytest.mark.parametrize("name", long_after(3, GOLDENS))
def test_the_optima_are_those_of_the_authors_program(name: str) -> None:
    instance = read(name)
    for devices, optimum_ms in GOLDENS[name]["optimum_ms"].items():
        solution = solve(
            instance.replace(devices=int(devices), microbatches=int(devices)),
            restrictions=Restrictions(data_parallelism=False),
            options=SolveOptions(threads=1),
        )
        assert solution.status is Status.OPTIMAL
        assert solution.time_per_sample_s == pytest.approx(optimum_ms * 1e-3, rel=2e-9)


@pytest.mark.parametrize("name", [name for name in GOLDENS if name.startswith("layers") and "training" in name])
def test_layer_graphs_draw_backward_edges_as_the_forward_pass_runs(name: str) -> None:
    (note,) = read(name).notes
    assert "taken the other way round" in note


def test_circles_are_told() -> None:
    notes = {name: read(name).notes for name in GOLDENS if name.startswith("operators")}
    assert {name: len(found) for name, found in notes.items() if found} == {
        "operators/bert_l-3_training": 2,
        "operators/bert_l-6_training": 2,
        "operators/bert_l-12_training": 2,
    }
    assert "4 colour classes wait for one another" in notes["operators/bert_l-3_training"][1]
