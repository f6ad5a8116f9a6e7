"""A found scheme of traced code as the sharding of its modules: where their weights lie, where they read what they are
given, and where they give on what they make. All between is DTensor's to divide, by the placements that come to it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import fx

from piper_ray.model.errors import UsageError
from piper_ray.workloads.measure.operators import TracedProgram, as_list, exported_module
from piper_ray.workloads.schemes.graph import REPLICATED, OperatorFamily, Step, TensorPlacement
from piper_ray.workloads.schemes.rules import RING, Strategy, strategies
from piper_ray.workloads.schemes.scheme import Move, Scheme

__all__ = ["ModuleSharding", "module_shardings"]


@dataclass
class ModuleSharding:
    """The sharding of a module. state: of its weights and buffers, by name; arriving, read: of its arguments, as they
    come and as they are read; made, leaving: of its result, as it is made and as it is passed on. gradients: of its
    arguments, in their order, where it is computed on shards as if these were all; empty where DTensor computes it. A
    placement is R, P, or S(side)."""

    state: dict[str, str] = field(default_factory=dict)
    arriving: dict[str, str] = field(default_factory=dict)
    read: dict[str, str] = field(default_factory=dict)
    made: str = ""
    leaving: str = ""
    gradients: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Call:
    """A call of a module, by the module's path: its arguments by name, and the node of its result."""

    path: str
    arguments: Mapping[str, fx.Node]
    in_order: bool
    result: fx.Node | None


def module_shardings(spec: str, program: TracedProgram, scheme: Scheme) -> dict[str, ModuleSharding]:
    """The shardings by module path, "" for the layer itself. Raises UsageError with everything that shardings of
    modules cannot express."""
    work = _Shardings(spec, program, scheme)
    if reasons := [*dict.fromkeys(work.reasons())]:
        raise UsageError(
            "\n  ".join([f"{scheme.kind}: torchtitan's sharding by module path cannot say this scheme:", *reasons])
        )
    return work.found


class _Shardings:
    """The shardings under construction. found: by path."""

    def __init__(self, spec: str, program: TracedProgram, scheme: Scheme) -> None:
        self._program, self._scheme = program, scheme
        self._graph, self._trace = program.traced.graph, program.trace
        self._nodes = {node.name: node for node in program.exported.graph.nodes}
        self._forward = {
            step.name: self._strategy(step, how.forward)
            for step, how in zip(self._graph.steps, scheme.steps, strict=True)
        }
        self._calls = {call.path: call for call in self._called(spec)}
        self._moves = [move for move in scheme.moves if move.when == "forward"]
        self._bias = {
            step.inputs[0]: step.outputs[0]
            for step in self._graph.steps
            if step.name.endswith(" bias") and program.traced.works[step.name].free
        }
        self.found: dict[str, ModuleSharding] = {}

    def _strategy(self, step: Step, text: str) -> Strategy:
        return next(one for one in strategies(step, self._graph, self._scheme.degree) if one.text == text)

    def _called(self, spec: str) -> Iterator[_Call]:
        modules = dict(self._program.model.module.named_modules())
        exported = exported_module(
            spec, self._program.path, self._program.model, tuple(path for path in modules if path)
        )
        repeated = {entry.fqn.partition("@")[0] for entry in exported.module_call_graph if "@" in entry.fqn}
        for entry in exported.module_call_graph:
            if entry.fqn.partition("@")[0] in repeated:  # everything about it holds for all its calls
                continue
            names = [str(name) for name in inspect.signature(modules[entry.fqn].forward).parameters]
            if not entry.fqn:
                arguments = {str(x): self._nodes[str(x)] for x in exported.graph_signature.user_inputs}
                result = next(node for node in exported.graph.nodes if node.op == "output").args[0][0]
                yield _Call("", arguments, in_order=True, result=self._nodes[result.name])
            elif entry.signature is not None:
                positional, keywords = entry.signature.in_spec.children()
                given = [*names[: positional.num_children], *(keywords.context or [])]
                nodes = [self._nodes.get(one.name) for one in entry.signature.inputs]
                flat = len(given) == len(nodes)
                arguments = {x: node for x, node in zip(given, nodes, strict=True) if node is not None} if flat else {}
                outputs = entry.signature.outputs
                result = self._nodes.get(outputs[0].name) if len(outputs) == 1 else None
                yield _Call(entry.fqn, arguments, flat and positional.num_children == len(names), result)

    def _value(self, node: fx.Node | None) -> str:
        made = None if node is None else self._trace.made.get(node)
        return "" if made is None or isinstance(made, list) else made.name

    def _text(self, node: fx.Node, place: TensorPlacement) -> str:
        """The placement of a node's value. Raises KeyError where its sides cannot express it."""
        if not place.axis:
            return "P" if place.partial else "R"
        for side, (axis, _, parts) in enumerate(self._trace.sides(as_list(self._trace.made[node])[0])):
            if axis == place.axis and len(parts) == 1:
                return f"S({side})"
        raise KeyError(node.name)

    def _inside(self, path: str, step: Step) -> bool:
        modules = self._trace.nodes[step.name].meta.get("nn_module_stack", {}).values()
        return not path or any(str(one[0]) == path for one in modules)

    def _of(self, path: str) -> ModuleSharding:
        return self.found.setdefault(path, ModuleSharding())

    def reasons(self) -> Iterator[str]:
        """What cannot be said; all else is in ``found``."""
        yield from self._of_steps()
        yield from self._of_weights()
        root = self._calls[""]
        for name, node in root.arguments.items():
            border = self._graph.at_border(name, self._scheme.border) if name in self._graph.arriving else REPLICATED
            self._of("").arriving[name] = self._text(node, border)
        for move in self._moves:
            yield from self._of_move(move)
        yield from self._of_attention()
        for name in self._graph.leaving:
            if name == self._value(root.result) and root.result is not None:
                self._of("").leaving = self._text(root.result, self._graph.at_border(name, self._scheme.border))

    def _of_steps(self) -> Iterator[str]:
        for step, how in zip(self._graph.steps, self._scheme.steps, strict=True):
            forward, back = self._forward[step.name], self._strategy(step, how.backward)
            learned = [x for x in (*step.inputs, *step.outputs) if self._graph.values[x].has_gradient]
            if how.again is not None:
                yield f"{step.name} is computed again, which a sharding cannot say"
            if any(forward.adjoint(name) != back.adjoint(name) for name in learned):
                yield f"{step.name} goes back by {how.backward} and forwards by {how.forward}"
            if forward.exchange == RING:
                yield f"keys and values of {step.name} go around a ring, which torchtitan has for context parallelism"
            node = self._trace.nodes[step.name]
            tokens = step.family is OperatorFamily.ATTENTION and forward.axis in step.along
            if tokens and (len(node.args) > 3 or node.kwargs):
                yield f"queries of {step.name} are divided by tokens, and what they may look at is said for all tokens"
            for arg in node.all_input_nodes:
                if arg.op != "placeholder" and any(one.constant for one in as_list(self._trace.made[arg])):
                    yield f"{step.name} reads {arg.name}, which code makes of constants; expected a buffer of a module"

    def _of_weights(self) -> Iterator[str]:
        exported = self._program.exported
        signature = exported.graph_signature
        inputs = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        for placeholder, name in inputs.items():
            path, _, own = name.rpartition(".")
            place = self._scheme.weights.get(name, REPLICATED)
            try:
                self._of(path).state[own] = self._text(self._nodes[placeholder], place)
            except KeyError:
                yield f"{name} packs several parts, each of which is divided; expected a module for each"
            if any(move.value == name for move in self._moves):
                yield f"{name} lies {place.text} and is brought together for each pass"

    def _readings(self, name: str) -> dict[str, TensorPlacement]:
        return {step.name: self._forward[step.name].placements[name] for step in self._graph.consumers[name]}

    def _of_move(self, move: Move) -> Iterator[str]:
        """Yields the modules whose sharding says how a value moves: the one that makes it, if all read it in this
        placement; else those that read it."""
        if move.value in self._scheme.weights:
            return
        name = self._bias.get(move.value, move.value)  # a product and its bias are one operator of torch
        readings = self._readings(name)
        border = self._graph.at_border(name, self._scheme.border)
        maker = next((step for step in self._graph.steps if name in step.outputs), None)
        leaves = {border} if name in self._graph.leaving else set()
        where = {call.path: call for call in self._calls.values() if maker and self._value(call.result) == name}
        path = max(where, key=len, default="")
        biases = {x for step in self._graph.consumers[move.value] for x in step.inputs} & {*self._scheme.weights}
        if name != move.value and (not where or any(self._scheme.weights[x].axis for x in biases)):
            yield f"{move.value} is moved before its bias is added, where no module ends or the bias lies in shards"
        at_end = name != move.value or {*readings.values()} | leaves == {move.target}
        if path in where and at_end and not self._of(path).leaving:
            yield from self._put(move, path, where[path].result)
            return
        alike = {reader for reader, place in readings.items() if place == move.target}
        left = {*alike}
        for call in sorted(self._calls.values(), key=lambda one: len(one.path)):
            arguments = [x for x, node in call.arguments.items() if self._value(node) == name]
            inside = {step.name for step in self._graph.consumers[name] if self._inside(call.path, step)}
            own = maker is not None and self._inside(call.path, maker)
            if arguments and not own and inside & left and inside <= alike:
                for argument in arguments:
                    yield from self._put(move, call.path, call.arguments[argument], argument)
                left -= inside
        if left:
            text = f"{name}, {move.source.text} to {move.target.text}"
            yield f"{text} for {', '.join(sorted(left))}, moves within a module"

    def _put(self, move: Move, path: str, node: fx.Node | None, argument: str = "") -> Iterator[str]:
        """argument: of the module; if none, its result."""
        assert node is not None
        try:
            source, target = self._text(node, move.source), self._text(node, move.target)
        except KeyError:
            yield f"{move.value} packs several parts, each of which is divided"
            return
        of = self._of(path)
        if argument:
            of.arriving[argument], of.read[argument] = source, target
        else:
            of.made, of.leaving = source, target

    def _of_attention(self) -> Iterator[str]:
        """A module that is attention and no more is computed on each device's heads, or tokens of queries."""
        for call in self._calls.values():
            steps = [step for step in self._graph.steps if call.path and self._inside(call.path, step)]
            if len(steps) != 1 or steps[0].family is not OperatorFamily.ATTENTION or call.result is None:
                continue
            (step,) = steps
            strategy, of = self._forward[step.name], self._of(call.path)
            if not call.in_order:
                yield f"{call.path} is attention; expected its arguments in the order of its forward, and no others"
                continue
            for argument, node in call.arguments.items():
                place = strategy.placements[self._value(node)]
                of.read[argument] = self._text(node, place)
                of.arriving.setdefault(argument, of.read[argument])
            of.made = self._text(call.result, strategy.placements[step.outputs[0]])
            of.gradients = tuple(self._text(x, strategy.adjoint(self._value(x))) for x in call.arguments.values())
