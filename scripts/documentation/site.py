"""A Sphinx extension: pages of the reference are generated from the program while they are read.

A line ``<!-- generated: NAME -->`` of a page stands for Markdown that ``GENERATED`` makes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from pygments.lexers.shell import BashSessionLexer

from scripts.documentation.command_line import commands, environment, exit_codes
from scripts.documentation.docstrings import as_rst
from scripts.documentation.formats import dataset_columns, gpus, json_schemas, models, sweep_form, workload_form
from scripts.documentation.python_names import names_in_groups

if TYPE_CHECKING:
    from sphinx.application import Sphinx

GENERATED: Mapping[str, Callable[[], str]] = {
    "commands": commands,
    "environment": environment,
    "exit codes": exit_codes,
    "json schemas": json_schemas,
    "workload form": workload_form,
    "sweep form": sweep_form,
    "dataset columns": dataset_columns,
    "models": models,
    "gpus": gpus,
    "names": names_in_groups,
}

# Commands begin with $ alone: # is the head of our tables.
_CONSOLE = type("PiperRayConsoleLexer", (BashSessionLexer,), {"_ps1rgx": re.compile(r"^(\$ )(.*\n?)")})

_PLACE = re.compile(r"^<!-- generated: (?P<name>[a-z ]+) -->$", re.MULTILINE)


def filled(text: str) -> str:
    """A page's text with what is generated in its places. Raises KeyError for a name that nobody makes."""
    return _PLACE.sub(lambda match: GENERATED[match["name"]](), text)


def setup(app: Sphinx) -> dict[str, bool]:
    """As Sphinx asks of an extension."""
    app.connect("source-read", _read)
    app.connect("autodoc-process-docstring", _docstring)
    app.add_lexer("console", _CONSOLE)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _read(_app: object, _page: str, source: list[str]) -> None:
    source[0] = filled(source[0])


def _docstring(_app: object, _what: str, _name: str, _object: object, _options: object, lines: list[str]) -> None:
    lines[:] = as_rst(lines)
