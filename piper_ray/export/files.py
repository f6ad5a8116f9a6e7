"""The forms that a plan can be written in, and what an export is: files by name, and what the form could not hold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from importlib.resources import files
from pathlib import Path

from piper_ray.model.errors import UsageError
from piper_ray.storage.files import write_atomically


class Target(str, Enum):
    """The targets as ``export --to`` knows them."""

    MEGATRON = "megatron"
    MEGATRON_BRIDGE = "megatron-bridge"
    TORCHTITAN = "torchtitan"
    TORCH = "torch"
    DEEPSPEED = "deepspeed"
    FLAGSCALE = "flagscale"
    YAML = "yaml"


RANKS = "ranks.csv"
"""The file that says which rank is which, a line for each below the columns' names."""


@dataclass(frozen=True)
class Export:
    """files: texts by file name. command: what starts the training. notes: what the form could not hold, and what was
    assumed, a sentence each. excess: a sentence on each rank that needs more memory than a device has; notes tell it
    too. usage: how the files are used, Markdown for the README. beyond_bytes: what the runtime holds on a device of
    each pipeline rank beyond the plan's figures; empty where nothing is known of it."""

    files: Mapping[str, str]
    command: str
    notes: tuple[str, ...]
    excess: tuple[str, ...] = ()
    usage: str = ""
    beyond_bytes: tuple[float, ...] = ()

    @property
    def missing_bytes(self) -> float:
        """The bytes to set aside of each device so that the launch fits; 0 where it does, or where that is not why."""
        return max(self.beyond_bytes, default=0.0) if self.excess else 0.0

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


NO_FILES = Export({}, "none", ())
"""Where a runtime can run a plan, and its files cannot say the model."""


def json_text(document: object) -> str:
    """Indented, with a line's end."""
    return json.dumps(document, indent=2) + "\n"


def yaml_text(document: object) -> str:
    """The document as YAML in its order, with short lists in a line."""
    import yaml  # what --help shows of the forms does not need it

    return str(yaml.safe_dump(document, sort_keys=False, default_flow_style=None, width=120))


def rendered(template: str, **values: object) -> str:
    """The text of a file that is exported, from its template beside this module."""
    from jinja2 import Environment, StrictUndefined  # which --help does not need, either

    rules = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    return rules.from_string(resource(template)).render(**values)


def noted(template: str, **values: object) -> tuple[str, ...]:
    """Notes, from a template with a line for each."""
    return tuple(rendered(template, **values).splitlines())


def resource(name: str) -> str:
    """A text among the templates."""
    return files("piper_ray.export").joinpath("templates", name).read_text(encoding="utf-8")
