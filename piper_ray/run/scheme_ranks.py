"""Runs found schemes of traced layers on real numbers, and compares the results with those of the layer in one process.

Each rank computes its part of each operator from the values that the scheme places there, and DTensor moves values
between placements. A backward pass uses only kept and recomputed values; all others are replaced by zeros.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from piper_ray.model.errors import UsageError
from piper_ray.run.schemes import SchemeJob, SchemeOutcome, SchemeRun
from piper_ray.workloads.measure import operators as traced
from piper_ray.workloads.measure.factory import words_of
from piper_ray.workloads.schemes.check import graph_of_document
from piper_ray.workloads.schemes.graph import PARTIAL, REPLICATED, OperatorFamily, Step, TensorPlacement
from piper_ray.workloads.schemes.kept import scheme_of
from piper_ray.workloads.schemes.rules import Strategy, strategies
from piper_ray.workloads.schemes.scheme import Scheme

_RATE = 0.05
"""The most that a weight changes in a step if gradients are large."""

_SMALL = 1e-4
"""Relative to the largest gradient. For weights with smaller gradients, differences are relative to this, because their
sums are only rounding errors."""

Placed = tuple[str, TensorPlacement]


@dataclass
class SchemeRanks:
    """One rank of a scheme. given: constants and numbers of tokens, by placeholder. weights: in their placements."""

    program: traced.TracedProgram
    scheme: Scheme
    mesh: DeviceMesh
    given: Mapping[str, Tensor]
    weights: dict[str, DTensor] = field(default_factory=dict)
    there: dict[Placed, DTensor] = field(default_factory=dict)
    supply: dict[Placed, DTensor] = field(default_factory=dict)
    gradients: dict[Placed, DTensor] = field(default_factory=dict)
    constants: dict[fx.Node, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.graph, self.trace = self.program.traced.graph, self.program.trace
        parameters = dict(self.program.exported.named_parameters())
        self.weights = {name: self._placed(name, parameters[name], at) for name, at in self.scheme.weights.items()}

    @cached_property
    def _values(self) -> dict[fx.Node, str]:
        """The nodes that are values, not views of one."""
        return {
            node: one.name
            for node, one in self.trace.made.items()
            if not isinstance(one, list) and self.trace.whole.get(one.name) is one and not _is_same(node)
        }

    @cached_property
    def _dtypes(self) -> dict[str, torch.dtype]:
        return {name: node.meta["val"].dtype for node, name in self._values.items()}

    def _shape(self, of: Any, place: TensorPlacement) -> list[int]:
        """The shape of a rank's part of a value, or of a view of it."""
        sides = self.trace.sides(of)
        return [length // (self.scheme.degree if axis and axis == place.axis else 1) for axis, length, _ in sides]

    def _placement(self, name: str, place: TensorPlacement) -> Placement:
        if not place.axis:
            return Partial() if place.partial else Replicate()
        axes = [axis for axis, _, _ in self.trace.sides(self.trace.whole[name])]
        return Shard(axes.index(place.axis))

    def _ordered(self, name: str, local: Tensor, place: TensorPlacement, *, back: bool = False) -> Tensor:
        """Sides of several parts as DTensor has them: of what one rank has of all parts behind each other. back: as the
        module has them."""
        for side, (axis, _, parts) in enumerate(self.trace.sides(self.trace.whole[name])):
            if len(parts) > 1 and axis in self.graph.sizes and axis != place.axis:
                order = torch.tensor(traced.shares(parts, self.scheme.degree))
                local = local.index_select(side, order.argsort() if back else order)
        return local

    def _wrapped(self, name: str, local: Tensor, place: TensorPlacement) -> DTensor:
        local = self._ordered(name, local.reshape(self._shape(self.trace.whole[name], place)), place)
        return DTensor.from_local(local.contiguous(), self.mesh, [self._placement(name, place)])

    def _local(self, name: str, there: Mapping[Placed, DTensor], place: TensorPlacement) -> Tensor:
        return self._ordered(name, there[name, place].to_local(), place, back=True)

    def _placed(self, name: str, whole: Tensor, place: TensorPlacement) -> DTensor:
        return self._moved(name, self._wrapped(name, whole.detach(), REPLICATED), REPLICATED, place)

    def _moved(self, name: str, tensor: DTensor, source: TensorPlacement, target: TensorPlacement) -> DTensor:
        placement = self._placement(name, target)
        if not target.partial:
            return tensor.redistribute(placements=[placement])
        local, rank = tensor.to_local(), self.mesh.get_local_rank()  # zero elsewhere
        whole = torch.zeros(tensor.shape, dtype=tensor.dtype)
        part = whole.chunk(self.scheme.degree, tensor.placements[0].dim)[rank] if source.axis else whole
        if source.axis or rank == 0:
            part.copy_(local)
        return DTensor.from_local(whole, self.mesh, [placement])

    def full(self, name: str, tensor: DTensor) -> Tensor:
        """The whole value, on each rank."""
        return self._ordered(name, tensor.full_tensor(), REPLICATED, back=True)

    def _constant(self, node: fx.Node) -> Any:
        """A value computed from given inputs only. Raises UsageError if it needs others."""
        if node not in self.constants:
            if not all(one.constant for one in traced.as_list(self.trace.made[node])):  # only its shape counts
                told = node.meta["val"]
                self.constants[node] = torch.zeros(tuple(told.shape), dtype=told.dtype)
            elif node.op == "placeholder":
                self.constants[node] = self.given[node.name]
            else:
                args, kwargs = map_arg((node.args, node.kwargs), self._constant)
                self.constants[node] = node.target(*args, **kwargs)
        return self.constants[node]

    def _part(self, whole: Any, one: Any, axis: str) -> Any:
        """A rank's part of a constant along an axis."""
        for side, (own, _, parts) in enumerate(self.trace.sides(one)):
            if axis and own == axis:
                order = torch.tensor(traced.shares(parts, self.scheme.degree)).chunk(self.scheme.degree)
                whole = whole.index_select(side, order[self.mesh.get_local_rank()])
        return whole

    def _computed(self, step: Step, strategy: Strategy, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Runs a step on a rank's part of its inputs. Raises UsageError for steps that torch cannot run so."""
        node = self.trace.nodes[step.name]
        operator = traced.operator_of(node)

        def fetched(arg: fx.Node) -> Any:
            one = self.trace.made[arg]
            assert not isinstance(one, list)
            if one.constant:
                return self._part(self._constant(arg), one, strategy.axis)
            if arg in self._values:
                return inputs[self._values[arg]]
            copied = traced.operator_of(arg) == "copy"  # of the first only its shape counts
            source = fetched(arg.args[int(copied)])
            if copied or traced.operator_of(arg) in traced.RESHAPED:
                return source.reshape(self._shape(one, strategy.placements[one.name]))
            return arg.target(source, *arg.args[1:], **arg.kwargs)

        try:
            if step.family is OperatorFamily.SUM and operator in traced.PRODUCTS:  # a product's bias
                product, bias = (inputs[name] for name in step.inputs)
                found: Any = product + bias.view(-1, *[1] * (product.dim() - 2 if operator in traced.SPATIAL else 0))
            else:
                args, kwargs = map_arg((self._asked(node, operator), node.kwargs), fetched)
                found = self._called(step, strategy, node, operator, list(args), dict(kwargs))
        except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError) as error:
            text = f"{self.graph.name}: torch does not run {operator} ({step.name}) {_divided(strategy)}"
            raise UsageError(f"{text}: {words_of(error)[:200]}") from error
        made = [*found] if isinstance(found, (list, tuple)) else [found]
        if len(step.outputs) > len(made):
            made.append(torch.ones_like(made[0]))  # the mask of dropout, which is off
        return dict(zip(step.outputs, made, strict=True))

    def _asked(self, node: fx.Node, operator: str) -> tuple[Any, ...]:
        """The arguments of a node. A product's bias is left out, because adding it is a separate step."""
        if operator == "addmm":
            return node.args[1:3]
        if operator in traced.SPATIAL:
            return *node.args[:2], None, *node.args[3:]
        return node.args[:2] if operator == "linear" else node.args

    def _called(
        self, step: Step, strategy: Strategy, node: fx.Node, operator: str, args: list[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Calls the operator with numbers of a rank's part in place of those of the whole."""
        shapes = [self._shape(self.trace.whole[name], strategy.placements[name]) for name in step.outputs]
        degree, rank = self.scheme.degree, self.mesh.get_local_rank()
        if operator in traced.RESHAPED:
            return args[0].expand(shapes[0])
        if operator == "addmm":
            return args[0] @ args[1]
        if operator in ("chunk", "split", "split_with_sizes", "tensor_split") and len(shapes) > 1:
            side = int(args[2] if len(args) > 2 else kwargs.get("dim", 0)) % args[0].dim()
            return args[0].split([shape[side] for shape in shapes], side)
        if operator == "embedding" and strategy.placements[step.outputs[0]].partial:
            own = args[1] - rank * args[0].shape[0]
            inside = (own >= 0) & (own < args[0].shape[0])
            return args[0][own.clamp(0, args[0].shape[0] - 1)] * inside[..., None]
        if operator == "cross_entropy_loss":
            raise NotImplementedError("losses are not of the layer's values")
        sides = self.trace.sides(traced.as_list(self.trace.made[node.all_input_nodes[0]])[0])
        if operator in ("slice", "narrow"):
            side = int(args[1] if len(args) > 1 else kwargs.get("dim", 0)) % len(sides)
            axis, length, _ = sides[side]
            if axis and axis == strategy.axis:
                start = traced.start_of(node, operator, length)
                assert start is not None
                return args[0].narrow(side, start // degree, shapes[0][side])
        in_channels = bool(strategy.axis) and len(sides) > 1 and sides[1][0] == strategy.axis
        if operator == "group_norm" and in_channels:
            args[1] //= degree
        if operator in traced.SPATIAL and in_channels and (groups := traced.groups_of(node, operator)) > 1:
            place = 8 if operator == "convolution" else 7 if "transpose" in operator else 6
            args[place] = groups // degree
        if operator == "scaled_dot_product_attention":
            return self._attended(step, strategy, args, kwargs)
        found = node.target(*args, **kwargs)
        return found / degree if operator == "mean" and strategy.axis in self._summed(step) else found

    def _summed(self, step: Step) -> tuple[object, ...]:
        return self.program.traced.works[step.name].depth if step.family is OperatorFamily.CONTRACTION else ()

    def _attended(self, step: Step, strategy: Strategy, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
        """Attention, where the queries of a rank's tokens see the same tokens as in the whole."""
        q, k, v, *more = args
        defaults: list[Any] = [None, 0.0, False]
        mask, _, causal = more + defaults[len(more) :]
        mask, causal = kwargs.pop("attn_mask", mask), kwargs.pop("is_causal", causal)
        degree, rank = self.scheme.degree, self.mesh.get_local_rank()
        tokens = step.along[:1] == (strategy.axis,)
        if causal and tokens:
            mask, causal = torch.ones(q.shape[-2] * degree, k.shape[-2], dtype=torch.bool).tril(), False
        if mask is not None and strategy.axis:
            of = dict.fromkeys((-2,), tokens) | dict.fromkeys((-3,), not tokens)
            for side in (x for x, divided in of.items() if divided and mask.dim() >= -x and mask.shape[x] > q.shape[x]):
                mask = mask.chunk(degree, side)[rank]
        kwargs.pop("dropout_p", None)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, **kwargs)

    def _strategy(self, step: Step, text: str) -> Strategy:
        return next(one for one in strategies(step, self.graph, self.scheme.degree) if one.text == text)

    def _with_moves(self, there: dict[Placed, DTensor], made: Mapping[Placed, DTensor], whens: Sequence[str]) -> None:
        """Adds values, and the results of the scheme's moves of them."""
        for (name, place), tensor in made.items():
            there[name, place] = tensor
            for move in self.scheme.moves:
                if move.when in whens and (move.value, move.source) == (name, place):
                    there[name, move.target] = self._moved(name, tensor, place, move.target)

    def _run(self, step: Step, text: str, there: dict[Placed, DTensor], whens: Sequence[str]) -> None:
        strategy = self._strategy(step, text)
        inputs = {name: self._local(name, there, strategy.placements[name]) for name in step.inputs}
        found = {
            (name, place := strategy.placements[name]): self._wrapped(name, local, place)
            for name, local in self._computed(step, strategy, inputs).items()
        }
        self._with_moves(there, found, whens)

    def trained(self, arriving: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """A step of training. Returns the loss, and the whole gradients of all weights and of what arrives."""
        graph, scheme = self.graph, self.scheme
        border = {name: graph.at_border(name, scheme.border) for name in (*graph.arriving, *graph.leaving)}
        laid: dict[Placed, DTensor] = {(name, scheme.weights[name]): one for name, one in self.weights.items()}
        given = {(name, REPLICATED): self._placed(name, self.given[name], REPLICATED) for name in graph.given}
        come = {(name, border[name]): self._placed(name, arriving[name], border[name]) for name in graph.arriving}
        self.there, self.supply, self.gradients = {}, {}, {}
        with torch.no_grad():
            self._with_moves(self.there, {**laid, **given, **come}, ("forward",))
            for step, how in zip(graph.steps, scheme.steps, strict=True):
                self._run(step, how.forward, self.there, ("forward",))
            kept = {(name, place): self.there[name, place] for name, place in scheme.kept}
            leaving = {name: self.full(name, self.there[name, border[name]]) for name in graph.leaving}
            self.there = {}
            self._with_moves(self.supply, {**laid, **kept}, ("kept",))
            for step, how in zip(graph.steps, scheme.steps, strict=True):
                if how.again is not None:
                    self._run(step, how.again, self.supply, ("kept", "again"))
        parts: dict[str, list[tuple[TensorPlacement, DTensor]]] = {}
        for name, whole in leaving.items():
            parts[name] = [(border[name], self._placed(name, 2.0 * whole / whole.numel(), border[name]))]
        for step, how in reversed([*zip(graph.steps, scheme.steps, strict=True)]):
            strategy = self._strategy(step, how.backward)
            for name in step.outputs:
                self._gather(name, parts.get(name, []))
            for name, local in self._back(step, strategy):
                place = strategy.adjoint(name)
                parts.setdefault(name, []).append((place, self._wrapped(name, local, place)))
        for name in graph.arriving:
            self._gather(name, parts.get(name, []))
        loss = torch.stack([whole.square().mean() for whole in leaving.values()]).sum()
        gradients = {name: self.full(name, self.gradients[name, border[name]]) for name in graph.arriving}
        laid_gradients = {}
        for name, target in scheme.weights.items():
            ((place, own),) = parts[name]
            laid_gradients[name] = own if place == target else self._moved(name, own, place, target)
            gradients[name] = self.full(name, laid_gradients[name])
        rate = _rate(gradients)
        for name, weight in self.weights.items():
            changed = weight.to_local() - rate * laid_gradients[name].to_local()
            self.weights[name] = DTensor.from_local(changed, self.mesh, weight.placements)
        return loss, gradients

    def _gather(self, name: str, parts: Sequence[tuple[TensorPlacement, DTensor]]) -> None:
        """Sums a value's gradients from its readers at the placement to which the scheme moves them."""
        moves = {(one.source, one.target) for one in self.scheme.moves if (one.when, one.value) == ("part", name)}
        for place in (*self.graph.placements(name, self.scheme.degree), PARTIAL):
            if parts and all(one == place or (one, place) in moves for one, _ in parts):
                moved = [own if one == place else self._moved(name, own, one, place) for one, own in parts]
                local = torch.stack([one.to_local() for one in moved]).sum(0)
                total = DTensor.from_local(local, self.mesh, moved[0].placements)
                self._with_moves(self.gradients, {(name, place): total}, ("gradient",))

    def _back(self, step: Step, strategy: Strategy) -> Iterator[tuple[str, Tensor]]:
        """The gradients of a step's inputs on a rank, from those of its outputs."""
        placements, values = strategy.placements, self.graph.values
        inputs = {}
        for name in step.inputs:
            if name in step.backward_reads:
                inputs[name] = self._local(name, self.supply, placements[name])
            else:
                shape = self._shape(self.trace.whole[name], placements[name])
                inputs[name] = torch.zeros(shape, dtype=self._dtypes.get(name, torch.float64))
        wanted = {name: one.requires_grad_() for name, one in inputs.items() if values[name].has_gradient}
        with torch.enable_grad():
            made = self._computed(step, strategy, inputs)
        outs = [name for name in step.outputs if made[name].requires_grad and values[name].has_gradient]
        outs = [name for name in outs if any(key[0] == name for key in self.gradients)]
        if outs and wanted:
            gradients = [self._local(name, self.gradients, strategy.adjoint(name)) for name in outs]
            found = torch.autograd.grad([made[x] for x in outs], [*wanted.values()], gradients, allow_unused=True)
            pairs: Iterable[tuple[str, Tensor | None]] = zip(wanted, found, strict=True)
            yield from ((name, one) for name, one in pairs if one is not None)


def _rate(gradients: Mapping[str, Tensor]) -> float:
    """The rate of plain gradient descent with which no number changes by more than ``_RATE``."""
    return _RATE / max(1.0, *(float(one.abs().max()) for one in gradients.values()))


def _is_same(node: fx.Node) -> bool:
    return node.op == "call_function" and traced.operator_of(node) in traced.SAME


def _divided(strategy: Strategy) -> str:
    return f"in shards along {strategy.axis}" if strategy.axis else "as a whole"


def _numbers(program: traced.TracedProgram) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The inputs that arrive, in order and random if they have gradients; and all given values, by placeholder."""
    exported, signature = program.exported, program.exported.graph_signature
    buffers = {**exported.constants, **dict(exported.named_buffers())}
    tensors = [x for x in pytree.tree_leaves(program.model.inputs) if isinstance(x, Tensor)]
    made = iter(
        [
            torch.randn(x.shape, dtype=x.dtype) if x.is_floating_point() else torch.zeros_like(x) if x.is_meta else x
            for x in tensors
        ]
    )
    numbers: dict[str, Tensor] = {}
    for spec in signature.input_specs:
        if spec.kind.name == "USER_INPUT" and spec.arg.name in {*map(str, signature.user_inputs)}:
            numbers[spec.arg.name] = next(made)
        elif spec.target in buffers:
            numbers[spec.arg.name] = buffers[spec.target]
    return [numbers[name] for name in map(str, signature.user_inputs) if name in numbers], numbers


def _one_process(program: traced.TracedProgram, inputs: Sequence[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """A step of the module as the user wrote it: the loss, and all gradients by their names in schemes."""
    module = program.model.module
    module.zero_grad()
    learned = [x.detach().requires_grad_() if x.is_floating_point() else x for x in inputs]
    args, kwargs = pytree.tree_unflatten(learned, pytree.tree_structure(program.model.inputs))
    outputs = [x for x in pytree.tree_leaves(module(*args, **kwargs)) if isinstance(x, Tensor) and x.requires_grad]
    loss = torch.stack([x.square().mean() for x in outputs]).sum()
    loss.backward()
    names = program.exported.graph_signature.user_inputs
    found = {str(name): x.grad for name, x in zip(names, learned, strict=True) if x.requires_grad}
    found |= {name: weight.grad for name, weight in module.named_parameters()}
    gradients = {name: x.clone() for name, x in found.items() if x is not None}
    with torch.no_grad():
        for weight in module.parameters():
            if weight.grad is not None:
                weight.sub_(weight.grad, alpha=_rate(gradients))
    return loss.detach(), gradients


def follow(job: SchemeJob, progress: Any) -> SchemeRun | None:
    """A rank's part of a job. Returns the outcomes on the first rank. Raises UsageError for schemes of other code."""
    mesh = init_device_mesh("cpu", (job.degree,))
    torch.manual_seed(0)
    programs = {
        one.traced.graph.name: (one, {name: tensor.clone() for name, tensor in one.model.module.state_dict().items()})
        for one in traced.traced_programs(job.model, job.microbatch, job.arguments, job.inputs, exact=True)
    }
    outcomes = []
    for number, document in enumerate(job.schemes):
        outcomes.append(_outcome(job, document, programs, mesh))
        progress(number + 1)
    return SchemeRun(job, tuple(outcomes)) if dist.get_rank() == 0 else None


def _apart(found: Tensor, expected: Tensor, scale: float) -> float:
    """The largest difference, relative to ``scale``; infinite if a value is not finite."""
    apart = float((found - expected).abs().max())
    return apart / scale if math.isfinite(apart) and scale > 0.0 else 0.0 if apart == 0.0 else math.inf


def _outcome(
    job: SchemeJob,
    document: Mapping[str, Any],
    programs: Mapping[str, tuple[traced.TracedProgram, Mapping[str, Tensor]]],
    mesh: DeviceMesh,
) -> SchemeOutcome:
    """programs: of each layer, with the weights that training begins with."""
    scheme, asked = scheme_of(document), graph_of_document(document)
    program, begun = programs.get(scheme.kind, (None, {}))
    if program is None or (program.traced.graph.steps, program.traced.graph.values) != (asked.steps, asked.values):
        raise UsageError(
            f"{job.model}: {scheme.kind} has other operators than the scheme {document['id']}; expected the code, the "
            "arguments and the --microbatch-size that the schemes were found with"
        )
    program.model.module.load_state_dict(begun)
    torch.manual_seed(0)
    if not asked.leaving:
        raise UsageError(f"{job.model}: {scheme.kind} gives nothing on; expected a layer whose outputs have gradients")
    inputs, numbers = _numbers(program)
    ranks = SchemeRanks(program, scheme, mesh, numbers)
    losses, of_loss, of_gradients = [], 0.0, 0.0
    for _ in range(job.steps):
        loss, gradients = ranks.trained(numbers)
        known, expected = _one_process(program, inputs)
        losses.append(float(loss))
        of_loss = max(of_loss, _apart(loss, known, float(known.abs())))
        largest = max(float(one.abs().max()) for one in expected.values())
        for name, one in expected.items():
            scale = max(float(one.abs().max()), _SMALL * largest)
            of_gradients = max(of_gradients, _apart(gradients[name], one, scale))
    return SchemeOutcome(str(document["id"]), str(document["name"]), scheme.kind, tuple(losses), of_loss, of_gradients)
