"""Baselines against what the published planners gave: equal runs, the correlation experiment, PipeDream's optimizer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from piper_ray.baselines import EqualRuns, Level, PipeDream, PipeDream2BW, PiperPublished, States, plan
from piper_ray.formats import load
from piper_ray.model import Instance
from piper_ray.restrictions import Recompute, Restrictions
from tests.support import GIB, SHARED, assert_same_time, published_goldens


def read_lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (SHARED / "goldens" / name).read_text(encoding="utf-8").splitlines()]


def read_document(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((SHARED / "goldens" / name).read_text(encoding="utf-8"))
    return document


def equi_instance(record: dict[str, Any]) -> Instance:
    return load(
        SHARED / "piper" / record["input"],
        devices=record["K"],
        microbatches=record["N"],
        memory_bytes=record["M_GiB"] * GIB,
        bandwidth_bytes_per_s=25 * GIB,
    )


def test_pipedream_2bw_is_upstreams_equi_planner() -> None:
    feasible = 0
    for record in read_lines("equi.jsonl"):
        restrictions = Restrictions(tensor_parallelism=record.get("tensor_parallel", 1) == 1)
        planner = PipeDream2BW(separate=record.get("separate", 0) == 1)
        result = plan(equi_instance(record), planner, restrictions=restrictions)
        assert_same_time(result.time_per_sample, record["equi"], record)
        if result.plan is not None:
            feasible += 1
            assert len(result.plan.stages) == record["stages"], record
    assert feasible >= 50


@pytest.mark.parametrize("tensor_parallelism", [True, False])
def test_the_topological_variant_has_no_degrees_to_lose(tensor_parallelism: bool) -> None:
    records = [record for record in read_lines("equi.jsonl") if record.get("variant") == "topological"]
    assert len(records) == 3
    for record in records:
        result = plan(
            equi_instance(record), "pipedream-2bw", restrictions=Restrictions(tensor_parallelism=tensor_parallelism)
        )
        assert_same_time(result.time_per_sample, record["equi"], record)


def test_correlation_experiment() -> None:
    golden = read_document("correlation.json")
    assert golden["recomputation"] == "everywhere"
    for record in golden["values"]:
        instance = load(
            SHARED / "piper" / golden["instance"],
            devices=golden["K"],
            microbatches=record["N"],
            bandwidth_bytes_per_s=(300 + 25) / 2 * GIB,
        )
        one_point = EqualRuns(
            runs=(record["stages"],),
            data_parallel_degrees=(record["data_parallel"],),
            tensor_parallel_degrees=(record["tensor_parallel"],),
        )
        result = plan(instance, one_point, restrictions=Restrictions(recompute=Recompute.ALWAYS))
        assert result.tried == 1
        assert_same_time(result.time_per_sample, record["time_per_sample"], record)


@pytest.mark.parametrize(
    "figure",
    read_document("pipedream.json")["figures"],
    ids=lambda figure: f"{figure['profile']}-{figure['machines']}-{figure.get('ratio', 1)}",
)
def test_pipedreams_own_figures(figure: dict[str, Any]) -> None:
    bandwidths = figure.get("bandwidths", [1e9])
    levels = tuple(Level(m, b) for m, b in zip(figure["machines"], bandwidths, strict=True))
    instance = load(
        SHARED / "pipedream" / f"{figure['profile']}.graph.txt",
        devices=16,
        microbatches=1,  # PipeDream knows no batch that replications would have to divide
        memory_bytes=1.0,  # and counts no memory
        bandwidth_bytes_per_s=1.0,  # the levels have their own
    )
    own, all_downsets = (
        PipeDream(levels, states, figure.get("ratio", 1.0)).partition(instance)
        for states in (States.SINGLE_SOURCE, States.DOWNSETS)
    )
    assert_same_time(own.time_per_stage_s, figure["time_per_stage_s"], figure, relative=1e-8)  # nine digits are given
    assert own.states == figure.get("states", own.states)
    assert list(own.replication) == figure.get("replication", list(own.replication))
    # "An all-downset program may be better on branching graphs, never worse."
    assert all_downsets.time_per_stage_s <= own.time_per_stage_s * (1 + 1e-9)
    assert_same_time(all_downsets.time_per_stage_s, figure["time_per_stage_s"], figure, relative=1e-8)


def test_states_of_a_branching_profile() -> None:
    instance = load(
        SHARED / "pipedream" / "gnmt.graph.txt",
        devices=4,
        microbatches=64,
        memory_bytes=64 * GIB,
        bandwidth_bytes_per_s=1e9,
    )
    # 99 of 562 downsets, the empty one counted among the latter.
    assert PipeDream(states=States.SINGLE_SOURCE).partition(instance).states == 99
    assert PipeDream().partition(instance).states == 561
    assert PipeDream(states=States.ORDER).partition(instance).states == len(instance.layers)


def test_piper_published_is_upstreams_value() -> None:
    goldens = [golden for golden in published_goldens() if golden.cpu_s < 0.06]
    assert any(golden.time_per_sample is not None for golden in goldens)
    for golden in goldens:
        result = plan(golden.instance, PiperPublished())
        assert (result.time_per_sample is None) == (golden.time_per_sample is None)
        if result.time_per_sample is not None and golden.time_per_sample is not None:
            # The table may assume more microbatches in flight than its plan comes to.
            assert result.time_per_sample <= golden.time_per_sample * (1 + 1e-9), golden.name
