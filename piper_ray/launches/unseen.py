"""Values that a file does not state: their placeholders, with the causes.

A text with unknown parts carries a mark for each of them, so that quoting, joining and splitting treat it like any
other text.
"""

from __future__ import annotations

import re

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
