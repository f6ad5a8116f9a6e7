"""Vertex sets as rows of uint64 words: vertex v is bit v % 64 of word v // 64."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt


def bit_rows(sets: Sequence[Iterable[int]], size: int) -> npt.NDArray[np.uint64]:
    """Returns uint64[len(sets), ceil(size / 64)], at least one word wide."""
    words = max(1, (size + 63) // 64)
    rows = [[0] * words for _ in sets]
    for row, members in zip(rows, sets, strict=True):
        for v in members:
            row[v >> 6] |= 1 << (v & 63)
    return np.array(rows, np.uint64).reshape(len(sets), words)


def members(row: npt.NDArray[np.uint64]) -> list[int]:
    """Returns the vertices of one row, ascending."""
    return [64 * word + bit for word, value in enumerate(row.tolist()) for bit in range(64) if value >> bit & 1]


def members_of(mask: int) -> npt.NDArray[np.int64]:
    """Returns the vertices of a bit mask, ascending."""
    data = np.frombuffer(mask.to_bytes((mask.bit_length() + 7) // 8, "little"), np.uint8)
    return np.flatnonzero(np.unpackbits(data, bitorder="little"))


def runs(rows: Sequence[Sequence[int]]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Concatenates rows. Returns their ``offsets`` and their values."""
    return offsets(len(row) for row in rows), np.array([value for row in rows for value in row], np.int64)


def offsets(lengths: Iterable[int]) -> npt.NDArray[np.int64]:
    """Returns int64[len + 1]: the start of each run, and the end of the last."""
    return np.concatenate(([0], np.cumsum(np.fromiter(lengths, np.int64)))).astype(np.int64)
