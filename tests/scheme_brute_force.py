"""The slow twin of the program of schemes: every choice of strategies in turn, and for each value every set of what is
kept of it. Whatever is moved is paid for where it is read, once for each placement."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from piper_ray.workloads.estimate.costs import idle_s
from piper_ray.workloads.schemes.graph import PARTIAL, OperatorGraph, TensorPlacement, Value
from piper_ray.workloads.schemes.prices import PassPhase, SchemePrices
from piper_ray.workloads.schemes.rules import Strategy, strategies

Choice = Mapping[str, Strategy]
Paid = tuple[float, float, float, float]
"""Bytes in all, seconds of the GPU in the forward and in the backward pass, and seconds once a batch."""


def least_s(
    graph: OperatorGraph,
    degree: int,
    prices: SchemePrices,
    border: TensorPlacement,
    limit: tuple[float, float],
    below_s: float = float("inf"),
) -> float:
    """The least time within a limit: microbatches in flight, and bytes; infinite if nothing within it takes less than
    ``below_s``."""
    twin = _Twin(graph, degree, prices, border, limit)
    twin.best = below_s
    return min(twin.times(), default=float("inf"))


class _Twin:
    def __init__(
        self,
        graph: OperatorGraph,
        degree: int,
        prices: SchemePrices,
        border: TensorPlacement,
        limit: tuple[float, float],
    ) -> None:
        self.graph, self.degree, self.prices, self.border = graph, degree, prices, border
        self.in_flight, self.most_bytes = limit
        self.best = float("inf")
        self.known: dict[tuple[object, ...], list[Paid]] = {}

    def times(self) -> Iterator[float]:
        """Each step's choices in turn; where the steps so far, and the rest at their least, take too long, no more of
        these."""
        yield from self._from(0, ({}, {}, {}))

    def _from(
        self, number: int, made: tuple[dict[str, Strategy], dict[str, Strategy], dict[str, Strategy]]
    ) -> Iterator[float]:
        if self._pass_s(*self._steps(*made)) >= self.best:
            return
        if number == len(self.graph.steps):
            found = self._least(*made, self._steps(*made))
            if found < self.best:
                self.best = found
                yield found
            return
        step = self.graph.steps[number]
        options = strategies(step, self.graph, self.degree)
        for forward, backward, again in itertools.product(options, options, [None, *options]):
            redone = {step.name: again} if again else {}
            chosen = {**made[0], step.name: forward}, {**made[1], step.name: backward}, {**made[2], **redone}
            yield from self._from(number + 1, chosen)

    def _pass_s(self, forward: tuple[float, float], backward: tuple[float, float]) -> float:
        return sum(device_s + idle_s(device_s, host_s) for device_s, host_s in (forward, backward))

    def _steps(self, forward: Choice, backward: Choice, again: Choice) -> tuple[tuple[float, float], ...]:
        """Of both passes the seconds of the GPU and of the host, without moves."""
        there, back = [0.0, 0.0], [0.0, 0.0]
        for step in self.graph.steps:
            known = step.name in forward
            options = [self.prices.step(step, one) for one in strategies(step, self.graph, self.degree)]
            first, second = (self.prices.step(step, of[step.name]) if known else None for of in (forward, backward))
            first = first or min((x for x in options if x), key=lambda x: x.forward_s)
            second = second or min((x for x in options if x), key=lambda x: x.backward_s)
            if not known:  # the least of both
                first = replace(first, forward_host_s=min(x.forward_host_s for x in options if x))
                second = replace(second, backward_host_s=min(x.backward_host_s for x in options if x))
            there = [there[0] + first.forward_s, there[1] + first.forward_host_s]
            back = [back[0] + second.backward_s, back[1] + second.backward_host_s]
            if step.name in again:
                third = self.prices.step(step, again[step.name])
                assert third is not None
                back = [back[0] + third.forward_s, back[1] + third.again_host_s]
        return (there[0], there[1]), (back[0], back[1])

    def _least(self, forward: Choice, backward: Choice, again: Choice, steps_s: Sequence[tuple[float, float]]) -> float:
        sums: list[Paid] = [(0.0, 0.0, 0.0, 0.0)]
        for value in self.graph.values.values():
            ways = self._known_ways(value, forward, backward, again)
            sums = _undominated([tuple(map(sum, zip(one, way, strict=True))) for one in sums for way in ways])  # type: ignore[misc]
        (forward_s, forward_host_s), (backward_s, backward_host_s) = steps_s
        return min(
            (
                self._pass_s((forward_s + there, forward_host_s), (backward_s + back, backward_host_s)) + once
                for held, there, back, once in sums
                if held <= self.most_bytes
            ),
            default=float("inf"),
        )

    def _known_ways(self, value: Value, forward: Choice, backward: Choice, again: Choice) -> list[Paid]:
        near = [step.name for step in self.graph.steps if value.name in (*step.inputs, *step.outputs)]
        near += [step.name for step in self.graph.steps if value.name in step.backward_reads]
        key = value.name, *((one.get(name) and one[name].text) for one in (forward, backward, again) for name in near)
        if key not in self.known:
            self.known[key] = _undominated(list(self._ways(value, forward, backward, again)))
        return self.known[key]

    def _ways(self, value: Value, forward: Choice, backward: Choice, again: Choice) -> Iterator[Paid]:
        """What each way to keep a value costs: its moves, and those of its gradient."""
        graph, readers = self.graph, self.graph.consumers[value.name]
        made = next((step for step in graph.steps if value.name in step.outputs), None)
        places = graph.placements(value.name, self.degree)
        read = {forward[step.name].placements[value.name] for step in readers}
        read_back = {
            backward[step.name].placements[value.name] for step in graph.steps if value.name in step.backward_reads
        } | {again[step.name].placements[value.name] for step in readers if step.name in again}
        if value.name in graph.leaving:
            read |= {graph.at_border(value.name, self.border)}
        for laid in places if value.parameters else (None,):
            if value.parameters:
                of_gradient_s = self._weight_s(value, backward[readers[0].name].adjoint(value.name), laid)
            else:
                of_gradient_s = self._gradient_s(value, backward), 0.0
            source = laid if made is None else forward[made.name].placements[value.name]
            if made is None and not value.parameters:
                source = graph.at_border(value.name, self.border)
            assert source is not None
            remade = {again[made.name].placements[value.name]} if made is not None and made.name in again else set()
            for kept in [()] if value.parameters else _subsets(places):
                there_s = self._moves_s(value, {source}, read | {*kept}, PassPhase.FORWARD)
                supply = {*kept} | remade | ({laid} if laid is not None else set())
                back_s = self._back_s(value, supply, read_back)
                share = sum(value.bytes / (self.degree if place.axis else 1) for place in kept)
                state = 0.0
                if laid is not None:
                    state = self.prices.weight.state * value.parameters / (self.degree if laid.axis else 1)
                if there_s is not None and back_s is not None and of_gradient_s[0] is not None:
                    yield self.in_flight * share + state, there_s, back_s + of_gradient_s[0], of_gradient_s[1]

    def _moves_s(
        self, value: Value, there: set[TensorPlacement], read: set[TensorPlacement], phase: PassPhase
    ) -> float | None:
        total = 0.0
        for place in read - there:
            found = [self.prices.move_s(value, source, place, phase) for source in there]
            known = [seconds for seconds in found if seconds is not None]
            if not known:
                return None
            total += min(known)
        return total

    def _back_s(self, value: Value, supply: set[TensorPlacement], read: set[TensorPlacement]) -> float | None:
        """Partial sums that are made again are summed at the forward pass's price."""
        total = 0.0
        for place in read - supply:
            found = [
                self.prices.move_s(value, source, place, PassPhase.FORWARD if source.partial else PassPhase.KEPT)
                for source in supply
            ]
            known = [seconds for seconds in found if seconds is not None]
            if not known:
                return None
            total += min(known)
        return total

    def _gradient_s(self, value: Value, backward: Choice) -> float | None:
        graph = self.graph
        parts = [backward[step.name].adjoint(value.name) for step in graph.consumers[value.name]]
        border = graph.at_border(value.name, self.border)
        parts += [border] if value.name in graph.leaving else []
        made = next((step for step in graph.steps if value.name in step.outputs), None)
        needed = border if made is None else backward[made.name].adjoint(value.name)
        sums = parts if len(parts) == 1 else (*graph.placements(value.name, self.degree), PARTIAL)
        totals = []
        for place in sums:
            moves = [self._moves_s(value, {part}, {place}, PassPhase.GRADIENT) for part in parts]
            moves.append(self._moves_s(value, {place}, {needed}, PassPhase.GRADIENT))
            if None not in moves:
                totals.append(sum(move for move in moves if move is not None))
        return min(totals, default=None)

    def _weight_s(
        self, value: Value, source: TensorPlacement, laid: TensorPlacement | None
    ) -> tuple[float | None, float]:
        assert laid is not None
        if source == laid:
            return 0.0, 0.0
        if not laid.axis:
            return (0.0, self.prices.once_s(value)) if source.partial else (None, 0.0)
        return (None if source.axis else self.prices.move_s(value, source, laid, PassPhase.GRADIENT)), 0.0


def _subsets(places: Sequence[TensorPlacement]) -> list[tuple[TensorPlacement, ...]]:
    return [some for count in range(len(places) + 1) for some in itertools.combinations(places, count)]


def _undominated(sums: list[Paid]) -> list[Paid]:
    kept: list[Paid] = []
    for one in sorted(set(sums)):
        if not any(all(x <= y for x, y in zip(other, one, strict=True)) for other in kept):
            kept.append(one)
    return kept
