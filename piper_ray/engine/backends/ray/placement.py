"""What workers request, and where they are placed. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from piper_ray.engine.backends.ray.machines import RayNode


@dataclass(frozen=True)
class WorkerSize:
    """What each worker requests. cpus: None: the cores of its machine, shared among the workers there.

    guarded: the driver's process does none of their work: a further worker on its machine does it instead. for_levels:
    they take chunks of levels, and load the kernels of these before they are ready.
    """

    cpus: int | None
    memory_bytes: float
    guarded: bool = False
    for_levels: bool = False

    def serves(self, wanted: WorkerSize) -> bool:
        """Whether such workers suffice for a request for the others. Only for guarded ones the memory must be equal."""
        alike = (self.cpus, self.guarded) == (wanted.cpus, wanted.guarded)
        alike &= self.for_levels or not wanted.for_levels
        return alike and (self.memory_bytes == wanted.memory_bytes or not self.guarded)


class Place(NamedTuple):
    """The machine and the number of cores of a worker. node: None: wherever Ray finds room."""

    node: str | None
    cpus: int


def missing_places(
    nodes: Sequence[RayNode], held: Mapping[str, Sequence[int]], wanted: int | None, size: WorkerSize
) -> list[Place]:
    """Returns where workers are missing: one on each machine with all of its cores, unless their number or size is
    given.

    held: the cores of each worker that runs or is starting, by machine. wanted: the number of workers, spread over the
    machines, and each machine's cores over its own. Machines with too little memory get none.
    """
    nodes = [node for node in nodes if node.memory_bytes >= size.memory_bytes]
    room = {node.id: int(node.cpus) - sum(held.get(node.id, ())) for node in nodes}
    if wanted is None:
        return [place for node in nodes for place in _filling(node, room[node.id], len(held.get(node.id, ())), size)]
    of_one = size.cpus or 1
    counts: Counter[str] = Counter()
    for _ in range(wanted - sum(map(len, held.values()))):
        open_nodes = [node for node in room if room[node] >= (counts[node] + 1) * of_one]
        if not open_nodes:
            break
        counts[min(open_nodes, key=lambda node: len(held.get(node, ())) + counts[node])] += 1
    return [Place(node, cpus) for node in counts for cpus in _shares(room[node], counts[node], size.cpus)]


def _filling(node: RayNode, cores: int, held: int, size: WorkerSize) -> list[Place]:
    if size.cpus is None:
        return [Place(node.id, cores)] if cores > 0 else []
    in_memory = int(node.memory_bytes / max(1.0, size.memory_bytes)) - held
    return [Place(node.id, size.cpus)] * min(cores // size.cpus, in_memory)


def _shares(cores: int, workers: int, cpus_per_worker: int | None) -> list[int]:
    if cpus_per_worker is not None:
        return [cpus_per_worker] * workers
    return [cores // workers + (number < cores % workers) for number in range(workers)]
