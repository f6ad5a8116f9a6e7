"""Which levels of links are searched, and what is said where some are not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

import piper_ray
from piper_ray.engine.frontier.result import CurveAdvanced
from piper_ray.engine.request import SolveRequest
from piper_ray.engine.subproblems import least_s, solve_on_levels
from piper_ray.model.cluster import Cluster, Link, SpreadCluster
from piper_ray.model.constraints import AllDevices, Restrictions
from piper_ray.model.errors import InputError
from piper_ray.model.events import silent
from piper_ray.model.instance import Instance
from piper_ray.model.options import SolveOptions
from piper_ray.model.solution import Solution, Status
from piper_ray.model.stop import Stop, StoppedBy, StopSearch
from piper_ray.report.summary import links_text
from piper_ray.workloads.formats.upstream import to_upstream
from piper_ray.workloads.formats.workload_writer import to_toml
from tests.instances import equal_chain
from tests.solver_support import ONE_THREAD

LINKS = (Link(4e9, 2), Link(2e9, 4), Link(1e9))


def levelled(devices: int = 8) -> Instance:
    """Eight layers of 6 s each, next to nothing to send."""
    one = equal_chain(8, devices=devices, microbatches=8, memory_bytes=1e6, bandwidth_bytes_per_s=1e9)
    return one.replace(cluster=Cluster(devices, 1e6, LINKS))


@dataclass
class Solves:
    """Answers as told, and keeps what it was asked. say: of the instance's devices and the real answer."""

    say: Callable[[int, Solution], Solution] = lambda _, found: found
    asked: list[SolveRequest] = field(default_factory=list)

    def __call__(self, request: SolveRequest) -> Solution:
        self.asked.append(request)
        one_link = request.instance.replace(cluster=replace(request.instance.cluster, links=(Link(1e9),)))
        return self.say(request.instance.devices, piper_ray.solve(one_link, schedule="2bw", options=ONE_THREAD))

    @property
    def devices(self) -> list[int]:
        return [request.instance.devices for request in self.asked]


def on_levels(solves: Solves, instance: Instance, restrictions: Restrictions = Restrictions()) -> Solution:
    options = SolveOptions(threads=1, resume="folder")
    return solve_on_levels(SolveRequest(instance, restrictions, options, None, silent, Stop()), solves)


def test_levels_end_with_all_devices() -> None:
    cluster = levelled().cluster
    two, four, eight = cluster.levels()
    assert two == Cluster(2, 1e6, (Link(4e9),))
    assert four == SpreadCluster(4, 1e6, (Link(4e9, 2), Link(2e9)))
    assert eight == SpreadCluster(8, 1e6, LINKS)
    assert levelled(devices=3).cluster.levels()[1:] == (SpreadCluster(3, 1e6, (Link(4e9, 2), Link(2e9))),)
    assert replace(eight, devices=7).levels()[-1] == SpreadCluster(7, 1e6, LINKS), "a spread one stays so"
    assert eight.holding(2) is eight
    assert levelled(devices=2).cluster.levels() == (Cluster(2, 1e6, (Link(4e9),)),)
    one = Cluster(8, 1e6, (Link(1.0),))
    assert one.levels() == (one,)


def test_shared_uplinks_are_kept_in_files_and_tell_workloads_apart(tmp_path: Path) -> None:
    plain, path = levelled(), tmp_path / "shared.toml"
    links = (replace(LINKS[0], uplink_bytes_per_s=3e9), *LINKS[1:])
    shared = plain.replace(cluster=replace(plain.cluster, links=links))
    path.write_text(to_toml(shared), encoding="utf-8")
    for read in (piper_ray.load(path), piper_ray.load(to_upstream(shared))):
        assert read.cluster.links == links
        assert read.digest == shared.digest != plain.digest
    assert links_text(shared.cluster) == "1 GB/s, 2 GB/s within 4, 4 GB/s within 2 with 3 GB/s out of them"
    path.write_text(to_toml(shared).replace('uplink = "3GB/s"', "uplink = 0"), encoding="utf-8")
    with pytest.raises(InputError, match=r"cluster.links\[0\].uplink: zero"):
        piper_ray.load(path)
    wrong = (*LINKS[:2], replace(LINKS[2], uplink_bytes_per_s=-1.0))
    with pytest.raises(InputError, match=r"links\[2\].uplink_bytes_per_s: expected None"):
        piper_ray.solve(plain.replace(cluster=replace(plain.cluster, links=wrong)))


def test_who_sends_shares_an_uplink() -> None:
    """Two stages on nodes of 4: the devices of one send at the border, all of the node in a ring."""
    cluster = Cluster(8, 1.0, (Link(100.0, 4, uplink_bytes_per_s=12.0), Link(8.0)))
    assert [cluster.level_bytes_per_s(1, sending) for sending in (1, 2, 4, 8)] == [8.0, 6.0, 3.0, 3.0]
    assert cluster.bandwidth_bytes_per_s == cluster.holding(8).bandwidth_bytes_per_s == 3.0
    assert cluster.holding(4).bandwidth_bytes_per_s == 100.0
    assert cluster.replicas_link(8, 1).bandwidth_bytes_per_s == 12.0  # what leaves a node together


def test_a_slower_inner_link_is_none() -> None:
    cluster = Cluster(8, 1.0, (Link(1.0, 4), Link(2.0)))
    assert cluster.holding(4).bandwidth_bytes_per_s == 2.0
    assert cluster.replicas_link(4, 1) == Link(2.0)


@pytest.mark.parametrize(
    ("d", "t", "rate"),
    [
        (2, 1, 900.0),
        (8, 1, 900.0),
        (4, 2, 900.0),
        (2, 4, 900.0),
        (2, 8, 50.0),  # one of each node
        (16, 1, 400.0),  # 8 links out of each node
        (64, 1, 400.0),
        (64, 2, 200.0),
        (12, 1, 200.0),  # 4 and 4 and 4, wherever they are
        (3, 1, 50.0),  # may be in three nodes
        (6, 1, 100.0),
        (3, 2, 50.0),
        (5, 8, 50.0),
        (2, 3, 50.0),
        (2, 16, 50.0),
    ],
)
def test_replicas_have_the_link_that_they_surely_share(d: int, t: int, rate: float) -> None:
    cluster = Cluster(512, 1.0, (Link(900.0, 8), Link(50.0)))
    assert cluster.replicas_link(d, t).bandwidth_bytes_per_s == rate


def test_a_fast_network_is_held_up_by_the_node() -> None:
    cluster = Cluster(64, 1.0, (Link(300.0, 8), Link(100.0)))
    assert cluster.replicas_link(16, 1).bandwidth_bytes_per_s == 300.0
    assert cluster.replicas_link(16, 4).bandwidth_bytes_per_s == 200.0


def test_smaller_levels_are_left_out_where_work_alone_takes_longer() -> None:
    solves = Solves()
    found = on_levels(solves, levelled())
    assert solves.devices == [8]
    assert found.status is Status.OPTIMAL


def test_those_that_may_be_faster_are_searched_with_checkpoints_of_their_own() -> None:
    def slow_on_all(devices: int, found: Solution) -> Solution:
        return replace(found, time_per_sample_s=99.0, plan=None) if devices == 8 else found

    solves = Solves(slow_on_all)
    found = on_levels(solves, levelled())
    assert solves.devices == [8, 4], "what two devices take is clear then"
    assert [request.options.resume for request in solves.asked] == ["folder", "folder/2"]
    assert solves.asked[1].options.within_s == 99.0
    assert found.time_per_sample_s == pytest.approx(12.0)
    assert found.plan is not None
    assert found.plan.devices == 4


@pytest.mark.parametrize("schedule", ["2bw", "1f1b", "interleaved"])
def test_a_plan_within_a_node_takes_what_it_takes_there(schedule: str) -> None:
    """A search of all devices charges the outer link, also for a plan of two; that of two devices then finds nothing
    faster."""
    instance = equal_chain(4, devices=4, microbatches=8, memory_bytes=1e6, bandwidth_bytes_per_s=1e9)
    instance = instance.replace(cluster=Cluster(4, 1e6, (Link(1e9, 2), Link(0.01))))
    of_two = piper_ray.solve(instance, devices=2, schedule=schedule, options=ONE_THREAD)
    asked = list[int]()

    def solve(request: SolveRequest) -> Solution:
        asked.append(request.instance.devices)
        if request.instance.devices == 4:
            return replace(of_two, time_per_sample_s=99.0, status=Status.FEASIBLE)
        assert request.options.within_s is not None
        assert request.options.within_s < 99.0, "known at its own time"
        return replace(of_two, plan=None, time_per_sample_s=None, status=Status.UNKNOWN, stopped_by=StoppedBy.TOO_SLOW)

    found = solve_on_levels(SolveRequest(instance, Restrictions(), ONE_THREAD, None, silent, Stop()), solve)
    assert asked == [4, 2]
    assert found.plan is not None
    simulated_s = piper_ray.simulate(instance, found.plan, found.schedule).time_per_sample_s
    assert found.time_per_sample_s == pytest.approx(simulated_s, rel=1e-12)
    assert found.time_per_sample_s == of_two.time_per_sample_s


@pytest.mark.parametrize("status", [Status.FEASIBLE, Status.UNKNOWN])
def test_an_interrupt_leaves_the_work_of_smaller_levels_as_a_bound(status: Status) -> None:
    def stopped(_: int, found: Solution) -> Solution:
        return replace(
            found,
            status=status,
            time_per_sample_s=99.0 if status is Status.FEASIBLE else None,
            plan=None,
            lower_bound_s=50.0,
            stopped_by=StoppedBy.INTERRUPT,
        )

    solves, instance = Solves(stopped), levelled()
    found = on_levels(solves, instance)
    assert solves.devices == [8]
    assert found.status is status
    assert found.lower_bound_s == pytest.approx(48.0 / 4)
    assert found.lower_bound_s == least_s(instance.replace(devices=4))


def test_a_smaller_level_that_is_stopped_at_its_start_leaves_the_rest() -> None:
    def stopped(devices: int, found: Solution) -> Solution:
        if devices == 4:
            raise StopSearch(StoppedBy.INTERRUPT)
        return replace(found, time_per_sample_s=15.0, plan=None, lower_bound_s=15.0)

    found = on_levels(Solves(stopped), levelled())
    assert (found.status, found.time_per_sample_s) == (Status.FEASIBLE, 15.0)
    assert found.stopped_by is StoppedBy.INTERRUPT
    assert found.lower_bound_s == pytest.approx(12.0)


def test_levels_that_are_left_out_for_the_gap_say_so() -> None:
    """12 s at least on four devices, as fast as 12.5 s within 10 %."""
    solves = Solves(lambda _, found: replace(found, time_per_sample_s=12.5, plan=None, lower_bound_s=12.5))
    options = SolveOptions(threads=1, gap=0.1)
    found = solve_on_levels(SolveRequest(levelled(), Restrictions(), options, None, silent, Stop()), solves)
    assert solves.devices == [8]
    assert (found.status, found.stopped_by) == (Status.FEASIBLE, StoppedBy.GAP)
    assert found.lower_bound_s == pytest.approx(12.0)


def test_no_plan_on_all_devices_is_none_on_fewer() -> None:
    solves = Solves()
    assert on_levels(solves, levelled().replace(memory_bytes=1.0)).status is Status.INFEASIBLE
    assert solves.devices == [8]


def test_plans_on_all_devices_are_on_no_smaller_level() -> None:
    solves = Solves(lambda _, found: replace(found, time_per_sample_s=99.0))
    on_levels(solves, levelled(), Restrictions(constraints=(AllDevices(),)))
    assert solves.devices == [8]


def test_a_checkpoint_is_taken_up_again(tmp_path: Path) -> None:
    """And refused on other links."""
    instance, folder = levelled(), str(tmp_path / "kept")
    first = piper_ray.solve(instance, schedule="2bw", threads=1, checkpoint=folder)
    assert piper_ray.solve(instance, schedule="2bw", threads=1, checkpoint=folder).plan == first.plan
    other = instance.replace(cluster=replace(instance.cluster, links=(Link(3e9, 2), *LINKS[1:])))
    with pytest.raises(piper_ray.CheckpointRefused, match="links"):
        piper_ray.solve(other, schedule="2bw", threads=1, checkpoint=folder)


def test_workloads_with_other_links_have_other_digests() -> None:
    instance = levelled()
    assert instance.digest != instance.replace(cluster=replace(instance.cluster, links=LINKS[1:])).digest


@pytest.mark.parametrize("schedule", ["2bw", "1f1b"])
def test_a_frontier_that_is_stopped_says_what_it_knows(schedule: str) -> None:
    """The most devices are searched first; of fewer nothing is known then."""
    stop: Stop[piper_ray.Frontier] = Stop()

    def stopped(event: object) -> None:
        if isinstance(event, CurveAdvanced):
            stop.request()

    found = piper_ray.frontier(levelled(), schedule=schedule, threads=1, listener=stopped, stop=stop)
    assert found.stopped_by is StoppedBy.INTERRUPT
    assert [point.devices for point in found.points()] == list(range(1, 9))
    assert found.solution(1).status is Status.UNKNOWN
    assert found.plan(1) is None
    assert "1 to 8 devices" in repr(found)
    assert stop.answer() is not None


def test_a_frontier_keeps_its_time_limit_on_all_levels() -> None:
    found = piper_ray.frontier(levelled(), schedule="1f1b", threads=1, time_limit=1e-9)
    assert found.stopped_by is StoppedBy.TIME_LIMIT
    assert all(found.solution(point.devices).status is point.status for point in found.points())


def test_a_frontier_with_levels_shows_the_plans_of_each() -> None:
    found = piper_ray.frontier(levelled(), schedule="2bw", threads=1, devices="2..8:3")
    assert found.by_devices().keys() == {2, 5, 8}
    assert [plan.devices for k in (2, 5, 8) if (plan := found.plan(k)) is not None] == [2, 5, 8]
    with pytest.raises(piper_ray.UsageError, match="not asked for 3 devices"):
        found.plan(3)
