"""Killed at any moment and resumed, a sweep ends with the dataset of an undisturbed one."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from piper_ray.sweep.dataset import read_dataset
from piper_ray.sweep.run import run_sweep
from tests.sweep_support import SMALL_POINTS, content, write_small

ROOT = Path(__file__).resolve().parents[2]

_DRIVER = """
import sys
from piper_ray.sweep import dataset, run

dataset.MERGE_AT, run._WRITE_EVERY_S = 4, 0.0
run.run_sweep(sys.argv[1], sys.argv[2], resume=True, listener=lambda progress: print(progress.done, flush=True))
"""


@pytest.mark.long
def test_killed_at_random_moments_and_resumed(tmp_path: Path) -> None:
    source = write_small(tmp_path)
    run_sweep(source, tmp_path / "undisturbed")
    rng = random.Random(1)
    on_record = deaths = 0
    while True:
        command = [sys.executable, "-c", _DRIVER, str(source), str(tmp_path / "killed")]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as driver:
            assert driver.stdout is not None
            for _ in range(rng.randint(1, 90)):
                driver.stdout.readline()
            time.sleep(rng.random() * 0.01)
            driver.send_signal(signal.SIGKILL)
            told = [int(line) for line in driver.stdout.read().splitlines(keepends=True) if line.endswith("\n")]
        if driver.returncode == 0:
            break
        deaths += 1
        found = read_dataset(tmp_path / "killed").num_rows
        # All but the last point told of was durable before the next was begun.
        assert found >= on_record + max(told, default=1) - 1
        on_record = found
    assert deaths >= 3
    assert len(content(tmp_path / "killed")) == SMALL_POINTS
    assert content(tmp_path / "killed") == content(tmp_path / "undisturbed")
    names = [sorted(path.name for path in (tmp_path / kind).glob("workload=*/*")) for kind in ("killed", "undisturbed")]
    assert [len(of_kind) for of_kind in names] == [2, 2]
