"""Checks a scheme's document by the rule table only: nothing here depends on the program that found it.

Values are followed from the arriving ones through each step to the leaving ones, in the placements that the rules give,
and gradients on the way back. The inputs of a step must be where the step needs them: made there, moved by one hop, or
kept. Then seconds and bytes are summed from the prices that the document gives for steps and moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from piper_ray.model.errors import UsageError
from piper_ray.model.instance import Instance, Tmpc
from piper_ray.model.mode import Sharding, found_schemes
from piper_ray.model.plan import Plan
from piper_ray.workloads.estimate.costs import idle_s
from piper_ray.workloads.schemes.graph import (
    PARTIAL,
    REPLICATED,
    OperatorFamily,
    OperatorGraph,
    Step,
    TensorPlacement,
    Value,
)
from piper_ray.workloads.schemes.layers import BORDERS
from piper_ray.workloads.schemes.rules import Strategy, strategies

_NEAR = 1e-5
"""Relative: figures of TMPCs have six digits."""

Placed = tuple[str, TensorPlacement]
Document = Mapping[str, Any]


def checked_schemes(
    instance: Instance, plan: Plan | None, documents: Mapping[str, Document]
) -> tuple[list[str], list[str]]:
    """Returns the valid schemes of a plan or, if it is None, of all TMPCs; and the faults of the others. documents: by
    the words of TMPCs' ids."""
    on_host = instance.model is not None and instance.model.optimizer_on_host
    of_first = dict[object, tuple[int, str, list[str]]]()  # equal layers have equal figures
    for layer, degree, tmpc in _tmpcs(instance) if plan is None else _tmpcs_of(instance, plan):
        for word in found_schemes([tmpc.id]):
            said = _said_of(tmpc, on_host=on_host)
            if (key := (word, degree, *said.items())) not in of_first:
                of_first[key] = layer, word, _faults(documents.get(word), said, degree)
    held = {word for _, word, faults in of_first.values() if not faults}
    return sorted(held), [f"layer {at}, {word}: {fault}" for at, word, faults in of_first.values() for fault in faults]


def _tmpcs(instance: Instance) -> Iterator[tuple[int, int, Tmpc]]:
    """Yields for each TMPC the number of its layer, the number of devices, and the TMPC."""
    return ((one.id, t, tmpc) for one in instance.layers for t, row in one.tmpcs.items() for tmpc in row)


def _tmpcs_of(instance: Instance, plan: Plan) -> Iterator[tuple[int, int, Tmpc]]:
    """The same for the TMPCs that a plan chose."""
    chosen = {(x, s.tensor_parallel_degree, tmpc_id) for s in plan.stages for x, tmpc_id in s.tmpc_ids.items()}
    return (one for one in _tmpcs(instance) if (one[0], one[1], one[2].id) in chosen)


def _said_of(tmpc: Tmpc, *, on_host: bool) -> dict[str, float]:
    """The figures of a TMPC that its scheme determines. on_host: its time includes updates by the host, which no scheme
    has."""
    said = {"activation_bytes": tmpc.activation_bytes}
    said |= {} if on_host else {"time_s": tmpc.time_per_sample_s}
    said |= {} if tmpc.forward_s is None else {"forward_s": tmpc.forward_s}
    if tmpc.mode.sharding is Sharding.NONE:  # else replicas share of both what they have
        said |= {"weights_bytes": tmpc.weights_bytes, "least_fixed_bytes": tmpc.fixed_bytes}
    return said


def _faults(document: Document | None, said: Mapping[str, float], degree: int) -> list[str]:
    if document is None:
        return ["it is not there in full"]
    if (own := document.get("tensor_parallel_degree")) != degree:
        return [f"it is of t = {own}; expected t = {degree}"]
    return faults_of(document, said)


def faults_of(document: Document, said: Mapping[str, float] | None = None) -> list[str]:
    """The faults of a complete scheme. said: figures that another source states for it."""
    try:
        walk = _Walk.of(document)
        faults = list(walk.faults())
        figures = walk.figures() if not faults else {}
        given = [*((name, document[name]) for name in figures), *(said or {}).items()]
        for name, value in given if figures else ():
            found = figures[name] if name in figures else max(value, figures["state_bytes"])
            if not abs(value - found) <= _NEAR * found + (1.0 if name.endswith("bytes") else 0.0):  # nor is it NaN
                faults.append(f"{name} is {value:.6g}; the rule table gives {found:.6g}")
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        return [f"not a scheme as piper-ray schemes writes it ({type(error).__name__}: {error})"]
    return faults


def placement_of(text: str) -> TensorPlacement:
    """Reads the text that ``TensorPlacement.text`` writes."""
    return {"replicated": REPLICATED, "partial sum": PARTIAL}.get(text, TensorPlacement(text))


def graph_of_document(document: Document) -> OperatorGraph:
    """Reads the layer's operators from the document."""
    values = {
        name: Value(name, tuple(one["axes"]), float(one["bytes"]), float(one.get("parameters", 0.0)),
                    bool(one.get("gradient", True)))
        for name, one in document["values"].items()
    }  # fmt: skip
    steps = tuple(
        Step(one["name"], OperatorFamily(one["family"]), tuple(one["inputs"]), tuple(one["outputs"]),
             tuple(one.get("along", ())), tuple(one.get("backward_reads", ())), bool(one.get("ring", False)))
        for one in document["operators"]
    )  # fmt: skip
    sizes = {axis: int(size) for axis, size in document["sizes"].items()}
    return OperatorGraph(
        document["layer"], values, steps, tuple(document["arriving"]), tuple(document["leaving"]), sizes
    )


@dataclass
class _Walk:
    """there: placements of values in the forward pass; supply: in the backward pass; gradients: of the values'
    gradients."""

    document: Document
    graph: OperatorGraph
    degree: int
    border: TensorPlacement
    moves: Sequence[tuple[str, str, TensorPlacement, TensorPlacement]]
    laid: Mapping[str, TensorPlacement]
    there: set[Placed] = field(default_factory=set)
    supply: set[Placed] = field(default_factory=set)

    @classmethod
    def of(cls, document: Document) -> _Walk:
        moves = [
            (one["when"], one["value"], placement_of(one["from"]), placement_of(one["to"])) for one in document["moves"]
        ]
        laid = {name: placement_of(text) for name, text in document["weights"].items()}
        degree, border = int(document["tensor_parallel_degree"]), placement_of(document["border"])
        return cls(document, graph_of_document(document), degree, border, moves, laid)

    def _strategy(self, step: Step, phase: str) -> Strategy | None:
        """The strategy in a phase. None for a step that is not recomputed. Raises ValueError for a strategy that no
        rule gives."""
        text = self.document["steps"][step.name].get(phase)
        if text is None:
            return None
        found = [one for one in strategies(step, self.graph, self.degree) if one.text == text]
        if not found:
            raise ValueError(f"no rule divides {step.name} by {text}")
        return found[0]

    def _all(self, phase: str) -> Iterator[tuple[Step, Strategy]]:
        for step in self.graph.steps:
            strategy = self._strategy(step, phase)
            if strategy is not None:
                yield step, strategy

    def faults(self) -> Iterator[str]:
        """Yields what is impossible in the scheme."""
        graph = self.graph
        if self.laid.keys() != {weight.name for weight in graph.weights}:
            yield "placements of other weights than its operators have"
            return
        if self.border not in BORDERS:
            yield f"its border is {self.border.text}; expected {' or '.join(one.text for one in BORDERS)}"
        for name, place in self.laid.items():
            if place not in graph.placements(name, self.degree):
                yield f"{name} lies {place.text}; that divides it not evenly"
        started = {(name, graph.at_border(name, self.border)) for name in graph.arriving}
        started |= {(name, REPLICATED) for name in graph.given} | {*self.laid.items()}
        self.there = self._moved(started, {"forward"})
        for step, strategy in self._all("forward"):
            yield from self._missing(step.inputs, strategy, self.there, f"{step.name} forwards")
            self.there |= self._moved({(name, strategy.placements[name]) for name in step.outputs}, {"forward"})
        for name in graph.leaving:
            if (name, graph.at_border(name, self.border)) not in self.there:
                yield f"{name} does not leave as its border says"
        yield from self._backwards()

    def _backwards(self) -> Iterator[str]:
        graph = self.graph
        kept = {(one["value"], placement_of(one["placement"])) for one in self.document["kept"]}
        for name, place in kept - self.there:
            yield f"{name} is kept {place.text}, and is never there so"
        self.supply = self._moved(kept | {*self.laid.items()}, {"kept"})
        for step, strategy in self._all("again"):
            yield from self._missing(step.inputs, strategy, self.supply, f"{step.name} again")
            made = {(name, strategy.placements[name]) for name in step.outputs}
            self.supply |= self._moved(made, {"kept", "again"})
        back = {step.name: strategy for step, strategy in self._all("backward")}
        for step in graph.steps:
            yield from self._missing(step.backward_reads, back[step.name], self.supply, f"{step.name} backwards")
        makers = {name: step for step in graph.steps for name in step.outputs}
        for name, value in graph.values.items():
            if not value.has_gradient:
                continue
            parts = [back[step.name].adjoint(name) for step in graph.consumers[name]]
            if value.parameters:
                if self._weight_s(name, parts[0]) is None:
                    yield f"the gradient of {name} is {parts[0].text}, where it lies {self.laid[name].text}"
                continue
            parts += [graph.at_border(name, self.border)] * (name in graph.leaving)
            part_moves = {(source, target) for when, of, source, target in self.moves if (when, of) == ("part", name)}
            places = (*graph.placements(name, self.degree), PARTIAL)
            summed = {(name, at) for at in places if all(one == at or (one, at) in part_moves for one in parts)}
            needed = back[makers[name].name].adjoint(name) if name in makers else graph.at_border(name, self.border)
            if (name in makers or name in graph.arriving) and (name, needed) not in self._moved(summed, {"gradient"}):
                yield f"the gradient of {name} is nowhere {needed.text}"

    def _missing(self, names: Iterable[str], of: Strategy, there: set[Placed], where: str) -> Iterator[str]:
        for name in names:
            if (name, of.placements[name]) not in there:
                yield f"{where} needs {name} {of.placements[name].text}, and it is not there so"

    def _moved(self, there: set[Placed], whens: set[str]) -> set[Placed]:
        """Returns these placements with those after moves of one hop. Only gradients become partial sums, with zeros
        elsewhere."""
        found = set(there)
        for when, name, source, target in self.moves:
            possible = not target.partial or (when == "gradient" and not source.partial)
            if when in whens and possible and (name, source) in there:
                found.add((name, target))
        return found

    def _weight_s(self, name: str, source: TensorPlacement) -> float | None:
        """The seconds of the gradient of a weight: those once a batch, if partial sums stay until then; None where the
        gradient does not reach its weight's placement."""
        place = self.laid[name]
        if source == place or ("weight", name, source, place) in self.moves:
            return 0.0
        return float(self.document["prices"]["once_s"][name]) if source.partial and not place.axis else None

    def _share(self, name: str, place: TensorPlacement, size: float) -> float:
        if place not in self.graph.placements(name, self.degree):
            raise ValueError(f"{name} cannot lie {place.text}")
        return size / (self.degree if place.axis else 1)

    def figures(self) -> dict[str, float]:
        """The figures by the names that documents use."""
        graph, prices = self.graph, self.document["prices"]
        device_s, host_s, once_s = [0.0, 0.0], [0.0, 0.0], 0.0
        for number, phase in ((0, "forward"), (1, "backward"), (1, "again")):
            for step, _ in self._all(phase):
                of_device, of_host = prices["steps"][step.name][phase]
                if not (of_device >= 0.0 and of_host >= 0.0):
                    raise ValueError(f"{step.name} takes {of_device} s and {of_host} s")
                device_s[number], host_s[number] = device_s[number] + of_device, host_s[number] + of_host
        for one in self.document["moves"]:
            if not one["seconds"] >= 0.0:
                raise ValueError(f"a move of {one['value']} takes {one['seconds']} s")
            device_s[0 if one["when"] == "forward" else 1] += one["seconds"]
        back = {step.name: strategy for step, strategy in self._all("backward")}
        weight_s = 0.0
        for name in back:
            of_weight, of_device = prices["steps"][name]["weight_gradients"], prices["steps"][name]["backward"][0]
            if not 0.0 <= of_weight <= of_device:
                raise ValueError(f"gradients of {name}'s weights take {of_weight} s of {of_device} s")
            weight_s += of_weight
        for weight in graph.weights:
            (reader,) = graph.consumers[weight.name]
            once_s += self._weight_s(weight.name, back[reader.name].adjoint(weight.name)) or 0.0
        passes = [device + idle_s(device, host) for device, host in zip(device_s, host_s, strict=True)]
        numbers = sum(self._share(one.name, self.laid[one.name], one.parameters) for one in graph.weights)
        kept = (
            self._share(one["value"], placement_of(one["placement"]), graph.values[one["value"]].bytes)
            for one in self.document["kept"]
        )
        again = (
            graph.values[name].bytes / (self.degree if strategy.placements[name].axis else 1)
            for step, strategy in self._all("again")
            for name in step.outputs
        )
        return {
            "time_s": sum(passes) + once_s,
            "forward_s": passes[0],
            "backward_s": passes[1],
            "once_a_batch_s": once_s,
            "weight_gradients_s": weight_s,
            "made_again_bytes": sum(again),
            "copied_parameters": sum(one.parameters for one in graph.weights if not self.laid[one.name].axis),
            "activation_bytes": sum(kept),
            "state_bytes": numbers * prices["state_bytes"],
            "weights_bytes": numbers * prices["synchronised_bytes"],
        }


def require_schemes(
    instance: Instance, plan: Plan | None, documents: Mapping[str, Document], path: object
) -> list[str]:
    """Returns the schemes as ``checked_schemes`` does, all of them valid. Raises UsageError that says what is wrong."""
    held, wrong = checked_schemes(instance, plan, documents)
    if wrong:
        raise UsageError("\n  ".join([f"{path}: schemes that the rule table does not bear out:", *wrong]))
    return held
