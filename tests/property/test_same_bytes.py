"""Solves answer the same bytes on any number of threads, also where a gap or counted work ends them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import piper_ray
from piper_ray.model.options import SolveOptions
from piper_ray.model.schedule import CHUNKED, ScheduleName
from piper_ray.model.solution import Solution
from piper_ray.model.stop import StoppedBy
from tests.instances import random_instance, two_towers
from tests.lengths import long_after


def answer(found: Solution) -> dict[str, object]:
    """All that does not say what the search has cost in seconds or states."""
    passes = None if found.stats.degrees is None else found.stats.degrees.passes
    return {
        "status": found.status,
        "figures": [found.time_per_sample_s, found.lower_bound_s],
        "plan": found.plan,
        "schedule": found.schedule,
        "stopped_by": found.stopped_by,
        "infeasibility": found.infeasibility,
        "passes": passes,
    }


WITHOUT_CHUNKS = [ScheduleName.ONE_F_ONE_B, ScheduleName.GPIPE, ScheduleName("2bw")]


@pytest.mark.parametrize("name", long_after(3, [*WITHOUT_CHUNKS, *sorted(CHUNKED)]))
@pytest.mark.parametrize("seeds", long_after(1, [(19, 208, 236), range(3)]), ids=str)
def test_threads_change_no_byte_where_a_gap_ends_the_search(name: ScheduleName, seeds: range) -> None:
    """Under schedules with a flush, of those of seeds 19, 208 and 236 some had other bounds on several threads."""
    for seed in seeds:
        instance = random_instance(seed, most_layers=12, most_devices=12)
        options = SolveOptions(gap=0.02, threads=1)
        alone = answer(piper_ray.solve(instance, schedule=name, options=options))
        for threads in (2, 8):
            found = piper_ray.solve(instance, schedule=name, options=replace(options, threads=threads))
            assert answer(found) == alone, (seed, threads)


@pytest.mark.long
@pytest.mark.parametrize("name", long_after(1, sorted(CHUNKED)))
def test_counted_work_ends_a_search_with_the_same_bytes(name: ScheduleName, tmp_path: Path) -> None:
    """On one thread and several, and resumed; more work never makes the answer worse."""
    instance = two_towers(3, devices=4, microbatches=8, memory_bytes=50, bandwidth_bytes_per_s=3.0)
    whole = piper_ray.solve(instance, schedule=name, options=SolveOptions(threads=1, gap=0.01))
    assert whole.stats.degrees is not None
    before_s = float("inf")
    for share in (0.02, 0.5):
        options = SolveOptions(threads=1, gap=0.01, passes_limit=max(1, int(share * whole.stats.degrees.passes)))
        alone = piper_ray.solve(instance, schedule=name, options=options)
        assert alone.stopped_by is StoppedBy.WORK_LIMIT
        assert alone.time_per_sample_s is not None
        assert alone.time_per_sample_s <= before_s * (1.0 + 1e-9)
        before_s = alone.time_per_sample_s
        resumed = replace(options, threads=2, resume=str(tmp_path / "kept"))
        for other in (replace(options, threads=8), resumed, resumed):
            assert answer(piper_ray.solve(instance, schedule=name, options=other)) == answer(alone), (share, other)
