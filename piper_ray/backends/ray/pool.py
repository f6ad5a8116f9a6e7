"""The actors: starts them, replaces lost ones, takes in those that join late. Their events come through a queue."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import ray

import piper_ray
from piper_ray.backends.ray.worker import BlockOrder, BlockReply, Hello, remote_worker
from piper_ray.kernels.jit import sources_digest

_GROWTH_CHECK_S = 2.0
_LONGEST_PAUSE_S = 30.0


@dataclass(frozen=True)
class Started:
    """A worker's hello, or why there is none."""

    worker: int
    hello: Future[Hello]


@dataclass(frozen=True)
class Answered:
    """A worker's answer to a block, or what became of it."""

    worker: int
    block: int
    reply: Future[BlockReply]


class Pool:
    """wanted: actors to keep; None: as many as the cluster's CPUs hold, as it grows and shrinks."""

    def __init__(
        self,
        wanted: int | None,
        cpus_per_worker: int,
        memory_bytes: float,
        post: Callable[[Started | Answered], None],
    ) -> None:
        self._wanted = wanted
        self._cpus = cpus_per_worker
        self._memory_bytes = memory_bytes
        self._post = post
        self._names = itertools.count()
        self._actors: dict[int, Any] = {}
        self._ready: dict[int, Hello] = {}
        self._checked_at = float("-inf")
        self._goal = wanted or 0
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

    def is_alive(self, node: str) -> bool:
        """Whether Ray still has the machine."""
        nodes: Callable[[], list[dict[str, Any]]] = ray.nodes
        return any(other["NodeID"] == node and other["Alive"] for other in nodes())

    def keep_up(self, now: float) -> None:
        """Starts what is missing. Ray places an actor when there is room for it; nobody waits for that."""
        if self._wanted is None and now - self._checked_at >= _GROWTH_CHECK_S:
            self._checked_at = now
            self._goal = max(1, _cluster_cpus() // self._cpus)
        if now < self._not_before:
            return
        while len(self._actors) < self._goal:
            name = next(self._names)
            actor = remote_worker(self._cpus, self._memory_bytes).remote(self._cpus)
            self._actors[name] = actor
            self._expect_hello(name, actor)

    def started(self, worker: int, hello: Hello) -> str | None:
        """Takes the worker in; returns what is wrong with it, if anything."""
        self._ready[worker] = hello
        self._failures = 0
        if (hello.version, hello.kernels) == (piper_ray.__version__, sources_digest()):
            return None
        return (
            f"piper_ray {hello.version} (kernels {hello.kernels}) is installed on node {hello.node[:8]}, "
            f"{piper_ray.__version__} (kernels {sources_digest()}) here"
        )

    def send(self, worker: int, block: int, order: BlockOrder, finished: list[Any]) -> None:
        reply = self._actors[worker].evaluate.remote(order, *finished)
        _when_done(reply, lambda done: self._post(Answered(worker, block, done)))

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


def _cluster_cpus() -> int:
    resources: Callable[[], dict[str, float]] = ray.cluster_resources
    return int(resources().get("CPU", 0.0))


def _when_done(ref: Any, call: Callable[[Future[Any]], None]) -> None:
    ref.future().add_done_callback(call)
