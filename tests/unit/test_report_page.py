"""The page about a plan: what is on it, whatever the plan and whatever its names."""

from __future__ import annotations

import dataclasses
import random
import re
from itertools import pairwise

import numpy as np
import pytest

import piper_ray
from piper_ray import planners
from piper_ray.evaluate import evaluate
from piper_ray.model.cluster import Cluster, Link
from piper_ray.model.errors import InputError
from piper_ray.model.instance import Edge, Instance, Layer, Tmpc
from piper_ray.model.plan import Plan, Stage
from piper_ray.model.schedule import AllReduce, Schedule, ScheduleName, StepTerms
from piper_ray.report.page.pictures import _Grid, memory_picture, most_by_column, placement, placements, places_of
from piper_ray.report.page.render import assumptions, page_html
from piper_ray.report.page.subject import COMPARED, subject_of, valued
from piper_ray.report.page.tables import groups, rank_groups, stage_groups, stage_table
from piper_ray.report.terminal import NO_BREAK
from piper_ray.simulate.run import SimulationOptions, simulate
from piper_ray.simulate.timeline import MemorySteps
from piper_ray.workloads.formats.load import plan_claims
from piper_ray.workloads.formats.plans import PlanClaims
from tests.lengths import long_after
from tests.page_support import Page, page, subject
from tests.report_cases import small_instance, small_plan
from tests.simulate_support import GIB, chain, cut

SECTIONS = ("figures", "findings", "placement", "stages", "timeline", "memory", "ranks", "comparison", "assumptions")


@pytest.mark.parametrize("name", long_after(2, ScheduleName))
def test_every_schedule_has_a_page(name: ScheduleName) -> None:
    instance = chain([3.0] * 4, microbatches=8, devices=4, edge_bytes=GIB / 8)
    html = page_html(subject(instance, cut([1] * 4), name.value))
    found = Page(html)
    simulation = simulate(instance, cut([1] * 4), name.value)
    assert found.title == f"chain: a plan of 4 stages under {simulation.schedule.text}"
    assert found.figure("step_s") == simulation.step_s
    for section in SECTIONS:
        assert section in found.ids
        assert found.texts[section].strip()
    assert len(found.tables["stage-table"]) == 4
    assert len(found.tables["rank-table"]) == len(simulation.ranks)
    assert len(found.ids) == len(set(found.ids))


def test_a_page_has_the_same_bytes_each_time() -> None:
    instance = chain([3.0] * 4, microbatches=8, devices=4, edge_bytes=GIB / 8)
    one, other = (page_html(subject(instance, cut([1] * 4), "interleaved")) for _ in range(2))
    assert one == other


def test_it_needs_nothing_beside_it() -> None:
    html = page_html(subject(chain([3.0] * 4, microbatches=512), cut([1] * 4), "1f1b"))
    found = Page(html)
    assert found.tags.isdisjoint({"script", "link", "iframe", "object", "embed", "form", "base", "img"})
    assert "http:" not in html
    assert "https:" not in html
    assert "@import" not in html
    for _, name, value in found.attributes:
        assert not name.startswith("on")
        if name in ("src", "href", "xlink:href"):
            assert value.startswith(("#", "data:image/png;base64,"))
    for target in re.findall(r'(?:href="#|url\(#)([^")]+)', html):
        assert target in found.ids


HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</style></svg></title><b>",
    "'onmouseover='alert(1)",
    "{{ 7 * 7 }}{% raw %}",
    "&lt;script&gt;",
    "\x1b[31m\x00\x07",
    "<!--",
    "a" * 3000,
)


def _named(texts: tuple[str, ...]) -> tuple[Instance, Plan]:
    layers = tuple(Layer(i, text, {1: (Tmpc(text, 1.0, 0.0, 0.0, GIB),)}) for i, text in enumerate(texts))
    edges = tuple(Edge(i, i + 1, 0.0) for i in range(len(texts) - 1))
    instance = Instance(layers, edges, 16, 8, 8 * GIB, GIB, name=texts[0], notes=texts)
    return instance, Plan(tuple(Stage((i,), 1, 1, {i: text}) for i, text in enumerate(texts)))


@pytest.mark.long
def test_names_stay_names() -> None:
    instance, plan = _named(HOSTILE)
    claims = PlanClaims(planner=HOSTILE[0], note=HOSTILE[1])
    hostile = page(instance, plan, "1f1b", claims)
    harmless = page(*_named(tuple(f"name{'x' * i}" for i in range(len(HOSTILE)))), "1f1b", claims)
    assert hostile.tags == harmless.tags
    assert {name for _, name, _ in hostile.attributes} == {name for _, name, _ in harmless.attributes}
    assert sum(tag == "title" for tag, _, _ in hostile.attributes) == 0
    for text in HOSTILE[:5]:
        assert text in hostile.texts["stages"]
    assert f"that of {HOSTILE[0]} ({HOSTILE[1]})" in hostile.texts[""]
    assert "\x1b" not in page_html(subject(instance, plan, "1f1b"))


def test_lone_surrogates_can_be_written() -> None:
    """The readers refuse them in names of an input, but a plan's file may have them."""
    claims = PlanClaims(planner="a\ud800b", note="\udfff")
    html = page_html(subject(chain([1.0]), cut([1]), "1f1b", claims))
    assert "that of a?b (?)." in html.encode("utf-8").decode("utf-8")


def test_proved_promised_and_simulated_stand_side_by_side() -> None:
    instance, plan = chain([3.0, 6.0, 3.0], microbatches=8), cut([1] * 3, [1, 2, 1])
    claims = PlanClaims(Schedule.of("2bw"), instance.digest, 2.5, "optimal")
    found = page(instance, plan, "2bw", claims)
    simulation = simulate(instance, plan, "2bw")
    assert found.figure("lower_bound_s") == 2.5
    assert found.figure("lower_bound_step_s") == 20.0
    assert found.figure("promised_step_s") == simulation.promised_s == 24.0
    assert found.figure("promised_time_per_sample_s") == evaluate(instance, plan).time_per_sample_s == 3.0
    assert found.figure("step_s") == simulation.step_s == 36.0
    assert found.figure("gap") == pytest.approx(1 / 6)
    assert "50.0 % slower" in found.texts["figures"]
    assert "the exact planner's: optimal" in found.texts[""]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"digest": "0" * 64}, "it is of another input, or of another cluster"),
        ({"digest": None}, "it is of another input, or of another cluster"),
        ({"schedule": Schedule.of("1f1b")}, "it is of schedule 1f1b"),
        ({"schedule": None}, "it is of no schedule"),
        ({"lower_bound_s": 3.1}, "this plan is faster than it"),
    ],
)
def test_a_bound_of_something_else_is_left_out(change: dict[str, object], why: str) -> None:
    instance, plan = chain([3.0, 6.0, 3.0], microbatches=8), cut([1] * 3, [1, 2, 1])
    claims = PlanClaims(Schedule.of("2bw"), instance.digest, 2.5, "optimal")
    claims = dataclasses.replace(claims, **change)  # type: ignore[arg-type]
    found = subject_of(valued(instance, plan, Schedule.of("2bw")), claims, ())
    assert found.lower_bound_s is None
    assert found.gap is None
    assert found.notes == (f"The lower bound in the plan's file is left out: {why}.",)


def test_claims_of_documents() -> None:
    assert plan_claims({"stages": [], "status": 5, "lower_bound_s": "fast"}) == PlanClaims()
    document = {"schema": "piper-ray/plan", "schedule": "zb-v", "lower_bound_s": 1, "instance": {"digest": "ab"}}
    assert plan_claims(document) == PlanClaims(Schedule.of("zb-v"), "ab", 1.0)
    with pytest.raises(InputError, match="lower_bound_s: not a number") as error:
        plan_claims({"schema": "piper-ray/plan", "lower_bound_s": "fast", "status": 3})
    assert len(error.value.faults) == 2


def test_a_plan_that_does_not_fit_says_so_first() -> None:
    instance = chain([3.0] * 4, memory_bytes=1.6 * GIB)
    for schedule in ("2bw", "1f1b"):
        found = page(instance, cut([1] * 4), schedule)
        assert "This plan cannot run as it is" in found.texts["faults"]
        assert "stage 1" in found.texts["faults"]
        assert found.figures["peak_memory_bytes"][0] == 2 * GIB
    assert "faults" not in page(chain([3.0] * 4), cut([1] * 4)).ids


def test_what_a_stage_costs_is_what_evaluate_says() -> None:
    instance, plan = small_instance(), small_plan()
    found = page(instance, plan)
    for row, stage in zip(found.tables["stage-table"], evaluate(instance, plan).stages, strict=True):
        for name in ("time_s", "compute_s", "communication_s", "resync_s", "memory_bytes"):
            assert row[name] == getattr(stage, name)
        assert row["in_flight"] == stage.in_flight_microbatches
        assert (row["d"], row["t"]) == (stage.data_parallel_degree, stage.tensor_parallel_degree)


def test_replicas_share_a_row_and_stand_by_themselves_below() -> None:
    instance, plan = chain([3.0, 6.0, 3.0], microbatches=8), cut([1] * 3, [1, 2, 1])
    found = page(instance, plan)
    ranks = simulate(instance, plan, "2bw").ranks
    assert len(found.tables["rank-table"]) == 3
    assert [row["compute_s"] for row in found.tables["all-ranks"]] == [rank.compute_s for rank in ranks]
    assert "4 ranks in 3 rows" in found.texts["ranks"]


@pytest.mark.parametrize("schedule", long_after(1, ["2bw", "gpipe", "1f1b", "interleaved"]))
def test_other_planners_are_simulated_under_the_same_schedule(schedule: str) -> None:
    instance = chain([3.0] * 8, microbatches=8, devices=4, memory_bytes=64 * GIB)
    found = page(instance, cut([2] * 4), schedule)
    rows = found.tables["comparison-table"]
    assert rows[0]["step_s"] == simulate(instance, cut([2] * 4), schedule).step_s
    proposed = [planners.plan(instance, name, schedule=schedule).plan for name in COMPARED]
    steps_s = [simulate(instance, plan, schedule).step_s for plan in proposed if plan is not None]
    assert [row["step_s"] for row in rows[1:] if row] == steps_s
    assert [row["relative"] for row in rows] == [row["step_s"] / rows[0]["step_s"] for row in rows]
    for name, plan in zip(COMPARED, proposed, strict=True):
        assert name in found.texts["comparison"]
        if plan is None:
            assert f"no plan: {planners.plan(instance, name, schedule=schedule).note}" in found.texts["comparison"]


@pytest.mark.long
def test_terms_of_a_step_are_those_that_the_plan_was_made_with() -> None:
    instance, plan = chain([3.0, 3.0], microbatches=8, weights_bytes=GIB), cut([1, 1], 2)
    step = StepTerms(AllReduce.RING, 0.25, 0.5)
    claims = PlanClaims(Schedule.of("1f1b"), instance.digest, 1.0, "optimal", step=step)
    found = page(instance, plan, "1f1b", claims)
    assert found.figure("step_s") == simulate(instance, plan, "1f1b", options=SimulationOptions.of(step)).step_s
    assert found.figure("lower_bound_s") == 1.0
    assert "25 % of it during backward passes: around a ring" in found.texts["assumptions"]
    assert "The optimizer takes 500 ms of each rank" in found.texts["assumptions"]
    for schedule, terms in (("gpipe", step), ("2bw", StepTerms()), ("pipedream", StepTerms())):
        elsewhere = simulate(instance, plan, schedule, options=SimulationOptions.of(terms))
        assert page(instance, plan, schedule, claims).figure("step_s") == elsewhere.step_s
    other = valued(instance, plan, Schedule.of("1f1b"))
    assert subject_of(other, claims, ()).notes == (
        "The lower bound in the plan's file is left out: it is of other terms of a step.",
    )


@pytest.mark.long
def test_rules_of_a_plan_are_told() -> None:
    instance = chain([3.0, 6.0, 3.0], microbatches=8)
    plan = dataclasses.replace(cut([1] * 3, [1, 2, 1]), keeps_order=True, in_flight=(5, 2, 1))
    found = page(instance, plan)
    assert found.figure("step_s") == found.figure("promised_step_s")
    assert "microbatches in flight as the plan says" in found.texts["assumptions"]
    assert "what jumps over stages is relayed" in found.texts["assumptions"]
    assert "ceil(s / d)" not in found.texts["assumptions"]
    assert "ceil(s / d)" in page(instance, cut([1] * 3, [1, 2, 1])).texts["assumptions"]


@pytest.mark.parametrize("name", ScheduleName)
def test_assumptions_are_of_the_schedule_and_the_input(name: ScheduleName) -> None:
    instance, plan = chain([3.0] * 4, microbatches=8, devices=4), cut([1] * 4)
    text = _assumed(instance, plan, name)
    schedule = Schedule(name)
    assert ("flush" in text) != schedule.asynchronous
    assert ("The promised time is Piper's" in text) == schedule.asynchronous
    assert ("(rank r of p holds stages r and 2p - 1 - r)" in text) == (name.value in ("zb-v", "dualpipe-v"))
    assert "Of 4 layers the input gives the time of both passes together" in text
    assert ("half of a backward pass computes gradients of weights" in text) == (
        name.value in ("zb-h1", "zb-v", "dualpipe-v")
    )
    assert "sum their gradients" not in text
    assert "sum their gradients" in _assumed(instance, cut([2, 2], 2), name)


def _assumed(instance: Instance, plan: Plan, name: ScheduleName) -> str:
    return " ".join(assumptions(instance, plan, simulate(instance, plan, name)))


def test_groups_keep_order_and_leave_nothing_out() -> None:
    rng = random.Random(1)
    for _ in range(200):
        keys = [rng.randrange(3) for _ in range(rng.randrange(1, 60))]
        most = rng.randrange(1, 12)
        found = groups(keys, most)
        assert [number for group in found for number in group] == list(range(len(keys)))
        assert len(found) <= most
        if len({*keys}) == 1:
            assert len(found) == 1


@pytest.mark.long
def test_many_stages_are_grouped() -> None:
    count = 100
    instance = chain([0.01 + 0.001 * (i % 3) for i in range(count)], microbatches=4, devices=count)
    found = subject(instance, cut([1] * count), "gpipe")
    rows = stage_groups(found.valued)
    table = stage_table(found.valued, rows)
    assert len(table.rows) == 1
    assert table.rows[0][0].text == "1-100"
    assert table.rows[0][6].text == "10.0 ms to 12.0 ms".replace(" ms", NO_BREAK + "ms")
    shown = Page(page_html(found))
    assert len(shown.tables["all-stages"]) == count
    assert len(rank_groups(found.valued)) <= 48
    assert len(shown.tables["all-ranks"]) == count
    assert len(page_html(found)) < 1_000_000


def _brute_force(steps: MemorySteps, until_s: float, columns: int) -> list[float]:
    """The most at any moment of each column, both ends counted, by going through all steps."""
    found = []
    for column in range(columns):
        start_s, end_s = (edge for edge in np.linspace(0.0, until_s, columns + 1)[column : column + 2])
        at_start = [size for time_s, size in zip(steps.time_s, steps.bytes, strict=True) if time_s <= start_s][-1]
        within = [size for time_s, size in zip(steps.time_s, steps.bytes, strict=True) if start_s < time_s <= end_s]
        found.append(max([at_start, *within]))
    return found


@pytest.mark.long
def test_columns_show_the_most_that_is_held() -> None:
    rng = random.Random(2)
    for _ in range(50):
        count = rng.randrange(1, 400)
        times_s = np.array([0.0, *sorted(rng.choice([rng.uniform(0, 10), rng.randrange(10)]) for _ in range(count))])
        steps = MemorySteps(times_s, np.array([float(rng.randrange(100)) for _ in times_s]))
        most = most_by_column(steps, 10.0)
        assert most.tolist() == _brute_force(steps, 10.0, len(most))
    simulation = simulate(chain([3.0] * 4, microbatches=8), cut([1] * 4), "1f1b")
    for rank, figures in enumerate(simulation.ranks):
        assert most_by_column(simulation.memory(rank), simulation.step_s).max() == figures.peak_memory_bytes


def test_memory_of_no_time_at_all() -> None:
    simulation = simulate(chain([0.0, 0.0]), cut([1, 1]), "1f1b")
    assert "2 ranks" in memory_picture(simulation, [[0], [1]]).picture
    assert page(chain([0.0, 0.0]), cut([1, 1]), "2bw").figure("step_s") == 0.0


def test_little_memory_has_a_scale_of_its_own() -> None:
    simulation = simulate(chain([3.0] * 2, memory_bytes=100 * GIB), cut([1, 1]), "1f1b")
    drawn = memory_picture(simulation, [[0], [1]])
    assert drawn.legend == "The height of a lane is 1.5 GiB; a device has 100 GiB."
    assert "limit" not in drawn.picture
    full = memory_picture(simulate(chain([3.0] * 2, memory_bytes=2 * GIB), cut([1, 1]), "1f1b"), [[0], [1]])
    assert full.legend == "The height of a lane is 2 GiB, a device's."
    assert full.picture.count('class="limit"') == 2


@pytest.mark.parametrize("groups", [(), (1,), (2,), (8,), (72,), (100,), (8, 72, 576), (4, 500)])
@pytest.mark.parametrize("devices", [1, 7, 64, 1000, 16_384, 100_001])
def test_every_device_has_its_place(groups: tuple[int, ...], devices: int) -> None:
    grid = _Grid.of(devices, groups)
    assert grid.cells <= 1024
    rng = random.Random(devices)
    cuts = sorted({0, devices, *(rng.randrange(devices) for _ in range(20))})
    spans = [span for first, end in pairwise(cuts) for span in grid.spans(first, end)]
    drawn = sum(width for _, _, width in spans) / grid.cell * grid.cell_devices
    assert drawn == pytest.approx(devices)
    assert max(x + width for x, _, width in spans) <= 960.0
    assert min(x for x, _, _ in spans) >= 0.0
    ordered = sorted(spans, key=lambda span: (span[1], span[0]))
    for (x, y, width), (next_x, next_y, _) in pairwise(ordered):
        assert y < next_y or x + width <= next_x + 1e-6


def test_nodes_replicas_and_what_is_left_over() -> None:
    instance = chain([3.0] * 2, degrees=(2,), microbatches=8, devices=12)
    links = (Link(100 * GIB, 4), Link(GIB))
    instance = dataclasses.replace(instance, cluster=Cluster(12, 8 * GIB, links))
    simulation = simulate(instance, cut([1, 1], 2, 2), "1f1b")
    found = placement(instance.cluster, simulation, range(2))
    assert found.legend == "A cell is one device; frames are nodes of 4. Numbers are those of stages."
    assert "stage 2: devices 4-7, 2 replicas of 2 devices" in found.picture
    assert "4 devices left over: 8-11" in found.picture
    assert found.picture.count('class="node"') == 3
    assert found.picture.count('class="c0"') == 2


@pytest.mark.parametrize(("devices", "cell", "groups"), [(128, 1, (8, 32)), (144, 1, (8, 72)), (2048, 8, (64, 512))])
def test_groups_of_groups_have_frames_around_those_of_smaller_ones(
    devices: int, cell: int, groups: tuple[int, int]
) -> None:
    inner = () if cell == 1 else (Link(200 * GIB, cell),)
    links = (*inner, Link(100 * GIB, groups[0]), Link(50 * GIB, groups[1]), Link(GIB))
    instance = chain([3.0] * 2, microbatches=devices // 2, devices=devices)
    cluster = Cluster(devices, 8 * GIB, links)
    found = placement(cluster, simulate(instance, cut([1, 1], devices // 2, 1), "1f1b"), range(2))
    boxes = [
        tuple(map(float, box))
        for box in re.findall(
            r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)" class="node"', found.picture
        )
    ]
    frames = sorted(boxes, key=lambda box: box[2] * box[3])
    count = devices // groups[0]
    assert len(frames) == count + devices // groups[1]
    for x, y, width, height in frames[:count]:
        around = [
            box for box in frames[count:]
            if box[0] < x and box[1] < y and x + width < box[0] + box[2] and y + height < box[1] + box[3]
        ]  # fmt: skip
        assert len(around) == 1
    assert f"groups of {'64 and 512' if cell > 1 else groups[1]}." in found.legend


def test_each_kind_of_devices_has_a_picture_with_its_own_frames() -> None:
    of_kind = {gpu: piper_ray.estimate("bert-large", gpu, global_batch=32) for gpu in ("A100-80", "H100-SXM")}
    instance = piper_ray.on_several_kinds(of_kind)
    plan = piper_ray.solve(instance, schedule="1f1b", threads=1).plan
    assert plan is not None
    found = placements(instance, plan, simulate(instance, plan, "1f1b"))
    assert [one.legend.split(". ")[0] for one in found] == ["A100-80", "H100-SXM"]
    for kind, one in zip(instance.cluster.kind_names, found, strict=True):
        stages = [k + 1 for k, stage in enumerate(plan.stages) if stage.kind == kind]
        assert all(f"stage {k}: devices" in one.picture for k in stages)
        assert one.picture.count("<title>stage ") == len(stages)


def test_numbers_of_stages_lie_within_a_replica_and_are_cut_short_where_they_are_many() -> None:
    links = (Link(100 * GIB, 8), Link(GIB))
    instance = chain([3.0] * 16, degrees=(4,), microbatches=8, devices=16)
    instance = dataclasses.replace(instance, cluster=Cluster(16, 8 * GIB, links))
    plan = cut([1] * 16, 2, 4)
    few, many = (
        placement(
            instance.cluster, simulate(instance, plan, Schedule(ScheduleName.INTERLEAVED, chunks)), range(16)
        ).picture
        for chunks in (8, 16)
    )
    assert ">1,3,5,7,9,11,13,15</text>" in few
    boxes = [
        (float(x), float(width))
        for x, width in re.findall(r'<rect x="([\d.]+)"[^>]* width="([\d.]+)"[^>]*class="c', few)
    ]
    for x in map(float, re.findall(r'<text x="([\d.]+)"', few)):
        assert any(x == pytest.approx(first + width / 2, abs=0.1) for first, width in boxes)
    assert ">1\N{HORIZONTAL ELLIPSIS}16</text>" in many


def test_no_node_s_border_cuts_a_stage_that_divides_it() -> None:
    instance = chain([3.0] * 4, microbatches=24, devices=24)
    degrees = (2, 12, 4, 3)
    plan = Plan(tuple(Stage((i,), d, 1, {i: "vanilla"}) for i, d in enumerate(degrees)))
    simulation = simulate(instance, plan, "2bw")
    nodes = Cluster(24, GIB, (Link(100 * GIB, 8), Link(GIB)))
    placed = {place.stages[0]: (place.first_device, place.devices) for place in places_of(simulation, nodes, range(4))}
    assert placed == {1: (0, 12), 2: (12, 4), 0: (16, 2), 3: (18, 3)}, "12 replicas lie in nodes by fours"


def test_chunks_of_a_rank_share_its_devices() -> None:
    simulation = simulate(chain([3.0] * 4, microbatches=8, devices=4), cut([1] * 4, 2), "interleaved")
    one_link = Cluster(4, GIB, (Link(GIB),))
    assert [
        (place.stages, place.first_device, place.devices) for place in places_of(simulation, one_link, range(4))
    ] == [
        ((0, 2), 0, 2),
        ((1, 3), 2, 2),
    ]
    found = page(chain([3.0] * 4, microbatches=8, devices=4), cut([1] * 4, 2), "interleaved")
    assert found.figure("devices") == 4
