"""Devices of several kinds: what files and objects may say of them, what is refused, and how mixes of stages follow
from each other."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

import piper_ray
from piper_ray.cli.app import app
from piper_ray.engine.flush.mixes import MixLimits, with_mixes
from piper_ray.engine.kernels.flush_mixes import ends_of, may_be_first, mix_behind
from piper_ray.engine.kernels.flush_types import FlushTask
from piper_ray.model.cluster import Cluster, DeviceKind, Link
from piper_ray.model.errors import InputError, InvalidPlan, UsageError
from piper_ray.model.plan import Plan
from piper_ray.workloads.formats.documents import parse_toml
from piper_ray.workloads.formats.upstream import to_upstream
from piper_ray.workloads.formats.workload_writer import to_toml
from tests.instances import random_instance
from tests.kinds_brute_force import random_kinds

DOCUMENT = to_upstream(random_kinds(3))


def faults(document: dict[str, Any]) -> list[str]:
    with pytest.raises(InputError) as caught:
        piper_ray.load(document)
    return [str(fault) for fault in caught.value.faults]


def changed(change: str) -> dict[str, Any]:
    """The document with a fault."""
    found: dict[str, Any] = copy.deepcopy(DOCUMENT)
    match change:
        case "no rate":
            del found["bandwidthBetween"]
        case "rate of zero":
            found["bandwidthBetween"] = 0.0
        case "one kind":
            del found["kinds"][1]
        case "same name":
            found["kinds"][1]["name"] = "a"
        case "unknown key":
            found["kinds"][0]["speed"] = 3
        case "no memory":
            del found["kinds"][0]["maxMemoryPerDevice"]
        case "layer without a kind":
            del found["nodes"][0]["TMPCs"]["b"]
        case "unknown kind":
            found["nodes"][0]["TMPCs"]["c"] = {}
        case "devices with kinds":
            found["maxDevices"] = 8
        case "nodes with kinds":
            found["devicesPerNode"] = 8
        case "links with kinds":
            found["innerLinks"] = []
        case "nodes":
            found["kinds"][0] |= {"innerLinks": [{"devices": 8, "bandwidth": 9.0}], "devicesPerNode": 3}
        case "no kinds":
            del found["kinds"]
    return found


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("no rate", "bandwidthBetween: missing"),
        ("rate of zero", "bandwidthBetween: "),
        ("one kind", "kinds: "),
        ("same name", 'kinds[1].name: "a"'),
        ("unknown key", "kinds[0].speed: unknown key"),
        ("no memory", "kinds[0].maxMemoryPerDevice: missing"),
        ("layer without a kind", "nodes[0].TMPCs.b: missing"),
        ("unknown kind", "nodes[0].TMPCs.c: unknown kind"),
        ("devices with kinds", "maxDevices: not for a cluster of several kinds of devices"),
        ("nodes with kinds", "devicesPerNode: not for a cluster of several kinds of devices"),
        ("links with kinds", "innerLinks: not for a cluster of several kinds of devices"),
        ("nodes", "kinds[0].devicesPerNode: 3; expected a divisor of 8"),
        ("no kinds", "bandwidthBetween: a rate between kinds"),
    ],
)
def test_faults_of_files(change: str, expected: str) -> None:
    assert any(fault.startswith(expected) for fault in faults(changed(change)))


def test_all_faults_are_told_at_once() -> None:
    document = changed("no rate")
    del document["kinds"][0]["maxDevices"]
    document["kinds"][1]["bandwidth"] = "fast"
    del document["nodes"][0]["TMPCs"]["b"]
    document["nodes"][1]["TMPCs"] = {"b": {"1": []}, "c": {}}
    assert [fault.partition(";")[0] for fault in faults(document)] == [
        "kinds[0].maxDevices: missing",
        'kinds[1].bandwidth: not a number ("fast")',
        "bandwidthBetween: missing",
        "nodes[0].TMPCs.b: missing",
        "nodes[1].TMPCs.c: unknown kind",
        "nodes[1].TMPCs.a: missing",
        'nodes[1].TMPCs: no TMPC for devices of kind "b"',
    ]
    document["kinds"][0] |= {"name": 3, "bandwidth": 0}
    assert [fault.partition(";")[0] for fault in faults(document) if "bandwidth:" in fault or "nodes" in fault] == [
        "kinds[0].bandwidth: zero (0)",
        'kinds[1].bandwidth: not a number ("fast")',
        "nodes[0].TMPCs.b: missing",
        'nodes[1].TMPCs: no TMPC for devices of kind "b"',
    ], "c may be the name that is not known"


def test_all_faults_of_a_toml_file_are_told_at_once() -> None:
    document = {
        "cluster": {"microbatches": 8, "kinds": [{"name": "a", "devices": 0}, {"name": "b"}]},
        "types": {
            "x": {"tmpcs": [{"t": 1, "id": "v", "kind": "a", "speed": 1}]},
            "unused": {"tmpcs": [{"t": 1, "id": "v", "time_s": 1.0, "kind": "c"}]},
        },
        "layers": {"first": {"type": "x"}},
    }
    found = [fault.partition(";")[0] for fault in faults(document)]
    for expected in (
        "cluster.kinds[0].devices: zero (0)",
        "cluster.between: missing",
        "types.x.tmpcs[0].speed: unknown key",
    ):
        assert expected in found
    assert [x for x in found if "of kind" in x] == ['types.x.tmpcs: no TMPC for devices of kind "b"']


WORKLOAD = """
name = "two kinds"
[cluster]
microbatches = 8
between = "1GB/s"
kinds = [
  { name = "old", devices = 4, memory = "8GB", bandwidth = "10GB/s" },
  { name = "new", devices = 4, memory = "1GB", bandwidth = "10GB/s" },
]
[types.block]
tmpcs = [
  { t = 1, id = "v", kind = "old", time_s = 1.0, fixed = "2GB" },
  { t = 1, id = "v", kind = "new", time_s = 0.1, fixed = "2GB" },
]
[layers]
a = { type = "block" }
"""


def test_faults_of_a_cluster_and_of_layers_are_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "kinds.toml"
    path.write_text(WORKLOAD.replace('"1GB/s"', "0").replace('"v", kind = "new"', '"v", kind = "newest"'))
    with pytest.raises(InputError) as caught:
        piper_ray.load(path)
    assert [str(fault).partition(";")[0] for fault in caught.value.faults] == [
        "cluster.between: zero (0)",
        'types.block.tmpcs: a TMPC for devices of kind "newest"',
        'types.block.tmpcs: no TMPC for devices of kind "new"',
    ]


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (("1GB", "1GB"), "no plan can use its 4 devices, whose memory is too small for any layer"),
        (("1GB", "3GB"), ""),
        (('t = 1, id = "v", kind = "new"', 't = 8, id = "v", kind = "new"'), "as its TMPCs take 8 or more"),
    ],
)
def test_devices_that_no_plan_can_use_are_told(changed: tuple[str, str], why: str, tmp_path: Path) -> None:
    path = tmp_path / "kinds.toml"
    path.write_text(WORKLOAD.replace('"1GB/s"', '"1.0GB/s"').replace(*changed))
    found = run("solve", path)
    assert found.exit_code == 0
    assert ("no stage is on new: no plan" in found.output) == bool(why)
    assert why in found.output


def test_faults_of_objects() -> None:
    made = random_kinds(3)
    first, second = made.cluster.kinds
    cluster = Cluster.of_kinds([replace(first, name="z"), second], 1.0)
    stranger = replace(made, cluster=cluster)
    with pytest.raises(InputError, match='a TMPC for devices of kind "a"; expected one of z, b'):
        piper_ray.solve(stranger, schedule="1f1b")
    bad = DeviceKind("a", replace(first.cluster, memory_bytes=-1.0))
    lacking = replace(made, cluster=Cluster.of_kinds([bad, second], 1.0))
    with pytest.raises(InputError, match=r"cluster.kinds\[0\].memory_bytes"):
        piper_ray.solve(lacking, schedule="1f1b")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"between_bytes_per_s": None}, r"cluster.between_bytes_per_s: not a number"),
        ({"devices": 1000}, "cluster: figures that differ from those of its kinds"),
        ({"node_devices": 8}, "cluster: figures that differ from those of its kinds"),
        ({"kinds": ()}, r"between_bytes_per_s: 1.0, a rate between kinds of devices or sites; expected kinds or"),
        ({"kinds": None}, r"cluster.kinds: not a tuple"),
    ],
)
def test_faults_of_a_cluster_of_kinds(change: dict[str, Any], expected: str) -> None:
    made = random_kinds(3)
    own = replace(made.cluster, between_bytes_per_s=1.0)
    with pytest.raises(InputError, match=expected):
        piper_ray.solve(replace(made, cluster=replace(own, **change)), schedule="1f1b")


def test_nodes_are_whole_in_a_domain() -> None:
    links = (Link(9.0, 8), Link(1.0))
    made = random_instance(3)
    bad = replace(made, cluster=replace(made.cluster, links=links, node_devices=3))
    with pytest.raises(InputError, match=r"cluster.node_devices: 3; expected a divisor of 8"):
        piper_ray.solve(bad)
    with pytest.raises(InputError, match="devicesPerNode: 3; expected a divisor of 8"):
        piper_ray.load(to_upstream(replace(made, cluster=replace(bad.cluster, node_devices=4))) | {"devicesPerNode": 3})


def test_files_have_the_nodes_of_each_kind() -> None:
    made = random_kinds(3)
    first, second = made.cluster.kinds
    own = replace(first.cluster, links=(Link(9.0, 8), *first.cluster.links), node_devices=4)
    cluster = Cluster.of_kinds([replace(first, cluster=own), second], made.cluster.between_bytes_per_s or 0.0)
    nodes = replace(made, cluster=cluster)
    assert piper_ray.load(to_upstream(nodes)).cluster == cluster
    assert piper_ray.load(parse_toml("toml", to_toml(nodes))).cluster == cluster


def test_figures_of_all_are_not_one_kinds() -> None:
    with pytest.raises(UsageError, match="each kind of devices has its own figures"):
        piper_ray.solve(random_kinds(3), schedule="1f1b", devices=3)


@pytest.mark.parametrize("schedule", ["pipedream", "interleaved", "zb-v"])
def test_other_schedules_are_refused_by_name(schedule: str) -> None:
    with pytest.raises(UsageError, match=rf"plans for schedule {schedule}: not with devices of several kinds \(a, b\)"):
        piper_ray.solve(random_kinds(3), schedule=schedule)


def test_plans_are_checked_for_kinds() -> None:
    made = next(x for x in map(random_kinds, range(40)) if piper_ray.solve(x, schedule="1f1b").plan is not None)
    plan = piper_ray.solve(made, schedule="1f1b").plan
    assert plan is not None
    (first, *rest) = plan.stages
    with pytest.raises(InvalidPlan, match=r"valid:\n  stage 1 is on kind 'q'; the workload has a, b$"):
        piper_ray.evaluate(made, Plan((replace(first, kind="q"), *rest)), schedule="1f1b")
    many = replace(first, data_parallel_degree=made.microbatches * 8)
    with pytest.raises(InvalidPlan, match=f"devices of kind {first.kind}, .* are there"):
        piper_ray.evaluate(made, Plan((many, *rest)), schedule="1f1b")


@pytest.mark.parametrize("most", [(3,), (2, 3), (1, 0), (2, 1, 2)])
def test_mixes_follow_from_each_other(most: tuple[int, ...]) -> None:
    """As loops over all mixes and stages say. Each kind has two rates at its borders: every other border is faster."""
    kinds, stages = len(most), range(2, 5)
    last = tuple(2 * g + 1 for g in range(kinds))
    borders = tuple(tuple(last[g] - q % 2 for q in range(n + 1)) for g, n in enumerate(most))
    near = [[*range(last[g] - 1, last[g] + 1), *(x for x in last if x != last[g])] for g in range(kinds)]
    moves = [(g, *pair) for g in range(kinds) for pair in product(near[g], repeat=2)]
    of_kinds = tuple(range(min(n, 1), n + 1) for n in most)
    task = with_mixes(bare_task(moves), MixLimits(stages, of_kinds, borders, last, tuple(moves)))
    counts = [x for x in product(*(range(n + 1) for n in most)) if 0 < sum(x) < stages.stop]
    counts.sort(key=lambda x: (sum(x), x))
    mixes: list[tuple[tuple[int, ...], int, int]] = [((0,) * kinds, -1, -1)]
    mixes += [(x, first, promised) for first, promised in product(range(kinds), repeat=2) for x in counts]
    cells = len(counts)
    assert task.next_cell.shape == (1 + cells, len(moves))
    for mix, (x, first, promised) in enumerate(mixes):
        cell = 1 + counts.index(x) if mix else 0
        assert ends_of(mix, task) == (first * kinds + promised if mix else 0)
        for move, (kind, *neighbours) in enumerate(moves):
            behind, ahead = (number // 2 for number in neighbours)
            more = tuple(n + (g == kind) for g, n in enumerate(x))
            may = behind == kind if mix == 0 else (first, promised) == (behind, kind)
            for other, number, q in zip((behind, ahead), neighbours, (x[kind], x[kind] + 1), strict=True):
                may = may and (other != kind or number == (*borders[kind], -1)[min(q, most[kind] + 1)])
            expected = mixes.index((more, kind, ahead)) if may and more in counts else -1
            if mix == 0 or (first, promised) == (behind, kind):  # a tail in front of which the stage may be put
                there = task.next_cell[cell, move]
                assert (-1 if there < 0 else task.ends_ahead[move] * cells + there) == expected
            if expected >= 0:
                assert mix_behind(expected, move, task) == mix
            assert may_be_first(move, task) == (ahead == kind)
        ends = sum(x) in stages and all(n >= min(m, 1) for n, m in zip(x, most, strict=True))
        assert task.is_whole[cell] == (mix > 0 and ends)
        if kinds > 1:
            each = sorted((1 / (g + 1) for g, n in enumerate(x) for _ in range(most[g] - n)), reverse=True)
            left = each[: stages[-1] - sum(x)]
            assert task.share_left[cell, 0] == pytest.approx(sum(left) / task.microbatches)
    for mix, move in product(range(len(mixes)), range(len(moves))):
        behind = mix_behind(mix, move, task)
        if behind >= 0:  # of the stage and what is behind it
            there = task.next_cell[max(0, behind - task.ends_behind[move] * cells), move]
            assert task.ends_ahead[move] * cells + there == mix


def bare_task(moves: list[tuple[int, int, int]]) -> FlushTask:
    """With a variant for each move, of whose kind a second is the whole, half, a third of all work."""
    kind, behind, ahead = np.array(moves).T
    kinds = int(kind.max()) + 1
    numbers = np.arange(len(moves))
    fields = dict.fromkeys(FlushTask._fields, 0) | {
        "ends_behind": behind // 2 * kinds + kind,
        "ends_ahead": kind * kinds + ahead // 2,
        "move": numbers,
        "variants": numbers,
        "share_of_s": 1.0 / (1.0 + kind),
        "microbatches": 8,
    }
    return FlushTask(**fields)  # type: ignore[arg-type]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)])


def test_estimate_of_several_kinds(tmp_path: Path) -> None:
    out = tmp_path / "mixed.toml"
    asked = ("llama3-8b", "--gpu", "A100-80:1", "--gpu", "H100-SXM:2", "--global-batch", 32, "--between", "30GB/s")
    result = run("estimate", *asked, "-o", out)
    assert result.exit_code == 0
    instance = piper_ray.load(out)
    assert [(kind.name, kind.cluster.devices) for kind in instance.cluster.kinds] == [("A100-80", 8), ("H100-SXM", 16)]
    assert instance.cluster.between_bytes_per_s == 30e9
    own = {
        name: piper_ray.estimate("llama3-8b", name, nodes=nodes, global_batch=32)
        for name, nodes in (("A100-80", 1), ("H100-SXM", 2))
    }
    assert instance.digest == piper_ray.on_several_kinds(own, "30GB/s").digest
    plan = tmp_path / "plan.json"
    solved = run("solve", out, "-o", plan)
    assert "Kind      A100-80: K = 8" in solved.stdout
    assert {stage.kind for stage in piper_ray.load_plan(plan, instance).stages} <= {"A100-80", "H100-SXM"}
    assert run("simulate", out, plan).exit_code == 0
    assert run("report", out, plan, "-o", tmp_path / "page.html").exit_code == 0


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (("--gpu", "A100-80"), "--nodes is missing"),
        (("--gpu", "A100-80:2", "--gpu", "A100-80:3"), "--gpu A100-80:3: expected each kind of GPU once"),
        (("--gpu", "A100-80:2", "--gpu", "H100-SXM"), "--gpu H100-SXM: expected each kind of GPU once, with 1 node"),
        (("--gpu", "A100-80:2", "--gpu", "H100-SXM:x"), "--gpu H100-SXM:x: expected"),
        (("--gpu", "A100-80:2", "--gpu", "A100-80:2"), "--gpu A100-80:2: expected each kind of GPU once"),
        (("--gpu", "A100-80:0", "--gpu", "H100-SXM:x"), "--gpu A100-80:0, --gpu H100-SXM:x: expected each kind of GPU"),
        (
            ("--gpu", "H100-SXM", "--site", "east:2"),
            "as --gpu H100-SXM --site east:64 --site west:64\n--between is missing; expected the rate",
        ),
        (
            ("--gpu", "A100-80:2", "--gpu", "H100-SXM:2", "--nodes", "2"),
            "--nodes: --gpu A100-80:2 says how many nodes",
        ),
        (("--gpu", "A100-80", "--nodes", "2", "--between", "3GB/s"), "--between: expected GPUs of several kinds"),
        (("--gpu", "A100-80:2", "--gpu", "H100-SXM:2", "--between", "0GB/s"), "--between: expected a rate above 0"),
        (
            ("--gpu", "A100-80,H100-SXM", "--nodes", "2"),
            "--gpu A100-80: expected each kind of GPU once, with 1 node",
        ),
    ],
)
def test_mistakes_of_the_command(asked: tuple[str, ...], expected: str) -> None:
    result = run("estimate", "llama3-8b", *asked)
    assert result.exit_code != 0
    assert expected in str(result.exception or "") + result.stderr


def test_workloads_of_other_layers_do_not_join() -> None:
    one = piper_ray.estimate("llama3-8b", "A100-80", global_batch=32)
    other = piper_ray.estimate("bert-large", "H100-SXM", global_batch=32)
    with pytest.raises(UsageError, match="the same layers and the same batch"):
        piper_ray.on_several_kinds({"A100-80": one, "H100-SXM": other})


def test_a_link_may_be_a_text() -> None:
    cluster = Cluster.of_kinds([DeviceKind(name, Cluster(2, "1GB", [Link("3GB/s")])) for name in "ab"], "2GB/s")  # type: ignore[arg-type]
    assert cluster.rate_between("a", "b") == 2e9
    assert cluster.rate_between("b", "b") == 3e9
