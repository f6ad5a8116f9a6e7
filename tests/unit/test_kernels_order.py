"""Indices in the order of keys, against Python's own sort, which is stable too."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from piper_ray.engine.kernels.order import stable_order


@pytest.mark.parametrize("count", [*range(10), 16, 17, 100])
def test_of_equal_keys_the_first_comes_first(count: int) -> None:
    rng = Random(count)
    for most in (1, 3, 1000):
        keys = [rng.choice([float(rng.randint(-most, most)), -np.inf, np.inf]) for _ in range(count + 3)]
        assert stable_order(np.array(keys), count).tolist() == sorted(range(count), key=keys.__getitem__)
