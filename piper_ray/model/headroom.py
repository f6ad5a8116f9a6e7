"""Memory that plans are to leave free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Headroom:
    """Memory of each GPU that is to be left free: so many bytes, and a share of what there is. is_usual: whether that
    is what published peaks ask for, as nobody has said how much."""

    size_bytes: float = 0.0
    share: float = 0.0
    is_usual: bool = False

    def __bool__(self) -> bool:
        return self.size_bytes > 0.0 or self.share > 0.0


NO_HEADROOM = Headroom()
"""Plans may use all there is."""
