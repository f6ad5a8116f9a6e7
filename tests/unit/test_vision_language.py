"""Decoders that see: what of their configs is read, and that their tower is planned where the runtime has it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import piper_ray
from piper_ray import InputError, UsageError
from piper_ray.export.files import Target
from piper_ray.export.targets import exportable
from piper_ray.model.constraints import RecomputeRule, WholePieces, choices_made
from piper_ray.model.figures import held_text
from piper_ray.model.mode import ALL_REPLICAS
from piper_ray.model.one_mode import OneMode
from piper_ray.model.schedule import ScheduleName
from piper_ray.proposal.demand import PlanDemand
from piper_ray.proposal.propose import propose
from piper_ray.report.proposal import AskedOfPlan, print_plan
from piper_ray.runtimes.pieces import pieces_of
from piper_ray.runtimes.runtime import RUNTIMES, RuntimeName
from piper_ray.workloads.estimate.architectures.multimodal import TOWER_PATH, images_of
from piper_ray.workloads.estimate.build import EstimateRequest
from piper_ray.workloads.estimate.config import ModelConfig, known_models, read_model, with_images
from piper_ray.workloads.estimate.families import Microbatch
from piper_ray.workloads.estimate.hardware import load_hardware
from piper_ray.workloads.estimate.modes import Offer
from piper_ray.workloads.estimate.refusals import plain_instance
from tests.data import published_models

TEXT = {
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "vocab_size": 1000,
    "model_type": "qwen3",
}
SEEN = {"hidden_size": 768, "num_hidden_layers": 3, "num_attention_heads": 12, "image_size": 224, "patch_size": 14}


def read(folder: Path, config: dict[str, Any]) -> ModelConfig:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return read_model(str(path))


def test_blocks_runtimes_keep_the_tower_with_the_embedding() -> None:
    """32 layers of 1,280, their embedding, the projector and the token embedding are one piece."""
    instance = plain_instance(read_model("Qwen2.5-VL-7B"), load_hardware(), EstimateRequest(nodes=1))
    pieces = pieces_of(instance)
    assert pieces.blocks == 28
    assert pieces.members[0] == tuple(range(35))
    whole = WholePieces((pieces.members[0],))
    for name in (RuntimeName.MEGATRON, RuntimeName.TORCHTITAN):
        assert whole in RUNTIMES[name].constraints(instance, ScheduleName.ONE_F_ONE_B, 8)
    # Stages of a FlagScale plan recompute their first k layers, and a piece of several layers has no first one.
    kept = RUNTIMES[RuntimeName.FLAGSCALE].constraints(instance, ScheduleName.ONE_F_ONE_B, 8)
    assert whole in kept
    assert not any(isinstance(one, RecomputeRule) for one in kept)
    assert [one.by_layer for one in kept if isinstance(one, OneMode)] == [False]
    for name in (RuntimeName.TORCH, RuntimeName.DEEPSPEED):  # which cut anywhere
        kept = RUNTIMES[name].constraints(instance, ScheduleName.ONE_F_ONE_B, 8)
        assert not any(isinstance(one, WholePieces) for one in kept)


def test_no_launch_file_leaves_the_tower_out() -> None:
    seeing = [name for name in known_models() if images_of(read_model(name).config)[0]]
    assert len(seeing) >= 12
    for name in seeing:
        instance = plain_instance(read_model(name), load_hardware(), EstimateRequest(nodes=1))
        assert instance.model is not None
        for target in (Target.MEGATRON, Target.MEGATRON_BRIDGE, Target.TORCHTITAN, Target.FLAGSCALE):
            assert "for text decoders" in (exportable(instance.model, target) or ""), (name, target)


def test_twenty_models_of_today_are_known_by_name_with_their_source() -> None:
    found = {name: entry for name, entry in known_models().items() if "parameters" in entry}
    assert len(found) >= 30
    assert all(entry["source"] and entry["ids"] for entry in found.values())
    assert sum("vision_config" in entry["config"] for entry in published_models().values()) >= 25


@pytest.mark.parametrize(
    ("asked", "known"),
    [
        ("qwen3-vl-235b", "Qwen3-VL-235B-A22B"),
        ("llama-3.3-70b", "llama3-70b"),
        ("qwen3-235b", "Qwen3-235B-A22B"),
        ("llama-4-maverick", "Llama-4-Maverick"),
        ("zai-org/GLM-4.5V", "GLM-4.5V"),
        ("DeepSeek-R1", "deepseek-v3"),
    ],
)
def test_names_up_to_the_size(asked: str, known: str) -> None:
    assert read_model(asked).name == known


@pytest.mark.parametrize("asked", ["qwen3", "gemma-3", "kimi", "qwen3-vl"])
def test_a_beginning_without_a_size_is_no_name(asked: str) -> None:
    with pytest.raises(UsageError, match="no model of that name"):
        read_model(asked)


def test_images_of_a_sample_are_work_of_the_tower() -> None:
    """Twice the images are twice the tower's products, and no more parameters."""
    one = read_model("gemma-3-4b")
    two = with_images(one, 2, None)
    assert images_of(two.config) == (2, (896, 896), 256)
    assert two.document["images_per_sample"] == 2
    of_one, of_two = (model.architecture(Microbatch(1, 8192)) for model in (one, two))
    assert of_one.parameters == of_two.parameters
    kinds = [{kind.key: kind for kind in made.kinds} for made in (of_one, of_two)]
    assert [made["vision-block"].value("b") for made in kinds] == [1, 2]
    assert [made["projector"].value("b") for made in kinds] == [1, 2]
    assert {made["decoder"].value("b") for made in kinds if "decoder" in made} <= {1}
    few, more = (piper_ray.estimate("gemma-3-4b", "H100-SXM", global_batch=8, images=count) for count in (1, 2))
    passes_s = [sum(layer.tmpcs[1][0].time_per_sample_s for layer in instance.layers) for instance in (few, more)]
    assert passes_s[1] > passes_s[0]
    with pytest.raises(UsageError, match="each is 256 tokens, and a sample has 8,192; expected at most 32"):
        with_images(one, 33, None)
    with pytest.raises(UsageError, match="no vision tower"):
        with_images(read_model("llama3-8b"), 1, None)


def test_an_unknown_model_that_sees_has_its_tower(tmp_path: Path) -> None:
    """(224 / 14)^2 patches; told as what it is taken for."""
    model = read(tmp_path, {"model_type": "new-vl", "text_config": TEXT, "vision_config": SEEN})
    assert 'model_type unknown ("new-vl"); taken as a ViT by its vision_config' in model.notes[0]
    assert images_of(model.config) == (1, (224, 224), 256)
    assert sum(node.kind.key == "vision-block" for node in model.architecture(Microbatch(1, 512)).nodes) == 3


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (
            {"model_type": "mllama", "text_config": {**TEXT, "model_type": "x", "cross_attention_layers": [1]}},
            "text_config.cross_attention_layers",
        ),
        ({**TEXT, "model_type": "phi4mm", "embd_layer": {"image": 1}, "vision_lora": {"r": 8}}, "embd_layer"),
        ({**TEXT, "model_type": "llava_llama", "mm_vision_tower": "clip"}, "mm_vision_tower"),
    ],
)
def test_what_reads_images_otherwise_is_refused(tmp_path: Path, config: dict[str, Any], key: str) -> None:
    if "text_config" in config:
        config = {**config, "vision_config": SEEN}
    with pytest.raises(InputError) as error:
        read(tmp_path, config)
    assert key in [fault.path for fault in error.value.faults]


@pytest.mark.long
def test_the_screen_says_what_a_tower_holds_by_hand() -> None:
    """States, and activations of as many microbatches as the first of p ranks has in flight under 1F1B."""
    request = EstimateRequest(nodes=1, samples=1, batch=64, tokens=2048, offer=Offer(zero=ALL_REPLICAS))
    megatron = RUNTIMES[RuntimeName.MEGATRON]
    model, name = read_model("gemma-3-4b"), ScheduleName.ONE_F_ONE_B
    found = propose(PlanDemand(model, load_hardware(), "H100-SXM", request, megatron, (name,)), threads=1)
    plan, instance = found.best.plan, found.best.instance
    stage, nodes = plan.stages[0], found.best.estimate.architecture.nodes
    d, held_bytes = stage.data_parallel_degree, 0.0
    in_flight = min(len(plan.stages), instance.microbatches // d)
    for layer, _, tmpc in choices_made(instance, stage):
        if nodes[layer].path.startswith(TOWER_PATH):
            held_bytes += tmpc.fixed_bytes + tmpc.shared_bytes / d + in_flight * tmpc.activation_bytes
    console = Console(width=200, record=True, file=io.StringIO())
    print_plan(console, found, (), AskedOfPlan())
    text = " ".join(console.export_text().split())
    assert held_bytes > 0.0
    assert f"of the work there and {held_text(held_bytes)} of a GPU's memory" in text
