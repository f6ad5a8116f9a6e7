"""The actors: starts them, replaces lost ones, takes in those that join late. Their events come through a queue."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from piper_ray.engine.backends.ray.machines import Machines
from piper_ray.engine.backends.ray.placement import Place, missing_places
from piper_ray.engine.backends.ray.software import difference
from piper_ray.engine.backends.ray.worker import CallOrder, CallReply, ChunkOrder, ChunkReply, Hello, remote_worker

_LONGEST_PAUSE_S = 30.0
_PATIENCE_S = 5.0
_MACHINES_WITHIN_S = 5.0


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


@dataclass
class _Actor:
    """handle: Ray's. asked_s: when it was asked for."""

    handle: Any
    place: Place
    asked_s: float


class Pool:
    """wanted: actors to keep, spread over the good machines; None: one on each, as they come and go. cpus_per_worker:
    cores of each; None: those of its machine, shared out among the actors there.
    """

    def __init__(
        self,
        wanted: int | None,
        cpus_per_worker: int | None,
        memory_bytes: float,
        machines: Machines,
        post: Callable[[Started | Answered], None],
    ) -> None:
        self._wanted = wanted
        self._cpus_per_worker = cpus_per_worker
        self._memory_bytes = memory_bytes
        self._machines = machines
        self._post = post
        self._names = itertools.count()
        self._actors: dict[int, _Actor] = {}
        self._ready: dict[int, Hello] = {}
        self._left_out: frozenset[str] = frozenset()
        self._failures = 0
        self._not_before = float("-inf")
        self._began_s: float | None = None
        self._looked_s = float("-inf")

    @property
    def failures(self) -> int:
        """Starts that failed since one last succeeded."""
        return self._failures

    @property
    def threads(self) -> int:
        """Of all workers that are ready. Asked for on another thread: ``list`` looks at the dict in one go."""
        actors = [self._actors.get(worker) for worker in list(self._ready)]
        return sum(actor.place.cpus for actor in actors if actor is not None)

    def node_of(self, worker: int) -> str:
        return self._ready[worker].node

    def keep_up(self, now: float) -> None:
        """Starts what is missing. Ray places an actor when there is room for it; nobody waits for that."""
        self._machines.look(now)
        left_out = frozenset(self._machines.left_out)
        if left_out - self._left_out:  # what failed there may do better elsewhere
            self._failures, self._not_before = 0, float("-inf")
        self._left_out = left_out
        if self._began_s is None:
            self._began_s = now
        if now < self._not_before or (self._wanted is not None and self._spreads_later(now)):
            return
        self._make_room(now)
        for place in self._missing():
            self._ask_for(place, now)

    def _spreads_later(self, now: float) -> bool:
        """Workers by number are spread over all machines: so these are waited for, a while."""
        return self._machines.asking and now - (self._began_s or now) < _MACHINES_WITHIN_S

    def _missing(self) -> list[Place]:
        if not self._machines.have_cores:  # one in any case: for clusters that grow when somebody waits
            return [] if self._actors else [Place(None, self._cpus_per_worker or 1)]
        return missing_places(
            self._machines.nodes, self._held(), self._wanted, self._cpus_per_worker, self._memory_bytes
        )

    def _held(self) -> dict[str, list[int]]:
        held: dict[str, list[int]] = {}
        for name, actor in self._actors.items():
            node = self._ready[name].node if name in self._ready else actor.place.node
            held.setdefault(node or "", []).append(actor.place.cpus)
        return held

    def _make_room(self, now: float) -> None:
        """Asks for fewer cores where others have had some of them for long, and for a machine that has come."""
        if now - self._looked_s < _PATIENCE_S:
            return
        self._looked_s = now
        for name, actor in list(self._actors.items()):
            node = actor.place.node
            if name in self._ready or now - actor.asked_s < _PATIENCE_S:
                continue
            if node is None:
                if self._machines.have_cores:
                    self._end(name)
            elif self._cpus_per_worker is None and 0 < (free := self._machines.free_cpus(node)) < actor.place.cpus:
                self._end(name)
                self._ask_for(Place(node, free), now)

    def _ask_for(self, place: Place, now: float) -> None:
        name, where = next(self._names), {}
        if place.node is not None:
            where["scheduling_strategy"] = NodeAffinitySchedulingStrategy(place.node, soft=False)
        actor = remote_worker(place.cpus, self._memory_bytes, where).remote(place.cpus)
        self._actors[name] = _Actor(actor, place, now)
        _when_done(actor.hello.remote(), lambda hello: self._post(Started(name, hello)))

    def _end(self, worker: int) -> None:
        ray.kill(self._actors.pop(worker).handle, no_restart=True)

    def started(self, worker: int, hello: Hello, now: float) -> bool:
        """Takes the worker in. False: its machine runs other software and is left out, or it is no more wanted."""
        if worker not in self._actors:
            return False
        self._ready[worker] = hello
        self._failures, self._not_before = 0, float("-inf")
        fault = difference(hello.software)
        if fault is None:
            return True
        self._machines.leave_out(hello.node, fault)
        self.drop(worker, now)
        return False

    def send(self, worker: int, chunk: int, order: ChunkOrder, finished: list[Any]) -> None:
        reply = self._actors[worker].handle.evaluate.remote(order, *finished)
        _when_done(reply, lambda done: self._post(Answered(worker, chunk, done)))

    def call(self, worker: int, chunk: int, order: CallOrder) -> None:
        """As ``send``, of a call."""
        reply = self._actors[worker].handle.call.remote(order)
        _when_done(reply, lambda done: self._post(Answered(worker, chunk, done)))

    def tell(self, turn: int, bound_s: float, *, stop: bool) -> None:
        """To all workers that are ready; none is waited for."""
        for worker in self._ready:
            self._actors[worker].handle.tell.remote(turn, bound_s, float(stop))

    def drop(self, worker: int, now: float) -> None:
        """The worker is of no more use, or gone already."""
        if worker not in self._actors:
            return
        node = self._actors[worker].place.node
        if self._ready.pop(worker, None) is None and (node is None or self._machines.is_alive(node, now)):
            self._failures += 1
            self._not_before = now + min(2.0**self._failures, _LONGEST_PAUSE_S)
        self._end(worker)

    def close(self) -> None:
        for worker in list(self._actors):
            self._end(worker)
        self._ready.clear()


def _when_done(ref: Any, call: Callable[[Future[Any]], None]) -> None:
    ref.future().add_done_callback(call)
