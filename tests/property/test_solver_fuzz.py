"""Every mutated file that loads is solved, found infeasible, or refused with one of our errors."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from piper_ray.engine.solve import solve
from piper_ray.evaluate import evaluate
from piper_ray.model.errors import InputError, PiperRayError
from piper_ray.model.instance import Instance
from piper_ray.model.solution import Solution, Status
from piper_ray.workloads.formats.load import load
from tests.formats_support import mutated_files
from tests.solver_support import ONE_THREAD

FILES_PER_SEED = 500
LAYERS = 50  # a mutated length can make a long chain


@pytest.mark.parametrize("seed", [100])
def test_mutated_files_that_load_are_solved(seed: int, tmp_path: Path, few: bool) -> None:
    files = 200 if few else FILES_PER_SEED
    outcomes: Counter[str] = Counter()
    for path in mutated_files(seed, files, tmp_path):
        instance = loaded(path)
        if instance is None or len(instance.layers) > LAYERS:
            continue
        try:
            solution = solve(instance, options=ONE_THREAD)
        except PiperRayError:
            outcomes["refused"] += 1
            continue
        outcomes[solution.status.value] += 1
        assert_sound(instance, solution)
    assert outcomes["optimal"] > files // 10
    assert outcomes["infeasible"] > files // 40
    assert outcomes.keys() <= {"optimal", "infeasible"}


def loaded(path: Path) -> Instance | None:
    try:
        if path.suffix == ".txt":
            return load(path, devices=3, microbatches=4, memory_bytes=1e4, bandwidth_bytes_per_s=10.0)
        return load(path)
    except InputError:
        return None


def assert_sound(instance: Instance, solution: Solution) -> None:
    if solution.plan is None:
        assert solution.status is Status.INFEASIBLE
        assert solution.infeasibility is not None
        assert solution.infeasibility.reason
        least = solution.infeasibility.least_memory_bytes
        assert least is None or least > instance.memory_bytes
        return
    assert solution.status is Status.OPTIMAL
    assert solution.stopped_by is None
    assert evaluate(instance, solution.plan).time_per_sample_s == solution.time_per_sample_s
    assert solution.time_per_sample_s is not None
    assert solution.time_per_sample_s * (1 - 2e-9) <= solution.lower_bound_s <= solution.time_per_sample_s
