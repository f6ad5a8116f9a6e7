"""The paper's table against recorded values: of the published implementation (greedy), and exact optima.

With exact choice on the published workloads: see test_solver_goldens.py, where each is filled once.
"""

from __future__ import annotations

import pytest

from piper_ray.evaluate import evaluate
from piper_ray.planners.published.paper_table import TmpcChoice, paper_table
from tests.lengths import long_after
from tests.support import PublishedGolden, assert_same_time, published_goldens, random_goldens

# Those whose table is filled in a second or two.
IN_TIME = [
    golden
    for golden in published_goldens()
    if (golden.workload == "bert32a100" and golden.cpu_s < 0.5) or (golden.workload == "resnet" and golden.cpu_s < 3.0)
]
BY_TIME = sorted(IN_TIME, key=lambda golden: golden.cpu_s)


@pytest.mark.long
def test_random_records() -> None:
    """Each sixteenth one, and where greedy choices lose; the solver is held against all of them."""
    exact_is_better = 0
    for golden in random_goldens():
        known, greedy_s = golden.time_per_sample_s, golden.reference
        loses = known is not None and greedy_s is not None and known < greedy_s * (1 - 1e-9)
        exact_is_better += loses
        if golden.number % 16 and not loses:
            continue
        exact = paper_table(golden.instance)
        assert_same_time(exact.time_per_sample_s, golden.time_per_sample_s, golden.number)
        if exact.plan is not None:
            evaluation = evaluate(golden.instance, exact.plan)
            assert_same_time(evaluation.time_per_sample_s, golden.time_per_sample_s, golden.number)
        if golden.reference is not None and golden.time_per_sample_s is not None:
            greedy = paper_table(golden.instance, choice=TmpcChoice.GREEDY)
            assert_same_time(greedy.time_per_sample_s, golden.reference, golden.number)
    assert exact_is_better == 4


@pytest.mark.parametrize("golden", long_after(4, BY_TIME), ids=lambda golden: golden.name)
def test_published_records(golden: PublishedGolden) -> None:
    greedy = paper_table(golden.instance, choice=TmpcChoice.GREEDY)
    assert_same_time(greedy.time_per_sample_s, golden.time_per_sample_s, golden.name)
    assert (greedy.downsets, greedy.pairs) == (golden.downsets, golden.pairs)


def test_what_these_records_cover() -> None:
    assert len([golden for golden in IN_TIME if golden.workload == "bert32a100"]) >= 20
    assert any(golden.workload == "resnet" for golden in IN_TIME)
