"""The page of ``scripts/study``: what it took, over all of its runs, and what it shows."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from piper_ray.sweep import run
from scripts.cluster_study.page import StudyRun, write_study
from tests.sweep_support import write_plans

SWEEP = """
[models]
ours = "ours.json"
[plan]
models = "ours"
gpus = ["H100-SXM", "A100-80"]
nodes = [1, 2]
batches = 32
runtimes = ["megatron", "torch"]
"""


def taken(done: int, left: int, killed_at: int, joined_at: int) -> StudyRun:
    """Of two workers in 50 s, one of them there for 40 s."""
    return StudyRun(
        points=8,
        done=done,
        left=left,
        wall_s=60.0,
        start_s=2.0,
        run_s=50.0,
        worker_s=90.0,
        solving_s=85.5,
        cpu_s=81.0,
        killed_at=killed_at,
        joined_at=joined_at,
        warnings=[f"a worker is lost, {left} left"] if left else [],
    )


@pytest.mark.long
def test_a_page_of_two_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_HERE_S", math.inf)
    source = write_plans(tmp_path, SWEEP)
    run.run_sweep(source, tmp_path / "dataset")
    runs = [taken(3, 5, 1, 2), taken(5, 0, -1, -1)]
    written = write_study(source, tmp_path / "dataset", runs, "2 cores", tmp_path / "out")
    assert [path.name for path in written] == [
        "study.md",
        "study.csv",
        "study-step.svg",
        "study-cost.svg",
        "study-ways.svg",
    ]
    assert all(path.stat().st_size for path in written)
    page = written[0].read_text()
    for text in (
        "runtime: 8 points. 8 have a plan, 0 do not fit, 0 are refused",
        "| points done | 8, in 2 runs, each going on with the one before |",
        "| wall time | 120 s, 4 s of it to start the driver |",
        "| workers' time | 180 s in 100 s: ",
        "| worker share | 0.90: CPU of points over the workers' time; 0.95 by the clock |",
        "| cost of a point | 20.2 s of CPU in the mean, ",
        "| points sent again | 0: ",
        "; one killed when 1 of 3 points were done, another one at work when 2 were |",
        "| on | 2 cores |\n\nWarnings meanwhile:\n\n- a worker is lost, 5 left\n\n## What it shows\n",
        "![ours, batch 32: step of the best plan, against the GPUs of the cluster](study-step.svg)",
        "## Runtimes and precisions",
    ):
        assert text in page
    assert len((tmp_path / "out" / "study.csv").read_text().splitlines()) == 1 + 8
