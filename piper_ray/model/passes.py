"""A configuration's forward and backward pass, known or assumed. Only this module states the assumption."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from piper_ray.model.instance import Instance, Tmpc

RECOMPUTE_ID = "activation recomp"
"""The id of the TMPC that recomputes activations in Piper's files."""


@dataclass(frozen=True)
class Passes:
    """Seconds per sample on the t devices together; forward_s + backward_s is p.

    weight_s: the part of backward_s that computes gradients of weights; None if unknown. assumed: only p was known, and
    forward_s and backward_s are assumed.

    >>> from piper_ray import Tmpc
    >>> passes_of(Tmpc("plain", forward_s=0.01, backward_s=0.02)).backward_s
    0.02
    """

    forward_s: float
    backward_s: float
    weight_s: float | None
    assumed: bool


def passes_of(tmpc: Tmpc) -> Passes:
    """The passes of a TMPC if they are known. Otherwise a third of p is assumed to be the forward pass, or a quarter if
    the backward pass repeats it.

    A backward pass makes two products for each one of the forward pass: gradients of inputs and of weights.

    >>> from piper_ray import Tmpc
    >>> passes_of(Tmpc("plain", time_per_sample_s=0.03)).assumed
    True
    """
    if tmpc.forward_s is not None and tmpc.backward_s is not None:
        return Passes(tmpc.forward_s, tmpc.backward_s, tmpc.weight_s, assumed=False)
    recomputes = tmpc.recompute or tmpc.id == RECOMPUTE_ID
    forward_s = tmpc.time_per_sample_s / (4.0 if recomputes else 3.0)
    return Passes(forward_s, tmpc.time_per_sample_s - forward_s, None, assumed=True)


def with_passes(instance: Instance, tell: Callable[[str], None] | None = None) -> Instance:
    """The instance with both passes of every TMPC, for schedules that need them. A note says so if some were assumed.

    p does not change, and neither do layers whose passes are known. tell: called with the note.

    >>> import piper_ray
    >>> layers = [piper_ray.Layer(0, "block", {1: [piper_ray.Tmpc("plain", 0.03)]})]
    >>> instance = piper_ray.Instance(layers, [], 1, 8, memory_bytes="8GiB", bandwidth_bytes_per_s="1GB/s")
    >>> with_passes(instance).layers[0].tmpcs[1][0].forward_s
    0.01
    """
    layers, assumed = [], 0
    for layer in instance.layers:
        if all(tmpc.forward_s is not None for row in layer.priced.tmpcs.values() for tmpc in row):
            layers.append(layer)
            continue
        assumed += 1
        tmpcs = {degree: tuple(map(_with_known_passes, row)) for degree, row in layer.tmpcs.items()}
        layers.append(replace(layer, tmpcs=tmpcs))
    if not assumed:
        return instance
    note = (
        f"the forward and backward time of {assumed} of {len(instance.layers)} layers is not known: a third of each "
        "TMPC's time is taken for its forward pass, a quarter where it recomputes"
    )
    if tell is not None:
        tell(note)
    return replace(instance, layers=tuple(layers), notes=(*instance.notes, note)).checked_as(instance)


def _with_known_passes(tmpc: Tmpc) -> Tmpc:
    found = passes_of(tmpc)
    return replace(tmpc, forward_s=found.forward_s, backward_s=found.backward_s)
