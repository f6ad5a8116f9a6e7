"""``piper-ray solve --planner``: another planner's plan, told apart from a proved one."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

import piper_ray
from piper_ray import Restrictions, SolveOptions
from piper_ray.cli.solve import PlannerOption
from piper_ray.model.errors import UsageError
from piper_ray.planners import (
    PLANNERS,
    DataParallel,
    Level,
    Megatron,
    PipeDream,
    PipeDream2BW,
    States,
    Terms,
    plan,
    planner_of,
)
from tests.cli_cases import run, write_small
from tests.report_cases import small_instance


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_small(tmp_path)


@pytest.mark.parametrize(
    ("text", "planner"),
    [
        ("pipedream-2bw", PipeDream2BW()),
        ("pipedream-2bw:separate", PipeDream2BW(separate=True)),
        ("pipedream-2bw:separate=no", PipeDream2BW()),
        ("megatron:devices-per-node=4", Megatron(devices_per_node=4)),
        ("data-parallel", DataParallel()),
        (
            "pipedream:states=single-source,levels=4x100GB/s+8x10GB/s,activation-compression-ratio=none",
            PipeDream((Level(4, 100e9), Level(8, 10e9)), States.SINGLE_SOURCE, None),
        ),
    ],
)
def test_planner_and_its_settings(text: str, planner: object) -> None:
    assert planner_of(text) == planner


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "planner '' is unknown; expected one of pipedream-2bw, "),
        ("gpipe:depth=3", "planner gpipe has no setting 'depth'; it has none"),
        ("megatron:nodes=3", "planner megatron has no setting 'nodes'; expected one of devices-per-node"),
        ("megatron:devices-per-node=many", "'many' is no value for devices-per-node"),
        ("megatron:devices-per-node=0", "devices_per_node must be at least 1"),
        ("pipedream:states=some", "'some' is no value for states"),
        ("pipedream:levels=4", "'' is not understood; expected a rate"),
        ("pipedream-2bw:separate=maybe", "'maybe' is no value for separate"),
    ],
)
def test_unknown_planners_and_settings(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        planner_of(text)


def test_help_names_every_planner() -> None:
    (option,) = fields(PlannerOption)
    assert all(name in option.metadata["typer"].help for name in PLANNERS)


@pytest.mark.parametrize("name", PLANNERS)
def test_each_planner_writes_a_plan_that_verify_takes_and_that_is_no_faster(
    small: Path, tmp_path: Path, name: str
) -> None:
    out = tmp_path / "plan.json"
    finished = run("solve", small, "--planner", name, "--json", "--out", out)
    assert finished.returncode == 0, finished.stderr
    document = json.loads(finished.stdout)
    written = json.loads(out.read_bytes())
    assert (document["schema"], document["planner"], written["planner"]) == ("piper-ray/baseline", name, name)
    assert "lower_bound_s" not in written, "nothing is proved"
    instance = small_instance()
    plan = piper_ray.load_plan(out, instance)
    assert piper_ray.evaluate(instance, plan).time_per_sample_s == document["time_per_sample_s"]
    best = piper_ray.solve(instance).time_per_sample_s
    assert best is not None
    assert document["time_per_sample_s"] >= best * (1 - 1e-9)


def test_a_person_is_told_that_it_is_not_proved(small: Path) -> None:
    finished = run("solve", small, "--planner", "megatron")
    assert finished.returncode == 0
    assert "#  layers" in finished.stdout
    assert "microbatches/s" in finished.stdout
    assert "not proved to be the best" in finished.stdout


def test_without_a_plan_it_says_so(small: Path, tmp_path: Path) -> None:
    finished = run("solve", small, "--planner", "gpipe", "--memory", "1GiB", "--out", tmp_path / "plan.json", "--json")
    assert finished.returncode == 4
    assert json.loads(finished.stdout)["plan"] is None
    assert "gpipe: no plan" in finished.stderr
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--gap", "1%"],
        ["--time-limit", "5"],
        ["--checkpoint", "x"],
        ["--address", "local"],
        ["--contract", "operators"],
        ["--memory-limit", "8GB"],
    ],
)
def test_options_of_the_search_are_refused(small: Path, arguments: list[str]) -> None:
    finished = run("solve", small, "--planner", "gpipe", *arguments)
    assert finished.returncode == 2
    assert f"{arguments[0]} is for the exact planner" in finished.stderr


def test_an_unknown_planner_is_named_before_anything_is_read() -> None:
    finished = run("solve", "nowhere.toml", "--planner", "best")
    assert finished.returncode == 2
    assert "planner 'best' is unknown" in finished.stderr


def test_the_exact_solver_is_a_planner_like_the_others() -> None:
    instance = small_instance()
    found, solved = plan(instance, "piper"), piper_ray.solve(instance)
    assert found.solution is not None
    assert (found.solution.status, found.plan) == (solved.status, solved.plan)
    assert found.time_per_sample_s == solved.time_per_sample_s
    assert found.note == "proved"
    limited = planner_of("piper", Terms(SolveOptions(gap=0.5))).propose(instance, Restrictions())
    assert limited.solution is not None
    assert limited.solution.gap is not None
    assert limited.solution.gap <= 0.5


def test_the_exact_planner_has_no_settings() -> None:
    with pytest.raises(UsageError, match="planner piper has no setting 'gap'; it has none"):
        planner_of("piper:gap=0.1")
