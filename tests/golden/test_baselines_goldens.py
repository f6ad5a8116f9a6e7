"""Baselines against what the published planners gave: equal runs, the correlation experiment, PipeDream's optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from piper_ray.model.constraints import Recompute, Restrictions
from piper_ray.model.instance import Instance
from piper_ray.planners import EqualRuns, Level, PipeDream, PipeDream2BW, PiperPublished, States, plan
from piper_ray.workloads.formats.load import load
from tests.data import PROFILES, WORKLOADS, Record, goldens, profile_text
from tests.lengths import long_after
from tests.support import GIB, assert_same_time, published_goldens


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """In PipeDream's own form, by name."""
    folder = tmp_path_factory.mktemp("profiles")
    paths = {name: folder / f"{name}.graph.txt" for name in PROFILES}
    for name, path in paths.items():
        path.write_text(profile_text(name), encoding="utf-8")
    return paths


def equi_instance(record: Record) -> Instance:
    return load(
        WORKLOADS[record["workload"]],
        devices=record["devices"],
        microbatches=record["microbatches"],
        memory_bytes=record["memory_gib"] * GIB,
        bandwidth_bytes_per_s=25 * GIB,
    )


@pytest.mark.parametrize("part", long_after(1, range(4)))
def test_pipedream_2bw_is_upstreams_equi_planner(part: int) -> None:
    feasible = 0
    for record in goldens("equi")[part::4]:
        restrictions = Restrictions(tensor_parallelism=record.get("tensor_parallel", True))
        planner = PipeDream2BW(separate=record.get("separate", False))
        result = plan(equi_instance(record), planner, restrictions=restrictions)
        assert_same_time(result.time_per_sample_s, record["time_per_sample_s"], record)
        if result.plan is not None:
            feasible += 1
            assert len(result.plan.stages) == record["stages"], record
    assert feasible >= 10


@pytest.mark.parametrize("tensor_parallelism", [True, False])
def test_the_topological_variant_has_no_degrees_to_lose(tensor_parallelism: bool) -> None:
    records = [record for record in goldens("equi") if record["variant"] == "topological"]
    assert len(records) == 3
    for record in records:
        result = plan(
            equi_instance(record), "pipedream-2bw", restrictions=Restrictions(tensor_parallelism=tensor_parallelism)
        )
        assert_same_time(result.time_per_sample_s, record["time_per_sample_s"], record)


def test_correlation_experiment() -> None:
    for record in goldens("correlation"):
        instance = load(
            WORKLOADS["bert32a100"],
            devices=64,
            microbatches=record["microbatches"],
            bandwidth_bytes_per_s=(300 + 25) / 2 * GIB,
        )
        one_point = EqualRuns(
            runs=(record["stages"],),
            data_parallel_degrees=(record["data_parallel"],),
            tensor_parallel_degrees=(record["tensor_parallel"],),
        )
        result = plan(instance, one_point, restrictions=Restrictions(recompute=Recompute.ALWAYS))
        assert result.tried == 1
        assert_same_time(result.time_per_sample_s, record["time_per_sample_s"], record)


@pytest.mark.parametrize(
    "figure",
    long_after(8, goldens("pipedream")),
    ids=lambda figure: "-".join(str(value) for name, value in figure.items() if name != "time_per_stage_s"),
)
def test_pipedreams_own_figures(profiles: dict[str, Path], figure: Record) -> None:
    bandwidths = figure.get("bandwidths", [1e9])
    levels = tuple(Level(m, b) for m, b in zip(figure["machines"], bandwidths, strict=True))
    instance = load(
        profiles[figure["profile"]],
        devices=16,
        microbatches=1,  # PipeDream knows no batch that replications would have to divide
        memory_bytes=1.0,  # and counts no memory
        bandwidth_bytes_per_s=1.0,  # the levels have their own
    )
    own, all_downsets = (
        PipeDream(
            levels,
            states,
            figure.get("ratio", 1.0),
            straight=figure.get("straight", False),
            memory_bytes=figure.get("memory_bytes"),
        )
        for states in (States.SINGLE_SOURCE, States.DOWNSETS)
    )
    found = own.partition(instance)
    assert_same_time(found.time_per_stage_s, figure["time_per_stage_s"], figure, relative=1e-8)  # nine digits are given
    assert found.states == figure.get("states", found.states)
    assert list(found.replication) == figure.get("replication", list(found.replication))
    if figure["profile"] == "gnmt_large" and figure["machines"] != [4]:  # which has many downsets
        return
    # "An all-downset program may be better on branching graphs, never worse."
    all_s = all_downsets.partition(instance).time_per_stage_s
    assert all_s <= found.time_per_stage_s * (1 + 1e-9)
    assert_same_time(all_s, figure["time_per_stage_s"], figure, relative=1e-8)


def test_states_of_a_branching_profile(profiles: dict[str, Path]) -> None:
    instance = load(
        profiles["gnmt"],
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
    assert any(golden.time_per_sample_s is not None for golden in goldens)
    for golden in goldens:
        result = plan(golden.instance, PiperPublished())
        assert (result.time_per_sample_s is None) == (golden.time_per_sample_s is None)
        if result.time_per_sample_s is not None and golden.time_per_sample_s is not None:
            # The table may assume more microbatches in flight than its plan comes to.
            assert result.time_per_sample_s <= golden.time_per_sample_s * (1 + 1e-9), golden.name
