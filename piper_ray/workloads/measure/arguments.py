"""Arguments of a factory on the command line: ``--arg KEY=VALUE``."""

from __future__ import annotations

import ast

from piper_ray.model.errors import UsageError

PARAMETERS = {
    "memory": "memory_bytes",
    "arg": "arguments_of_model",
    "input": "inputs",
}
"""The parameters of functions that follow a user's model, by those of their commands' options that have another
name."""


def parse_argument(text: str) -> tuple[str, object]:
    """The name and the value of ``layers=12``. The value is a Python literal, or else text. Raises UsageError."""
    key, found, value = text.partition("=")
    if not found or not key.isidentifier():
        raise UsageError(f"--arg {text}: expected KEY=VALUE, such as layers=12")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value
