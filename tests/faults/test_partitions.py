"""A lattice that does not fit on the driver's machine: three have a part of its downsets each, and one is lost."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from piper_ray.model.errors import EXIT_INTERRUPTED
from piper_ray.workloads.formats.workload_writer import to_toml
from tests.faults.driver import driving, solve_here
from tests.faults.machines import Machines
from tests.instances import two_towers

LITTLE = ("--memory-limit", "170.1MB")
"""For a few hundred downsets beside the process; 441 there are."""


@pytest.fixture(scope="module")
def towers(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, bytes]:
    """A file, and the plan where all fits."""
    folder = tmp_path_factory.mktemp("towers")
    source = folder / "towers.toml"
    source.write_text(to_toml(two_towers(20, devices=12, microbatches=16, memory_bytes=120.0)), encoding="utf-8")
    return str(source), solve_here([str(source)], folder / "plan.json")


def test_one_machine_is_lost(cluster: Machines, towers: tuple[str, bytes], tmp_path: Path) -> None:
    source, plan = towers
    with driving(cluster, tmp_path, *LITTLE, solve=[source]) as driver:
        driver.until_note("3 machines have a part each")
        driver.until_level(10)
        cluster.kill(2)
        lost = driver.until_note("all downsets are listed anew on the machines that are left")
        assert lost["text"].startswith(f"{cluster.name(2)} is gone")
        driver.until_note("2 machines have a part each")
        assert driver.finish() == plan
        stats = driver.document()["stats"]
        assert stats["cluster"]["workers"] == 2
        assert stats["cluster"]["chunks"] > 0


def test_interrupted(cluster: Machines, towers: tuple[str, bytes], tmp_path: Path) -> None:
    """What is known by then is written, and nothing is left on the machines."""
    source, _ = towers
    with driving(cluster, tmp_path, *LITTLE, solve=[source]) as driver:
        driver.until_level(10)
        driver.signal(signal.SIGINT)
        assert driver.end() == EXIT_INTERRUPTED, driver.text
        assert driver.document()["stopped_by"] == "interrupt"
