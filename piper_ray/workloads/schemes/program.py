"""The least time of a layer's passes, within a memory or at a price of it, over all schemes: an integer program.

Most often its relaxation is whole, or a whole solution lies within the wanted gap of it: these are tried before HiGHS
branches.

Binaries: for each step a strategy of its forward pass, one of its backward pass, and one of its recomputed forward pass
or none; for each weight its placement; for each value the placements that are kept, and the moves from one placement to
another, each of which is paid once for all readers. A move is a single hop from a result of a step, or from a kept
value.

A pass takes a norm of the GPU's and the host's seconds (``estimate.costs.idle_s``), which is convex. The program has
tangents of the norm, and gets one more as long as its value is below the norm.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import highspy
import numpy as np

from piper_ray.workloads.estimate.costs import idle_s, pass_slopes
from piper_ray.workloads.schemes.graph import PARTIAL, REPLICATED, OperatorGraph, Step, TensorPlacement, Value
from piper_ray.workloads.schemes.prices import PassPhase, SchemePrices, StepPrice
from piper_ray.workloads.schemes.rules import Strategy, strategies
from piper_ray.workloads.schemes.scheme import Move, Scheme, SchemeFigures, StepScheme

PROGRAM_GAP = 1e-4
"""Relative: how far a scheme may be from the best one."""

_WHOLE = 1e-6
"""A binary this near to 0 or 1 is whole."""

_NEARLY = 0.8
"""Binaries of a relaxation that are larger than this become 1 immediately."""

_MOST_ROUNDS = 40
_ANGLES = 9
_TIE = 1e-5
"""Relative to the time: the weight of the whole memory. Of equally fast schemes, the one that holds less is found; and
of these, by a hundredth of the weight, one whose steps are divided."""

_PLAIN_SEARCH: Mapping[str, int | str] = {
    "threads": 1,
    "mip_pscost_minreliable": 0,
    "mip_allow_restart": False,
    "mip_heuristic_run_rins": False,
    "mip_heuristic_run_rens": False,
    "mip_heuristic_run_root_reduced_cost": False,
    "mip_heuristic_run_feasibility_jump": False,
}
"""A program ends within a few nodes: the methods by which HiGHS saves nodes in large searches take longer than these
nodes."""

FloatArray = np.ndarray[Any, np.dtype[np.float64]]
IntArray = np.ndarray[Any, np.dtype[np.int64]]
_STRATEGIES = ("forward", "backward", "again", "weight")
"""The first words of the names of columns that say how steps are divided, and where weights are placed."""

_WEIGHTS = "weight's gradient"
_FORWARD_MOVE = "forward move"

Terms = Mapping[int, float]
_At = dict[tuple[str, TensorPlacement], dict[int, float]]
"""By value and placement, the binaries that each mean that the value is there in this form."""


@dataclass
class _Columns:
    """The program under construction."""

    names: list[tuple[Any, ...]] = field(default_factory=list)
    rows: list[tuple[float, float, dict[int, float]]] = field(default_factory=list)
    is_binary: list[bool] = field(default_factory=list)

    def column(self, *name: object, binary: bool = True) -> int:
        self.names.append(name)
        self.is_binary.append(binary)
        return len(self.names) - 1

    def at_most(self, less: Terms, more: Terms) -> None:
        """less <= more."""
        terms = defaultdict(float, less)
        for column, factor in more.items():
            terms[column] -= factor
        self.rows.append((-np.inf, 0.0, dict(terms)))

    def equal(self, terms: Terms, value: float = 1.0) -> None:
        self.rows.append((value, value, dict(terms)))


def _ones(columns: Iterable[int]) -> dict[int, float]:
    return dict.fromkeys(columns, 1.0)


class SchemeProgram:
    """The program of a graph on ``degree`` devices, where the values between layers have the placement ``border``. It
    is solved repeatedly, under different limits of memory.

    only: for steps, the text of the only strategy that is allowed; all other steps have all strategies of the rules.
    again: whether steps may be recomputed.
    """

    def __init__(
        self,
        graph: OperatorGraph,
        degree: int,
        prices: SchemePrices,
        border: TensorPlacement,
        only: Mapping[str, str] | None = None,
        *,
        again: bool = True,
    ) -> None:
        self._most_again = float(again)
        self._only = only or {}
        self._graph, self._degree, self._prices, self._border = graph, degree, prices, border
        self._columns = _Columns()
        self._redone = self._columns.column("redone", binary=False)
        self._forward_moves = dict[tuple[str, TensorPlacement], dict[int, float]]()
        self._device_s: tuple[dict[int, float], dict[int, float]] = {}, {}
        self._host_s: tuple[dict[int, float], dict[int, float]] = {}, {}
        self._once_s: dict[int, float] = {}
        self._kept_bytes: dict[int, float] = {}
        self._state_bytes: dict[int, float] = {}
        self._weights_bytes: dict[int, float] = {}
        self._again_bytes: dict[int, float] = {}
        self._options = {step.name: list(self._priced(step)) for step in graph.steps}
        self._forward, self._backward, self._again = (
            {
                (step.name, place): self._columns.column(phase, step.name, strategy)
                for step in graph.steps
                for place, (strategy, _) in enumerate(self._options[step.name])
            }
            for phase in ("forward", "backward", "again")
        )
        self._whole = {
            column: _TIE / 100.0
            for of in (self._forward, self._backward)
            for (name, place), column in of.items()
            if not self._options[name][place][0].axis
        }
        self._lay_weights()
        self._go_forward()
        self._go_backward()
        self._return_gradients()
        self._charge_steps()
        self._seconds = [self._columns.column("seconds", phase, binary=False) for phase in (0, 1)]
        self._device = [self._columns.column("device", phase, binary=False) for phase in (0, 1)]
        self._held = [self._columns.column("held", what, binary=False) for what in ("a", "b")]
        self._excess = self._columns.column("excess", binary=False)
        self._start()

    def _priced(self, step: Step) -> Iterable[tuple[Strategy, StepPrice]]:
        for strategy in strategies(step, self._graph, self._degree):
            price = self._prices.step(step, strategy)
            if price is not None and self._only.get(step.name, strategy.text) == strategy.text:
                yield strategy, price

    def _chosen(self, columns: Mapping[tuple[str, int], int], step: Step) -> list[tuple[Strategy, int]]:
        return [(one, columns[step.name, place]) for place, (one, _) in enumerate(self._options[step.name])]

    def _placements(self, name: str) -> tuple[TensorPlacement, ...]:
        return self._graph.placements(name, self._degree)

    def _lay_weights(self) -> None:
        self._laid: _At = {}
        for weight in self._graph.weights:
            there = {
                place: self._columns.column("weight", weight.name, place) for place in self._placements(weight.name)
            }
            self._columns.equal(_ones(there.values()))
            for place, column in there.items():
                share = weight.parameters / (self._degree if place.axis else 1)
                self._state_bytes[column] = share * self._prices.weight.state
                self._weights_bytes[column] = share * self._prices.weight.synchronised
                self._laid[weight.name, place] = {column: 1.0}

    def _moved(self, kind: str, value: Value, there: _At, phase: PassPhase) -> _At:
        """The placements of a value after moves of one hop from its placements ``there``. kind: the name for the moves.

        A gradient is in one placement and is read once: after a move it is no longer where it was. Whole numbers
        satisfy this in any case; the row keeps a relaxation from having a third of the gradient in each of three
        placements.
        """
        passing = 0 if phase is PassPhase.FORWARD and kind == _FORWARD_MOVE else 1
        once = phase is PassPhase.GRADIENT
        targets = [*self._placements(value.name), PARTIAL]
        found: _At = defaultdict(dict)
        for source in targets:
            made = there.get((value.name, source))
            if not made:
                continue
            found[value.name, source].update(made)
            moves = dict[int, float]()
            for target in targets:
                seconds = self._prices.move_s(value, source, target, phase) if target != source else None
                if seconds is None:
                    continue
                column = self._columns.column(kind, value.name, source, target)
                self._device_s[passing][column] = seconds
                found[value.name, target][column] = moves[column] = 1.0
            if kind == _FORWARD_MOVE:
                self._forward_moves[value.name, source] = moves
            for some in (moves,) if once and moves else ({column: 1.0} for column in moves):
                self._columns.at_most(some, made)
            if once:
                found[value.name, source].update(dict.fromkeys(moves, -1.0))
        return found

    def _go_forward(self) -> None:
        """Each step reads what is there; the values that leave have the border's placement."""
        graph = self._graph
        made: _At = defaultdict(dict)
        fixed = self._columns.column("arriving")
        self._columns.equal({fixed: 1.0})
        for name in graph.arriving:
            made[name, graph.at_border(name, self._border)][fixed] = 1.0
        for name in graph.given:
            made[name, REPLICATED][fixed] = 1.0
        made.update(self._laid)
        for step in graph.steps:
            options = self._chosen(self._forward, step)
            self._columns.equal(_ones(column for _, column in options))
            for strategy, column in options:
                for name in step.outputs:
                    made[name, strategy.placements[name]][column] = 1.0
        self._there = _At()
        for value in graph.values.values():
            self._there.update(self._moved(_FORWARD_MOVE, value, made, PassPhase.FORWARD))
        for step in graph.steps:
            options = self._chosen(self._forward, step)
            self._reads(options, step.inputs, self._there)
            self._read_where_made(options, step.inputs, made)
        for name in graph.leaving:
            self._columns.at_most({fixed: 1.0}, self._there[name, graph.at_border(name, self._border)])
        self._fixed = fixed

    def _reads(self, options: list[tuple[Strategy, int]], names: Iterable[str], there: _At) -> None:
        """A step with this strategy needs these values in the placements of the strategy."""
        for name in names:
            read: _At = defaultdict(dict)
            for strategy, column in options:
                read[name, strategy.placements[name]][column] = 1.0
            for key, columns in read.items():
                self._columns.at_most(columns, there.get(key, {}))

    def _read_where_made(self, options: list[tuple[Strategy, int]], names: Iterable[str], made: _At) -> None:
        """In a forward pass, each step that reads a value made in one placement reads it there, or the value is
        moved."""
        for name in names:
            for place in (*self._placements(name), PARTIAL):
                reads = _ones(column for strategy, column in options if strategy.placements[name] == place)
                moves = self._forward_moves.get((name, place), {})
                if there := made.get((name, place)):
                    self._columns.at_most(there, {**reads, **moves})

    def _go_backward(self) -> None:
        """A value that a backward pass reads was kept, or is recomputed from kept values."""
        graph = self._graph
        supply: _At = defaultdict(dict)
        supply.update({key: dict(columns) for key, columns in self._laid.items()})
        for value in graph.values.values():
            if value.parameters:
                continue
            for place in self._placements(value.name):
                kept = self._columns.column("kept", value.name, place)
                self._kept_bytes[kept] = value.bytes / (self._degree if place.axis else 1)
                self._columns.at_most({kept: 1.0}, self._there.get((value.name, place), {}))
                supply[value.name, place][kept] = 1.0
        for step in graph.steps:
            options = self._chosen(self._again, step)
            self._columns.at_most(_ones(column for _, column in options), {self._redone: 1.0})
            for strategy, column in options:
                for name in step.outputs:
                    supply[name, strategy.placements[name]][column] = 1.0
        again = _At()
        for value in graph.values.values():
            again.update(self._moved_back(value, supply))
        for step in graph.steps:
            redone, options = self._chosen(self._again, step), self._chosen(self._backward, step)
            self._reads(redone, step.inputs, again)
            self._columns.equal(_ones(column for _, column in options))
            self._reads(options, step.backward_reads, again)
            self._has(_ones(column for _, column in redone), step.inputs, supply)
            self._has({self._fixed: 1.0}, step.backward_reads, supply)

    def _has(self, reading: Terms, names: Iterable[str], supply: _At) -> None:
        """A value that is read in any placement is somewhere before any move. For whole numbers other rows imply this.
        Without it, a third of a value in each of three placements, moved from each to both others, would count as all
        of it in each."""
        for name in names:
            if not self._graph.values[name].parameters:
                places = (*self._placements(name), PARTIAL)
                self._columns.at_most(reading, {x: 1.0 for place in places for x in supply.get((name, place), {})})

    def _moved_back(self, value: Value, supply: _At) -> _At:
        """Recomputed partial sums are summed as in a forward pass; all other values were kept, or might have been."""
        partial = {key: columns for key, columns in supply.items() if key[1].partial}
        whole = {key: columns for key, columns in supply.items() if not key[1].partial}
        found = self._moved("again move", value, partial, PassPhase.FORWARD)
        for key, columns in self._moved("kept move", value, whole, PassPhase.KEPT).items():
            found[key].update(columns)
        return found

    def _return_gradients(self) -> None:
        """The gradient of each value goes from all readers to the step that made it; that of a weight to the weight's
        placement."""
        graph = self._graph
        there: _At = _At()
        for value in graph.values.values():
            if not value.has_gradient:
                continue
            if value.parameters:
                self._sum_weight(value)
                continue
            parts = [self._adjoint(step, value.name) for step in graph.consumers[value.name]]
            if value.name in graph.leaving:
                parts.append({(value.name, graph.at_border(value.name, self._border)): {self._fixed: 1.0}})
            summed = parts[0] if len(parts) == 1 else self._summed(value, parts)
            there.update(self._moved("gradient move", value, summed, PassPhase.GRADIENT))
        for step in graph.steps:
            for name in step.outputs:
                if graph.values[name].has_gradient:
                    for key, columns in self._adjoint(step, name).items():
                        self._columns.at_most(columns, there.get(key, {}))
        for name in graph.arriving:
            self._columns.at_most({self._fixed: 1.0}, there[name, graph.at_border(name, self._border)])

    def _adjoint(self, step: Step, name: str) -> _At:
        """Where a step's backward pass has the gradient of a value that it reads or makes."""
        found: _At = defaultdict(dict)
        for strategy, column in self._chosen(self._backward, step):
            found[name, strategy.adjoint(name)][column] = 1.0
        return found

    def _summed(self, value: Value, parts: list[_At]) -> _At:
        """Gradients from several readers are brought to one placement, and added."""
        moved = [self._moved("part move", value, part, PassPhase.GRADIENT) for part in parts]
        there: _At = {}
        for place in (*self._placements(value.name), PARTIAL):
            column = self._columns.column("sum", value.name, place)
            there[value.name, place] = {column: 1.0}
            for part in moved:
                self._columns.at_most({column: 1.0}, part.get((value.name, place), {}))
        self._columns.equal({column: 1.0 for columns in there.values() for column in columns})
        return there

    def _sum_weight(self, weight: Value) -> None:
        """The gradient of a weight has the weight's placement. Partial sums for a weight that all devices hold are
        summed once a batch; others in every pass."""
        (reader,) = self._graph.consumers[weight.name]
        pairs: dict[tuple[TensorPlacement, TensorPlacement], int] = {}
        for place in self._placements(weight.name):
            for source in (*self._placements(weight.name), PARTIAL):
                once = source.partial and not place.axis
                seconds = 0.0 if source == place or once else None
                if seconds is None and place.axis and not source.axis:
                    seconds = self._prices.move_s(weight, source, place, PassPhase.GRADIENT)
                if seconds is None:
                    continue
                column = pairs[source, place] = self._columns.column(_WEIGHTS, weight.name, source, place)
                if once:
                    self._once_s[column] = self._prices.once_s(weight)
                else:
                    self._device_s[1][column] = seconds
        for source in (*self._placements(weight.name), PARTIAL):
            of_source = {column: 1.0 for (one, _), column in pairs.items() if one == source}
            here = self._adjoint(reader, weight.name).get((weight.name, source), {})
            self._columns.at_most(here, of_source)
            self._columns.at_most(of_source, here)
        for place in self._placements(weight.name):
            self._columns.at_most(
                {column: 1.0 for (_, one), column in pairs.items() if one == place}, self._laid[weight.name, place]
            )

    def _charge_steps(self) -> None:
        for step in self._graph.steps:
            for place, (strategy, price) in enumerate(self._options[step.name]):
                key = step.name, place
                forward, backward, again = self._forward[key], self._backward[key], self._again[key]
                self._device_s[0][forward], self._host_s[0][forward] = price.forward_s, price.forward_host_s
                self._device_s[1][backward], self._host_s[1][backward] = price.backward_s, price.backward_host_s
                self._device_s[1][again], self._host_s[1][again] = price.forward_s, price.again_host_s
                self._again_bytes[again] = sum(
                    self._graph.values[name].bytes / (self._degree if strategy.placements[name].axis else 1)
                    for name in step.outputs
                )

    def _start(self) -> None:
        columns = self._columns
        self._unit_s = max(1e-12, sum(max(p.forward_s + p.backward_s for _, p in of) for of in self._options.values()))
        self._unit_bytes = max(
            1.0, sum(v.bytes for v in self._graph.values.values()) + sum(self._state_bytes.values()) / 2.0
        )
        lp = highspy.HighsLp()
        count, rows = len(columns.names), len(columns.rows)
        lp.num_col_, lp.num_row_ = count, rows
        costs = np.zeros(count)
        costs[self._seconds] = 1.0
        for column, seconds in self._once_s.items():
            costs[column] = seconds / self._unit_s
        lp.col_cost_, lp.col_lower_ = costs, np.zeros(count)
        self._upper = np.where(columns.is_binary, 1.0, np.inf)
        self._upper[self._redone] = self._most_again
        lp.col_upper_ = self._upper
        lp.integrality_ = [
            highspy.HighsVarType.kInteger if binary else highspy.HighsVarType.kContinuous
            for binary in columns.is_binary
        ]
        lp.row_lower_ = np.array([low for low, _, _ in columns.rows])
        lp.row_upper_ = np.array([high for _, high, _ in columns.rows])
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.cumsum([0, *(len(terms) for _, _, terms in columns.rows)])
        lp.a_matrix_.index_ = np.array([column for _, _, terms in columns.rows for column in terms])
        lp.a_matrix_.value_ = np.array([factor for _, _, terms in columns.rows for factor in terms.values()])
        self._highs = highspy.Highs()  # type: ignore[no-untyped-call]
        self._highs.silent()
        for option, value in _PLAIN_SEARCH.items():
            self._highs.setOptionValue(option, value)
        self._set_gap(PROGRAM_GAP / 2.0)
        self._highs.passModel(lp)
        self._binaries = np.flatnonzero(columns.is_binary)
        self._decisions = np.array([k for k in self._binaries if columns.names[k][0] in _STRATEGIES])
        for phase, factors in enumerate(self._device_s):
            scaled = {key: -seconds / self._unit_s for key, seconds in factors.items()}
            self._add_row(0.0, np.inf, {self._device[phase]: 1.0, **scaled})
            for angle in np.linspace(0.0, np.pi / 2.0, _ANGLES):
                self._add_tangent(phase, float(np.cos(angle)), float(np.sin(angle)))
        for column, of in ((self._held[0], self._kept_bytes), (self._held[1], self._state_bytes)):
            scaled = {key: -size / self._unit_bytes for key, size in of.items()}
            self._add_row(0.0, np.inf, {column: 1.0, **scaled})
        self._memory_row = rows + 2 * _ANGLES + 4
        self._add_row(-np.inf, np.inf, _ones(self._held))
        scaled = {key: -size / self._unit_bytes for key, size in self._again_bytes.items()}
        self._add_row(-np.inf, np.inf, {self._excess: 1.0, **scaled})

    def _add_tangent(self, phase: int, device_s: float, host_s: float) -> None:
        """The pass takes no less than the tangent of its norm at these seconds of the GPU and the host."""
        slopes = pass_slopes(device_s, host_s)
        terms = {column: -slopes[1] * seconds / self._unit_s for column, seconds in self._host_s[phase].items()}
        terms |= {self._device[phase]: -slopes[0], self._seconds[phase]: 1.0}
        self._add_row(0.0, np.inf, terms)

    def _add_row(self, low: float, high: float, terms: Mapping[int, float]) -> None:
        some = {column: factor for column, factor in terms.items() if factor}
        self._highs.addRow(
            low, high, len(some), np.array([*some], dtype=np.int32), np.array([*some.values()], dtype=float)
        )

    def least_held_bytes(self, in_flight: float) -> float:
        """The least that a scheme holds with a number of microbatches in flight. Raises InfeasibleError."""
        self._set_costs({self._held[0]: in_flight, self._held[1]: 1.0})
        values = self._run(in_flight, np.inf)
        assert values is not None  # each device may do everything
        return self._figures(values).held_bytes(in_flight)

    def fastest(self, in_flight: float, most_bytes: float = np.inf) -> Scheme | None:
        """The fastest scheme that holds no more than this with this many microbatches in flight; of equally fast ones,
        one that holds little. None if there is none."""
        tie = _TIE / (1.0 + in_flight)
        return self._least(tie * in_flight, tie, most_bytes)

    def at_price(self, activation_s: float, state_s: float, again_s: float = 0.0, room_bytes: float = np.inf) -> Scheme:
        """The scheme of least time, where each byte of a, of b, and of what is recomputed beyond the room for it counts
        as this many seconds. If the room is below 0, a scheme that recomputes anything also needs the missing bytes."""
        scale, tie, row = self._unit_bytes / self._unit_s, _TIE / 2.0, self._memory_row + 1
        self._highs.changeRowBounds(row, -max(0.0, room_bytes) / self._unit_bytes, np.inf)
        self._highs.changeCoeff(row, self._redone, min(0.0, room_bytes) / self._unit_bytes)
        found = self._least(activation_s * scale + tie, state_s * scale + tie, np.inf, again_s * scale)
        assert found is not None  # each device may do everything
        return found

    def _least(self, activation: float, state: float, most_bytes: float, again: float = 0.0) -> Scheme | None:
        """Minimises the time, and the weighted bytes of a, of b and of what the unit recomputes; with activation /
        state microbatches in flight it holds no more than this."""
        in_flight = activation / state
        once = {column: seconds / self._unit_s for column, seconds in self._once_s.items()}
        held = {self._held[0]: activation, self._held[1]: state, self._excess: again}
        self._set_costs({**dict.fromkeys(self._seconds, 1.0), **once, **held, **self._whole})
        values = self._run(in_flight, most_bytes)
        for _ in range(_MOST_ROUNDS):
            if values is None:
                return None
            said = [values[column] * self._unit_s for column in self._seconds]
            pairs = [self._pass(values, phase) for phase in (0, 1)]
            true = [device_s + idle_s(device_s, host_s) for device_s, host_s in pairs]
            if sum(true) - sum(said) <= PROGRAM_GAP / 2.0 * sum(true):
                break
            for phase in (0, 1):
                self._add_tangent(phase, *pairs[phase])
            values = self._run(in_flight, most_bytes)
        return None if values is None else self._scheme(self._polished(values, in_flight, most_bytes))

    def _polished(self, values: FloatArray, in_flight: float, most_bytes: float) -> FloatArray:
        """The same strategies and placements of weights in no more time, with the least that must be kept and the
        fewest moves."""
        names, count = self._columns.names, len(self._columns.names)
        every = np.arange(count, dtype=np.int32)
        fixed = np.array([name[0] in _STRATEGIES for name in names])
        most = np.where(fixed, values, self._upper)
        most[self._device] = values[self._device] * (1.0 + 1e-9) + 1e-9
        moves = [column for column, name in enumerate(names) if str(name[0]).endswith(" move")]
        passes = self._costs
        self._set_gap(0.0)
        self._highs.changeColsBounds(count, every, np.where(fixed, values, 0.0), most)
        self._set_costs({self._held[0]: in_flight, self._held[1]: 1.0, **dict.fromkeys(moves, 1e-3 / count)})
        polished = self._run(in_flight, most_bytes)
        self._highs.changeColsBounds(count, every, np.zeros(count), self._upper)
        self._set_gap(PROGRAM_GAP / 2.0)
        self._set_costs(passes)
        return values if polished is None else polished

    def _set_gap(self, gap: float) -> None:
        self._gap = gap
        self._highs.setOptionValue("mip_rel_gap", gap)
        self._highs.setOptionValue("mip_abs_gap", gap / 10.0)

    def _set_costs(self, costs: Mapping[int, float]) -> None:
        self._costs = costs
        count = len(self._columns.names)
        full = np.zeros(count)
        full[[*costs]] = [*costs.values()]
        self._highs.changeColsCost(count, np.arange(count, dtype=np.int32), full)

    def _run(self, in_flight: float, most_bytes: float) -> FloatArray | None:
        """A whole solution within the gap, None if there is none: most often the relaxation's, or one near it."""
        share = self._unit_bytes / most_bytes if np.isfinite(most_bytes) else 1.0
        self._highs.changeCoeff(self._memory_row, self._held[0], in_flight * share)
        self._highs.changeCoeff(self._memory_row, self._held[1], share)
        self._highs.changeRowBounds(self._memory_row, -np.inf, 1.0 if np.isfinite(most_bytes) else np.inf)
        self._relax(True)
        values = self._solved()
        if values is None and self._is_infeasible():
            return None
        if values is not None:
            bound = self._highs.getInfo().objective_function_value
            values = self._dived(values, bound + self._gap * abs(bound))
        if values is None:
            self._relax(False)
            values = self._solved()
        if values is None and not self._is_infeasible():
            raise RuntimeError(f"{self._graph.name}: HiGHS ended with {self._highs.getModelStatus()}")
        return None if values is None else np.where(self._columns.is_binary, np.round(values), values)

    def _dived(self, values: FloatArray, most: float) -> FloatArray | None:
        """A whole solution near a relaxation's: binaries that are nearly 1, or else the largest, become 1, or that one
        becomes 0, and the program is solved again, until all are whole. None if that costs more than ``most``."""
        basis, fixed = self._highs.getBasis(), list[int]()
        found: FloatArray | None = values
        while found is not None:
            columns = _fractional(self._decisions, found)
            if not len(columns):
                columns = _fractional(self._binaries, found)
            if not len(columns):
                break
            largest = columns[[found[columns].argmax()]]
            nearly = columns[found[columns] >= min(_NEARLY, float(found[largest[0]]))]
            fixed += nearly.tolist()
            for some, value in ((nearly, 1.0), (largest, 0.0)):
                self._bound(some, value, value)
                found = self._solved()
                if found is not None and self._highs.getInfo().objective_function_value <= most:
                    break
                found = None
                self._bound(nearly, 0.0, 1.0)
        self._bound(np.array(fixed, dtype=np.int64), 0.0, 1.0)
        if fixed:
            self._highs.setBasis(basis)
        return found

    def _relax(self, relaxed: bool) -> None:
        """Solves a relaxation, which begins from the basis of the last one. Without presolve a program whose memory
        just suffices may be declared infeasible although it is not."""
        self._highs.setOptionValue("solve_relaxation", relaxed)
        self._highs.setOptionValue("presolve", "off" if relaxed else "on")

    def _bound(self, columns: IntArray, low: float, high: float) -> None:
        count = len(columns)
        self._highs.changeColsBounds(count, columns.astype(np.int32), np.full(count, low), np.full(count, high))

    def _solved(self) -> FloatArray | None:
        self._highs.run()
        if self._highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return None
        return np.array(self._highs.getSolution().col_value)

    def _is_infeasible(self) -> bool:
        return bool(self._highs.getModelStatus() == highspy.HighsModelStatus.kInfeasible)

    def _pass(self, values: FloatArray, phase: int) -> tuple[float, float]:
        """Seconds of the GPU and of the host in the forward or the backward pass."""
        return _total(self._device_s[phase], values), _total(self._host_s[phase], values)

    def _figures(self, values: FloatArray) -> SchemeFigures:
        passes = [device_s + idle_s(device_s, host_s) for device_s, host_s in (self._pass(values, k) for k in (0, 1))]
        return SchemeFigures(
            forward_s=passes[0],
            backward_s=passes[1],
            weight_s=sum(
                price.weight_s
                for step in self._graph.steps
                for place, (_, price) in enumerate(self._options[step.name])
                if values[self._backward[step.name, place]]
            ),
            once_s=_total(self._once_s, values),
            activation_bytes=_total(self._kept_bytes, values),
            state_bytes=_total(self._state_bytes, values),
            weights_bytes=_total(self._weights_bytes, values),
            again_bytes=_total(self._again_bytes, values),
            copied=sum(
                weight.parameters
                for weight in self._graph.weights
                if any(values[column] for column in self._laid[weight.name, REPLICATED])
            ),
        )

    def _scheme(self, values: FloatArray) -> Scheme:
        chosen = [name for name, value, binary in zip(
            self._columns.names, values, self._columns.is_binary, strict=True
        ) if binary and value]  # fmt: skip
        axes = {(one[0], one[1]): one[2].text for one in chosen if one[0] in ("forward", "backward", "again")}
        return Scheme(
            kind=self._graph.name,
            degree=self._degree,
            border=self._border,
            steps=tuple(
                StepScheme(name, axes["forward", name], axes["backward", name], axes.get(("again", name)))
                for name in self._options
            ),
            weights={one[1]: one[2] for one in chosen if one[0] == "weight"},
            kept=tuple((one[1], one[2]) for one in chosen if one[0] == "kept"),
            moves=tuple(
                Move("weight" if one[0] == _WEIGHTS else str(one[0]).removesuffix(" move"), one[1], one[-2], one[-1])
                for one in chosen
                if str(one[0]).endswith(" move") or (one[0] == _WEIGHTS and one[-2] != one[-1] and one[-1].axis)
            ),
            figures=self._figures(values),
        )  # fmt: skip


def _fractional(columns: IntArray, values: FloatArray) -> IntArray:
    """Those of the columns whose values are not whole."""
    some = values[columns]
    fractional: IntArray = columns[np.abs(some - np.round(some)) > _WHOLE]
    return fractional


def _total(factors: Mapping[int, float], values: FloatArray) -> float:
    return float(sum(factor for column, factor in factors.items() if values[column]))
