"""All plans at all places in order, for a handful of layers: plain loops, from the rules in words."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from piper_ray.model.constraints import Recompute, Restrictions
from piper_ray.model.instance import Instance
from tests.brute_force import Choice, degrees_of, fitting_choices, next_stages
from tests.link_rates import block_sizes, groups, ring, surely_together, unpassed


def faster_with_places(instance: Instance, time_s: float | None) -> float | None:
    """The least time under ``time_s`` (None: any) of a plan whose stages lie in order; None if there is none.

    Of those that fit into a group of each size, and of all.
    """
    least_s = float("inf") if time_s is None else time_s
    for size, _ in groups(instance, instance.devices):
        least_s = min(least_s, _least_s(instance, min(size, instance.devices), least_s))
    return least_s if least_s < (float("inf") if time_s is None else time_s) else None


def lies_whole(instance: Instance, most: int, d: int, t: int, first: int) -> bool:
    """Whether the replicas that a stage's ring counts on being together are so, in groups of each size smaller than
    what holds ``most`` devices. first: its first device, from the back."""
    sizes = [size for size, _ in groups(instance, most)][:-1]
    for level, size in enumerate(sizes):
        n = surely_together(sizes[: level + 1], d, t)
        run = n * t if n > 1 or t in block_sizes(sizes[: level + 1]) else 1
        runs = (range(at, at + run) for at in range(first, first + d * t, run))
        if any(len({device // size for device in devices}) > 1 for devices in runs):
            return False
    return True


def border_rate(instance: Instance, most: int, first: int, end: int) -> float:
    """Between two stages that have the devices from ``first`` up to ``end``, with gaps or without."""
    *inner, (_, outermost) = groups(instance, most)
    shared = (rate for size, rate in inner if len({device // size for device in range(first, end)}) == 1)
    return float(next(shared, outermost))


class _Behind(NamedTuple):
    """first: its first device. stage: its layers, d, t, y, and the rate behind it."""

    first: int
    stage: tuple[tuple[int, ...], int, int, int, float]


def _least_s(instance: Instance, most: int, below_s: float) -> float:
    """On at most a number of devices, at the links that a plan on all of them has."""
    outermost = float(groups(instance, most)[-1][1])
    count, least_s = len(instance.layers), below_s
    is_free = {(x.source, x.target): unpassed(instance, x.source, x.target) for x in instance.edges}
    admitted = degrees_of(instance, Restrictions())

    @cache
    def stage_s(layers: tuple[int, ...], d: int, t: int, y: int, behind: float, ahead: float) -> float:
        choices = fitting_choices(instance, layers, d, t, y, Recompute.AUTO)
        return min((_choice_s(choice, d, t, behind, ahead) for choice in choices), default=float("inf"))

    def _choice_s(choice: Choice, d: int, t: int, behind: float, ahead: float) -> float:
        inside = dict(choice)
        work_s = sum(x.time_per_sample_s for x in inside.values())
        weights = sum(x.weights_bytes for x in inside.values())
        for edge in instance.edges:
            one, other = edge.source, edge.target
            if (one in inside) == (other in inside):
                continue
            more = inside[other].forward_sync_bytes[one] if other in inside else inside[one].backward_sync_bytes[other]
            rate = (ahead if other in inside else behind) if is_free[one, other] else outermost
            work_s += 2.0 * (edge.communication_bytes + more) / rate
        for tensor in instance.tensors:
            if len({layer in inside for layer in tensor.layers}) > 1:
                work_s += (tensor.forward_bytes + tensor.backward_bytes) / outermost
        if d > 1:
            work_s += 4.0 * (d - 1) * weights / (instance.microbatches * float(ring(instance, most, d, t)))
        return work_s / d

    def extend(done: frozenset[int], end: int, total: int, slowest_s: float, behind: _Behind | None) -> None:
        """Puts a stage in front of ``behind``, whose time depends on the rate between them."""
        nonlocal least_s
        if len(done) == count and behind is not None:
            least_s = min(least_s, max(slowest_s, stage_s(*behind.stage, outermost)))
        for layers in next_stages(instance, done):
            for d, t in admitted:
                if total + d > instance.data_parallel_limit:
                    continue
                for at in range(end, most - d * t + 1):
                    rate, so_far_s = outermost, slowest_s
                    if behind is not None:
                        rate = border_rate(instance, most, behind.first, at + d * t)
                        so_far_s = max(slowest_s, stage_s(*behind.stage, rate))
                    if so_far_s < least_s and lies_whole(instance, most, d, t, at):
                        stage = layers, d, t, -(-(total + d) // d), rate
                        extend(done | set(layers), at + d * t, total + d, so_far_s, _Behind(at, stage))

    extend(frozenset(), 0, 0, 0.0, None)
    return least_s
