"""What each reason to stop means for the searches that would come next."""

from __future__ import annotations

import pytest

from piper_ray.engine.frontier.result import Walk
from piper_ray.engine.request import SolveRequest
from piper_ray.engine.subproblems import SubProblem, best_of
from piper_ray.model.constraints import Restrictions
from piper_ray.model.events import silent
from piper_ray.model.options import SolveOptions
from piper_ray.model.solution import Solution, Status
from piper_ray.model.stop import Stop, StoppedBy
from tests.report_cases import small_instance, solution

IN_HASTE = {StoppedBy.INTERRUPT, StoppedBy.PROCESS_LOST}
FROM_OUTSIDE = {*IN_HASTE, StoppedBy.TIME_LIMIT}
BROKEN_OFF = {*FROM_OUTSIDE, StoppedBy.CHOICE_TOO_HARD, StoppedBy.INEXACT, StoppedBy.WORK_LIMIT}
AT_ITS_OWN_END = {
    StoppedBy.GAP,
    StoppedBy.OPERATOR_BLOCKS,
    StoppedBy.TOO_MANY_PLANS,
    StoppedBy.TOO_MANY_STATES,
    StoppedBy.CHOICES_MERGED,
    StoppedBy.NO_BETTER_BOUND,
    StoppedBy.TOO_SLOW,
    StoppedBy.TOO_MANY_DOWNSETS,
}


def stopped(reason: StoppedBy) -> Solution:
    return solution(Status.UNKNOWN, stopped_by=reason)


@pytest.mark.parametrize("reason", StoppedBy)
def test_what_each_reason_means(reason: StoppedBy) -> None:
    """A new reason is put in one of the sets above."""
    assert reason in BROKEN_OFF | AT_ITS_OWN_END
    assert reason.in_haste is (reason in IN_HASTE)
    assert reason.ends_all is (reason in FROM_OUTSIDE)
    assert reason.breaks_off is (reason in BROKEN_OFF)


@pytest.mark.parametrize("reason", StoppedBy)
def test_a_walk_goes_on_unless_the_reason_comes_from_outside(reason: StoppedBy) -> None:
    solved: list[int] = []

    def solve(position: int, stop: Stop[Solution]) -> Solution:  # noqa: ARG001 - as a Walk calls it
        solved.append(position)
        return stopped(reason)

    walk = Walk(
        (1, 2, 3),
        False,
        False,
        solve,
        lambda _: stopped(reason),
        lambda position: position,
        lambda plan, _: plan.devices,
    )
    walk.run(lambda _: None, Stop())
    assert solved == ([3] if reason.ends_all else [3, 2, 1])


@pytest.mark.parametrize("reason", StoppedBy)
def test_a_series_goes_on_where_a_part_has_used_its_share_of_the_time(reason: StoppedBy) -> None:
    solved: list[str] = []

    def solve(request: SolveRequest) -> Solution:
        solved.append(str(request.options.resume))
        return stopped(reason)

    request = SolveRequest(small_instance(), Restrictions(), SolveOptions(resume="kept"), None, silent, Stop())
    parts = [SubProblem(0.0, request, "") for _ in range(3)]
    found = best_of(request, parts, solve)
    goes_on = not reason.ends_all or reason is StoppedBy.TIME_LIMIT
    assert solved == (["kept", "kept/2", "kept/3"] if goes_on else ["kept"])
    assert found.stopped_by is reason
