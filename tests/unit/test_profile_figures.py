"""Measured figures: bytes that autograd keeps, passes by a clock of our own, the file of partial figures, degrees."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from piper_ray.model.errors import InputError, LimitError, UsageError
from piper_ray.workloads.estimate.exchanges import Group, all_reduce_s
from piper_ray.workloads.estimate.hardware import load_hardware
from piper_ray.workloads.measure import session
from piper_ray.workloads.measure.build import LayerFigures, Store, estimated_ways, measured_ways, shard_ways
from piper_ray.workloads.measure.factory import TrainableModel
from piper_ray.workloads.measure.graph import TracedLayer, layers_of
from piper_ray.workloads.measure.heap import keeping_freed_memory
from piper_ray.workloads.measure.passes import (
    Kept,
    MeasuredPasses,
    Repeats,
    Resident,
    clock_of,
    kept_of,
    leaves_of,
    parameters_of,
    passes_of,
)
from piper_ray.workloads.measure.session import measured_layers

torch.set_num_threads(1)  # see profile_models

CPU = torch.device("cpu")
TABLE = load_hardware()
QUICK = Repeats(count=2, warm_up=0)


def layers_in(module: nn.Module, *inputs: torch.Tensor) -> list[TracedLayer]:
    return layers_of("here", TrainableModel(module.train(), (inputs, {})), ())


def kept_by(module: nn.Module, given: torch.Tensor, wanted: bool = True) -> Kept:
    (layer,) = layers_in(nn.Sequential(module), given)
    _, inputs = leaves_of(layer.inputs, [wanted])
    return kept_of(layer, inputs)[0]


def test_kept_bytes_by_hand() -> None:
    x = torch.randn(6, 8)
    number = x.element_size()
    # A product keeps its input. Two in a row keep the tensor between them, and a ReLU its result, which is the same.
    assert kept_by(nn.Linear(8, 4), x) == Kept(saved=48 * number, saved_inputs=48 * number, inputs=48 * number)
    inner = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = x + self.inner(x)
            return result

    assert kept_by(Block(), x) == Kept(saved=(48 + 96) * number, saved_inputs=48 * number, inputs=48 * number)
    # Without a gradient to the input the weights of the first product are not needed, its input still is.
    assert kept_by(Block(), x, wanted=False).saved == (48 + 96) * number

    # A view keeps the whole storage that it looks at: the half of a projection, its double.
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.last = nn.Linear(8, 32, bias=False), nn.Linear(16, 8, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.last(self.wide(x)[:, :16])
            return result

    saved = kept_by(Half(), x).saved
    assert saved in {
        (48 + 192) * number,
        (48 + 96) * number,
    }  # whether the product copies its operand is torch's choice


def test_parameters_and_buffers() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).half()
    module[0].bias.requires_grad_(False)
    held = parameters_of(module)
    assert Resident((2, 3), 2, True) in held
    assert Resident((2,), 2, False) in held
    assert Resident((), 8, False) in held  # how many batches the normalisation has seen
    assert sum(one.numbers for one in held) == 6 + 2 + 2 + 2 + 2 + 2 + 1


class Ticks:
    """A clock that moves by the next of ``steps`` at each look at it."""

    def __init__(self, steps: Iterator[float]) -> None:
        self.steps, self.now = steps, 0.0

    def __call__(self) -> Callable[[], float]:
        now = self.now = self.now + next(self.steps)
        return lambda: now


def test_medians_and_spread_of_the_measured_passes_only() -> None:
    (layer,) = layers_in(nn.Sequential(nn.Linear(2, 2)), torch.randn(3, 2))
    # Each pass: start, forward, the gradients' preparation (not counted), backward. The first two passes warm up.
    passes = [(90.0, 90.0), (90.0, 90.0), (1.0, 2.0), (1.0, 3.0), (2.0, 6.0), (1.0, 2.0), (9.0, 90.0)]
    steps = (step for forward_s, backward_s in passes for step in (50.0, forward_s, 50.0, backward_s))
    plain, again = passes_of(layer, [False], Repeats(5, 2), Ticks(steps), recompute=False)
    assert plain == MeasuredPasses(forward_s=1.0, backward_s=3.0, total_s=4.0, spread_s=5.0)
    assert again is None
    assert all(parameter.grad is None for parameter in layer.module.parameters())


def test_recomputation_is_measured_in_turn_with_the_plain_passes() -> None:
    calls = []

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(torch.is_grad_enabled())
            result: torch.Tensor = torch.tanh(self.linear(x))
            return result

    (layer,) = layers_in(nn.Sequential(Counting()), torch.randn(3, 2))
    calls.clear()
    plain, again = passes_of(layer, [True], Repeats(4, 0), clock_of(CPU), recompute=True)
    assert len(calls) == 4 * (1 + 2)  # a recomputed pass goes forward twice
    assert again is not None
    assert min(plain.total_s, again.total_s) > 0


class Launched(nn.Module):
    """A layer on a fake device, whose forward pass takes 3 s there."""

    now_s = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Launched.now_s += 3.0
        result: torch.Tensor = self.linear(x)
        return result


def test_equal_layers_are_measured_as_a_chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what it takes to begin and to end, a layer has the part that it has in a stage."""

    def clock() -> Callable[[], float]:
        Launched.now_s += 4.0  # the device has nothing to do while it is asked
        now_s = Launched.now_s
        return lambda: now_s

    monkeypatch.setattr(session, "clock_of", lambda _: clock)
    store = Store(tmp_path / "partial", {})
    store.start()
    module = nn.Sequential(*(Launched() for _ in range(7)))
    figures = measured(module, torch.randn(3, 2), store)
    # The input needs no gradient, so that the first is of another kind; four of the others run together.
    assert [one.plain.forward_s for one in figures] == [3.0 + 4.0] + [3.0 + 4.0 / 4] * 6
    assert all(parameter.grad is None for parameter in module.parameters())
    monkeypatch.setattr(session, "room_bytes", lambda _: 0.0)
    store = Store(tmp_path / "no-room", {})
    store.start()
    assert [one.plain.forward_s for one in measured(module, torch.randn(3, 2), store)] == [7.0] * 7


def test_a_chain_hands_on_what_its_layers_make() -> None:
    """What else they read stays as it was: here the second input."""

    class Added(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x * self.scale + y

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = nn.ModuleList(Added() for _ in range(3))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            for layer in self.stack:
                x = layer(x, y)
            return x

    first, *others = layers_in(Stack(), torch.ones(3, 2), torch.ones(3, 2))
    seen: list[torch.Tensor] = []
    others[-1].module.register_forward_hook(lambda _, __, outputs: seen.append(outputs[0]))
    passes_of(first, [False, False], Repeats(2, 1), clock_of(CPU), recompute=False, followers=others)
    assert [one.tolist() for one in seen] == [torch.full((3, 2), 4.0).tolist()] * 3


def test_a_gpu_is_warm_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    (layer,) = layers_in(nn.Sequential(nn.Linear(2, 2)), torch.randn(3, 2))
    seconds = iter(0.1 * number for number in range(99))
    monkeypatch.setattr(time, "perf_counter", lambda: next(seconds))
    calls = []
    layer.module.register_forward_hook(lambda *_: calls.append(1))
    passes_of(layer, [False], Repeats(2, 1, warm_up_s=0.55), lambda: lambda: 0.0, recompute=False)
    assert len(calls) == 6 + 2


def test_freed_memory_is_kept_within() -> None:
    """A tensor's pages are there for the next one: it asks the system for none."""
    resource = pytest.importorskip("resource")
    faults = []
    with keeping_freed_memory():
        for _ in range(6):
            torch.ones(8_000_000).sum()
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    assert min(after - before for before, after in pairwise(faults)) < 800  # of 7,812 pages


def test_a_layer_that_writes_into_its_input_can_be_measured_again_and_again(tmp_path: Path) -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sigmoid(x.mul_(2.0).relu_() * self.scale)

    module = nn.Sequential(nn.Linear(2, 2), InPlace())
    second = layers_in(module, torch.randn(3, 2))[1]
    before = second.inputs[0].clone()
    passes_of(second, [True], Repeats(3, 1), clock_of(CPU), recompute=False)
    assert torch.equal(second.inputs[0], before)
    store = Store(tmp_path / "partial", {})
    store.start()
    figures = measured(module, torch.randn(3, 2), store)[1]
    assert figures.kept.inputs < figures.kept.saved
    assert figures.recomputed is None  # its inputs are gone when they would be needed again


def test_two_profiles_of_a_model_agree_within_their_spread(tmp_path: Path) -> None:
    """Of every layer; tried again if the machine was disturbed."""
    module = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 64), nn.Linear(64, 64))
    given = torch.randn(256, 256)
    for _ in range(20):
        profiles = []
        for name in ("one", "two"):
            store = Store(tmp_path / name, {})
            store.start()
            profiles.append([one.plain for one in measured(module, given, store, Repeats(15, 3))])
        agree = [
            abs(one.total_s - two.total_s) <= one.spread_s + two.spread_s for one, two in zip(*profiles, strict=True)
        ]
        if all(agree):
            return
    pytest.fail(f"{profiles} differ by more than their spread, 20 times over")


def figures_for(forward_s: float = 1.0, **changes: object) -> LayerFigures:
    """A block of two matrices, in full precision."""
    plain = MeasuredPasses(forward_s, 2 * forward_s, 3 * forward_s, 0.1)
    figures = LayerFigures(
        plain=plain,
        recomputed=MeasuredPasses(forward_s, 3 * forward_s, 4 * forward_s, 0.2),
        kept=Kept(saved=1000, saved_inputs=200, inputs=200),
        parameters=(
            Resident((8, 4), 4, True),
            Resident((8,), 4, True),
            Resident((4, 8), 4, True),
            Resident((5, 5), 4, False),
        ),
        output_gradients=(True,),
        output_bytes=(400,),
        input_gradient_bytes=200,
    )
    return dataclasses.replace(figures, **changes)  # type: ignore[arg-type]


def test_one_device_has_what_was_measured() -> None:
    plain, full = measured_ways(figures_for(), TABLE.training)
    assert (plain.id, plain.degree, plain.recompute, plain.time_s) == ("plain", 1, False, 3.0)
    assert (full.id, full.recompute, full.time_s, full.transient_bytes) == ("full", True, 4.0, 1000.0)
    assert (plain.activation_bytes, full.activation_bytes) == (1000.0, 200.0)
    numbers = 32 + 8 + 32
    assert plain.gradient_bytes == 4 * numbers
    assert plain.state_bytes == (4 + 4 + 8) * numbers + 4 * 25  # Adam; the buffer has neither gradient nor state


def test_half_precision_has_its_own_gradients_and_full_precision_weights_and_moments() -> None:
    (plain,) = measured_ways(figures_for(parameters=(Resident((10,), 2, True),), recomputed=None), TABLE.training)
    assert (plain.gradient_bytes, plain.state_bytes) == (20.0, 160.0)


def test_estimated_degrees_divide_matrices_and_add_all_reduces() -> None:
    gpu = TABLE.gpu("A100-80")
    plain, full = estimated_ways(figures_for(), 4, TABLE.training, gpu)
    outputs_s, inputs_s = (all_reduce_s(size, Group(4), gpu, 4) for size in (400.0, 200.0))  # once: two matrices
    assert plain.id == "plain-estimated"
    assert plain.time_s == pytest.approx(3.0 / 4 + outputs_s + inputs_s)
    assert full.time_s == pytest.approx(4.0 / 4 + 2 * outputs_s + inputs_s)
    assert plain.activation_bytes == 200 + 800 / 4
    assert plain.gradient_bytes == 4 * (8 + 8 + 8)


def test_what_cannot_be_divided_each_device_has() -> None:
    gpu = TABLE.gpu("A100-80")
    norm = figures_for(parameters=(Resident((8,), 4, True), Resident((5, 7), 4, True)))
    plain, full = estimated_ways(norm, 4, TABLE.training, gpu)
    assert (plain.time_s, full.time_s, plain.activation_bytes) == (3.0, 4.0, 1000.0)


def test_shards_are_as_measured_with_all_reduces() -> None:
    gpu = TABLE.gpu("A100-80")
    shard = figures_for(0.3, parameters=(Resident((4, 4), 4, True), Resident((8,), 4, True), Resident((4, 4), 4, True)))
    plain, _ = shard_ways(shard, figures_for(), 2, TABLE.training, gpu)
    assert plain.id == "plain-shard"
    assert plain.time_s == pytest.approx(0.9 + sum(all_reduce_s(size, Group(2), gpu, 2) for size in (400.0, 200.0)))
    whole, _ = shard_ways(figures_for(), figures_for(), 2, TABLE.training, gpu)
    assert whole.time_s == 3.0  # nothing is divided, so nothing has to be told


def test_partial_figures_are_kept_and_found_again(tmp_path: Path) -> None:
    path = tmp_path / "x.toml.partial"
    store = Store(path, {"model": "a"})
    store.start()
    store.add("one", figures_for())
    store.add("two", figures_for(2.0, recomputed=None))
    with path.open("a") as file:
        file.write('{"signature": "three", "figu')  # the machine stopped here
    again = Store(path, {"model": "a"})
    again.resume()
    assert len(again) == 2
    assert (again.get("one"), again.get("two")) == (figures_for(), figures_for(2.0, recomputed=None))
    assert again.get("three") is None
    again.add("three", figures_for())
    assert [json.loads(line).get("signature") for line in path.read_text().splitlines()] == [
        None,
        "one",
        "two",
        "three",
    ]
    with pytest.raises(UsageError, match="is of another profile: other model; without --resume one starts anew"):
        Store(path, {"model": "b"}).resume()
    path.write_text("no JSON")
    with pytest.raises(UsageError, match="cannot be read"):
        Store(path, {"model": "a"}).resume()
    with pytest.raises(UsageError, match="cannot be written: No such file"):
        Store(tmp_path / "none" / "x", {}).start()
    fresh = Store(tmp_path / "fresh", {})
    fresh.resume()
    assert (len(fresh), fresh.path.exists()) == (0, True)


def measured(module: nn.Module, given: torch.Tensor, store: Store, repeats: Repeats = QUICK) -> list[LayerFigures]:
    layers = layers_in(module, given)
    return [one.figures for one in measured_layers("here", layers, repeats, CPU, store, print)]


def test_equal_layers_are_measured_once_and_gradients_reach_as_far_as_they_must(tmp_path: Path) -> None:
    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(98)))
    for parameter in module[0].parameters():
        parameter.requires_grad_(False)
    store = Store(tmp_path / "partial", {})
    store.start()
    figures = measured(module, torch.randn(2, 4), store)
    # The first is frozen; the second needs no gradient of its input; all others are alike.
    assert len(store) == 3
    assert [one.output_gradients for one in figures] == [(False,)] + [(True,)] * 97
    assert [one.input_gradient_bytes for one in figures] == [0, 0] + [32] * 96
    assert figures[0].plain.backward_s == 0.0
    assert figures[0].kept.saved == 0


def test_a_layer_that_fails_is_named(tmp_path: Path) -> None:
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if torch.is_grad_enabled():
                raise self.error
            result: torch.Tensor = self.linear(x)
            return result

        error: Exception = ValueError("only for inference")

    store = Store(tmp_path / "partial", {})
    store.start()
    with pytest.raises(InputError, match=r"1: ValueError: only for inference \(.*test_profile_figures.py:\d+\)"):
        measured(nn.Sequential(nn.Linear(4, 4), Failing()), torch.randn(2, 4), store)
    Failing.error = torch.OutOfMemoryError("full")
    with pytest.raises(
        LimitError, match="layer 1 does not fit in the device's memory; expected a smaller --microbatch"
    ):
        measured(nn.Sequential(nn.Linear(4, 4), Failing()), torch.randn(2, 4), store)


@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def test_clocks_go_forward(device: str) -> None:
    clock = clock_of(torch.device(device))
    first, second = clock(), clock()
    assert second() >= first()
