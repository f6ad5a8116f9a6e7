"""The ways to run a layer: tensor, sequence, context and expert parallelism, recomputation, sharding, offload."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from piper_ray.model.recomputation import EVERY_SECOND_PRODUCT, Recomputation
from piper_ray.model.settings import ALL_REPLICAS, Sharding
from piper_ray.workloads.estimate.operators import Exchange, KeptBytes, LayerKind, Operator, Split


@dataclass(frozen=True)
class Mode:
    """One way to run a layer on ``degree * context`` devices.

    degree: t of tensor parallelism. context: so many groups of t devices share a sequence's tokens. experts: ranks
    over which a layer's experts are spread; None: its t devices. expert_tensor: devices that share one expert.
    zero_shards: replicas (of weights, so d c in all) that share out what ``sharding`` says; 1: none, ALL_REPLICAS:
    however many there are, of the optimizer's state alone. gathered: with sequence parallelism, what a norm hands to a
    product is kept whole and not gathered again.
    """

    degree: int
    sequence_parallel: bool = False
    recomputation: Recomputation = Recomputation.NONE
    zero_shards: int = 1
    offload: bool = False
    context: int = 1
    experts: int | None = None
    expert_tensor: int = 1
    sharding: Sharding = Sharding.OPTIMIZER
    gathered: bool = False

    @property
    def id(self) -> str:
        """``plain``, ``sp+selective``, ``full+zero8+offload``: the TMPC's id (``model.settings`` reads it)."""
        parts = ["sp"] if self.sequence_parallel else []
        parts += ["gathered"] if self.gathered else []
        parts += [f"cp{self.context}"] if self.context > 1 else []
        parts += [f"ep{self.experts}"] if self.experts is not None else []
        parts += [f"etp{self.expert_tensor}"] if self.expert_tensor > 1 else []
        if self.recomputation != Recomputation.NONE:
            parts.append(self.recomputation.id)
        parts = parts or ["plain"]
        if self.zero_shards == ALL_REPLICAS:
            parts.append("zero")
        elif self.zero_shards > 1:
            parts.append(f"{_SHARDED[self.sharding]}{self.zero_shards}")
        parts += ["offload"] if self.offload else []
        return "+".join(parts)

    @property
    def devices(self) -> int:
        """Of a replica: t c, the planner's tensor-parallel degree."""
        return self.degree * self.context

    @property
    def expert_ranks(self) -> int:
        """Over which experts are spread."""
        return self.degree if self.experts is None else self.experts

    @property
    def shares(self) -> Sharding:
        """What replicas share out, if anything."""
        return Sharding.NONE if self.zero_shards == 1 else self.sharding

    def shards(self, routed: bool) -> float:
        """Into how many parts a weight's state is divided; experts', of which there are fewer replicas, into fewer.

        1 where all replicas share, of which there may be any number.
        """
        if self.zero_shards in (1, ALL_REPLICAS) or not routed:
            return max(1, self.zero_shards)
        return max(1.0, self.zero_shards * self.degree / (self.expert_ranks * self.expert_tensor))

    def replicas(self, routed: bool) -> float:
        """Of a weight for each replica of a stage: below 1 for experts that are spread over several of these."""
        return self.devices / (self.expert_ranks * self.expert_tensor) if routed else float(self.context)

    @property
    def least_data_parallel_degree(self) -> int:
        """What shards and experts need: c replicas of the weights, or T ranks, for each replica of a stage."""
        spread = self.expert_ranks * self.expert_tensor
        return max(1, -(-self.zero_shards // self.context), -(-spread // self.devices))

    def does_again(self, step: Operator | KeptBytes | Exchange) -> bool:
        """Whether selective recomputation does a step again, or makes again what the layer would keep."""
        return not set(self.recomputation.parts).isdisjoint(step.again)

    def share_again(self, operator: Operator) -> float:
        """How much of an operator's forward pass the backward pass does again."""
        if EVERY_SECOND_PRODUCT in self.recomputation.parts:
            return 0.0 if operator.on_chip else 0.5 if operator.products else 1.0
        return 1.0 if self.recomputation == Recomputation.FULL or self.does_again(operator) else 0.0

    def parts(self, split: Split) -> int:
        """By how many a figure of the tokens is divided."""
        return self.context * split.parts(self.degree, self.sequence_parallel)

    def parameter_parts(self, operator: Operator) -> int:
        """By how many an operator's parameters are divided."""
        if operator.routed:
            return self.expert_ranks * self.expert_tensor
        return operator.parameters_split.parts(self.degree, self.sequence_parallel)


_SHARDED = {Sharding.OPTIMIZER: "zero", Sharding.GRADIENTS: "zero2x", Sharding.WEIGHTS: "fsdp"}


@dataclass(frozen=True)
class Offer:
    """What modes are offered beside plain ones, sequence parallelism and recomputation.

    zero, zero2, fsdp: replicas that share the optimizer's state, gradients too, weights too; 1: not offered, and
    ALL_REPLICAS for the first alone. contexts: groups that share a sequence. experts: ranks that experts are spread
    over, each of which expert_tensor devices share. gathered: what sequence parallelism would gather again is kept.
    recomputations: of the whole model, each of which a layer follows with the parts that it has. sharded_devices:
    weights are shared by all replicas of a plan with one pipeline rank on so many devices, another number for each t;
    0: not offered.
    """

    zero: int = 1
    zero2: int = 1
    fsdp: int = 1
    offload: bool = False
    contexts: tuple[int, ...] = (1,)
    experts: tuple[int, ...] = ()
    expert_tensor: int = 1
    gathered: bool = False
    recomputations: tuple[Recomputation, ...] = (Recomputation.NONE, Recomputation.FULL)
    sharded_devices: int = 0

    def shardings(self, degree: int) -> tuple[tuple[int, Sharding], ...]:
        """Shards of each at that t, and what of, the plainest first."""
        alone = max(1, self.sharded_devices // degree)
        asked = (
            (self.zero, Sharding.OPTIMIZER),
            (self.zero2, Sharding.GRADIENTS),
            (self.fsdp, Sharding.WEIGHTS),
            (alone, Sharding.WEIGHTS),
        )
        return tuple(dict.fromkeys([(1, Sharding.OPTIMIZER), *((n, what) for n, what in asked if n != 1)]))


PLAIN = Offer()
"""Nothing further."""


def degrees_of(kinds: Sequence[LayerKind], gpus_per_node: int) -> dict[str, tuple[int, ...]]:
    """The tensor-parallel degrees of each kind, by key: they divide the node and the kind's heads.

    A kind without heads takes every degree that a kind with heads has.
    """
    candidates = [t for t in range(1, gpus_per_node + 1) if gpus_per_node % t == 0]
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


def modes_of(kind: LayerKind, degree: int, offer: Offer = PLAIN) -> Iterator[Mode]:
    """Every mode of a kind at a degree, the plainest first."""
    for context in offer.contexts:
        for experts in (None, *(ranks for ranks in offer.experts if _spreads(kind, ranks, offer.expert_tensor))):
            plain = Mode(
                degree,
                context=context,
                experts=experts,
                expert_tensor=1 if experts is None else offer.expert_tensor,
            )
            yield from _with_memory_saved(kind, plain, offer)


def _with_memory_saved(kind: LayerKind, plain: Mode, offer: Offer) -> Iterator[Mode]:
    for sequence_parallel in (False, True) if plain.degree > 1 and _has_sequence(kind) else (False,):
        for recomputation in dict.fromkeys(recomputation_of(kind, one) for one in offer.recomputations):
            shardings = offer.shardings(plain.degree)
            for shards, sharding in shardings if kind.parameters else shardings[:1]:
                mode = replace(
                    plain,
                    sequence_parallel=sequence_parallel,
                    recomputation=recomputation,
                    zero_shards=shards,
                    sharding=sharding,
                )
                yield mode
                if offer.offload and kind.recomputable:
                    yield replace(mode, offload=True)
                if offer.gathered and sequence_parallel and kind.exchanges and recomputation == Recomputation.NONE:
                    yield replace(mode, gathered=True)


def _spreads(kind: LayerKind, ranks: int, expert_tensor: int) -> bool:
    """Whether a kind's experts, if it has any, can be spread over so many ranks, each over so many devices."""
    routed = [operator for operator in kind.operators if operator.routed]
    inner = {kind.value(side) for x in routed for p in x.products for side in (p.columns, p.depth)} - {kind.value("h")}
    return bool(routed) and kind.value("E") % ranks == 0 and all(side % expert_tensor == 0 for side in inner)


def recomputation_of(kind: LayerKind, asked: Recomputation) -> Recomputation:
    """What a layer of that kind does of what is asked of the whole model: it has not all parts that others have."""
    if not kind.recomputable:
        return Recomputation.NONE
    if not asked.selective or EVERY_SECOND_PRODUCT in asked.parts:
        return asked
    return Recomputation.of_parts(kind.parts.intersection(asked.parts))


def _has_sequence(kind: LayerKind) -> bool:
    return any(
        Split.SEQUENCE in (operator.split, *(saved.split for saved in operator.saved)) for operator in kind.operators
    )
