"""The ways to run a layer: tensor, sequence, context and expert parallelism, recomputation, sharding, offload."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, wraps
from typing import TypeVar

from piper_ray.model.instance import divisors
from piper_ray.model.mode import ALL_REPLICAS, EVERY_SECOND_PRODUCT, Mode, Recomputation, Sharding
from piper_ray.workloads.estimate.operators import Exchange, KeptBytes, LayerKind, Operator, Split

_Figure = TypeVar("_Figure")


@dataclass(frozen=True)
class LayerMode(Mode):
    """A mode on ``degree * context`` devices, and what it divides there.

    degree: t of tensor parallelism. groups: the number of groups of replicas that each share weights and sum gradients
    in every pass (HSDP); 0: gradients are summed once a batch, over any number of groups.
    """

    degree: int = 1
    groups: int = 0

    @property
    def divides(self) -> Hashable:
        """Everything on which one run of each operator depends; recomputation is not part of it."""
        return self.degree, self.context, self.experts, self.expert_tensor, self.sequence_parallel

    @cached_property
    def divided(self) -> Hashable:
        """Everything on which passes depend; sharing among replicas and offload are not part of it."""
        return self.divides, self.recomputation.parts, self.gathered

    @property
    def without_degree(self) -> Mode:
        """The mode of a TMPC, without t, which follows from the TMPC's place in its layer."""
        return Mode(**{one.name: getattr(self, one.name) for one in fields(Mode)})

    @property
    def devices(self) -> int:
        """The devices of a replica: t c, the planner's tensor-parallel degree."""
        return self.degree * self.context

    @property
    def expert_ranks(self) -> int:
        """The number of ranks over which experts are spread."""
        return self.degree if self.experts is None else self.experts

    def state_parts(self, routed: bool) -> float:
        """The number of parts into which a weight's state is divided; experts have fewer replicas, so their state has
        fewer parts. 1 if all replicas share the state, since their number is open."""
        if self.optimizer_shards in (1, ALL_REPLICAS) or not routed:
            return max(1, self.optimizer_shards)
        return max(1.0, self.optimizer_shards * self.degree / (self.expert_ranks * self.expert_tensor))

    def replicas(self, routed: bool) -> float:
        """The copies of a weight for each replica of a stage; below 1 for experts that are spread over several
        replicas."""
        return self.devices / (self.expert_ranks * self.expert_tensor) if routed else float(self.context)

    @property
    def least_data_parallel_degree(self) -> int:
        """The least data-parallel degree that shards and experts need."""
        spread = self.expert_ranks * self.expert_tensor
        sharing = self.optimizer_shards * max(1, self.groups)
        return max(1, -(-sharing // self.context), -(-spread // self.devices))

    def does_again(self, step: Operator | KeptBytes | Exchange) -> bool:
        """Whether selective recomputation repeats a step, or computes again what the layer would keep."""
        return not set(self.recomputation.parts).isdisjoint(step.again)

    def share_again(self, operator: Operator) -> float:
        """The share of an operator's forward pass that the backward pass repeats."""
        if EVERY_SECOND_PRODUCT in self.recomputation.parts:
            return 0.0 if operator.on_chip else 0.5 if operator.products else 1.0
        return 1.0 if self.recomputation == Recomputation.FULL or self.does_again(operator) else 0.0

    def parts(self, split: Split) -> float:
        """The number of parts into which a figure of the tokens is divided."""
        shared = self.expert_tensor if split is Split.COPIES else 1
        return self.context * split.parts(self.degree, self.sequence_parallel) / shared

    def parameter_parts(self, operator: Operator) -> int:
        """The number of parts into which an operator's parameters are divided."""
        if operator.routed:
            return self.expert_ranks * self.expert_tensor
        return operator.parameters_split.parts(self.degree, self.sequence_parallel)


def worked_out_once(function: Callable[..., _Figure], *, made_again: bool = True) -> Callable[..., _Figure]:
    """Caches a figure of a kind in a mode, and of few further hashable things; modes that divide the kind alike share
    it. made_again: whether it depends on what is recomputed."""

    @wraps(function)
    def found(kind: LayerKind, mode: LayerMode, *others: Hashable, **named: Hashable) -> _Figure:
        divided = mode.divided if made_again else (mode.divides, mode.gathered)
        key = function.__name__, divided, others, tuple(named.items())
        value: _Figure | None = kind.known.get(key)
        if value is None:
            value = kind.known[key] = function(kind, mode, *others, **named)
        return value

    return found


@dataclass(frozen=True)
class Offer:
    """The modes that are offered besides plain ones, sequence parallelism and recomputation.

    zero, zero2, fsdp: the number of replicas that share the optimizer's state; gradients too; weights too. 1: not
    offered; zero and fsdp may be ALL_REPLICAS (``on``). contexts: numbers of groups that share a sequence. experts:
    numbers of ranks over which experts are spread; expert_tensor devices share each expert. spreads: further pairs of
    both; a pair is left out if others never lose to it. gathered: what sequence parallelism would gather again is kept.
    recomputations: those of the whole model; each layer follows with the parts that it has. sharded_over: numbers of
    devices over which weights are shared, by a different number of replicas for each t. summed_over: the number of
    devices of plans whose replicas share weights and then sum gradients between groups in every pass; 0: any number,
    and once a batch. always_sequence: tensor parallelism always comes with sequence parallelism, if possible.
    """

    zero: int = 1
    zero2: int = 1
    fsdp: int = 1
    offload: bool = False
    contexts: tuple[int, ...] = (1,)
    experts: tuple[int, ...] = ()
    expert_tensor: int = 1
    spreads: tuple[tuple[int, int], ...] = ()
    gathered: bool = False
    recomputations: tuple[Recomputation, ...] = (Recomputation.NONE, Recomputation.FULL)
    sharded_over: tuple[int, ...] = ()
    summed_over: int = 0
    always_sequence: bool = False

    def on(self, devices: int) -> Offer:
        """The offer on this many devices. Weights that all replicas share are shared by at most all devices."""
        if self.fsdp != ALL_REPLICAS:
            return self
        return replace(self, fsdp=1, sharded_over=tuple(dict.fromkeys((*self.sharded_over, *divisors(devices)[::-1]))))

    def shardings(self, degree: int) -> tuple[tuple[int, Sharding], ...]:
        """The numbers of shards at this t, and what is sharded, the plainest first."""
        asked = (
            (self.zero, Sharding.OPTIMIZER),
            (self.zero2, Sharding.GRADIENTS),
            (self.fsdp, Sharding.WEIGHTS),
            *((max(1, devices // degree), Sharding.WEIGHTS) for devices in self.sharded_over),
        )
        return tuple(dict.fromkeys([(1, Sharding.OPTIMIZER), *((n, what) for n, what in asked if n != 1)]))


PLAIN = Offer()
"""The offer of nothing further."""


def degrees_of(kinds: Sequence[LayerKind], domain: int) -> dict[str, tuple[int, ...]]:
    """The tensor-parallel degrees of each kind, by key: they divide the node and the kind's heads.

    A kind without heads takes every degree that a kind with heads has.
    """
    candidates = [t for t in range(1, domain + 1) if domain % t == 0]
    with_heads = {
        kind.key: tuple(t for t in candidates if kind.divides(t))
        for kind in kinds
        if kind.tensor_parallel and kind.heads
    }
    common = tuple(sorted({1, *(t for degrees in with_heads.values() for t in degrees)}))
    return {
        kind.key: with_heads.get(kind.key, common) if kind.tensor_parallel else (1,)
        for kind in kinds
    }  # fmt: skip


def modes_of(kind: LayerKind, degree: int, offer: Offer = PLAIN) -> Iterator[LayerMode]:
    """Every mode of a kind at a degree, the plainest first."""
    for context in offer.contexts:
        asked = dict.fromkeys([*((ranks, offer.expert_tensor) for ranks in offer.experts), *offer.spreads])
        for experts, each in ((None, 1), *(spread for spread in asked if _spreads(kind, *spread))):
            plain = LayerMode(degree=degree, context=context, experts=experts, expert_tensor=each)
            yield from _with_memory_saved(kind, plain, offer)


def _with_memory_saved(kind: LayerKind, plain: LayerMode, offer: Offer) -> Iterator[LayerMode]:
    choices: tuple[bool, ...] = (False,)
    if plain.degree > 1 and _has_sequence(kind):
        choices = (True,) if offer.always_sequence else (False, True)
    for sequence_parallel in choices:
        for recomputation in dict.fromkeys(recomputation_of(kind, one) for one in offer.recomputations):
            shardings = offer.shardings(plain.degree)
            for shards, sharding in shardings if kind.parameters else shardings[:1]:
                replicas, groups = offer.summed_over // plain.degree, 0
                if sharding is Sharding.WEIGHTS and replicas:
                    if replicas % shards or shards % plain.context:
                        continue
                    groups = replicas // shards
                mode = replace(
                    plain,
                    groups=groups,
                    sequence_parallel=sequence_parallel,
                    recomputation=recomputation,
                    optimizer_shards=shards,
                    sharding=sharding,
                )
                yield mode
                if offer.offload and kind.recomputable:
                    yield replace(mode, offload=True)
                if offer.gathered and sequence_parallel and kind.exchanges and recomputation == Recomputation.NONE:
                    yield replace(mode, gathered=True)


def _spreads(kind: LayerKind, ranks: int, expert_tensor: int) -> bool:
    """Whether a kind's experts, if any, can be spread over ``ranks`` ranks, with each expert on ``expert_tensor``
    devices."""
    routed = [operator for operator in kind.operators if operator.routed]
    inner = {kind.value(side) for x in routed for p in x.products for side in (p.columns, p.depth)} - {kind.value("h")}
    return bool(routed) and kind.value("E") % ranks == 0 and all(side % expert_tensor == 0 for side in inner)


def recomputation_of(kind: LayerKind, asked: Recomputation) -> Recomputation:
    """A layer's recomputation, if the whole model is asked for ``asked``: a kind may lack some of the parts."""
    if not kind.recomputable:
        return Recomputation.NONE
    if not asked.selective or EVERY_SECOND_PRODUCT in asked.parts:
        return asked
    return Recomputation.of_parts(kind.parts.intersection(asked.parts))


def _has_sequence(kind: LayerKind) -> bool:
    return any(
        Split.SEQUENCE in (operator.split, *(saved.split for saved in operator.saved)) for operator in kind.operators
    )
