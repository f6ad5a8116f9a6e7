"""A Ray on loopback for all tests that share it, and workers that die or fail when told to."""

from __future__ import annotations

import logging
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from piper_ray.engine.backends.ray import RayBackend

CPUS = 2

RAY_ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # else it takes the machine's own address for 127.0.0.1
    "RAY_prestart_worker_first_driver": "false",  # none before it is needed
    "RAY_worker_niceness": "0",  # tests wait for them: below the other tests of a busy machine they would starve
    "RAY_num_workers_soft_limit": "8",  # a process that has answered a question stays for the next one
}


@pytest.fixture(scope="module")
def local_ray() -> None:
    """Ray of this process with two CPUs; tests/conftest.py ends it with the last file of those that share it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own
        import ray

        if not ray.is_initialized():
            ray.init(
                address="local",
                num_cpus=CPUS,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                configure_logging=False,
                _node_ip_address="127.0.0.1",
            )
    nodes: Callable[[], list[dict[str, str]]] = ray.nodes
    assert nodes()[0]["NodeManagerAddress"] == "127.0.0.1", "it listens for everybody"


@contextmanager
def backend_of(**options: Any) -> Iterator[RayBackend]:
    """A backend that ends with the chunk, as the command line ends it."""
    from piper_ray.engine.backends.ray import RayBackend

    backend = RayBackend(**options)
    try:
        yield backend
    finally:
        backend.close()


def until_workers_are_there(backend: RayBackend, count: int, solve: Callable[[], object]) -> None:
    """solve: something small, which starts them; the driver does it alone until they are there."""
    deadline = time.monotonic() + 240
    while backend.activity().workers < count:
        assert time.monotonic() < deadline, "no worker came"
        solve()
        time.sleep(0.1)


def send_every_level_to_workers(monkeypatch: pytest.MonkeyPatch, round_trip_s: float = 0.003) -> None:
    """In more chunks than workers, none of whom is late, however busy the machine is.

    round_trip_s: 0 for level by level.
    """
    from piper_ray.engine.backends.ray.coordinator import Coordinator
    from piper_ray.engine.backends.ray.pacing import Pacing

    patient = partial(Coordinator, overdue_floor_s=60.0)
    monkeypatch.setattr("piper_ray.engine.backends.ray.dispatcher.Coordinator", patient)

    paced = partial(Pacing, round_trip_s=round_trip_s)
    monkeypatch.setattr("piper_ray.engine.backends.ray.backend.Pacing", paced)
    monkeypatch.setattr(Pacing, "pays", lambda *_: True)
    monkeypatch.setattr(Pacing, "pays_ahead", lambda *_: True)
    monkeypatch.setattr(Pacing, "chunks", lambda _self, _seconds, _workers, _threads, downsets: min(downsets, 5))
    monkeypatch.setattr(Pacing, "record", lambda *_: None)


def workers_that_die(monkeypatch: pytest.MonkeyPatch, folder: Path, deaths: int, downset: int) -> None:
    """The first ``deaths`` workers to be given ``downset`` are killed while they have it in work."""
    from piper_ray.engine.backends.ray.worker import CallOrder, Reply, Worker

    # Local, so that Ray ships it whole: workers cannot import the tests.
    class Mortal(Worker):
        def call(self, order: CallOrder) -> Reply:
            (chunk,) = order.arguments
            for death in range(deaths):
                if chunk.first <= downset < chunk.last and not (folder / str(death)).exists():
                    (folder / str(death)).touch(exist_ok=False)
                    os.kill(os.getpid(), signal.SIGKILL)
            return super().call(order)

    monkeypatch.setattr("piper_ray.engine.backends.ray.worker.Worker", Mortal)


def workers_that_fail(monkeypatch: pytest.MonkeyPatch, folder: Path, failures: int) -> None:
    """The first ``failures`` chunks raise an error."""
    from piper_ray.engine.backends.ray.worker import CallOrder, Reply, Worker

    class Faulty(Worker):
        def call(self, order: CallOrder) -> Reply:
            for failure in range(failures):
                if not (folder / str(failure)).exists():
                    (folder / str(failure)).touch(exist_ok=False)
                    raise OSError(f"no room for downset {order.arguments[0].first}")
            return super().call(order)

    monkeypatch.setattr("piper_ray.engine.backends.ray.worker.Worker", Faulty)
