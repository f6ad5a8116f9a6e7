"""Plans every point of a sweep on a cluster of isolated machines on this one, two of one CPU each and the head's;
at a third of what is left one of them is killed and another joins. Then it writes study.md, study.csv and the pictures:
``scripts/study [SWEEP] [--storage DIR] [-o FOLDER]``. Run again after whatever ended it, it goes on.

Needs Linux, root and iproute2, as tests/faults does.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import PIPE
from typing import Any

import piper_ray
from piper_ray.model.cores import load_text, machine_load
from piper_ray.sweep.plan_point import PlanPoint
from piper_ray.sweep.read import read_sweep
from scripts.cluster_study.page import StudyRun, write_study
from tests.faults.machines import HEAD, USUAL, Machines, machines

_RUNS = "study-runs.json"
"""A file next to the dataset's folders: what each run of this script took."""

_KILLED, _LEFT, _JOINING = 1, 2, 3
_FEWEST = 9
"""If fewer points are left, no machine is killed."""

Told = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/study", description=__doc__)
    parser.add_argument("sweep", nargs="?", type=Path, default=Path("inputs/sweeps/study.toml"), metavar="SWEEP")
    parser.add_argument("--storage", type=Path, default=Path("results/study"), help="where the dataset is kept")
    parser.add_argument("-o", "--out", type=Path, default=Path("docs"), help="where the page and the pictures go")
    given = parser.parse_args()
    wanted = read_sweep(given.sweep)
    given.storage.mkdir(parents=True, exist_ok=True)
    kept = given.storage / _RUNS
    runs = [StudyRun(**one) for one in json.loads(kept.read_text())] if kept.exists() else []
    warm_kernels([point for point in wanted.points if isinstance(point, PlanPoint)])
    load = machine_load()
    with machines(_JOINING) as cluster:
        cluster.run({_KILLED: USUAL, _LEFT: USUAL})
        run = studied(cluster, given.sweep, given.storage.resolve())
    if run.done:
        runs.append(run)
        kept.write_text(json.dumps([vars(one) for one in runs], indent=1) + "\n")
    if run.left:
        raise SystemExit(f"{run.left} points are left: the same command goes on")
    if not runs:
        raise SystemExit(f"{given.storage} was not made by this script: expected another --storage")
    machine = f"{platform.machine()}, Python {platform.python_version()}, piper_ray {piper_ray.__version__}"
    facts = machine if load is None else f"{machine}, {load_text(load)}"
    for path in write_study(given.sweep, given.storage, runs, facts, given.out):
        print(path)


def warm_kernels(points: list[PlanPoint]) -> None:
    """Compiles all kernels that the points need, on the disk that all machines share."""
    for runtime in sorted({point.trained_by for point in points}):
        piper_ray.plan("bert-large", "H100-SXM", global_batch=64, microbatch_size=4, runtime=runtime)


def studied(cluster: Machines, sweep: Path, storage: Path) -> StudyRun:
    """Runs the sweep until it or its driver ends. Ctrl-C ends it, and keeps what is on record."""
    began_s = time.monotonic()
    arguments = [sys.executable, "-m", "scripts.cluster_study.driver", str(sweep), str(storage), cluster.address]
    watched = Watched(cluster)
    with cluster.popen(HEAD, arguments, stdout=PIPE, start_new_session=True) as driver:
        assert driver.stdout is not None
        try:
            for line in driver.stdout:
                with suppress(ValueError):  # others are Ray's own
                    watched.hear(json.loads(line))
        except KeyboardInterrupt:
            cluster.kill(HEAD)
    latest = watched.latest
    return StudyRun(
        points=latest.get("points", 0),
        done=latest.get("done", 0),
        left=latest.get("left", 1),
        wall_s=time.monotonic() - began_s,
        start_s=latest.get("start_s", 0.0),
        run_s=latest.get("run_s", 0.0),
        worker_s=latest.get("worker_s", 0.0),
        solving_s=latest.get("solving_s", 0.0),
        cpu_s=latest.get("cpu_s", 0.0),
        killed_at=watched.killed_at,
        joined_at=watched.joined_at,
        warnings=watched.warnings,
    )


@dataclass
class Watched:
    """Shows what the driver reports; at a third of its points a machine is killed and another one switched on."""

    cluster: Machines
    latest: Told = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    killed_at: int = -1
    joined_at: int = -1

    def hear(self, told: Told) -> None:
        if "warning" in told:
            self.warnings.append(told["warning"])
            print(f"note  {told['warning']}", flush=True)
            return
        self.latest, done, asked = told, told["done"], told["points"] - told["recorded"]
        if self.killed_at < 0 and asked >= _FEWEST and done >= asked // 3:
            self.killed_at = done
            self.cluster.kill(_KILLED)
            self.cluster.start(_JOINING)
            print(f"machine {_KILLED} killed, {_JOINING} switched on, at {done} points", flush=True)
        if self.killed_at >= 0 > self.joined_at and _JOINING in self.cluster.with_worker():
            self.joined_at = done
            print(f"machine {_JOINING} works, at {done} points", flush=True)
        print(progress_text(told), flush=True)


def progress_text(told: Told) -> str:
    share = told["cpu_s"] / told["worker_s"] if told["worker_s"] else 0.0
    return (
        f"{told['recorded'] + told['done']:,} of {told['points']:,} points, {told['run_s']:.0f} s, "
        f"{told['workers']} workers, CPU {100 * share:.0f} % of their time"
    )


if __name__ == "__main__":
    main()
