"""A table over the devices of two kinds: each point is what a solve by itself gives; mistakes are told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import piper_ray
from piper_ray.cli.app import app
from piper_ray.model.cluster import Cluster
from piper_ray.model.solution import Status
from piper_ray.planners.kind_table import kind_table
from piper_ray.workloads.formats.workload_writer import to_toml
from tests.kinds_brute_force import random_kinds


def test_each_point_is_what_a_solve_gives() -> None:
    spared = infeasible = 0
    for seed in range(12):
        made = random_kinds(seed)
        if seed % 3 == 0:  # little enough that few devices do not do
            made = made.replace(cluster=made.cluster.with_memory(lambda own_bytes: 0.2 * own_bytes))
        a, b = made.cluster.kinds
        numbers = {one.name: range(1, one.cluster.devices + 1) for one in (a, b)}
        for point in kind_table(made, numbers, schedule="1f1b"):
            kinds = [
                replace(one, cluster=replace(one.cluster, devices=count))
                for one, count in zip((a, b), point.devices, strict=True)
            ]
            cluster = Cluster.of_kinds(kinds, made.cluster.between_bytes_per_s or 0.0)
            alone = piper_ray.solve(made.replace(cluster=cluster), schedule="1f1b", threads=1)
            assert point.status is alone.status
            if alone.time_per_sample_s is not None:
                assert point.time_per_sample_s == pytest.approx(alone.time_per_sample_s, rel=1e-9)
            spared += not point.solved
            infeasible += point.status is Status.INFEASIBLE
    assert spared > 20
    assert infeasible > 3


def test_bounds_and_plans_are_carried_where_solves_end_early() -> None:
    for seed in range(6):
        made = random_kinds(seed)
        numbers = {one.name: range(1, one.cluster.devices + 1) for one in made.cluster.kinds}
        exact = kind_table(made, numbers, schedule="1f1b")
        early = kind_table(made, numbers, schedule="1f1b", options=piper_ray.SolveOptions(gap=0.3))
        for one, best in zip(early, exact, strict=True):
            assert one.devices == best.devices
            if best.time_per_sample_s is not None:
                assert one.time_per_sample_s is not None
                assert one.lower_bound_s <= best.time_per_sample_s * (1 + 1e-9)
                assert one.time_per_sample_s >= best.time_per_sample_s * (1 - 1e-9)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)])


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    path = tmp_path / "mixed.toml"
    path.write_text(to_toml(random_kinds(3)), encoding="utf-8")
    return path


def test_the_command_shows_and_writes_a_table(mixed: Path, tmp_path: Path) -> None:
    out = tmp_path / "table.csv"
    result = run("frontier", mixed, "--schedule", "1f1b", "--devices", "a=1", "-o", out)
    assert result.exit_code == 0, result.output
    made = random_kinds(3)
    of_b = made.cluster.kinds[1].cluster.devices
    assert result.stdout.split("a \\ b")[1].split()[:of_b] == [str(n) for n in range(1, of_b + 1)]
    assert f"{of_b} of {of_b} points proved" in result.stdout
    head, *rows = out.read_text().splitlines()
    assert head == "a,b,time_per_sample_s,lower_bound_s,status"
    assert [row.split(",")[:2] for row in rows] == [["1", str(n)] for n in range(1, of_b + 1)]


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (("--devices", "a=1 c=2"), "'c=2'; expected numbers of each kind, as 'a="),
        (("--devices", "a=99"), "--devices a=99: there are "),
        (("--devices", "a=x"), "'x' is not a number or a range"),
        (("--plot", "x.svg"), "--plot: not of devices of several kinds"),
        (("--json",), "--json: not of devices of several kinds"),
        (("-o", "x.parquet"), "a table of two kinds of devices is written as .csv"),
        (("--schedule", "2bw"), "plans for schedule 2bw: not with devices of several kinds"),
    ],
)
def test_mistakes(mixed: Path, asked: tuple[str, ...], told: str) -> None:
    result = run("frontier", mixed, "--schedule", "1f1b", *asked)
    assert result.exit_code == 2
    assert told in result.stderr
