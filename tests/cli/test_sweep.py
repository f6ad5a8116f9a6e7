"""piper-ray sweep and sweep-report as a user meets them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from piper_ray.sweep.dataset import read_dataset
from tests.cli_cases import run
from tests.sweep_support import SMALL_POINTS, write_plans, write_small

BEST = "Best plans, of equally fast ones those on the fewest devices"


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, subprocess.CompletedProcess[str]]:
    """The small sweep: its file, its dataset and what was printed."""
    folder = tmp_path_factory.mktemp("sweep")
    source = write_small(folder)
    return source, folder / "d", run("sweep", source, "--storage", folder / "d", env={"RAY_ADDRESS": ""})


def test_a_sweep(done: tuple[Path, Path, subprocess.CompletedProcess[str]]) -> None:
    _, location, printed = done
    assert printed.returncode == 0, printed.stderr
    lines = printed.stdout.splitlines()
    assert lines[0].startswith(f"{SMALL_POINTS} points of {SMALL_POINTS} on record, ")
    assert lines[0].endswith(" infeasible, 1 failed (1 LimitError)")
    assert lines[1].startswith("best of chain: ")
    assert "% of their time" in lines[-1]
    assert read_dataset(location).num_rows == SMALL_POINTS


@pytest.mark.long
def test_plans(tmp_path: Path) -> None:
    """Two of them, as they are counted, made and shown."""
    text = '[plan]\nmodels = "ours"\ngpus = ["H100-SXM", "A100-80"]\nbatches = 32\nprecisions = "fp8"\n'
    source = write_plans(tmp_path, '[models]\nours = "ours.json"\n' + text)
    counted = run("sweep", source, "--storage", tmp_path / "d", "--dry-run")
    assert counted.stdout.splitlines()[-1].startswith("2 points of 1 model, about ")
    assert not (tmp_path / "d").exists()
    made = run("sweep", source, "--storage", tmp_path / "d", env={"RAY_ADDRESS": ""})
    assert made.returncode == 0, made.stderr
    lines = made.stdout.splitlines()
    assert lines[0] == "2 points of 2 on record, 1 refused, 0 failed"
    assert re.fullmatch(r"best of ours: .*/sample on 1 node of H100-SXM, batch 32, fp8 \(megatron\)", lines[1])
    assert re.search(r" % of their time; .* s of CPU, .* a point$", lines[-1])
    shown = run("sweep-report", tmp_path / "d", "--out", tmp_path / "r", "--price-per-hour", "H100-SXM=2,A100-80=1")
    assert (shown.returncode, shown.stderr) == (0, "")
    for title in ("Plans", "Shortest step of each GPU", "Least cost of 1e9 tokens, of each GPU", "Without a plan"):
        assert title in shown.stdout.splitlines()
    assert {path.name for path in (tmp_path / "r").iterdir()} == {"plans.csv", "tables.md"}, "one cluster is no curve"
    unpriced = run("sweep-report", tmp_path / "d", "--price-per-hour", "H100-SXM=2")
    assert unpriced.returncode == 2
    assert "no price of A100-80; expected one of each GPU" in unpriced.stderr


def test_again_it_is_refused_without_resume(done: tuple[Path, Path, subprocess.CompletedProcess[str]]) -> None:
    source, location, _ = done
    refused = run("sweep", source, "--storage", location)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "holds finished points: add --resume" in refused.stderr
    resumed = run("sweep", source, "--storage", location, "--resume")
    assert (
        resumed.stdout
        == f"{SMALL_POINTS} points of {SMALL_POINTS} on record ({SMALL_POINTS} of them before), 0 failed\n"
    )


def test_the_report(done: tuple[Path, Path, subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    _, location, _ = done
    shown = run("sweep-report", location, "--out", tmp_path / "r")
    assert (shown.returncode, shown.stderr) == (0, "")
    for title in ("Planners", BEST, "Microbatches per second: chain, N = 4, B = 4 B/s", "Errors"):
        assert title in shown.stdout.splitlines()
    names = {path.name for path in (tmp_path / "r").iterdir()}
    assert {"tables.md", "points.csv"} < names
    assert len((tmp_path / "r" / "points.csv").read_text().splitlines()) == SMALL_POINTS + 1
    assert shown.stdout.endswith(f"tables.md, points.csv, {len(names) - 2} plots\n")
    assert {name for name in names if name.startswith("throughput")} == {
        f"throughput-{workload}-N{n}-B4B.png" for workload in ("chain", "towers") for n in (4, 6)
    }


def test_a_dry_run_solves_nothing(tmp_path: Path) -> None:
    shown = run("sweep", write_small(tmp_path), "--storage", tmp_path / "d", "--dry-run")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.splitlines()[-1].startswith(f"{SMALL_POINTS} points of 2 workloads, about ")
    assert not (tmp_path / "d").exists()


def test_a_bad_sweep_is_bad_input(tmp_path: Path) -> None:
    refused = run("sweep", write_small(tmp_path, "[grid]\ndevices = 0\n"), "--storage", tmp_path / "d")
    assert refused.returncode == 3
    assert "grid.devices: out of range (0)" in refused.stderr
    assert "workloads: missing" in refused.stderr


def test_no_dataset_to_report(tmp_path: Path) -> None:
    refused = run("sweep-report", tmp_path)
    assert refused.returncode == 2
    assert "there is no dataset of a sweep" in refused.stderr
