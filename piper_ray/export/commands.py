"""The words of a launch command or script, where all of its options can be seen in it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterator, Sequence

from piper_ray.model.errors import UsageError
from piper_ray.model.figures import printable

_EXPANSION = re.compile(r"(\$(?P<plain>\w+)|\$\{(?P<braced>\w+)[^}]*\}|\$[@*]|\$\(.*|`.*)")
"""A word that stands for other words."""

_ASSIGNED = re.compile(r"(?:^|[\s;])(\w+)\+?=")
_LIST = re.compile(r"^\w+\+?=\(")
_OF_OPTIONS = re.compile(r"ARG|OPT|FLAG|PARAM|CONF|EXTRA|OVERRIDE", re.IGNORECASE)
_SEPARATORS = frozenset({"|", "||", "|&", "&&", "&", ";"})
_OTHER_FILES = ("--yaml-cfg", "--use-mp-args-from-checkpoint-args")
_STARTED = re.compile(r"--(?P<name>nproc[_-]per[_-]node|nnodes)(?:=|\s+)['\"]?(?P<count>\d+)(?![\w:.])")


def command_words(text: str, source: str, switches: Collection[str]) -> list[str]:
    """Raises UsageError where quotes do not close, and where options are elsewhere: in a variable that the text does
    not set, in what a command prints, in another file.

    source: what the text is, in words. switches: options that no value follows.
    """
    try:
        words = list(_of_training(shlex.split(text, comments=True)))
    except ValueError as error:
        raise UsageError(f"{source}: {error}") from None
    hidden = next(_hidden(words, frozenset(_ASSIGNED.findall(text)), switches), None)
    if hidden is not None:
        raise UsageError(
            f"{source}: what stands behind {printable(hidden)} cannot be seen here; expected the options themselves"
        )
    return [bare for word in words if (bare := _bare(word))]


def ranks_started(text: str) -> int | None:
    """As torchrun is told; None where it is not, or not with numbers."""
    said = {match["name"][:5]: int(match["count"]) for match in _STARTED.finditer(text)}
    return said["nproc"] * said["nnode"] if len(said) == len({"nproc", "nnode"}) else None


def _of_training(words: Sequence[str]) -> Iterator[str]:
    """Without commands that stand beside or behind the training's own."""
    beside = False
    for word in words:
        if word in _SEPARATORS or word.startswith((">", "2>", "&>")):
            beside = True
        elif word.endswith(".py") or "=(" in word:
            beside = False
        if not beside:
            yield word
        beside = beside or word.endswith(";")


def _bare(word: str) -> str:
    """Without what begins or ends a list, or ends a command."""
    word = _LIST.sub("", word)
    return word if "(" in word else word.rstrip(";)")


def _hidden(words: Sequence[str], assigned: Collection[str], switches: Collection[str]) -> Iterator[str]:
    """Words of the training script, and of lists that are set for it, that stand for others which are not there."""
    of_script = not any(word.endswith(".py") for word in words)
    before = ""
    for word in words:
        of_script = of_script or word.endswith(".py") or "=(" in word
        expansion = _EXPANSION.fullmatch(_bare(word))
        if of_script and word.startswith(_OTHER_FILES):
            yield word
        elif of_script and expansion is not None:
            name = expansion["plain"] or expansion["braced"]
            is_value = before.startswith("--") and "=" not in before and before not in switches
            named_value = name is not None and not _OF_OPTIONS.search(name)
            if name not in assigned and not (is_value and named_value):
                yield _bare(word)
        before = word
