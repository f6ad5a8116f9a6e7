"""A Sphinx extension: the reference of the Python API comes from docstrings, with signatures and types."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pygments.lexers.shell import BashSessionLexer

from scripts.documentation.docstrings import as_rst
from scripts.documentation.generated import GENERATED, filled
from scripts.documentation.python_names import names_in_groups

if TYPE_CHECKING:
    from sphinx.application import Sphinx

# Commands begin with $ alone: # is the head of our tables.
_CONSOLE = type("PiperRayConsoleLexer", (BashSessionLexer,), {"_ps1rgx": re.compile(r"^(\$ )(.*\n?)")})


def setup(app: Sphinx) -> dict[str, bool]:
    """As Sphinx asks of an extension."""
    app.connect("source-read", _read)
    app.connect("autodoc-process-docstring", _docstring)
    app.connect("autodoc-process-signature", _signature)
    app.add_lexer("console", _CONSOLE)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _read(_app: object, page: str, source: list[str]) -> None:
    source[0] = filled(source[0], {**GENERATED, "names": names_in_groups})
    if page.startswith("decisions/0"):  # their README lists them; in the tree, each page's sidebar would have them all
        source[0] = f"---\norphan: true\n---\n{source[0]}"


def _signature(
    _app: object, _what: str, _name: str, _object: object, _options: object, shown: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    """Without defaults that nobody can read, such as <factory>: a signature with one is not broken into lines."""
    return None if shown is None else re.sub(r"<[^<>]*>", "...", shown), returned


def _docstring(_app: object, _what: str, _name: str, _object: object, _options: object, lines: list[str]) -> None:
    lines[:] = as_rst(lines)
