"""A sweep of plans on a cluster that loses a machine and gets another one: the same rows, and little done twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from piper_ray.sweep.dataset import read_dataset
from piper_ray.sweep.run import run_sweep
from tests.faults.machines import USUAL, Machines, until
from tests.faults.sweeping import sweeping
from tests.sweep_support import content, write_plans

SWEEP = """
[models]
ours = "ours.json"
[plan]
models = "ours"
gpus = ["H100-SXM", "A100-80", "MI300X"]
nodes = [1, 2]
batches = [32, 64]
"""


@pytest.mark.long
def test_one_machine_killed_and_one_joined(cluster: Machines, tmp_path: Path) -> None:
    source = write_plans(tmp_path, SWEEP)
    run_sweep(source, tmp_path / "here")
    cluster.run({1: USUAL, 2: USUAL})
    with sweeping(cluster, source, tmp_path / "cluster", joined=2) as sweep:
        sweep.until_done(4)
        cluster.kill(1)
        sweep.until_warning("lost")
        sweep.until_done(6)
        cluster.start(3)
        until(lambda: 3 in cluster.with_worker(), "a worker runs on the machine that joined")
        sweep.finish()
    assert content(tmp_path / "cluster") == content(tmp_path / "here")
    rows = read_dataset(tmp_path / "cluster", ["host", "attempts"]).to_pylist()
    assert {row["host"] for row in rows} == {cluster.name(machine).partition(" ")[0] for machine in (1, 2, 3)}
    again = [row for row in rows if row["attempts"] > 1]
    assert len(again) <= 2, "what it had alone: a batch under way, and one in line"
