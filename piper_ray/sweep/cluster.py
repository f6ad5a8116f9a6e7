"""A Ray cluster that solves points: each batch a task that asks for a core and for the memory it may take.

Tasks, not actors: Ray places them by what each machine has left, as machines come and go, and gives them to processes
that are there already. None is retried by Ray: what becomes of a lost batch is the schedule's to say.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any, final

import ray
from ray.exceptions import RayError, RayTaskError

import piper_ray
from piper_ray.backends.ray.backend import RayBackend
from piper_ray.backends.ray.session import connect
from piper_ray.errors import ClusterError
from piper_ray.kernels.jit import sources_digest
from piper_ray.stop import Stop
from piper_ray.sweep.answer import Row, answer
from piper_ray.sweep.crew import Reply
from piper_ray.sweep.lattices import Lattices
from piper_ray.sweep.point import Point, Sweep
from piper_ray.sweep.schedule import Batch
from piper_ray.sweep.worker import Order, Report, solve_batch

_LOOK_EVERY_S = 2.0
_LOSSES = 25
"""In a row, with no batch answered in between, after which it is the cluster and not the points."""


@final
class Cluster:
    """The cluster at an address, as ``backends.ray`` takes it. Raises ClusterError if it cannot be reached."""

    def __init__(self, sweep: Sweep, address: str | None, stop: Stop[Any]) -> None:
        self._sweep = sweep
        self._stop = stop
        self._session = connect(address, None)
        self._task = ray.remote(solve_batch)
        self._batches: dict[Any, Batch] = {}
        self._graphs: dict[str, Any] = {}
        self._looked_at = float("-inf")
        self._cpus = 1
        self._largest_bytes = 0.0
        self._losses = 0

    @property
    def workers(self) -> int:
        self._look()
        return self._cpus

    @property
    def in_flight(self) -> int:
        return len(self._batches)

    def holds(self, memory_bytes: float) -> bool:
        self._look()
        return memory_bytes <= self._largest_bytes

    def submit(self, batch: Batch) -> None:
        label = batch.tasks[0].point.workload
        if label not in self._graphs:
            self._graphs[label] = ray.put(self._sweep.graphs[label])
        order = Order(
            tuple(task.point for task in batch.tasks),
            self._sweep.graph_hashes[label],
            [self._graphs[label]],
            self._sweep.options,
        )
        task = self._task.options(
            num_cpus=1,
            memory=int(batch.memory_bytes),
            max_retries=0,
            runtime_env={"env_vars": {"NUMBA_NUM_THREADS": "1"}},
        )
        self._batches[task.remote(order)] = batch

    def replies(self, timeout_s: float) -> list[Reply]:
        refs = list(self._batches)
        done, _ = ray.wait(refs, num_returns=1, timeout=timeout_s)
        if done:
            done, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        return [self._reply(ref, self._batches.pop(ref)) for ref in done]

    def solve_together(self, point: Point) -> Row:
        with closing(RayBackend()) as backend:
            graph = self._sweep.graphs[point.workload]
            return answer(point, graph, self._sweep.options, Lattices(), backend=backend, stop=self._stop)

    def close(self) -> None:
        for ref in self._batches:
            with contextlib.suppress(RayError):
                ray.cancel(ref, force=True)
        self._batches.clear()
        self._session.close()

    def _reply(self, ref: Any, batch: Batch) -> Reply:
        try:
            report: Report = ray.get(ref)
        except RayTaskError as error:
            raise ClusterError(
                f"a worker cannot solve points: {str(error.cause or error).splitlines()[0]}. Install piper_ray "
                f"{piper_ray.__version__} on every machine of the cluster"
            ) from error
        except RayError as error:
            self._losses += 1
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            if self._losses >= _LOSSES:
                raise ClusterError(f"{self._losses} workers in a row died, the last one so: {reason}") from error
            return Reply(batch, None, 0.0, f"{type(error).__name__}: {reason}")
        self._losses = 0
        other = {str(row["kernels"]) for row in report.rows} - {sources_digest()}
        if other:
            host = report.rows[0]["host"]
            raise ClusterError(
                f"{host} has another piper_ray (kernels {', '.join(sorted(other))}, not {sources_digest()}): "
                "install the same on every machine"
            )
        return Reply(batch, report.rows, report.seconds)

    def _look(self) -> None:
        """What the cluster has now."""
        now = time.monotonic()
        if now - self._looked_at < _LOOK_EVERY_S:
            return
        self._looked_at = now
        nodes: Callable[[], list[dict[str, Any]]] = ray.nodes
        resources = [node["Resources"] for node in nodes() if node["Alive"]]
        self._cpus = max(1, int(sum(of_node.get("CPU", 0.0) for of_node in resources)))
        self._largest_bytes = max((float(of_node.get("memory", 0.0)) for of_node in resources), default=0.0)
