"""The actors: starts them, replaces lost ones, takes in those that join late. Their events come through a queue."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import ray

from piper_ray.engine.backends.ray.machines import Machines
from piper_ray.engine.backends.ray.software import difference
from piper_ray.engine.backends.ray.worker import CallOrder, CallReply, ChunkOrder, ChunkReply, Hello, remote_worker

_LONGEST_PAUSE_S = 30.0


@dataclass(frozen=True)
class Started:
    """A worker's hello, or why there is none."""

    worker: int
    hello: Future[Hello]


@dataclass(frozen=True)
class Answered:
    """A worker's answer to a chunk, or what became of it."""

    worker: int
    chunk: int
    reply: Future[ChunkReply | CallReply]


class Pool:
    """wanted: actors to keep; None: as many as the good machines have cores for, as they come and go."""

    def __init__(
        self,
        wanted: int | None,
        cpus_per_worker: int,
        memory_bytes: float,
        machines: Machines,
        post: Callable[[Started | Answered], None],
    ) -> None:
        self._wanted = wanted
        self._cpus = cpus_per_worker
        self._memory_bytes = memory_bytes
        self._machines = machines
        self._post = post
        self._names = itertools.count()
        self._actors: dict[int, Any] = {}
        self._ready: dict[int, Hello] = {}
        self._left_out: frozenset[str] = frozenset()
        self._failures = 0
        self._not_before = float("-inf")

    def _expect_hello(self, name: int, actor: Any) -> None:
        _when_done(actor.hello.remote(), lambda hello: self._post(Started(name, hello)))

    @property
    def failures(self) -> int:
        """Starts that failed since one last succeeded."""
        return self._failures

    def node_of(self, worker: int) -> str:
        return self._ready[worker].node

    def keep_up(self, now: float) -> None:
        """Starts what is missing. Ray places an actor when there is room for it; nobody waits for that."""
        self._machines.look(now)
        left_out = frozenset(self._machines.left_out)
        if left_out - self._left_out:  # what failed there may do better elsewhere
            self._failures, self._not_before = 0, float("-inf")
        self._left_out = left_out
        if now < self._not_before:
            return
        # One in any case: for clusters that grow when somebody waits.
        goal = self._wanted or max(1, self._machines.cpus // self._cpus)
        while len(self._actors) < goal:
            name = next(self._names)
            actor = remote_worker(self._cpus, self._memory_bytes, self._machines.placement()).remote(self._cpus)
            self._actors[name] = actor
            self._expect_hello(name, actor)

    def started(self, worker: int, hello: Hello, now: float) -> bool:
        """Takes the worker in. False: its machine runs other software and is left out, and the worker is no more."""
        self._ready[worker] = hello
        self._failures = 0
        fault = difference(hello.software)
        if fault is None:
            return True
        self._machines.leave_out(hello.node, fault)
        self.drop(worker, now)
        return False

    def send(self, worker: int, chunk: int, order: ChunkOrder, finished: list[Any]) -> None:
        reply = self._actors[worker].evaluate.remote(order, *finished)
        _when_done(reply, lambda done: self._post(Answered(worker, chunk, done)))

    def call(self, worker: int, chunk: int, order: CallOrder) -> None:
        """As ``send``, of a call."""
        reply = self._actors[worker].call.remote(order)
        _when_done(reply, lambda done: self._post(Answered(worker, chunk, done)))

    def tell(self, turn: int, bound_s: float, *, stop: bool) -> None:
        """To all workers that are ready; none is waited for."""
        for worker in self._ready:
            self._actors[worker].tell.remote(turn, bound_s, float(stop))

    def drop(self, worker: int, now: float) -> None:
        """The worker is of no more use, or gone already."""
        actor = self._actors.pop(worker, None)
        if actor is None:
            return
        if self._ready.pop(worker, None) is None:
            self._failures += 1
            self._not_before = now + min(2.0**self._failures, _LONGEST_PAUSE_S)
        ray.kill(actor, no_restart=True)

    def close(self) -> None:
        for actor in self._actors.values():
            ray.kill(actor, no_restart=True)
        self._actors.clear()
        self._ready.clear()


def _when_done(ref: Any, call: Callable[[Future[Any]], None]) -> None:
    ref.future().add_done_callback(call)
