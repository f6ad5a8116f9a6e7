"""How a TMPC's seconds fall on its passes: the one place that simulations ask."""

from __future__ import annotations

from typing import NamedTuple

from piper_ray.model.instance import Tmpc
from piper_ray.model.passes import passes_of


class PassTimes(NamedTuple):
    """Seconds of one layer for one microbatch: forward pass, gradients of its inputs, gradients of its weights.

    What is run again in the backward pass is part of input_s.
    """

    forward_s: float
    input_s: float
    weight_s: float


def pass_times(tmpc: Tmpc) -> PassTimes:
    """As far as they are known (``model.passes``); of the backward pass, what is not run again is half for the weights.

    What is run again where a TMPC recomputes takes as long as the forward pass, if the backward pass has room for it.
    """
    passes = passes_of(tmpc)
    weight_s = passes.weight_s
    if weight_s is None:
        again_s = passes.forward_s if tmpc.recompute else 0.0
        weight_s = max(0.0, passes.backward_s - again_s) / 2.0
    return PassTimes(passes.forward_s, passes.backward_s - weight_s, weight_s)
