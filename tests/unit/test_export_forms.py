"""All forms of launch files: which take which models, and that what they say is read back.

That an accepted model is the planned one is held by the runtimes' own code: ``test_export_models`` (Megatron),
``test_export_titan``, ``test_export_deepspeed``, ``test_export_torch``.
"""

from __future__ import annotations

from typing import Any

import pytest

from piper_ray.export.files import Export, Target
from piper_ray.export.import_plan import import_plan
from piper_ray.export.run_as import RunAs
from piper_ray.export.targets import export_plan, exportable
from piper_ray.model.errors import UnsupportedPlan, UsageError
from piper_ray.model.instance import Instance
from piper_ray.model.plan import Plan
from piper_ray.workloads.estimate.config import model_of_config, read_model
from tests.export_support import ROOT
from tests.unit.test_export_models import ONE, PUBLISHED, models, planned, shallow

READ = {
    Target.MEGATRON: "megatron.args", Target.MEGATRON_BRIDGE: "piper_plan.py", Target.TORCHTITAN: "torchtitan.json",
    Target.TORCH: "stages.json", Target.DEEPSPEED: "stages.json", Target.FLAGSCALE: "system.yaml",
    Target.YAML: "plan.yaml",
}  # fmt: skip
"""The file of each form that has the plan."""

ACCEPTED = {
    Target.MEGATRON: 38, Target.MEGATRON_BRIDGE: 61, Target.TORCHTITAN: 21, Target.TORCH: 47, Target.DEEPSPEED: 69,
    Target.FLAGSCALE: 32, Target.YAML: 104,
}  # fmt: skip
"""Of the published models, with experts over eight ranks where they have some, how many a form takes."""


def exported(instance: Instance, plan: Plan, target: Target) -> Export | str:
    """Or why not."""
    try:
        return export_plan(instance, plan, ONE, target, 8)
    except (UsageError, UnsupportedPlan) as error:
        return str(error)


def test_every_model_is_read_back_from_every_form_or_refused(few: bool) -> None:
    """All take each model as it is planned; each model is read back from a quarter of the forms."""
    taken = dict.fromkeys(Target, 0)
    for number, (name, model) in enumerate(models(few).items()):
        result, plan = planned(model)
        for turn, target in enumerate(Target, start=number):
            found = exported(result.instance, plan, target)
            if isinstance(found, str):
                assert len(found) > 30, (name, target)
                continue
            assert result.instance.model is not None
            assert exportable(result.instance.model, target) is None
            taken[target] += 1
            if few or turn % 4 == 0:
                again = import_plan(result.instance, found.files[READ[target]], RunAs(world=16))
                assert again.plan == plan, (name, target)
    assert all(taken.values()) if few else taken == ACCEPTED


def test_the_table_in_the_docs_has_these_numbers() -> None:
    text = (ROOT / "docs" / "how-to" / "runtime.md").read_text(encoding="utf-8")
    table = text.partition("| `--to` | with | what | models |")[2].partition("\n\n")[0]
    rows = {row.split("`")[1]: row.rstrip(" |").rpartition("| ")[2] for row in table.splitlines() if "`" in row}
    assert rows == {target.value: f"{count} of {len(models())}" for target, count in ACCEPTED.items()}


EIGHTS, ADAPTERS, HALVES = {"precision": "fp8"}, {"lora": 16}, {"precision": "fp16"}


@pytest.mark.parametrize(
    ("name", "options", "refused"),
    [
        ("Llama-3.1-8B", {}, {}),
        (
            "Llama-3.1-8B",
            EIGHTS,
            {
                Target.TORCH: "torch.distributed.pipelining trains in bf16 or fp16",
                Target.DEEPSPEED: "DeepSpeed trains in bf16 or fp16",
            },
        ),
        ("Llama-3.1-8B", HALVES, {Target.TORCHTITAN: "torchtitan trains in bf16 or fp8, and this plan in fp16"}),
        (
            "Llama-3.1-8B",
            ADAPTERS,
            {
                Target.MEGATRON: "Megatron-LM trains no adapters",
                Target.TORCH: "torch.distributed.pipelining trains no adapters",
                Target.DEEPSPEED: "DeepSpeed trains no adapters",
                Target.FLAGSCALE: "FlagScale trains no adapters",
            },
        ),
        (
            "mixtral-8x22b",
            ADAPTERS,
            {
                Target.MEGATRON: "Megatron-LM trains no adapters",
                Target.MEGATRON_BRIDGE: "Megatron-Bridge adapts no routers",
                Target.TORCHTITAN: "of linear layers alone, and the plan's of experts, too",
                Target.TORCH: "experts over 8 ranks",
                Target.DEEPSPEED: "experts over 8 ranks",
                Target.FLAGSCALE: "FlagScale trains no adapters",
            },
        ),
        (
            "Bamba-9B",
            {},
            {
                Target.MEGATRON: "mix tokens otherwise than by attention",
                Target.MEGATRON_BRIDGE: "Megatron takes no layout for a model with state spaces",
                Target.TORCHTITAN: "mix tokens otherwise than by attention",
                Target.FLAGSCALE: "mix tokens otherwise than by attention",
            },
        ),
        (
            "DeepSeek-V3",
            {},
            {
                Target.TORCHTITAN: "it predicts 2 tokens at once",
                Target.TORCH: "experts over 8 ranks",
                Target.DEEPSPEED: "experts over 8 ranks",
                Target.FLAGSCALE: "this model predicts further tokens",
            },
        ),
    ],
)
def test_how_a_model_is_trained_is_said_or_refused(
    name: str, options: dict[str, Any], refused: dict[Target, str]
) -> None:
    entry = PUBLISHED.get(name)
    model = read_model(name) if entry is None else model_of_config(name, shallow(entry["config"]))
    result, plan = planned(model, **options)
    found = {target: exported(result.instance, plan, target) for target in Target}
    told = {target: reason for target, reason in found.items() if isinstance(reason, str)}
    assert told.keys() == refused.keys()
    for target, words in refused.items():
        assert words in told[target]


def test_a_folder_for_no_runtime_in_particular_says_how_the_model_is_trained() -> None:
    result, plan = planned(model_of_config("l", shallow(PUBLISHED["Llama-3.1-8B"]["config"])), **EIGHTS)
    text = export_plan(result.instance, plan, ONE, Target.YAML, 8).files["plan.yaml"]
    assert "precision: fp8\n" in text
    assert "optimizer_bytes: 12.0\n" in text
