"""What links carry on clusters with levels, from the rule in words: slow, for brute force. All in bytes per second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from random import Random

from piper_ray.model.cluster import Cluster, Link
from piper_ray.model.instance import Instance


def with_levels(rng: Random, instance: Instance) -> Instance:
    """The same on nodes of two to eight devices, or groups of nodes too, with faster links (now and then slower)."""
    slow = instance.bandwidth_bytes_per_s
    sizes = rng.choice([(2,), (4,), (3,), (6,), (8,), (2, 4), (2, 6), (4, 8), (1, 3)])
    inner = tuple(Link(slow * rng.choice([0.5, 1, 2, 3, 8, 50]), size) for size in sizes)
    inner = tuple(with_uplink(rng, link, slow) for link in inner)
    cluster = instance.cluster
    return instance.replace(cluster=type(cluster)(cluster.devices, cluster.memory_bytes, (*inner, Link(slow))))


def with_uplink(rng: Random, link: Link, slow: float) -> Link:
    """Now and then with an uplink that its group shares."""
    return replace(link, uplink_bytes_per_s=slow * rng.choice([0.5, 1, 3])) if rng.random() < 0.3 else link


def groups(instance: Instance, devices: int, sending: int | None = None) -> list[tuple[int, Fraction]]:
    """Sizes and rates, innermost first; the last holds a plan of so many devices. sending: those that share the uplink
    of each group that they leave; None: all of it."""
    links, found = instance.cluster.links, []
    for level, link in enumerate(links):
        size = instance.devices if link.devices is None else link.devices
        ways = []
        for outer in range(level, len(links)):
            each = [Fraction(links[outer].bandwidth_bytes_per_s)]
            for inner, x in enumerate(links[:outer]):
                if x.uplink_bytes_per_s is not None and x.devices is not None:
                    most = x.devices if sending is None or inner >= level else min(sending, x.devices)
                    each.append(Fraction(x.uplink_bytes_per_s) / most)
            ways.append(min(each))
        found.append((size, max(ways)))
        if size >= devices:
            break
    return found


def one_site(instance: Instance) -> Instance:
    """What of several sites is at one of them."""
    whole = instance.cluster
    return instance.replace(cluster=Cluster(whole.devices // len(whole.sites), whole.memory_bytes, whole.links))


def through_sites(instance: Instance, near: int, within: Fraction) -> Fraction:
    """A ring with so many of its replicas at each site, where it has that rate: each of them sends to the next site."""
    out = near * Fraction(instance.cluster.between_bytes_per_s or 0)
    return out if near == 1 else min(within, out)


def between(instance: Instance, devices: int) -> Fraction:
    """The rates between the stages of a plan."""
    if sites := len(instance.cluster.sites):
        return between(one_site(instance), devices // sites)
    return groups(instance, devices)[-1][1]


def borders(instance: Instance, stage_devices: int, stages: int) -> list[Fraction]:
    """What each border of a plan has, the last one first, where all stages have one d and one t: the rate of the least
    group that both stages are in, of those in which all stages of the plan lie whole, or which hold the plan."""
    if sites := len(instance.cluster.sites):
        return borders(one_site(instance), stage_devices // sites, stages)
    *inner, (_, outermost) = groups(instance, stages * stage_devices, stage_devices)
    whole = whole_groups(instance, stage_devices, stages)
    # Of groups in which stages do not lie whole all borders count as outside, and so of all smaller ones.
    shared = inner[max((k for k, group in enumerate(inner, 1) if group[0] not in whole), default=0) :]
    found = starts(instance.devices, stage_devices, whole)[:stages]
    return [
        next((rate for size, rate in shared if here // size == ahead // size), outermost)
        for here, ahead in pairwise(found)
    ]


def whole_groups(instance: Instance, stage_devices: int, stages: int) -> list[int]:
    """The devices of groups, smaller than what holds the plan, in which all stages of the plan lie whole."""
    *inner, (held, _) = groups(instance, stages * stage_devices)
    whole: list[int] = []
    for size, _ in inner:
        there = starts(min(held, instance.devices), stage_devices, [*whole, size])
        if stage_devices <= size and len(there) >= stages:
            whole.append(size)
    return whole


def starts(devices: int, stage_devices: int, whole: Sequence[int], first: int = 0) -> list[int]:
    """The first device of each stage for which the devices have room, numbered from the back, group by group."""
    if not whole:
        return [first + k * stage_devices for k in range(devices // stage_devices)]
    *inner, size = whole
    found = []
    for at in range(0, devices, size):
        found += starts(min(size, devices - at), stage_devices, inner, first + at)
    return found


def unpassed(instance: Instance, source: int, target: int) -> bool:
    """Whether each other layer comes before the source or after the target: no stage can lie between them."""

    ends = [(edge.source, edge.target) for edge in instance.edges]

    def beyond(layer: int, side: int) -> set[int]:
        near = {pair[side] for pair in ends if pair[1 - side] == layer}
        return near.union(*(beyond(x, side) for x in near))

    return len(beyond(source, 0) | beyond(target, 1) | {source, target}) == len(instance.layers)


def ring(instance: Instance, devices: int, d: int, t: int) -> Fraction:
    """Through the d replicas of a stage of such a plan.

    Each of a ring's edges belongs to the smallest group that both of its ends surely share. Of one that leaves groups
    of n replicas there are n at once, one from each of their devices, as the shards go around in as many rings.
    """
    if sites := len(instance.cluster.sites):
        return through_sites(instance, d // sites, ring(one_site(instance), devices // sites, d // sites, t))
    *inner, outermost = groups(instance, devices)
    together = [surely_together([size for size, _ in inner[: level + 1]], d, t) for level in range(len(inner))]
    slowest, inside = None, 1
    for (_, rate), n in zip([*inner, outermost], [*together, d], strict=True):
        if n > inside:
            slowest = inside * rate if slowest is None else min(slowest, inside * rate)
            inside = n
    return outermost[1] if slowest is None else slowest


def ring_where_stages_lie(instance: Instance, d: int, t: int, stages: int) -> Fraction:
    """The same where all stages of a plan have these degrees: inside the least group in which all stages lie whole. If
    there is none, the best of all n, of which the largest group smaller than what holds the plan has n, group after
    group until no stage is left; n times what leads out of it, and what a ring of n has in it."""
    if sites := len(instance.cluster.sites):
        near = d // sites
        return through_sites(instance, near, ring_where_stages_lie(one_site(instance), near, t, stages))
    *inner, (held, outermost) = groups(instance, stages * d * t)
    whole = whole_groups(instance, d * t, stages)
    if whole:
        return ring(instance, whole[0], d, t)
    found = [ring(instance, stages * d * t, d, t)]
    for n in range(2, d):
        if inner and d % n == 0:
            size, there = inner[-1][0], min(held, instance.devices)
            runs = sum(min(size, there - first) // (n * t) for first in range(0, there, size))
            if runs >= stages * d // n:
                found.append(min(ring(instance, size, n, t), n * outermost))
    return max(found)


def surely_together(sizes: list[int], d: int, t: int) -> int:
    """Replicas that lie in one of the groups of the last size, whatever else is there: runs of n t devices that divide
    groups into halves, thirds and so on, always by the least that divides them."""
    blocks = block_sizes(sizes)
    return max((n for n in range(1, d + 1) if d % n == 0 and n * t in blocks), default=1)


def block_sizes(sizes: list[int]) -> set[int]:
    """The parts into which groups are divided."""
    blocks = {1}
    for size in sizes:
        largest = max(blocks)
        while largest < size:
            largest *= next(factor for factor in range(2, size + 1) if (size // largest) % factor == 0)
            blocks.add(largest)
    return blocks
