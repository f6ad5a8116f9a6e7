"""Whether a layout's text was understood: an option that was not would be taken for 1, or for not there, in silence."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from difflib import get_close_matches

from piper_ray.model.errors import UsageError
from piper_ray.model.figures import printable

_COMMENT = re.compile(r"(^|\s)#.*$", re.MULTILINE)
_KEY = re.compile(
    r"(?<![\w./$-])(?P<dashes>[-\u2013\u2014]{0,2})(?P<name>[A-Za-z][\w.-]*)"
    r"(?=(?P<between>['\"]?\s*[:=,]\s*|['\"]?[\s;|&()<>`]+|['\"]?$)['\"]?(?P<value>[^\s'\",;)\]}]*))"
)
"""An option and what follows it, in a command, YAML, TOML, JSON or Python."""

_DEGREES = frozenset({
    "parallel", "parallelism", "pipeline", "degree", "stages",
    "tp", "pp", "cp", "ep", "dp", "etp", "edp", "vp", "vpp", "mp",
})  # fmt: skip
"""Parts of a name that says how something is divided, where a number follows."""

_OLDER_RECOMPUTATION = ("activations_checkpoint", "checkpoint_activations", "checkpoint_num_layers")

_LONG = ("parallel", "pipeline")
_ALIKE = 0.85
"""Of difflib's ratio, from which on a name is a known one misspelt."""


def require_understood(text: str, read: Collection[str], known: Collection[str], harmless: Collection[str]) -> None:
    """Raises UsageError where the text has an option that says how a model is divided and that was not read.

    read: names of what was; known: of all that can be; harmless: further ones that decide nothing of a plan. All are
    names in Python (``tensor_model_parallel_size``).
    """
    values: dict[str, set[str]] = {}
    for shown, name, value in _options(_COMMENT.sub("", text)):
        if name in known:
            if name not in read:
                raise UsageError(f"layout: {shown} stands in a place where it is not read; {_EXPECTED}")
            values.setdefault(name, set()).add(value)
        elif name not in harmless and name not in read:
            if (meant := _misspelt(name, known)) is not None:
                written = meant if shown[0].isalpha() else "--" + meant.replace("_", "-")
                raise UsageError(f"layout: {shown} is not understood; did you mean {written}?")
            if _is_degree(name, value) or _recomputes(name, value):
                raise UsageError(f"layout: {shown} is not understood; {_EXPECTED}")
    for name, said in values.items():
        if len(said) > 1:
            raise UsageError(f"layout: {name} is said as {' and as '.join(sorted(said))}; expected one")


_EXPECTED = (
    "expected Megatron's arguments as one text or command, with nothing in quotes or variables, or torchtitan's, "
    "FlagScale's or Megatron-Bridge's configuration"
)


def _options(text: str) -> Iterator[tuple[str, str, str]]:
    """Each option as it stands, its name in Python without what it is a field of, and the first word that follows."""
    for match in _KEY.finditer(text):
        dashes, name, between, value = match["dashes"], match["name"], match["between"], match["value"]
        is_word = not dashes and not between.strip("'\" \t\n;|&()<>`")
        is_variable = not dashes and name.isupper()  # of the shell: where it is used, no number is found
        if not is_word and not is_variable:
            follows = value if value[:1].isalnum() else ""  # not the next option
            yield printable(dashes + name), name.rpartition(".")[2].strip("-").replace("-", "_"), follows


def _misspelt(name: str, known: Collection[str]) -> str | None:
    return next(iter(get_close_matches(name, known, 1, _ALIKE)), None)


def _recomputes(name: str, value: str) -> bool:
    """Whether it is one of the ways to ask for recomputation that Megatron and NeMo had before."""
    return name.startswith(_OLDER_RECOMPUTATION) and value.lower() not in ("null", "none", "false")


def _is_degree(name: str, value: str) -> bool:
    if not value[:1].isdigit():
        return False
    parts = name.lower().split("_")
    return any(part in _DEGREES or get_close_matches(part, _LONG, 1, _ALIKE) for part in parts)
