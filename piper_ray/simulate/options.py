"""Which schedule is simulated, and how transfers, all-reduces and the optimizer are counted: plain data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from piper_ray.model import arguments
from piper_ray.model.errors import UsageError


class ScheduleName(str, Enum):
    """TWO_BW and PIPEDREAM never drain; all others flush each batch.

    TWO_BW: asynchronous 1F1B with two versions of the weights (Narayanan et al., ICML 2021), Piper's model.
    PIPEDREAM: asynchronous 1F1B with a version of the weights for each microbatch in flight (Narayanan et al.,
    SOSP 2019). GPIPE: all forward passes, then all backward passes. ONE_F_ONE_B: PipeDream-Flush, DAPPLE.
    INTERLEAVED: several chunks of the model on each rank (Megatron-LM). LOOPED_BFS: breadth-first (Lamy-Poirier, 2023).
    ZB_H1, ZB_V: zero bubble (Qi et al., ICLR 2024), the latter with two chunks placed as a V. DUALPIPE_V: DeepSeek's.
    """

    TWO_BW = "2bw"
    PIPEDREAM = "pipedream"
    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    LOOPED_BFS = "looped-bfs"
    ZB_H1 = "zb-h1"
    ZB_V = "zb-v"
    DUALPIPE_V = "dualpipe-v"


ASYNCHRONOUS = frozenset({ScheduleName.TWO_BW, ScheduleName.PIPEDREAM})
"""Schedules whose pipeline never drains."""

V_SHAPED = frozenset({ScheduleName.ZB_V, ScheduleName.DUALPIPE_V})
"""Two chunks on each rank: rank r of p holds stages r and 2p - 1 - r."""

CHUNKED = frozenset({ScheduleName.INTERLEAVED, ScheduleName.LOOPED_BFS, ScheduleName.ZB_H1}) | V_SHAPED
"""Schedules that can hold several chunks of the model on a rank."""

UNEVEN = ASYNCHRONOUS | {ScheduleName.GPIPE, ScheduleName.ONE_F_ONE_B}
"""Schedules whose stages may differ in their data-parallel degree: microbatches go round-robin to the replicas."""

_DEFAULT_CHUNKS = {
    ScheduleName.INTERLEAVED: 2,
    ScheduleName.LOOPED_BFS: 2,
    ScheduleName.ZB_V: 2,
    ScheduleName.DUALPIPE_V: 2,
}


@dataclass(frozen=True)
class Schedule:
    """A schedule by name, and what it takes beside its name. Raises UsageError for what makes no sense.

    chunks: v, stages of the plan on each rank; None: 2 for interleaved, looped-bfs and the V-shaped, 1 for the others.
    group: microbatches that interleaved and zb-h1 run through one chunk before the next, at least the number of ranks;
    None: the least that the number of microbatches allows.
    """

    name: ScheduleName
    chunks: int | None = None
    group: int | None = None

    def __post_init__(self) -> None:
        name = arguments.choice("schedule", self.name, ScheduleName)
        chunks = _DEFAULT_CHUNKS.get(name, 1) if self.chunks is None else arguments.positive("chunks", self.chunks)
        if name in V_SHAPED and chunks != 2:
            raise UsageError(f"schedule {name.value} has two chunks on each rank, not {chunks}")
        if name not in CHUNKED and chunks != 1:
            able = ", ".join(sorted(other.value for other in CHUNKED))
            raise UsageError(f"schedule {name.value} has one stage on each rank; several chunks are for {able}")
        group = None if self.group is None else arguments.positive("group", self.group)
        if group is not None and name not in (ScheduleName.INTERLEAVED, ScheduleName.ZB_H1):
            raise UsageError(f"schedule {name.value} has no groups of microbatches; interleaved and zb-h1 have")
        for field, value in (("name", name), ("chunks", chunks), ("group", group)):
            object.__setattr__(self, field, value)

    @property
    def v(self) -> int:
        """Chunks on each rank."""
        assert self.chunks is not None
        return self.chunks

    @property
    def asynchronous(self) -> bool:
        return self.name in ASYNCHRONOUS


class AllReduce(str, Enum):
    """How gradients are summed over d replicas.

    For each byte of weights 4 (d-1)/d bytes go through Piper's parameter servers, 2 (d-1)/d around a ring.
    """

    PARAMETER_SERVER = "parameter-server"
    RING = "ring"

    @property
    def factor(self) -> float:
        return 2.0 if self is AllReduce.RING else 4.0


class InFlightRule(str, Enum):
    """How many microbatches a replica of a 1F1B schedule keeps in flight. RULE: y = ceil(s / d), as plans count memory.
    SUSTAINING: the least that let an asynchronous schedule run at the rate of its slowest stage.
    """

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
