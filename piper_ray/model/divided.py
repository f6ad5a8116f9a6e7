"""What has to divide what for all devices of a cluster to be used: d t p devices, with d a divisor of a batch's
microbatches."""

from __future__ import annotations

from piper_ray.model.instance import Instance
from piper_ray.model.restrictions import Restrictions

_NEAR = 1 / 50
"""How far from a batch, relative, one is looked for that more degrees divide."""


def can_use_all(instance: Instance, restrictions: Restrictions) -> bool:
    """Whether plans with one d and one t may use all devices, whatever the memory."""
    most, wanted = len(instance.layers), restrictions.stage_count
    for d in restrictions.data_parallel_degrees(instance):
        for t in filter(restrictions.admits_tensor_parallel_degree, instance.degrees):
            ranks, left = divmod(instance.devices, d * t)
            if left == 0 and ranks <= most and wanted in (None, ranks):
                return True
    return False


def reason_against_all(instance: Instance, restrictions: Restrictions) -> str:
    """For people, where none can."""
    devices, microbatches = instance.devices, instance.microbatches
    degrees = [str(t) for t in instance.degrees if restrictions.admits_tensor_parallel_degree(t)]
    wanted = restrictions.stage_count
    ranks = f"at most {len(instance.layers):,}, the layers" if wanted is None else f"{wanted:,}"
    fitting = divisible_batch(microbatches, devices)
    other = "" if fitting == microbatches else f"; {fitting:,} microbatches may do"
    return (
        f"no plan with one d and one t uses all {devices:,} devices: of d t p = {devices:,}, d divides the "
        f"{microbatches:,} microbatches, t is {', '.join(degrees) or 'nothing'}, and p {ranks}{other}"
    )


def divisible_batch(batch: int, devices: int) -> int:
    """The batch near this one that the odd part of a number of devices divides, and beside it as high a power of two as
    divides any so near: the more divisors the two have in common, the more degrees can use all devices."""
    step = odd_part(devices)
    found = max(1, round(batch / step)) * step
    while 2 * step <= batch:
        step *= 2
        near = round(batch / step) * step
        if abs(near - batch) > _NEAR * batch:
            break
        found = near
    return found


def odd_part(number: int) -> int:
    """Its largest odd divisor."""
    return number // (number & -number)
