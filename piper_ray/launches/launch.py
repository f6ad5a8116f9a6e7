"""A launch as it was read: what it sets, by the names that its runtime has for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path


class Dialect(Enum):
    """Whose names the settings have."""

    MEGATRON = "Megatron-LM"
    BRIDGE = "Megatron-Bridge"
    FLAGSCALE = "FlagScale"
    PRIMUS = "Primus"
    DEEPSPEED = "Megatron-DeepSpeed"
    TORCHTITAN = "torchtitan"


@dataclass(frozen=True)
class Asked:
    """Which launch of a file is meant. recipe: a function of it. number: of its commands, from 1. variables: as the
    environment has them."""

    recipe: str | None = None
    number: int | None = None
    variables: Mapping[str, str] = field(default_factory=dict)


THE_ONE = Asked()
"""The launch of a file that has one."""


@dataclass(frozen=True)
class Launch:
    """settings: torchtitan's by table, as in its configuration; all others' by name in Python
    (``tensor_model_parallel_size``). A text may have parts that cannot be seen (``unseen``).

    ranks: that it starts; None where it does not say. model: its name, where it says no more of it. notes: sentences.
    usual: settings that are its framework's usual ones, as its file of these says.
    """

    dialect: Dialect
    settings: Mapping[str, object]
    ranks: int | None = None
    model: str | None = None
    notes: tuple[str, ...] = ()
    usual: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Source:
    """The text of a launch, and the file that it stands in, if it is one."""

    text: str
    path: Path | None = None
