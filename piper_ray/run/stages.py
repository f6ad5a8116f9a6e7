"""A traced model cut by a plan: what each stage runs, and which tensors cross its borders.

A border carries all tensors that are produced before it and read after it. Tensors that skip stages are passed on by
each stage on the way, because torch's stages only communicate with their neighbours. The model's inputs cross no
border: every stage has them. One microbatch is run through all stages, on the CPU, to find what crosses borders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from piper_ray.model.errors import Fault, InputError
from piper_ray.run.job import LayerJob
from piper_ray.workloads.measure.factory import place_of, words_of
from piper_ray.workloads.measure.graph import TensorSource, TracedLayer, TracedModel
from piper_ray.workloads.measure.meta import materialise, move_graph


@dataclass(frozen=True)
class Cut:
    """The cut of one stage. layers: numbers of the traced layers, ascending; recompute: the layers that recompute.

    received, sent: the tensors that cross its borders; the last stage sends the model's outputs.
    """

    layers: tuple[int, ...]
    recompute: frozenset[int]
    received: tuple[TensorSource, ...]
    sent: tuple[TensorSource, ...]


def cuts_of(spec: str, stages: Sequence[Sequence[LayerJob]], traced: TracedModel) -> list[Cut]:
    """The cut of each stage. stages: the layers of each. Raises InputError, naming each layer that does not fit, if
    plan and model do not fit together."""
    stage_of, recompute = _placed(spec, stages, traced.layers)
    outputs = _outputs(spec, traced)
    readers = [(source, stage_of[number]) for number, layer in enumerate(traced.layers) for source in layer.sources]
    readers += [(source, len(stages) - 1) for source in outputs]
    _check_order(spec, traced.layers, stage_of)
    _check_ties(spec, traced.layers, stage_of)
    last: dict[TensorSource, int] = {}
    for source, stage in readers:
        if source.layer is not None:
            last[source] = max(last.get(source, 0), stage)
    made = {source: stage_of[source.layer] for source in last if source.layer is not None}
    order = sorted(last, key=lambda source: (source.layer, source.output))
    cuts: list[Cut] = []
    for stage in range(len(stages)):
        crossing = [source for source in order if made[source] <= stage < last[source]]
        cuts.append(
            Cut(
                layers=tuple(number for number in sorted(stage_of) if stage_of[number] == stage),
                recompute=frozenset(recompute),
                received=cuts[-1].sent if cuts else (),
                sent=tuple(crossing) if stage < len(stages) - 1 else outputs,
            )
        )
    return cuts


def _placed(
    spec: str, stages: Sequence[Sequence[LayerJob]], layers: Sequence[TracedLayer]
) -> tuple[dict[int, int], set[int]]:
    """For each traced layer its stage; and the layers that recompute."""
    calls: dict[str, int] = {}
    numbers: dict[tuple[str, int], int] = {}
    for number, layer in enumerate(layers):
        calls[layer.path] = calls.get(layer.path, -1) + 1
        numbers[layer.path, calls[layer.path]] = number
    stage_of: dict[int, int] = {}
    recompute: set[int] = set()
    faults = []
    for stage, wanted in enumerate(stages):
        for layer_job in wanted:
            found = numbers.get((layer_job.path, layer_job.call))
            if found is None:
                faults.append(Fault(layer_job.path, _missing_text(layer_job, calls)))
                continue
            stage_of[found] = stage
            if layer_job.recompute:
                recompute.add(found)
    faults += [
        Fault(layer.path, "is in no stage of the plan; expected a plan of this model")
        for number, layer in enumerate(layers)
        if number not in stage_of and not faults
    ]
    if faults:
        raise InputError(spec, faults)
    return stage_of, recompute


def _missing_text(layer: LayerJob, calls: Mapping[str, int]) -> str:
    if layer.path not in calls:
        return "is in the plan, and the forward pass calls no such module; expected a plan of this model"
    return f"is in the plan {layer.call + 1} times, and called {calls[layer.path] + 1} times; expected its own plan"


def _outputs(spec: str, traced: TracedModel) -> tuple[TensorSource, ...]:
    found = tuple(source for source in traced.outputs if source is not None)
    if len(found) < len(traced.outputs):
        what = "the model returns what no layer has computed, from its inputs alone; expected outputs of layers"
        raise InputError(spec, [Fault("", what)])
    return found


def _check_order(spec: str, layers: Sequence[TracedLayer], stage_of: Mapping[int, int]) -> None:
    faults = [
        Fault(
            layer.path,
            f"of stage {stage_of[number] + 1} reads what {layers[source.layer].path} of the later stage "
            f"{stage_of[source.layer] + 1} makes; expected stages front to back",
        )
        for number, layer in enumerate(layers)
        for source in layer.sources
        if source.layer is not None and stage_of[source.layer] > stage_of[number]
    ]
    if faults:
        raise InputError(spec, faults)


def _check_ties(spec: str, layers: Sequence[TracedLayer], stage_of: Mapping[int, int]) -> None:
    """Raises InputError for a parameter of several stages, each of which would train a copy of its own."""
    first: dict[int, tuple[str, int]] = {}
    faults = []
    for number, layer in enumerate(layers):
        for name, parameter in layer.module.named_parameters(remove_duplicate=False):
            other, stage = first.setdefault(id(parameter), (name, stage_of[number]))
            if stage != stage_of[number]:
                what = f"belongs to stage {stage_of[number] + 1}, and as {other} to stage {stage + 1}"
                faults.append(Fault(name, f"{what}; expected a plan that keeps it in one stage, or weights apart"))
    if faults:
        raise InputError(spec, faults)


class StageModule(nn.Module):
    """A stage: turns the tensors that it receives, and inputs of the model by name, into those that it sends.

    copied: numbers of the received tensors that layers write into. sends: tensors like those that the next stage
    expects; None if there is no next stage. writing: the layers that write into their inputs, by number.
    whole: sent tensors are never views, as torch requires if the backward pass is split.
    """

    def __init__(self, cut: Cut, layers: Sequence[TracedLayer], *, whole: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers[number].module for number in cut.layers)
        self.copied: frozenset[int] = frozenset()
        self.sends: tuple[torch.Tensor, ...] | None = None
        self.writing: set[int] = set()
        self.whole = whole
        self.cut = cut
        self.paths = [layers[number].path for number in cut.layers]
        self._sources = [layers[number].sources for number in cut.layers]

    @property
    def reads_inputs(self) -> bool:
        """Whether it reads inputs of the model."""
        return any(source.layer is None for sources in self._sources for source in sources)

    def forward(self, *received: torch.Tensor, **inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Runs the stage. Raises InputError for tensors that the next stage does not expect."""
        sent = self.run([_bordered(tensor, copied=i in self.copied) for i, tensor in enumerate(received)], inputs)
        if self.sends is not None and list(map(_form, sent)) != list(map(_form, self.sends)):
            found, traced = (", ".join(map(_form, tensors)) for tensors in (sent, self.sends))
            what = (
                f"sends {found}, and sent {traced} when the model was traced; expected inputs and an autocast mode as "
                "then, and shapes that do not depend on numbers"
            )
            raise InputError(", ".join(self.paths), [Fault("", what)])
        return sent

    def run(self, received: Sequence[torch.Tensor], inputs: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Runs the layers, which may write into the received tensors."""
        there = dict(zip(self.cut.received, received, strict=True))
        for number, module, sources in zip(self.cut.layers, self.layers, self._sources, strict=True):
            given = [_found(source, there, inputs) for source in sources]
            versions = [tensor._version for tensor in given]
            if number in self.cut.recompute:
                outputs: Any = checkpoint(module, *given, use_reentrant=False)
            else:
                outputs = module(*given)
            if versions != [tensor._version for tensor in given]:
                self.writing.add(number)
            for index, output in enumerate(outputs):
                there[TensorSource(number, index)] = output
        return tuple(self._sent(_found(source, there, inputs)) for source in self.cut.sent)

    def on(self, device: torch.device) -> StageModule:
        """The same module on another device than the one of the trace, which the layers' graphs name. Tensors that were
        traced without values get values."""
        is_bare = any(one.is_meta for one in [*self.parameters(), *self.buffers()])
        materialise(self, device)
        if is_bare or device.type != "cpu":
            for layer in self.layers:
                move_graph(layer, device)
        return self.to(device)

    def _sent(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.whole and tensor._is_view():
            return tensor.clone(memory_format=torch.contiguous_format)
        return tensor.contiguous()


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def input_name(number: int) -> str:
    """The keyword by which stages receive a tensor of the model's inputs."""
    return f"input_{number}"


def _found(
    source: TensorSource, there: Mapping[TensorSource, torch.Tensor], inputs: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    return inputs[input_name(source.output)] if source.layer is None else there[source]


class _Border(torch.autograd.Function):
    """The border where a stage begins. It does not change the tensor. Its gradient is sent, and is therefore made
    contiguous."""

    @staticmethod
    def forward(_: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.contiguous()


def _bordered(tensor: torch.Tensor, *, copied: bool) -> torch.Tensor:
    passed: torch.Tensor = _Border.apply(tensor) if tensor.requires_grad else tensor
    return passed.clone() if copied else passed


@dataclass(frozen=True)
class Border:
    """What a stage receives and sends: tensors without data (device meta) that state whether they have gradients.

    written: numbers of the received tensors that its layers write into. idle: some of its parameters get no gradient.
    """

    received: tuple[torch.Tensor, ...]
    sent: tuple[torch.Tensor, ...]
    written: frozenset[int]
    idle: bool


def borders_of(
    spec: str,
    stages: Sequence[StageModule],
    inputs: Mapping[str, torch.Tensor],
    loss: Callable[[tuple[torch.Tensor, ...]], torch.Tensor],
) -> list[Border]:
    """The borders of all stages. loss: of what the last stage sends. Raises InputError."""
    borders = []
    received: tuple[torch.Tensor, ...] = ()
    for number, stage in enumerate(stages, start=1):
        leaves = tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in received)
        what = f"stage {number}"
        try:
            with torch.enable_grad():
                given = [leaf.clone() for leaf in leaves]
                versions = [tensor._version for tensor in given]
                sent = stage.run(given, inputs)
                ends = sent
                if number == len(stages):
                    what = "the loss"
                    ends = (loss(sent),)
        except InputError:
            raise
        except Exception as error:
            where = place_of(error)
            fault = Fault(what, words_of(error) + (f" ({where})" if where else ""))
            raise InputError(spec, [fault]) from error
        written = frozenset(i for i, tensor in enumerate(given) if tensor._version != versions[i])
        idle = not _reached(ends) >= {id(one) for one in stage.parameters() if one.requires_grad}
        borders.append(Border(_shapes(received), _shapes(sent), written, idle))
        received = sent
    return borders


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Passes inside this context leave buffers and the random state unchanged."""
    kept = [(buffer, buffer.clone()) for buffer in module.buffers()]
    with torch.random.fork_rng(devices=[]):
        yield
    with torch.no_grad():
        for buffer, before in kept:
            buffer.copy_(before)


def _reached(ends: Sequence[torch.Tensor]) -> set[int]:
    """Ids of the parameters for which ``ends`` have gradients."""
    found: set[int] = set()
    seen: set[object] = set()
    open_nodes: list[Any] = [end.grad_fn for end in ends if end.grad_fn is not None]
    while open_nodes:
        node = open_nodes.pop()
        if node not in seen:
            seen.add(node)
            found.add(id(getattr(node, "variable", None)))
            open_nodes += [before for before, _ in node.next_functions if before is not None]
    return found


def _shapes(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return tuple(
        torch.empty(tensor.shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)
        for tensor in tensors
    )
