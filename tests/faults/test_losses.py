"""Losses and gains of workers, one after the other on one cluster: none changes a byte of the plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.driver import driving
from tests.faults.machines import ACTOR, USUAL, Machines, Setup


@pytest.mark.long
def test_worker_killed_then_a_raylet_where_one_machine_has_less_memory(
    cluster: Machines, local_plan: bytes, tmp_path: Path
) -> None:
    cluster.run({1: USUAL, 2: USUAL, 3: Setup(ray_options="--memory=300000000")})
    with driving(cluster, tmp_path) as driver:
        driver.until_all_join(2)
        assert cluster.with_worker() == [1, 2]
        cluster.kill_process(1, ACTOR)
        driver.until_note("is lost, 1 left")
        driver.until_workers(2)
        cluster.kill_process(2, "/raylet ")
        driver.until_note("is lost, 1 left")
        driver.until_workers(2)  # on the same machine, whose Ray has been started again
        assert cluster.with_worker() == [1, 2]
        assert driver.finish() == local_plan


@pytest.mark.long
def test_last_worker_lost_and_the_driver_waits(cluster: Machines, local_plan: bytes, tmp_path: Path) -> None:
    with driving(cluster, tmp_path, "--without-workers", "wait") as driver:
        driver.until_all_join(3)
        for machine in (1, 2, 3):
            cluster.kill(machine)
        driver.until_note("no worker is left: waiting for one")
        held = {driver.until_level(60, evaluation=3)["level"] for _ in range(10)}
        assert len(held) == 1
        cluster.start(1)
        driver.until_workers(1)  # late, and then another one
        cluster.start(2)
        driver.until_workers(2)
        assert driver.finish() == local_plan


@pytest.mark.long
def test_object_stores_full(cluster: Machines, local_plan: bytes, tmp_path: Path) -> None:
    """Somebody else keeps nearly all of them, on every machine, and nothing of that can be spilled."""
    with cluster.program(_KEEP_STORES) as keeper, driving(cluster, tmp_path) as driver:
        assert keeper.stdout is not None
        assert keeper.stdout.readline() == "kept\n"
        driver.until_all_join(3)
        assert driver.finish() == local_plan


_KEEP_STORES = """
import sys
import numpy as np

@ray.remote(num_cpus=0)
class Keeper:
    def keep(self):
        self.refs = [ray.put(np.zeros(8 << 20, np.uint8)) for _ in range(30)]  # 240 of 256 MiB
        self.views = ray.get(self.refs)

nodes = [node['NodeID'] for node in ray.nodes() if node['Alive']]
keepers = [Keeper.options(label_selector={'ray.io/node-id': node}).remote() for node in nodes]
ray.get([keeper.keep.remote() for keeper in keepers])
print('kept', flush=True)
sys.stdin.read()
"""
