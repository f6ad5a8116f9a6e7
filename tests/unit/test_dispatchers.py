"""How tokens reach experts: what a plan is priced with is what its launch says, and what a launch says is priced."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from piper_ray.export.files import Target
from piper_ray.export.launched import facts_of, import_launched
from piper_ray.export.targets import export_plan
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import Instance
from piper_ray.model.mode import Mode
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.simulate.run import simulate
from piper_ray.workloads.estimate.build import EstimateRequest, estimate
from piper_ray.workloads.estimate.modes import Offer
from piper_ray.workloads.estimate.software import TokenDispatcher
from tests.estimate_support import built_in_hardware, model_of
from tests.export_support import plan_in
from tests.lengths import long_after

ONE = Schedule(ScheduleName.ONE_F_ONE_B)
MODEL = model_of(
    "mixtral", tokens=1024, hidden_size=1024, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=8,
    intermediate_size=2816, vocab_size=32000, num_local_experts=16,
)  # fmt: skip
WIDE, NARROW = (Mode(experts=ranks) for ranks in (16, 8))


def workload(dispatcher: str | None, domain: int | None = None, gpu: str = "H100-SXM") -> Instance:
    offer = Offer(experts=(8, 16))
    request = EstimateRequest(nodes=4, samples=1, batch=32, offer=offer, dispatcher=dispatcher, domain=domain)
    return estimate(MODEL, built_in_hardware(), gpu, request).instance


def written(instance: Instance, mode: Mode, target: Target, folder: Path) -> tuple[dict[str, str], float]:
    """The files of a plan in that mode, and the seconds of its step."""
    plan = plan_in(instance, mode, t=1, d=16)
    files = dict(export_plan(instance, plan, ONE, target, 8).files)
    for name, text in files.items():
        (folder / name).write_text(text)
    return files, simulate(instance, plan, ONE).step_s


@pytest.mark.parametrize(
    "target", long_after(1, [Target.MEGATRON, Target.MEGATRON_BRIDGE, Target.TORCHTITAN, Target.FLAGSCALE])
)
@pytest.mark.parametrize("asked", [None, *(one.value for one in TokenDispatcher)])
def test_a_launch_is_priced_as_its_plan_was(tmp_path: Path, target: Target, asked: str | None) -> None:
    """Over two nodes."""
    _, step_s = written(workload(asked), WIDE, target, tmp_path)
    facts = facts_of(str(tmp_path))
    assert facts is not None
    assert facts.dispatcher is not None
    found = TokenDispatcher(asked or "once-per-node")
    if target is Target.TORCHTITAN and found is TokenDispatcher.ALL_GATHER:
        assert facts.dispatcher is TokenDispatcher.ALL_TO_ALL  # it has no all-gather, which a note says
        return
    assert facts.dispatcher is found
    again = workload(facts.dispatcher.value)
    back = import_launched(again, str(tmp_path))
    assert simulate(again, back.plan, back.schedule).step_s == pytest.approx(step_s, rel=1e-12)
    assert not any("reach experts" in note for note in back.notes)


def test_the_usual_way_is_an_all_to_all_in_a_node_and_once_per_node_beyond(tmp_path: Path) -> None:
    usual = workload(None)
    near, _ = written(usual, NARROW, Target.MEGATRON, tmp_path)
    assert "--moe-token-dispatcher-type alltoall\n" in near["megatron.args"]
    assert "--moe-flex-dispatcher-backend" not in near["megatron.args"]
    far, _ = written(usual, WIDE, Target.MEGATRON, tmp_path)
    assert "--moe-token-dispatcher-type flex\n--moe-flex-dispatcher-backend deepep\n" in far["megatron.args"]
    rack = workload(None, domain=32)
    joined, _ = written(rack, NARROW, Target.MEGATRON, tmp_path)
    assert "--moe-flex-dispatcher-backend hybridep\n" in joined["megatron.args"]
    for target, text in (
        (Target.MEGATRON_BRIDGE, 'cfg.model.moe_flex_dispatcher_backend = "deepep"'),
        (Target.TORCHTITAN, '"moe_comm_backend": "deepep"'),
        (Target.FLAGSCALE, "moe_enable_deepep: true"),
    ):
        files, _ = written(usual, WIDE, target, tmp_path)
        assert any(text in content for content in files.values())


@pytest.mark.parametrize("target", [Target.MEGATRON, Target.TORCHTITAN, Target.FLAGSCALE])
def test_the_package_that_nodes_need_is_of_the_gpu_s_maker(target: Target) -> None:
    for gpu, package in (("H100-SXM", "the package deep_ep"), ("MI300X", "Primus-Turbo")):
        instance = workload(None, gpu=gpu)
        notes = export_plan(instance, plan_in(instance, WIDE, t=1, d=16), ONE, target, 8).notes
        assert sum(f"by DeepEP: each node needs {package}" in note for note in notes) == 1


def test_a_launch_of_another_way_is_noted_and_so_is_one_that_does_not_say(tmp_path: Path) -> None:
    instance, file = workload(None), tmp_path / "megatron.args"
    written(instance, WIDE, Target.MEGATRON, tmp_path)
    said = file.read_text().replace("flex\n", "alltoall\n").replace("--moe-flex-dispatcher-backend deepep\n", "")
    file.write_text(said)
    (note,) = (one for one in import_launched(instance, str(file)).notes if "reach experts" in one)
    assert note.endswith("(estimate --dispatcher all-to-all)")
    file.write_text(said.replace("--moe-token-dispatcher-type alltoall\n", ""))
    assert any("no --moe-token-dispatcher-type is said" in one for one in import_launched(instance, str(file)).notes)
    file.write_text(said.replace("alltoall", "postal"))
    with pytest.raises(UsageError, match="expected alltoall, flex, allgather"):
        facts_of(str(file))


def test_a_workload_with_no_such_way_is_refused() -> None:
    instance = workload(None)
    assert instance.model is not None
    odd = replace(instance, model=replace(instance.model, dispatcher="post"))
    with pytest.raises(UsageError, match="dispatcher"):
        export_plan(odd, plan_in(odd, WIDE, t=1, d=16), ONE, Target.MEGATRON, 8)
