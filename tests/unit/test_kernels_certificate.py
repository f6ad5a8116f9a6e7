"""The check's kernels against the plainest ways to the same answers."""

from __future__ import annotations

import random
from itertools import combinations, product

import numpy as np
import pytest

from piper_ray.certificate.kernels.closure import by_choices, by_prices
from piper_ray.certificate.kernels.downsets import DownsetRoom, Floats, Ints, list_downsets, sums_over
from piper_ray.certificate.kernels.types import FITS, TOO_HARD, UNFIT
from tests.lengths import long_after

Options = list[list[tuple[float, float]]]
"""Of each layer, time and memory as shares of what there is."""


def _arrays(
    options: Options,
) -> tuple[int, Ints, Floats, Floats]:
    item = np.cumsum([0, *map(len, options)]).astype(np.int64)
    flat = [option for listed in options for option in listed]
    return len(options), item, np.array([time for time, _ in flat]), np.array([memory for _, memory in flat])


def _by_prices(options: Options, guess: float = 1.0) -> int:
    found, _ = by_prices(*_arrays(options), guess)
    return int(found)


def _by_choices(options: Options, price: float = 1.0, room: int = 1000) -> int:
    scratch = np.empty((3, room)), np.empty((3, room))
    return int(by_choices(*_arrays(options), price, np.empty((3, max(1, len(options)))), *scratch))


def _fits(options: Options) -> bool:
    return any(
        sum(time for time, _ in choice) <= 1.0 and sum(memory for _, memory in choice) <= 1.0
        for choice in product(*options)
    )


def _random_options(rng: random.Random) -> Options:
    """In 64ths, so that sums are exact: mostly near the limits."""
    layers = rng.randint(1, 5)
    most = rng.choice([64, 128, 192]) // layers
    return [
        [(rng.randint(0, most) / 64, rng.randint(0, most) / 64) for _ in range(rng.randint(1, 4))]
        for _ in range(layers)
    ]


@pytest.mark.parametrize("seed", long_after(3, range(12)))
def test_choices(seed: int) -> None:
    rng = random.Random(f"choices {seed}")
    told = 0
    for _ in range(50):
        options = _random_options(rng)
        expected = FITS if _fits(options) else UNFIT
        assert _by_choices(options, rng.choice([0.0, 0.3, 1.0, 7.0])) == expected
        found = _by_prices(options, rng.choice([1e-3, 1.0, 1e3]))
        assert found in (expected, TOO_HARD)
        told += found == expected
    assert told > 40


def test_a_choice_that_no_price_tells() -> None:
    """Half of each would do."""
    options: Options = [[(0.0, 1.5), (1.5, 0.0)]]
    assert _by_prices(options) == TOO_HARD
    assert _by_choices(options) == UNFIT


def test_more_choices_than_there_is_room_for() -> None:
    rng = random.Random("many")
    options: Options = [[(0.0, x), (x, 0.0)] for x in (rng.uniform(0.05, 0.15) for _ in range(12))]
    assert _by_choices(options, room=8) == TOO_HARD
    assert _by_choices(options, room=5000) == FITS


def test_a_layer_without_a_choice() -> None:
    assert _by_prices([[], [(0.1, 0.1)]]) == UNFIT
    assert _by_choices([[(0.1, 0.1)], []]) == UNFIT


def _random_successors(rng: random.Random, vertices: int) -> list[set[int]]:
    """Of vertices that come after their successors."""
    share = rng.random()
    return [{v for v in range(u) if rng.random() < share} for u in range(vertices)]


def _listed(successors: list[set[int]], size: int) -> tuple[int, DownsetRoom]:
    vertices = len(successors)
    words = (vertices + 63) // 64
    bits = np.zeros((vertices, words), np.uint64)
    for u, heads in enumerate(successors):
        for v in heads:
            bits[u, v >> 6] |= np.uint64(1 << (v & 63))
    before = [[u for u in range(vertices) if v in successors[u]] for v in range(vertices)]
    room = DownsetRoom(
        np.zeros((size, words), np.uint64),
        np.zeros((size, words), np.uint64),
        np.zeros(size, np.int64),
        np.zeros(size, np.int64),
    )
    start = np.cumsum([0, *map(len, before)]).astype(np.int64)
    return int(list_downsets(bits, start, np.array([u for x in before for u in x], np.int64), room)), room


def _members(row: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> frozenset[int]:
    return frozenset(64 * word + v for word, bits in enumerate(row) for v in range(64) if int(bits) >> v & 1)


@pytest.mark.parametrize("seed", long_after(3, range(12)))
def test_downsets(seed: int) -> None:
    rng = random.Random(f"downsets {seed}")
    vertices = rng.randint(1, 8)
    successors = _random_successors(rng, vertices)
    expected = {
        frozenset(chosen)
        for count in range(vertices + 1)
        for chosen in combinations(range(vertices), count)
        if all(successors[v] <= set(chosen) for v in chosen)
    }
    count, room = _listed(successors, 300)
    found = [_members(room.bits[at]) for at in range(count)]
    assert len(found) == len(expected)
    assert set(found) == expected
    assert _listed(successors, len(expected) - 1)[0] == -1
    values = np.array([float(rng.randint(0, 9)) for _ in range(vertices)])
    sums = sums_over(room.parent[:count], room.added[:count], values)
    assert sums.tolist() == [sum(values[v] for v in members) for members in found]


def test_downsets_of_more_than_64_vertices() -> None:
    """Two chains of 65, one in each word but for a vertex."""
    successors = [{u - 1} if u not in (0, 65) else set() for u in range(130)]
    count, room = _listed(successors, 5000)
    assert count == 66 * 66
    found = {_members(room.bits[at]) for at in range(count)}
    assert found == {frozenset([*range(m), *range(65, 65 + n)]) for m in range(66) for n in range(66)}
