"""How transfers, all-reduces and the optimizer are counted: plain data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from piper_ray.model import arguments
from piper_ray.model.errors import UsageError


class AllReduce(str, Enum):
    """How gradients are summed over d replicas.

    For each byte of weights 4 (d-1)/d bytes go through Piper's parameter servers, 2 (d-1)/d around a ring.
    """

    PARAMETER_SERVER = "parameter-server"
    RING = "ring"

    @property
    def factor(self) -> float:
        """Times (d - 1) / d of the gradients: the bytes that each of d replicas moves."""
        return 2.0 if self is AllReduce.RING else 4.0


class InFlightRule(str, Enum):
    """How many microbatches a replica of a 1F1B schedule keeps in flight. RULE: y = ceil(s / d), as plans count memory.
    SUSTAINING: the least that let an asynchronous schedule run at the rate of its slowest stage."""

    RULE = "rule"
    SUSTAINING = "sustaining"


@dataclass(frozen=True)
class SimulationOptions:
    """What a simulation assumes of a cluster and a batch. Raises UsageError for figures that make no sense.

    latency_s: between the end of a pass and the arrival of what it sends, beside the bytes.
    overlap_transfers: transfers run beside the passes, one after the other on each rank's way out, and only who waits
    for them loses time; False: as Piper charges them, in the passes of both stages.
    all_reduce: how gradients are summed. all_reduce_overlap: share of a rank's last backward pass beside which its
    all-reduce already runs, 0 to 1.
    optimizer_s: each rank's step of the optimizer, once a batch.
    in_flight: an ``InFlightRule``, or for each stage the microbatches that a replica keeps in flight.
    samples_per_microbatch, tokens_per_sample: of the batch, for samples/s and tokens/s.
    """

    latency_s: float = 0.0
    overlap_transfers: bool = False
    all_reduce: AllReduce = AllReduce.PARAMETER_SERVER
    all_reduce_overlap: float = 0.0
    optimizer_s: float = 0.0
    in_flight: InFlightRule | tuple[int, ...] = InFlightRule.RULE
    samples_per_microbatch: int = 1
    tokens_per_sample: int | None = None

    def __post_init__(self) -> None:
        found: dict[str, object] = {
            "latency_s": _seconds("latency_s", self.latency_s),
            "optimizer_s": _seconds("optimizer_s", self.optimizer_s),
            "overlap_transfers": arguments.flag("overlap_transfers", self.overlap_transfers),
            "all_reduce": arguments.choice("all_reduce", self.all_reduce, AllReduce),
            "samples_per_microbatch": arguments.positive("samples_per_microbatch", self.samples_per_microbatch),
        }
        overlap = arguments.number(self.all_reduce_overlap)
        if overlap is None or not 0.0 <= overlap <= 1.0:
            raise UsageError(f"all_reduce_overlap must be from 0 to 1, not {arguments.shown(self.all_reduce_overlap)}")
        found["all_reduce_overlap"] = overlap
        if self.tokens_per_sample is not None:
            found["tokens_per_sample"] = arguments.positive("tokens_per_sample", self.tokens_per_sample)
        if isinstance(self.in_flight, str):
            found["in_flight"] = arguments.choice("in_flight", self.in_flight, InFlightRule)
        else:
            kept = arguments.whole_numbers("in_flight", self.in_flight)
            if any(y < 1 for y in kept):
                raise UsageError(f"in_flight must be at least 1 for each stage, not {arguments.shown(self.in_flight)}")
            found["in_flight"] = kept
        for name, value in found.items():
            object.__setattr__(self, name, value)


def _seconds(name: str, value: object) -> float:
    found = arguments.number(value)
    if found is None or not (math.isfinite(found) and found >= 0.0):
        raise UsageError(f"{name} must be a number of seconds, at least 0, not {arguments.shown(value)}")
    return found
