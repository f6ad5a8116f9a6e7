"""The actors: starts them, replaces lost ones, and takes in late ones. Reports their events to its owner."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from piper_ray.engine.backends.ray.coordinator import HERE
from piper_ray.engine.backends.ray.machines import Machines, difference
from piper_ray.engine.backends.ray.placement import Place, WorkerSize, missing_places
from piper_ray.engine.backends.ray.worker import CallOrder, Hello, remote_worker

_LONGEST_PAUSE_S = 30.0
_PATIENCE_S = 5.0
_MACHINES_WITHIN_S = 5.0


@dataclass
class _Actor:
    """handle: Ray's. asked_s: when it was requested."""

    handle: Any
    place: Place
    asked_s: float


class Pool:
    """wanted: the number of actors to keep, spread over the usable machines; None: as many as these have room for, as
    they join and leave.

    on_started: called with a worker's hello, or why there is none. on_answered: called with an answer to a chunk, or
    what became of it. Both are called in threads of Ray. failures: failed starts since the last successful one.
    """

    def __init__(
        self,
        wanted: int | None,
        size: WorkerSize,
        machines: Machines,
        on_started: Callable[[int, Future[Hello]], None],
        on_answered: Callable[[int, int, Future[Any]], None],
    ) -> None:
        self._wanted = wanted
        self._size = size
        self._machines = machines
        self._on_started = on_started
        self._on_answered = on_answered
        self._names = itertools.count()
        self._actors: dict[int, _Actor] = {}
        self._ready: dict[int, Hello] = {}
        self._left_out: frozenset[str] = frozenset()
        self.failures = 0
        self._not_before = float("-inf")
        self._began_s: float | None = None
        self._looked_s = float("-inf")

    @property
    def asked_for(self) -> int:
        """The number of actors that run or are starting. For any thread."""
        return len(self._actors)

    @property
    def threads(self) -> int:
        """The number of threads of all ready workers. Called on another thread: ``list`` reads the dict in one step."""
        actors = [self._actors.get(worker) for worker in list(self._ready)]
        return sum(actor.place.cpus for actor in actors if actor is not None)

    def node_of(self, worker: int) -> str:
        return self._machines.here if worker == HERE else self._ready[worker].node

    def keep_up(self, now: float) -> None:
        """Starts missing actors. Ray places an actor when there is room; nothing waits for that."""
        self._machines.look(now)
        left_out = frozenset(self._machines.left_out)
        if left_out - self._left_out:  # starts that failed there may succeed elsewhere
            self.failures, self._not_before = 0, float("-inf")
        self._left_out = left_out
        if self._began_s is None:
            self._began_s = now
        if now < self._not_before or (self._wanted is not None and self._spreads_later(now)):
            return
        self._make_room(now)
        for place in self._missing():
            self._ask_for(next(self._names), place, now)

    def _spreads_later(self, now: float) -> bool:
        """Whether to wait for more machines: a given number of workers is spread over all of them."""
        return self._machines.overview.asking and now - (self._began_s or now) < _MACHINES_WITHIN_S

    def _missing(self) -> list[Place]:
        size = self._size
        if not self._machines.have_cores:  # always one: some clusters grow when a request waits
            return [] if self._actors else [Place(None, size.cpus or 1)]
        return missing_places(self._machines.nodes, self._held(), self._wanted, size)

    def _held(self) -> dict[str, list[int]]:
        held: dict[str, list[int]] = {}
        for name, actor in self._actors.items():
            if name != HERE:
                node = self._ready[name].node if name in self._ready else actor.place.node
                held.setdefault(node or "", []).append(actor.place.cpus)
        return held

    def _make_room(self, now: float) -> None:
        """Requests fewer cores if others have held some for long, and places for a machine that has joined."""
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
            elif self._size.cpus is None and 0 < (free := self._machines.free_cpus(node)) < actor.place.cpus:
                self._end(name)
                self._ask_for(next(self._names), Place(node, free), now)

    def _ask_for(self, name: int, place: Place, now: float) -> None:
        where = {}
        if place.node is not None:
            where["scheduling_strategy"] = NodeAffinitySchedulingStrategy(place.node, soft=False)
        worker = remote_worker(place.cpus, self._size.memory_bytes, where)
        actor = worker.remote(place.cpus, for_levels=self._size.for_levels)
        self._actors[name] = _Actor(actor, place, now)
        if name != HERE:
            _when_done(actor.hello.remote(), lambda hello: self._on_started(name, hello))

    def _end(self, worker: int) -> None:
        ray.kill(self._actors.pop(worker).handle, no_restart=True)

    def started(self, worker: int, hello: Hello, now: float) -> bool:
        """Takes the worker in. Returns False if its machine has other software and is left out, or it is no longer
        needed."""
        if worker not in self._actors:
            return False
        self._ready[worker] = hello
        self.failures, self._not_before = 0, float("-inf")
        fault = difference(hello.software)
        if fault is None:
            return True
        self._machines.leave_out(hello.node, fault)
        self.drop(worker, now)
        return False

    def call(self, worker: int, chunk: int, order: CallOrder, now: float) -> None:
        """Sends a call. HERE: to a worker of last resort, which requests no core, since stuck processes may hold all
        cores."""
        if worker == HERE and HERE not in self._actors:
            self._ask_for(HERE, Place(self._machines.here, 0), now)
        reply = self._actors[worker].handle.call.remote(order)
        _when_done(reply, lambda done: self._on_answered(worker, chunk, done))

    def tell(self, turn: int, bound_s: float, *, stop: bool) -> None:
        """Passes a bound to all ready workers, without waiting."""
        for worker in self._ready:
            self._actors[worker].handle.tell.remote(turn, bound_s, float(stop))

    def drop(self, worker: int, now: float) -> None:
        """Drops a worker that is of no more use or lost."""
        if worker not in self._actors:
            return
        node = self._actors[worker].place.node
        did_not_start = self._ready.pop(worker, None) is None and worker != HERE
        if did_not_start and (node is None or self._machines.is_alive(node, now)):
            self.failures += 1
            self._not_before = now + min(2.0**self.failures, _LONGEST_PAUSE_S)
        self._end(worker)

    def close(self) -> None:
        for worker in list(self._actors):
            self._end(worker)
        self._ready.clear()


def _when_done(ref: Any, call: Callable[[Future[Any]], None]) -> None:
    ref.future().add_done_callback(call)
