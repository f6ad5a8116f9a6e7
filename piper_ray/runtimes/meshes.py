"""The nodes of a plan's ranks. Consecutive pipeline ranks on devices of one kind form a mesh, and each mesh has nodes
of its own, because a launcher starts processes by the node. Each run of stages on one kind forms one mesh, unless the
first or last node or group of nodes has fewer of them than the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby

from piper_ray.model.cluster import Cluster
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import Instance
from piper_ray.model.plan import Plan
from piper_ray.model.schedule import FLUSHED, Schedule

USUAL_GPUS_PER_NODE = 8
"""Used if the workload knows only one link, and thus no nodes."""


@dataclass(frozen=True)
class Mesh:
    """``ranks`` pipeline ranks from ``first`` on, of d replicas of t devices each. kind: of the devices; "" if there is
    only one kind. first_rank, first_node: the first rank and node of the mesh. node: the GPUs of a node that run. part:
    the ranks that have whole nodes to themselves, as 60 on 8 nodes of 8 where 60 of each 72 GPUs run."""

    kind: str
    first: int
    ranks: int
    d: int
    t: int
    first_rank: int
    first_node: int
    node: int
    part: int

    @property
    def devices(self) -> int:
        return self.ranks * self.d * self.t

    @property
    def processes_per_node(self) -> int:
        """The GPUs of a node; the last node of each part may run fewer processes."""
        return min(self.node, self.devices)

    @property
    def nodes_of_part(self) -> int:
        return -(-self.part // self.processes_per_node)

    @property
    def nodes(self) -> int:
        return self.last_node - self.first_node + 1

    @property
    def last_node(self) -> int:
        return self.place(self.first_rank + self.devices - 1)[0]

    @property
    def processes_of_last_node(self) -> int:
        """The number of ranks on the last node."""
        return self.place(self.first_rank + self.devices - 1)[1] + 1

    @property
    def uneven_part(self) -> int:
        """The number of ranks on the last node of each part, if there are several parts and it is not full; else 0."""
        return self.part % self.processes_per_node if self.devices > self.part else 0

    def place(self, rank: int) -> tuple[int, int]:
        """A rank's node, and its number on that node."""
        part, inside = divmod(rank - self.first_rank, self.part)
        node, local_rank = divmod(inside, self.processes_per_node)
        return self.first_node + part * self.nodes_of_part + node, local_rank


def meshes_of(plan: Plan, schedule: Schedule, node_of: Mapping[str, int], cluster: Cluster) -> tuple[Mesh, ...]:
    """The meshes from front to back. plan: must have equal degrees on each kind. node_of: GPUs of a node, by kind."""
    found: list[Mesh] = []
    first = rank = node = 0
    of_ranks = plan.stages[: len(plan.stages) // schedule.v]
    behind = Counter(stage.kind for stage in of_ranks)  # stages of each kind
    for kind, stages in groupby(of_ranks, key=lambda stage: stage.kind):
        (d, t), *others = [(stage.data_parallel_degree, stage.tensor_parallel_degree) for stage in stages]
        ranks, size = 1 + len(others), node_of[kind]
        shared = sorted(shared_groups(plan, schedule, cluster, kind))
        used, in_group = next(((used, held) for gpus, used, held in shared if gpus >= size), (size, 0))
        behind[kind] -= ranks
        filled = in_group if 0 < in_group < ranks else 1
        last = -behind[kind] % filled  # ranks in a group that other runs of the kind would fill up
        ahead = (ranks - last) % filled
        # Whole nodes need no mesh of their own.
        ahead, last = (0 if count * d * t % min(size, used) == 0 else count for count in (ahead, last))
        for count in (ahead, ranks - ahead - last, last):
            if count > 0:
                made = Mesh(kind, first, count, d, t, rank, node, min(size, used), used)
                found.append(made)
                first, rank, node = first + made.ranks, rank + made.devices, node + made.nodes
    return tuple(found)


def shared_groups(plan: Plan, schedule: Schedule, cluster: Cluster, kind: str = "") -> list[tuple[int, int, int]]:
    """Devices of groups with a link of their own whose place counts: several stages lie in each, or not all devices are
    used. With each how many are used, and how many stages lie in it; 0: a part of one. Groups are filled from the back.
    Of plans with one d and one t on the devices of the kind."""
    own, stages = cluster.of_kind(kind), [stage for stage in plan.stages if stage.kind == kind]
    if schedule.name not in FLUSHED:
        return []
    first, count, found = stages[0], len(stages), []
    devices = own.each_site(first.devices)
    for link, period in zip(own.links, own.border_periods(first.devices, count), strict=False):
        if link.devices is not None and period > 0 and devices < link.devices:
            found.append((link.devices, period * devices, period))
    d, t = first.data_parallel_degree, first.tensor_parallel_degree
    group, n = own.replicas_together(d, t, count) if len(own.links) > 1 else (0, d)
    run = n * t
    if 1 < n < own.each_site(d) and group % run > 0:
        found.append((group, group // run * run, 0))
    return found


def node_sizes(instance: Instance, gpus_per_node: int) -> dict[str, int]:
    """GPUs of a node by kind: ``gpus_per_node``; with several kinds, at most the GPUs of the kind's nodes."""
    if not instance.cluster.kinds:
        return {"": gpus_per_node}
    return {
        name: min(gpus_per_node, _node_of(instance.cluster.of_kind(name), None)) for name in instance.cluster.kind_names
    }


def gpus_per_node_of(instance: Instance, given: int | None = None) -> int:
    """The given number, else that of the workload's cluster, else the usual one; at most the number of devices. With
    several kinds, the largest number counts."""
    return max(_node_of(instance.cluster.of_kind(name), given) for name in instance.cluster.kind_names)


def _node_of(cluster: Cluster, given: int | None) -> int:
    found = given or cluster.node_devices or _domain(cluster) or USUAL_GPUS_PER_NODE
    if found < 1:
        raise UsageError(f"a node has at least one GPU, not {found}")
    return min(found, cluster.at_site.devices)


def domain_of(instance: Instance, gpus_per_node: int) -> int:
    """GPUs that share the fast link: those of one node, or of several nodes; with several kinds, the largest number."""
    found = []
    for name, node in node_sizes(instance, gpus_per_node).items():
        own = instance.cluster.of_kind(name)
        several = own.node_devices is not None
        found.append(min(_domain(own) or node, own.devices) if several else node)
    return max(found)


def _domain(cluster: Cluster) -> int | None:
    """The devices of a group of the innermost link, if there are several links."""
    return cluster.links[0].devices if len(cluster.links) > 1 else None
