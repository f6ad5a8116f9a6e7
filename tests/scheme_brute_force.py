"""The slow twin of the program of schemes: all schemes of a layer, step by step.

What is known of a scheme after some steps is, for each value that later steps touch, where it was made, where it has
been read, and where parts of its gradient are. Schemes that are alike in this go on alike, so that only those of them
stay that no other is as good as. A value's moves, and what is kept of it, are chosen when nothing touches it any more:
each placement that is read is paid for once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from piper_ray.workloads.estimate.costs import idle_s
from piper_ray.workloads.schemes.graph import PARTIAL, REPLICATED, OperatorGraph, Step, TensorPlacement, Value
from piper_ray.workloads.schemes.prices import PassPhase, SchemePrices
from piper_ray.workloads.schemes.rules import Strategy, strategies

Paid = tuple[float, ...]
"""Seconds of the GPU and of the host in the forward pass, the same in the backward pass, seconds once a batch; bytes of
activations and of weights."""

_NOTHING: Paid = (0.0,) * 7
_Places = frozenset[TensorPlacement]
_Key = TypeVar("_Key")


class _Known(NamedTuple):
    """Of a value. made: by its forward pass; again: once more; read, read_back: in either pass; parts: of its gradient;
    needed: where the step that made it, or the layer before, needs its gradient."""

    made: _Places = frozenset()
    again: _Places = frozenset()
    read: _Places = frozenset()
    read_back: _Places = frozenset()
    parts: tuple[TensorPlacement, ...] = ()
    needed: TensorPlacement | None = None

    def plus(self, other: _Known) -> _Known:
        return _Known(
            self.made | other.made,
            self.again | other.again,
            self.read | other.read,
            self.read_back | other.read_back,
            tuple(sorted(self.parts + other.parts)),
            self.needed or other.needed,
        )


def time_s(paid: Paid) -> float:
    """Of both passes, with what is summed once a batch."""
    return sum(device_s + idle_s(device_s, host_s) for device_s, host_s in (paid[:2], paid[2:4])) + paid[4]


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
    in_flight, most_bytes = limit

    def fits(paid: Paid) -> bool:
        return in_flight * paid[5] + paid[6] <= most_bytes and time_s(paid) < below_s

    def figures(paid: Paid) -> Paid:
        held_bytes = in_flight * paid[5] + paid[6]
        return (*paid[:5], held_bytes) if with_host else (paid[0] + paid[2] + paid[4], held_bytes)

    schemes = AllSchemes(graph, degree, prices, border)
    with_host = any(paid[1] or paid[3] for step in graph.steps for _, paid in schemes.ways(step))
    found = schemes.undominated(fits, figures)
    return min(map(time_s, found), default=float("inf"))


@dataclass
class AllSchemes:
    """Of a layer on a number of devices."""

    graph: OperatorGraph
    degree: int
    prices: SchemePrices
    border: TensorPlacement

    def undominated(self, fits: Callable[[Paid], bool], figures: Callable[[Paid], Paid]) -> list[Paid]:
        """What schemes take that no other is as good as in all figures. fits: false where a scheme is dropped, and all
        that take no less of anything. figures: of what a scheme takes."""
        graph, first = self.graph, {name: self._first(name) for name in self.graph.values}
        last = {name: step for step in graph.steps for name in (*step.inputs, *step.outputs, *step.backward_reads)}
        ways = {step.name: _best(list(self.ways(step)), figures) for step in graph.steps}
        least = [_NOTHING]  # of the steps that come
        for step in reversed(graph.steps):
            least_of_step = tuple(map(min, zip(*(x for of in ways[step.name].values() for x in of), strict=True)))
            parameters = sum(graph.values[name].parameters for name in step.inputs)
            of_weights = (*_NOTHING[:6], self.prices.weight.state * parameters / self.degree)
            least.append(_sum(_sum(least[-1], least_of_step), of_weights))
        states: dict[frozenset[tuple[str, _Known]], list[Paid]] = {frozenset(): [_NOTHING]}
        closed: dict[tuple[str, _Known], list[Paid]] = {}
        for step, rest in zip(graph.steps, least[-2::-1], strict=True):
            found: list[tuple[frozenset[tuple[str, _Known]], Paid]] = []
            for state, sums in states.items():
                known = {**first, **dict(state)}
                for way, taken in ways[step.name].items():
                    totals = [total for one in sums for other in taken if fits(_sum(total := _sum(one, other), rest))]
                    if not totals:
                        continue
                    now = {**dict(state), **{name: known[name].plus(of) for name, of in way}}
                    for name in [name for name in now if last[name] is step]:
                        key = name, now.pop(name)
                        if key not in closed:
                            closed[key] = _undominated(list(self._kept(*key)), figures)
                        totals = [_sum(one, other) for one in totals for other in closed[key]]
                    found += [(frozenset(now.items()), one) for one in totals if fits(_sum(one, rest))]
            states = _best(found, figures)
        return states.get(frozenset(), [])

    def _at_border(self, name: str) -> TensorPlacement:
        return self.graph.at_border(name, self.border)

    def _first(self, name: str) -> _Known:
        """Before any step."""
        graph, found = self.graph, _Known()
        if name in graph.arriving:
            found = _Known(frozenset([self._at_border(name)]), needed=self._at_border(name))
        elif name in graph.given:
            found = _Known(frozenset([REPLICATED]))
        if name in graph.leaving:
            learned = (self._at_border(name),) * graph.values[name].has_gradient
            found = found._replace(read=frozenset([self._at_border(name)]), parts=learned)
        return found

    def ways(self, step: Step) -> Iterator[tuple[tuple[tuple[str, _Known], ...], Paid]]:
        """What each way to do a step, and to do it again or not, makes known of its values; and what it takes."""
        priced = [(one, self.prices.step(step, one)) for one in strategies(step, self.graph, self.degree)]
        options = [(one, price) for one, price in priced if price is not None]
        for (there, first), (back, second), again in itertools.product(options, options, [None, *options]):
            more = (again[1].forward_s, again[1].again_host_s) if again else (0.0, 0.0)
            paid = first.forward_s, first.forward_host_s, second.backward_s + more[0], second.backward_host_s + more[1]
            names = dict.fromkeys((*step.inputs, *step.backward_reads, *step.outputs))
            how = {name: self._done(step, name, there, back, again[0] if again else None) for name in names}
            yield tuple(how.items()), (*paid, 0.0, 0.0, 0.0)

    def _done(self, step: Step, name: str, there: Strategy, back: Strategy, again: Strategy | None) -> _Known:
        made, read = name in step.outputs, name in step.inputs
        learned = self.graph.values[name].has_gradient
        read_back = [back.placements[name]] * (name in step.backward_reads)
        read_back += [again.placements[name]] if again and read else []
        return _Known(
            frozenset([there.placements[name]] * made),
            frozenset([again.placements[name]] if again and made else []),
            frozenset([there.placements[name]] * read),
            frozenset(read_back),
            (back.adjoint(name),) * (read and learned),
            back.adjoint(name) if made and learned else None,
        )

    def _kept(self, name: str, known: _Known) -> Iterator[Paid]:
        """What each way to keep a value costs: its moves, and those of its gradient."""
        value = self.graph.values[name]
        places = self.graph.placements(name, self.degree)
        for laid in places if value.parameters else (None,):
            made = known.made if laid is None else frozenset([laid])
            for kept in _subsets(places) if laid is None else [()]:
                there_s = self._moves_s(value, made, known.read | {*kept}, lambda _: PassPhase.FORWARD)
                supply = (known.again if laid is None else made) | {*kept}
                back_s = self._moves_s(value, supply, known.read_back, _of_supply)
                gradient_s, once_s = (
                    self._gradient_s(value, known) if laid is None else self._weight_s(value, known, laid)
                )
                shares = [value.bytes / (self.degree if place.axis else 1) for place in kept]
                state = self.prices.weight.state * value.parameters / (self.degree if laid and laid.axis else 1)
                paid = there_s, 0.0, back_s + gradient_s, 0.0, once_s, sum(shares), state
                if float("inf") not in paid:
                    yield paid

    def _move_s(self, value: Value, source: TensorPlacement, target: TensorPlacement, phase: PassPhase) -> float:
        found = 0.0 if source == target else self.prices.move_s(value, source, target, phase)
        return float("inf") if found is None else found

    def _moves_s(
        self, value: Value, there: _Places, read: _Places, phase: Callable[[TensorPlacement], PassPhase]
    ) -> float:
        """phase: of what is moved from a placement."""
        needed = (
            min((self._move_s(value, source, place, phase(source)) for source in there), default=float("inf"))
            for place in read - there
        )
        return sum(needed)

    def _gradient_s(self, value: Value, known: _Known) -> tuple[float, float]:
        """All parts are brought to one place, and added there; a part by itself is there."""
        if not value.has_gradient or known.needed is None:
            return 0.0, 0.0
        places = known.parts if len(known.parts) == 1 else (*self.graph.placements(value.name, self.degree), PARTIAL)
        return min(
            sum(self._move_s(value, part, place, PassPhase.GRADIENT) for part in known.parts)
            + self._move_s(value, place, known.needed, PassPhase.GRADIENT)
            for place in places
        ), 0.0

    def _weight_s(self, value: Value, known: _Known, laid: TensorPlacement) -> tuple[float, float]:
        """The gradient of a weight that all devices hold is summed once a batch."""
        (part,) = known.parts
        if part == laid:
            return 0.0, 0.0
        if not laid.axis:
            return (0.0, self.prices.once_s(value)) if part.partial else (float("inf"), 0.0)
        return float("inf") if part.axis else self._move_s(value, part, laid, PassPhase.GRADIENT), 0.0


def _of_supply(source: TensorPlacement) -> PassPhase:
    """Partial sums that are made again are summed at the forward pass's price."""
    return PassPhase.FORWARD if source.partial else PassPhase.KEPT


def _subsets(places: tuple[TensorPlacement, ...]) -> list[tuple[TensorPlacement, ...]]:
    return [some for count in range(len(places) + 1) for some in itertools.combinations(places, count)]


def _sum(one: Paid, other: Paid) -> Paid:
    return tuple(map(float.__add__, one, other))


def _best(found: Iterable[tuple[_Key, Paid]], figures: Callable[[Paid], Paid]) -> dict[_Key, list[Paid]]:
    """Of those with one key the undominated ones."""
    by_key: dict[_Key, list[Paid]] = {}
    for key, paid in found:
        by_key.setdefault(key, []).append(paid)
    return {key: _undominated(rows, figures) for key, rows in by_key.items()}


def _undominated(rows: list[Paid], figures: Callable[[Paid], Paid]) -> list[Paid]:
    kept: list[tuple[Paid, Paid]] = []
    for told, paid in sorted({(figures(one), one) for one in rows}):
        if not any(all(x <= y for x, y in zip(other, told, strict=True)) for other, _ in kept):
            kept.append((told, paid))
    return [paid for _, paid in kept]
