"""Bounds a search by whole stages between amounts of work, on ever finer grids (``evaluation.cell_cover``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from piper_ray.cost.tolerances import PROOF
from piper_ray.engine.evaluation.cell_cover import CellCover
from piper_ray.engine.evaluation.dual_prices import StageCover
from piper_ray.engine.search.bracket import Bracket

_GRIDS, _FINER = (64, 128, 256, 512, 1024, 2048), 5
"""Numbers of cells, from coarse to fine, and how many times the steps of a grid the next one takes at least."""

_CELLS_OF_A_VERTEX = 8
"""Where a grid has more, hardly any of a vertex's work is rounded."""

_READS, _OTHER_READS, _SMALL = 0.25, (0.0, 1.0), 0.25
"""How much of what its edges cost a vertex with many readers counts in cells; and other shares for the finest grid of
wide graphs, on which one or another may be best, if it took no larger part of the steps that are allowed."""

MOST_STEPS = 20_000_000_000
"""Steps for one grid at most, as estimated from the one before: it mostly takes half of them, some twenty seconds."""

_CLOSE = 1e-4
"""Relative distance of two thresholds between which none is tried."""


def bound_by_cells(
    cover: StageCover, devices: int, bracket: Bracket, gap: float, most_steps: float, check: Callable[[], None]
) -> Iterator[CellCover]:
    """Raises the bound of a bracket that has a plan, until it is as narrow as the gap or the next grid would take
    longer than ``most_steps``. Yields the cells of each grid, once they have raised the bound; the plan may become
    better in between."""
    known: CellCover | None = None
    for cells in (x for x in _GRIDS if x == _GRIDS[0] or x <= _CELLS_OF_A_VERTEX * cover.graph.size):
        if bracket.upper is None or bracket.is_done(gap) or (known is not None and _FINER * known.steps > most_steps):
            break
        known = CellCover.of(cover, cells, _READS, bracket.upper, known, check)
        _raise(bracket, known, devices)
        yield known
    for reads in _OTHER_READS if most_steps == MOST_STEPS else ():
        if known is None or known.steps > _SMALL * most_steps or bracket.upper is None or bracket.is_done(gap):
            break
        other = CellCover.of(cover, int(known.cells_of.sum()), reads, bracket.upper, known, check)
        _raise(bracket, other, devices)
        yield known


def _raise(bracket: Bracket, known: CellCover, devices: int) -> None:
    """Raises the bound to what is known by some cells. The bracket has a plan."""
    assert bracket.upper is not None
    low_s, high_s = bracket.lower, bracket.upper * (1.0 - PROOF)
    if known.needs_more_than(devices, high_s):
        low_s = high_s
    while high_s > low_s * (1.0 + _CLOSE):
        middle_s = 0.5 * (low_s + high_s)
        if known.needs_more_than(devices, middle_s):
            low_s = middle_s
        else:
            high_s = middle_s
    bracket.record_bound(low_s)


def is_smallest(
    cover: StageCover, most_s: float, devices: int, stages: int, most_steps: float, check: Callable[[], None]
) -> bool:
    """Whether cells show that no plan that keeps ``most_s`` has fewer devices, or as many and fewer stages. Grids are
    tried as long as the next one takes no longer than ``most_steps``."""
    known: CellCover | None = None
    for cells in _GRIDS:
        if known is not None and (_FINER * known.steps > most_steps or known.shows_smallest(devices, stages)):
            break
        known = CellCover.of(cover, cells, _READS, most_s, known, check)
    return known is not None and known.shows_smallest(devices, stages)
