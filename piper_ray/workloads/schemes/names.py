"""Names of schemes: of those that runtimes have, by the axis on which each step is divided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from piper_ray.workloads.schemes.graph import REPLICATED, OperatorFamily, OperatorGraph, Step, TensorPlacement
from piper_ray.workloads.schemes.layers import EXPERT_INNER, EXPERTS, OTHER_TOKENS, TOKENS
from piper_ray.workloads.schemes.rules import RING, Strategy, strategies
from piper_ray.workloads.schemes.scheme import Scheme

NEW = "new"

_CHEAP = (
    "norm", "last norm", "activation function", "experts' activation function", "shared expert: activation",
    "layer_norm", "rms_norm", "gelu", "silu", "relu",
)  # fmt: skip


@dataclass(frozen=True)
class _Division:
    """products, attention, experts: whether these are divided as tensor parallelism divides them, or along the border's
    axis; attention may go around a ring. sent: whether tokens are sent to experts, or each device has all tokens."""

    products: bool
    attention: bool
    experts: bool
    sent: bool = True
    ring: bool = False

    def of(self, step: Step, graph: OperatorGraph, options: tuple[Strategy, ...], border: TensorPlacement) -> Strategy:
        """The strategy of a step."""
        routed = EXPERTS in {axis for name in (*step.inputs, *step.outputs) for axis in graph.values[name].axes}
        if step.family is OperatorFamily.ATTENTION:
            own = self.attention
        elif routed:
            ends = (
                not any(graph.values[name].parameters for name in step.inputs)
                and step.family is OperatorFamily.CONTRACTION
            )
            own = self.experts and not (ends and self.sent and border.axis)
        else:
            own = self.products
        of_tensor = next((one for one in options if one.axis not in ("", TOKENS, OTHER_TOKENS, EXPERT_INNER)), None)
        if own and of_tensor:
            return of_tensor
        along = [one for one in options if border.axis and one.axis in (TOKENS, OTHER_TOKENS)] or options[:1]
        if not along[0].axis and border.axis and of_tensor:  # a scan, which tokens do not divide
            return of_tensor
        return next((one for one in along if (one.exchange == RING) == self.ring), along[0])


def known_divisions(graph: OperatorGraph, degree: int) -> dict[str, tuple[TensorPlacement, Mapping[str, str]]]:
    """By the names of the schemes that runtimes have, the border and each step's strategy, as text. A layer of whose
    products none is divided is not called tensor parallel."""
    tokens = TensorPlacement(TOKENS)
    known = {
        "tensor parallelism": (TensorPlacement(), _Division(True, True, True)),
        "tensor and sequence parallelism": (tokens, _Division(True, True, True)),
        "tensor and sequence parallelism, experts by all-gather": (tokens, _Division(True, True, True, sent=False)),
        "context parallelism, ring": (tokens, _Division(False, False, False, ring=True)),
        "context parallelism, all-gather": (tokens, _Division(False, False, False)),
        "context parallelism, all-to-all": (tokens, _Division(False, True, False)),
        "context and expert parallelism, ring": (tokens, _Division(False, False, True, ring=True)),
        "context and expert parallelism, all-gather": (tokens, _Division(False, False, True)),
        "context and expert parallelism, all-to-all": (tokens, _Division(False, True, True)),
    }
    tokens_divide = graph.sizes.get(TOKENS, 1) % degree == 0
    options = {step.name: strategies(step, graph, degree) for step in graph.steps}
    found: dict[str, tuple[TensorPlacement, Mapping[str, str]]] = {}
    products = [
        step.name
        for step in graph.steps
        if step.family is OperatorFamily.CONTRACTION and any(graph.values[name].parameters for name in step.inputs)
    ]
    has_ring = any(one.exchange == RING for of_step in options.values() for one in of_step)
    for name, (border, division) in known.items():
        if (border.axis and not tokens_divide) or (division.ring and not has_ring):
            continue
        chosen = {step.name: division.of(step, graph, options[step.name], border) for step in graph.steps}
        texts = {step: one.text for step, one in chosen.items()}
        of_tensor = {chosen[step].axis for step in products} - {"", TOKENS, OTHER_TOKENS}
        if (of_tensor or not (products and division.products)) and (border, texts) not in found.values():
            found[name] = border, texts
    return found


def name_of(scheme: Scheme, graph: OperatorGraph) -> str:
    """The name of the way in which the layer is divided, with what is kept gathered, and with ``selective`` or ``full
    recomputation``; ``new`` if it has no name."""
    forward = {step.name: step.forward for step in scheme.steps}
    sums = {step.name for step in graph.steps if step.family is OperatorFamily.SUM}  # of which only biases go back
    alike = all(
        (step.backward == step.forward or (step.name in sums and step.backward == "whole"))
        and step.again in (None, step.forward)
        for step in scheme.steps
    )
    weights_stay = all(move.value not in scheme.weights for move in scheme.moves)
    known = known_divisions(graph, scheme.degree).items()
    found = next((name for name, (border, axes) in known if (border, axes) == (scheme.border, forward)), NEW)
    if found == NEW or not alike or not weights_stay:
        return NEW
    gathered = (scheme.border.axis in graph.values[name].axes and place == REPLICATED for name, place in scheme.kept)
    if scheme.border.axis and any(gathered):
        found = f"{found}, gathered inputs kept"
    if not scheme.again:
        return found
    if all(name.startswith(_CHEAP) for name in scheme.again):
        return f"{found}, selective recomputation"
    if {name for name, _ in scheme.kept} <= {*graph.arriving}:
        return f"{found}, full recomputation"
    return f"{found}, own recomputation"
