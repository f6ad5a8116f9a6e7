"""``plan`` and ``export`` on GPUs of several kinds: one search over cells, and launches of a mesh for each kind."""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from typer.testing import CliRunner, Result

import piper_ray
from piper_ray.cli.app import app
from piper_ray.export.files import Export, Target
from piper_ray.export.import_plan import import_plan
from piper_ray.export.launched import import_launched
from piper_ray.export.megatron_layout import plan_layout
from piper_ray.export.run_as import RunAs
from piper_ray.export.targets import export_plan
from piper_ray.model.cluster import Cluster, DeviceKind, Link
from piper_ray.model.errors import UnsupportedPlan, UsageError
from piper_ray.model.instance import Batch, Instance
from piper_ray.model.mode import ALL_REPLICAS
from piper_ray.model.plan import Plan
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.model.stop import Stop
from piper_ray.planners.apart import KindsApart
from piper_ray.proposal import cells as proposal_cells
from piper_ray.proposal import clusters, forks
from piper_ray.proposal.cells import CellSearch, Closing, Extent, cells_of
from piper_ray.proposal.demand import FurtherKinds, PlanDemand
from piper_ray.proposal.propose import FoundPlans, propose
from piper_ray.report.apart import apart_document
from piper_ray.runtimes.meshes import gpus_per_node_of
from piper_ray.runtimes.runtime import RUNTIMES, RuntimeName
from piper_ray.workloads.estimate.build import EstimateRequest
from piper_ray.workloads.estimate.config import read_model
from piper_ray.workloads.estimate.hardware import load_hardware
from piper_ray.workloads.estimate.modes import Offer
from piper_ray.workloads.formats.workload_writer import to_toml
from piper_ray.workloads.schemes.check import checked_schemes
from piper_ray.workloads.schemes.tmpcs import SchemeOffer
from tests.export_support import plan_of
from tests.lengths import long_after

CONFIG = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 8192,
    "max_position_embeddings": 512,
}
ONE_F_ONE_B = Schedule(ScheduleName.ONE_F_ONE_B)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


def demand(config: Path, runtime: RuntimeName) -> PlanDemand:
    """One node of 4 A100 and one of 8 H100."""
    old = EstimateRequest(nodes=1, gpus_per_node=4, tokens=512, batch=32, offer=Offer(zero=ALL_REPLICAS))
    new = replace(old, gpus_per_node=8)
    schedules = (ScheduleName.ONE_F_ONE_B,)
    asked = PlanDemand(read_model(str(config)), load_hardware(None), "A100-80", old, RUNTIMES[runtime], schedules)
    return replace(asked, further=FurtherKinds("A100-80", (("H100-SXM", "H100-SXM", new),), 20e9))


def test_as_many_gpus_of_other_kinds_are_another_cluster(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No search begins with the plan of another one."""
    monkeypatch.setattr(forks, "usable_cores", lambda: 1)
    known = list[list[object]]()

    def planned(asked: PlanDemand, before: list[object], *_: Any) -> clusters.ClusterPlan:
        known.append([*before])
        return clusters.ClusterPlan(asked, cast("FoundPlans", object()))

    monkeypatch.setattr(clusters, "_planned", planned)
    asked = demand(config, RuntimeName.FLAGSCALE)
    assert asked.further is not None
    ((name, gpu, new),) = asked.further.others
    old = replace(asked.request, gpus_per_node=8)
    both = [
        replace(asked, request=replace(old, nodes=n), further=replace(asked.further, others=((name, gpu, one),)))
        for n, one in ((1, replace(new, nodes=2)), (2, new))
    ]
    assert both[0].devices == both[1].devices
    plans = list(clusters.plans_of(both, Stop()))
    assert known == [[], []]
    assert [plan.nodes for plan in plans] == [{"A100-80": 1, "H100-SXM": 2}, {"A100-80": 2, "H100-SXM": 1}]


@pytest.mark.parametrize("runtime", long_after(0, [RuntimeName.MEGATRON, RuntimeName.FLAGSCALE]))
def test_one_search_finds_what_a_solve_of_each_cell_gives(config: Path, runtime: RuntimeName) -> None:
    asked = demand(config, runtime)
    found = propose(asked)
    alone: list[float] = []
    for cell in cells_of(asked, asked.estimates()[0]).cells:
        solution = piper_ray.solve(
            cell.setting.instance, restrictions=cell.restrictions, schedule=cell.schedule, gap=0.0, threads=1
        )
        assert cell.lower_s <= solution.lower_bound_s * cell.microbatches * (1.0 + 1e-9)
        if solution.time_per_sample_s is not None:
            alone.append(solution.time_per_sample_s * cell.microbatches)
    assert found.lower_s <= min(alone) * (1.0 + 1e-9)
    assert found.best.step_s <= min(alone) * (1.0 + 2e-4)
    assert {stage.kind for stage in found.best.plan.stages} <= {"A100-80", "H100-SXM"}
    assert found.demand.gpus_text == "4 A100-80 and 8 H100-SXM"
    peak = sum(one.peak_flop_per_s for one in found.best.estimate.kinds)
    assert found.best.estimate.peak_flop_per_s == peak


@pytest.mark.long
def test_schemes_of_each_kind_are_found_at_its_own_prices(config: Path) -> None:
    """They hold by the rule table at the prices of the stage's kind, and the search with them is no slower."""
    every = demand(config, RuntimeName.FLAGSCALE)
    asked = replace(every, request=replace(every.request, samples=1), tensor_parallel=(4,))
    plain, found = propose(asked), propose(replace(asked, schemes=SchemeOffer(zero=True)))
    assert found.best.step_s <= plain.best.step_s * (1.0 + 2e-4)
    assert found.schemes_save is not None
    instance = found.best.instance
    tmpcs = [tmpc for layer in instance.layers for row in layer.tmpcs.values() for tmpc in row]
    words = {(x.kind, word) for x in tmpcs for word in x.id.split("+") if word in instance.schemes}
    assert {kind for kind, word in words if word.endswith("-2")} == {"H100-SXM"}
    assert len({word for _, word in words}) == len(words), "each word is of one kind"
    held, wrong = checked_schemes(instance, None, instance.schemes)
    assert held
    assert not wrong


@pytest.mark.long
def test_searches_end_by_counted_work_with_a_plan_and_a_gap(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With work for hardly any of them they go on until there is a plan, and what they leave open is named."""
    asked = demand(config, RuntimeName.FLAGSCALE)
    least_s = propose(asked).best.step_s
    monkeypatch.setattr(proposal_cells, "_KIND_PASSES", 1)
    cells = cells_of(asked, asked.estimates()[0]).cells
    search = CellSearch(asked, cells, extent=Extent(passes=1))
    search.run()
    assert search.found[0].step_s >= least_s * (1.0 - 1e-9)
    assert search.ledger.lower_s <= least_s * (1.0 + 1e-9)
    assert any(cell.closing is Closing.LEFT_OPEN for cell in search.cells)


def instance_of(config: Path) -> Instance:
    """Of 8 A100 in nodes of 4, and 16 H100 in nodes of 8."""
    old, new = (
        piper_ray.estimate(config, gpu, nodes=2, gpus_per_node=size, tokens=512, global_batch=16)
        for gpu, size in (("A100-80", 4), ("H100-SXM", 8))
    )
    return piper_ray.on_several_kinds({"A100-80": old, "H100-SXM": new})


def on(plan: Plan, kinds: str, degrees: dict[str, int]) -> Plan:
    """Stages on A100 (a) or H100 (h), with these t."""
    names = {"a": "A100-80", "h": "H100-SXM"}
    stages = [
        replace(stage, kind=names[kind], tensor_parallel_degree=degrees[kind])
        for stage, kind in zip(plan.stages, kinds, strict=True)
    ]
    return replace(plan, stages=tuple(stages))


def exported(config: Path, counts: list[int], kinds: str, target: Target, d: int = 2, **degrees: int) -> Export:
    instance = instance_of(config)
    plan = on(plan_of(instance, counts, d=d, t=1), kinds, degrees)
    return export_plan(instance, plan, ONE_F_ONE_B, target, gpus_per_node_of(instance))


def test_flagscale_has_a_mesh_for_each_run_of_stages(config: Path) -> None:
    """By hand: 2 stages of 2 x 2 A100, then 1 of 2 x 4 H100."""
    found = exported(config, [3, 2, 3], "aah", Target.FLAGSCALE, a=2, h=4)
    hetero = yaml.safe_load(found.files["system.yaml"])["system"]["hetero"]
    assert hetero["hetero_process_meshes"] == [2, 1, 1, 2, 2, 4, 1, 1, 2, 1]
    assert hetero["hetero_device_types"] == ["A100-80", "H100-SXM"]
    assert hetero["hetero_pipeline_layer_split"] == [2, 2, 2]
    text = "2 of ADDRESS slots=4 type=A100-80; 1 of ADDRESS slots=8 type=H100-SXM"
    assert any(note.endswith(text) for note in found.notes)
    assert {"nodes 0-1 are A100-80", "node 2 is H100-SXM"} <= {*found.notes}
    places = [line.split(",")[:4] for line in found.files["ranks.csv"].splitlines()[1:]]
    expected = [[str(rank), str(rank // 4), str(rank % 4), str(rank // 4)] for rank in range(8)]
    assert places == expected + [[str(8 + rank), "2", str(rank), "2"] for rank in range(8)]


def test_meshes_of_one_kind_that_are_apart_have_names_of_their_own(config: Path) -> None:
    found = exported(config, [3, 2, 3], "aha", Target.FLAGSCALE, a=1, h=1)
    hetero = yaml.safe_load(found.files["system.yaml"])["system"]["hetero"]
    assert hetero["hetero_device_types"] == ["A100-80-1", "H100-SXM", "A100-80-2"]
    with pytest.raises(UnsupportedPlan, match=r"stages on A100-80 that do not follow each other, on 3 nodes of 4"):
        exported(config, [2, 2, 1, 1, 2], "ahaha", Target.FLAGSCALE, a=1, h=1)


def test_flagscales_meshes_are_read_back(config: Path) -> None:
    """On two kinds, on runs of one kind apart, and on one kind alone."""
    instance = instance_of(config)
    for counts, kinds, degrees in (([3, 2, 3], "aah", (2, 4)), ([3, 2, 3], "aha", (1, 1)), ([4, 4], "hh", (2, 2))):
        plan = on(plan_of(instance, counts, d=2, t=1), kinds, dict(zip("ah", degrees, strict=True)))
        system = export_plan(instance, plan, ONE_F_ONE_B, Target.FLAGSCALE, 8).files["system.yaml"]
        assert (imported := import_plan(instance, system)).plan == plan
        assert imported.schedule == ONE_F_ONE_B
    told = "hetero_device_types: ['V100']; expected the type of each mesh, A100-80"
    with pytest.raises(UsageError, match=re.escape(told)):
        import_plan(instance, system.replace("H100-SXM", "V100"))
    with pytest.raises(UsageError, match="each mesh has its own tensor parallel"):
        import_plan(instance, system, RunAs(tensor_parallel=2))


def test_ranks_of_other_layouts_fill_the_kinds_in_order(config: Path, tmp_path: Path) -> None:
    """8 A100, then 16 H100. Folders that were written here say the kind of each rank."""
    instance = instance_of(config)
    read = import_plan(instance, "Ett|tt|ttL", RunAs(data_parallel=8))
    assert read.plan == on(plan_of(instance, [3, 2, 3], d=8, t=1), "ahh", {"a": 1, "h": 1})
    assert any("fill the devices in the order of the workload (A100-80, H100-SXM)" in note for note in read.notes)
    with pytest.raises(UsageError, match="pipeline ranks of 16 devices, which do not divide the 8 of A100-80"):
        import_plan(instance, "EttttttL", RunAs(data_parallel=16))
    exported(config, [2, 2, 2, 2], "hhaa", Target.MEGATRON, a=1, h=1).write(tmp_path)
    assert [stage.kind[0] for stage in import_launched(instance, str(tmp_path)).plan.stages] == [*"HHAA"]


def test_megatrons_script_starts_what_each_node_has(config: Path) -> None:
    """Nodes of 4, of which the first has 2 ranks, then one of 6 ranks of 8 GPUs."""
    found = exported(config, [2, 1, 1, 1, 1, 2], "aaahhh", Target.MEGATRON, a=1, h=1)
    (asked,) = re.findall(r"--nproc-per-node (\$\(\(.*?\)\))", found.files["launch.sh"])
    for node, count in enumerate((2, 4, 6)):
        environment = {**os.environ, "NODE_RANK": str(node)}
        echoed = subprocess.run(["bash", "-c", f"echo {asked}"], env=environment, capture_output=True, check=True)
        assert int(echoed.stdout) == count
    assert "--nnodes 3 " in found.files["launch.sh"]
    assert {"node 0 is A100-80, of which 2 GPUs are used", "node 1 is A100-80"} <= {*found.notes}


@pytest.mark.parametrize(
    ("target", "degrees", "told"),
    [
        (Target.MEGATRON, {"a": 2, "h": 4}, "stages differ in their degrees: d=2 t=2, d=2 t=4"),
        (Target.TORCHTITAN, {"a": 2, "h": 2}, "torchtitan runs no plan on devices of several kinds"),
        (Target.YAML, {"a": 2, "h": 2}, "a launcher of your own runs no plan on devices of several kinds"),
    ],
)
def test_what_runs_no_such_plan_is_said(config: Path, target: Target, degrees: dict[str, int], told: str) -> None:
    with pytest.raises((UnsupportedPlan, UsageError), match=told):
        exported(config, [4, 4], "ah", target, **degrees)


def test_stages_with_a_weight_in_common_have_one_t(tmp_path: Path) -> None:
    tied = tmp_path / "config.json"
    tied.write_text(json.dumps({**CONFIG, "tie_word_embeddings": True}))
    with pytest.raises(UnsupportedPlan, match="stages differ in their degrees"):
        exported(tied, [4, 4], "ah", Target.FLAGSCALE, a=2, h=4)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)])


def test_the_command_writes_all(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan"
    kinds = ("--gpu", "A100-80:1", "--gpu", "H100-SXM:1", "--between", "20GB/s")
    even = tmp_path / "even.args"
    even.write_text(
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ettt|tttL --use-distributed-optimizer"
    )
    result = run("plan", config, *kinds, "--global-batch", 16, "--microbatch-size", 2, "-o", out, "--against", even)
    assert result.exit_code == 0, result.output
    assert "it has nothing but which layers a stage has" in result.stdout
    assert "ranks fill the devices in the order of the" in result.stdout
    assert " on 8 A100-80 and 8 H100-SXM, Megatron" in result.stdout
    assert "\napart     pipelines of one kind each: " in result.stdout
    search: dict[str, Any] = json.loads((out / "search.json").read_text())
    assert search["gpu"] == "A100-80 + H100-SXM"
    instance = piper_ray.load(out / "workload.toml")
    assert instance.cluster.between_bytes_per_s == 20e9
    assert run("verify", out / "workload.toml", out / "plan.json").exit_code == 0
    again = run("export", out / "workload.toml", out / "plan.json", "--to", "megatron", "-o", tmp_path / "again")
    assert again.exit_code == 0
    assert (tmp_path / "again" / "launch.sh").read_text() == (out / "launch.sh").read_text()


KINDS = ("--gpu", "A100-80:2", "--gpu", "H100-SXM:2")


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (("--gpu", "A100-80"), "--nodes is missing; expected how many nodes of A100-80"),
        (("--gpu", "A100-80:2", "--gpu", "H100-SXM"), "--gpu H100-SXM: expected each kind of GPU once"),
        (
            (*KINDS, "--runtime", "torchtitan"),
            "torchtitan runs no plan on devices of several kinds (A100-80, H100-SXM)",
        ),
        (
            (*KINDS, "--schedule", "interleaved"),
            "--schedule interleaved: on GPUs of several kinds or at several sites plans are for 1f1b",
        ),
        ((*KINDS, "--global-batch", "64,128"), "--global-batch: a table is for one kind of GPU"),
        ((*KINDS, "--candidates", "2"), "--candidates is for one kind of GPU"),
        ((*KINDS, "--calibrate", "x"), "--calibrate: measurements are of one GPU"),
        ((*KINDS, "--price", "1,2,3", "--train-tokens", "1T"), "--price has 3 prices for 2 GPUs"),
    ],
)
def test_mistakes_of_the_command(asked: tuple[str, ...], told: str, tmp_path: Path) -> None:
    result = run("plan", "llama3-8b", *asked, "-o", tmp_path)
    assert result.exit_code == 2
    assert told in result.stderr


@pytest.mark.long
def test_solve_says_whether_pipelines_of_one_kind_each_are_faster(config: Path, tmp_path: Path) -> None:
    mixed = tmp_path / "mixed.toml"
    assert run("estimate", config, *KINDS, "--global-batch", 16, "-o", mixed).exit_code == 0
    result = run("solve", mixed, "--apart", "--json")
    document: dict[str, Any] = json.loads(result.stdout)
    apart, plan_s = document["apart"], document["time_per_sample_s"] * 16
    assert sum(part["microbatches"] for part in apart["kinds"]) == 16
    assert apart["batch_s"] == max(part["batch_s"] for part in apart["kinds"])
    told = run("solve", mixed, "--apart").stdout.splitlines()
    (line,) = [line for line in told if line.startswith("pipelines of one kind each: ")]
    assert ("faster than the plan" in line) is (apart["batch_s"] < plan_s * (1.0 - 5e-4))
    one = run("solve", "inputs/bert32-a100.toml", "--apart")
    assert one.exit_code == 2
    assert "--apart is for devices of several kinds" in one.stderr


def test_a_search_that_ended_at_its_bound_has_no_time() -> None:
    assert apart_document(KindsApart((), 2.0)) == {"batch_s": None, "lower_bound_s": 2.0, "kinds": []}


def test_no_pipelines_of_one_kind_fit(tmp_path: Path) -> None:
    """Each kind has room for one of two layers, so both kinds hold the model together alone."""
    layers = [
        piper_ray.Layer(v, "block", {1: tuple(piper_ray.Tmpc("plain", 1.0, fixed_bytes=6.0, kind=x) for x in "ab")})
        for v in range(2)
    ]
    kinds = [DeviceKind(name, Cluster(1, 8.0, (Link(1.0),))) for name in "ab"]
    made = Instance(
        layers, [piper_ray.Edge(0, 1, 0.0)], cluster=Cluster.of_kinds(kinds, 1.0), batch=Batch(4), schedule="1f1b"
    )
    path = tmp_path / "apart.toml"
    path.write_text(to_toml(made))
    told = run("solve", path, "--apart")
    assert told.exit_code == 0
    assert "pipelines of one kind each: none fit" in told.stdout.splitlines()
    assert json.loads(run("solve", path, "--apart", "--json").stdout)["apart"] is None


SITES = ("--gpu", "H100-SXM", "--site", "east:1", "--site", "west:1", "--between", "2GB/s")


def test_sites_are_called_so(config: Path, tmp_path: Path) -> None:
    out, plan = tmp_path / "sites.toml", tmp_path / "plan.json"
    assert run("estimate", config, *SITES, "--global-batch", 16, "-o", out).exit_code == 0
    solved = run("solve", out, "-o", plan)
    assert "between sites" in solved.stdout
    assert "Site      east: K = 8" in solved.stdout
    assert "#  site " in solved.stdout
    refused = run("solve", out, "--schedule", "interleaved")
    assert "not with devices at several sites (east, west)" in refused.stderr
    plan.write_text(
        plan.read_text().replace('"kind": "east"', '"kind": "north"').replace('"kind": "west"', '"kind": "north"')
    )
    unknown = run("verify", out, plan)
    assert "stage 1 is on site 'north'; the workload has east, west" in unknown.stderr


@pytest.mark.long
def test_sites_are_kinds_of_one_gpu(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "sites.toml"
    assert run("estimate", config, *SITES, "--global-batch", 16, "-o", out).exit_code == 0
    instance = piper_ray.load(out)
    assert [(kind.name, kind.cluster.devices) for kind in instance.cluster.kinds] == [("east", 8), ("west", 8)]
    assert instance.cluster.kinds[0].cluster == instance.cluster.kinds[1].cluster
    assert instance.cluster.between_bytes_per_s == 2e9
    assert instance.model is not None
    assert instance.model.gpu == "H100-SXM"
    planned = run("plan", config, *SITES, "--global-batch", 64, "--microbatch-size", 1, "--dry-run")
    assert " on 8 H100-SXM at east and 8 H100-SXM at west, Megatron" in planned.stdout


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (SITES[:4], "--site: expected several sites of one GPU"),
        (SITES[:6], "--between is missing; expected the rate of a GPU between sites"),
        ((*SITES[:4], "--site", "west", *SITES[6:]), "--site west: expected each site once, with 1 node or more"),
        ((*SITES, "--nodes", "2"), "--nodes: --site east:1 says how many nodes"),
        (("--gpu", "A100-80:2", *SITES[2:]), "--site: expected several sites of one GPU"),
    ],
)
def test_mistakes_about_sites(asked: tuple[str, ...], told: str) -> None:
    result = run("estimate", "llama3-8b", *asked)
    assert result.exit_code == 2
    assert told in result.stderr


@pytest.mark.parametrize("command", ["estimate", "plan"])
def test_all_faults_of_a_cluster_are_told_at_once(command: str) -> None:
    kinds = ("--gpu", "A100-8:1", "--gpu", "H100-SXM:0", "--gpu", "B200:1")
    result = run(command, "llama3-8b", *kinds, "--domain", 12, "--between", "0GB/s", "--global-batch", 64)
    assert result.exit_code == 2
    told = " ".join(result.stderr.split())
    for fault in (
        "--gpu H100-SXM:0: expected each kind of GPU once",
        "--between: expected a rate above 0",
        "--gpu A100-8: unknown; expected one of",
        "--domain 12: expected whole nodes of 8 GPUs",
        *(["expected --out DIR for the files"] if command == "plan" else []),
    ):
        assert told.count(fault) == 1


def test_a_layout_is_shown_of_what_megatron_runs(config: Path) -> None:
    instance = instance_of(config)
    plan = plan_of(instance, [4, 4], d=2, t=1)
    assert plan_layout(instance, on(plan, "ah", {"a": 2, "h": 2})) == "Et*3|t*3L"
    assert plan_layout(instance, on(plan, "ah", {"a": 2, "h": 4})) is None
