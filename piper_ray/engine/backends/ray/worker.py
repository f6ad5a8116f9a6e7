"""What runs in an actor: chunks of downsets, as they are ordered. Knows nothing of the search.

An actor keeps copies of what the orders name (tables, finished levels), so that each is fetched once; a chunk's answer
depends on its order alone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import ray

from piper_ray.engine.backends.local import LocalBackend
from piper_ray.engine.backends.ray.arrow import narrow, states_of, tables_of, target_of
from piper_ray.engine.backends.ray.software import Software, software
from piper_ray.engine.backends.ray.warm import compile_kernels
from piper_ray.engine.evaluation.state_tables import StateTables
from piper_ray.engine.kernels.types import ClusterArrays, IndexArray, LevelStates


class Hello(NamedTuple):
    """What a worker says of itself when it is ready."""

    node: str
    process: int
    software: Software


@dataclass(frozen=True)
class EvaluationOrder:
    """An evaluation and where its tables lie; refs in lists, so that only a worker that lacks them fetches them.

    key: of the evaluation, among all of a driver. tables_key: of downsets and graph, shared by many evaluations.
    """

    key: int
    tables_key: int
    downsets: list[ray.ObjectRef[pa.Table]]
    graph: list[ray.ObjectRef[pa.Table]]
    cluster: ClusterArrays
    limits: list[ray.ObjectRef[pa.Table]]
    threshold_s: float
    device_weight: int
    stage_weight: int


@dataclass(frozen=True)
class ChunkOrder:
    """Downsets first .. last - 1 of an evaluation, over its levels below ``level``.

    known_level: the worker has those below already; the state tables that come with the order hold the rest.
    in_use: keys of the evaluations that go on; what belongs to others can go.
    """

    evaluation: EvaluationOrder
    known_level: int
    level: int
    first: int
    last: int
    in_use: tuple[int, ...]


class ChunkReply(NamedTuple):
    """The chunk's states in narrow integers, and the seconds that they took."""

    counts: npt.NDArray[np.generic]
    tallies: npt.NDArray[np.generic]
    sums: npt.NDArray[np.generic]
    tested: IndexArray
    seconds: float

    @property
    def states(self) -> LevelStates:
        counts, tallies, sums = (array.astype(np.int64) for array in (self.counts, self.tallies, self.sums))
        return LevelStates(counts, tallies, sums, self.tested.astype(np.int64))


class Worker:
    """One actor, with ``threads`` threads."""

    def __init__(self, threads: int) -> None:
        compile_kernels()
        self._backend = LocalBackend(threads)
        self._tables: dict[int, tuple[pa.Table, pa.Table]] = {}
        self._evaluations: dict[int, StateTables] = {}

    def hello(self) -> Hello:
        return Hello(ray.get_runtime_context().get_node_id(), os.getpid(), software())

    def evaluate(self, order: ChunkOrder, *finished: pa.Table) -> ChunkReply:
        """finished: the levels from ``known_level`` to ``level``, in order, as one state table or several."""
        began = time.perf_counter()
        states = self._states(order)
        if order.known_level == 1 and states.level > 1:
            # The driver counts on nothing that this worker had: it failed before.
            del self._evaluations[order.evaluation.key]
            states = self._states(order)
        if states.level != order.known_level:
            raise RuntimeError(f"levels below {states.level} are here, not those below {order.known_level}")
        for table in finished:
            level = int(table.schema.metadata[b"level"])
            states.take(states_of(table, *states.downsets(level)))
        found = self._backend.evaluate_downsets(states, order.first, order.last, _no_heartbeat)
        return ChunkReply(
            narrow(found.counts),
            narrow(found.tallies),
            narrow(found.sums),
            found.tested,
            time.perf_counter() - began,
        )

    def _states(self, order: ChunkOrder) -> StateTables:
        for key in set(self._evaluations) - set(order.in_use):
            del self._evaluations[key]
        evaluation = order.evaluation
        if evaluation.key not in self._evaluations:
            if evaluation.tables_key not in self._tables:
                self._tables = {evaluation.tables_key: tuple(ray.get([*evaluation.downsets, *evaluation.graph]))}
            downsets, graph = self._tables[evaluation.tables_key]
            (limits,) = ray.get(evaluation.limits)
            self._evaluations[evaluation.key] = StateTables(
                tables_of(downsets, graph, evaluation.cluster),
                target_of(limits, evaluation.threshold_s, evaluation.device_weight, evaluation.stage_weight),
            )
        return self._evaluations[evaluation.key]


def _no_heartbeat(done: int) -> None:
    pass


def remote_worker(cpus: int, memory_bytes: float, placement: Mapping[str, Any]) -> Any:
    """The actor class. It is never restarted by Ray, and no call is retried: recovery is the driver's.

    placement: Ray's options that say where.
    """
    return ray.remote(Worker).options(
        num_cpus=cpus,
        memory=int(memory_bytes),
        max_restarts=0,
        max_task_retries=0,
        runtime_env={"env_vars": {"NUMBA_NUM_THREADS": str(cpus)}},
        **placement,
    )
