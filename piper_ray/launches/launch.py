"""A launch after reading: its settings, by the names that its runtime uses.

Also values that a file does not state: their placeholders, with the causes.

A text with unknown parts carries a mark for each of them, so that quoting, joining and splitting treat it like any
other text.

Also files that a launch file names, found next to it or in a folder above.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

_BEGIN, _END, _SHIFT = "\ue000", "\ue001", 0xE100  # of Unicode's private use area, which no file uses
_MARK = re.compile(f"{_BEGIN}([^{_BEGIN}{_END}]*){_END}")
_PLAIN = re.compile(r"[^\w]", re.ASCII)
_MOST_SHOWN = 60


def unseen(cause: str) -> str:
    """The mark of an unknown part. cause: its text in the file, such as the name of a variable.

    No character within a mark has a meaning in a shell.
    """
    shown = " ".join(readable(cause).split())[:_MOST_SHOWN]
    return f"{_BEGIN}{_PLAIN.sub(lambda one: chr(_SHIFT + min(ord(one[0]), 0xFF)), shown)}{_END}"


def causes(text: object) -> tuple[str, ...]:
    """The causes of the text's unknown parts; empty for a text that is known."""
    return tuple(map(_shown, _MARK.findall(text))) if isinstance(text, str) else ()


def readable(text: str) -> str:
    """The text with the causes in place of marks, for messages."""
    return _MARK.sub(lambda found: _shown(found[1]), text)


def after_unseen(text: str) -> str:
    """The text after the last unknown part."""
    return text.rpartition(_END)[2]


def is_wholly_unseen(text: str) -> bool:
    """Whether the whole text is unknown."""
    return bool(text) and not _MARK.sub("", text)


def _shown(marked: str) -> str:
    return "".join(chr(ord(one) - _SHIFT) if _SHIFT <= ord(one) <= _SHIFT + 0xFF else one for one in marked)


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


_MOST_ABOVE = 8
_MOST_BYTES = 4_000_000


def text_beside(name: str, beside: Path | None) -> tuple[Path | None, str | None]:
    """The path and the text of a file that a launch file names, in its own folder or in a folder above.

    Both are None for a launch without a file, and for a name that is empty or leads nowhere.
    """
    name = name.strip().lstrip("/")
    if beside is None or not name or len(name) > 500 or "\0" in name:
        return None, None
    folder = beside.resolve().parent
    for above in (folder, *folder.parents[:_MOST_ABOVE]):
        path = above / name
        try:
            if path.is_file() and path.stat().st_size <= _MOST_BYTES:
                return path, path.read_text(encoding="utf-8-sig")
        except (OSError, ValueError):
            return None, None
    return None, None
