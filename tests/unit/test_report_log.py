"""The solver's log: a line for each event in a pipe, a live line on a terminal."""

from __future__ import annotations

import re

import pytest
from rich.cells import cell_len

from piper_ray import __version__
from piper_ray.model.events import (
    Bounds,
    DegreesAdvanced,
    DegreesSearched,
    EvaluationAdvanced,
    EvaluationFinished,
    Event,
    IncumbentFound,
    Note,
    PartBegun,
    StepFinished,
)
from piper_ray.proposal.cells import CellBegun
from piper_ray.report.log import SolverLog
from piper_ray.report.proposal import ProposalLog
from piper_ray.report.terminal import Working
from piper_ray.report.terminal import console as make_console
from tests.report_cases import small_instance, string_console

EVENTS: list[Event] = [
    StepFinished("lattice", 0.25, "7 downsets in 7 levels"),
    IncumbentFound("chain", 0.0118, 2, 3, Bounds(0.006, 0.0118, 0.5)),
    EvaluationAdvanced(1, 0.007, 3, 7, Bounds(0.006, 0.0118, 0.6), 6.0, 2, 5, 4, 8),
    EvaluationFinished(1, 0.007, False, 0.2, 5, Bounds(0.007, 0.0118, 0.75)),
    EvaluationFinished(2, 0.009, True, 0.2, 5, Bounds(0.007, 0.0118, 0.9)),
    IncumbentFound("evaluation", 0.00725, 2, 4, Bounds(0.007, 0.00725, 0.9)),
    EvaluationFinished(3, 0.00725, False, 0.2, 5, Bounds(0.00725 * (1 - 1e-9), 0.00725, 1.25)),
    EvaluationFinished(4, 0.00725, True, 0.2, 5, Bounds(0.00725 * (1 - 1e-9), 0.00725, 1.5)),
]

EXPECTED = f"""\
piper-ray {__version__}
Workload  small: 6 layers, 5 edges, tensor-parallel degrees 1
Cluster   K = 4 devices, N = 8 microbatches, M = 8 GiB, B = 25 GiB/s
lattice           0.25 s  7 downsets in 7 levels

   #    threshold  answer       lower bound  upper bound        gap      time
   *   11.8000 ms  plan (chain)  6.00000 ms   11.8000 ms  49.1525 %    0.50 s
   1   7.00000 ms  infeasible    7.00000 ms   11.8000 ms  40.6780 %    0.75 s
   2   9.00000 ms  feasible      7.00000 ms   11.8000 ms  40.6780 %    0.90 s
   *   7.25000 ms  plan          7.00000 ms   7.25000 ms   3.4483 %    0.90 s
   3  <7.25000 ms  infeasible    7.25000 ms   7.25000 ms        0 %    1.25 s
   4   7.25000 ms  tie-break     7.25000 ms   7.25000 ms        0 %    1.50 s
"""


def test_a_pipe_gets_plain_lines() -> None:
    console, output = string_console(80)
    with SolverLog(console) as log:
        log.begin(small_instance())
        for event in EVENTS:
            log(event)
    assert output.getvalue() == EXPECTED
    assert max(cell_len(line) for line in output.getvalue().splitlines()) <= 80


def test_each_row_can_be_read_as_soon_as_it_is_known() -> None:
    console, output = string_console(80)
    with SolverLog(console) as log:
        log(EVENTS[1])
        assert "plan (chain)" in output.getvalue()


def test_several_solves_in_one_log_are_told_apart() -> None:
    console, output = string_console(80)
    with SolverLog(console) as log:
        for number, what in ((1, "1 of 3: plain"), (2, "2 of 3: sp"), (3, "3 of 3: full")):
            log(PartBegun(number, what))
            log(StepFinished("lattice", 0.25, "7 downsets in 7 levels"))
            if number != 2:  # nothing of it may be faster
                log(EvaluationFinished(1, 0.007, True, 0.2, 5, Bounds(0.007, 0.007, 0.75)))
    assert output.getvalue().splitlines() == [
        "lattice           0.25 s  7 downsets in 7 levels",
        "",
        "   #    threshold  answer       lower bound  upper bound        gap      time",
        "   -  1 of 3: plain",
        "   1   7.00000 ms  feasible      7.00000 ms   7.00000 ms        0 %    0.75 s",
        "   -  3 of 3: full",
        "   1   7.00000 ms  feasible      7.00000 ms   7.00000 ms        0 %    1.50 s",
    ]


def test_no_plan_yet_is_a_dash() -> None:
    console, output = string_console(80)
    with SolverLog(console) as log:
        log(EvaluationFinished(1, 0.007, False, 0.2, 5, Bounds(0.007, None, 0.75)))
    assert output.getvalue().splitlines()[-1].endswith("infeasible    7.00000 ms            -          -    0.75 s")


def test_a_terminal_gets_a_live_line_that_goes_away() -> None:
    console, output = string_console(80, terminal=True)
    erase_line = "\x1b[2K"
    with SolverLog(console) as log:
        log(EVENTS[2])
        line = re.sub(r"ms, \d+\.\d s,", "ms, _ s,", log.live_line().plain)
        assert line == (
            "evaluation 1 at 7.00000 ms, _ s, about 27 s left of it, gap 49.1525 %, 43% of 7 downsets, level 2 of 5, "
            "8 chunks on 4 workers"
        )
        assert cell_len(line) > 80
        shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.getvalue())
        assert max(cell_len(piece) for piece in re.split(r"[\r\n]", shown)) <= 80  # cut off, not wrapped
        log(EVENTS[3])
        assert log.live_line().plain.startswith("working, ")
    above, below = output.getvalue().rsplit("working, ", 1)
    assert "infeasible" in above
    assert erase_line in below


def test_a_search_over_degrees_has_a_row_for_each_round_and_a_live_line() -> None:
    console, output = string_console(80)
    with SolverLog(console) as log:
        log(DegreesAdvanced(1, 0.007, 3, 107, 2, Bounds(0.006, None, 0.6), 0.1))
        assert log.live_line().plain.startswith("plans up to 7.00000 ms: 3 of 107 pairs (d, t), ")
        log(DegreesSearched(1, 0.007, False, 107, 0.2, Bounds(0.007, None, 0.75)))
        log(IncumbentFound("search", 0.0072, 2, 4, Bounds(0.007, 0.0072, 0.9)))
        log(DegreesAdvanced(2, float("inf"), 0, 1_107, 64, Bounds(0.007, 0.0072, 1000.0), 0.1))
        line = log.live_line().plain
        assert line.startswith("plans: 0 of 1,107 pairs (d, t), ")
        assert line.endswith(" s, 64 at work, gap 2.7778 %")
        assert cell_len(line) <= 80
        log(DegreesAdvanced(2, float("inf"), 100, 1_100, 64, Bounds(0.007, 0.0072, 1000.0), 120.0))
        assert ", about 20 min left of them, 64 at work" in log.live_line().plain
        log(DegreesSearched(2, 0.0072, True, 5, 0.2, Bounds(0.0072, 0.0072, 1.25)))
    assert output.getvalue().splitlines()[2:] == [
        "   1   7.00000 ms  infeasible    7.00000 ms            -          -    0.75 s",
        "   *   7.20000 ms  plan          7.00000 ms   7.20000 ms   2.7778 %    0.90 s",
        "   2   7.20000 ms  feasible      7.20000 ms   7.20000 ms        0 %    1.25 s",
    ]


def test_what_is_left_of_a_time_limit_is_said_while_nothing_else_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    console, _ = string_console(80)
    clock_s = [100.0]
    monkeypatch.setattr("piper_ray.report.terminal.time.perf_counter", lambda: clock_s[0])
    with SolverLog(console, 60.0) as log:
        clock_s[0] = 120.0
        assert log.live_line().plain == "working, 20.0 s, at most 40 s left"
        log(EVENTS[1])
        assert log.live_line().plain == "working, 20.0 s, at most 40 s left, gap 49.1525 %"
        log(EVENTS[2])
        assert log.live_line().plain.startswith(
            "evaluation 1 at 7.00000 ms, 20.0 s, at most 40 s left, about 27 s left of it"
        )


def test_a_silent_phase_has_a_live_line_that_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    console, output = string_console(80, terminal=True)
    clock_s = [0.0]
    monkeypatch.setattr("piper_ray.report.terminal.time.perf_counter", lambda: clock_s[0])
    with Working("other planners", console) as working:
        assert working.live_line().plain == "other planners, 0.0 s"
        working(0, 4, "megatron")
        assert working.live_line().plain == "other planners, 0 of 4, 0.0 s, megatron"
        clock_s[0] = 30.0
        working(1, 4, "a name that is far too long for a line of eighty columns, as modules' paths are")
        assert working.live_line().plain.startswith("other planners, 1 of 4, 30.0 s, about 90 s left, a name")
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.getvalue())
    assert max(cell_len(piece) for piece in re.split(r"[\r\n]", shown)) <= 80
    assert "90 s left" in shown
    quiet, nothing = string_console(80)
    with Working("other planners", quiet):
        pass
    assert nothing.getvalue() == ""


def test_the_line_of_plan_says_which_solve_is_under_way_and_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    console, output = string_console(80, terminal=True)
    clock_s = [0.0]
    monkeypatch.setattr("piper_ray.report.proposal.time.perf_counter", lambda: clock_s[0])

    def line() -> str:
        return log.live_line().plain

    with ProposalLog(console) as log:
        assert line() == "planning, 0.0 s"
        log(CellBegun(1, 10, "microbatches of 1, 1f1b", 2048, None))
        log(EvaluationFinished(1, 0.005, False, 0.2, 5, Bounds(0.005, None, 0.75)))
        clock_s[0] = 3.0
        assert line() == "1 of 10: microbatches of 1, 1f1b, 3.0 s, here at least 10.24 s"
        clock_s[0] = 12.0
        log(CellBegun(4, 10, "microbatches of 16, interleaved", 128, 29.88))
        assert line() == "4 of 10: microbatches of 16, interleaved, 12.0 s, about 28 s left, best 29.88 s"
        assert cell_len(line()) < 80
        log(PartBegun(2, "2 of 6, one setting for all layers: sp"))
        log(IncumbentFound("chain", 0.25, 2, 3, Bounds(0.2, 0.25, 0.5)))
        assert line().endswith(", best 29.88 s, here 32.00 s, gap 20.0000 %, 2 of 6, one setting for all layers: sp")
        log.begin("what would help")
        assert line() == "what would help, 0.0 s"
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.getvalue())
    assert max(cell_len(piece) for piece in re.split(r"[\r\n]", shown)) <= 80


def test_colours_that_are_forced_bring_no_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "TTY_INTERACTIVE", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    forced = make_console(stderr=True)
    assert forced.is_terminal
    assert not forced.is_interactive


def test_without_rows_notes_still_come_and_the_live_line_has_the_gap() -> None:
    console, output = string_console(80, terminal=True)
    with SolverLog(console, verbose=False) as log:
        log(StepFinished("lattice", 0.25, "7 downsets in 7 levels"))
        log(EvaluationFinished(1, 0.007, True, 0.2, 5, Bounds(0.006, 0.008, 0.75)))
        log(Note("a worker was lost"))
        assert log.live_line().plain.endswith("gap 25.0000 %")
    text = output.getvalue()
    assert "a worker was lost" in text
    assert "threshold" not in text
    assert "lattice" not in text
