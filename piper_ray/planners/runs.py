"""Layers in an order, cut into runs: the order, which of its layers repeat, the choices, and what the stages cost: all
degrees and choices at once, with numpy.

A choice is one configuration for each layer, the same way in all stages: a degree t, and recomputation everywhere or
nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from piper_ray.cost.variants import ANY_DEGREE, stage_variants
from piper_ray.engine.lattice import blocks
from piper_ray.engine.tables.tmpc_options import fastest
from piper_ray.model.constraints import Recompute, Restrictions
from piper_ray.model.instance import Instance, Layer, Tmpc, reached
from piper_ray.model.passes import passes_of


@dataclass(frozen=True)
class RunOrder:
    """layers: all layer ids, every edge running forwards. The runs are cut from the layers between the first ``before``
    and the last ``after``.

    repeated: those are one layer repeated; if not, they are all layers.
    """

    layers: tuple[int, ...]
    before: int
    after: int
    repeated: bool

    @property
    def between(self) -> int:
        return len(self.layers) - self.before - self.after


def run_order(instance: Instance) -> RunOrder:
    """The repeated layers in order, with those before and after them; without any, a topological order of all.

    Repeated layers, the transformer layers of a language model, are told by the workload: layers of one kind, each
    with an edge to the next and no other layer between them, that hold at least half of the work (the least t * p of
    each layer). A kind is a name or, if no name repeats in this way, all figures at all degrees. "After" are the
    layers that need a repeated one, "before" all others.
    """
    order = topological_order(instance)
    predecessors = {layer: before for layer, (before, _) in instance.neighbours.items()}
    successors = {layer: after for layer, (_, after) in instance.neighbours.items()}
    for kind in (attrgetter("name"), _figures):
        chain = _heaviest_kind(instance, order, kind)
        if not chain or any(v not in successors[u] for u, v in pairwise(chain)):
            continue
        members = set(chain)
        after = reached(chain[0], successors) - members
        if after & reached(chain[-1], predecessors):
            continue
        before = [layer for layer in order if layer not in after and layer not in members]
        layers = (*before, *chain, *(layer for layer in order if layer in after))
        return RunOrder(layers, len(before), len(after), repeated=True)
    return RunOrder(tuple(order), 0, 0, repeated=False)


def topological_order(instance: Instance) -> list[int]:
    """Layer ids in the order of upstream's planner: Kahn's algorithm with a stack, layers and edges in file order."""
    last_first = [*instance.neighbours.items()][::-1]
    successors = {layer: after for layer, (_, after) in last_first}
    return blocks.topological_order(successors, {layer: before for layer, (before, _) in last_first})


def _heaviest_kind(instance: Instance, order: Iterable[int], kind: Callable[[Layer], Hashable]) -> list[int]:
    """The layers of the kind with the most work, in ``order``; none if that is one layer or less than half of all."""
    members: dict[Hashable, list[int]] = {}
    for layer in order:
        members.setdefault(kind(instance.layer_by_id[layer]), []).append(layer)
    work = {layer.id: _work_s(layer) for layer in instance.layers}
    heaviest = max(members.values(), key=lambda layers: (sum(work[layer] for layer in layers), len(layers)))
    half = 2.0 * sum(work[layer] for layer in heaviest) >= sum(work.values())
    return heaviest if half and len(heaviest) > 1 else []


def _figures(layer: Layer) -> Hashable:
    return tuple(
        (t, tmpc.id, tmpc.time_per_sample_s, tmpc.weights_bytes, tmpc.activation_bytes, tmpc.fixed_bytes)
        for t in sorted(layer.tmpcs)
        for tmpc in layer.tmpcs[t]
    )


def _work_s(layer: Layer) -> float:
    return min((t * tmpc.time_per_sample_s for t, tmpcs in layer.tmpcs.items() for tmpc in tmpcs), default=0.0)


@dataclass(frozen=True)
class UniformChoice:
    """degree: t. tmpcs: for each layer id the TMPC it runs in whatever stage it is.

    least_data_parallel_degree, most_data_parallel_degree: the limits of the stages that this choice is for.
    """

    degree: int
    tmpcs: Mapping[int, Tmpc]
    least_data_parallel_degree: int = 1
    most_data_parallel_degree: int = ANY_DEGREE

    @property
    def recompute_words(self) -> str:
        recomputes = any(tmpc.recompute for tmpc in self.tmpcs.values())
        return "recomputation everywhere" if recomputes else "no recomputation"


def uniform_choices(instance: Instance, restrictions: Restrictions) -> tuple[UniformChoice, ...]:
    """All that the restrictions leave, by ascending degree, nowhere before everywhere, few replicas before many.

    Of several TMPCs with the same role (recomputing or not) a layer runs the fastest; a layer without the choice
    keeps what it has. A degree that some layer cannot run at is left out.
    """
    if restrictions.recompute in (Recompute.AUTO, Recompute.FIRST_K, Recompute.ONE_FOR_ALL):
        restrictions = restrictions.with_recompute(Recompute.ALL_OR_NONE)
    choices: list[UniformChoice] = []
    for variant in stage_variants(instance, restrictions):
        if all(variant.tmpcs.values()):
            choice = UniformChoice(
                variant.degree,
                {layer_id: fastest(tmpcs) for layer_id, tmpcs in variant.tmpcs.items()},
                variant.least_data_parallel_degree,
                variant.most_data_parallel_degree,
            )
            if choice not in choices:
                choices.append(choice)
    return tuple(choices)


Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

_FIGURES: tuple[Callable[[Tmpc], float], ...] = (
    attrgetter("time_per_sample_s"),
    lambda tmpc: passes_of(tmpc).forward_s,
    *map(attrgetter, ("weights_bytes", "activation_bytes", "fixed_bytes", "shared_bytes")),
)


@dataclass(frozen=True)
class RunCosts:
    """Figures of n layers in order and of their e edges, for r choices.

    layers: float64[6, r, n]: p and its forward pass (s), w, a, b and what replicas share out (bytes).
    tail, head: int64[e], places in the order, tail < head.
    out_bytes, in_bytes: float64[r, e], 2 (c + bw) and 2 (c + fw): charged to the stage of the tail and of the head.
    tensor, end: int64[..], the ends of tensors: the tensor's number and a place in the order. tensor_bytes: float64[h],
    charged to each stage with some of a tensor's ends, tensor_forward_bytes of it in the forward pass.
    """

    layers: Floats
    tail: Integers
    head: Integers
    out_bytes: Floats
    in_bytes: Floats
    tensor: Integers
    end: Integers
    tensor_bytes: Floats
    tensor_forward_bytes: Floats

    @classmethod
    def build(cls, instance: Instance, order: Sequence[int], choices: Sequence[UniformChoice]) -> RunCosts:
        place = {layer: i for i, layer in enumerate(order)}
        chosen = [[choice.tmpcs[layer] for layer in order] for choice in choices]
        out_bytes = [
            [e.communication_bytes + c.tmpcs[e.source].backward_sync_bytes.get(e.target, 0.0) for e in instance.edges]
            for c in choices
        ]
        in_bytes = [
            [e.communication_bytes + c.tmpcs[e.target].forward_sync_bytes.get(e.source, 0.0) for e in instance.edges]
            for c in choices
        ]
        tensors = instance.tensors
        return cls(
            layers=np.array([[[of(tmpc) for tmpc in row] for row in chosen] for of in _FIGURES], np.float64),
            tail=np.array([place[edge.source] for edge in instance.edges], np.int64),
            head=np.array([place[edge.target] for edge in instance.edges], np.int64),
            out_bytes=2.0 * np.array(out_bytes, np.float64),
            in_bytes=2.0 * np.array(in_bytes, np.float64),
            tensor=np.array([i for i, tensor in enumerate(tensors) for _ in tensor.layers], np.int64),
            end=np.array([place[layer] for tensor in tensors for layer in tensor.layers], np.int64),
            tensor_bytes=np.array([tensor.forward_bytes + tensor.backward_bytes for tensor in tensors], np.float64),
            tensor_forward_bytes=np.array([tensor.forward_bytes for tensor in tensors], np.float64),
        )

    def passes_s(self, starts: Integers, bandwidth_bytes_per_s: float) -> tuple[Floats, Floats]:
        """Each stage's forward and backward pass of a microbatch in s, with transfers: float64[r, l]. inf bytes per
        second: without. starts: int64[l], where in the order each stage begins, ascending from 0.
        """
        whole_s, forward_s = np.add.reduceat(self.layers[:2], starts, axis=2)
        edges_bytes, bandwidth = self._edge_bytes(starts), bandwidth_bytes_per_s
        moved_s = (edges_bytes / 2.0 + self._tensor_bytes(starts, self.tensor_forward_bytes)) / bandwidth
        whole_moved_s = (edges_bytes + self._tensor_bytes(starts, self.tensor_bytes)) / bandwidth
        return forward_s + moved_s, whole_s - forward_s + whole_moved_s - moved_s

    def held(self, starts: Integers) -> Floats:
        """Bytes of each stage: weights, a, b and what replicas share out: float64[4, r, l]."""
        held_bytes: Floats = np.add.reduceat(self.layers[2:], starts, axis=2)
        return held_bytes

    def _edge_bytes(self, starts: Integers) -> Floats:
        """float64[r, l]: what each stage sends and receives over edges, both ways."""
        choices, stages = len(self.out_bytes), len(starts)
        tail = np.searchsorted(starts, self.tail, side="right") - 1
        head = np.searchsorted(starts, self.head, side="right") - 1
        crosses = tail != head
        row = stages * np.arange(choices)[:, None]
        cells = np.concatenate([row + tail[crosses], row + head[crosses]], axis=1)
        charges = np.concatenate([self.out_bytes[:, crosses], self.in_bytes[:, crosses]], axis=1)
        sums: Floats = np.bincount(cells.ravel(), charges.ravel(), choices * stages).astype(np.float64)
        return sums.reshape(choices, stages)

    def _tensor_bytes(self, starts: Integers, sizes: Floats) -> Floats:
        """float64[l]: what each stage pays for tensors with ends in it and outside. sizes: of each tensor."""
        stage = np.searchsorted(starts, self.end, side="right") - 1
        touches = np.zeros((len(self.tensor_bytes), len(starts)), np.bool_)
        touches[self.tensor, stage] = True
        cut = touches & (touches.sum(axis=1, keepdims=True) > 1)
        paid: Floats = sizes @ cut
        return paid
