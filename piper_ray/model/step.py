"""What a training step takes beside the passes of its microbatches: gradients summed over replicas, the optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from piper_ray.model import arguments
from piper_ray.model.errors import UsageError


class AllReduce(str, Enum):
    """How gradients are summed over d replicas.

    For each byte of weights 4 (d-1)/d bytes go through Piper's parameter servers, 2 (d-1)/d around a ring.

    >>> StepTerms(all_reduce="ring").all_reduce
    <AllReduce.RING: 'ring'>
    """

    PARAMETER_SERVER = "parameter-server"
    RING = "ring"

    @property
    def factor(self) -> float:
        """Times (d - 1) / d of the gradients: the bytes that each of d replicas moves."""
        return 2.0 if self is AllReduce.RING else 4.0


@dataclass(frozen=True)
class StepTerms:
    """Terms of a step under a flush. Raises UsageError for figures that make no sense.

    all_reduce: how gradients are summed, once each stage has done its last backward pass. all_reduce_overlap: share of
    that time which hides beside backward passes, 0 to 1. optimizer_s: each rank's step of the optimizer, once a batch.

    >>> StepTerms(all_reduce="ring", optimizer_s=0.02).all_reduce
    <AllReduce.RING: 'ring'>
    """

    all_reduce: AllReduce = AllReduce.PARAMETER_SERVER
    all_reduce_overlap: float = 0.0
    optimizer_s: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "all_reduce", arguments.choice("all_reduce", self.all_reduce, AllReduce))
        object.__setattr__(self, "all_reduce_overlap", share("all_reduce_overlap", self.all_reduce_overlap))
        object.__setattr__(self, "optimizer_s", seconds("optimizer_s", self.optimizer_s))


def share(name: str, value: object) -> float:
    """A number from 0 to 1. Raises UsageError."""
    found = arguments.number(value)
    if found is None or not 0.0 <= found <= 1.0:
        raise UsageError(f"{name} must be from 0 to 1, not {arguments.shown(value)}")
    return found


def seconds(name: str, value: object) -> float:
    """A number, not negative and not infinite. Raises UsageError."""
    return arguments.number_from(name, value, 0.0, "a number of seconds, at least 0")
