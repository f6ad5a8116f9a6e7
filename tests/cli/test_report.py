"""``piper-ray report``: its page has the figures of ``simulate --json`` and ``solve --json``, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import piper_ray
from piper_ray.cli.app import app
from tests.cli_cases import run, without_notes, write_small
from tests.lengths import long_after
from tests.page_support import Page
from tests.report_cases import small_instance
from tests.simulate_support import GIB, chain, cut

RUNNER = CliRunner()


def _run(*arguments: object) -> tuple[int, str, str]:
    result = RUNNER.invoke(app, [*map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def _document(*arguments: object) -> Any:
    code, out, err = _run(*arguments, "--json")
    assert code == 0, err
    return json.loads(out)


def _page(tmp_path: Path, *arguments: object) -> Page:
    path = tmp_path / "report.html"
    code, _, err = _run("report", *arguments, "-o", path)
    assert code == 0, err
    return Page(path.read_text("utf-8"))


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """Three layers, the middle one with two replicas, which cannot keep an asynchronous promise."""
    workload, plan = tmp_path / "chain.json", tmp_path / "plan.json"
    instance = chain([3.0, 6.0, 3.0], microbatches=8, weights_bytes=GIB / 4, edge_bytes=GIB / 8, devices=4)
    piper_ray.dump(instance, workload)
    plan.write_text(json.dumps(cut([1] * 3, [1, 2, 1]).to_dict()))
    return workload, plan


def test_as_many_chunks_as_asked_for(tmp_path: Path) -> None:
    workload, plan = tmp_path / "chain.json", tmp_path / "plan.json"
    piper_ray.dump(chain([3.0, 6.0, 3.0, 4.0], microbatches=8, weights_bytes=GIB / 4, edge_bytes=GIB / 8), workload)
    plan.write_text(json.dumps(cut([1] * 4, [1] * 4).to_dict()))
    asked = (workload, plan, "--schedule", "looped-bfs", "--chunks", 4)  # all on one rank
    assert _page(tmp_path, *asked).figure("step_s") == _document("simulate", *asked)["step_s"] == 8 * 16.0


@pytest.mark.parametrize("schedule", long_after(1, ["2bw", "pipedream", "gpipe", "1f1b"]))
def test_figures_are_those_of_simulate(files: tuple[Path, Path], tmp_path: Path, schedule: str) -> None:
    document = _document("simulate", *files, "--schedule", schedule)
    found = _page(tmp_path, *files, "--schedule", schedule)
    for name in ("step_s", "time_per_sample_s", "bubble_share"):
        assert found.figure(name) == document[name]
    assert ("promised_step_s" in found.figures) == (document["promised_s"] is not None)
    if document["promised_s"] is not None:
        assert found.figure("promised_step_s") == document["promised_s"]
    assert found.figure("microbatches_per_s") == pytest.approx(1.0 / document["time_per_sample_s"])
    if schedule != "2bw":
        assert {"forward_s", "time_s"} & set(found.tables["stage-table"][0]) == {"time_s"}
    for row, rank in zip(found.tables["all-ranks"], document["ranks"], strict=True):
        for name in ("compute_s", "communication_s", "waiting_s", "bubble_s", "peak_memory_bytes", "devices"):
            assert row[name] == rank[name]
    for text in (*document["findings"], *document["notes"]):
        assert text in found.texts["findings"] + found.texts["assumptions"]


@pytest.mark.parametrize("schedule", long_after(1, ["2bw", "1f1b"]))
def test_figures_are_those_of_solve(tmp_path: Path, schedule: str) -> None:
    source, solution = write_small(tmp_path), tmp_path / "solution.json"
    document = _document("solve", source, "--schedule", schedule, "--out", tmp_path / "plan.json")
    solution.write_text(json.dumps(document))
    for plan in (tmp_path / "plan.json", solution):
        found = _page(tmp_path, source, plan)
        assert found.title.endswith(f"under {schedule}")
        assert found.figure("lower_bound_s") == document["lower_bound_s"]
        assert found.figure("gap") == document["gap"]
        valued = "promised_time_per_sample_s" if schedule == "2bw" else "time_per_sample_s"
        assert found.figure(valued) == pytest.approx(document["time_per_sample_s"], rel=1e-12)
        assert found.figure("time_per_sample_s") == document["simulated"]["time_per_sample_s"]
        assert found.figure("step_s") == document["simulated"]["step_s"]
        assert found.figure("bubble_share") == document["simulated"]["bubble_share"]
        assert found.figure("peak_memory_bytes") == max(document["simulated"]["peak_memory_bytes"])
        if schedule == "2bw":
            for row, stage in zip(found.tables["stage-table"], document["plan"]["stages"], strict=True):
                for name in ("time_s", "compute_s", "communication_s", "resync_s", "memory_bytes", "devices"):
                    assert row[name] == stage["figures"][name]
        assert "the exact planner's: optimal" in found.texts[""]


@pytest.mark.long
def test_speeds_are_of_the_batch(tmp_path: Path) -> None:
    source, plan = tmp_path / "small.toml", tmp_path / "plan.json"
    piper_ray.dump(replace(small_instance(), batch=piper_ray.Batch(8, 4)), source)
    code, _, err = _run("solve", source, "--planner", "megatron", "--out", plan)
    assert code == 0, err
    document = _document("simulate", source, plan)
    found = _page(tmp_path, source, plan)
    assert document["options"]["samples_per_microbatch"] == 4
    assert found.figure("samples_per_s") == pytest.approx(document["samples_per_s"], rel=1e-12)
    assert "The plan is that of megatron (" in found.texts[""]
    assert "lower_bound_s" not in found.figures


def test_another_cluster_has_another_bound(tmp_path: Path) -> None:
    source, plan = write_small(tmp_path), tmp_path / "plan.json"
    assert _run("solve", source, "--out", plan)[0] == 0
    found = _page(tmp_path, source, plan, "--microbatches", 16)
    assert "lower_bound_s" not in found.figures
    assert "it is of another input, or of another cluster" in found.texts["assumptions"]


def test_as_a_process(files: tuple[Path, Path], tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    result = run("report", *files, "--schedule", "1f1b", "--out", page)
    assert (result.returncode, without_notes(result.stderr)) == (0, "")
    assert result.stdout.startswith(f"{page}: 1f1b: step ")
    assert page.read_text("utf-8").startswith("<!DOCTYPE html>")
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".partial"] == []


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--schedule", "1f2b", "-o", "{}/page.html"], 2, "1f2b"),
        (["-o", "{}/missing/page.html"], 2, "there is no folder"),
        (["-o", "{}"], 2, "is a folder; expected the path of a file"),
        (["--devices", "2", "-o", "{}/page.html"], 6, "the plan uses 4 devices, 2 are there"),
        (["--schedule", "zb-h1", "-o", "{}/page.html"], 6, "needs one data-parallel degree for all stages"),
        ([], 2, "--out"),
    ],
)
def test_refusals(files: tuple[Path, Path], tmp_path: Path, options: list[str], code: int, message: str) -> None:
    before = sorted(tmp_path.iterdir())
    found, out, err = _run("report", *files, *(option.format(tmp_path) for option in options))
    assert found == code
    assert message in " ".join(err.replace("│", " ").split())
    assert out == ""
    assert sorted(tmp_path.iterdir()) == before


def test_a_broken_plan_file_is_named(files: tuple[Path, Path], tmp_path: Path) -> None:
    plan = tmp_path / "claims.json"
    plan.write_text(json.dumps({**json.loads(files[1].read_text()), "schema": "piper-ray/plan", "lower_bound_s": "x"}))
    code, _, err = _run("report", files[0], plan, "-o", tmp_path / "page.html")
    assert code == 3
    assert "lower_bound_s" in err
