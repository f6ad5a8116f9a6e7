"""Memory that plans leave free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Headroom:
    """Memory of each GPU that plans leave free: ``size_bytes`` and a ``share`` of the GPU's memory. is_usual: the user
    stated no headroom, and this is the usual one, from published peaks."""

    size_bytes: float = 0.0
    share: float = 0.0
    is_usual: bool = False

    def __bool__(self) -> bool:
        return self.size_bytes > 0.0 or self.share > 0.0


NO_HEADROOM = Headroom()
"""Plans may use all memory."""
