"""Packages that only some commands need: what brings them."""

from __future__ import annotations

from importlib.util import find_spec

from piper_ray.model.errors import UsageError

EXTRAS = {"ray": "ray", "matplotlib": "plot", "pygraphviz": "plot", "torch": "torch"}
"""By a package's module, which of our extras brings it."""


def require(module: str, what: str) -> None:
    """Raises UsageError if the package is not installed. what: needs it, in words."""
    if find_spec(module) is None:
        raise UsageError(f"{what} needs {module}, which is not installed: {_how(module)}")


def advice(error: ModuleNotFoundError) -> UsageError | None:
    """What the user is told; None if no extra brings what is missing."""
    module = (error.name or "").partition(".")[0]
    if module not in EXTRAS or find_spec(module) is not None:
        return None
    return UsageError(f"this needs {module}, which is not installed: {_how(module)}")


def _how(module: str) -> str:
    return f"pip install 'piper-ray[{EXTRAS[module]}]'"
