"""The parts of the reference that are generated from the program.

They stand in the pages, which can be read as files, between a line ``<!-- generated: NAME -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from scripts.documentation.build import ROOT
from scripts.documentation.command_line import commands, environment, exit_codes
from scripts.documentation.formats import dataset_columns, gpus, json_schemas, models, sweep_form, workload_form
from scripts.documentation.python_names import names_with_meaning

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
    "names": names_with_meaning,
}

_PLACE = re.compile(r"^<!-- generated: (?P<name>[a-z ]+) -->\n.*?^<!-- end -->$", re.MULTILINE | re.DOTALL)


def filled(text: str, makers: Mapping[str, Callable[[], str]] = GENERATED) -> str:
    """A page's text with the generated parts filled in. Raises KeyError for an unknown name."""

    def place(match: re.Match[str]) -> str:
        name = match["name"]
        return f"<!-- generated: {name} -->\n\n{makers[name]().strip()}\n\n<!-- end -->"

    return _PLACE.sub(place, text)


def outdated() -> Iterator[tuple[Path, str]]:
    """The pages of docs/ that are outdated, with the text that each should have."""
    for page in sorted((ROOT / "docs").rglob("*.md")):
        text = page.read_text("utf-8")
        if (expected := filled(text)) != text:
            yield page, expected


def update() -> None:
    """Writes the outdated pages."""
    for page, text in list(outdated()):
        page.write_text(text, encoding="utf-8")
