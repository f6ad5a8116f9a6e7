"""Torch's pipeline stage with a clock in it, and the table of passes that torch's pipeline runtime works through.

All schedules go this way, and not by torch's classes of their names: the lists are then those that were planned and
simulated, m < p included, and 1F1B is not hit by what torch 2.13 does to it (its own list lacks a forward pass on the
last rank). The runtime checks the table, and adds what is sent and received.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime

from piper_ray.run.job import Pass, PipelinePlan
from piper_ray.run.result import Stretch
from piper_ray.simulate.actions import ActionKind
from piper_ray.workloads.measure.passes import Clock

Mark = Callable[[], float]


class PassFailed(Exception):
    """An error of the user's own code, or of the device, in a pass: ``__cause__`` is the error."""

    def __init__(self, kind: ActionKind, stage: int) -> None:
        super().__init__(f"{_WORDS[kind]} pass of stage {stage + 1}")


_WORDS = {
    ActionKind.F: "the forward",
    ActionKind.B: "the backward",
    ActionKind.I: "the backward",
    ActionKind.W: "the backward",
}


@dataclass
class _Open:
    """A stretch whose moments the device may not have reached yet."""

    what: str
    stage: int | None
    microbatch: int | None
    start: Mark
    end: Mark


class Recorder:
    """What a rank does in a step. Microbatch k of the replica is number ``first + k apart`` of the batch."""

    def __init__(self, clock: Clock, first: int, apart: int) -> None:
        self.clock = clock
        self._first, self._apart = first, apart
        self._open: list[_Open] = []

    def begin(self) -> None:
        """A step begins: its stretches count from here."""
        self._open.clear()
        self._begun = self.clock()

    def add(self, what: str, stage: int | None, k: int | None, start: Mark) -> None:
        """From ``start`` until now."""
        microbatch = None if k is None else self._first + k * self._apart
        self._open.append(_Open(what, stage, microbatch, start, self.clock()))

    def lengthen(self) -> None:
        """The last stretch lasts until now."""
        self._open[-1].end = self.clock()

    def stretches(self) -> list[Stretch]:
        """Of the step, in seconds since it began, once the device is done with it."""
        begun_s = self._begun()
        return [
            Stretch(one.what, one.stage, one.microbatch, one.start() - begun_s, one.end() - begun_s)
            for one in self._open
        ]


class TimedStage(PipelineStage):
    """Raises PassFailed for errors within a pass; what it waits for others is outside."""

    def __init__(self, *arguments: Any, recorder: Recorder, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._recorder = recorder

    def forward_one_chunk(self, fwd_chunk_id: int, *arguments: Any, **options: Any) -> Any:
        return self._timed(ActionKind.F, fwd_chunk_id, super().forward_one_chunk, *arguments, **options)

    def backward_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **options: Any) -> Any:
        kind = ActionKind.B if options.get("full_backward", True) else ActionKind.I
        return self._timed(kind, bwd_chunk_id, super().backward_one_chunk, *arguments, **options)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **options: Any) -> Any:
        return self._timed(ActionKind.W, bwd_chunk_id, super().backward_weight_one_chunk, *arguments, **options)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        start = self._recorder.clock()
        super().perform_reduce_grad(grad_scale_factor)
        self._recorder.add("all-reduce", self.stage_index, None, start)

    def _timed(self, kind: ActionKind, k: int, run: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        start = self._recorder.clock()
        try:
            result = run(k, *arguments, **options)
        except Exception as error:
            raise PassFailed(kind, self.stage_index) from error
        self._recorder.add(kind.name, self.stage_index, k, start)
        return result


_TORCH = {
    ActionKind.F: _ComputationType.FORWARD,
    ActionKind.B: _ComputationType.FULL_BACKWARD,
    ActionKind.I: _ComputationType.BACKWARD_INPUT,
    ActionKind.W: _ComputationType.BACKWARD_WEIGHT,
}


def torch_table(lists: Iterable[Iterable[Pass]]) -> dict[int, list[_Action | None]]:
    """For each place its actions: what ``_load_csv`` reads of a file."""
    return {place: [_Action(stage, _TORCH[kind], k) for kind, stage, k in passes] for place, passes in enumerate(lists)}


class TableSchedule(_PipelineScheduleRuntime):
    """Microbatches are handed in one by one, as each has its own inputs; gradients are the mean over them."""

    def __init__(self, plan: PipelinePlan, stages: Sequence[TimedStage], loss: Callable[..., torch.Tensor]) -> None:
        super().__init__(list(stages), plan.microbatches, loss_fn=loss, scale_grads=True)
        self._prepare_schedule_with_comms(torch_table(plan.passes))

    def run(self, inputs: Sequence[Mapping[str, torch.Tensor]], targets: Sequence[object]) -> list[torch.Tensor]:
        """Works through a batch. inputs: of each microbatch; targets: what the loss gets beside the output.

        Returns the losses, in the order of the passes, on the rank that has the last stage, else nothing.
        """
        for stage in self._stages:
            stage.has_backward = True
            stage.clear_runtime_states()
        losses: list[torch.Tensor] = []
        arguments: list[Any] = [() for _ in inputs]
        self._step_microbatches(arguments, list(map(dict, inputs)), list(targets), losses, return_outputs=False)
        return losses
