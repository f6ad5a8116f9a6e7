"""How much memory a device would need for a plan with one d and one t to exist."""

from __future__ import annotations

from collections.abc import Callable

from piper_ray.model.instance import Instance


def least_memory_bytes(instance: Instance, fits: Callable[[float], bool | None]) -> float | None:
    """For an instance that has no plan, within 1 byte or 1e-9: the least memory of a device with which it has one.

    fits: whether there is a plan with so many bytes; None: not known, as a limit came first. None if no memory helps,
    or a limit came first.
    """
    most_bytes = sum(
        max(x.activation_bytes * instance.microbatches + x.fixed_bytes + x.shared_bytes for x in rows)
        for layer in instance.layers
        if (rows := [tmpc for row in layer.tmpcs.values() for tmpc in row])
    )
    low, high = instance.memory_bytes, max(1.0, 2.0 * instance.memory_bytes)
    while not (found := fits(high)):
        if found is None or high > most_bytes:
            return None
        low, high = high, 2.0 * high
    while high - low > max(1.0, 1e-9 * high):
        middle = (low + high) / 2.0
        found = fits(middle)
        if found is None:
            return None
        low, high = (low, middle) if found else (middle, high)
    return high
