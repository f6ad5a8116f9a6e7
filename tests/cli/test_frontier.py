"""``piper-ray frontier``: what is printed and written, and the exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet
import pytest

import piper_ray
from tests.cli_cases import run, write_small
from tests.report_cases import small_instance


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_small(tmp_path)


def test_a_person_gets_the_steps(small: Path) -> None:
    result = run("frontier", small, "--devices", "1..4", "--budgets", "all")
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0] == f"piper-ray {piper_ray.__version__}"
    assert any(line.startswith("devices  up to  time/microbatch") for line in lines)
    assert any(line.startswith("sum of d  up to") for line in lines)
    assert "of 4 numbers of devices" in result.stdout
    assert "\x1b" not in result.stdout


def test_everything_is_written(small: Path, tmp_path: Path) -> None:
    out, plot, plans = tmp_path / "table.parquet", tmp_path / "plot.png", tmp_path / "plans"
    result = run("frontier", small, "--json", "--out", out, "--plot", plot, "--plans", plans)
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["schema"] == "piper-ray/frontier"
    rows = pyarrow.parquet.read_table(out).to_pylist()
    times = [row["time_per_sample_s"] for row in rows]
    assert times == [point["time_per_sample_s"] for point in document["by_devices"]]
    assert plot.stat().st_size > 10_000
    steps = [row for row in rows if row["is_step"]]
    assert sorted(path.name for path in plans.iterdir()) == [row["plan_file"] for row in steps]
    for row in steps:
        checked = run("verify", small, plans / row["plan_file"], "--devices", row["devices"], "--json")
        assert checked.returncode == 0, checked.stderr
        assert json.loads(checked.stdout)["time_per_sample_s"] == pytest.approx(row["time_per_sample_s"], rel=1e-9)


def test_a_plan_is_that_of_solve(small: Path, tmp_path: Path) -> None:
    run("frontier", small, "--devices", "3", "--plans", tmp_path / "plans")
    run("solve", small, "--devices", 3, "--out", tmp_path / "plan.json")
    instance = small_instance().replace(devices=3)
    ours, solved = (
        piper_ray.load_plan(path, instance)
        for path in (tmp_path / "plans" / "devices-00003.json", tmp_path / "plan.json")
    )
    assert ours.to_dict() == solved.to_dict()


def test_nothing_fits(small: Path) -> None:
    result = run("frontier", small, "--devices", "1..3", "--memory", "1GiB", "--json")
    assert result.returncode == 4
    assert {point["status"] for point in json.loads(result.stdout)["by_devices"]} == {"infeasible"}


def test_some_numbers_of_devices_do_not_fit(small: Path) -> None:
    result = run("frontier", small, "--memory", "4GiB", "--json")
    assert result.returncode == 0
    assert [point["status"] for point in json.loads(result.stdout)["by_devices"]].count("infeasible") > 0
    assert "without a plan: 1" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--devices", "8-16"], "is not a number or a range"),
        (["--out", "table.xls"], "tables are written as"),
        (["--plot", "plot.gif"], "plots are written as"),
        (["--out", "nowhere/table.csv"], "there is no folder"),
        (["--budgets", "99"], "more than min(N, K)"),
    ],
)
def test_usage(small: Path, arguments: list[str], words: str) -> None:
    result = run("frontier", small, *arguments)
    assert result.returncode == 2
    assert words in result.stderr


def test_a_time_limit_keeps_what_is_known(small: Path) -> None:
    result = run("frontier", small, "--time-limit", "0.0001", "--json")
    document = json.loads(result.stdout)
    assert document["stopped_by"] == "time limit"
    assert {point["status"] for point in document["by_devices"]} <= {"unknown", "infeasible", "optimal", "feasible"}
    assert result.returncode in (0, 5)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_under_a_flush(small: Path, tmp_path: Path, schedule: str) -> None:
    out, plans = tmp_path / "table.csv", tmp_path / "plans"
    arguments = ("--schedule", schedule, "--devices", "1..4", "--tensor-parallel", "1")
    result = run("frontier", small, *arguments, "--json", "--out", out, "--plans", plans)
    assert result.returncode == 0, result.stderr
    assert f"Schedule  {schedule}: " in result.stderr
    document = json.loads(result.stdout)
    assert document["schedule"] == schedule
    for point in document["by_devices"]:
        solved = run("solve", small, "--schedule", schedule, "--devices", point["devices"], "--json")
        assert json.loads(solved.stdout)["time_per_sample_s"] == point["time_per_sample_s"]
    for path in plans.iterdir():
        checked = run("verify", small, path, "--devices", int(path.stem.removeprefix("devices-")))
        assert checked.returncode == 0, checked.stderr
        assert f"Schedule  {schedule}:" in checked.stdout


def test_bounds_on_the_sum_of_d_are_refused_under_a_flush(small: Path) -> None:
    result = run("frontier", small, "--schedule", "1f1b", "--budgets", "all")
    assert result.returncode == 2
    assert "--budgets" in result.stderr
