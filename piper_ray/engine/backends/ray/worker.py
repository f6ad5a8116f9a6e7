"""Runs in an actor: makes calls as ordered. The actor knows nothing of the search.

An actor keeps copies of what the orders name (tables, finished levels), so that each is fetched once; an answer depends
only on its order.

Also levels of the lattice as calls: a batch of them in chunks, what these share, and how a worker evaluates a chunk.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import ray

from piper_ray.engine.backends.calls import Call, Function
from piper_ray.engine.backends.local import LocalBackend, Worked
from piper_ray.engine.backends.ray.calls import OF_WORKER, GivenCall, Shared
from piper_ray.engine.backends.ray.machines import Software, software
from piper_ray.engine.evaluation.state_tables import StateTables, evaluate_downsets, joined, narrow, no_states, wide
from piper_ray.engine.kernels.selection import make_step_cache
from piper_ray.engine.kernels.types import ClusterArrays, Earlier, LevelStates, Tables, Threshold, frozen
from piper_ray.engine.tables.problem import tables_of_nothing


class LevelChunk(NamedTuple):
    """Downsets first .. last - 1 of an evaluation, over the first ``buckets`` buckets of the levels below ``level``."""

    level: int
    buckets: int
    first: int
    last: int


class FinishedLevels(NamedTuple):
    """The states of levels ``level`` .. end_level - 1, ``narrow``."""

    level: int
    end_level: int
    states: LevelStates


class ChunkThreads:
    """The threads of a worker for chunks, with the finished levels of the evaluation of its last chunk."""

    def __init__(self, threads: int) -> None:
        self.backend = LocalBackend(threads)
        self._states: StateTables | None = None

    def states_of(self, tables: tuple[Any, ...], cluster: ClusterArrays, target: Threshold) -> StateTables:
        """Returns the states of an evaluation, with all levels finished that its chunks have needed so far."""
        if self._states is None or self._states.target is not target:
            lattice, costs, options = tables
            found = Tables(frozen(lattice), frozen(costs), frozen(options), frozen(cluster))
            self._states = StateTables(found, frozen(target))
        return self._states


def evaluate_chunk(
    threads: ChunkThreads, tables: tuple[Any, ...], evaluation: tuple[ClusterArrays, Threshold], *rest: Any
) -> Worked:
    """Returns the states of a chunk, ``narrow``. rest: ``FinishedLevels``, the chunk, and a control that is not
    used."""
    *spans, chunk, _ = rest
    states = threads.states_of(tables, *evaluation)
    for span in spans:
        if span.level == states.level:
            states.take(wide(span.states))
    if states.level != chunk.level:
        raise RuntimeError(f"levels below {states.level} are here, not those below {chunk.level}")
    found = threads.backend.evaluate(states, chunk.first, chunk.last, lambda _: None, buckets=chunk.buckets)
    return found._replace(states=narrow(found.states))


_CHUNK_THREADS = Shared(None, OF_WORKER)


class SharedLevels:
    """What chunks share, each sent once: tables of a workload, limits of an evaluation, and spans of its finished
    levels."""

    def __init__(self) -> None:
        self._tables: Shared | None = None
        self._evaluations: WeakKeyDictionary[StateTables, list[Shared]] = WeakKeyDictionary()

    def calls(
        self, states: StateTables, edges: Sequence[int], expected_s: float, here: LocalBackend
    ) -> list[GivenCall]:
        """Makes calls for chunks of downsets between the edges, over all levels finished by now. here: used without
        workers."""
        shared, level, buckets = self._of(states), states.level, states.buckets_used
        calls = []
        for first, last in pairwise(edges):
            what = f"downsets {first:,} to {last - 1:,}"
            call = Call(None, evaluate_chunk, (), (LevelChunk(level, buckets, first, last),), what)
            at_hand = partial(here.evaluate, states, first, last, lambda _: None, buckets=buckets)
            calls.append(GivenCall(call, shared, expected_s, here=at_hand))
        return calls

    def _of(self, states: StateTables) -> tuple[Shared, ...]:
        """Returns what the chunks of an evaluation share, with all of its levels finished by now."""
        lattice, costs, options, cluster = states.tables
        if self._tables is None or self._tables.value[1] is not costs or self._tables.value[2] is not options:
            self._tables = Shared((lattice, costs, options))
        shared = self._evaluations.setdefault(states, [_CHUNK_THREADS, self._tables, Shared((cluster, states.target))])
        level = shared[-1].value.end_level if len(shared) > 3 else 1
        if level < states.level:
            found = narrow(states.finished(level, states.level))
            shared.append(Shared(FinishedLevels(level, states.level, found)))
        return tuple(shared)


@dataclass(eq=False)
class ChunkBatch:
    """Levels from ``first_level`` on, over the first ``buckets`` buckets. edges: between the chunks, each of which is a
    call."""

    states: StateTables
    first_level: int
    buckets: int
    edges: Sequence[int]
    calls: Sequence[GivenCall]

    @property
    def done(self) -> int:
        """The number of downsets answered."""
        spans = zip(self.calls, pairwise(self.edges), strict=True)
        return sum(end - begin for call, (begin, end) in spans if call.answer.done())

    @property
    def worked_s(self) -> float:
        """The time of all threads together, once all is answered."""
        return sum(float(call.answer.result().seconds) for call in self.calls)

    @property
    def answered_s(self) -> float:
        """The time of the last answer, by ``time.perf_counter``."""
        return max(call.answered_s for call in self.calls)

    @cached_property
    def found(self) -> LevelStates:
        """Returns the states, once all is answered."""
        return joined([wide(call.answer.result().states) for call in self.calls])


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
    """One actor, with ``threads`` threads for chunks of levels."""

    def __init__(self, threads: int) -> None:
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
    """Returns the actor class. Ray never restarts it and retries no call: the driver handles failures.

    placement: Ray's options for its place.
    """
    remote: Any = ray.remote  # its types do not include concurrency groups
    return remote(concurrency_groups={CONTROL: 1})(Worker).options(
        num_cpus=cpus,
        memory=int(memory_bytes),
        max_restarts=0,
        max_task_retries=0,
        runtime_env={"env_vars": {"NUMBA_NUM_THREADS": str(max(1, cpus))}},
        **placement,
    )
