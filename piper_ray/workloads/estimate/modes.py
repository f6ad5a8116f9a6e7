"""The ways to run a layer: tensor, sequence, context and expert parallelism, recomputation, sharding, offload."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from piper_ray.model.settings import Recomputation
from piper_ray.workloads.estimate.operators import LayerKind, Operator, Split


@dataclass(frozen=True)
class Mode:
    """One way to run a layer on ``degree * context`` devices.

    degree: t of tensor parallelism. context: so many groups of t devices share a sequence's tokens. experts: ranks
    over which a layer's experts are spread; None: its t devices. expert_tensor: devices that share one expert.
    zero_shards: of the optimizer's state; 1 without sharding. fsdp: weights and gradients are sharded with it, and
    gathered for each pass (ZeRO-3). gathered: with sequence parallelism, what a norm hands to a product is kept whole
    and not gathered again.
    """

    degree: int
    sequence_parallel: bool = False
    recomputation: Recomputation = Recomputation.NONE
    zero_shards: int = 1
    offload: bool = False
    context: int = 1
    experts: int | None = None
    expert_tensor: int = 1
    fsdp: bool = False
    gathered: bool = False

    @property
    def id(self) -> str:
        """``plain``, ``sp+selective``, ``full+zero8+offload``: the TMPC's id."""
        parts = ["sp"] if self.sequence_parallel else []
        parts += ["gathered"] if self.gathered else []
        parts += [f"cp{self.context}"] if self.context > 1 else []
        parts += [f"ep{self.experts}"] if self.experts is not None else []
        if self.recomputation is not Recomputation.NONE:
            parts.append(self.recomputation.value)
        parts = parts or ["plain"]
        parts += [f"{'fsdp' if self.fsdp else 'zero'}{self.zero_shards}"] if self.zero_shards > 1 else []
        parts += ["offload"] if self.offload else []
        return "+".join(parts)

    @property
    def expert_ranks(self) -> int:
        """Over which experts are spread."""
        return self.degree if self.experts is None else self.experts

    def parts(self, split: Split) -> int:
        """By how many a figure of the tokens is divided."""
        return self.context * split.parts(self.degree, self.sequence_parallel)

    def parameter_parts(self, operator: Operator) -> int:
        """By how many an operator's parameters are divided."""
        if operator.routed:
            return self.expert_ranks * self.expert_tensor
        return operator.parameters_split.parts(self.degree, self.sequence_parallel)


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


def modes_of(kind: LayerKind, degree: int, zero_shards: int = 1, offload: bool = False) -> Iterator[Mode]:
    """Every mode of a kind at a degree, the plainest first. zero_shards above 1 and offload add modes."""
    for sequence_parallel in (False, True) if degree > 1 and _has_sequence(kind) else (False,):
        for recomputation in _recomputations(kind):
            for shards in (1, zero_shards) if zero_shards > 1 and kind.parameters else (1,):
                yield Mode(degree, sequence_parallel, recomputation, shards)
                if offload and kind.recomputable:
                    yield Mode(degree, sequence_parallel, recomputation, shards, offload=True)


def _recomputations(kind: LayerKind) -> tuple[Recomputation, ...]:
    if not kind.recomputable:
        return (Recomputation.NONE,)
    if any(operator.cheap for operator in kind.operators):
        return tuple(Recomputation)
    return (Recomputation.NONE, Recomputation.FULL)


def _has_sequence(kind: LayerKind) -> bool:
    return any(
        Split.SEQUENCE in (operator.split, *(saved.split for saved in operator.saved)) for operator in kind.operators
    )
