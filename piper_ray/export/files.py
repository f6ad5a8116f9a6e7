"""The forms in which a plan can be written. An export consists of files by name, and of notes on what the form cannot
hold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from piper_ray.model.errors import UsageError
from piper_ray.storage.files import write_atomically

if TYPE_CHECKING:
    from jinja2 import Template


class Target(str, Enum):
    """The values of ``export --to``."""

    MEGATRON = "megatron"
    MEGATRON_BRIDGE = "megatron-bridge"
    TORCHTITAN = "torchtitan"
    TORCH = "torch"
    DEEPSPEED = "deepspeed"
    FLAGSCALE = "flagscale"
    YAML = "yaml"


RANKS = "ranks.csv"
"""The file that maps ranks, one line for each below the names of the columns."""


@dataclass(frozen=True)
class Export:
    """files: texts by file name. command: starts the training. notes: sentences on what the form cannot hold, and on
    assumptions. excess: a sentence on each rank that needs more memory than a device has; notes contain these too.
    usage: how to use the files, in Markdown for the README. beyond_bytes: memory of the runtime on a device of each
    pipeline rank in addition to the plan's figures; empty if unknown."""

    files: Mapping[str, str]
    command: str
    notes: tuple[str, ...]
    excess: tuple[str, ...] = ()
    usage: str = ""
    beyond_bytes: tuple[float, ...] = ()

    @property
    def missing_bytes(self) -> float:
        """The bytes to reserve on each device so that the launch fits; 0 if it fits, or if that would not help."""
        return max(self.beyond_bytes, default=0.0) if self.excess else 0.0

    def write(self, folder: Path) -> list[Path]:
        """Writes the files to the folder, and creates it if it does not exist. Raises UsageError if that fails."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{folder}: cannot be made a folder: {error.strerror}") from None
        written = []
        for name, text in self.files.items():
            write_atomically(folder / name, text)
            written.append(folder / name)
        return written


NO_FILES = Export({}, "", ())
"""The export of a plan that a runtime can run, if its files cannot express the model."""


def json_text(document: object) -> str:
    """The document as indented JSON that ends with a line break."""
    return json.dumps(document, indent=2) + "\n"


def yaml_text(document: object) -> str:
    """The document as YAML in its order, with short lists in a line."""
    import yaml  # --help lists the forms without it

    return str(yaml.safe_dump(document, sort_keys=False, default_flow_style=None, width=120))


def rendered(template: str, **values: object) -> str:
    """The text of an exported file, from its template next to this module."""
    return _template(template).render(**values)


@cache
def _template(name: str) -> Template:
    from jinja2 import Environment, StrictUndefined  # which --help does not need, either

    rules = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    return rules.from_string(resource(name))


def noted(template: str, **values: object) -> tuple[str, ...]:
    """Notes from a template with one line for each."""
    return tuple(rendered(template, **values).splitlines())


def resource(name: str) -> str:
    """The text of a template."""
    return files("piper_ray.export").joinpath("templates", name).read_text(encoding="utf-8")
