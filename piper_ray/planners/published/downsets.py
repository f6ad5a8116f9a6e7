"""Sets of layers closed under successors, by plain enumeration."""

from __future__ import annotations

from piper_ray.model.instance import Instance


def enumerate_downsets(instance: Instance, most: int) -> list[int]:
    """All downsets as bit masks (bit i is ``instance.layers[i]``), by size, then by value; the empty set comes first.

    A downset grows by a layer all of whose successors are in it; going level by level finds each, as every downset
    loses its front-most layer to one of the level before. Stops after the level that makes them more than ``most``.
    """
    position = {layer.id: i for i, layer in enumerate(instance.layers)}
    successors = [0] * len(instance.layers)
    for edge in instance.edges:
        successors[position[edge.source]] |= 1 << position[edge.target]
    downsets = [0]
    level = [0]
    while level and len(downsets) <= most:
        level = sorted(
            {
                downset | 1 << i
                for downset in level
                for i, needed in enumerate(successors)
                if not downset >> i & 1 and downset & needed == needed
            }
        )
        downsets += level
    return downsets
