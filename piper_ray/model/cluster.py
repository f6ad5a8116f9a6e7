"""What a workload runs on: equal devices, their memory, and the links between them.

This module gives the time that transfers between replicas and between stages take. The referee, the simulation and the
paper's own table have formulas of their own. Source: Piper, section 3; levels of links are our addition.

**Where stages lie.** Ranks are numbered by t, then d, then stages, as runtimes number them. Nodes are divided into
blocks by their prime factors: a node of 8 devices into blocks of 1, 2, 4 or 8. A stage of d t devices lies within a
node if d t is the size of such a block. Otherwise n of its replicas share a node, where n divides d and n t is the size
of a block. Since each size divides the next, blocks placed in descending size always fit on as many devices as they
have, so the assumed placement is always possible.

**What stages hand over.** Where all stages have one d and one t, under 1f1b and gpipe, groups hold whole stages and are
filled from the back (``border_periods``), so each border has the link that its place gives it. The replicas of a stage
that lies whole in a group have the group's, and those of a larger one lie in groups by any number that divides d, if
there is room: 8 of 8 devices in each group of 72. Under 2bw a plan may say where each stage lies (``Plan.places``): its
borders have the links that follow. Else borders are charged at the link between nodes, unless the whole plan fits into
one: some two neighbours lie in different nodes.

**Shared uplinks.** Where the devices of a group have one uplink together, each has an equal share of it while it sends.
At a border that its place gives a link, the devices of one stage send. Anywhere else, and in rings, all devices of the
group do.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from itertools import combinations_with_replacement
from typing import TYPE_CHECKING, ClassVar, TypeVar

from piper_ray.model.errors import UsageError
from piper_ray.model.units import as_tuple, convert_fields, count, rate, size

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


Bytes = TypeVar("Bytes", float, "npt.NDArray[np.float64]")
"""One figure, or an array of figures; the seconds that these bytes take have the same shape."""


@dataclass(frozen=True)
class Link:
    """A link from each device to the others of its group.

    bandwidth_bytes_per_s: sent and received bytes together. devices: the devices in a group (a node, for example);
    None: all. uplink_bytes_per_s: what all devices of a group together send out of it and receive; None: each has a
    link of its own there.

    >>> Link("900GB/s", devices=8).transfer_s(9e9)
    0.01
    """

    bandwidth_bytes_per_s: float
    devices: int | None = None
    uplink_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        convert_fields(self, rate, "bandwidth_bytes_per_s")
        convert_fields(self, count, "devices")
        if self.uplink_bytes_per_s is not None:
            convert_fields(self, rate, "uplink_bytes_per_s")

    def times(self, factor: float) -> Link:
        """A link with rates that are ``factor`` times as high."""
        uplink = self.uplink_bytes_per_s
        return Link(self.bandwidth_bytes_per_s * factor, self.devices, None if uplink is None else uplink * factor)

    def share_bytes_per_s(self, sending: int | None = None) -> float:
        """The share of the uplink that each device of a group has if ``sending`` of them send at once; None: all do."""
        if self.uplink_bytes_per_s is None or self.devices is None:
            return math.inf
        return self.uplink_bytes_per_s / min(sending or self.devices, self.devices)

    def transfer_s(self, size_bytes: Bytes) -> Bytes:
        """Seconds to send or receive ``size_bytes`` at a device."""
        return size_bytes / self.bandwidth_bytes_per_s

    def resync_s(self, weights_bytes: Bytes, microbatches: int) -> Bytes:
        """4 w / (N B): seconds per microbatch to synchronise weights over many replicas; the batch's time divided by N.

        d replicas take (d - 1) / d of it. As with PipeDream's parameter server, each replica sends and receives twice.
        """
        return 4.0 * weights_bytes / (microbatches * self.bandwidth_bytes_per_s)


@dataclass(frozen=True)
class Cluster:
    """The devices, and the links between them.

    devices: K. memory_bytes: M, the memory of each. links: the smallest groups first (within a node, then between
    nodes); the last link joins all devices, and is the only one in the paper's model.

    packed: whether a plan that fits into one node is placed in one node.

    node_devices: the devices of a node, on which a launcher starts processes, where the first link joins several nodes;
    None: the groups of the first link are the nodes.

    kinds: the kinds of devices, each with its own memory and links (``Cluster.of_kinds``), if there are several. Then
    ``links`` has the fastest of their last links, and memory_bytes is the largest. between_bytes_per_s: the rate
    between stages on different kinds, or of a device between sites.

    sites: the names of equal sites, if the devices are at several. Each has an equal part of the devices, joined by
    ``links``, and pipelines of its own: a part of each stage's replicas. Gradients are summed by rings through all
    sites. A site that is named several times has as many equal parts, which are charged as if each were a site.

    >>> cluster = Cluster(16, "80GB", (Link("900GB/s", 8), Link("50GB/s")))
    >>> cluster.bandwidth_bytes_per_s, cluster.holding(8).bandwidth_bytes_per_s
    (50000000000.0, 900000000000.0)
    >>> [cluster.replicas_link(d, 2).bandwidth_bytes_per_s / 1e9 for d in (4, 8)]  # in a node; 4 links out of each
    [900.0, 200.0]
    """

    devices: int
    memory_bytes: float
    links: tuple[Link, ...]
    node_devices: int | None = None
    kinds: tuple[DeviceKind, ...] = ()
    between_bytes_per_s: float | None = None
    sites: tuple[str, ...] = ()
    packed: ClassVar[bool] = True

    def __post_init__(self) -> None:
        convert_fields(self, count, "devices", "node_devices")
        convert_fields(self, size, "memory_bytes")
        convert_fields(self, as_tuple, "links", "kinds", "sites")
        if self.between_bytes_per_s is not None:
            convert_fields(self, rate, "between_bytes_per_s")

    @classmethod
    def of_kinds(cls, kinds: Sequence[DeviceKind], between_bytes_per_s: float | str) -> Cluster:
        """A cluster with devices of several kinds.

        >>> new = DeviceKind("H100", Cluster(8, "80GB", [Link("50GB/s")]))
        >>> old = DeviceKind("A100", Cluster(8, "80GB", [Link("25GB/s")]))
        >>> cluster = Cluster.of_kinds([new, old], "12GB/s")
        >>> cluster.devices, cluster.rate_between("H100", "A100"), cluster.rate_between("A100", "A100")
        (16, 12000000000.0, 25000000000.0)
        """
        found = [kind.cluster for kind in kinds]
        fastest = max((cluster.bandwidth_bytes_per_s for cluster in found), default=0.0)
        return cls(
            sum(cluster.devices for cluster in found),
            max((cluster.memory_bytes for cluster in found), default=0.0),
            (Link(fastest),),
            kinds=tuple(kinds),
            between_bytes_per_s=between_bytes_per_s,  # type: ignore[arg-type] # or a text
        )

    def of_kind(self, name: str) -> Cluster:
        """The devices of kind ``name``, with their own memory and links; "" stands for all devices of a cluster of one
        kind. In a cluster of several kinds no plan is assumed to lie in one node."""
        return next((kind.cluster.spread() for kind in self.kinds if kind.name == name), self)

    def each_kind(self, change: Callable[[Cluster], Cluster]) -> Cluster:
        """Applies a change to the devices of each kind, or to the whole cluster if it has one kind."""
        if not self.kinds or self.between_bytes_per_s is None:
            return change(self)
        kinds = [replace(kind, cluster=change(kind.cluster)) for kind in self.kinds]
        return Cluster.of_kinds(kinds, self.between_bytes_per_s)

    def with_memory(self, change: Callable[[float], float]) -> Cluster:
        """Changes the memory of each device. change: gives the new bytes from the present ones."""
        return self.each_kind(lambda own: replace(own, memory_bytes=change(own.memory_bytes)))

    @cached_property
    def at_site(self) -> Cluster:
        """The devices of one of several sites; the cluster itself if it is at one.

        >>> Cluster(64, "80GB", [Link("50GB/s")], sites=("east", "west"), between_bytes_per_s="1GB/s").at_site.devices
        32
        """
        if not self.sites:
            return self
        return replace(self, devices=self.devices // len(self.sites), sites=(), between_bytes_per_s=None)

    @property
    def sites_text(self) -> str:
        """``east, west``; ``2 parts of east, west`` where east has twice the devices."""
        counts = Counter(self.sites)
        return ", ".join(f"{count} parts of {name}" if count > 1 else name for name, count in counts.items())

    def each_site(self, count: int) -> int:
        """The number at each site of ``count`` devices or replicas, if all sites have equally many."""
        return -(-count // (len(self.sites) or 1))

    @property
    def alike(self) -> tuple[Cluster, ...]:
        """One cluster for each kind of devices; the cluster itself if it has one kind."""
        return tuple(kind.cluster for kind in self.kinds) or (self,)

    @property
    def kind_names(self) -> tuple[str, ...]:
        """The names of all kinds; ("",) if all devices are equal."""
        return tuple(kind.name for kind in self.kinds) or ("",)

    def rate_between(self, one: str, other: str) -> float:
        """Bytes per second between a stage on kind ``one`` and a stage on kind ``other``."""
        if one == other or self.between_bytes_per_s is None:
            return self.of_kind(one).bandwidth_bytes_per_s
        return self.between_bytes_per_s

    def slowest_rate(self, kinds: Iterable[str]) -> float:
        """The slowest rate between stages on devices of these kinds, equal or different, in bytes per second."""
        return min(self.rate_between(*pair) for pair in combinations_with_replacement(sorted(set(kinds)), 2))

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """The block sizes, in devices, into which nodes and groups of nodes are divided. Each size divides the next."""
        return _blocks(tuple(link.devices for link in self.links if link.devices is not None))

    @cached_property
    def _groups(self) -> tuple[int, ...]:
        """The devices of the groups of all links but the last, in ascending order."""
        return tuple(link.devices for link in self.links[:-1] if link.devices is not None)

    @cached_property
    def _level_rates(self) -> tuple[float, ...]:
        return tuple(map(self.level_bytes_per_s, range(len(self.links))))

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """B: the rate that transfers between stages are charged at, unless the whole plan lies within a smaller
        group."""
        return self.level_bytes_per_s(len(self.links) - 1)

    def transfer_s(self, size_bytes: Bytes) -> Bytes:
        """Seconds to send bytes to another stage, or receive them, in a plan that takes all these devices."""
        return size_bytes / self.bandwidth_bytes_per_s

    def holding(self, devices: int) -> Cluster:
        """The cluster with only the links that a plan on ``devices`` devices uses. The last of them is the link of the
        smallest group that holds the plan."""
        if len(self.links) == 1 or not self.packed:
            return self
        held = self.level_holding(devices)
        return self if held == len(self.links) - 1 else self._within(held)

    def level_holding(self, devices: int) -> int:
        """The number of the link of the smallest group that holds this many devices."""
        return bisect_left(self._groups, self.each_site(devices))

    def levels(self) -> tuple[Cluster, ...]:
        """The clusters to search so that every plan is found at its own cost: one for each group smaller than the
        cluster, and at the end all devices, where no plan is assumed to lie in a smaller group.

        A cluster with one link is its only level.
        """
        if len(self.links) == 1:
            return (self,)
        found: list[Cluster] = []
        for index, link in enumerate(self.links):
            if link.devices is None or link.devices >= self.at_site.devices:
                whole = self if index == len(self.links) - 1 else self._within(index)
                return (*found, whole.spread())
            found.append(replace(self._within(index), devices=link.devices * (len(self.sites) or 1)).spread())
        raise AssertionError("the last link joins all devices")

    def spread(self) -> Cluster:
        """The same cluster without the assumption that a plan lies in a smaller group if it fits."""
        if len(self.links) == 1:
            return self
        return SpreadCluster(**{one.name: getattr(self, one.name) for one in fields(self)})

    def replicas_link(self, data_parallel_degree: int, tensor_parallel_degree: int, stages: int | None = None) -> Link:
        """What a ring through the d replicas of a stage, t devices each, has: t rings in all, one for each shard.

        Within a site none is slower than the last link. stages: of a plan with one d and one t under a flush. A stage
        may lie whole in a group (``border_periods``), or n of its replicas in each, where groups have room for the
        whole plan so.

        >>> racks = Cluster(4 * 72, "186GB", (Link("1800GB/s", 72), Link("100GB/s")))
        >>> [racks.replicas_link(d, 8, stages=1).bandwidth_bytes_per_s / 1e9 for d in (8, 32)]  # 64 of 72
        [1800.0, 800.0]
        """
        d, t = data_parallel_degree, tensor_parallel_degree
        if self.sites and self.between_bytes_per_s is not None:
            own = self.at_site.replicas_link(self.each_site(d), t, stages).bandwidth_bytes_per_s
            return _link_at(ring_bytes_per_s(d, self.each_site(d), own, self.between_bytes_per_s))
        if len(self.links) == 1:
            return self.links[0]
        if stages is None:
            return _link_at(self._ring_bytes_per_s(len(self.links) - 1, d, t))
        return _link_at(self._packed_ring(d, t, stages)[0])

    def replicas_together(self, d: int, t: int, stages: int) -> tuple[int, int]:
        """Of a plan as in ``replicas_link``, on clusters with several links: the devices of the groups that hold n
        replicas of a stage each, and this n; 1: only blocks are counted on.

        >>> Cluster(4 * 72, "186GB", (Link("1800GB/s", 72), Link("100GB/s"))).replicas_together(32, 8, stages=1)
        (72, 8)
        """
        _, level, n = self.at_site._packed_ring(self.each_site(d), t, stages)
        return self.links[level].devices or self.devices, n

    def _packed_ring(self, d: int, t: int, stages: int) -> tuple[float, int, int]:
        """The bandwidth of a ring, and the level whose groups hold n replicas each, by the n that is best for it."""
        level = self.level_holding(d * t * stages)
        for inner, period in enumerate(self.border_periods(d * t, stages)[:level]):
            if period > 0:
                return self._ring_bytes_per_s(inner, d, t), inner, d
        own, best = self._level_rates[level], (self._ring_bytes_per_s(level, d, t), level, 1)
        below = self.links[level - 1].devices or self.devices
        held = min(self.links[level].devices or self.devices, self.devices)
        for n in range(min(d, below // t) if level > 0 else 0, 1, -1):
            if n * own <= best[0]:
                break
            if d % n == 0 and _room(held, [(n * t, 1), (below, below // (n * t))]) >= stages * d // n:
                found = ring_bytes_per_s(d, n, self._ring_bytes_per_s(level - 1, n, t), own)
                best = max(best, (found, level - 1, n))
        return best

    def border_periods(self, stage_devices: int, stages: int) -> tuple[int, ...]:
        """For each link but the last a period c: the border with q stages behind it leaves a group where c divides q.

        c whole stages lie in a group, whose other devices are idle. c is 0, and all borders leave a group, if a stage
        is larger, or if the smallest group that holds a stage cannot hold it without gaps.

        >>> cluster = Cluster(16, "80GB", (Link("900GB/s", 8), Link("50GB/s")))
        >>> cluster.border_periods(2, 8), cluster.border_periods(3, 4), cluster.border_periods(3, 5)
        ((4,), (2,), (0,))
        """
        return _border_periods(self._groups, self.at_site.devices, self.each_site(stage_devices), stages)

    def needed_devices(self, d: int, t: int, stages: int) -> int:
        """The least number of devices on which such a plan has the same links as on all of them: on fewer there may be
        no room for whole stages, or for as many replicas in each group.

        >>> Cluster(16, "80GB", (Link("900GB/s", 8), Link("50GB/s"))).needed_devices(1, 3, 4)  # two in each node
        14
        """

        def links(devices: int) -> tuple[Link, tuple[int, ...]]:
            own = replace(self, devices=devices)
            return own.replicas_link(d, t, stages), own.border_periods(d * t, stages)

        counts, wanted = range(d * t * stages, self.devices), links(self.devices)
        return d * t * stages + bisect_left(counts, True, key=lambda devices: links(devices) == wanted)

    @staticmethod
    def border_level(behind: int, periods: Sequence[int]) -> int:
        """The number of the link there."""
        left = [level for level, period in enumerate(periods, start=1) if period == 0 or behind % period == 0]
        return max(left, default=0)

    def border_rates(self, sizes: Iterable[int] = (1,)) -> tuple[float, ...]:
        """All rates that borders between stages of these numbers of devices may have, and that of all other transfers,
        in bytes per second, in descending order."""
        levels = range(len(self.links))
        found = {self.level_bytes_per_s(level, size) for level in levels for size in sizes}
        return tuple(sorted({self.bandwidth_bytes_per_s, *found}, reverse=True))

    def shared_level(self, first: int, end: int) -> int:
        """The number of the link of the smallest group that holds the devices from ``first`` up to ``end``, which count
        from the back as groups do.

        >>> nodes = Cluster(16, "80GB", (Link("900GB/s", 8), Link("50GB/s")))
        >>> nodes.shared_level(4, 8), nodes.shared_level(4, 10)
        (0, 1)
        """
        held = (level for level, group in enumerate(self._groups) if first // group == (end - 1) // group)
        return next(held, len(self.links) - 1)

    @property
    def has_faster_groups(self) -> bool:
        """Whether smaller groups have faster links than all devices together."""
        return self.level_bytes_per_s(0) > self.bandwidth_bytes_per_s

    def place_blocks(self, d: int, t: int) -> tuple[int, ...]:
        """For each link but the last the devices of the blocks of a stage that lie whole in the link's groups, as its
        ring is charged: see ``Plan.places``."""
        blocks = self.shared_blocks(d, t)
        return tuple(max((x for x in blocks if x <= group), default=1) for group in self._groups)

    def changed(self, figures: Mapping[str, object]) -> Cluster:
        """The cluster with new values of devices, memory_bytes and bandwidth_bytes_per_s, where ``figures`` has them. A
        new bandwidth replaces all links by one link."""
        if self.kinds and {"devices", "memory_bytes", "bandwidth_bytes_per_s"} & set(figures):
            raise UsageError("each kind of devices has its own figures: change those of its cluster in cluster.kinds")
        own = {name: figures[name] for name in ("devices", "memory_bytes") if name in figures}
        changed = replace(self, **own) if own else self  # type: ignore[arg-type]
        if figures.get("bandwidth_bytes_per_s", self.bandwidth_bytes_per_s) != self.bandwidth_bytes_per_s:
            changed = replace(changed, links=(Link(figures["bandwidth_bytes_per_s"]),))  # type: ignore[arg-type]
        return changed

    def _within(self, level: int) -> Cluster:
        """The cluster with the links up to ``level`` only. The last of these then joins all devices."""
        return replace(self, links=(*self.links[:level], Link(self._own_bytes_per_s(level))))

    def level_bytes_per_s(self, level: int, sending: int | None = None) -> float:
        """The rate between devices whose smallest common group is that of link ``level``, if ``sending`` devices
        of each smaller group send at once; None: all."""
        sending = None if sending is None else self.each_site(sending)
        shares = (link.share_bytes_per_s(sending) for link in self.links[:level])
        return min(self._own_bytes_per_s(level), *shares, math.inf)

    def _own_bytes_per_s(self, level: int) -> float:
        """The same where no uplink of a smaller group is shared. Devices that share a node may also use the network,
        where it is faster."""
        found, share = 0.0, math.inf
        for link in self.links[level:]:
            found, share = max(found, min(link.bandwidth_bytes_per_s, share)), min(share, link.share_bytes_per_s())
        return found

    def _ring_bytes_per_s(self, level: int, d: int, t: int) -> float:
        """The bandwidth of a ring within a group of link ``level``."""
        own = self._level_rates[level]
        if level == 0:
            return own
        near = self._near(level - 1, d, t)
        return ring_bytes_per_s(d, near, self._ring_bytes_per_s(level - 1, near, t), own)

    def _near(self, level: int, d: int, t: int) -> int:
        """How many of a stage's d replicas certainly share a group of link ``level``: a divisor of d, at least 1."""
        devices = self.links[level].devices or self.devices
        fitting = (x for x in reversed(self.blocks) if x <= devices and x % t == 0 and d % (x // t) == 0)
        return next(fitting, t) // t

    def shared_blocks(self, data_parallel_degree: int, tensor_parallel_degree: int) -> list[int]:
        """The sizes of blocks that hold whole replicas of t devices and that the d replicas fill completely."""
        d, t = data_parallel_degree, tensor_parallel_degree
        return [size for size in self.blocks if size % t == 0 and d % (size // t) == 0]


@dataclass(frozen=True)
class DeviceKind:
    """Equal devices in a cluster that also has others. cluster: these devices alone, with their links.

    >>> DeviceKind("H100", Cluster(8, "80GB", [Link("50GB/s")])).cluster.devices
    8
    """

    name: str
    cluster: Cluster


class SpreadCluster(Cluster):
    """A cluster on which all plans are charged at the last link, also those that fit into a node. Searches for plans on
    many devices use it."""

    packed = False


def ring_bytes_per_s(size: int, near: int, within_bytes_per_s: float, between_bytes_per_s: float) -> float:
    """The bandwidth in one direction of a ring of ``size`` devices, ``near`` of which share each node.

    Where the ring passes through several nodes, the members within a node share what they send over their network
    links; each device has a link of its own.
    """
    if near >= size:
        return within_bytes_per_s
    return min(near * between_bytes_per_s, within_bytes_per_s) if near > 1 else between_bytes_per_s


def _room(devices: int, whole: Sequence[tuple[int, int]]) -> int:
    """How many whole stages ``devices`` devices hold. whole: pairs of a number of devices and the whole stages that
    they hold, in ascending order."""
    found = 0
    for held, stages in reversed(whole):
        found, devices = found + devices // held * stages, devices % held
    return found


@lru_cache(maxsize=256)
def _link_at(bandwidth_bytes_per_s: float) -> Link:
    return Link(bandwidth_bytes_per_s)


@lru_cache(maxsize=4096)
def _border_periods(groups: tuple[int, ...], devices: int, stage_devices: int, stages: int) -> tuple[int, ...]:
    """See ``Cluster.border_periods``."""
    held = min(next((x for x in groups if stage_devices * stages <= x), devices), devices)
    whole = [(stage_devices, 1)]  # (devices, whole stages that they hold), the smallest first
    found = []
    for group in groups:
        level = (group, _room(group, whole))
        is_whole = level[1] > 0 and (group >= held or _room(held, [*whole, level]) >= stages)
        whole += [level] if is_whole else []
        found.append(level[1] if is_whole else 0)
    return tuple(found)


@lru_cache(maxsize=256)
def _blocks(groups: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes of blocks: 1, 2, 4 and 12 for nodes of 12 devices. groups: the devices of each level's groups, each a
    multiple of the one before."""
    found = [1]
    for devices in groups:
        factor = 2
        while found[-1] < devices:
            if devices // found[-1] % factor == 0:
                found.append(found[-1] * factor)
            else:
                factor += 1
    return tuple(found)
