"""Kinds of layers of the estimator as graphs of operators: each of its operators is a step, on values whose axes are
named. The estimator determines the cost of a step (``prices``).

Axes: s tokens, heads (each with its queries, or groups of them with the keys and values that they share), f inner
width, S that of shared experts, E experts, m their inner width, V the vocabulary, z tokens of an encoder. A scan's
heads are its channels, in groups with a state. The width h of the tokens is not sharded. If t exceeds the number of
heads of keys and values, each device has a copy, as in the estimator, in all schemes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import gcd

from piper_ray.model.errors import UsageError
from piper_ray.workloads.estimate.architectures.layers import HIDDEN
from piper_ray.workloads.estimate.operators import LOSS, TOKEN_EMBEDDING, LayerKind, Operator, Split
from piper_ray.workloads.schemes.graph import REPLICATED, OperatorFamily, OperatorGraph, Step, TensorPlacement, Value

TOKENS, WIDTH, HEADS, INNER, EXPERTS, EXPERT_INNER = "s", "h", "heads", "f", "E", "m"
VOCABULARY, OTHER_TOKENS = "V", "z"

BORDERS = TensorPlacement(TOKENS), REPLICATED
"""The placements of values between layers: a whole plan has one of the two."""

Sides = Mapping[str, str]
"""How the estimator's operator divides an axis into 1/t: "tokens"; "own", the side that its tensor parallelism divides;
or "inner", of experts."""


@dataclass(frozen=True)
class Work:
    """The estimator's view of a step. operator: None for a step that costs nothing by itself."""

    operator: Operator | None
    sides: Sides


@dataclass(frozen=True)
class KindGraph:
    """A kind of layer on t devices, and the work of its steps by name."""

    kind: LayerKind
    degree: int
    graph: OperatorGraph
    works: Mapping[str, Work]


def graph_of(kind: LayerKind, degree: int) -> KindGraph:
    """The graph of the kind on a number of devices. Raises UsageError for operators that have no rule."""
    found = _GraphInProgress(kind.on(degree))
    for operator in kind.operators:
        found.add(operator)
    symbols = found.kind.symbols
    axes = TOKENS, INNER, EXPERTS, EXPERT_INNER, "S", VOCABULARY, OTHER_TOKENS
    sizes = {axis: int(symbols[axis]) for axis in axes if symbols.get(axis)}
    sizes[HEADS] = int(symbols.get("g") or gcd(*kind.heads) or 1)
    leaving = (found.stream,) if found.stream else ()
    graph = OperatorGraph(kind.key, found.values, tuple(found.steps), tuple(found.arriving), leaving, sizes)
    return KindGraph(found.kind, degree, graph, found.works)


@dataclass
class _GraphInProgress:
    """A graph under construction. arriving: from other layers; stream: the residual stream; normed: outputs of the
    norms before parts; now: the current value; parts: what the next residual sum adds to the stream."""

    kind: LayerKind
    values: dict[str, Value] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    works: dict[str, Work] = field(default_factory=dict)
    arriving: list[str] = field(default_factory=list)
    stream: str = ""
    normed: list[str] = field(default_factory=list)
    now: str = ""
    parts: list[str] = field(default_factory=list)
    heads: tuple[str, ...] = ()
    gate: str = ""
    latents: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.kind.operators[0].name.startswith((TOKEN_EMBEDDING, "patches to tokens")):
            self.stream = self._value("x", (TOKENS, WIDTH), HIDDEN)
            self.arriving.append("x")

    def add(self, operator: Operator) -> None:
        """The next operator of the kind. Raises UsageError."""
        shared = operator.name.startswith("shared expert: ")
        name = operator.name.removeprefix("shared expert: ").removeprefix("cross ").removesuffix(", fused")
        names = operator.name, name
        known = next((rule for words, rule in _RULES.items() for one in names if one.startswith(words)), None)
        if known is None or operator.frozen or "LoRA" in name:
            raise UsageError(
                f"no rule says how {operator.name} may be divided; expected embeddings, attention in one kernel, "
                "scans, feed-forward parts, experts and projections, without adapters"
            )
        known(self, operator, "S" if shared else INNER)

    def _value(self, name: str, axes: tuple[str, ...], formula: str, **more: bool) -> str:
        self.values[name] = Value(name, axes, self.kind.value(formula), **more)
        return name

    def _weight(self, operator: Operator, axes: tuple[str, ...]) -> tuple[str, ...]:
        """The operator's weights as one value; none if it has none."""
        numbers = self.kind.value(operator.parameters)
        if not numbers:
            return ()
        name = f"weights of {operator.name}"
        self.values[name] = Value(name, axes, 2.0 * numbers, numbers)
        return (name,)

    def _step(self, operator: Operator | None, step: Step, sides: Sides) -> None:
        self.steps.append(step)
        self.works[step.name] = Work(operator, sides)

    def token_embedding(self, operator: Operator, _: str) -> None:
        numbers = self._value("tokens' numbers", (TOKENS,), "8 s b", has_gradient=False)
        inputs = (numbers, *self._weight(operator, (VOCABULARY, WIDTH)))
        self.stream = self._value("embedded", (TOKENS, WIDTH), HIDDEN)
        step = Step(operator.name, OperatorFamily.LOOKUP, inputs, (self.stream,), backward_reads=(numbers,))
        self._step(operator, step, {TOKENS: "tokens", VOCABULARY: "own"})

    def patches(self, operator: Operator, _: str) -> None:
        inputs = (self._value("patches", (TOKENS,), "2 s b p", has_gradient=False), *self._weight(operator, (WIDTH,)))
        self.stream = self._value("embedded", (TOKENS, WIDTH), HIDDEN)
        step = Step(operator.name, OperatorFamily.ROWS, inputs, (self.stream,), (WIDTH,), backward_reads=inputs[:1])
        self._step(operator, step, {TOKENS: "tokens"})

    def table(self, operator: Operator, _: str) -> None:
        made = self._value(operator.name, (TOKENS, WIDTH), HIDDEN)
        inputs = (self.stream, *self._weight(operator, (WIDTH,)))
        self._step(operator, Step(operator.name, OperatorFamily.SUM, inputs, (made,)), {TOKENS: "tokens"})
        self.stream = made

    def dropout(self, operator: Operator, _: str) -> None:
        made = self._value(operator.name, (TOKENS, WIDTH), HIDDEN)
        mask = self._value("mask", (TOKENS, WIDTH), "s b h", has_gradient=False)
        step = Step(operator.name, OperatorFamily.POINTWISE, (self.stream,), (made, mask), backward_reads=(mask,))
        self._step(operator, step, {TOKENS: "tokens"})
        self.stream = made

    def vocabulary_projection(self, operator: Operator, _: str) -> None:
        logits = self.kind.operators[-1].saved[0].bytes
        self.product(operator, self.stream, {"logits": logits}, VOCABULARY, (WIDTH, VOCABULARY))

    def loss(self, operator: Operator, _: str) -> None:
        made = self._value("loss of tokens", (TOKENS,), "4 s b", has_gradient=False)
        step = Step(operator.name, OperatorFamily.LOSS, ("logits",), (made,), backward_reads=("logits",))
        self._step(operator, step, {TOKENS: "tokens", VOCABULARY: "own"})
        self.stream = ""

    def of_samples(self, operator: Operator, _: str) -> None:
        """One vector of each sample, its first token or the mean of all tokens, times a matrix."""
        pooled = self._value("vectors of samples", (WIDTH,), "2 b h")
        self._step(None, Step("samples", OperatorFamily.CONTRACTION, (self.stream,), (pooled,)), {TOKENS: "tokens"})
        ends = self.kind.output == "0"
        made = self._value("result", ("c",), "4 b c" if ends else self.kind.output, has_gradient=not ends)
        inputs = (pooled, *self._weight(operator, (WIDTH,)))
        reads = (*inputs, made) if ends else inputs
        self._step(operator, Step(operator.name, OperatorFamily.ROWS, inputs, (made,), (WIDTH,), reads), {})
        self.stream = "" if ends else made

    def norm(self, operator: Operator, _: str) -> None:
        if not any(one.name.startswith("residual") for one in self.kind.operators):
            inputs = (self.stream, *self._weight(operator, (WIDTH,)))
            self.stream = self._value(operator.name, (TOKENS, WIDTH), HIDDEN)
            step = Step(operator.name, OperatorFamily.ROWS, inputs, (self.stream,), (WIDTH,), inputs)
            self._step(operator, step, {TOKENS: "tokens"})
            return
        before = not operator.name.startswith("norm after")
        read = self.stream if before else self.parts.pop()
        made = self._value(operator.name, (TOKENS, WIDTH), HIDDEN)
        inputs = (read, *self._weight(operator, (WIDTH,)))
        step = Step(operator.name, OperatorFamily.ROWS, inputs, (made,), along=(WIDTH,), backward_reads=inputs)
        self._step(operator, step, {TOKENS: "tokens"})
        if before:
            numbered = operator.name[-1].isdecimal() and operator.name != "norm 1"
            self.normed = [*self.normed, made] if numbered else [made]
        else:
            self.parts.append(made)

    def product(
        self,
        operator: Operator,
        read: str,
        made: Mapping[str, str],
        into: str,
        weight: tuple[str, ...],
        tokens: str = TOKENS,
    ) -> None:
        """Tokens times a matrix. made: values with formulas of their bytes, whose last axis is ``into``."""
        for name, formula in made.items():
            self._value(name, (tokens, into), formula)
        weights = self._weight(operator, weight)
        step = Step(
            operator.name, OperatorFamily.CONTRACTION, (read, *weights), tuple(made), backward_reads=(read, *weights)
        )
        by_columns = operator.products[0].divided == "columns"
        own = into if by_columns else next(axis for axis in weight if axis != into)
        self._step(operator, step, {tokens: "tokens", own: "own"})

    def queries_keys_values(self, operator: Operator, _: str) -> None:
        made = {"queries": "2 s b a d", "keys and values": "4 s b g d"}
        if any(one.name == "gate of the output" for one in self.kind.operators):
            made["gate"], self.gate = "2 s b a d", "gate"
        self.product(operator, self.normed[0], made, HEADS, (WIDTH, HEADS))
        self.heads = ("queries", "keys and values")

    def rotary(self, operator: Operator, _: str) -> None:
        # Linear but for norms of heads, whose inputs the estimator does not keep either.
        made = tuple(f"turned {name}" for name in self.heads)
        for name, turned in zip(self.heads, made, strict=True):
            self.values[turned] = replace(self.values[name], name=turned)
        step = Step(operator.name, OperatorFamily.POINTWISE, (*self.heads, *self._weight(operator, ())), made)
        self._step(operator, step, {TOKENS: "tokens", HEADS: "own"})
        self.heads = made

    def cross_queries(self, operator: Operator, _: str) -> None:
        self.product(operator, self.normed[0], {operator.name: "2 s b a d"}, HEADS, (WIDTH, HEADS))

    def cross_keys(self, operator: Operator, _: str) -> None:
        read = self._value("encoder's output", (OTHER_TOKENS, WIDTH), "2 z b h")
        self.arriving.append(read)
        self.product(operator, read, {operator.name: "4 z b g d"}, HEADS, (WIDTH, HEADS), OTHER_TOKENS)
        self.heads = ("cross queries", operator.name)

    def core(self, operator: Operator, _: str) -> None:
        value_size = "v" if "v" in self.kind.symbols else "d"
        crossed = operator.name.startswith("cross")
        prefix = "cross " if crossed else ""
        result = self._value(f"{prefix}attention", (TOKENS, HEADS), f"2 s b a {value_size}")
        sums = self._value(f"{prefix}denominators", (TOKENS, HEADS), "4 s b a", has_gradient=False)
        inputs = (*self.heads, *self._weight(operator, (HEADS,)))
        step = Step(
            operator.name, OperatorFamily.ATTENTION, inputs, (result, sums), (TOKENS,), (*inputs, result, sums),
            on_ring="W" not in self.kind.symbols and not crossed,
        )  # fmt: skip
        self._step(operator, step, {TOKENS: "tokens", HEADS: "own"})
        self.now = result

    def gated(self, operator: Operator, _: str) -> None:
        made = self._value("gated attention", (TOKENS, HEADS), "2 s b a d")
        inputs = (self.now, self.gate)
        step = Step(operator.name, OperatorFamily.POINTWISE, inputs, (made,), backward_reads=inputs)
        self._step(operator, step, {TOKENS: "tokens", HEADS: "own"})
        self.now = made

    def attention_output(self, operator: Operator, _: str) -> None:
        made = "cross attended" if operator.name.startswith("cross") else "attended"
        self.product(operator, self.now, {made: HIDDEN}, WIDTH, (HEADS, WIDTH))
        self.parts.append(made)

    def mixer_in(self, operator: Operator, _: str) -> None:
        self.product(operator, self.normed[0], {"mixer's inner": operator.saved[1].bytes}, HEADS, (WIDTH, HEADS))
        self.heads = ("mixer's inner",)

    def states(self, operator: Operator, _: str) -> None:
        """Steps over all channels, as sums over them."""
        self.product(operator, self.now, {operator.name: operator.saved[0].bytes}, "states", (HEADS, "states"))
        self.heads = (*self.heads, operator.name)

    def norms_of_states(self, operator: Operator, _: str) -> None:
        read = self.heads[-1]
        made = replace(self.values[read], name=operator.name)
        self.values[made.name] = made
        inputs = (read, *self._weight(operator, ()))
        step = Step(operator.name, OperatorFamily.ROWS, inputs, (made.name,), ("states",), backward_reads=(read,))
        self._step(operator, step, {TOKENS: "tokens"})
        self.heads = (*self.heads[:-1], made.name)

    def time_steps(self, operator: Operator, _: str) -> None:
        self.product(operator, self.heads[-1], {operator.name: operator.saved[0].bytes}, HEADS, ("states", HEADS))
        self.heads = (*self.heads, operator.name)

    def scan(self, operator: Operator, _: str) -> None:
        """Steps token by token in each head: convolutions of neighbours, and states that are carried on."""
        made = self._value(operator.name, (TOKENS, HEADS), operator.saved[0].bytes)
        read = (*self.heads, *([self.now] if self.now else []))
        inputs = (*read, *self._weight(operator, (HEADS,)))
        step = Step(operator.name, OperatorFamily.ROWS, inputs, (made,), along=(TOKENS,), backward_reads=inputs)
        self._step(operator, step, {HEADS: "own"})
        self.now = made

    def norm_and_gate(self, operator: Operator, _: str) -> None:
        """Steps of each head, or group of heads, by itself."""
        formula = operator.saved[0].bytes
        made = tuple(self._value(name, (TOKENS, HEADS), formula) for name in ("normed scan", "gated scan"))
        axes = (HEADS,) if operator.parameters_split is Split.TENSOR else ()
        inputs = (self.now, *self.heads[:1], *self._weight(operator, axes))
        step = Step(operator.name, OperatorFamily.POINTWISE, inputs, made, backward_reads=(*inputs, made[0]))
        self._step(operator, step, {TOKENS: "tokens", HEADS: "own"})
        self.now = made[1]

    def mixer_out(self, operator: Operator, _: str) -> None:
        self.product(operator, self.now, {"mixed": HIDDEN}, WIDTH, (HEADS, WIDTH))
        self.parts.append("mixed")

    def latent_vectors(self, operator: Operator, _: str) -> None:
        low = "Q + C" if self.kind.value("Q") else "C"
        raw = self._value("latent vectors", (TOKENS,), "2 s b Q + 2 s b C + 2 s b r", has_gradient=False)
        made = {"normed key latents": "2 s b C + 2 s b r"}
        made |= {"normed query latents": "2 s b Q"} if low != "C" else {}
        for name, formula in made.items():
            self._value(name, (TOKENS,), formula.replace(" + 2 s b r", ""))
        inputs = (self.normed[0], *self._weight(operator, (WIDTH,)))
        reads = (*inputs, raw)
        step = Step(operator.name, OperatorFamily.ROWS, inputs, (raw, *made), along=(WIDTH,), backward_reads=reads)
        self._step(operator, step, {TOKENS: "tokens"})
        self.latents = tuple(made)

    def latent_queries(self, operator: Operator, _: str) -> None:
        read = self.latents[1] if len(self.latents) > 1 else self.normed[0]
        self.product(operator, read, {"queries": "2 s b a d"}, HEADS, (HEADS,))

    def latent_keys(self, operator: Operator, _: str) -> None:
        self.product(operator, self.latents[0], {"keys and values": "2 s b a d + 2 s b a v"}, HEADS, (HEADS,))
        self.heads = ("queries", "keys and values")

    def feed_forward_in(self, operator: Operator, inner: str) -> None:
        gated = operator.matrices
        prefix = "shared " if inner == "S" else ""
        made = {f"{prefix}inner": f"{2 * gated} s b {inner}"}
        self.product(operator, self.normed[-1], made, inner, (WIDTH, inner))
        self.now = f"{prefix}inner"

    def activation(self, operator: Operator, inner: str) -> None:
        made = self._value(f"activated {self.now}", (TOKENS, inner), f"2 s b {inner}")
        step = Step(operator.name, OperatorFamily.POINTWISE, (self.now,), (made,), backward_reads=(self.now,))
        self._step(operator, step, {TOKENS: "tokens", inner: "own"})
        self.now = made

    def feed_forward_out(self, operator: Operator, inner: str) -> None:
        made = "shared experts' word" if inner == "S" else "fed forward"
        self.product(operator, self.now, {made: HIDDEN}, WIDTH, (inner, WIDTH))
        self.parts.append(made)

    def shared_gate(self, operator: Operator, _: str) -> None:
        gate = self._value("shared gate", (TOKENS,), "2 s b")
        inputs = (self.normed[-1], *self._weight(operator, (WIDTH,)))
        step = Step(operator.name, OperatorFamily.ROWS, inputs, (gate,), along=(WIDTH,), backward_reads=inputs)
        self._step(operator, step, {TOKENS: "tokens"})
        made = self._value("gated shared word", (TOKENS, WIDTH), HIDDEN)
        times = Step(
            "times the gate", OperatorFamily.CONTRACTION, (self.parts.pop(), gate), (made,), backward_reads=(gate,)
        )
        self._step(None, times, {TOKENS: "tokens"})
        self.parts.append(made)

    def router(self, operator: Operator, _: str) -> None:
        made = self._value("routes", (TOKENS, EXPERTS), "19 s b E")
        inputs = (self.normed[-1], *self._weight(operator, (WIDTH,)))
        along = (WIDTH, EXPERTS)
        step = Step(operator.name, OperatorFamily.ROWS, inputs, (made,), along, backward_reads=(*inputs, made))
        self._step(operator, step, {TOKENS: "tokens"})

    def dispatch(self, operator: Operator, _: str) -> None:
        made = self._value("copies", (TOKENS, EXPERTS, WIDTH), "2 s b e h", sent_to_experts=True)
        inputs = (self.normed[-1], "routes")
        step = Step(operator.name, OperatorFamily.CONTRACTION, inputs, (made,), backward_reads=("routes",))
        self._step(operator, step, {TOKENS: "tokens", EXPERTS: "own"})

    def experts(self, operator: Operator, _: str) -> None:
        into = operator.name == "experts in"
        inner = f"{2 * operator.matrices} s b e m"
        read, made, formula = ("copies", "experts' inner", inner) if into else (self.now, "said", "2 s b e h")
        last = EXPERT_INNER if into else WIDTH
        self._value(made, (TOKENS, EXPERTS, last), formula, sent_to_experts=not into)
        axes = (EXPERTS, WIDTH, EXPERT_INNER)
        inputs = (read, *self._weight(operator, axes))
        step = Step(operator.name, OperatorFamily.CONTRACTION, inputs, (made,), backward_reads=inputs)
        self._step(operator, step, {TOKENS: "tokens", EXPERTS: "own", EXPERT_INNER: "inner"})
        self.now = made

    def experts_activation(self, operator: Operator, _: str) -> None:
        made = self._value("experts' activated inner", (TOKENS, EXPERTS, EXPERT_INNER), "2 s b e m")
        step = Step(operator.name, OperatorFamily.POINTWISE, (self.now,), (made,), backward_reads=(self.now,))
        self._step(operator, step, {TOKENS: "tokens", EXPERTS: "own", EXPERT_INNER: "own"})
        self.now = made

    def combine(self, operator: Operator, _: str) -> None:
        made = self._value("experts' word", (TOKENS, WIDTH), HIDDEN)
        step = Step(operator.name, OperatorFamily.CONTRACTION, (self.now,), (made,))
        self._step(operator, step, {TOKENS: "tokens", EXPERTS: "own"})
        self.parts.append(made)

    def residual(self, operator: Operator, _: str) -> None:
        if len(self.parts) > 1:
            name = f"sum before {operator.name}"
            made = self._value(name, (TOKENS, WIDTH), HIDDEN)
            self._step(None, Step(name, OperatorFamily.SUM, tuple(self.parts), (made,)), {TOKENS: "tokens"})
            self.parts = [made]
        made = self._value(operator.name, (TOKENS, WIDTH), HIDDEN)
        outputs: tuple[str, ...] = (made,)
        if operator.saved:
            mask = self._value(f"mask of {operator.name}", (TOKENS, WIDTH), "s b h", has_gradient=False)
            outputs = (made, mask)
        inputs = (self.stream, *self.parts, *self._weight(operator, (WIDTH,)))
        step = Step(operator.name, OperatorFamily.SUM, inputs, outputs, backward_reads=outputs[1:])
        self._step(operator, step, {TOKENS: "tokens"})
        self.stream, self.parts = made, []


_RULES: Mapping[str, Callable[[_GraphInProgress, Operator, str], None]] = {
    TOKEN_EMBEDDING: _GraphInProgress.token_embedding,
    "patches to tokens": _GraphInProgress.patches,
    "position embedding": _GraphInProgress.table,
    "type embedding": _GraphInProgress.table,
    "relative positions": _GraphInProgress.table,
    "dropout": _GraphInProgress.dropout,
    "norm and gate": _GraphInProgress.norm_and_gate,
    "norms of states": _GraphInProgress.norms_of_states,
    "norm": _GraphInProgress.norm,
    "last norm": _GraphInProgress.norm,
    "queries, keys, values": _GraphInProgress.queries_keys_values,
    "rotary positions": _GraphInProgress.rotary,
    "query and key norms": _GraphInProgress.rotary,
    "attention core": _GraphInProgress.core,
    "gate of the output": _GraphInProgress.gated,
    "attention output": _GraphInProgress.attention_output,
    "latent vectors": _GraphInProgress.latent_vectors,
    "cross queries": _GraphInProgress.cross_queries,
    "cross keys": _GraphInProgress.cross_keys,
    "queries": _GraphInProgress.latent_queries,
    "keys and values": _GraphInProgress.latent_keys,
    "mixer in": _GraphInProgress.mixer_in,
    "convolution of neighbours": _GraphInProgress.scan,
    "states and time steps": _GraphInProgress.states,
    "time steps of channels": _GraphInProgress.time_steps,
    "scan by chunks": _GraphInProgress.scan,
    "delta rule by chunks": _GraphInProgress.scan,
    "selective scan": _GraphInProgress.scan,
    "mixer out": _GraphInProgress.mixer_out,
    "feed-forward in": _GraphInProgress.feed_forward_in,
    "activation function": _GraphInProgress.activation,
    "feed-forward out": _GraphInProgress.feed_forward_out,
    "gate": _GraphInProgress.shared_gate,
    "router": _GraphInProgress.router,
    "tokens to experts": _GraphInProgress.dispatch,
    "experts in": _GraphInProgress.experts,
    "experts out": _GraphInProgress.experts,
    "experts' activation function": _GraphInProgress.experts_activation,
    "sum over experts": _GraphInProgress.combine,
    "residual": _GraphInProgress.residual,
    "vocabulary projection": _GraphInProgress.vocabulary_projection,
    LOSS: _GraphInProgress.loss,
    "classifier": _GraphInProgress.of_samples,
    "projection": _GraphInProgress.of_samples,
}
"""The steps by the first words of an operator's name; the first entry that fits is used."""
