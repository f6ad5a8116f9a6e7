"""Whole plans of random instances: what asynchronous 1F1B promises, holds in memory and delivers."""

from __future__ import annotations

from itertools import islice

import pytest

from piper_ray.engine.solve import solve
from piper_ray.evaluate import evaluate
from piper_ray.simulate.run import InFlightRule, SimulationOptions, simulate
from tests.solver_support import ONE_THREAD
from tests.support import random_goldens


def test_the_promise_and_the_memory_are_those_of_the_referee(few: bool) -> None:
    kept = broken = 0
    for golden in islice(random_goldens(), 30 if few else 75):
        instance = golden.instance
        plan = solve(instance, options=ONE_THREAD).plan
        if plan is None:
            continue
        evaluation = evaluate(instance, plan)
        found = simulate(instance, plan, "2bw")
        assert found.steady, golden.number
        assert found.promised_s == pytest.approx(instance.microbatches * evaluation.time_per_sample_s, rel=1e-9)
        assert found.time_per_sample_s >= evaluation.time_per_sample_s * (1 - 1e-9)
        assert found.in_flight == tuple(stage.in_flight_microbatches for stage in evaluation.stages)
        for rank in found.ranks:
            (stage,) = rank.stages
            assert rank.peak_memory_bytes == pytest.approx(evaluation.stages[stage].memory_bytes, rel=1e-12)
        kept += bool(found.keeps_promise)
        broken += not found.keeps_promise
        sustaining = SimulationOptions(in_flight=InFlightRule.SUSTAINING)
        assert simulate(instance, plan, "2bw", options=sustaining).keeps_promise, golden.number
    assert kept > 15
    assert broken > 1
