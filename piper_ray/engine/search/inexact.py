"""Where figures differ by so much that sums over layers lose the small ones: nothing that is found can be relied on."""

from __future__ import annotations

from piper_ray.model.errors import LimitError


class Inexact(LimitError):
    """found: what shows it, in words."""

    def __init__(self, found: str) -> None:
        super().__init__(
            f"sums of the layers' figures are not exact enough: {found}. Leave out configurations that no plan can "
            "use, whose figures are a hundred million times as large as others' and more"
        )
