"""Machines that run something else than the driver are left out by name, whenever they come; the others go on."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from piper_ray.model.errors import ClusterError
from tests.faults.driver import driving
from tests.faults.machines import HEAD, LONG_S, USUAL, Machines, Setup
from tests.faults.surroundings import TO_WORKERS, with_other_kernels, with_other_python, without_piper_ray
from tests.interrupt_support import write_long
from tests.sweep_support import write_small


@dataclass
class Others:
    """A cluster, and what its machines may run."""

    cluster: Machines
    bare: Setup
    kernels: Setup
    python: Setup


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("software")


@pytest.fixture(scope="module")
def setups(folder: Path) -> tuple[Setup, Setup, Setup]:
    return (
        without_piper_ray(folder / "bare"),
        with_other_kernels(folder / "kernels"),
        with_other_python(folder / "python"),
    )


@pytest.fixture
def others(unrepaired: Machines, setups: tuple[Setup, Setup, Setup]) -> Others:
    return Others(unrepaired, *setups)


def test_a_solve_goes_on_without_them(others: Others, local_plan: bytes, tmp_path: Path) -> None:
    """They join while it is under way."""
    cluster = others.cluster
    cluster.run({1: USUAL})
    with driving(cluster, tmp_path) as driver:
        driver.until_all_join(1)
        cluster.run({1: USUAL, 2: others.bare, 3: others.kernels})
        driver.until_left_out(2)
        assert driver.finish() == local_plan
        bare, other = sorted(note for note in driver.notes if "left out" in note)
        assert bare == f"{cluster.name(2)} is left out: piper_ray cannot be imported there"
        assert other.startswith(f"{cluster.name(3)} is left out: its piper_ray has other sources than the one here")
        assert not driver.was_told("is lost")


@pytest.mark.long
def test_without_a_good_machine_each_is_named(others: Others, tmp_path: Path) -> None:
    cluster = others.cluster
    cluster.run({2: others.bare, 3: others.python})
    sweep = ["sweep", str(write_small(tmp_path)), "--storage", str(tmp_path / "d")]
    solve = ["solve", str(write_long(tmp_path))]  # which must not be done before they have answered
    (tmp_path / "sitecustomize.py").write_text(TO_WORKERS)
    paths = [str(tmp_path), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    variable = f"PYTHONPATH={os.pathsep.join(filter(None, paths))}"
    for arguments in (solve, sweep):
        command = ["env", variable, sys.executable, "-m", "piper_ray", *arguments, "--address", cluster.address]
        with cluster.popen(HEAD, command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
            _, errors = process.communicate(timeout=LONG_S)
        assert process.returncode == ClusterError.exit_code, errors
        assert "no machine of the cluster can work" in errors
        assert f"{cluster.name(2)}: piper_ray cannot be imported there" in errors
        assert f"{cluster.name(3)}: it has Python 3.11.99" in errors
