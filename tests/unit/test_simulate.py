"""``simulate``: figures worked out by hand, what the options change, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import piper_ray
from piper_ray.model.errors import InputError, InvalidPlan, LimitError, UsageError
from piper_ray.model.instance import Edge, Instance, Layer, Tensor, Tmpc
from piper_ray.model.plan import Plan, Stage
from piper_ray.model.schedule import AllReduce, Schedule, ScheduleName
from piper_ray.simulate import steady, timeline
from piper_ray.simulate.actions import ActionKind
from piper_ray.simulate.result import Simulation
from piper_ray.simulate.run import SimulationOptions, Transfers, simulate
from piper_ray.simulate.stages import pass_times
from piper_ray.simulate.trace import chrome_trace, write_trace
from tests.report_cases import small_instance, small_plan
from tests.simulate_support import FLUSHED, GIB, chain, cut


def _simulated(schedule: str, **options: object) -> Simulation:
    """Two stages of 3 s (1 forward, 2 backward) on two replicas each, 4 microbatches a replica."""
    instance = chain([3.0, 3.0], microbatches=8, weights_bytes=GIB, edge_bytes=GIB / 4)
    return simulate(instance, cut([1, 1], 2), schedule, options=SimulationOptions(**options))  # type: ignore[arg-type]


def test_1f1b_by_hand() -> None:
    """Transfers of 1/4 s charged in each pass: F 1.25, B 2.25. All-reduce 4 (2 - 1) / 2 of a GiB at a GiB/s: 2 s."""
    found = _simulated("1f1b")
    assert found.step_s == pytest.approx((4 + 2 - 1) * 3.5 + 2.0)
    assert found.time_per_sample_s == pytest.approx(found.step_s / 8)
    assert found.samples_per_s is None
    assert found.tokens_per_s is None
    assert (found.tokens_per_s, found.promised_s, found.pipelines) == (None, None, 2)
    first, last = found.ranks
    assert [rank.compute_s for rank in found.ranks] == pytest.approx([12.0, 12.0])
    assert first.communication_s == pytest.approx(4 * 0.5 + 2.0)
    assert first.waiting_s == 0.0
    assert first.bubble_s == pytest.approx(3.5)
    assert found.bubble_share == pytest.approx(3.5 / 19.5)
    assert (first.in_flight, last.in_flight) == ((2,), (1,))
    assert first.peak_memory_bytes == GIB + 2 * GIB / 4
    assert last.peak_memory_bytes == GIB + GIB / 4


def test_options_by_hand() -> None:
    step_s = (4 + 2 - 1) * 3.5
    assert _simulated("1f1b", all_reduce="ring").step_s == pytest.approx(step_s + 1.0)
    assert _simulated("1f1b", optimizer_s=0.5).step_s == pytest.approx(step_s + 2.5)
    # Half of the 2 s overlaps with backward passes.
    half = _simulated("1f1b", all_reduce_overlap=0.5)
    assert half.step_s == pytest.approx(step_s + 1.0)
    assert _simulated("1f1b", all_reduce_overlap=1.0).step_s == pytest.approx(step_s)
    counted = _simulated("1f1b", samples_per_microbatch=4, tokens_per_sample=100)
    assert counted.samples_per_s == pytest.approx(32 / (step_s + 2.0))
    assert counted.tokens_per_s == pytest.approx(3200 / (step_s + 2.0))


def test_latency_by_hand() -> None:
    """One microbatch: forth and back once, and each rank waits for what is on its way."""
    instance = chain([3.0, 3.0], microbatches=1)
    found = simulate(instance, cut([1, 1]), "gpipe", options=SimulationOptions(latency_s=0.25))
    assert found.step_s == pytest.approx(6.5)
    assert [rank.waiting_s for rank in found.ranks] == [pytest.approx(0.25), pytest.approx(0.25)]
    assert [part.what for part in found.critical_path] == ["F", "transfer", "F", "B", "transfer", "B"]


def test_overlapped_transfers_by_hand() -> None:
    """F 1 s, B 2 s; transfers of 1/2 s run beside them. gpipe of 2: the second F is sent while B of the last runs."""
    instance = chain([3.0, 3.0], microbatches=2, edge_bytes=GIB / 2)
    found = simulate(instance, cut([1, 1]), "gpipe", options=SimulationOptions(transfers=Transfers.OVERLAPPED))
    # rank 0: F 0-1, F 1-2; rank 1: F 1.5-2.5, F 2.5-3.5, B 3.5-5.5, B 5.5-7.5; rank 0: B 6-8, B 8-10.
    assert found.step_s == pytest.approx(10.0)
    assert found.ranks[0].communication_s == 0.0
    assert found.ranks[0].waiting_s == pytest.approx(0.5)
    # Longer than a pass, they hold each other up on their way out: F arrive at 3 and 5.
    slow = instance.replace(bandwidth_bytes_per_s=GIB / 4)
    found = simulate(slow, cut([1, 1]), "gpipe", options=SimulationOptions(transfers=Transfers.OVERLAPPED))
    assert found.timeline.start_s[found.timeline.of_rank(1)].tolist() == pytest.approx([3.0, 5.0, 6.0, 8.0])
    assert found.step_s == pytest.approx(14.0)


def test_what_schedules_do_not_overlap_is_refused() -> None:
    instance, plan = chain([3.0] * 4), cut([1] * 4)
    for name, options, told in (
        ("1f1b", SimulationOptions(transfers=Transfers.OVERLAPPED_STEADY), "interleaved schedule alone has them"),
        ("zb-v", SimulationOptions(pass_overlap=0.5), "zb-v runs no two passes as one"),
        ("dualpipe-v", SimulationOptions(transfers=Transfers.ONE_STREAM, pass_overlap=0.5), "one after the other"),
    ):
        with pytest.raises(UsageError, match=told):
            simulate(instance, plan, name, options=options)
    plain, joined = (simulate(instance, plan, "dualpipe-v", options=SimulationOptions(pass_overlap=x)) for x in (0, 1))
    assert joined.step_s < plain.step_s
    assert joined.peak_memory_bytes == plain.peak_memory_bytes
    assert [note for note in plain.notes if "--pass-overlap" in note]
    assert not joined.notes


def test_stages_on_one_rank_hand_over_for_nothing() -> None:
    """In a V the two stages in its point are on one rank."""
    instance = chain([3.0] * 4, microbatches=4, edge_bytes=GIB)
    found = simulate(instance, cut([1] * 4), "zb-v")
    assert [rank.stages for rank in found.ranks] == [(0, 3), (1, 2)]
    # Rank 1 holds both ends of the second edge: only the first and the third are charged, each forth and back.
    for rank in found.ranks:
        assert rank.communication_s == pytest.approx(4 * 2 * 2.0)


def test_passes_of_a_tmpc() -> None:
    plain = Tmpc("vanilla", 3.0, 0, 0, 0)
    assert pass_times(plain) == (1.0, 1.0, 1.0)
    again = Tmpc("again", 4.0, 0, 0, 0, recompute=True)
    assert pass_times(again) == (1.0, 2.0, 1.0)


def test_sizes_at_both_ends_of_an_edge() -> None:
    """The source moves c + bw and the target c + fw, in each pass; an edge within a stage is free."""
    source = Tmpc("vanilla", 3.0, 0, 0, 0, backward_sync_bytes={1: GIB})
    target = Tmpc("vanilla", 3.0, 0, 0, 0, forward_sync_bytes={0: 2 * GIB})
    layers = (Layer(0, "", {1: (source,)}), Layer(1, "", {1: (target,)}))
    instance = Instance(layers, (Edge(0, 1, GIB),), 2, 1, GIB, GIB)
    found = simulate(instance, cut([1, 1]), "1f1b")
    assert [rank.communication_s for rank in found.ranks] == [pytest.approx(4.0), pytest.approx(6.0)]
    assert simulate(instance, cut([2]), "1f1b").ranks[0].communication_s == 0.0
    overlapped = simulate(instance, cut([1, 1]), "1f1b", options=SimulationOptions(transfers=Transfers.OVERLAPPED))
    assert overlapped.step_s == pytest.approx(6.0 + 2 * 3.0)  # as long as the slower end takes


def test_tensors_with_several_ends_are_moved_once_by_each_stage() -> None:
    instance = dataclasses.replace(
        chain([3.0] * 4, microbatches=1), tensors=(Tensor((0, 1, 3), GIB, 2 * GIB), Tensor((0, 1), GIB, GIB))
    )
    found = simulate(instance, cut([2, 1, 1]), "gpipe")
    assert [rank.communication_s for rank in found.ranks] == [pytest.approx(3.0), 0.0, pytest.approx(3.0)]
    overlapped = simulate(instance, cut([2, 1, 1]), "gpipe", options=SimulationOptions(transfers=Transfers.OVERLAPPED))
    assert overlapped.step_s == pytest.approx(12.0)  # arrives before stage 2 is done, or when its gradient is


def test_a_stage_waits_for_what_jumps_over_others() -> None:
    """A large message from the first to the last stage arrives later than what passes through the second."""
    tmpc = Tmpc("vanilla", 3.0, 0, 0, 0)
    layers = tuple(Layer(i, "", {1: (tmpc,)}) for i in range(3))
    instance = Instance(layers, (Edge(0, 1, 0), Edge(1, 2, 0), Edge(0, 2, 10 * GIB)), 3, 1, GIB, GIB)
    found = simulate(instance, cut([1, 1, 1]), "1f1b", options=SimulationOptions(transfers=Transfers.OVERLAPPED))
    assert found.step_s == pytest.approx(1 + 10 + 1 + 2 + 10 + 2)
    assert sum(part.duration_s for part in found.critical_path if part.what == "transfer") == pytest.approx(20.0)


def test_branches_and_memory_that_replicas_share() -> None:
    tmpc = Tmpc("vanilla", 3.0, 0, GIB, GIB, shared_bytes=4 * GIB)
    instance = Instance((Layer(0, "", {1: (tmpc,)}),), (), 4, 4, 8 * GIB, GIB)
    found = simulate(instance, cut([1], 4), "gpipe")
    assert found.ranks[0].peak_memory_bytes == 3 * GIB


@pytest.mark.parametrize("name", ScheduleName)
@pytest.mark.parametrize("overlap", [False, True])
def test_shares_add_up_and_memory_comes_back(name: ScheduleName, overlap: bool) -> None:
    instance = chain(
        [1.0, 2.0, 1.5, 1.0, 3.0, 1.0, 1.0, 2.0], microbatches=16, weights_bytes=GIB / 8, edge_bytes=GIB / 8
    )
    options = SimulationOptions(
        latency_s=0.01, transfers=Transfers.OVERLAPPED if overlap else Transfers.IN_PASSES, optimizer_s=0.1
    )
    found = simulate(instance, cut([1] * 8, 2), name, options=options)
    length_s = found.window_s[1] - found.window_s[0]
    for number, rank in enumerate(found.ranks):
        parts = (rank.compute_s, rank.communication_s, rank.waiting_s, rank.bubble_s)
        assert all(part >= -1e-9 for part in parts)
        assert sum(parts) == pytest.approx(length_s, rel=1e-9)
        memory = found.memory(number)
        assert memory.bytes[0] == memory.bytes[-1] or name is ScheduleName.PIPEDREAM
        assert memory.peak_bytes == rank.peak_memory_bytes
        assert (np.diff(memory.time_s) >= 0).all()
    if name in FLUSHED:
        path = found.critical_path
        assert (path[0].start_s, path[-1].end_s) == (0.0, found.step_s)
        for before, after in pairwise(path):
            assert before.end_s == after.start_s
        busiest = found.ranks[found.busiest]
        assert found.step_s >= busiest.compute_s + busiest.communication_s


@pytest.mark.parametrize("name", ["2bw", "pipedream", "1f1b", "gpipe"])
def test_each_replica_has_the_figures_of_its_own_passes(name: str) -> None:
    """Pass by pass, with replicas that have more of them than others."""
    instance = chain([7.0, 5.0, 1.0, 2.0], microbatches=210, weights_bytes=GIB, edge_bytes=GIB / 4)
    plan = cut([1, 1, 1, 1], [7, 5, 1, 2])
    found = simulate(instance, plan, name, options=SimulationOptions(transfers=Transfers.OVERLAPPED))
    assert len(np.unique(np.diff(found.timeline.first)[:7])) == (2 if found.schedule.asynchronous else 1)
    start_s, end_s = found.window_s

    def inside(first_s: float, last_s: float) -> float:
        return max(0.0, min(last_s, end_s) - max(first_s, start_s))

    line = found.timeline
    for number, rank in enumerate(found.ranks):
        work_s = wait_s = 0.0
        held = most = 0
        for action in range(line.first[number], line.first[number + 1]):
            begun_s, ended_s = float(line.start_s[action]), float(line.end_s[action])
            work_s += inside(begun_s, ended_s)
            wait_s += inside(begun_s - float(line.transit_s[action]), begun_s)
            held += 1 if line.kind[action] == ActionKind.F else -1
            most = max(most, held)
        summed_s = sum(each.end_s - each.start_s for each in found.all_reduces if each.rank == number)
        assert rank.compute_s + rank.communication_s == pytest.approx(work_s + summed_s)
        assert rank.waiting_s == pytest.approx(wait_s, abs=1e-9)
        assert rank.in_flight == (most,)
        assert rank.peak_memory_bytes == found.memory(number).peak_bytes


def test_asynchronous_steps_keep_the_promise_of_evaluate_with_even_degrees() -> None:
    instance = small_instance()
    plan = Plan(tuple(dataclasses.replace(stage, data_parallel_degree=1) for stage in small_plan().stages))
    found = simulate(instance, plan, "2bw")
    assert found.steady
    assert found.time_per_sample_s == pytest.approx(piper_ray.evaluate(instance, plan).time_per_sample_s)
    assert found.promised_s == pytest.approx(found.step_s)
    assert found.sustaining is None


def test_the_promise_is_evaluates_for_uneven_degrees_too() -> None:
    instance, plan = small_instance(), small_plan()
    found = simulate(instance, plan)
    assert found.promised_s is not None
    assert found.promised_s / instance.microbatches == pytest.approx(
        piper_ray.evaluate(instance, plan).time_per_sample_s
    )
    assert [found.ranks[0].peak_memory_bytes, found.ranks[-1].peak_memory_bytes] == pytest.approx(
        [stage.memory_bytes for stage in piper_ray.evaluate(instance, plan).stages]
    )


def test_uneven_degrees_need_more_in_flight() -> None:
    instance = chain([3.0, 6.0, 3.0], microbatches=8)
    found = simulate(instance, cut([1, 1, 1], [1, 2, 1]), "2bw")
    assert (found.in_flight, found.sustaining) == ((4, 2, 1), (5, 2, 1))
    assert found.promised_s == pytest.approx(8 * 3.0)
    assert found.step_s > 8 * 3.0 * 1.01
    kept = simulate(
        instance,
        cut([1, 1, 1], [1, 2, 1]),
        "2bw",
        options=SimulationOptions(in_flight="sustaining"),  # type: ignore[arg-type]
    )
    assert kept.in_flight == (5, 2, 1)
    assert kept.step_s == pytest.approx(8 * 3.0)
    given = simulate(instance, cut([1, 1, 1], [1, 2, 1]), "2bw", options=SimulationOptions(in_flight=(6, 2, 1)))
    assert given.ranks[0].in_flight == (6,)


def test_a_pipeline_that_is_not_seen_to_repeat_itself_is_averaged(monkeypatch: pytest.MonkeyPatch) -> None:
    instance, plan = chain([3.0, 6.0, 3.0], microbatches=8), cut([1, 1, 1], [1, 2, 1])
    exact = simulate(instance, plan)
    monkeypatch.setattr(steady, "_LONGEST_PERIOD", 0)
    average = simulate(instance, plan)
    assert (exact.steady, average.steady) == (True, False)
    assert average.step_s == pytest.approx(exact.step_s, rel=1e-3)
    assert (exact.keeps_promise, average.keeps_promise) == (False, False)
    assert simulate(instance, plan, "gpipe").keeps_promise is None


def test_pipedream_keeps_versions() -> None:
    """Of p stages the j-th from the end stashes j; with vertical sync all keep as many as the pipeline is deep."""
    instance = chain([3.0] * 4, microbatches=8, weights_bytes=GIB)
    found = simulate(instance, cut([1] * 4), "pipedream")
    versions = [rank.versions for rank in found.ranks]
    assert [kept.stashed for kept in versions if kept is not None] == [4, 3, 2, 1]
    assert [kept.vertical_sync for kept in versions if kept is not None] == [4, 4, 4, 4]
    # Fixed memory is of one version, without additions.
    assert found.ranks[0].peak_memory_bytes == 4 * GIB + 4 * GIB / 4
    assert found.ranks[3].peak_memory_bytes == GIB + GIB / 4
    assert all(rank.versions is None for rank in simulate(instance, cut([1] * 4), "2bw").ranks)
    synced = simulate(instance, cut([1] * 4), "pipedream", options=SimulationOptions(vertical_sync=True))
    assert synced.ranks[3].peak_memory_bytes == 4 * GIB + GIB / 4
    assert synced.step_s == found.step_s
    with pytest.raises(UsageError, match="vertical sync: schedule 2bw has one version in all stages anyway"):
        simulate(instance, cut([1] * 4), "2bw", options=SimulationOptions(vertical_sync=True))


def test_pipedream_sums_gradients_for_each_microbatch() -> None:
    instance = chain([3.0], microbatches=8, weights_bytes=GIB)
    plan = cut([1], 2)
    assert simulate(instance, plan, "pipedream").step_s == pytest.approx(8 / 2 * (3.0 + 2.0))
    assert simulate(instance, plan, "2bw").step_s == pytest.approx(8 / 2 * 3.0 + 2.0)


def test_one_pipeline_stands_for_all() -> None:
    instance = chain([3.0] * 4, degrees=(1, 8), microbatches=4096, devices=16384)
    found = simulate(instance, cut([1] * 4, 512, 8), "1f1b")
    assert (found.pipelines, len(found.ranks)) == (512, 4)
    assert found.notes[0].startswith(
        "one of 512 equal pipelines is simulated, 32 of 16,384 devices: each does the same"
    )
    assert found.notes[1].startswith("a rank stands for the 8 devices")
    assert found.step_s == pytest.approx((8 + 3) * 3.0)
    uneven = simulate(instance, cut([1] * 4, [512, 256, 256, 128], 8), "2bw")
    assert (uneven.pipelines, len(uneven.ranks)) == (128, 4 + 2 + 2 + 1)
    assert "alike modulo 128 meet the same replicas" in uneven.notes[0]
    assert simulate(instance, cut([1] * 4), "gpipe").notes == ()


def test_an_uneven_plan_under_a_flush() -> None:
    """Round-robin: microbatches 0, 2, ... on one replica of the second stage, 1, 3, ... on the other."""
    instance = chain([3.0, 6.0], microbatches=4)
    found = simulate(instance, cut([1, 1], [1, 2]), "gpipe")
    # Stage 2, replica 0: F0 1-3, F2 3-5, B0 5-9, B2 9-13; replica 1 a second later. Stage 1: B0 9-11, ..., B3 15-17.
    assert found.step_s == pytest.approx(17.0)
    assert [rank.replica for rank in found.ranks] == [0, 0, 1]


def test_arguments_and_paths(tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    piper_ray.dump(small_instance(), path)
    found = piper_ray.simulate(path, small_plan(), schedule="2bw")
    assert isinstance(found, piper_ray.Simulation)
    assert found.step_s == piper_ray.simulate(small_instance(), small_plan()).step_s
    assert repr(found).startswith("Simulation(2bw: step ")
    same = piper_ray.simulate(small_instance(), small_plan(), piper_ray.Schedule(ScheduleName.TWO_BW))
    assert same.step_s == found.step_s


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("1f2b", "schedule '1f2b' is unknown; expected one of 2bw, pipedream, gpipe, 1f1b, interleaved, looped-bfs"),
        (3, "schedule must be a Schedule or the name of one, not 3"),
    ],
)
def test_unknown_schedules(schedule: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        simulate(small_instance(), small_plan(), schedule)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "zb-v", "chunks": 3}, "zb-v has two chunks on each rank, not 3"),
        ({"name": "1f1b", "chunks": 2}, "1f1b has one stage on each rank; several chunks are for dualpipe-v, inter"),
        ({"name": "interleaved", "chunks": 0}, "chunks must be at least 1, not 0"),
        ({"name": "gpipe", "group": 4}, "gpipe has no groups of microbatches"),
        ({"name": "interleaved", "group": "two"}, "group must be a whole number of at least 1"),
    ],
)
def test_schedules_that_make_no_sense(given: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Schedule(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"latency_s": -1.0}, "latency_s must be a number of seconds, at least 0, not -1.0"),
        ({"optimizer_s": float("nan")}, "optimizer_s must be a number of seconds"),
        ({"transfers": "yes"}, "transfers"),
        ({"all_reduce": "tree"}, "all_reduce 'tree' is unknown; expected one of parameter-server, ring"),
        ({"all_reduce_overlap": 1.5}, "all_reduce_overlap must be from 0 to 1, not 1.5"),
        ({"in_flight": "most"}, "in_flight 'most' is unknown; expected one of rule, sustaining"),
        ({"in_flight": (2, 0)}, "in_flight must be at least 1 for each stage"),
        ({"in_flight": 3}, "in_flight must be whole numbers"),
        ({"samples_per_microbatch": 0}, "samples_per_microbatch must be at least 1"),
        ({"tokens_per_sample": 1.5}, "tokens_per_sample must be a whole number"),
    ],
)
def test_options_that_make_no_sense(given: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SimulationOptions(**given)  # type: ignore[arg-type]


def test_numbers_of_numpy_are_options() -> None:
    options = SimulationOptions(latency_s=np.float32(0.5), in_flight=np.array([3, 2]), all_reduce=AllReduce.RING)  # type: ignore[arg-type]
    assert (options.latency_s, options.in_flight) == (0.5, (3, 2))


def test_plans_that_break_a_rule() -> None:
    instance = chain([3.0] * 4, degrees=(1, 2), microbatches=6, devices=4)
    one = {0: "vanilla", 1: "vanilla"}
    cases: list[tuple[Plan, str, str]] = [
        (cut([2]), "1f1b", "layer 2 is in no stage"),
        (cut([2, 2], 4), "1f1b", "stage 1: data-parallel degree 4 does not divide the 6 microbatches"),
        (cut([1] * 4, 2), "1f1b", "the plan uses 8 devices, 4 are there"),
        (cut([1, 1, 2]), "interleaved", "puts 2 stages on each rank; the plan has 3, which 2 does not divide"),
        (cut([2, 2], [1, 2]), "zb-h1", "zb-h1 needs one data-parallel degree for all stages"),
        (Plan((Stage((2, 3), 1, 1, {2: "vanilla", 3: "vanilla"}), Stage((0, 1), 1, 1, one))), "1f1b", "runs backwards"),
        (
            Plan((Stage((0, 1), 1, 1, {0: "vanilla", 1: "none"}), *cut([2, 2]).stages[1:])),
            "gpipe",
            "has no TMPC 'none'",
        ),
        (cut([2, 2], 1, 4), "gpipe", "has no TMPC at tensor-parallel degree 4"),
        (Plan(()), "gpipe", "the plan has no stages"),
        (
            Plan((cut([2, 2]).stages[0], dataclasses.replace(cut([2, 2]).stages[1], tensor_parallel_degree=2))),
            "interleaved",
            "interleaved needs one tensor-parallel degree for all stages: they share their devices",
        ),
    ]
    for plan, schedule, message in cases:
        with pytest.raises(InvalidPlan, match=message):
            simulate(instance, plan, schedule)


def test_chunks_share_the_devices_of_their_rank() -> None:
    instance = chain([3.0] * 4, microbatches=4, devices=2)
    assert len(simulate(instance, cut([1] * 4), "interleaved").ranks) == 2
    with pytest.raises(InvalidPlan, match="the plan uses 4 devices, 2 are there"):
        simulate(instance, cut([1] * 4), "1f1b")


def test_more_stages_than_microbatches() -> None:
    instance = chain([3.0] * 6, microbatches=2, devices=6)
    for name in FLUSHED:
        if name is not ScheduleName.DUALPIPE_V:
            assert simulate(instance, cut([1] * 6), name).step_s > 0


def test_other_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    instance, plan = chain([3.0] * 4, microbatches=4), cut([1] * 4)

    def refused(schedule: str, match: str, error: type[Exception] = UsageError, **options: object) -> None:
        with pytest.raises(error, match=match):
            simulate(instance, plan, schedule, options=SimulationOptions(**options))  # type: ignore[arg-type]

    refused("gpipe", "in_flight: schedule gpipe sets itself what is in flight", in_flight=(1, 1, 1, 1))
    refused("1f1b", "in_flight: only 2bw and pipedream have a rate to sustain", in_flight="sustaining")
    refused("1f1b", "in_flight has 2 figures; the plan has 4 stages", in_flight=(1, 1))
    refused("1f1b", r"stops, as ranks wait for each other: rank 0 \(stage 1\) at B0 of stage 1", in_flight=(1, 2, 1, 1))
    with pytest.raises(UsageError, match="options must be a SimulationOptions"):
        simulate(instance, plan, "gpipe", options={"latency_s": 1.0})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="plan must be a Plan"):
        simulate(instance, "plan.json", "gpipe")  # type: ignore[arg-type]
    with pytest.raises(InputError):
        simulate({"nodes": []}, plan, "gpipe")
    monkeypatch.setattr(timeline, "MOST_ACTIONS", 10)
    refused("gpipe", "the simulation would have 32 passes, more than 10", LimitError)


def test_traces_are_written(tmp_path: Path) -> None:
    found = _simulated("1f1b")
    write_trace(found, tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text()) == json.loads(json.dumps(chrome_trace(found)))
    with pytest.raises(UsageError, match="cannot be written"):
        write_trace(found, tmp_path / "no" / "trace.json")
