"""How a TMPC's seconds fall on its passes: the one place that simulations ask."""

from __future__ import annotations

from typing import NamedTuple

from piper_ray.model.instance import Tmpc


class PassTimes(NamedTuple):
    """Seconds of one layer for one microbatch: forward pass, gradients of its inputs, gradients of its weights.

    What is run again in the backward pass is part of input_s.
    """

    forward_s: float
    input_s: float
    weight_s: float


def pass_times(tmpc: Tmpc) -> PassTimes:
    """Where an input gives p alone: a third is the forward pass, a quarter where it is run again in the backward pass.

    The backward pass proper is twice the forward pass, half for the inputs and half for the weights.
    """
    parts = 4.0 if tmpc.recompute else 3.0
    forward_s = weight_s = tmpc.time_per_sample_s / parts
    return PassTimes(forward_s, tmpc.time_per_sample_s - forward_s - weight_s, weight_s)
