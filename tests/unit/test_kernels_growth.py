"""Kernels: arrays with more room."""

from __future__ import annotations

import numpy as np
import pytest

from piper_ray.engine.kernels.growth import twice, twice_rows


@pytest.mark.parametrize("kind", [np.int64, np.float64, np.bool_])
@pytest.mark.parametrize("size", [1, 5])
def test_there_is_room_for_as_many_again(kind: type[np.generic], size: int) -> None:
    values = (np.arange(size) % 2).astype(kind)
    grown = twice(values)
    assert (grown.shape, grown.dtype) == ((2 * size,), values.dtype)
    assert np.array_equal(grown[:size], values)


def test_rows_stay_as_they_are() -> None:
    rows = np.random.default_rng(1).random((3, 4))
    grown = twice_rows(rows)
    assert grown.shape == (6, 4)
    assert np.array_equal(grown[:3], rows)
