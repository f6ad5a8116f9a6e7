"""Docstrings of piper_ray, which are plain text, as reStructuredText for autodoc."""

from __future__ import annotations

import re
from collections.abc import Sequence

_FIELD = re.compile(r"(?P<names>[a-z_]+(, [a-z_]+)*): (?P<text>\S.*)")
_CODE = re.compile(r"(``.+?``)")
_MARKUP = re.compile(r"([\\*|`]|_\b)")


def as_rst(lines: Sequence[str]) -> list[str]:
    """Arguments and fields (``name: what it is``) as a list, indented blocks as they are, nothing else as markup."""
    found: list[str] = []
    in_field = verbatim = False
    for line in lines:
        if line.startswith(">>>") or (verbatim and line.startswith(("...", "    "))):
            verbatim = True
        elif line.startswith("    "):
            if not verbatim:
                found += ["", "::", ""]
            verbatim = True
        elif not line.strip():
            in_field = False
        elif verbatim and found and found[-1].startswith((">>>", "...")):
            pass  # what an example prints
        else:
            if verbatim and found[-1]:
                found.append("")
            verbatim = False
            field = _FIELD.fullmatch(line)
            if field:
                if not in_field:
                    found.append("")
                names = ", ".join(f"**{name}**" for name in field["names"].split(", "))
                found.append(f"- {names}: {_escaped(field['text'])}")
                in_field = True
            else:
                found.append(f"{'  ' if in_field else ''}{_escaped(line)}")
            continue
        found.append(line)
    return [*found, ""]


def _escaped(text: str) -> str:
    pieces = _CODE.split(text)
    return "".join(piece if number % 2 else _MARKUP.sub(r"\\\1", piece) for number, piece in enumerate(pieces))
