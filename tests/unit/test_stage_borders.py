"""Which link each stage hands over to the next at, as screens and plan files say."""

from __future__ import annotations

from piper_ray.model.borders import StageBorder, stage_borders
from piper_ray.model.cluster import Cluster, DeviceKind, Link
from piper_ray.model.instance import Instance
from piper_ray.model.plan import Plan, Stage
from piper_ray.model.schedule import PAPERS_SCHEDULE, Schedule, ScheduleName
from piper_ray.report.summary import border_texts
from piper_ray.runtimes.meshes import shared_groups
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
