"""Which link each stage hands over to the next at, as screens and plan files say."""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from itertools import product

import pytest

from piper_ray.export.job import ExportJob
from piper_ray.model.cluster import Cluster, DeviceKind, Link
from piper_ray.model.instance import Instance
from piper_ray.model.plan import Plan, Stage
from piper_ray.model.plan_rules import StageBorder, stage_borders
from piper_ray.model.schedule import PAPERS_SCHEDULE, Schedule, ScheduleName
from piper_ray.report.document import machine_table
from piper_ray.report.summary import border_texts
from piper_ray.runtimes.meshes import meshes_of, shared_groups
from piper_ray.runtimes.runtime import RUNTIMES, RuntimeName
from piper_ray.workloads.formats.plans import stage_documents
from tests.instances import equal_chain

ONE_F_ONE_B = Schedule(ScheduleName.ONE_F_ONE_B)
NODES = Cluster(24, 1e9, (Link(900e9, 8), Link(50e9)))


def plan_of(*kinds: str, d: int = 4) -> Plan:
    return Plan(tuple(Stage((k,), d, 1, {k: "plain"}, kind) for k, kind in enumerate(kinds)))


def on(cluster: Cluster) -> Instance:
    return equal_chain(4).replace(cluster=cluster)


def test_borders_within_nodes_and_between_them() -> None:
    plan = plan_of("", "", "")
    found = stage_borders(NODES, plan, ONE_F_ONE_B)
    assert found == (StageBorder(50e9), StageBorder(900e9, 8))  # the last two stages share a node
    assert border_texts(on(NODES), plan, ONE_F_ONE_B) == ["50 GB/s", "900 GB/s within 8", ""]
    last_but_one = stage_documents(on(NODES), plan, ONE_F_ONE_B)[1]
    assert last_but_one["to_next"] == {"bandwidth_bytes_per_s": 900e9, "group_devices": 8}
    assert stage_borders(NODES, plan, PAPERS_SCHEDULE) == (StageBorder(50e9),) * 2
    assert stage_borders(NODES, plan_of("", "", d=4), PAPERS_SCHEDULE) == (StageBorder(900e9, 8),)


def test_borders_between_kinds() -> None:
    kinds = [DeviceKind(name, Cluster(8, 1e9, (Link(rate),))) for name, rate in (("old", 25e9), ("new", 50e9))]
    cluster = Cluster.of_kinds(kinds, 10e9)
    texts = border_texts(on(cluster), plan_of("old", "old", "new", d=2), ONE_F_ONE_B)
    assert texts == ["25 GB/s", "10 GB/s to new", ""]


def test_launch_files_know_how_many_devices_of_a_group_run() -> None:
    """64 of 72: a stage in each domain, or a quarter of one."""
    domains = Cluster(288, 1e9, (Link(900e9, 72), Link(50e9)), node_devices=4)
    of = {d: Plan(tuple(Stage((k,), d, 8, {k: "plain"}) for k in range(288 // (d * 8 + 8)))) for d in (8, 32)}
    assert [len(plan.stages) for plan in of.values()] == [4, 1]
    assert shared_groups(of[8], ONE_F_ONE_B, domains) == [(72, 64, 1)]
    assert shared_groups(of[32], ONE_F_ONE_B, domains) == [(72, 64, 0)]


def test_nothing_is_said_where_links_do_not_differ() -> None:
    one = Cluster(24, 1e9, (Link(50e9),))
    assert "to_next" not in stage_documents(on(one), plan_of("", ""), ONE_F_ONE_B)[0]
    assert stage_borders(NODES, plan_of("", "", "", ""), Schedule(ScheduleName.INTERLEAVED, 2)) == ()


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("d", "stages", "told"),
    [
        (60, 3, ([8] * 7 + [4]) * 3),  # a stage of 60 in each domain of 72
        (12, 8, [8] * 12),  # two stages in the first domain, and six in the other
        (12, 7, [8, 4] + [8] * 9),  # one in the first
        (120, 1, ([8] * 7 + [4]) * 2),  # half a stage in each
        (150, 1, ([8] * 6 + [2]) * 3),
        (100, 1, ([8] * 6 + [2]) * 2),
        (68, 1, [8] * 8 + [4]),
    ],
)
def test_nodes_of_launch_files_lie_in_one_group_each(d: int, stages: int, told: list[int]) -> None:
    """The processes of each node of 8, as torchrun is told them and as ranks.csv has them."""
    cluster = Cluster(288, 1e9, (Link(900e9, 72), Link(5e9)), node_devices=8)
    instance = equal_chain(stages).replace(cluster=cluster)
    plan = Plan(tuple(Stage((k,), d, 1, {k: "plain"}) for k in range(stages)))
    job = ExportJob(instance, plan, ONE_F_ONE_B, RUNTIMES[RuntimeName.MEGATRON], 8)
    placed = Counter(
        mesh.place(rank)[0] for mesh in job.meshes for rank in range(mesh.first_rank, mesh.first_rank + mesh.devices)
    )
    assert [placed[node] for node in range(job.nodes)] == told
    processes = job.torchrun.split("--nproc-per-node ")[1].split(" --node-rank")[0]
    script = f"for NODE_RANK in {' '.join(map(str, range(job.nodes)))}; do echo {processes}; done"
    assert [int(word) for word in subprocess.check_output(["bash", "-c", script]).split()] == told


def test_info_draws_the_borders_of_each_kind() -> None:
    """A gigabyte between two stages of a plan takes as long as ``info`` says."""
    nodes = {"old": (Link(400e9, 4), Link(20e9)), "new": (Link(900e9, 8, uplink_bytes_per_s=100e9), Link(50e9))}
    cluster = Cluster.of_kinds([DeviceKind(name, Cluster(16, 1e9, links)) for name, links in nodes.items()], 10e9)
    columns, rows = machine_table(on(cluster))
    assert [column.head for column in columns] == ["A GB of a device", "old", "new"]
    assert {row[0]: row[1:] for row in rows[: rows.index(next(row for row in rows if "summed" in row[0]))]} == {
        "groups": ["4 at 400 GB/s, 16 at 20 GB/s", "8 at 900 GB/s, 16 at 50 GB/s"],
        "shared uplinks": ["", "100 GB/s of 8"],
        "to the next stage, within 4 (1f1b, gpipe)": ["2.500 ms", ""],
        "to the next stage, within 8 (1f1b, gpipe)": ["", "1.111 ms"],
        "to the next stage": ["50.00 ms", "80.00 ms"],
        "the same, if one of a group sends (1f1b, gpipe)": ["50.00 ms", "20.00 ms"],
        "to another kind": ["100.0 ms"] * 2,
    }
    for size, expected_s in ((1, 0.02), (4, 0.04)):
        plan = Plan(tuple(Stage((k,), size, 1, {k: "plain"}, "new") for k in range(16 // size)))
        slowest = min(border.bandwidth_bytes_per_s for border in stage_borders(cluster, plan, ONE_F_ONE_B))
        assert 1e9 / slowest == pytest.approx(expected_s)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_launch_files_put_stages_that_are_charged_within_a_node_there(size: int) -> None:
    """Of all orders of up to seven stages on two kinds, whose runs have nodes of their own."""
    own = {name: Cluster(64, 1e9, (Link(900e9, node), Link(50e9))) for name, node in (("a", 4), ("b", 8))}
    cluster = Cluster.of_kinds([DeviceKind(*kind) for kind in own.items()], 10e9)
    within = 0
    for kinds in (kinds for count in range(2, 8) for kinds in product("ab", repeat=count)):
        plan = plan_of(*kinds, d=size)
        meshes = meshes_of(plan, ONE_F_ONE_B, {"a": 4, "b": 8}, cluster)
        assert [mesh.kind for mesh in meshes for _ in range(mesh.ranks)] == [*kinds]
        node_of = [mesh.place(mesh.first_rank + rank)[0] for mesh in meshes for rank in range(mesh.devices)]
        for place, kind in enumerate(kinds):
            if cluster.of_kind(kind).border_periods(size, kinds.count(kind))[0]:  # its replicas share a node
                assert len({*node_of[place * size : (place + 1) * size]}) == 1, kinds
        for place, border in enumerate(stage_borders(cluster, plan, ONE_F_ONE_B)):
            if border.group_devices is not None:
                within += 1
                assert len({*node_of[place * size : (place + 2) * size]}) == 1, kinds
    assert within
