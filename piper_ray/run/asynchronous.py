"""A rank's part of a pipeline that never drains: one stage, whose passes use versions of its weights, over gloo.

torch's pipelines end with each batch and have the same number of replicas everywhere, so here passes are called, and
tensors sent, one by one. Replica k mod d of each stage runs microbatch k. A version of the weights is a list of
parameters; before a pass its version is put into the module, also before a backward pass, which may recompute. An
update takes the gradients of the used version, and makes the next version from the newest one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from piper_ray.run.data import Data, PassInputs
from piper_ray.run.job import Job, pass_stream
from piper_ray.run.pipeline import PassFailed, Recorder, begin_alike, divided_model, mean_gradients
from piper_ray.run.stages import Border, StageModule
from piper_ray.simulate.actions import ActionKind
from piper_ray.workloads.measure.factory import TrainableModel
from piper_ray.workloads.measure.passes import clock_of

_CPU = torch.device("cpu")

Optimizing = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
"""Makes the optimizer of given parameters."""


class VersionedWeights:
    """The newest version of a module's trained parameters, and those that passes in flight need. most: the most at a
    time."""

    def __init__(self, module: nn.Module, optimizer: Optimizing) -> None:
        places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for owner in module.modules():
            for name, parameter in owner._parameters.items():
                if parameter is not None and parameter.requires_grad:
                    places.setdefault(parameter, []).append((owner, name))
        self._places = list(places.values())
        self._there = {0: list(places)}
        self.updates, self.most = 0, 1
        self._optimizer = optimizer(list(places)) if places else None

    def use(self, version: int) -> None:
        """Makes the module's passes use this version."""
        for places, parameter in zip(self._places, self._there[version], strict=True):
            for owner, name in places:
                setattr(owner, name, parameter)

    def take_gradients(self, version: int, passes: int) -> list[torch.Tensor | None]:
        """The gradients at a version, divided by ``passes``, the number of backward passes that added to them. Clears
        them."""
        found = []
        for parameter in self._there[version]:
            found.append(None if parameter.grad is None else parameter.grad.div_(passes))
            parameter.grad = None
        return found

    def prepare(self, gradients: Sequence[torch.Tensor | None], oldest: int) -> list[nn.Parameter]:
        """The parameters of the next version, with the newest one's values, and with these gradients. oldest: the first
        version that a later pass will use; earlier ones are freed."""
        newest = self._there[self.updates]
        self._there = {version: kept for version, kept in self._there.items() if version >= oldest}
        following = newest
        if self.updates in self._there:
            following = [nn.Parameter(parameter.detach().clone()) for parameter in newest]
            self._hand_over(newest, following)
        self.updates += 1
        self._there[self.updates] = following
        self.most = max(self.most, len(self._there))
        for parameter, gradient in zip(following, gradients, strict=True):
            parameter.grad = gradient
        return following

    def step(self) -> None:
        """The optimizer's step, on the newest version."""
        if self._optimizer is not None:
            self._optimizer.step()
            self._optimizer.zero_grad()

    def _hand_over(self, before: Sequence[nn.Parameter], after: Sequence[nn.Parameter]) -> None:
        """Makes the optimizer continue with other parameters."""
        if self._optimizer is not None:
            self._optimizer.param_groups[0]["params"] = list(after)
            for one, other in zip(before, after, strict=True):
                if one in self._optimizer.state:
                    self._optimizer.state[other] = self._optimizer.state.pop(one)


@dataclass
class _InFlight:
    """A microbatch between its passes: what a stage received, and what it computed."""

    received: list[torch.Tensor]
    made: tuple[torch.Tensor, ...]


@dataclass
class _Arriving:
    tensors: list[torch.Tensor]
    works: list[Any] = field(default_factory=list)

    def wait(self) -> list[torch.Tensor]:
        for work in self.works:
            work.wait()
        return self.tensors


class AsynchronousStage:
    """This rank's replica of a stage. losses: of its microbatches, on the last stage."""

    def __init__(self, job: Job, model: TrainableModel, data: Data, optimizer: Optimizing) -> None:
        """The process group must exist. Raises InputError for a model that the plan does not fit."""
        self._job, self.stream, self._data = job, pass_stream(job), data
        self.stage, self.replica = job.seat(dist.get_rank())
        modules, borders, self._loss = divided_model(job.model, job.stages, model, model.inputs, whole=False)
        groups = [
            dist.new_group([job.rank_of(stage, replica) for replica in range(d)]) if d > 1 else None
            for stage, d in enumerate(job.degrees)
        ]
        self._group = groups[self.stage]
        self.module: StageModule = modules[self.stage]
        self._border: Border = borders[self.stage]
        if self._group is not None:
            begin_alike(self.module, self._group)
        self.weights = VersionedWeights(self.module, optimizer)
        self.recorder = Recorder(clock_of(_CPU), 0, 1)
        self.losses: dict[int, float] = {}
        self._in_flight: dict[int, _InFlight] = {}
        self._batch: tuple[int, list[PassInputs]] = (-1, [])
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()
        self._through = 0

    def run(self, batch_done: Callable[[int], None]) -> None:
        """All passes of the run. batch_done: called after each batch, with the number of finished batches."""
        passes = self.stream.passes(self.stage, self.replica)
        arriving = deque([self._receive(*passes[0])])
        of_batch = self.stream.microbatches // self.stream.degrees[self.stage]
        for number, (kind, k) in enumerate(passes):
            arriving += [self._receive(*one) for one in passes[number + 1 : number + 2]]  # during this pass
            received = arriving.popleft().wait()
            if kind is ActionKind.F:
                self._forward(k, received)
            else:
                self._backward(k, received)
                if self._through % of_batch == 0:
                    batch_done(self._through // of_batch)
        for work, _ in self._sent:
            work.wait()

    def _forward(self, k: int, received: list[torch.Tensor]) -> None:
        inputs = self._inputs(k)
        version = self.stream.version(self.stage, k)
        start = self.recorder.clock()
        self.weights.use(version)
        for tensor, border in zip(received, self._border.received, strict=True):
            tensor.requires_grad_(border.requires_grad)
        try:
            made = self.module(*received, **inputs.tensors)
            if self._is_last:
                made = (self._loss(made, inputs.inputs),)
        except Exception as error:
            raise PassFailed(ActionKind.F, self.stage) from error
        self.recorder.add("F", self.stage, k, start, version)
        if self._is_last:
            self.losses[k] = made[0].item()
        else:
            self._send(self.stage + 1, k, [tensor.detach() for tensor in made])
        self._in_flight[k] = _InFlight(received, made)

    def _backward(self, k: int, gradients: list[torch.Tensor]) -> None:
        one = self._in_flight.pop(k)
        version = self.stream.version(self.stage, k)
        start = self.recorder.clock()
        self.weights.use(version)
        ends = [tensor for tensor in one.made if tensor.requires_grad]
        try:
            torch.autograd.backward(ends, gradients if not self._is_last else None)
        except Exception as error:
            raise PassFailed(ActionKind.B, self.stage) from error
        self.recorder.add("B", self.stage, k, start, version)
        leaves = [tensor for tensor in one.received if tensor.requires_grad]
        found = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.contiguous() for leaf in leaves]
        self._send(self.stage - 1, k, found)
        self._through += 1
        each = self.stream.period(self.stage) // self.stream.degrees[self.stage]
        if self._through % each == 0:
            self._update(k, version, each)

    def _update(self, k: int, version: int, passes: int) -> None:
        """Updates the weights after the backward pass of k, the last of ``passes`` passes that used this version."""
        gradients = self.weights.take_gradients(version, passes)
        oldest = self.stream.version(self.stage, k + self.stream.degrees[self.stage])
        parameters = self.weights.prepare(gradients, oldest)
        if self._group is not None:
            start = self.recorder.clock()
            mean_gradients(parameters, self._group)
            self.recorder.add("all-reduce", None, None, start)
        start = self.recorder.clock()
        self.weights.step()
        self.recorder.add("optimizer", None, None, start)

    @property
    def _is_last(self) -> bool:
        return self.stage == len(self._job.stages) - 1

    def _inputs(self, k: int) -> PassInputs:
        batch, place = divmod(k, self.stream.microbatches)
        while self._batch[0] < batch:
            self._batch = self._batch[0] + 1, self._data.batch(self.stream.microbatches)
        return self._batch[1][place]

    def _receive(self, kind: ActionKind, k: int) -> _Arriving:
        """The tensors that a pass waits for: inputs of a forward pass, or gradients of what was sent for a backward
        pass."""
        if kind is ActionKind.F:
            forms, source = self._border.received, self.stage - 1
        else:
            forms, source = tuple(one for one in self._border.sent if one.requires_grad), self.stage + 1
        if source not in range(len(self._job.stages)):
            return _Arriving([])
        tensors = [torch.empty(form.shape, dtype=form.dtype) for form in forms]
        return _Arriving(tensors, [dist.irecv(tensor, self._rank_with(source, k)) for tensor in tensors])

    def _send(self, stage: int, k: int, tensors: Sequence[torch.Tensor]) -> None:
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()
        if stage >= 0:
            self._sent += [(dist.isend(tensor, self._rank_with(stage, k)), tensor) for tensor in tensors]

    def _rank_with(self, stage: int, k: int) -> int:
        return self._job.rank_of(stage, k % self._job.degrees[stage])
