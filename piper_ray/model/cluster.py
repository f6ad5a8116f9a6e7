"""What a workload runs on: equal devices, their memory, and the links between them.

What moving bytes between replicas and between stages takes is asked here, by all but the referee and the paper's own
table, which have formulas of their own. Source: Piper, section 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from piper_ray.model.plain import as_tuple, convert_fields, count, rate, size

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


Bytes = TypeVar("Bytes", float, "npt.NDArray[np.float64]")
"""One figure, or an array of them; so are the seconds that they take."""


@dataclass(frozen=True)
class Link:
    """What each device has to the others of its group.

    bandwidth_bytes_per_s: what goes out and what comes in, together. devices: in a group (of a node, say); None: all.

    >>> Link("900GB/s", devices=8).transfer_s(9e9)
    0.01
    """

    bandwidth_bytes_per_s: float
    devices: int | None = None

    def __post_init__(self) -> None:
        convert_fields(self, rate, "bandwidth_bytes_per_s")
        convert_fields(self, count, "devices")

    def transfer_s(self, size_bytes: Bytes) -> Bytes:
        """Bytes that a device sends or receives."""
        return size_bytes / self.bandwidth_bytes_per_s

    def resync_s(self, weights_bytes: Bytes, microbatches: int) -> Bytes:
        """4 w / (N B): what synchronising weights over many replicas takes once a batch, for each of its microbatches.

        d replicas take the (d - 1) / d th part. PipeDream's parameter server: each sends and receives twice.
        """
        return 4.0 * weights_bytes / (microbatches * self.bandwidth_bytes_per_s)


@dataclass(frozen=True)
class Cluster:
    """devices: K. memory_bytes: M, of each. links: the smallest groups first (within a node, then between nodes); the
    last one joins all devices.

    The paper's model knows one link: a stage may be anywhere, so every transfer is charged at the last one.

    >>> Cluster(16, "80GB", (Link("900GB/s", 8), Link("50GB/s"))).bandwidth_bytes_per_s
    50000000000.0
    """

    devices: int
    memory_bytes: float
    links: tuple[Link, ...]

    def __post_init__(self) -> None:
        convert_fields(self, count, "devices")
        convert_fields(self, size, "memory_bytes")
        convert_fields(self, as_tuple, "links")

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """B, at which transfers between stages and replicas are charged."""
        return self.links[-1].bandwidth_bytes_per_s

    def transfer_s(self, size_bytes: Bytes) -> Bytes:
        """Bytes that a device sends to or receives from another stage."""
        return self.links[-1].transfer_s(size_bytes)

    def resync_s(self, weights_bytes: Bytes, microbatches: int) -> Bytes:
        """Synchronising weights over many replicas once a batch, for each of its microbatches; d replicas take the
        (d - 1) / d th part."""
        return self.links[-1].resync_s(weights_bytes, microbatches)

    def changed(self, figures: Mapping[str, object]) -> Cluster:
        """With those of devices, memory_bytes and bandwidth_bytes_per_s that are given; one link takes the place of all
        where another bandwidth is."""
        own = {name: figures[name] for name in ("devices", "memory_bytes") if name in figures}
        changed = replace(self, **own) if own else self  # type: ignore[arg-type]
        if figures.get("bandwidth_bytes_per_s", self.bandwidth_bytes_per_s) != self.bandwidth_bytes_per_s:
            changed = replace(changed, links=(Link(figures["bandwidth_bytes_per_s"]),))  # type: ignore[arg-type]
        return changed
