"""A table over the devices of two kinds: each point is what a solve by itself gives; mistakes are told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import piper_ray
from piper_ray.cli.app import app
from piper_ray.engine.frontier.kinds import kind_table, with_devices
from piper_ray.model.apart import on_kind
from piper_ray.model.solution import Status
from piper_ray.workloads.formats.workload_writer import to_toml
from tests.kinds_brute_force import random_kinds


def test_each_point_is_what_a_solve_gives(few: bool) -> None:
    spared = infeasible = 0
    for seed in range(6 if few else 12):
        made = random_kinds(seed)
        if seed % 3 == 0:  # little enough that few devices do not do
            made = made.replace(cluster=made.cluster.with_memory(lambda own_bytes: 0.2 * own_bytes))
        a, b = made.cluster.kinds
        numbers = {one.name: range(one.cluster.devices + 1) for one in (a, b)}
        points = kind_table(made, numbers, schedule="1f1b")
        assert len(points) == (a.cluster.devices + 1) * (b.cluster.devices + 1) - 1
        for point in points:
            cluster = with_devices(made.cluster, dict(zip(numbers, point.devices, strict=True)))
            there = made.replace(cluster=cluster)
            alone = there if all(point.devices) else on_kind(there, a.name if point.devices[0] else b.name)
            assert alone is not None
            found = piper_ray.solve(alone, schedule="1f1b", threads=1)
            assert point.solution.status is found.status
            if found.time_per_sample_s is not None:
                assert point.solution.time_per_sample_s == pytest.approx(found.time_per_sample_s, rel=1e-9)
                assert point.solution.plan is not None
                valued = piper_ray.evaluate(there, point.solution.plan, schedule="1f1b")
                assert valued.time_per_sample_s == pytest.approx(found.time_per_sample_s, rel=1e-9)
            spared += not point.solved
            infeasible += point.solution.status is Status.INFEASIBLE
    assert spared > 20
    assert infeasible > 3


@pytest.mark.long
def test_bounds_and_plans_are_carried_where_solves_end_early() -> None:
    for seed in range(6):
        made = random_kinds(seed)
        numbers = {one.name: range(1, one.cluster.devices + 1) for one in made.cluster.kinds}
        exact = kind_table(made, numbers, schedule="1f1b")
        early = kind_table(made, numbers, schedule="1f1b", options=piper_ray.SolveOptions(gap=0.3))
        for early_point, point in zip(early, exact, strict=True):
            assert early_point.devices == point.devices
            one, best = early_point.solution, point.solution
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
    assert head == "a,b,time_per_sample_s,lower_bound_s,status,plan_file"
    assert [row.split(",")[:2] for row in rows] == [["1", str(n)] for n in range(1, of_b + 1)]


def test_the_table_is_a_document_a_picture_and_plans(mixed: Path, tmp_path: Path) -> None:
    plans, plot = tmp_path / "plans", tmp_path / "table.svg"
    result = run("frontier", mixed, "--schedule", "1f1b", "--json", "--plot", plot, "--plans", plans)
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["by_kinds"]
    written = {row["plan_file"]: row for row in rows if row["plan_file"] is not None}
    assert {path.name for path in plans.iterdir()} == set(written)
    for name, row in written.items():
        assert json.loads((plans / name).read_text())["time_per_sample_s"] == row["time_per_sample_s"]
    assert "devices of b" in plot.read_text()


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (("--devices", "a=1 c=2"), "'c=2'; expected numbers of each kind, as 'a="),
        (("--devices", "a=99"), "--devices a=99: there are "),
        (("--devices", "a=x"), "'x' is not a number or a range"),
        (("--devices", "a=0 b=0"), "no devices at all"),
        (("--budgets", "all"), "--budgets: bounds on the sum of d are for plans whose stages may differ"),
        (("-o", "x.parquet"), "a table of two kinds of devices is written as .csv"),
        (("--schedule", "pipedream"), "not with devices of several kinds"),
    ],
)
def test_mistakes(mixed: Path, asked: tuple[str, ...], told: str) -> None:
    result = run("frontier", mixed, "--schedule", "1f1b", *asked)
    assert result.exit_code == 2
    assert told in result.stderr


def test_a_sweep_takes_a_workload_on_several_kinds(mixed: Path, tmp_path: Path) -> None:
    source = tmp_path / "sweep.toml"
    grid = 'microbatches = [2, 4]\nplanners = ["piper", "one-kind"]\nschedules = ["1f1b"]\n'
    source.write_text(f'[workloads]\nmixed = "{mixed.name}"\n[grid]\n{grid}', encoding="utf-8")
    result = run("sweep", source, "--storage", tmp_path / "found")
    assert result.exit_code == 0, result.output
    rows = piper_ray.read_dataset(str(tmp_path / "found")).to_pylist()
    for row in rows:
        if row["planner"] == "piper":
            alone = piper_ray.solve(piper_ray.load(mixed), microbatches=row["microbatches"], schedule="1f1b", threads=1)
            assert row["time_per_sample_s"] == alone.time_per_sample_s
    assert len(rows) == 4
    source.write_text(f'[workloads]\nmixed = "{mixed.name}"\n[grid]\ndevices = [2]\n{grid}', encoding="utf-8")
    result = run("sweep", source, "--storage", tmp_path / "found")
    assert "each kind has its own figure; expected no --devices" in result.stderr
