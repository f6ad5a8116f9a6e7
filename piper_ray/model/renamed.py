"""Old names of fields, readable for one version."""

from __future__ import annotations

import warnings


def renamed(old: str, new: str) -> property:
    """A property ``old`` that gives the field ``new`` with a DeprecationWarning."""

    def read(instance: object) -> object:
        warnings.warn(f"{type(instance).__name__}.{old} is now {new}", DeprecationWarning, stacklevel=2)
        return getattr(instance, new)

    return property(read, doc=f"The old name of ``{new}``.")
