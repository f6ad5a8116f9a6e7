"""What the TMPCs of a layer must keep, whether a file or a Python program lists them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from piper_ray.model.instance import Tmpc
from piper_ray.workloads.formats.faults import Faults, path_of, quoted, shown

PASSES_TOLERANCE = 1e-9
"""Relative to p: the passes were added, or rounded, elsewhere."""


def check_tmpc_ids(ids: Iterable[object], path: str, faults: Faults) -> None:
    """Note each id that comes twice: a plan names a layer's TMPC by degree and id."""
    seen: set[str] = set()
    for tmpc_id in ids:
        if isinstance(tmpc_id, str):
            if tmpc_id in seen:
                faults.at(path, f"duplicate TMPC id {quoted(tmpc_id)}; expected unique ids within a layer and degree")
            seen.add(tmpc_id)


def check_some_tmpc(rows: Iterable[object], path: str, faults: Faults) -> None:
    """Note a layer that has no TMPC at any degree."""
    if not any(isinstance(row, (list, tuple)) and row for row in rows):
        faults.at(path, "no TMPC at all; expected at least one for some degree")


def check_passes(tmpc: Tmpc, path_to: Callable[[str], str], faults: Faults) -> None:
    """Note passes that do not make up p, and a share of the backward pass that is more than all of it.

    The figures given are finite and >= 0. path_to: where that of "p", "forward", "backward" or "weight" stands.
    """
    p_s, forward_s, backward_s, weight_s = tmpc.time_per_sample_s, tmpc.forward_s, tmpc.backward_s, tmpc.weight_s
    if forward_s is None or backward_s is None:
        if weight_s is not None:
            faults.at(path_to("weight"), "a share of a backward pass that is not given; expected the passes as well")
        return
    slack_s = PASSES_TOLERANCE * p_s
    if forward_s > p_s + slack_s or backward_s > p_s + slack_s:
        name, part_s = ("forward", forward_s) if forward_s > backward_s else ("backward", backward_s)
        faults.at(path_to(name), f"{part_s!r}, more than both passes together ({p_s!r}); expected a part of it")
    elif abs(forward_s + backward_s - p_s) > slack_s:
        faults.at(path_to("p"), f"{p_s!r}, but the passes take {forward_s!r} and {backward_s!r}; expected their sum")
    elif weight_s is not None and weight_s > backward_s + slack_s:
        faults.at(path_to("weight"), f"{weight_s!r}, more than the backward pass ({backward_s!r}); expected a share")


def check_sync_names(
    table: Iterable[object], neighbours: Collection[object], path: str, arrow: str, faults: Faults
) -> None:
    """Note each entry of a sync table that is for no edge. arrow: the edge with {} for the neighbour."""
    for key in table:
        if key not in neighbours:
            part = key if isinstance(key, int) else str(key)
            text = quoted(part) if isinstance(part, str) else shown(part)
            faults.at(path_of(path, part), f"there is no edge {arrow.format(text)}; expected edges only")
