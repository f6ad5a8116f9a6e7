"""What a layer computes again in its backward pass, in the words of the runtime that does it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from piper_ray.model.errors import UsageError

_WHOLE = "full"
_SELECTIVE = "selective"

CHEAP = "cheap"
"""Norms and activation functions; the attention core where no kernel fuses it. No runtime has a switch for this."""

EVERY_SECOND_PRODUCT = "op"
"""torchtitan's SelectiveAC: all but the results of attention, of exchanges and of every second matrix product."""

MEGATRON_MODULES = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")
"""What ``--recompute-modules`` of Megatron-Core 0.16 and later takes, for models that are estimated here."""


@dataclass(frozen=True)
class Recomputation:
    """The parts of a layer that its backward pass computes again; all other activations are kept.

    parts: sorted names; none for a layer that keeps everything, ``("full",)`` for one that keeps its inputs alone.

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
        """The recomputation that ``id`` names. Raises ValueError for a text that names none."""
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
        """Selective recomputation of these parts; NONE without any."""
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
        """For people: ``full recomputation``, ``recomputation of layernorm and mlp``."""
        if self.parts in ((), (_WHOLE,), (CHEAP,)):
            return f"{'no' if not self.parts else self.id} recomputation"
        *most, last = self.parts
        return f"recomputation of {', '.join(most)} and {last}" if most else f"recomputation of {last}"

    @property
    def selective(self) -> bool:
        """Whether some activations are computed again and others kept."""
        return self not in (Recomputation.NONE, Recomputation.FULL)

    def within(self, other: Recomputation) -> bool:
        """Whether the other computes all of these parts again, under the same names."""
        return set(self.parts) <= set(other.parts)


Recomputation.NONE = Recomputation()
Recomputation.SELECTIVE = Recomputation((CHEAP,))
Recomputation.FULL = Recomputation((_WHOLE,))


def share_of(asked: Recomputation, known: Iterable[Recomputation]) -> Recomputation:
    """Of what is asked of a whole model, what a layer does that knows these: one without experts has none of theirs."""
    had = [one for one in known if one.within(asked)]
    return max(had, key=lambda one: len(one.parts), default=asked)


def parse_recomputation(text: str) -> Recomputation:
    """``none``, ``full``, or names of parts with commas between. Raises UsageError."""
    known = {"none": Recomputation.NONE, "full": Recomputation.FULL}
    if text in known:
        return known[text]
    parts, able = text.split(","), (*MEGATRON_MODULES, EVERY_SECOND_PRODUCT, CHEAP)
    unknown = [part for part in parts if part not in able]
    if unknown:
        raise UsageError(f"{unknown[0]!r}: expected none, full, or parts of a layer: {', '.join(able)}")
    return Recomputation.of_parts(parts)
