"""The optimizer's state in host memory: by hand, as one more axis of ``plan``, and through launch files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import piper_ray
from piper_ray.engine.one_setting import settings_of
from piper_ray.export.files import Target
from piper_ray.export.import_plan import import_plan
from piper_ray.export.targets import export_plan
from piper_ray.launches.launch import Source
from piper_ray.model.errors import InfeasibleError, UsageError
from piper_ray.model.mode import ALL_REPLICAS
from piper_ray.proposal.cells import cells_of
from piper_ray.proposal.demand import PlanDemand
from piper_ray.proposal.offers import refuse_what_cannot_run
from piper_ray.proposal.propose import propose
from piper_ray.runtimes.runtime import RUNTIMES, RuntimeName
from piper_ray.workloads.estimate.modes import Offer
from piper_ray.workloads.estimate.refusals import reasons_against
from tests.unit.test_propose import demand, tight

RATE = 1.4e8


def asked(given: PlanDemand, on_host: bool | None = None, zero: int = ALL_REPLICAS) -> PlanDemand:
    return replace(given, request=replace(given.request, offer=Offer(zero=zero), optimizer_on_host=on_host))


def test_a_replica_updates_its_share_by_hand(tmp_path: Path) -> None:
    here, there = (asked(demand(tmp_path, samples=1), on_host).estimated(1) for on_host in (False, True))
    numbers, microbatches = 4 * 1024**2 + 3 * 1024 * 2816 + 2 * 1024, 16
    for t, row in there.instance.layers[1].tmpcs.items():
        before = {tmpc.id: tmpc for tmpc in here.instance.layers[1].tmpcs[t]}
        assert {tmpc.mode.optimizer_shards for tmpc in row} == {ALL_REPLICAS}
        for tmpc in row:
            own = before[tmpc.id]
            assert own.shared_bytes / 12 == pytest.approx(numbers / t, rel=1e-3)
            assert tmpc.shared_bytes == 0.0
            update_s = own.shared_bytes / 12 / RATE / microbatches
            assert tmpc.time_per_sample_s == pytest.approx(own.time_per_sample_s + update_s, rel=1e-5)
            assert (tmpc.forward_s, tmpc.fixed_bytes) == (own.forward_s, own.fixed_bytes)


def test_cells_are_those_of_the_estimate_with_all_state_there(tmp_path: Path) -> None:
    both = asked(demand(tmp_path, samples=2))
    of_size = both.estimated(2)
    (name,), instance = both.schedules, of_size.on_host.instance
    slow = {one.text: one.instance for one in settings_of(instance, both.restrictions(instance, name)).worth_a_solve}
    cells = [cell for cell in cells_of(both, {2: of_size}).cells if cell.on_host]
    assert {cell.setting.text: cell.setting.instance for cell in cells}.items() >= slow.items()
    assert all(cell.priced.instance == instance for cell in cells)


@pytest.mark.long
def test_one_more_axis_is_never_slower_and_is_all_there_is_where_nothing_else_fits(tmp_path: Path) -> None:
    free, without = (propose(asked(demand(tmp_path, samples=1), on_host)) for on_host in (None, False))
    assert free.best.step_s <= without.best.step_s * (1.0 + 1e-9)
    assert free.cells.count == 2 * without.cells.count
    with pytest.raises(InfeasibleError):
        propose(asked(tight(tmp_path), on_host=False))
    found = propose(asked(tight(tmp_path)))
    alone = propose(asked(tight(tmp_path), on_host=True))
    assert all(one.on_host for one in found.found)
    assert found.best.step_s == alone.best.step_s
    assert found.lower_s <= found.best.step_s

    instance, plan, schedule = found.best.instance, found.best.plan, found.best.simulation.schedule
    launch = export_plan(instance, plan, schedule, Target.MEGATRON, 1)
    text = launch.files["megatron.args"]
    said = ("--optimizer-cpu-offload", "--use-precision-aware-optimizer", "--use-distributed-optimizer")
    assert set(said) <= set(text.split())
    read = import_plan(instance, Source(text))
    assert (read.plan, read.schedule, read.notes) == (plan, schedule, ())
    elsewhere = import_plan(asked(tight(tmp_path), on_host=False).estimated(1).instance, Source(text))
    assert any("the workload has it on GPUs" in note for note in elsewhere.notes)
    with pytest.raises(UsageError, match="keeps the optimizer's state on GPUs"):
        export_plan(instance, plan, schedule, Target.TORCHTITAN, 1)


@pytest.mark.long
def test_nodes_hold_what_ranks_have_there(tmp_path: Path) -> None:
    found = propose(asked(tight(tmp_path)))
    best, own = found.best, found.demand
    nodes, stages = best.estimate.architecture.nodes, best.plan.stages
    of_gpus = [
        16.0 * sum(nodes[layer].kind.parameters for layer in stage.layers) / each
        for stage in stages
        for each in [stage.data_parallel_degree * stage.tensor_parallel_degree]
        for _ in range(each)
    ]
    for size in (1, 2):
        sums = [sum(of_gpus[first : first + size]) for first in range(0, len(of_gpus), size)]
        assert best.host_bytes(size) == pytest.approx(max(sums))
    per_node = own.request.node_of(own.hardware.gpu(own.gpu))
    needed_bytes = best.host_bytes(per_node)

    def with_host(size_bytes: float, on_host: bool | None = None) -> PlanDemand:
        changed = asked(tight(tmp_path), on_host)
        return replace(changed, request=replace(changed.request, host_memory_bytes=size_bytes))

    assert propose(with_host(needed_bytes)).best.plan == best.plan
    with pytest.raises(InfeasibleError):
        propose(with_host(0.4 * needed_bytes))
    none = with_host(1e6, on_host=True)
    assert not with_host(1e6).tries_host
    (reason,) = reasons_against(none.model, none.hardware, none.gpu, none.request, none.runtime)
    assert "of host memory, where all nodes together have" in reason


@pytest.mark.parametrize(
    ("runtime", "zero", "words"),
    [(RuntimeName.TORCHTITAN, ALL_REPLICAS, "launch files keep"), (RuntimeName.MEGATRON, 1, "expected --zero all")],
)
def test_what_no_launch_has_is_refused(tmp_path: Path, runtime: RuntimeName, zero: int, words: str) -> None:
    one = asked(demand(tmp_path), on_host=True, zero=zero)
    with pytest.raises(UsageError, match=f"--optimizer-on-host: .*{words}"):
        refuse_what_cannot_run(RUNTIMES[runtime], one.request, one.hardware)


def test_ranks_hold_none_of_it() -> None:
    words = "tp=4,pp=8,dp=2,mbs=1,gbs=128,seq=8192"
    here, there = (piper_ray.memory("llama3-70b", text) for text in (words, f"{words},optimizer_on_host"))
    flags = "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 8 --micro-batch-size 1 --sequence-parallel "
    flags += "--global-batch-size 128 --seq-length 8192 --use-distributed-optimizer --use-precision-aware-optimizer"
    launched = piper_ray.memory("llama3-70b", f"{flags} --optimizer-cpu-offload", gpus=64)
    for own, moved, read in zip(here.ranks, there.ranks, launched.ranks, strict=True):
        assert moved.terms["optimizer state"] == read.terms["optimizer state"] == 0.0
        assert own.allocated_bytes - moved.allocated_bytes == pytest.approx(own.terms["optimizer state"])
    assert launched.notes == ()
