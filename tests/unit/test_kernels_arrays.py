"""Kernels: arrays with more room."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from piper_ray.compiled.arrays import stable_order, twice, twice_rows


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


@pytest.mark.parametrize("count", [*range(10), 16, 17, 100])
def test_of_equal_keys_the_first_comes_first(count: int) -> None:
    """As Python's own sort, which is stable too."""
    rng = Random(count)
    for most in (1, 3, 1000):
        keys = [rng.choice([float(rng.randint(-most, most)), -np.inf, np.inf]) for _ in range(count + 3)]
        assert stable_order(np.array(keys), count).tolist() == sorted(range(count), key=keys.__getitem__)
