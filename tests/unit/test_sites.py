"""Pipelines at each of several equal sites, and of one kind of devices each: files, mistakes, commands, launches."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

import piper_ray
from piper_ray.cli.app import app
from piper_ray.export.files import Target
from piper_ray.export.import_plan import import_plan
from piper_ray.export.targets import export_plan
from piper_ray.model.apart import as_sites, parts_of
from piper_ray.model.cluster import Cluster, DeviceKind, Link
from piper_ray.model.constraints import choices_made
from piper_ray.model.errors import InputError, InvalidPlan, UnsupportedPlan, UsageError
from piper_ray.model.figures import time_text
from piper_ray.model.instance import Batch, Edge, Instance, Layer, Tmpc
from piper_ray.model.mode import ALL_REPLICAS
from piper_ray.model.plan import Plan, Stage
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.proposal.clusters import ClusterPlan, with_nodes_before
from piper_ray.proposal.demand import FurtherKinds, PlanDemand
from piper_ray.proposal.moved import moved_between
from piper_ray.proposal.propose import propose
from piper_ray.report.clusters import print_spare, spare_document
from piper_ray.report.page.pictures import placements
from piper_ray.runtimes.runtime import RUNTIMES, RuntimeName
from piper_ray.workloads.estimate.build import EstimateRequest
from piper_ray.workloads.estimate.config import read_model
from piper_ray.workloads.estimate.hardware import load_hardware
from piper_ray.workloads.estimate.modes import Offer
from piper_ray.workloads.estimate.software import Calibration
from piper_ray.workloads.formats.workload_writer import to_toml
from tests.lengths import long_after
from tests.unit.test_plan_kinds import CONFIG

ONE_F_ONE_B = Schedule(ScheduleName.ONE_F_ONE_B)
SITE = Cluster(8, 100.0, (Link(16.0, 4), Link(4.0)))


def chain(cluster: Cluster, kinds: tuple[tuple[str, float], ...] = (("", 1.0),), microbatches: int = 16) -> Instance:
    """Four layers. kinds: names, with the time of a layer on a device of each."""
    row = {
        t: tuple(Tmpc("plain", time_s / t, weights_bytes=4.0 / t, fixed_bytes=4.0, kind=kind) for kind, time_s in kinds)
        for t in (1, 2)
    }
    layers = [Layer(v, "block", row) for v in range(4)]
    edges = [Edge(v, v + 1, 0.5) for v in range(3)]
    return Instance(layers, edges, cluster=cluster, batch=Batch(microbatches), schedule="1f1b")


AT_SITES = chain(replace(SITE, devices=16, sites=("east", "west"), between_bytes_per_s=1.0))


def of_kinds(*kinds: tuple[str, float], between: float = 1.0) -> Instance:
    return chain(Cluster.of_kinds([DeviceKind(name, SITE) for name, _ in kinds], between), kinds)


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def two_stages(d: int, t: int = 1) -> Plan:
    return Plan(tuple(Stage(own, d, t, dict.fromkeys(own, "plain")) for own in ((0, 1), (2, 3))), keeps_order=True)


def test_a_file_has_the_sites(tmp_path: Path) -> None:
    path = tmp_path / "sites.toml"
    path.write_text(to_toml(AT_SITES))
    piper_ray.dump(AT_SITES, tmp_path / "sites.json")
    for name in ("sites.toml", "sites.json"):
        again = piper_ray.load(tmp_path / name)
        assert again.cluster == AT_SITES.cluster
        assert again.digest == AT_SITES.digest
    slower = AT_SITES.replace(cluster=replace(AT_SITES.cluster, between_bytes_per_s=0.5))
    assert len({one.digest for one in (AT_SITES, slower, chain(replace(SITE, devices=16)))}) == 3


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('["east", "west"]', '["east"]', 'cluster.sites: "east"; expected a list of at least two names'),
        (
            '["east", "west"]',
            '["east", "east"]',
            'cluster.sites: "east", "east"; expected a list of at least two names',
        ),
        ("devices = 16", "devices = 15", "cluster.sites: 2 sites; expected as many at each of the 15 devices"),
        ("between = ", "# ", "cluster.between: missing"),
        ("sites = ", "# ", "cluster.between: a rate between kinds of devices or sites; expected cluster.kinds or"),
    ],
)
def test_faults_of_sites_in_a_file(old: str, new: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "sites.toml"
    text = to_toml(AT_SITES)
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(InputError) as error:
        piper_ray.load(path)
    assert told in str(error.value).replace("'", '"')


def test_what_sites_are_not_for() -> None:
    for use in (piper_ray.evaluate, piper_ray.simulate):
        with pytest.raises(UsageError, match="schedule 2bw: not with pipelines at each of several sites"):
            use(AT_SITES, two_stages(2), schedule="2bw")
    with pytest.raises(UsageError, match="plans for schedule 2bw: not with pipelines at each of several sites"):
        piper_ray.solve(AT_SITES, schedule="2bw")
    with pytest.raises(UsageError, match="a frontier under 2bw: not with pipelines at each of several sites"):
        piper_ray.frontier(AT_SITES, schedule="2bw")
    with pytest.raises(InvalidPlan, match="its 1 replicas cannot be shared out to 2 equal parts"):
        piper_ray.evaluate(AT_SITES, two_stages(1))


def test_a_ring_goes_on_to_the_next_site_by_the_links_of_all_replicas() -> None:
    """By hand: 2 of 4 replicas at each site, on nodes of 4, of stages of 2 layers."""
    whole, alone = (piper_ray.evaluate(one, two_stages(4)) for one in (AT_SITES, chain(replace(SITE, devices=16))))
    assert [stage.resync_s for stage in whole.stages] == [4.0 * 3 / 4 * 8.0 / 16 / min(2 * 1.0, 16.0)] * 2
    assert alone.stages[0].resync_s == 4.0 * 3 / 4 * 8.0 / 16 / 16.0
    assert whole.stages[0].communication_s == 2 * 0.5 / 4 / 16.0  # a stage has a node at each site
    assert alone.stages[0].communication_s == 2 * 0.5 / 4 / 4.0


def test_schedules_with_chunks_are_planned_too() -> None:
    found = piper_ray.solve(AT_SITES, schedule="interleaved", threads=1)
    assert found.plan is not None
    assert all(stage.data_parallel_degree % 2 == 0 for stage in found.plan.stages)
    assert found.time_per_sample_s == pytest.approx(
        piper_ray.evaluate(AT_SITES, found.plan, schedule=found.schedule).time_per_sample_s
    )


def test_the_faster_of_both_ways_is_written(tmp_path: Path) -> None:
    """On unlike kinds with a slow link; commands that take one pipeline name the one that takes the plan."""
    made = of_kinds(("old", 2.0), ("new", 1.0), between=0.5)
    path, out = tmp_path / "kinds.toml", tmp_path / "plan.json"
    path.write_text(to_toml(made.replace(microbatches=96)))
    alone, apart = run("solve", path), run("solve", path, "--apart", "-o", out)
    assert alone.exit_code == apart.exit_code == 0, apart.stderr
    assert "faster than the plan" in apart.stdout
    document: dict[str, Any] = json.loads(out.read_text())
    assert document["schema_version"] == 2
    assert sum(document["microbatches"].values()) == 96
    assert document["status"] == "optimal"
    assert f"valid: {time_text(document['time_per_sample_s'])}/microbatch" in run("verify", path, out).stdout
    for words in (("simulate",), ("report", "-o", tmp_path / "page.html")):
        result = run(words[0], path, out, *words[1:])
        assert result.exit_code == 2
        assert "not of a plan with pipelines of one kind of devices each, whose figures verify shows" in result.stderr
    plan = piper_ray.load_plan(out, path)
    with pytest.raises(UsageError, match="launch files for Megatron: not of a plan with pipelines of one kind"):
        export_plan(piper_ray.load(path), plan, ONE_F_ONE_B, Target.MEGATRON, 4)
    certificate = tmp_path / "plan.certificate"
    assert run("solve", path, "--apart", "-o", out, "--certificate", certificate).exit_code == 0
    silent = run("verify", path, out, "--certificate", certificate)
    assert silent.exit_code != 0
    assert "it is of plans with one pipeline" in silent.stderr


def test_equal_parts_at_equal_sites_are_one_plan() -> None:
    kinds = of_kinds(("east", 1.0), ("west", 1.0))
    stages = [replace(x, kind=kind) for kind in ("east", "west") for x in two_stages(2).stages]
    shared = Plan(tuple(stages), keeps_order=True, shares=(("east", 8), ("west", 8)))
    instance, plan = as_sites(kinds, shared)
    assert (instance.digest, plan) == (AT_SITES.digest, two_stages(4))
    assert instance.cluster.sites == ("east", "west")
    valued, joined = piper_ray.evaluate(kinds, shared), piper_ray.evaluate(instance, plan)
    assert valued.time_per_sample_s == joined.time_per_sample_s
    assert [stage.memory_bytes for stage in valued.stages] == [stage.memory_bytes for stage in joined.stages] * 2
    uneven = replace(shared, shares=(("east", 4), ("west", 12)))
    assert as_sites(kinds, uneven) == (kinds, uneven)


@pytest.mark.parametrize(
    ("shares", "told"),
    [
        ((("east", 8), ("west", 7)), "kinds have 15 microbatches, not the 16 of a batch"),
        ((("west", 8), ("east", 8)), "the kinds of the stages are not those with microbatches"),
        ((("east", 16),), "the kinds of the stages are not those with microbatches"),
    ],
)
def test_faults_of_shares(shares: tuple[tuple[str, int], ...], told: str) -> None:
    kinds = of_kinds(("east", 1.0), ("west", 1.0))
    stages = [replace(x, kind=kind) for kind in ("east", "west") for x in two_stages(2).stages]
    with pytest.raises(InvalidPlan, match=told):
        piper_ray.evaluate(kinds, Plan(tuple(stages), shares=shares))
    unknown = Plan(tuple(replace(x, kind="north") for x in stages[:2]), shares=(("north", 16),))
    assert [*parts_of(kinds, unknown)] == [
        "north: not a kind of devices that can run all layers, with its stages one after the other"
    ]
    with pytest.raises(InputError, match="expected a kind of devices and a whole number > 0"):
        piper_ray.evaluate(kinds, replace(unknown, shares=(("north", 0),)))


def demand(path: Path, runtime: RuntimeName, nodes: tuple[int, int] = (1, 1), between: float = 1e9) -> PlanDemand:
    """Two sites of nodes of 4 A100."""
    path.write_text(json.dumps(CONFIG))
    one = EstimateRequest(
        nodes=nodes[0], gpus_per_node=4, tokens=512, samples=8, batch=8192, offer=Offer(zero=ALL_REPLICAS)
    )
    further = FurtherKinds("east", (("west", "A100-80", replace(one, nodes=nodes[1])),), between)
    schedules = (ScheduleName.ONE_F_ONE_B,)
    model, hardware = read_model(str(path)), load_hardware(None)
    return PlanDemand(model, hardware, "A100-80", one, RUNTIMES[runtime], schedules, further=further)


@pytest.mark.parametrize("runtime", long_after(1, [RuntimeName.MEGATRON, RuntimeName.DEEPSPEED]))
def test_a_plan_at_sites_is_launched_and_read_back(runtime: RuntimeName, tmp_path: Path) -> None:
    asked = demand(tmp_path / "config.json", runtime)
    found = propose(asked)
    best = found.best
    assert best.instance.cluster.sites == ("east", "west")
    assert {bool(cell.estimate.instance.cluster.kinds) for cell in found.cells.cells} == (
        {False, True} if asked.runtime.kinds else {False}
    )
    for stage in best.plan.stages:
        assert stage.devices % 8 == 0
    made = export_plan(best.instance, best.plan, best.solution.schedule, Target(runtime.value), 4)
    assert any("the first 1 at east, the next 1 at west" in note for note in made.notes)
    if runtime is RuntimeName.MEGATRON:
        read = import_plan(best.instance, made.files["megatron.args"])
        assert read.plan == best.plan


def test_unlike_sites_have_pipelines_through_all(tmp_path: Path) -> None:
    asked = demand(tmp_path / "config.json", RuntimeName.MEGATRON, (1, 2))
    assert asked.ways == (asked,), "3 equal parts do not divide 8,192 samples"
    with pytest.raises(UsageError, match="runs no plan on devices of several kinds"):
        assert not demand(tmp_path / "config.json", RuntimeName.TORCHTITAN, (1, 2)).ways


def spread(request: EstimateRequest, nodes: int, experts: int) -> EstimateRequest:
    """Experts over 4 devices, and over more."""
    return replace(
        request, nodes=nodes, offer=replace(request.offer, spreads=tuple(dict.fromkeys([(4, 1), (experts, 1)])))
    )


def test_what_is_asked_of_one_site_is_asked_of_all(tmp_path: Path) -> None:
    asked = demand(tmp_path / "config.json", RuntimeName.MEGATRON)
    measured = Calibration(notes=("measured",))
    both = asked.changed(lambda request: replace(request, calibration=measured))
    assert [request.calibration for _, _, request in both.kinds] == [measured, measured]
    assert len(both.ways) == 2
    with pytest.raises(UsageError, match="measurements are of one GPU, and several are asked about"):
        piper_ray.plan("llama3-8b", {"A100-80": 1, "H100-SXM": 1}, calibrate="measured.json")


def test_a_larger_site_has_several_equal_parts(tmp_path: Path) -> None:
    """Of 1 + 2 nodes each node is a part. A ring is charged for the links of the site with the fewest replicas."""
    asked = demand(tmp_path / "config.json", RuntimeName.DEEPSPEED, (1, 2))
    asked = replace(asked, request=replace(asked.request, batch=9216))
    (way,) = asked.ways
    assert way.parts == ("east", "west", "west")
    further = replace(asked.further or FurtherKinds("", ()), others=(("west", "A100-80", spread(asked.request, 2, 8)),))
    assert replace(asked, request=spread(asked.request, 1, 4), further=further).parts == way.parts, (
        "experts lie in a part"
    )
    best = propose(asked).best
    cluster, (stage,) = best.instance.cluster, best.plan.stages
    assert (cluster.sites, cluster.at_site.devices, stage.data_parallel_degree % 3) == (way.parts, 4, 0)
    weights = sum(tmpc.weights_bytes for _, _, tmpc in choices_made(best.instance, stage))
    d, ring = stage.data_parallel_degree, 4.0 / (3 * 9216 / 8) * weights
    west, east = (ring * (d - 1) / d * 3 / (links * 1e9) for links in (2 * d // 3, d // 3))
    charged = piper_ray.evaluate(best.instance, best.plan, schedule="1f1b").stages[0].resync_s
    assert charged == pytest.approx(max(west, east))
    made = export_plan(best.instance, best.plan, best.solution.schedule, Target.DEEPSPEED, 4)
    assert any("the first 1 at east, the next 2 at west" in note for note in made.notes)
    path = tmp_path / "parts.toml"
    path.write_text(to_toml(best.instance))
    assert piper_ray.load(path).cluster.sites == way.parts
    assert "Sites     east, 2 parts of west: 4 devices" in run("info", path).stdout


def test_what_moves_between_plans_at_sites_is_counted_by_gpu(tmp_path: Path) -> None:
    """From both sites to one: its GPUs have all weights already, and of the optimizer's state what they had there."""
    asked = demand(tmp_path / "config.json", RuntimeName.DEEPSPEED, (1, 2))
    further = replace(asked.further or FurtherKinds("", ()), name="west", others=())
    rest = replace(asked, request=replace(asked.request, batch=9216, nodes=2), further=further)
    whole, left = (propose(one) for one in (replace(asked, request=replace(asked.request, batch=9216)), rest))
    plans = [ClusterPlan(asked, whole), ClusterPlan(rest, left), ClusterPlan(asked, None, "too large")]
    found = plans[1].moved_from(plans[0])
    assert left.best.devices == 8
    assert found.weights_bytes == 0.0 < found.state_bytes < found.all_bytes
    assert [before for _, before in with_nodes_before(plans)] == [None, plans[0], plans[0]]
    first, second, third = spare_document(plans)
    assert [x["nodes_of"] for x in (first, second)] == [{"east": 1, "west": 2}, {"east": 0, "west": 2}]
    assert second["state_bytes"] == found.state_bytes
    assert third["reason"] == "too large"
    console = Console(width=100, record=True, file=io.StringIO())
    print_spare(console, plans)
    text = console.export_text()
    rows = [line.split()[:3] for line in text.splitlines()]
    assert all(row in rows for row in (["east", "west", "GPUs"], ["1", "2", "12"], ["0", "2", "8"]))
    assert "1 east node and 2 west nodes: too large" in text
    elsewhere = moved_between(whole.best, left.best, "north")
    assert elsewhere.weights_bytes + elsewhere.state_bytes == pytest.approx(found.all_bytes)


def test_a_stage_has_whole_nodes_at_each_site() -> None:
    with pytest.raises(UnsupportedPlan, match="its 4 devices are not whole nodes of 4, with whole groups that share"):
        export_plan(AT_SITES, two_stages(4), ONE_F_ONE_B, Target.DEEPSPEED, 4)
    assert "the first 1 at east, the next 1 at west, and so on" in "".join(
        export_plan(AT_SITES, two_stages(8), ONE_F_ONE_B, Target.DEEPSPEED, 4).notes
    )


def test_a_page_draws_one_site_for_all() -> None:
    (found,) = placements(AT_SITES, two_stages(4), piper_ray.simulate(AT_SITES, two_stages(4)))
    assert found.legend.startswith("At each of east, west. ")
    assert "2 stages on 4 of 8 devices" in found.picture
