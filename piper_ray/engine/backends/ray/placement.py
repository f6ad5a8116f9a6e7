"""Where workers belong. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from piper_ray.engine.backends.ray.machines import RayNode


class Place(NamedTuple):
    """A worker's machine and how many of its cores. node: None: wherever Ray finds room."""

    node: str | None
    cpus: int


def missing_places(
    nodes: Sequence[RayNode],
    held: Mapping[str, Sequence[int]],
    wanted: int | None,
    cpus_per_worker: int | None,
    memory_bytes: float,
) -> list[Place]:
    """Where workers are missing: one on each machine with all of its cores, unless their number or size is given.

    held: the cores of each worker that is there or on its way, by machine. wanted: so many workers, spread over the
    machines, and each machine's cores over its own. memory_bytes: that a machine must have.
    """
    room = {node.id: int(node.cpus) - sum(held.get(node.id, ())) for node in nodes if node.memory_bytes >= memory_bytes}
    if wanted is None:
        return list(_filling(room, cpus_per_worker))
    of_one = cpus_per_worker or 1
    counts: Counter[str] = Counter()
    for _ in range(wanted - sum(map(len, held.values()))):
        open_nodes = [node for node in room if room[node] >= (counts[node] + 1) * of_one]
        if not open_nodes:
            break
        counts[min(open_nodes, key=lambda node: len(held.get(node, ())) + counts[node])] += 1
    return [Place(node, cpus) for node in counts for cpus in _shares(room[node], counts[node], cpus_per_worker)]


def _filling(room: Mapping[str, int], cpus_per_worker: int | None) -> Iterator[Place]:
    for node, cores in room.items():
        if cpus_per_worker is not None:
            yield from [Place(node, cpus_per_worker)] * (cores // cpus_per_worker)
        elif cores > 0:
            yield Place(node, cores)


def _shares(cores: int, workers: int, cpus_per_worker: int | None) -> list[int]:
    if cpus_per_worker is not None:
        return [cpus_per_worker] * workers
    return [cores // workers + (number < cores % workers) for number in range(workers)]
