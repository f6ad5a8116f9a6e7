"""The rule table: which placements of an operator's inputs give which placements of its outputs.

A strategy names an axis that the operator covers, and each of t devices takes 1/t of it; or it names no axis, and each
device does everything. If each device computes the operator in this way without communication, the outputs have the
placements that the rule says. ``adjoint`` derives the backward pass, so a rule says nothing about it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from piper_ray.workloads.schemes.graph import PARTIAL, REPLICATED, OperatorFamily, OperatorGraph, Step, TensorPlacement

RING, SUMS = "ring", "sums"


@dataclass(frozen=True)
class Strategy:
    """axis: each device takes its part of it; "" for none. placements: of each input and output. exchange: RING if keys
    and values go around meanwhile; SUMS if sums of rows are added up."""

    axis: str
    placements: Mapping[str, TensorPlacement]
    exchange: str = ""

    def adjoint(self, name: str) -> TensorPlacement:
        """The placement of a value's gradient in the backward pass of this strategy.

        Copying to all devices and summing over them are each other's transposes; shards are their own. So where the
        work is divided, a value of which each device had a copy has a partial sum as its gradient, and for a partial
        sum each device needs the whole gradient. Where each device does everything, each has all of every gradient.
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
    """All strategies of a step, first the one where each device does everything. An axis that t does not divide has no
    strategy, nor has an axis that the step goes along."""
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
    """y = x + z: in each place by itself, so shards on any axis that all have. The sum of partial sums is the partial
    sum of the sums, unless something is added that each device would add again."""
    yield from _pointwise(step, graph)
    if not any(graph.values[name].parameters for name in step.inputs) and len(step.outputs) == 1:
        yield Strategy("", dict.fromkeys((*step.inputs, *step.outputs), PARTIAL))


def _pointwise(step: Step, graph: OperatorGraph) -> Iterator[Strategy]:
    """y[i] = f(x[i], z): in each place by itself, so shards on an axis of all outputs; a z without it is on every
    device."""
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
    each device looks up the rows j that it has, and y is the sum over the devices, because sums may be split."""
    numbers, table = step.inputs
    for axis in _axes(step, graph):
        if axis in graph.values[numbers].axes:
            yield _along(axis, step, graph)
        elif axis in graph.values[table].axes and axis not in graph.values[step.outputs[0]].axes:
            yield _along(axis, step, graph, missing=PARTIAL)


def _loss(step: Step, graph: OperatorGraph) -> Iterator[Strategy]:
    """l[i] = log sum over j of exp(x[i, j]) - x[i, n[i]]. Each row i by itself; or each device takes its own j, and the
    devices add up their sums, numbers of one row each, before the logarithm. Then all have l, and dx[i, j] has shards
    on j."""
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
