"""Runs in an actor: makes calls as ordered. It knows nothing of the search.

An actor keeps copies of what the orders name (tables, finished levels), so that each is fetched once; an answer depends
only on its order.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import ray

from piper_ray.engine.backends.calls import Function
from piper_ray.engine.backends.ray.calls import OF_WORKER
from piper_ray.engine.backends.ray.levels import ChunkThreads
from piper_ray.engine.backends.ray.machines import Software, software
from piper_ray.engine.evaluation.state_tables import StateTables, evaluate_downsets, no_states
from piper_ray.engine.kernels.selection import make_step_cache
from piper_ray.engine.kernels.types import Earlier, Threshold, frozen
from piper_ray.engine.tables.problem import tables_of_nothing

CONTROL = "control"
"""Methods that run while a call runs."""


class Hello(NamedTuple):
    """What a worker reports of itself when it is ready."""

    node: str
    process: int
    software: Software


@dataclass(frozen=True)
class CallOrder:
    """A ``backends.calls.Call`` to be made. shared: keys. fetched: refs, in lists, of what the worker does not have.
    in_use: keys that are still needed. turn: calls of one turn share what ``Worker.tell`` receives.
    """

    function: Function
    shared: tuple[int, ...]
    fetched: Mapping[int, list[ray.ObjectRef[Any]]]
    arguments: tuple[Any, ...]
    turn: int
    bound_s: float
    in_use: tuple[int, ...]


class Reply(NamedTuple):
    """The result of a call's function, and its seconds."""

    found: Any
    worked_s: float


class Worker:
    """One actor, with ``threads`` threads for chunks of levels. for_levels: see ``WorkerSize``."""

    def __init__(self, threads: int, *, for_levels: bool) -> None:
        if for_levels:
            compile_kernels()
        self._shared: dict[int, Any] = {OF_WORKER: ChunkThreads(threads)}
        self._told = (-1, np.inf, 0.0)  # the newest turn that ``tell`` received: its bound, and the request to stop
        self._control = (-1, np.zeros(2))  # of the current call: its turn, and the array that its function reads

    def hello(self) -> Hello:
        return Hello(ray.get_runtime_context().get_node_id(), os.getpid(), software())

    def call(self, order: CallOrder) -> Reply:
        """Makes a call. Shared values are fetched once for all calls; again if the driver expects none to be here."""
        began_s = time.perf_counter()
        for key in set(self._shared) - {OF_WORKER, *order.in_use}:
            del self._shared[key]
        for key, refs in order.fetched.items():
            (self._shared[key],) = ray.get(refs)
        control = np.array([order.bound_s, 0.0])
        self._control = order.turn, control
        self._apply(*self._told)  # earlier messages; later ones are written to the array directly
        result = order.function(*(self._shared[key] for key in order.shared), *order.arguments, control)
        return Reply(result, time.perf_counter() - began_s)

    @ray.method(concurrency_group=CONTROL)
    def tell(self, turn: int, bound_s: float, stop: float) -> None:
        """Receives, while a call runs, a better bound for the calls of a turn, or the request to stop (not 0)."""
        told, before_s, stopped = self._told
        if turn >= told:
            same = turn == told
            self._told = turn, min(bound_s, before_s) if same else bound_s, max(stop, stopped) if same else stop
        self._apply(turn, bound_s, stop)

    def _apply(self, turn: int, bound_s: float, stop: float) -> None:
        of_call, control = self._control
        if turn == of_call:
            control[0] = min(control[0], bound_s)
            control[1] = max(control[1], stop)


def compile_kernels() -> None:
    """Compiles or loads the kernels before the first chunk, by an evaluation of the empty downset."""
    limits = np.zeros(1, np.int64)
    states = StateTables(tables_of_nothing(), frozen(Threshold(1.0, 1, 0, limits, limits)))
    evaluate_downsets(1, 1, states.arrays, Earlier(0, no_states(0)), make_step_cache(states.tables))
    states.take(no_states(0))


def remote_worker(cpus: int, memory_bytes: float, placement: Mapping[str, Any]) -> Any:
    """Returns the actor class. Ray never restarts it and retries no call: the driver handles failures. It has no
    environment of its own, so a process that Ray has at hand becomes the actor.

    placement: Ray's options for its place.
    """
    remote: Any = ray.remote  # its types do not include concurrency groups
    return remote(concurrency_groups={CONTROL: 1})(Worker).options(
        num_cpus=cpus,
        memory=int(memory_bytes),
        max_restarts=0,
        max_task_retries=0,
        **placement,
    )
