"""How a layer runs apart from its degree: what its backward pass recomputes, in the words of the runtime; the other
parts of a TMPC's ``mode``; and the words of TMPC ids that state these in files."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import ClassVar

from piper_ray.model.errors import UsageError

_WHOLE = "full"
_SELECTIVE = "selective"

CHEAP = "cheap"
"""Norms and activation functions; also the attention core where no kernel fuses it. No runtime has a switch for
this."""

EVERY_SECOND_PRODUCT = "op"
"""torchtitan's SelectiveAC recomputes all but the results of attention, of exchanges and of every second matrix
product."""

MEGATRON_MODULES = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")
"""The values of ``--recompute-modules`` in Megatron-Core 0.16 and later, for models that are estimated here."""


@dataclass(frozen=True)
class Recomputation:
    """The parts of a layer that its backward pass recomputes; all other activations are kept.

    parts: sorted names; empty for a layer that keeps everything, ``("full",)`` for one that keeps only its inputs.

    >>> Recomputation.of("selective-mlp-layernorm").parts
    ('layernorm', 'mlp')
    >>> Recomputation.of("full") == Recomputation.FULL
    True
    """

    parts: tuple[str, ...] = ()

    NONE: ClassVar[Recomputation]
    SELECTIVE: ClassVar[Recomputation]
    FULL: ClassVar[Recomputation]

    @staticmethod
    def of(text: str) -> Recomputation:
        """The recomputation that an ``id`` names. Raises ValueError for any other text."""
        kind, *parts = text.split("-")
        if kind == _SELECTIVE:
            return Recomputation.of_parts(filter(None, parts)) if any(parts) else Recomputation.SELECTIVE
        if text == "none":
            return Recomputation.NONE
        if text == _WHOLE:
            return Recomputation.FULL
        raise ValueError(text)

    @staticmethod
    def of_parts(parts: Iterable[str]) -> Recomputation:
        """Selective recomputation of these parts; NONE if there are none."""
        return Recomputation(tuple(sorted(set(parts))))

    @property
    def id(self) -> str:
        """``none``, ``full``, ``selective``, or ``selective-layernorm-mlp``: a word of a TMPC's id."""
        if not self.parts:
            return "none"
        if self.parts == (_WHOLE,):
            return _WHOLE
        return "-".join([_SELECTIVE, *(part for part in self.parts if part != CHEAP)])

    @property
    def text(self) -> str:
        """Words for people: ``full recomputation``, ``recomputation of layernorm and mlp``."""
        if self.parts in ((), (_WHOLE,), (CHEAP,)):
            return f"{'no' if not self.parts else self.id} recomputation"
        *most, last = self.parts
        return f"recomputation of {', '.join(most)} and {last}" if most else f"recomputation of {last}"

    @property
    def selective(self) -> bool:
        """Whether some activations are recomputed and others kept."""
        return self not in (Recomputation.NONE, Recomputation.FULL)

    def within(self, other: Recomputation) -> bool:
        """Whether ``other`` recomputes all of these parts, under the same names."""
        return set(self.parts) <= set(other.parts)


Recomputation.NONE = Recomputation()
Recomputation.SELECTIVE = Recomputation((CHEAP,))
Recomputation.FULL = Recomputation((_WHOLE,))


def share_of(asked: Recomputation, known: Iterable[Recomputation]) -> Recomputation:
    """The part of a whole model's recomputation that applies to one layer: a layer without experts, for example, has no
    parts of experts to recompute. asked: the model's recomputation. known: those that the layer has."""
    had = [one for one in known if one.within(asked)]
    return max(had, key=lambda one: len(one.parts), default=asked)


def parse_recomputation(text: str) -> Recomputation:
    """``none``, ``full``, or names of parts separated by commas. Raises UsageError."""
    known = {"none": Recomputation.NONE, "full": Recomputation.FULL}
    if text in known:
        return known[text]
    parts, able = text.split(","), (*MEGATRON_MODULES, EVERY_SECOND_PRODUCT, CHEAP)
    unknown = [part for part in parts if part not in able]
    if unknown:
        raise UsageError(f"{unknown[0]!r}: expected none, full, or parts of a layer: {', '.join(able)}")
    return Recomputation.of_parts(parts)


class Sharding(IntEnum):
    """What replicas divide among them: nothing, the optimizer's state (ZeRO-1, Megatron's distributed optimizer),
    gradients too (ZeRO-2), or weights too (ZeRO-3, FSDP).

    >>> Sharding.GRADIENTS.text
    'optimizer state and gradients'
    """

    NONE = 0
    OPTIMIZER = 1
    GRADIENTS = 2
    WEIGHTS = 3

    @property
    def text(self) -> str:
        """Words for people: ``optimizer state and gradients``."""
        return _SHARED_TEXTS[self]


_SHARED_TEXTS = {
    Sharding.NONE: "nothing",
    Sharding.OPTIMIZER: "optimizer state",
    Sharding.GRADIENTS: "optimizer state and gradients",
    Sharding.WEIGHTS: "weights, gradients and optimizer state",
}

ALL_REPLICAS = 0
"""Stands for all replicas of a stage, whatever their number."""

_FLAGS = {"sp": "sequence_parallel", "gathered": "gathered", "offload": "offload"}
_NUMBERS = {"cp": "context", "ep": "experts", "etp": "expert_tensor"}
_SHARDINGS = {"zero": Sharding.OPTIMIZER, "zero2x": Sharding.GRADIENTS, "fsdp": Sharding.WEIGHTS}
_NUMBERED = re.compile(rf"({'|'.join((*_NUMBERS, *_SHARDINGS))})(\d{{1,9}})")
"""The words of an id and their meaning. Further words are the ``id`` of a recomputation, and ``zero`` for
ALL_REPLICAS."""

FOUND = "scheme-"
"""Beginning of an id's word for a scheme that was found from a layer's operators. That scheme states how the layer is
divided."""


def found_schemes(ids: Iterable[str]) -> list[str]:
    """The words of TMPC ids that name schemes which were found from layers' operators, each once."""
    return sorted({word for one in ids for word in one.split("+") if word.startswith(FOUND)})


OF_RUNTIMES = ("tensor parallelism", "tensor and sequence parallelism", "context parallelism, ring")
"""Names of schemes that modes describe completely, so that runtimes can run them."""

_ESTIMATED = "-estimated"
"""Suffix of an id's word in a measured TMPC whose figures were derived by division, not measured at that degree."""


@dataclass(frozen=True)
class Mode:
    """How a layer runs on the devices of a replica.

    optimizer_shards: replicas of the weights that divide what ``sharding`` names; 1 where they divide nothing,
    ALL_REPLICAS for all replicas of a stage. offload: activations wait in host memory. context: the number of groups
    that share a sequence's tokens; a replica has the devices of all groups. experts: ranks that experts are spread
    over, and
    expert_tensor: devices that share each expert; None: experts are spread over the t devices. gathered: the tensors
    that sequence parallelism gathers are kept whole.

    ``sharding`` is NONE exactly where ``optimizer_shards`` is 1; other values are converted to this form.

    >>> Mode(sequence_parallel=True, recomputation=Recomputation.FULL, optimizer_shards=8).id
    'sp+full+zero8'
    """

    recomputation: Recomputation = Recomputation.NONE
    sequence_parallel: bool = False
    optimizer_shards: int = 1
    offload: bool = False
    context: int = 1
    experts: int | None = None
    expert_tensor: int = 1
    sharding: Sharding = Sharding.OPTIMIZER
    gathered: bool = False

    def __post_init__(self) -> None:
        if self.optimizer_shards == 1:
            object.__setattr__(self, "sharding", Sharding.NONE)
        elif self.sharding is Sharding.NONE:
            object.__setattr__(self, "sharding", Sharding.OPTIMIZER)

    @property
    def spread(self) -> tuple[int | None, int]:
        """The number of ranks that experts are spread over, and the number of devices that share each."""
        return self.experts, self.expert_tensor

    @property
    def shares(self) -> tuple[Sharding, int]:
        """What replicas divide among them, and how many replicas do."""
        return self.sharding, self.optimizer_shards

    @property
    def id(self) -> str:
        """``plain``, ``sp+selective``, ``full+zero8+offload``: the id of a TMPC in this mode (``mode_of`` reads it)."""
        divided = ["sp"] * self.sequence_parallel + ["gathered"] * self.gathered
        divided += [f"cp{self.context}"] * (self.context > 1) + [f"ep{self.experts}"] * (self.experts is not None)
        divided += [f"etp{self.expert_tensor}"] * (self.expert_tensor > 1)
        divided += [self.recomputation.id] * (self.recomputation != Recomputation.NONE)
        shared = [
            f"{word}{self.optimizer_shards or ''}" for word, sharding in _SHARDINGS.items() if sharding is self.sharding
        ]
        return "+".join([*(divided or ["plain"]), *shared, *["offload"] * self.offload])

    @property
    def text(self) -> str:
        """Words for people: ``sequence parallelism, full recomputation``."""
        parts = ["sequence parallelism"] * self.sequence_parallel + ["gathered tensors kept"] * self.gathered
        parts += [f"context parallelism {self.context}"] * (self.context > 1)
        if self.experts is not None:
            each = f", {self.expert_tensor} GPUs each" if self.expert_tensor > 1 else ""
            parts.append(f"experts over {self.experts} ranks{each}")
        parts += [self.recomputation.text] * (self.recomputation != Recomputation.NONE)
        if self.sharding is not Sharding.NONE:
            count = f"{self.optimizer_shards} shards" if self.optimizer_shards else "as many shards as replicas"
            parts.append(f"{self.sharding.text} in {count}")
        parts += ["activations in host memory"] * self.offload
        return ", ".join(parts) or "nothing but the degrees"


@lru_cache(4096)
def mode_of(tmpc_id: str, recompute: bool) -> Mode:
    """The mode that an id's words name. The words are joined by +, as ``Mode.id`` writes them.

    Unknown words are ignored. recompute: whether the TMPC recomputes; if no word names the recomputed parts, it
    recomputes the whole layer.

    >>> mode_of("sp+zero8", recompute=False) == Mode(sequence_parallel=True, optimizer_shards=8)
    True
    """
    said: dict[str, object] = {"recomputation": Recomputation.FULL if recompute else Recomputation.NONE}
    for word in (word.removesuffix(_ESTIMATED) for word in tmpc_id.split("+")):
        if word in _FLAGS:
            said[_FLAGS[word]] = True
        elif word.partition("-")[0] == "selective":
            said["recomputation"] = Recomputation.of(word)
        elif word == "zero":
            said["optimizer_shards"] = ALL_REPLICAS
        elif match := _NUMBERED.fullmatch(word):
            name, number = match[1], max(1, int(match[2]))
            if name in _NUMBERS:
                said[_NUMBERS[name]] = number
            else:
                said |= {"optimizer_shards": number, "sharding": _SHARDINGS[name]}
    return Mode(**said)  # type: ignore[arg-type] # of the types that the tables' fields have
