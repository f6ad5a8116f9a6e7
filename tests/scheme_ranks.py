"""Schemes run by simulated ranks in numpy, compared with the same layer in one process: the twin of the rule table.

An operator of each family with any number of inputs, its vector-Jacobian product, and what placements mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np

from piper_ray.workloads.schemes.graph import PARTIAL, REPLICATED, OperatorFamily, OperatorGraph, Step, TensorPlacement
from piper_ray.workloads.schemes.rules import RING, SUMS, Strategy, strategies
from piper_ray.workloads.schemes.scheme import Scheme

Array = np.ndarray[Any, np.dtype[np.float64]]
Ranks = list[Array]


def shape_of(graph: OperatorGraph, name: str, lengths: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(lengths[axis] for axis in graph.values[name].axes)


def placed(
    full: Array, axes: Sequence[str], placement: TensorPlacement, ranks: int, random: np.random.Generator
) -> Ranks:
    """A tensor on ranks."""
    if placement.axis:
        return np.split(full, ranks, axes.index(placement.axis))
    if not placement.partial:
        return [full.copy() for _ in range(ranks)]
    parts = [random.normal(size=full.shape) for _ in range(ranks - 1)]
    return [*parts, full - np.sum(parts, axis=0)]


def joined(parts: Ranks, axes: Sequence[str], placement: TensorPlacement) -> Array:
    """The tensor that ranks have."""
    if placement.axis:
        return np.concatenate(parts, axes.index(placement.axis))
    if placement.partial:
        return np.asarray(np.sum(parts, axis=0))
    for part in parts[1:]:
        np.testing.assert_allclose(part, parts[0], rtol=0, atol=1e-10)
    return parts[0]


def _letters(axes: Sequence[str], known: dict[str, str]) -> str:
    return "".join(known.setdefault(axis, "abcdefghijklmnop"[len(known)]) for axis in axes)


@dataclass
class Numbers:
    """The arithmetic of a graph's steps on whatever shards there are."""

    graph: OperatorGraph
    lengths: Mapping[str, int]

    def _axes(self, name: str) -> tuple[str, ...]:
        return self.graph.values[name].axes

    def _broadcast(self, name: str, array: Array, to: Sequence[str]) -> Array:
        own = self._axes(name)
        kept = [axis for axis in to if axis in own]
        ordered = np.transpose(array, [own.index(axis) for axis in kept])
        return ordered.reshape([ordered.shape[kept.index(axis)] if axis in own else 1 for axis in to])

    def _back(self, name: str, array: Array, axes: Sequence[str]) -> Array:
        """Summed over the axes that the value has not got, in its order."""
        own = self._axes(name)
        summed = array.sum(axis=tuple(k for k, axis in enumerate(axes) if axis not in own))
        kept = [axis for axis in axes if axis in own]
        return np.transpose(summed, [kept.index(axis) for axis in own])

    def _chosen(self, numbers: Array, count: int, rank: int, axis: str) -> Array:
        """Ones where a number is that of one of the ``count`` rows that a rank has of all."""
        first = rank * count if count < self.lengths[axis] else 0
        return np.asarray(numbers[:, None] == first + np.arange(count)[None, :], float)

    def forward_on(
        self, step: Step, each: Sequence[Mapping[str, Array]], strategy: Strategy | None = None
    ) -> list[dict[str, Array]]:
        """On all ranks; those that share rows of logits add up their sums."""
        if step.family is not OperatorFamily.LOSS:
            return [self.forward(step, inputs, rank) for rank, inputs in enumerate(each)]
        logits, ones = self._logits(step, each)
        sums = np.array([np.exp(x).sum(1) for x in logits])
        own = np.array([(x * chosen).sum(1) for x, chosen in zip(logits, ones, strict=True)])
        if strategy is not None and strategy.exchange == SUMS:
            sums, own = (np.broadcast_to(x.sum(0), x.shape) for x in (sums, own))
        return [{step.outputs[0]: np.log(x) - y} for x, y in zip(sums, own, strict=True)]

    def _logits(self, step: Step, each: Sequence[Mapping[str, Array]]) -> tuple[Ranks, Ranks]:
        x, n = step.inputs
        logits = [inputs[x] for inputs in each]
        return logits, [self._chosen(one[n], one[x].shape[1], rank, "V") for rank, one in enumerate(each)]

    def backward_on(
        self, step: Step, each: Sequence[Mapping[str, Array]], gradients: Ranks | None, strategy: Strategy | None = None
    ) -> list[dict[str, Array]]:
        """The same backwards; the gradient of a loss is 1 for each token."""
        if step.family is not OperatorFamily.LOSS:
            assert gradients is not None
            return [self.backward(step, one, gradients[rank], rank) for rank, one in enumerate(each)]
        logits, ones = self._logits(step, each)
        sums = np.array([np.exp(x).sum(1) for x in logits])
        sums = sums.sum(0, keepdims=True).repeat(len(each), 0) if strategy and strategy.exchange == SUMS else sums
        x = step.inputs[0]
        return [{x: np.exp(a) / s[:, None] - c} for a, s, c in zip(logits, sums, ones, strict=True)]

    def forward(self, step: Step, inputs: Mapping[str, Array], rank: int = 0) -> dict[str, Array]:
        axes = self._axes(step.outputs[0])
        spread = [self._broadcast(name, inputs[name], axes) for name in step.inputs if step.family in _ALIKE]
        if step.family is OperatorFamily.CONTRACTION:
            known: dict[str, str] = {}
            parts = ",".join(_letters(self._axes(name), known) for name in step.inputs)
            text = f"{parts}->{_letters(axes, known)}"
            return {step.outputs[0]: np.einsum(text, *(inputs[name] for name in step.inputs))}
        if step.family is OperatorFamily.SUM:
            total: Array = reduce(np.add, spread)
            return dict.fromkeys(step.outputs, total)
        if step.family is OperatorFamily.POINTWISE:
            return {step.outputs[0]: np.tanh(reduce(np.multiply, spread))}
        if step.family is OperatorFamily.ROWS:
            return {step.outputs[0]: _softmax(reduce(np.add, spread), self._along(step))}
        if step.family is OperatorFamily.LOOKUP:
            numbers, rows = inputs[step.inputs[0]], inputs[step.inputs[1]]
            return {step.outputs[0]: self._chosen(numbers, rows.shape[0], rank, "V") @ rows}
        q, k, v = (inputs[name] for name in step.inputs)
        scores = np.einsum("sad,zad->saz", q, k)
        return {step.outputs[0]: np.einsum("saz,zad->sad", _softmax(scores, (2,)), v)}

    def _along(self, step: Step) -> tuple[int, ...]:
        return tuple(k for k, axis in enumerate(self._axes(step.outputs[0])) if axis in step.along)

    def backward(self, step: Step, inputs: Mapping[str, Array], gradient: Array, rank: int = 0) -> dict[str, Array]:
        axes = self._axes(step.outputs[0])
        if step.family is OperatorFamily.LOOKUP:
            numbers, table = step.inputs
            count = inputs[table].shape[0]
            return {table: self._chosen(inputs[numbers], count, rank, "V").T @ gradient}
        if step.family is OperatorFamily.CONTRACTION:
            found = {}
            for name in step.inputs:
                known: dict[str, str] = {}
                others = [one for one in step.inputs if one != name]
                parts = [_letters(axes, known), *(_letters(self._axes(one), known) for one in others)]
                own = [axis for axis in self._axes(name) if axis in known]
                product = np.einsum(
                    f"{','.join(parts)}->{''.join(known[axis] for axis in own)}", gradient, *(inputs[x] for x in others)
                )
                shape = [inputs[name].shape[k] if axis in own else 1 for k, axis in enumerate(self._axes(name))]
                found[name] = np.broadcast_to(product.reshape(shape), inputs[name].shape)
            return found
        if step.family is OperatorFamily.ATTENTION:
            q, k, v = (inputs[name] for name in step.inputs)
            weights = _softmax(np.einsum("sad,zad->saz", q, k), (2,))
            of_weights = np.einsum("sad,zad->saz", gradient, v)
            of_scores = weights * (of_weights - (of_weights * weights).sum(2, keepdims=True))
            parts_ = (
                np.einsum("saz,zad->sad", of_scores, k),
                np.einsum("saz,sad->zad", of_scores, q),
                np.einsum("saz,sad->zad", weights, gradient),
            )
            return dict(zip(step.inputs, parts_, strict=True))
        spread = {name: self._broadcast(name, inputs[name], axes) for name in step.inputs}
        if step.family is OperatorFamily.SUM:
            return {name: self._back(name, gradient, axes) for name in step.inputs}
        if step.family is OperatorFamily.POINTWISE:
            product = reduce(np.multiply, spread.values())
            inner = gradient * (1.0 - np.tanh(product) ** 2)
            found = {}
            for name in step.inputs:
                others_ = [array for one, array in spread.items() if one != name]
                found[name] = self._back(name, reduce(np.multiply, others_, inner), axes)
            return found
        y = _softmax(reduce(np.add, spread.values()), self._along(step))
        inner = y * (gradient - (gradient * y).sum(self._along(step), keepdims=True))
        return {name: self._back(name, inner, axes) for name in step.inputs}


_ALIKE = (OperatorFamily.SUM, OperatorFamily.POINTWISE, OperatorFamily.ROWS)


def _softmax(x: Array, axes: tuple[int, ...]) -> Array:
    powers = np.exp(x - x.max(axis=axes, keepdims=True))
    return np.asarray(powers / powers.sum(axis=axes, keepdims=True))


@dataclass
class OneProcess:
    """The layer without any placement. values: all that it makes; gradients: of all."""

    graph: OperatorGraph
    values: dict[str, Array]
    lengths: Mapping[str, int]
    gradients: dict[str, Array] = field(default_factory=dict)

    def run(self) -> None:
        numbers = Numbers(self.graph, self.lengths)
        for step in self.graph.steps:
            self.values.update(numbers.forward_on(step, [self.values])[0])
        self.gradients = {name: np.cos(self.values[name]) for name in self.graph.leaving}
        for step in reversed(self.graph.steps):
            of = self.gradients.get(step.outputs[0])
            found = numbers.backward_on(step, [self.values], None if of is None else [of])
            for name, array in found[0].items():
                self.gradients[name] = self.gradients.get(name, 0.0) + array


@dataclass
class SimulatedRanks:
    """A scheme carried out. A value that is nowhere where a step needs it is a KeyError."""

    graph: OperatorGraph
    scheme: Scheme
    lengths: Mapping[str, int]
    random: np.random.Generator
    there: dict[tuple[str, TensorPlacement], Ranks] = field(default_factory=dict)
    supply: dict[tuple[str, TensorPlacement], Ranks] = field(default_factory=dict)
    gradients: dict[tuple[str, TensorPlacement], Ranks] = field(default_factory=dict)

    def _strategy(self, step: Step, text: str) -> Strategy:
        return next(one for one in strategies(step, self.graph, self.scheme.degree) if one.text == text)

    def _moved(self, name: str, source: TensorPlacement, target: TensorPlacement, ranks: Ranks) -> Ranks:
        axes = self.graph.values[name].axes
        return placed(joined(ranks, axes, source), axes, target, len(ranks), self.random)

    def _gathered(self, strategy: Strategy, names: Sequence[str], there: Mapping[str, Ranks]) -> dict[str, Ranks]:
        """Keys and values that have gone around a ring."""
        found = {name: there[name] for name in names}
        for name in names[1:] if strategy.exchange == RING else ():
            found[name] = self._moved(name, strategy.placements[name], REPLICATED, there[name])
        return found

    def _step(self, step: Step, strategy: Strategy, there: Mapping[str, Ranks]) -> dict[str, Ranks]:
        inputs = self._gathered(strategy, step.inputs, there)
        numbers, count = Numbers(self.graph, self.lengths), self.scheme.degree
        each = [{name: inputs[name][rank] for name in step.inputs} for rank in range(count)]
        made = numbers.forward_on(step, each, strategy)
        return {name: [of_rank[name] for of_rank in made] for name in step.outputs}

    def run(self, full: Mapping[str, Array], gradients: Mapping[str, Array]) -> None:
        """full: what arrives, what is given, and weights."""
        graph, scheme = self.graph, self.scheme
        count = scheme.degree
        weights = {weight.name for weight in graph.weights}
        laid = {name: graph.at_border(name, scheme.border) for name in graph.arriving}
        laid |= {**dict.fromkeys(graph.given, REPLICATED), **scheme.weights}
        for name, placement in laid.items():
            made = placed(full[name], graph.values[name].axes, placement, count, self.random)
            self._make(name, placement, made)
            if name in weights:
                self.supply[name, placement] = made
        how = {step.name: step for step in scheme.steps}
        for step in graph.steps:
            strategy = self._strategy(step, how[step.name].forward)
            there = {name: self.there[name, strategy.placements[name]] for name in step.inputs}
            for name, made in self._step(step, strategy, there).items():
                self._make(name, strategy.placements[name], made)
        for name, placement in scheme.kept:
            self.supply[name, placement] = self.there[name, placement]
        for step in graph.steps:
            again = how[step.name].again
            if again is not None:
                strategy = self._strategy(step, again)
                there = {name: self._needed(name, strategy.placements[name]) for name in step.inputs}
                for name, made in self._step(step, strategy, there).items():
                    self.supply[name, strategy.placements[name]] = made
        parts: dict[str, list[tuple[TensorPlacement, Ranks]]] = {}
        for name in graph.leaving:
            place = graph.at_border(name, scheme.border)
            parts[name] = [(place, placed(gradients[name], graph.values[name].axes, place, count, self.random))]
        for step in reversed(graph.steps):
            self._go_back(step, self._strategy(step, how[step.name].backward), parts)
        for name in graph.arriving:
            self._gather(name, parts[name])

    def _make(self, name: str, placement: TensorPlacement, made: Ranks) -> None:
        self.there[name, placement] = made
        for move in self.scheme.moves:
            if (move.when, move.value, move.source) == ("forward", name, placement):
                self.there[name, move.target] = self._moved(name, placement, move.target, made)

    def _needed(self, name: str, placement: TensorPlacement) -> Ranks:
        """In the backward pass."""
        if (name, placement) in self.supply:
            return self.supply[name, placement]
        for move in self.scheme.moves:
            if move.when in ("kept", "again") and (move.value, move.target) == (name, placement):
                return self._moved(name, move.source, placement, self.supply[name, move.source])
        raise KeyError(name, placement)

    def _gather(self, name: str, parts: list[tuple[TensorPlacement, Ranks]]) -> None:
        """The value's gradient in one placement, and where it is moved to."""
        moves = {(one.source, one.target) for one in self.scheme.moves if (one.when, one.value) == ("part", name)}
        places = (*self.graph.placements(name, self.scheme.degree), PARTIAL)
        sums = [place for place in places if all(one == place or (one, place) in moves for one, _ in parts)]
        for place in sums:
            moved = [ranks if one == place else self._moved(name, one, place, ranks) for one, ranks in parts]
            total = [np.asarray(np.sum(of_rank, axis=0)) for of_rank in zip(*moved, strict=True)]
            self.gradients[name, place] = total
            for move in self.scheme.moves:
                if (move.when, move.value, move.source) == ("gradient", name, place):
                    self.gradients[name, move.target] = self._moved(name, place, move.target, total)

    def _go_back(self, step: Step, strategy: Strategy, parts: dict[str, list[tuple[TensorPlacement, Ranks]]]) -> None:
        (made,) = step.outputs
        gradient = None
        if self.graph.values[made].has_gradient:
            self._gather(made, parts[made])
            gradient = self.gradients[made, strategy.adjoint(made)]
        read = {name: self._needed(name, strategy.placements[name]) for name in step.backward_reads}
        inputs = self._gathered(strategy, [*read], read) if len(read) > 1 else dict(read)
        for name in step.inputs:  # of a sum, and of the table of a lookup, shapes are enough
            if name not in inputs:
                noughts = np.zeros(shape_of(self.graph, name, self.lengths))
                axes, place = self.graph.values[name].axes, strategy.placements[name]
                inputs[name] = placed(noughts, axes, place, self.scheme.degree, self.random)
        each = [{name: inputs[name][rank] for name in step.inputs} for rank in range(self.scheme.degree)]
        each = Numbers(self.graph, self.lengths).backward_on(step, each, gradient, strategy)
        for name in each[0]:
            ranks, placement = [of_rank[name] for of_rank in each], strategy.adjoint(name)
            if strategy.exchange == RING and name != step.inputs[0]:
                ranks = self._moved(name, PARTIAL, placement, ranks)
            if self.graph.values[name].parameters:
                self.gradients[name, placement] = ranks
            parts.setdefault(name, []).append((placement, ranks))
