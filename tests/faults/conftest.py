"""Where these tests can run. As root, as in CI, they must: what they lack then is an error, not a reason to skip."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator

import pytest

from tests.faults.driver import INCEPTION, solve_here
from tests.faults.machines import Machines, machines


@pytest.fixture(scope="session", autouse=True)
def isolation() -> None:
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("network namespaces need Linux, and root")
    for program in ("ip", "unshare", "nsenter", "setpriv"):
        assert shutil.which(program), f"{program} is missing: install iproute2 and util-linux"


@pytest.fixture(scope="session", autouse=True)
def local_plan(isolation: None, tmp_path_factory: pytest.TempPathFactory) -> bytes:  # noqa: ARG001
    """What every solve of INCEPTION must write, byte for byte. From then on kernels are on disk for all machines."""
    return solve_here(INCEPTION, tmp_path_factory.mktemp("local") / "plan.json")


@pytest.fixture(scope="session")
def shared_cluster(isolation: None) -> Iterator[Machines]:  # noqa: ARG001
    with machines(3) as cluster:
        yield cluster


@pytest.fixture
def unrepaired(shared_cluster: Machines) -> Iterator[Machines]:
    """Three machines of workers for a test that says itself what they are to run: what they run now may do. The test's
    solves must leave nothing."""
    yield shared_cluster
    shared_cluster.assert_nothing_left()


@pytest.fixture
def cluster(unrepaired: Machines) -> Machines:
    """All of them well, whatever was done to them before."""
    unrepaired.repair()
    return unrepaired
