"""A model cut by a plan, in one process: stages one after the other do what the model does; what cannot be cut."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from piper_ray.model.errors import InputError
from piper_ray.model.schedule import ScheduleName
from piper_ray.run.data import Data, PassInputs
from piper_ray.run.pipeline import StageLoss
from piper_ray.run.stages import StageModule, borders_of, cuts_of, untouched
from piper_ray.workloads.measure.factory import Factory, TrainableModel, find_factory
from piper_ray.workloads.measure.graph import traced_model
from tests.run_models import AWKWARD_PATHS, HERE, SKIPPING_PATHS
from tests.run_support import GPT_PATHS, job

CPU = torch.device("cpu")


def _stages(
    model: TrainableModel, paths: tuple[str, ...], borders: tuple[int, ...], *, whole: bool = False
) -> list[StageModule]:
    with untouched(model.module):
        return _looked_at(model, paths, borders, whole=whole)


def _looked_at(
    model: TrainableModel, paths: tuple[str, ...], borders: tuple[int, ...], *, whole: bool
) -> list[StageModule]:
    wanted = job(ScheduleName.GPIPE, borders, paths=paths, recompute=(1,))
    traced = traced_model("here", model, sorted(set(paths)))
    cuts = cuts_of("here", wanted.stages, traced)
    stages = [StageModule(cut, traced.layers, whole=whole) for cut in cuts]
    example, loss = PassInputs.of(model.inputs), StageLoss("here", traced.result, model.loss)
    for stage, border in zip(
        stages, borders_of("here", stages, example.tensors, lambda outputs: loss(outputs, example.inputs)), strict=True
    ):
        stage.copied, stage.sends = border.written, border.sent
        assert len(border.received) == len(stage.cut.received)
        assert len(border.sent) == len(stage.cut.sent)
    return stages


@pytest.mark.parametrize(
    ("name", "paths"), [("gpt", GPT_PATHS), ("skipping", SKIPPING_PATHS), ("awkward", AWKWARD_PATHS)]
)
@pytest.mark.parametrize("seed", range(6))
def test_stages_do_what_the_model_does(name: str, paths: tuple[str, ...], seed: int) -> None:
    """Forwards, and backwards through borders where nothing but tensors and gradients passes."""
    chosen = random.Random(seed)
    places = [place for place in range(1, len(paths)) if paths[place] != paths[place - 1]]
    borders = tuple(sorted(chosen.sample(places, chosen.randint(0, len(places)))))
    factory = find_factory(f"{HERE}:{name}", {})
    model = factory.build(2, CPU, ())
    stages = _stages(model, paths, borders, whole=seed % 2 == 0)
    before = {key: value.clone() for key, value in model.module.state_dict().items()}
    example = PassInputs.of(model.inputs)
    received: tuple[torch.Tensor, ...] = ()
    passes = []
    for stage in stages:
        leaves = tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in received)
        received = stage(*leaves, **example.tensors)
        assert all(tensor.is_contiguous() for tensor in received)
        assert not any(tensor._is_view() for tensor in received) or seed % 2
        passes.append((leaves, received))
    gradients: list[Any] = [torch.full_like(tensor, 0.5) for tensor in received]
    for leaves, sent in reversed(passes):
        pairs = [(tensor, gradient) for tensor, gradient in zip(sent, gradients, strict=True) if tensor.requires_grad]
        if pairs:
            torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])
        gradients = [leaf.grad for leaf in leaves]
        assert all(gradient is None or gradient.is_contiguous() for gradient in gradients)
    found = {key: value.grad for key, value in model.module.named_parameters()}
    outputs = [tensor.detach() for tensor in received]

    model.module.load_state_dict(before)
    model.module.zero_grad()
    returned = model.module(*model.inputs[0], **model.inputs[1])
    expected = list(returned.values()) if isinstance(returned, dict) else [returned]
    torch.autograd.backward(expected, [torch.full_like(tensor, 0.5) for tensor in expected])
    for output, wanted in zip(outputs, expected, strict=True):
        assert torch.equal(output, wanted)
    for key, parameter in model.module.named_parameters():
        assert (found[key] is None) == (parameter.grad is None)
        if parameter.grad is not None:
            torch.testing.assert_close(found[key], parameter.grad, rtol=1e-4, atol=1e-6)


def test_the_look_at_borders_changes_nothing() -> None:
    model = find_factory(f"{HERE}:awkward", {}).build(2, CPU, ())
    before = {key: value.clone() for key, value in model.module.state_dict().items()}
    torch.manual_seed(7)
    state = torch.get_rng_state()
    stages = _stages(model, AWKWARD_PATHS, (3, 4))
    assert torch.equal(state, torch.get_rng_state())
    after = model.module.state_dict()
    assert all(torch.equal(value, after[key]) for key, value in before.items() if "running" in key or "num_" in key)
    assert stages[2].copied == {0}  # its first layer writes into what it gets
    assert stages[1].copied == frozenset()


def _two(*layers: nn.Module, loss: Callable[..., object] | None = None) -> TrainableModel:
    return TrainableModel(nn.Sequential(*layers).train(), ((torch.randn(2, 4),), {}), loss)


def _tied() -> TrainableModel:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    return _two(first, second)


def _linear(loss: Callable[..., object] | None = None) -> TrainableModel:
    return _two(nn.Linear(4, 4), nn.Linear(4, 4), loss=loss)


def test_what_the_next_stage_has_no_room_for_is_told() -> None:
    """It would be received as other numbers than those that were sent."""
    first, _ = _stages(_linear(), ("0", "1"), (1,))
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(InputError, match=r"0: 1 fault found\n  sends bfloat16 \(2, 4\), and sent float32 \(2, 4\) when"),
    ):
        first(input_0=torch.randn(2, 4))
    with pytest.raises(
        InputError, match=r"sends float32 \(3, 4\), and sent float32 \(2, 4\) when the model was traced"
    ):
        first(input_0=torch.randn(3, 4))


@pytest.mark.parametrize(
    ("model", "paths", "words"),
    [
        (
            _tied(),
            ("0", "1"),
            "1.weight: belongs to stage 2, and as 0.weight to stage 1; expected a plan that keeps it",
        ),
        (_linear(), ("0", "1", "1"), "1: is in the plan 2 times, and called 1 times; expected its own plan"),
        (_linear(), ("1", "0"), "1: of stage 1 reads what 0 of the later stage 2 makes; expected stages front to back"),
        (_linear(lambda found, _: found), ("0", "1"), "its loss is a tensor of shape (2, 4); expected a tensor of one"),
        (_linear(lambda *_: "no loss"), ("0", "1"), "its loss is a str; expected a tensor of one number"),
        (
            _linear(lambda found, _: found.detach().sum()),
            ("0", "1"),
            "its loss is a tensor of shape () without gradient; expected a tensor of one number with a gradient",
        ),
        (_linear(lambda found, _: found / []), ("0", "1"), "the loss: TypeError: unsupported operand"),
        (
            _two(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4).requires_grad_(False)),
            ("0", "1"),
            "returns nothing that has a gradient; expected a model that can be trained",
        ),
    ],
)
def test_what_cannot_be_run_is_told(model: TrainableModel, paths: tuple[str, ...], words: str) -> None:
    with pytest.raises(InputError) as told:
        _stages(model, paths, (1,))
    assert words in str(told.value)


def test_a_layer_that_the_plan_does_not_have_is_told() -> None:
    model = _two(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    traced = traced_model("here", model, ())
    with pytest.raises(InputError, match="2: is in no stage of the plan; expected a plan of this model"):
        cuts_of("here", job(ScheduleName.GPIPE, (1,), paths=("0", "1")).stages, traced)
    with pytest.raises(InputError, match="3: is in the plan, and the forward pass calls no such module"):
        cuts_of("here", job(ScheduleName.GPIPE, (1,), paths=("0", "1", "2", "3")).stages, traced)


def _data(call: Callable[..., object], declared: str | None = None) -> Data:
    from piper_ray.workloads.measure.factory import parse_input

    factory = Factory("here", call, {}, None)
    inputs = [] if declared is None else [parse_input(declared)]
    return Data(factory, factory.build(3, CPU, inputs), inputs, 3)


def test_microbatches_are_the_factory_s_and_the_same_on_every_rank() -> None:
    def streaming() -> object:
        def pairs() -> Any:
            while True:
                yield torch.randn(3, 4)

        return nn.Linear(4, 4), pairs()

    first, second = (_data(streaming) for _ in range(2))
    steps = [[one.tensors["input_0"] for one in first.batch(2)] for _ in range(2)]
    again = [[one.tensors["input_0"] for one in second.batch(2)] for _ in range(2)]
    flat = [tensor for step in steps for tensor in step]
    assert all(torch.equal(a, b) for a, b in zip(flat, [x for step in again for x in step], strict=True))
    assert len({tuple(tensor.flatten().tolist()) for tensor in flat}) == 4


def test_declared_inputs_are_drawn_anew_and_an_example_is_repeated() -> None:
    drawn = _data(lambda: nn.Linear(4, 4), "4").batch(2)
    assert [one.tensors["input_0"].shape for one in drawn] == [(3, 4)] * 2
    assert not torch.equal(drawn[0].tensors["input_0"], drawn[1].tensors["input_0"])
    repeated = _data(lambda: (nn.Linear(4, 4), torch.arange(8.0).view(2, 4))).batch(2)
    assert torch.equal(repeated[0].tensors["input_0"], repeated[1].tensors["input_0"])
    assert repeated[0].tensors["input_0"].shape == (3, 4)


def test_microbatches_that_end_or_change_are_told() -> None:
    data = _data(lambda: (nn.Linear(4, 4), iter([torch.randn(3, 4)] * 2)))
    with pytest.raises(InputError, match="gives no more example inputs; expected an iterator that does not end"):
        data.batch(2)
    changing = _data(lambda: (nn.Linear(4, 4), iter([torch.randn(3, 4), torch.randn(3, 5)])))
    with pytest.raises(InputError, match=r"inputs of \(3, 5\) float32 after \(3, 4\) float32; expected all"):
        changing.batch(1)
