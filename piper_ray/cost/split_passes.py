"""A TMPC's seconds by pass, with the backward pass in its two parts: the one place that schedules which split it ask."""

from __future__ import annotations

from typing import NamedTuple

from piper_ray.cost.passes import backward_s, forward_s
from piper_ray.model.instance import Tmpc


class SplitPasses(NamedTuple):
    """Seconds for one microbatch: forward pass, gradients of inputs with what is run again, gradients of weights."""

    forward_s: float
    input_s: float
    weight_s: float


def split_passes(tmpc: Tmpc) -> SplitPasses:
    """Where nobody says how the backward pass splits: half of what is not run again is for the weights."""
    forward, backward = forward_s(tmpc), backward_s(tmpc)
    again = forward if tmpc.recompute else 0.0
    weight = max(0.0, backward - again) / 2.0
    return SplitPasses(forward, backward - weight, weight)
