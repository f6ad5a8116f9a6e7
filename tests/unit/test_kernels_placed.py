"""Kernels of places against the rules in words. Whole searches are compared with all plans in
``tests/property/test_places.py``."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import numpy as np

from piper_ray.engine.kernels.placed import PlaceArrays, keep_least, least_place
from piper_ray.engine.kernels.tails import NO_TAIL, OpenTails


def random_groups(rng: Random) -> list[int]:
    sizes = [rng.choice([1, 2, 3, 4, 8])]
    for _ in range(rng.choice([0, 1, 2])):
        sizes.append(sizes[-1] * rng.choice([2, 3, 4]))
    return sizes


def test_the_least_place_of_a_stage() -> None:
    rng = Random("least place")
    for _ in range(300):
        sizes, at, devices = random_groups(rng), rng.randint(0, 40), rng.randint(1, 30)
        blocks = [rng.choice([x for x in range(1, size + 1) if size % x == 0 and devices % x == 0]) for size in sizes]
        within = rng.choice([0, *(size for size in sizes if devices <= size)])

        def stands(first: int) -> bool:
            def is_whole(size: int) -> bool:
                return first // size == (first + devices - 1) // size  # noqa: B023 - called at once

            cut = any(not is_whole(size) and first % x for size, x in zip(sizes, blocks, strict=True))  # noqa: B023
            return not cut and (within == 0 or is_whole(within))  # noqa: B023

        expected = next(first for first in range(at, at + 1000) if stands(first))
        assert least_place(at, devices, within, np.array(sizes), np.array(blocks)) == expected


def test_tails_that_others_dominate_are_dropped() -> None:
    rng = Random("dominance")
    for _ in range(100):
        groups = random_groups(rng)
        sizes = sorted(rng.sample(groups, rng.randint(0, len(groups))))
        rates, places = len(sizes) + 1, rng.randint(2, 30)
        sums = np.array([[rng.choice([NO_TAIL, *range(1, 9)]) for _ in range(places)] for _ in range(rates)])
        sums[:, 0] = NO_TAIL  # no tail but the empty one lies there
        found = OpenTails(sums.copy(), *(np.zeros((rates, places), np.int64) for _ in OpenTails._fields[1:]))
        none, blocks = np.zeros(0, np.int64), np.zeros((0, 0, 0), np.int64)
        arrays = PlaceArrays(np.array(groups), np.array(sizes, np.int64), blocks, none, none)

        def digits(rate: int, place: int) -> list[int]:
            """The place in its group, the group's number in the next larger one, and so on."""
            of_rate = [size for size in groups if rate < len(sizes) and size >= sizes[rate]]  # noqa: B023
            numbers = [(place - 1) % size // before for before, size in pairwise([1, *of_rate])]
            return [place, *numbers]

        left = keep_least(arrays, found)
        kept = 0
        for rate in range(rates):
            for place in range(1, places):
                own = digits(rate, place)
                is_beaten = any(
                    sums[rate, other] <= sums[rate, place]
                    and all(x <= y for x, y in zip(digits(rate, other), own, strict=True))
                    for other in range(1, places)
                    if other != place
                )
                is_kept = sums[rate, place] != NO_TAIL and not is_beaten
                assert (found.sums[rate, place] != NO_TAIL) == is_kept
                kept += is_kept
        assert left >= kept
