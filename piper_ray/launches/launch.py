"""A launch after reading: its settings, by the names that its runtime uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path


class Dialect(Enum):
    """The runtime or framework whose names the settings have."""

    MEGATRON = "Megatron-LM"
    BRIDGE = "Megatron-Bridge"
    FLAGSCALE = "FlagScale"
    PRIMUS = "Primus"
    DEEPSPEED = "Megatron-DeepSpeed"
    TORCHTITAN = "torchtitan"


@dataclass(frozen=True)
class Asked:
    """Which of a file's launches to read. recipe: the name of a function. number: of the command, from 1. variables:
    the values of environment variables."""

    recipe: str | None = None
    number: int | None = None
    variables: Mapping[str, str] = field(default_factory=dict)


THE_ONE = Asked()
"""The only launch of a file."""


@dataclass(frozen=True)
class Launch:
    """settings: torchtitan's by table, as in its configuration; all others' by name in Python
    (``tensor_model_parallel_size``). A text may have unresolved parts (``unseen``).

    ranks: the number that it starts; None if it does not state it. model: its name, if the launch states nothing else
    about it. notes: sentences. usual: settings that are defaults from the framework's own file.
    """

    dialect: Dialect
    settings: Mapping[str, object]
    ranks: int | None = None
    model: str | None = None
    notes: tuple[str, ...] = ()
    usual: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Source:
    """The text of a launch, and its file if there is one."""

    text: str
    path: Path | None = None
