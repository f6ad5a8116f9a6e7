"""Certificates in tests: made, altered, and judged by the plainest check there is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import product
from math import inf

import numpy as np

from piper_ray.certificate.certificate import Certificate, Tails
from piper_ray.certificate.check import verify_certificate
from piper_ray.engine.certify import certify
from piper_ray.engine.solve import solve
from piper_ray.model.constraints import Restrictions
from piper_ray.model.errors import CertificateRefused
from piper_ray.model.instance import Instance, Tmpc
from tests.solver_support import ONE_THREAD

State = tuple[frozenset[int], int, int]
"""Layers of a tail, devices, sum of data-parallel degrees."""


def certificate_of(instance: Instance, restrictions: Restrictions = Restrictions()) -> Certificate:
    """Of its optimum."""
    solution = solve(instance, restrictions=restrictions, options=ONE_THREAD, schedule="2bw")
    return certify(instance, solution, restrictions=restrictions, threads=1)


def is_accepted(instance: Instance, certificate: Certificate) -> bool:
    try:
        verify_certificate(instance, certificate, threads=1)
    except CertificateRefused:
        return False
    return True


def with_tails(certificate: Certificate, tails: Tails) -> Certificate:
    """Of one level."""
    return replace(certificate, tails=(tails,))


def without_row(tails: Tails, row: int) -> Tails:
    kept = np.arange(tails.used_devices.size) != row
    return replace(
        tails,
        members=tails.members[kept],
        used_devices=tails.used_devices[kept],
        data_parallel_sum=tails.data_parallel_sum[kept],
    )


def with_state(tails: Tails, row: int, devices: int, data_parallel_sum: int) -> Tails:
    """Another state of the tail in that row."""
    used, sums = tails.used_devices.copy(), tails.data_parallel_sum.copy()
    used[row], sums[row] = devices, data_parallel_sum
    return replace(tails, used_devices=used, data_parallel_sum=sums)


def states_of(tails: Tails) -> Iterator[State]:
    """The rows, with the layers that joined others."""
    for members, devices, total in zip(tails.members, tails.used_devices, tails.data_parallel_sum, strict=True):
        kept = {layer for v, layer in enumerate(tails.layers) if members[v // 8] >> (v % 8) & 1}
        joined = {layer for layer, into in tails.joined.items() if into in kept}
        yield frozenset(kept | joined), int(devices), int(total)


def proves(instance: Instance, certificate: Certificate) -> bool:
    """The slow twin of the check, for a handful of layers, one link and no restrictions: by the definition, in exact
    arithmetic, over all sets, degrees and choices."""
    (tails,) = certificate.tails
    bound = certificate.bound_s
    listed = list(states_of(tails))
    order = [layer.id for layer in instance.layers]
    whole = frozenset(order)
    degrees = [d for d in range(1, instance.data_parallel_limit + 1) if instance.microbatches % d == 0]
    groups = [{layer, *(z for z, into in tails.joined.items() if into == layer)} for layer in tails.layers]

    @cache
    def fits(stage: frozenset[int], d: int, t: int, y: int) -> bool:
        rows = [instance.layer_by_id[layer].tmpcs.get(t, ()) for layer in sorted(stage)]
        return any(
            _keeps(instance, dict(zip(sorted(stage), choice, strict=True)), d, y, bound) for choice in product(*rows)
        )

    usable = {
        layer.id: [
            (t, Fraction(x.time_per_sample_s))
            for t, row in layer.tmpcs.items()
            for x in row
            if t <= instance.devices and x.least_data_parallel_degree <= max(degrees)
        ]
        for layer in instance.layers
    }
    if bound == 0.0 or not all(usable.values()):
        return True

    def leaves_room(layers: frozenset[int], devices: int, total: int) -> bool:
        """For what is in front, by its work alone."""
        rest = [usable[layer] for layer in whole - layers] if bound < inf else []
        work = sum((min(t * time for t, time in ways) for ways in rest), Fraction(0))
        replicas = sum((min(time for _, time in ways) for ways in rest), Fraction(0))
        per_stage = Fraction(bound) if bound < inf else Fraction(1)
        room = instance.devices - devices, instance.data_parallel_limit - total
        return work <= room[0] * per_stage and replicas <= room[1] * per_stage

    def is_listed(layers: frozenset[int], devices: int, total: int) -> bool:
        return any(x == layers and n <= devices and s <= total for x, n, s in listed)

    if not is_listed(frozenset(), 0, 0):
        return False
    for layers, devices, total in listed:
        if layers == whole and devices <= instance.devices and total <= instance.data_parallel_limit:
            return False
        if not leaves_room(layers, devices, total):
            continue
        ahead = [group for group in groups if not group & layers]
        for picked in product([False, True], repeat=len(ahead)):
            stage = frozenset().union(*(group for group, taken in zip(ahead, picked, strict=True) if taken))
            then = layers | stage
            if not stage or any(edge.source in then and edge.target not in then for edge in instance.edges):
                continue
            for d in degrees:
                for t in instance.degrees:
                    after = then, devices + d * t, total + d
                    if leaves_room(*after) and not is_listed(*after) and fits(stage, d, t, -(-(total + d) // d)):
                        return False
    return True


def _keeps(instance: Instance, choice: dict[int, Tmpc], d: int, y: int, bound_s: float) -> bool:
    """Whether a stage of d replicas takes at most this time and the memory there is."""
    held = sum(
        (
            Fraction(x.activation_bytes) * y + Fraction(x.fixed_bytes) + Fraction(x.shared_bytes) / d
            for x in choice.values()
        ),
        Fraction(0),
    )
    # Instances are made to fit to the byte, in floating point.
    if held > Fraction(instance.memory_bytes) * (1 + Fraction(1, 10**10)) or any(
        x.least_data_parallel_degree > d for x in choice.values()
    ):
        return False
    if bound_s == inf:
        return True
    moved = Fraction(0)
    for edge in instance.edges:
        if edge.target in choice and edge.source not in choice:
            moved += 2 * Fraction(edge.communication_bytes)
            moved += 2 * Fraction(choice[edge.target].forward_sync_bytes.get(edge.source, 0.0))
        if edge.source in choice and edge.target not in choice:
            moved += 2 * Fraction(edge.communication_bytes)
            moved += 2 * Fraction(choice[edge.source].backward_sync_bytes.get(edge.target, 0.0))
    for tensor in instance.tensors:
        if 0 < len(choice.keys() & set(tensor.layers)) < len(set(tensor.layers)):
            moved += Fraction(tensor.forward_bytes) + Fraction(tensor.backward_bytes)
    weights = sum((Fraction(x.weights_bytes) for x in choice.values()), Fraction(0))
    bandwidth = Fraction(instance.bandwidth_bytes_per_s)
    work = sum((Fraction(x.time_per_sample_s) for x in choice.values()), Fraction(0))
    work += moved / bandwidth + 4 * (d - 1) * weights / (instance.microbatches * bandwidth)
    return work <= Fraction(bound_s) * d
