"""The rule table: which placements of an operator's inputs give which placements of its outputs.

A strategy names an axis of what the operator goes through, of which each of t devices takes 1/t; or none, and each
device does all of it. Where an operator is computed so on each device, with no word from another, the outputs have the
placements that the rule says. ``adjoint`` gives the backward pass, so that a rule says nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from piper_ray.workloads.schemes.graph import PARTIAL, REPLICATED, OperatorFamily, OperatorGraph, Step, TensorPlacement

RING, SUMS = "ring", "sums"


@dataclass(frozen=True)
class Strategy:
    """axis: of which each device takes its part; "" for none. placements: of each input and output. exchange: RING
    where keys and values go around meanwhile; SUMS where sums of rows are added up."""

    axis: str
    placements: Mapping[str, TensorPlacement]
    exchange: str = ""

    def adjoint(self, name: str) -> TensorPlacement:
        """Of a value's gradient in the backward pass of this strategy.

        Copying to all devices and summing over them are each other's transposes; shards are their own. So where the
        work is divided, what each device had a copy of has a partial sum for its gradient, and of a partial sum each
        needs the whole gradient. Where each device does everything, each has all of every gradient.
        """
        placement = self.placements[name]
        if placement.axis:
            return placement
        return PARTIAL if self.axis and not placement.partial else REPLICATED

    @property
    def text(self) -> str:
        """``heads``, ``tokens around a ring``, ``partial sums`` or ``whole``."""
        if not self.axis:
            return "partial sums" if PARTIAL in self.placements.values() else "whole"
        return self.axis + (" around a ring" if self.exchange == RING else "")


def strategies(step: Step, graph: OperatorGraph, degree: int) -> tuple[Strategy, ...]:
    """All of a step's, each device's whole work first. An axis that t does not divide has none, nor one that it goes
    along."""
    whole = Strategy("", dict.fromkeys((*step.inputs, *step.outputs), REPLICATED))
    closed = () if step.family is OperatorFamily.ATTENTION else step.along
    return tuple(
        one
        for one in (whole, *_RULES[step.family](step, graph))
        if not one.axis or (one.axis not in closed and graph.sizes.get(one.axis, 1) % degree == 0)
    )


def _axes(step: Step, graph: OperatorGraph) -> tuple[str, ...]:
    """All axes of a step that may be sharded, in the order of its values."""
    names = (axis for name in (*step.inputs, *step.outputs) for axis in graph.values[name].axes)
    return tuple(axis for axis in dict.fromkeys(names) if axis in graph.sizes)


def _along(axis: str, step: Step, graph: OperatorGraph, missing: TensorPlacement = REPLICATED) -> Strategy:
    """Values with that axis are sharded on it; inputs without it are everywhere, and outputs without it are missing."""
    placements = {
        name: TensorPlacement(axis)
        if axis in graph.values[name].axes
        else missing
        if name in step.outputs
        else REPLICATED
        for name in (*step.inputs, *step.outputs)
    }
    return Strategy(axis, placements)


def _contraction(step: Step, graph: OperatorGraph) -> Iterator[Strategy]:
    """y[j] = sum over i of x[i, j] w[i, j], each of the axes i and j in some of the operands.

    Of an axis j of y, device r computes y for its j: it needs x and w there, and all of an operand without j. Of an
    axis i that is summed over, it sums its own i, and y is the sum of what the devices have, as sums may be split.
    """
    for axis in _axes(step, graph):
        yield _along(axis, step, graph, missing=PARTIAL)


def _sum(step: Step, graph: OperatorGraph) -> Iterator[Strategy]:
    """y = x + z: in each place by itself, so shards on any axis of all; and the sum of partial sums is the partial sum
    of the sums, if nothing is added that each device would add once more."""
    yield from _pointwise(step, graph)
    if not any(graph.values[name].parameters for name in step.inputs) and len(step.outputs) == 1:
        yield Strategy("", dict.fromkeys((*step.inputs, *step.outputs), PARTIAL))


def _pointwise(step: Step, graph: OperatorGraph) -> Iterator[Strategy]:
    """y[i] = f(x[i], z): in each place by itself, so shards on an axis of all outputs; z without it is everywhere."""
    for axis in _axes(step, graph):
        if all(axis in graph.values[name].axes for name in step.outputs):
            yield _along(axis, step, graph)


def _rows(step: Step, graph: OperatorGraph) -> Iterator[Strategy]:
    """y[i, :] = f(x[i, :]; w): each row by itself, so shards on any axis but those that f goes along."""
    yield from _pointwise(step, graph)


def _attention(step: Step, graph: OperatorGraph) -> Iterator[Strategy]:
    """o[i, a] = sum over j of softmax over j (q[i, a] k[j, a]) v[j, a]: each head a by itself; and each token i of the
    queries by itself, with keys and values of all tokens j, which are there or come around a ring. The first input is
    q; the others are k and v."""
    tokens = step.along[0]
    keys = [name for name in step.inputs[1:] if not graph.values[name].parameters]
    for axis in _axes(step, graph):
        if axis != tokens:
            if all(axis in graph.values[name].axes for name in (*step.inputs[:1], *keys, *step.outputs)):
                yield _along(axis, step, graph)
            continue
        around = _along(axis, step, graph)
        yield Strategy(axis, {**around.placements, **dict.fromkeys(keys, REPLICATED)})
        if step.on_ring:
            yield Strategy(around.axis, around.placements, RING)


def _lookup(step: Step, graph: OperatorGraph) -> Iterator[Strategy]:
    """y[i] = W[n[i]] = sum over j of (1 if n[i] = j else 0) W[j]. Each number i by itself, with all of the table; or
    each device looks up what its rows j have, and y is the sum of what the devices have, as sums may be split."""
    numbers, table = step.inputs
    for axis in _axes(step, graph):
        if axis in graph.values[numbers].axes:
            yield _along(axis, step, graph)
        elif axis in graph.values[table].axes and axis not in graph.values[step.outputs[0]].axes:
            yield _along(axis, step, graph, missing=PARTIAL)


def _loss(step: Step, graph: OperatorGraph) -> Iterator[Strategy]:
    """l[i] = log sum over j of exp(x[i, j]) - x[i, n[i]]. Each row i by itself; or each device takes its j, and the
    devices add up their sums, numbers of one row each, before the logarithm: then all have l, and dx[i, j] is of j."""
    rows = graph.values[step.outputs[0]].axes
    for strategy in _pointwise(replace(step, inputs=(), outputs=step.inputs[:1]), graph):
        others = (*step.inputs[1:], *step.outputs)
        place = TensorPlacement(strategy.axis) if strategy.axis in rows else REPLICATED
        yield replace(
            strategy,
            placements={**strategy.placements, **dict.fromkeys(others, place)},
            exchange="" if place.axis else SUMS,
        )


_RULES: Mapping[OperatorFamily, Callable[[Step, OperatorGraph], Iterator[Strategy]]] = {
    OperatorFamily.CONTRACTION: _contraction,
    OperatorFamily.SUM: _sum,
    OperatorFamily.POINTWISE: _pointwise,
    OperatorFamily.ROWS: _rows,
    OperatorFamily.ATTENTION: _attention,
    OperatorFamily.LOOKUP: _lookup,
    OperatorFamily.LOSS: _loss,
}
