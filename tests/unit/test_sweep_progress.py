"""What a sweep tells of its best points, whatever the order in which they are done."""

from __future__ import annotations

import random

from piper_ray.model.constraints import Restrictions
from piper_ray.report.sweep import best_text, outcome_lines
from piper_ray.sweep.point import Point, Progress


def point(planner: str, devices: int, memory_gib: int) -> Point:
    return Point("bert", planner, devices, 512, memory_gib * 2.0**30, 25e9, Restrictions())


POINTS = [
    (point("piper", 8, 8), 2.0),
    (point("piper", 16, 16), 1.0),
    (point("piper", 64, 8), 1.0),
    (point("megatron", 16, 8), 1.0 + 1e-10),  # the same plan, its time summed in another order
    (point("piper", 16, 8), 1.0 + 2e-10),
    (point("gpipe", 4, 4), 1.001),
    (point("piper", 4, 4), None),
]


def progress_of(points: list[tuple[Point, float | None]], recorded: int = 0) -> Progress:
    found = Progress(points=len(points) + recorded, recorded=recorded)
    for one, time_s in points:
        found.note(one, {"status": "optimal", "seconds": 0.1, "cpu_s": 0.1, "time_per_sample_s": time_s})
    found.advance(1.0, 1)
    return found


def test_of_equally_fast_points_the_best_is_the_same_in_every_order() -> None:
    rng = random.Random(0)
    for _ in range(50):
        points = POINTS.copy()
        rng.shuffle(points)
        best = progress_of(points).best["bert"]
        assert best.point == point("piper", 16, 8)
        assert best.alike == 4


def test_which_of_several_is_told_and_why() -> None:
    text = best_text(progress_of(POINTS).best["bert"])
    assert text == (
        "1.00 s/microbatch at K = 16, N = 512, M = 8 GiB (piper, of 4 as fast with the fewest devices, then the "
        "least memory)"
    )
    assert best_text(progress_of(POINTS[:1]).best["bert"]).endswith("(piper)")
    assert outcome_lines(progress_of(POINTS))[1].startswith("best of bert: ")
    assert outcome_lines(progress_of(POINTS, recorded=5))[1].startswith("best of bert in this run: ")


def test_the_workers_time_is_of_those_that_are_there() -> None:
    progress = Progress(points=4, recorded=0)
    for run_s, workers in ((1.0, 0), (11.0, 2), (15.0, 1), (21.0, 2)):
        progress.advance(run_s, workers)
    assert progress.worker_s == 2 * 10.0 + 4.0 + 2 * 6.0
