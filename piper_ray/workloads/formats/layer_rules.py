"""What the TMPCs of a layer must keep, whether a file or a Python program lists them."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from piper_ray.workloads.formats.faults import Faults, path_of, quoted, shown


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


def check_sync_names(
    table: Iterable[object], neighbours: Collection[object], path: str, arrow: str, faults: Faults
) -> None:
    """Note each entry of a sync table that is for no edge. arrow: the edge with {} for the neighbour."""
    for key in table:
        if key not in neighbours:
            part = key if isinstance(key, int) else str(key)
            text = quoted(part) if isinstance(part, str) else shown(part)
            faults.at(path_of(path, part), f"there is no edge {arrow.format(text)}; expected edges only")
