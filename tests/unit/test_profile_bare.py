"""Models that no device holds: traced without numbers, and given some a layer or a stage at a time."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from piper_ray.run.data import Data
from piper_ray.run.job import LayerJob
from piper_ray.run.pipeline import divided_model
from piper_ray.workloads.measure import session
from piper_ray.workloads.measure.factory import TrainableModel, find_factory
from piper_ray.workloads.measure.graph import TracedLayer, layers_of
from piper_ray.workloads.measure.meta import materialise, move_graph
from piper_ray.workloads.measure.passes import Repeats, passes_of
from tests.profile_models import GPT
from tests.run_models import HERE
from tests.unit.test_profile_command import QUICK, SMALL, run

CPU, META = torch.device("cpu"), torch.device("meta")


def test_a_model_that_is_too_large_is_profiled_layer_by_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []

    def counted(layer: TracedLayer, *rest: Any, **options: Any) -> Any:
        assert not any(one.is_meta for one in [*layer.inputs, *layer.module.parameters()])
        held.append(sum(one.nbytes for one in layer.module.parameters()))
        return passes_of(layer, *rest, **options)

    texts = []
    for room_bytes, words in ((1e9, ""), (0.0, "Weights   drawn anew for each kind of layer")):
        monkeypatch.setattr(session, "room_bytes", lambda _, found=room_bytes: found)
        monkeypatch.setattr(session, "passes_of", counted if not room_bytes else passes_of)
        out = tmp_path / f"{room_bytes:g}.toml"
        result = run(GPT, "--microbatch-size", 2, *SMALL, "--arg", "layers=4", *QUICK, "-o", out)
        assert (result.exit_code, result.stderr) == (0, "")
        assert words in result.output
        texts.append(re.findall(r"(?:weights|activation|fixed|id) = [^,}]*", out.read_text()))
    assert len(held) == 5, "kinds of layers, one at a time"
    assert texts[0] == texts[1]


@pytest.mark.parametrize("name", ["gpt", "skipping"])
def test_stages_get_numbers_and_train(name: str) -> None:
    factory = find_factory(f"{HERE}:{name}", {})
    model = factory.build_within(2, CPU, (), 0.0)
    assert all(one.is_meta for one in model.module.parameters())
    paths = [layer.path for layer in layers_of("here", model, [])]
    jobs = [LayerJob(path, 0, recompute=False) for path in paths]
    stages, borders, loss = divided_model("here", [jobs[:2], jobs[2:]], model, model.inputs, whole=False)
    assert all(one.is_meta for border in borders for one in border.sent)
    again, _, _ = divided_model("here", [jobs[:2], jobs[2:]], model, model.inputs, whole=False)
    for stage, replica in zip(stages, again, strict=True):
        stage.on(CPU)
        assert all(map(torch.equal, stage.parameters(), replica.on(CPU).parameters()))
    (example,) = Data(factory, model, (), 2).batch(1)
    found = stages[1](*stages[0](**example.tensors), **example.tensors)
    torch.autograd.backward(loss(found, example.inputs))
    assert all(one.grad is not None and not one.is_meta for stage in stages for one in stage.parameters())


def test_weights_that_are_shared_stay_so_and_modules_draw_their_own() -> None:
    with META:
        first, norm, second = nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 3)
    second.weight = first.weight
    materialise(nn.Sequential(first, norm, second), CPU)
    assert second.weight is first.weight
    assert torch.equal(norm.weight, torch.ones(3))
    assert 0.0 < first.weight.abs().max() < 1.0


class Placed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x) + torch.ones(3, device="cpu") + torch.zeros(3, device=x.device)
        return out.to("cpu")


def test_graphs_name_the_device_that_they_run_on() -> None:
    """Whether the code says it as a text or as a device; the meta device stands in for a GPU."""
    (layer,) = layers_of("here", TrainableModel(Placed(), ((torch.zeros(2, 3),), {}), None), [])
    move_graph(layer.module, META)
    found = [
        value
        for node in layer.module.graph.nodes
        for value in (*node.args, *node.kwargs.values())
        if isinstance(value, (str, torch.device))
    ]
    assert found == [META], "the constants are tensors by then"
    (out,) = layer.module.to(META)(torch.zeros(2, 3, device=META))
    assert out.is_meta


def test_a_gpu_is_asked_for_times_when_it_is_done() -> None:
    """Asking waits for the device, which would then have gaps between passes."""
    asked: list[int] = []
    marks = 0

    def clock() -> Any:
        nonlocal marks
        marks += 1
        at, before = float(marks), len(asked)
        assert not before

        def seconds() -> float:
            asked.append(marks)
            return at

        return seconds

    (layer,) = layers_of("here", TrainableModel(Placed(), ((torch.zeros(2, 3),), {}), None), [])
    plain, _ = passes_of(layer, [False], Repeats(3, 1), clock, recompute=False)
    assert (plain.forward_s, plain.backward_s) == (1.0, 1.0)
    assert set(asked) == {4 * 4}
