"""Listing the downsets that a solve needs, within the memory that it may take."""

from __future__ import annotations

import time

from piper_ray.engine.forecast import downset_limit, over_limit
from piper_ray.engine.lattice.downsets import GrownLattice, build_lattice
from piper_ray.engine.lattice.layer_graph import LayerGraph
from piper_ray.model.errors import LimitError
from piper_ray.model.events import Listener, StepFinished


def lattice_within(
    graph: LayerGraph,
    variants: int,
    expected: int | None,
    memory_limit_bytes: float | None,
    listener: Listener,
    began_s: float,
) -> tuple[GrownLattice, float]:
    """The lattice and the seconds since ``began_s``. variants: how many; expected: downsets, where they were counted.

    Raises LimitError if the downsets do not fit into the limit, or the machine.
    """
    limit = downset_limit(graph, variants, expected, memory_limit_bytes)
    try:
        lattice = build_lattice(graph, limit, expected)
    except LimitError:
        raise over_limit(limit, memory_limit_bytes) from None
    seconds = time.perf_counter() - began_s
    listener(StepFinished("lattice", seconds, f"{lattice.size:,} downsets in {lattice.levels:,} levels"))
    return lattice, seconds
