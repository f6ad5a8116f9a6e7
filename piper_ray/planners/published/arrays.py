"""An instance as flat arrays for the compiled table, and its downsets, by plain enumeration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from piper_ray.model.constraints import Recompute
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import Instance, Tmpc
from piper_ray.model.restrictions import Restrictions

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


class Arrays(NamedTuple):
    """Layers are numbered as in the instance, options (TMPCs) by degree, layer, and order in the file.

    degrees: int64[degrees], tensor-parallel degrees, ascending.
    option_start: int64[degrees * layers + 1]; options of layer v at degrees[i] start at [i * layers + v].
    time_s, weights_bytes, activation_bytes, fixed_bytes, shared_bytes: float64[options].
    least_degree: int64[options], the least data-parallel degree that the option needs.
    allowed: bool[modes, options]; a stage takes all its options from one mode.
    neighbour_start: int64[layers + 1]; neighbour: int64[2 * edges], the layers that layer v has edges from and to.
    crossing_start: int64[options]; crossing_bytes[crossing_start[o] + j]: float64, 2 * (c + fw or bw), what option o
    of layer v pays when its j-th neighbour is outside the stage.
    member: bool[downsets, layers]. size: int64[downsets].
    tensor_end: bool[tensors, layers]. tensor_bytes: float64[tensors], both passes: what a stage with some ends pays.
    """

    degrees: Integers
    option_start: Integers
    time_s: Floats
    weights_bytes: Floats
    activation_bytes: Floats
    fixed_bytes: Floats
    shared_bytes: Floats
    least_degree: Integers
    allowed: NDArray[np.bool_]
    neighbour_start: Integers
    neighbour: Integers
    crossing_start: Integers
    crossing_bytes: Floats
    member: NDArray[np.bool_]
    size: Integers
    tensor_end: NDArray[np.bool_]
    tensor_bytes: Floats


def flatten(instance: Instance, downsets: Sequence[int], restrictions: Restrictions) -> Arrays:
    """An instance and its downsets (bit masks) as arrays, with the TMPCs that the restrictions allow."""
    layers = instance.layers
    position = {layer.id: i for i, layer in enumerate(layers)}
    # For each layer its edges: the other end's id, c, and whether the edge comes in.
    incident: list[list[tuple[int, float, bool]]] = [[] for _ in layers]
    for edge in instance.edges:
        incident[position[edge.target]].append((edge.source, edge.communication_bytes, True))
        incident[position[edge.source]].append((edge.target, edge.communication_bytes, False))

    degrees = [t for t in instance.degrees if restrictions.admits_tensor_parallel_degree(t)]
    options: list[Tmpc] = []
    option_start, crossing_start = [0], []
    crossing: list[float] = []
    modes: list[list[bool]] = [[] for _ in _modes(restrictions.recompute)]
    for t in degrees:
        for layer, ends in zip(layers, incident, strict=True):
            tmpcs = layer.tmpcs.get(t, ())
            for mode, role in zip(modes, _modes(restrictions.recompute), strict=True):
                has_choice = len({tmpc.recompute for tmpc in tmpcs}) > 1
                mode += [role is None or not has_choice or tmpc.recompute == role for tmpc in tmpcs]
            for tmpc in tmpcs:
                options.append(tmpc)
                crossing_start.append(len(crossing))
                for other, c, incoming in ends:
                    extra = tmpc.forward_sync_bytes if incoming else tmpc.backward_sync_bytes
                    crossing.append(2.0 * (c + extra.get(other, 0.0)))
            option_start.append(len(options))

    return Arrays(
        degrees=np.array(degrees, dtype=np.int64),
        option_start=np.array(option_start, dtype=np.int64),
        time_s=np.array([tmpc.time_per_sample_s for tmpc in options], dtype=np.float64),
        weights_bytes=np.array([tmpc.weights_bytes for tmpc in options], dtype=np.float64),
        activation_bytes=np.array([tmpc.activation_bytes for tmpc in options], dtype=np.float64),
        fixed_bytes=np.array([tmpc.fixed_bytes for tmpc in options], dtype=np.float64),
        shared_bytes=np.array([tmpc.shared_bytes for tmpc in options], dtype=np.float64),
        least_degree=np.array([tmpc.least_data_parallel_degree for tmpc in options], dtype=np.int64),
        allowed=np.array(modes, dtype=np.bool_).reshape(len(modes), len(options)),
        neighbour_start=np.cumsum([0, *(len(ends) for ends in incident)], dtype=np.int64),
        neighbour=np.array([position[other] for ends in incident for other, _, _ in ends], dtype=np.int64),
        crossing_start=np.array(crossing_start, dtype=np.int64),
        crossing_bytes=np.array(crossing, dtype=np.float64),
        member=np.array([[downset >> i & 1 for i in range(len(layers))] for downset in downsets], dtype=np.bool_),
        size=np.array([downset.bit_count() for downset in downsets], dtype=np.int64),
        tensor_end=np.array(
            [[layer.id in tensor.layers for layer in layers] for tensor in instance.tensors], dtype=np.bool_
        ).reshape(len(instance.tensors), len(layers)),
        tensor_bytes=np.array([t.forward_bytes + t.backward_bytes for t in instance.tensors], dtype=np.float64),
    )


def _modes(recompute: Recompute) -> tuple[bool | None, ...]:
    """The recomputation roles that a stage may take as a whole; None leaves each layer free."""
    if recompute is Recompute.AUTO:
        return (None,)
    if recompute is Recompute.ALL_OR_NONE:
        return (False, True)
    if recompute not in (Recompute.ALWAYS, Recompute.NEVER):
        raise UsageError(f"the paper's table knows no recomputation {recompute.value}; expected all-or-none, say")
    return (recompute is Recompute.ALWAYS,)


def enumerate_downsets(instance: Instance, most: int) -> list[int]:
    """All downsets as bit masks (bit i is ``instance.layers[i]``), by size, then by value; the empty set comes first.

    A downset grows by a layer all of whose successors are in it; going level by level finds each, as every downset
    loses its front-most layer to one of the level before. Stops after the level that makes them more than ``most``.
    """
    position = {layer.id: i for i, layer in enumerate(instance.layers)}
    successors = [0] * len(instance.layers)
    for edge in instance.edges:
        successors[position[edge.source]] |= 1 << position[edge.target]
    downsets = [0]
    level = [0]
    while level and len(downsets) <= most:
        level = sorted(
            {
                downset | 1 << i
                for downset in level
                for i, needed in enumerate(successors)
                if not downset >> i & 1 and downset & needed == needed
            }
        )
        downsets += level
    return downsets
