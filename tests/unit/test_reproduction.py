"""The paper's evaluation: what is compared with what is published, what counts as a fault, and the files made of it."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import typer
from matplotlib.figure import Figure
from typer.testing import CliRunner

from piper_ray.planners import Level, PipeDream, Recurrence
from scripts.reproduction import correlation, staircases, throughput
from scripts.reproduction.__main__ import main
from scripts.reproduction.pipedream_profiles import (
    STATES,
    Setup,
    best_of_shape_s,
    is_public,
    profile,
    states_of,
    words,
)
from scripts.reproduction.report import page, write_study
from scripts.reproduction.study import Findings, Study, faults_of, slower_than
from tests.data import goldens


def silent(text: str) -> None:
    pass


def test_an_optimum_that_somebody_undercuts_is_a_fault() -> None:
    others = {"better": 0.9, "equal": 1.0, "within rounding": 1.0 - 1e-12, "worse": 2.0, "none": None}
    (fault,) = faults_of("a point", 1.0, others)
    assert fault.startswith("a point: better takes 0.9 s")
    assert len(faults_of("a point", None, {"with a plan": 3.0, "without": None})) == 1


def test_ratio_needs_both() -> None:
    assert slower_than(2.0, 3.0) == 1.5
    assert slower_than(None, 3.0) is None
    assert slower_than(2.0, None) is None


def test_files_and_page_of_a_study(tmp_path: Path) -> None:
    study = Study("small", "A small study", lambda _tell: findings)
    findings = Findings(
        rows=[{"at": 1, "time_s": 0.5}, {"at": 2, "time_s": None}],
        words=["What it says."],
        pictures={"picture": Figure()},
        shown=[{"K": 1, "ms": "500"}],
    )
    write_study(tmp_path, study, findings)
    assert {path.name for path in tmp_path.iterdir()} == {"small.csv", "picture.svg", "picture.png"}
    assert (tmp_path / "small.csv").read_text(encoding="utf-8").splitlines() == ['"at","time_s"', "1,0.5", "2,"]
    text = page("A heading", [(study, findings)], ["About."])
    assert text.startswith("# A heading\n")
    assert "## A small study" in text
    assert "![A small study](picture.svg)" in text
    assert "| K | ms |\n|---|---|\n| 1 | 500 |" in text


@pytest.mark.parametrize("recurrence", Recurrence)
@pytest.mark.parametrize("model", ["vgg16", "alexnet"])
def test_the_planner_finds_the_best_of_all_configurations(model: str, recurrence: Recurrence) -> None:
    """A table for one configuration agrees with the planner where that found it, and is never below it."""
    instance, link = profile(model, 4), Level(4, 2e9)
    states = states_of(instance)
    found = PipeDream((link,), STATES, recurrence=recurrence).partition(instance)
    all_s = {
        shape: best_of_shape_s(states, link, shape, recurrence)
        for size in range(1, 5)
        for shape in product(range(1, 5), repeat=size)
        if sum(shape) <= 4
    }
    assert min(all_s.values()) == pytest.approx(found.time_per_stage_s, rel=1e-9)
    assert all_s[found.replication] == pytest.approx(found.time_per_stage_s, rel=1e-9)


def test_setups_of_the_pipedream_paper() -> None:
    setups = [Setup.of(record) for record in goldens("pipedream_paper")]
    assert len(setups) == 14
    assert {setup.model for setup in setups if not is_public(setup.model)} == {"awd-lm", "s2vt"}
    vgg = setups[0]
    assert (vgg.devices, vgg.replication, vgg.name) == (16, (15, 1), "VGG-16, 4x4 (A)")
    assert [level.machines for level in vgg.levels] == [4, 4]
    assert vgg.flat == (Level(16, 1.25e9),)
    assert words((1, 1, 1)) == "straight, 3"
    assert words((3, 1)) == "3-1"


def test_equal_partitions_are_the_published_ones() -> None:
    findings = correlation.STUDY.run(silent)
    assert list(findings.faults) == []
    assert sum(row["reference_time_per_sample_s"] is not None for row in findings.rows) == 16


@pytest.mark.long
def test_no_planner_beats_piper(monkeypatch: pytest.MonkeyPatch) -> None:
    """At some of the sizes, the published values among the others'."""
    monkeypatch.setattr(throughput, "_DEVICES", (8, 64))
    monkeypatch.setattr(throughput, "_MICROBATCHES", (512,))
    monkeypatch.setattr(throughput, "_shown", lambda _rows: [])
    findings = throughput.STUDY.run(silent)
    assert list(findings.faults) == []
    assert len(findings.rows) == 2 * 4 * len(throughput.PLANNERS)
    assert any(row["reference_time_per_sample_s"] is not None for row in findings.rows)
    assert set(findings.pictures) == {"throughput-n512", "share-n512"}


@pytest.mark.long
def test_the_command_needs_nothing_but_the_checkout(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(main)
    result = CliRunner().invoke(app, ["--only", "correlation", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "16 of 40 points are in the published set, all of them equal to it." in text
    assert "Checked: every optimum is at or below every published and baseline value." in text
    assert "eft out" not in text


@pytest.mark.long
def test_staircases_have_every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staircases, "_MOST", 40)
    monkeypatch.setattr(staircases, "_MICROBATCHES", (512,))
    findings = staircases.STUDY.run(silent)
    by_devices = [row["time_per_sample_s"] for row in findings.rows if row["against"] == "devices"]
    by_bound = [row["time_per_sample_s"] for row in findings.rows if row["against"] != "devices"]
    assert (len(by_devices), len(by_bound)) == (33, 40)
    assert by_devices[-1] == by_bound[-1]
    known = [time_s for time_s in by_devices if isinstance(time_s, float)]
    assert known == sorted(known, reverse=True)
    assert list(findings.faults) == []
