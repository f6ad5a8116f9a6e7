"""Products of arrays whose sums do not depend on the machine's number of cores.

numpy leaves ``@`` to a library that divides large sums among its threads, so that rounding depends on how many there
are. ``np.einsum`` adds up in one order, in the thread that calls it.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

_Numbers: TypeAlias = npt.NDArray[np.float64] | npt.NDArray[np.integer[Any]] | npt.NDArray[np.bool_]


def dot(one: _Numbers, other: _Numbers) -> Any:
    """Returns ``one @ other`` for arrays of one or two dimensions. If either has one, the other may have more."""
    if other.ndim == 1:
        return np.einsum("...i,i->...", one, other)
    if one.ndim == 1:
        return np.einsum("i,...ij->...j", one, other)
    # Sums over the last axis of both, which are in a row in memory, take a fifth of the time of others.
    return np.einsum("ij,kj->ik", np.ascontiguousarray(one, np.float64), np.ascontiguousarray(other.T, np.float64))
