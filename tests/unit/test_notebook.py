"""What plans, solutions, frontiers and simulations show of themselves: a line or two, and a small table."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest

import piper_ray
from piper_ray.model.figures import MOST_ROWS, html_table
from piper_ray.model.instance import Instance, Layer
from piper_ray.model.plan import Plan, Stage
from piper_ray.model.solution import Infeasibility, Solution, Status
from piper_ray.model.stop import StoppedBy
from tests.cli_cases import ROOT
from tests.report_cases import small_instance, small_plan, solution
from tests.simulate_support import GIB, chain, cut


class _Cells(HTMLParser):
    """Rows of cells; whatever else a table of ours may hold is an AssertionError."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.caption = ""
        self._tag = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ("table", "caption", "thead", "tbody", "tr", "th", "td")
        assert all(name == "colspan" for name, _ in attrs)
        self._tag = tag
        if tag == "tr":
            self.rows.append([])
        elif tag in ("th", "td"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self._tag == "caption":
            self.caption += data
        else:
            self.rows[-1][-1] += data


def _shown(value: object) -> _Cells:
    return _Cells(value._repr_html_())  # type: ignore[attr-defined]


def _infeasible(reason: str) -> Solution:
    return solution(Status.INFEASIBLE, lower_bound_s=float("inf"), infeasibility=Infeasibility(reason, 3.5 * GIB))


def test_a_plan() -> None:
    assert repr(small_plan()) == "Plan(2 stages on 3 devices; d x t: 2x1, 1x1)"
    assert repr(cut([1] * 9, 4, 2)) == "Plan(9 stages on 72 devices; d x t: 4x2 (9 stages))"
    assert repr(cut([1] * 20, [1, 2] * 10)).endswith("d x t: 1x1, 2x1, 1x1, 2x1, 1x1, 2x1, 1x1, ...)")
    ruled = Plan(small_plan().stages, True, (3, 1))
    assert repr(ruled) == "Plan(2 stages on 3 devices; d x t: 2x1, 1x1; order kept; in flight 3, 1)"
    assert repr(Plan(small_plan().stages, False, 3)).startswith("Plan(stages=")  # type: ignore[arg-type]
    shown = _shown(small_plan())
    assert shown.caption == "Plan: 2 stages on 3 devices"
    assert shown.rows == [
        ["stage", "layers", "d", "t", "devices"],
        ["1", "0-3 (4)", "2", "1", "2"],
        ["2", "4-5 (2)", "1", "1", "1"],
    ]


def test_many_stages_are_cut_short() -> None:
    shown = _shown(cut([1] * 100))
    assert len(shown.rows) == MOST_ROWS + 1
    assert shown.rows[8] == ["89 more"]
    assert shown.rows[-1] == ["100", "99 (1)", "1", "1", "1"]
    assert shown.rows[7][0] == "7"
    assert shown.rows[9][0] == "97"
    assert len(_shown(cut([1] * MOST_ROWS)).rows) == MOST_ROWS + 1


@pytest.mark.parametrize("stages", [3, "abc", [3], [Stage((1,), "two", 1, {})], None])  # type: ignore[arg-type]
def test_what_is_no_plan_is_shown_all_the_same(stages: object) -> None:
    plan = Plan(stages)  # type: ignore[arg-type]
    assert repr(plan) == f"Plan(stages={plan.stages!r})"
    assert _shown(plan).caption == "Plan"
    assert repr(Plan(())) == "Plan(0 stages on 0 devices)"


def test_a_solution() -> None:
    found = solution(plan=small_plan())
    assert repr(found) == "Solution(optimal under 2bw: 10.0 ms/microbatch, gap 0 %, 2 stages on 3 devices)"
    shown = _shown(found)
    assert shown.caption == "Solution: optimal"
    assert ["schedule", "2bw"] in shown.rows
    assert ["plan", "2 stages on 3 devices; d x t: 2x1, 1x1"] in shown.rows
    early = solution(Status.FEASIBLE, plan=small_plan(), lower_bound_s=0.00502, stopped_by=StoppedBy.TIME_LIMIT)
    assert repr(early).startswith("Solution(feasible (stopped by: time limit) under 2bw: 10.0 ms/microbatch, gap 50.0")


def test_solutions_without_a_plan() -> None:
    assert repr(_infeasible("no layer fits")) == "Solution(infeasible under 2bw: no layer fits)"
    assert ["least memory with a plan", "3.5 GiB"] in _shown(_infeasible("no layer fits")).rows
    unknown = solution(Status.UNKNOWN, lower_bound_s=1.0, stopped_by=StoppedBy.TIME_LIMIT)
    assert "no plan found so far; none is faster than 1.00 s/microbatch" in repr(unknown)
    assert ["no plan is faster than", "1.00 s"] in _shown(unknown).rows


def test_chunks_of_a_rank_share_its_devices() -> None:
    found = solution(plan=small_plan())
    chunked = Solution(
        found.status,
        1.0,
        1.0,
        cut([1] * 4, 2),
        found.stats,
        schedule=piper_ray.Schedule("interleaved"),  # type: ignore[arg-type]
    )
    assert repr(chunked) == (
        "Solution(optimal under interleaved, 2 chunks a rank: 1.00 s/microbatch, gap 0 %, 4 stages on 4 devices)"
    )


def test_a_simulation() -> None:
    found = piper_ray.simulate(chain([3.0] * 4), cut([1] * 4), "1f1b")
    assert repr(found) == (
        "Simulation(1f1b: step 33.0 s, 27.3 % idle, 4 ranks, stage 1 busiest, peak memory 2 GiB of 8 GiB)"
    )
    assert ["step", "33.0 s"] in _shown(found).rows
    tight = piper_ray.simulate(chain([3.0] * 4, memory_bytes=GIB), cut([1] * 4), "2bw")
    assert repr(tight).endswith("peak memory 2 GiB of 1 GiB: too much)")
    assert ["promised step", "24.0 s"] in _shown(tight).rows
    assert ["ranks", "2 of each of 2 pipelines"] in _shown(piper_ray.simulate(chain([1.0, 1.0]), cut([1, 1], 2))).rows


def _frontier(instance: Instance) -> piper_ray.Frontier:
    return piper_ray.frontier(instance, options=piper_ray.SolveOptions(threads=1))


def test_a_frontier() -> None:
    found = _frontier(small_instance())
    points = found.points()
    best_s = points[-1].time_per_sample_s
    assert best_s is not None
    steps = sum(point.is_step for point in points)
    assert repr(found).startswith(f"Frontier(2bw: 1 to 4 devices, 4 points, {steps} steps; ")
    assert repr(found).endswith("; 4 proved)")
    shown = _shown(found)
    assert shown.rows[0] == ["from devices", "time per microbatch", "gap"]
    assert len(shown.rows) == steps + 1
    flushed = piper_ray.frontier(small_instance(), schedule="gpipe", devices=[1, 2])
    assert repr(flushed).startswith("Frontier(gpipe: 1 to 2 devices, 2 points, ")
    assert _shown(flushed).caption.startswith("Frontier under gpipe: ")
    none = _frontier(chain([3.0] * 2, memory_bytes=float(GIB) / 2, devices=2))
    assert repr(none) == "Frontier(2bw: 1 to 2 devices, 2 points, 0 steps; none fits)"
    assert _shown(none).rows == [["plan", "none fits"]]


def test_names_are_escaped() -> None:
    reason = "<script>alert('x')</script> & \x1b[31m\ud800"
    html = _infeasible(reason)._repr_html_()
    assert "<script" not in html
    assert ["reason", "<script>alert('x')</script> & ?[31m?"] in _Cells(html).rows
    assert "\x1b" not in repr(_infeasible(reason))
    assert html_table("<b>", [("<i>", "<u>")], ("<s>",)).count("<") == html_table("b", [("i", "u")], ("s",)).count("<")


def test_reprs_are_short() -> None:
    many = cut([1] * 1000, [1, 2] * 500)
    for value in (many, solution(plan=small_plan()), piper_ray.simulate(chain([1.0] * 64), cut([1] * 64), "gpipe")):
        assert len(repr(value)) < 240
        assert "\n" not in repr(value)
        assert len(value._repr_html_()) < 4000


def test_an_instance_and_what_is_found_of_it(tmp_path: Path) -> None:
    piper_ray.dump(small_instance(), tmp_path / "small.toml")
    small = piper_ray.load(tmp_path / "small.toml")
    facts = "layers 6; edges 5; tensor-parallel degrees 1; devices 4 of 8 GiB; microbatches 8"
    assert repr(small) == f"Instance('small': {facts})"
    assert ["devices", "4 of 8 GiB"] in _shown(small).rows
    assert repr(small.layers[1]) == "Layer(1, 'Block_0'; t=1: 2 TMPCs)"
    found = piper_ray.evaluate(small, small_plan())
    assert repr(found).startswith("Evaluation(2bw: ")
    assert "/microbatch, 2 stages on 3 devices, stage " in repr(found)
    assert repr(piper_ray.baselines.plan(small, "gpipe")).startswith("BaselineResult(gpipe: Evaluation(")
    large = piper_ray.load(ROOT / "inputs" / "llama3-70b.toml")
    assert max(map(len, map(repr, (large, large.layers[1], found)))) < 240


def test_an_instance_that_nobody_has_looked_through() -> None:
    for instance in (Instance([5], "edges", object(), 3, None), Instance(None, None)):  # type: ignore[arg-type,list-item]
        assert repr(instance).startswith("Instance(layers=")
        assert len(repr(instance)) < 500
        assert _shown(instance).caption == "Instance"
    assert repr(Layer("a", 3, 7)) == "Layer('a', 3)"  # type: ignore[arg-type]
