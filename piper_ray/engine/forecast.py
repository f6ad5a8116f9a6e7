"""Forecasts what a solve will need, and refuses a solve that does not fit in memory."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from piper_ray.engine.lattice.counting import count_pairs
from piper_ray.engine.lattice.downsets import GrownLattice, Lattice, build_lattice
from piper_ray.engine.lattice.layer_graph import LayerGraph
from piper_ray.model.errors import LimitError
from piper_ray.model.events import Listener, StepFinished
from piper_ray.model.instance import Tmpc
from piper_ray.model.solution import Forecast

_PROCESS_BYTES = 170e6
_SHARE_OF_MACHINE = 0.8
_BOUNDS_PER_S = 5e7
_EVALUATIONS = 10
_OPEN_SHARE = 0.1
_WAY_OUT = (
    "Plan blocks of layers instead (--contract operators), or raise the limit with --memory-limit on a machine that "
    "has the memory."
)


def bytes_per_downset(graph: LayerGraph, variants: int) -> float:
    """Returns the peak bytes for each downset: bit sets (with scratch of the same size, and once more when they are cut
    to their number), crossing edges, sums, states and buckets.

    It counts the eight-byte figures of LatticeArrays, StageSums, CostArrays, FrontArrays, MemberArrays and, at worst,
    one bucket and one group per downset.
    """
    words = max(1, (graph.size + 63) // 64)
    crossing = 2.0 * len(graph.edges) / max(1, graph.size)
    enumeration = 2 * (2 * words + 2)
    return 8.0 * (enumeration + crossing + 22 * variants + 2 + 12 + 6 * words)


def forecast(graph: LayerGraph, downsets: int | None, variants: int) -> Forecast:
    """Returns exact counts if they are quick, the memory that follows from them, and a rough time for one core."""
    if downsets is None:
        return Forecast(None, None, None, None)
    bucket_bounds = _EVALUATIONS * _OPEN_SHARE * downsets * (downsets / 32.0 + 1.0) * variants
    return Forecast(
        downsets=downsets,
        pairs=count_pairs(graph),
        memory_bytes=memory_bytes(graph, variants, downsets),
        seconds=0.01 + downsets * 1e-6 + bucket_bounds / _BOUNDS_PER_S,
    )


def memory_bytes(graph: LayerGraph, variants: int, downsets: int) -> float:
    """Returns the peak memory, in bytes, of a solve that lists ``downsets`` downsets."""
    return _PROCESS_BYTES + downsets * bytes_per_downset(graph, variants)


def downset_limit(graph: LayerGraph, variants: int, downsets: int | None, memory_limit_bytes: float | None) -> int:
    """Returns how many downsets fit in the limit. Raises LimitError if it is known that there are more."""
    limit = downsets_within(graph, variants, memory_limit_bytes)
    if downsets is not None and downsets > limit:
        raise LimitError(
            f"the graph has {downsets:,} downsets, which take about {_gib(memory_bytes(graph, variants, downsets))}; "
            f"the limit is {_gib(_limit_bytes(memory_limit_bytes))}. {_WAY_OUT}"
        )
    return limit


def downsets_within(graph: LayerGraph, variants: int, memory_limit_bytes: float | None) -> int:
    """Returns how many downsets fit in the limit, or in the machine if there is none."""
    room_bytes = max(0.0, _limit_bytes(memory_limit_bytes) - _PROCESS_BYTES)
    return int(room_bytes / bytes_per_downset(graph, variants))


def _limit_bytes(memory_limit_bytes: float | None) -> float:
    return memory_limit_bytes or machine_memory_bytes() * _SHARE_OF_MACHINE


def note_of_many(downsets: int | None) -> str:
    """Returns the note of a solve that lists only useful downsets. downsets: None if they are too many to count."""
    counted = "more downsets than can be counted quickly" if downsets is None else f"{downsets:,} downsets"
    return f"{counted}: only those that a best plan can use are listed"


def machine_memory_bytes() -> float:
    """Returns the physical memory of this machine, in bytes."""
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def _gib(size_bytes: float) -> str:
    if size_bytes < 0.1 * 2**30:  # would be shown as 0.0 GiB
        return f"{size_bytes / 2**20:,.1f} MiB"
    return f"{size_bytes / 2**30:,.1f} GiB"


def tell_of_options(tmpcs: Sequence[Sequence[Sequence[Tmpc]]], began_s: float, listener: Listener) -> float:
    """Reports the tables of stage costs. Returns the seconds since ``began_s``. tmpcs: by variant and vertex."""
    seconds = time.perf_counter() - began_s
    count = sum(len(of_vertex) for of_variant in tmpcs for of_vertex in of_variant)
    listener(StepFinished("stage costs", seconds, f"{count:,} TMPCs that none beats in {len(tmpcs)} variants"))
    return seconds


def lattice_within(
    graph: LayerGraph,
    variants: int,
    expected: int | None,
    memory_limit_bytes: float | None,
    listener: Listener,
    began_s: float,
) -> tuple[GrownLattice, float]:
    """Builds the lattice. Returns it, and the seconds since ``began_s``. variants: their number. expected: the number
    of downsets, if known.

    Raises LimitError if the downsets do not fit in the limit or in the machine.
    """
    limit = downset_limit(graph, variants, expected, memory_limit_bytes)
    try:
        lattice = build_lattice(graph, limit, expected)
    except LimitError:
        fits = _gib(_limit_bytes(memory_limit_bytes))
        raise LimitError(f"the graph has more than {limit:,} downsets, all that fit into {fits}. {_WAY_OUT}") from None
    return lattice, tell_of_lattice(lattice, began_s, listener)


def tell_of_lattice(lattice: Lattice, began_s: float, listener: Listener) -> float:
    """Reports the lattice. Returns the seconds since ``began_s``."""
    seconds = time.perf_counter() - began_s
    listener(StepFinished("lattice", seconds, f"{lattice.size:,} downsets in {lattice.levels:,} levels"))
    return seconds
