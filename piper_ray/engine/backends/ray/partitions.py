"""Partitions of a lattice on the machines of a cluster: one actor on each, which keeps what it has."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from piper_ray.engine.backends.local import LocalBackend
from piper_ray.engine.backends.ray.backend import PROCESS_BYTES
from piper_ray.engine.backends.ray.causes import address_of, cause_of, is_loss
from piper_ray.engine.backends.ray.machines import Machines, RayNode, RayView
from piper_ray.engine.backends.ray.session import Session
from piper_ray.engine.partition.evaluation import PartitionLost
from piper_ray.engine.partition.partition import Partition
from piper_ray.engine.partition.setting import PartitionSetting
from piper_ray.model.errors import ClusterError
from piper_ray.model.solution import ClusterStats, NodeStats

_HEARTBEAT_S = 0.1
_ANSWERS_WITHIN_S = 10.0
"""Of cores that are given back; and of machines that are asked what they run, before it is told who is waited for."""

_USAGE_WITHIN_S = 0.5
"""Of actors at the end: one that is still busy is not waited for."""

_READY_WITHIN_S = 60.0
"""Of actors, before it is told who is waited for."""


class Place(NamedTuple):
    """A machine for a partition. cpus, size_bytes: of its cores and its memory, what is free. downsets: as many as fit
    on each machine.
    """

    node: RayNode
    cpus: int
    downsets: int
    size_bytes: float


class Usage(NamedTuple):
    """Of a partition's actor. received_bytes: of arrays, from whichever partition."""

    worked_s: float
    received_bytes: int
    held_bytes: int


_UNKNOWN = Usage(0.0, 0, 0)


class PartitionWorker:
    """The actor: does one call after the other."""

    def __init__(self, setting: PartitionSetting, number: int, partitions: int, room: int, threads: int) -> None:
        self._partition = Partition(setting, number, partitions, room, LocalBackend(threads))
        self._usage = _UNKNOWN

    def ask(self, method: str, *arguments: object) -> Any:
        """``method`` of ``Partition``."""
        began_s = time.perf_counter()
        found = getattr(self._partition, method)(*arguments)
        worked_s, received_bytes, held_bytes = self._usage
        self._usage = Usage(
            worked_s + time.perf_counter() - began_s,
            received_bytes + sum(map(_size_bytes, arguments)),
            max(held_bytes, self._partition.size_bytes),
        )
        return found

    def usage(self) -> Usage:
        return self._usage


def places(free_cpus: Sequence[tuple[RayNode, int]], bytes_per_downset: float, most: int | None) -> list[Place]:
    """Machines for as many downsets as possible. Each gets as many as any other: so one with little memory may be in
    the way. most: of machines; None: as many as there are. Guests take less than listing all at once would.
    """
    found = [
        Place(node, cpus, downsets, node.memory_bytes)
        for node, cpus in free_cpus
        if cpus > 0 and (downsets := int((node.memory_bytes - PROCESS_BYTES) / bytes_per_downset)) > 0
    ]
    found = sorted(found, key=lambda place: -place.downsets)[:most]
    totals = [(number + 1) * place.downsets for number, place in enumerate(found)]
    count = 1 + totals.index(max(totals)) if totals else 0
    return [place._replace(downsets=found[count - 1].downsets) for place in found[:count]]


def free_machines(
    session: Session, cpus_per_worker: int | None, check: Callable[[], None], tell: Callable[[str], None]
) -> tuple[Machines, list[tuple[RayNode, int]]]:
    """The machines that run what this one does, once all have answered that live, each with cores and memory that
    nobody has.

    Waits a while for cores that were given back a moment ago, and for a machine if there is none. tell: is told of each
    machine that is left out, is waited for, or is lost meanwhile.
    """
    view = RayView()
    machines = Machines(view, tell, session.node, trusted=session.owned)
    began_s = since_s = time.monotonic()
    waiting: frozenset[str] = frozenset()
    told = False
    while True:
        check()
        now_s = time.monotonic()
        machines.look(now_s)
        gone = [node for node in sorted(waiting - machines.unanswered) if not machines.is_alive(node, now_s)]
        if gone:
            tell(f"{machines.gone_text(gone)}; it had not yet said what it runs")
        waiting = machines.unanswered
        if waiting:
            since_s = now_s
            if not told and now_s - began_s > _ANSWERS_WITHIN_S:
                told = True
                names = ", ".join(sorted(map(machines.name, waiting)))
                tell(f"waiting for {names} to say what runs there: slow, or hanging")
        free = [(node, machines.free_cpus(node.id)) for node in machines.nodes]
        settled = not machines.asking and all(cpus >= int(node.cpus) for node, cpus in free)
        if not waiting and ((settled and free) or now_s - since_s > _ANSWERS_WITHIN_S):
            memory = view.free_memory_bytes()
            return machines, [
                (node._replace(memory_bytes=memory.get(node.id, 0.0)), min(cpus, cpus_per_worker or cpus))
                for node, cpus in free
            ]
        time.sleep(_HEARTBEAT_S)


@dataclass
class _Member:
    """chunks: that it was asked for, of downsets whose fronts are sought there. usage: as it says at the end."""

    actor: Any
    place: Place
    chunks: int = 0
    usage: Usage = _UNKNOWN


class RayCrew:
    """As ``Crew``. machines: have answered what they run. tell: is told of those that are waited for long."""

    def __init__(
        self,
        setting: PartitionSetting,
        where: Sequence[Place],
        machines: Machines,
        check: Callable[[], None],
        tell: Callable[[str], None],
    ) -> None:
        self.partitions = len(where)
        self.room = sum(place.downsets for place in where)
        self._machines, self._rounds, self._waited_s = machines, 0, 0.0
        shared = ray.put(setting)
        self._members = []
        for number, place in enumerate(where):
            remote: Any = ray.remote(PartitionWorker)
            actor = remote.options(
                num_cpus=place.cpus,
                memory=int(place.size_bytes),
                max_restarts=0,
                max_task_retries=0,
                runtime_env={"env_vars": {"NUMBA_NUM_THREADS": str(place.cpus)}},
                scheduling_strategy=NodeAffinitySchedulingStrategy(place.node.id, soft=False),
            ).remote(shared, number, self.partitions, place.downsets, place.cpus)
            self._members.append(_Member(actor, place))
        try:
            self._wait_until_ready(check, tell)
        except BaseException:
            self.close()
            raise

    def ask(self, partition: int, method: str, *arguments: object, answers: int = 1) -> Any:
        """As ``Crew.ask``."""
        member = self._members[partition]
        member.chunks += method == "extend"
        return member.actor.ask.options(num_returns=answers).remote(method, *arguments)

    def get(self, answers: Sequence[Any], check: Callable[[], None]) -> list[Any]:
        """As ``Crew.get``."""
        began_s = time.perf_counter()
        found: dict[Any, Any] = {}
        left = list(answers)
        try:
            while left:
                done, left = ray.wait(left, num_returns=len(left), timeout=_HEARTBEAT_S)
                found |= zip(done, ray.get(done), strict=True)
                check()
        except RayError as error:
            raise self._failure(error) from error
        finally:
            self._waited_s += time.perf_counter() - began_s
        self._rounds += 1
        return [found[answer] for answer in answers]

    def stats(self) -> ClusterStats:
        """Of all that was asked, at whatever moment and for other threads too; what it took, once it is closed."""
        members = tuple(self._members)
        return ClusterStats(
            workers=self.partitions,
            batches=self._rounds,
            chunks=sum(member.chunks for member in members),
            put_bytes=0,
            worked_s=sum(member.usage.worked_s for member in members),
            waited_s=self._waited_s,
            nodes=tuple(
                NodeStats(member.place.node.name, member.chunks, member.usage.received_bytes, member.usage.held_bytes)
                for member in members
            ),
        )

    def close(self) -> None:
        """Ends the actors, and asks those that are idle what they took."""
        try:
            asked = {member.actor.usage.remote(): member for member in self._members}
            done, _ = ray.wait([*asked], num_returns=len(asked), timeout=_USAGE_WITHIN_S)
            for ref in done:
                asked[ref].usage = _usage(ref)
        finally:
            for member in self._members:
                ray.kill(member.actor, no_restart=True)

    def _wait_until_ready(self, check: Callable[[], None], tell: Callable[[str], None]) -> None:
        """As long as their machines live: who is slow starts them late."""
        left = {member.actor.usage.remote(): member for member in self._members}
        tell_s = time.monotonic() + _READY_WITHIN_S
        try:
            while left:
                done, _ = ray.wait([*left], num_returns=len(left), timeout=_HEARTBEAT_S)
                ray.get(done)
                left = {ref: member for ref, member in left.items() if ref not in done}
                check()
                if left and time.monotonic() > tell_s:
                    tell_s = float("inf")
                    names = ", ".join(sorted(member.place.node.name for member in left.values()))
                    tell(f"waiting for a part of the lattice to start on {names}: slow, or others have cores or memory")
        except RayError as error:
            raise self._failure(error) from error

    def _failure(self, error: RayError) -> Exception:
        """Which machine is gone, or what went wrong on it."""
        cause: BaseException = error
        while isinstance(cause, RayTaskError) and isinstance(cause.cause, RayError):
            cause = cause.cause
        host = self._machines.name_at(address_of(cause))
        asked_bytes = max(member.place.node.memory_bytes for member in self._members)
        self._machines.look(time.monotonic(), at_once=True)
        alive = {node.id for node in self._machines.nodes}
        gone = [member.place.node.id for member in self._members if member.place.node.id not in alive]
        if gone:
            return PartitionLost(self._machines.gone_text(gone), with_machine=True)
        text = cause_of(cause, host, asked_bytes)
        if is_loss(cause):
            return PartitionLost(f"a partition of the lattice is lost: {text}", with_machine=False)
        return ClusterError(f"a partition of the lattice failed: {text}")


def _usage(ref: Any) -> Usage:
    """Nothing is known of an actor that is gone."""
    try:
        usage: Usage = ray.get(ref)
    except RayError:
        return _UNKNOWN
    return usage


def _size_bytes(argument: object) -> int:
    """Of an array, or of a tuple of them."""
    if isinstance(argument, np.ndarray):
        return argument.nbytes
    return sum(map(_size_bytes, argument)) if isinstance(argument, tuple) else 0
