"""How a TMPC's time is split between its forward and its backward pass.

A file that gives p alone says nothing of it: a third of it is taken for the forward pass, as of two matrix products in
three are of the backward pass, and a quarter where the backward pass computes the forward pass once more.
"""

from __future__ import annotations

from piper_ray.model.instance import Tmpc

_FORWARD_SHARE = 1.0 / 3.0
_FORWARD_SHARE_RECOMPUTING = 0.25


def forward_s(tmpc: Tmpc) -> float:
    """Seconds of the forward pass of a microbatch."""
    return tmpc.time_per_sample_s * (_FORWARD_SHARE_RECOMPUTING if tmpc.recompute else _FORWARD_SHARE)


def backward_s(tmpc: Tmpc) -> float:
    """Seconds of the backward pass of a microbatch, with what it recomputes."""
    return tmpc.time_per_sample_s - forward_s(tmpc)
