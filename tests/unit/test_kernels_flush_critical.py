"""The kernels of critical paths against slow twins, path by path."""

from __future__ import annotations

import numpy as np

from piper_ray.engine.kernels.flush_critical import BACKWARD, FORWARD, SYNC, paths_of_1f1b, paths_of_gpipe
from piper_ray.engine.kernels.types import FloatArray
from tests.unit.test_kernels_flush import random_pipelines


def test_paths_of_gpipe_go_through_the_slowest_passes() -> None:
    for m, stages in random_pipelines(31, 300):
        forward_s, backward_s, p = stages[:, 0].copy(), stages[:, 1].copy(), len(stages)
        found = paths_of_gpipe(m, forward_s, backward_s)
        assert found.shape == (p, 3, p)
        for end, path in enumerate(found):
            counted = np.zeros((3, p))
            counted[FORWARD] += 1.0
            counted[BACKWARD, : end + 1] += 1.0
            counted[SYNC, end] += 1.0
            counted[FORWARD, forward_s.argmax()] += m - 1
            counted[BACKWARD, backward_s[: end + 1].argmax()] += m - 1
            assert (path == counted).all()


def test_paths_of_1f1b_are_the_longest_of_all_ways_behind_a_stage() -> None:
    for m, stages in random_pipelines(32, 300):
        forward_s, backward_s, p = stages[:, 0].copy(), stages[:, 1].copy(), len(stages)
        ends = np.array(sorted({p - 1, p // 2}))
        found = iter(paths_of_1f1b(m, forward_s, backward_s, ends))
        none_s = np.zeros(p)
        for end in ends.tolist():
            for q in range(end + 1):
                every = ways_past(m, q, end, p)
                longest_s = max(seconds(path, forward_s, backward_s, none_s) for path in every)
                path = next(found)
                assert any((path == way).all() for way in every)
                assert np.isclose(seconds(path, forward_s, backward_s, none_s), longest_s, rtol=1e-12)
        assert next(found, None) is None


def ways_past(m: int, q: int, end: int, p: int) -> list[FloatArray]:
    """All paths to the end of a stage that have m - w + 1 microbatches at stage q. Each goes down to some stage and up
    again, before and after these; if w = m, one of the two is w - 1 passes at a stage from q to the end."""
    w, found = min(m, q + 1), []
    base = np.zeros((3, p))
    base[FORWARD, q + 1 :] += 1.0
    base[BACKWARD, q + 1 : end + 1] += 1.0
    base[:2, q] += m - w + 1
    base[SYNC, end] += 1.0

    def down(kind: int) -> list[FloatArray]:
        ways = []
        for k in range(q + 1):
            for slow in range(k, end + 1):
                way = np.zeros((3, p))
                way[:2, k:q] += 1.0
                way[kind, slow] += min(m, k + 1) - 1
                ways.append(way)
        return ways

    def at_once(kind: int) -> list[FloatArray]:
        ways = []
        for slow in range(q, end + 1):
            way = np.zeros((3, p))
            way[kind, slow] += w - 1
            ways.append(way)
        return ways

    pairs = [(down(FORWARD), down(BACKWARD))]
    if w == m:
        pairs = [(at_once(FORWARD), down(BACKWARD)), (down(FORWARD), at_once(BACKWARD))]
    for firsts, lasts in pairs:
        found += [base + first + last for first in firsts for last in lasts]
    return found


def seconds(path: FloatArray, forward_s: FloatArray, backward_s: FloatArray, sync_s: FloatArray) -> float:
    return float(path[FORWARD] @ forward_s + path[BACKWARD] @ backward_s + path[SYNC] @ sync_s)
