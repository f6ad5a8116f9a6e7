"""What an export is: files by name, and what the form could not hold."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from piper_ray.model.errors import UsageError
from piper_ray.storage.files import write_atomically


@dataclass(frozen=True)
class Export:
    """files: texts by file name. command: what starts the training. notes: what the form could not hold, and what was
    assumed, a sentence each. excess: of each rank that needs more memory than a device has, which notes tell too.
    usage: how the files are used, Markdown for the README. beyond_bytes: what the runtime holds on a device of each
    pipeline rank beyond the plan's figures; empty where nothing is known of it."""

    files: Mapping[str, str]
    command: str
    notes: tuple[str, ...]
    excess: tuple[str, ...] = ()
    usage: str = ""
    beyond_bytes: tuple[float, ...] = ()

    def write(self, folder: Path) -> list[Path]:
        """Into the folder, which is made if need be. Raises UsageError where that cannot be."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{folder}: cannot be made a folder: {error.strerror}") from None
        written = []
        for name, text in self.files.items():
            write_atomically(folder / name, text)
            written.append(folder / name)
        return written


def json_text(document: object) -> str:
    """Indented, with a line's end."""
    return json.dumps(document, indent=2) + "\n"


def yaml_text(document: object) -> str:
    """In the document's order, short lists in a line."""
    return str(yaml.safe_dump(document, sort_keys=False, default_flow_style=None, width=120))


def shell_lines(words: Sequence[str]) -> str:
    """A command over several lines."""
    return " \\\n  ".join(words) + "\n"
