"""The kernels are plain Python too: without the compiler they give the same bytes, and no warning."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from inspect import isfunction
from itertools import islice
from pathlib import Path
from typing import cast

import pytest

from piper_ray.compiled.jit import Kernel
from piper_ray.engine.kernels.knapsack import least_cost
from piper_ray.engine.solve import solve
from piper_ray.model.constraints import Recompute, Restrictions
from piper_ray.model.instance import Instance
from piper_ray.workloads.formats.load import load
from tests.data import WORKLOADS
from tests.instances import parallel_branches
from tests.solver_support import ONE_THREAD
from tests.support import GIB, random_goldens

ROOT = Path(__file__).resolve().parents[2]


def cases() -> list[tuple[Instance, Restrictions]]:
    bert32 = load(
        WORKLOADS["bert32a100"],
        devices=8,
        microbatches=512,
        memory_bytes=8 * GIB,
        bandwidth_bytes_per_s=25 * GIB,
    )
    free = Restrictions()
    return [
        *((golden.instance, free) for golden in islice(random_goldens(), 6)),
        (bert32, free),
        (bert32.replace(devices=64), Restrictions(recompute=Recompute.ALL_OR_NONE)),
        (bert32.replace(memory_bytes=GIB), free),
        (parallel_branches(1, 5, devices=6, microbatches=12, memory_bytes=60.0), free),
    ]


def is_compiled() -> bool:
    return not isfunction(cast(Kernel, least_cost).dispatcher())


def answers() -> list[object]:
    """All that a solve says but the times it took; as JSON has it."""
    found: list[object] = []
    for instance, restrictions in cases():
        solution = solve(instance, restrictions=restrictions, options=ONE_THREAD)
        found.append(
            {
                "status": solution.status.value,
                "time_per_sample_s": solution.time_per_sample_s,
                "lower_bound_s": solution.lower_bound_s,
                "plan": solution.plan and solution.plan.to_dict(),
                "infeasibility": solution.infeasibility and asdict(solution.infeasibility),
                "evaluations": [{**asdict(e), "seconds": 0.0} for e in solution.stats.evaluations],
            }
        )
    loaded: list[object] = json.loads(json.dumps(found))
    return loaded


def run_without_jit(*arguments: str) -> str:
    """Standard output of a Python that compiles nothing and takes every warning for an error."""
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1", "PYTHONPATH": str(ROOT)}
    finished = subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


PROGRAM = """
import json
from tests.unit.test_jit_off import answers, is_compiled
print(json.dumps([is_compiled(), answers()]))
"""


@pytest.mark.long
def test_the_same_bytes_without_the_compiler() -> None:
    assert is_compiled()
    compiled, without_jit = json.loads(run_without_jit("-c", PROGRAM))
    assert not compiled
    for number, (one, other) in enumerate(zip(answers(), without_jit, strict=True)):
        assert one == other, number


@pytest.mark.long
def test_the_kernels_keep_their_tests_without_the_compiler() -> None:
    modules = ["front", "knapsack", "bounds", "selection", "buckets"]
    files = [f"tests/unit/test_kernels_{module}.py" for module in modules]
    output = run_without_jit("-m", "pytest", "-q", "-p", "no:cacheprovider", *files, "tests/unit/test_lattice.py")
    assert " passed" in output
