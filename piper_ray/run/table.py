"""A schedule's lists as the table that torch's pipeline runtime works through.

All schedules go this way, and not by torch's classes of their names: the lists are then those that were planned and
simulated, m < p included, and 1F1B is not hit by what torch 2.13 does to it (its own list lacks a forward pass on the
last rank). The runtime checks the table, and adds what is sent and received.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime

from piper_ray.run.passes import TimedStage
from piper_ray.run.pipeline_plan import Pass, PipelinePlan
from piper_ray.simulate.actions import ActionKind

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
