"""Schedules: the order in which ranks run the passes of a batch. Also the terms of a step other than passes: the sum of
gradients over replicas, and the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from piper_ray.model import arguments
from piper_ray.model.errors import UsageError


class ScheduleName(str, Enum):
    """TWO_BW and PIPEDREAM never drain; all other schedules flush each batch.

    TWO_BW: asynchronous 1F1B with two versions of the weights (Narayanan et al., ICML 2021), Piper's model.
    PIPEDREAM: asynchronous 1F1B with a version of the weights for each microbatch in flight (Narayanan et al.,
    SOSP 2019). GPIPE: all forward passes, then all backward passes. ONE_F_ONE_B: PipeDream-Flush, DAPPLE.
    INTERLEAVED: several chunks of the model on each rank (Megatron-LM). LOOPED_BFS: breadth-first (Lamy-Poirier, 2023).
    ZB_H1, ZB_V: zero bubble (Qi et al., ICLR 2024), the latter with two chunks placed as a V. DUALPIPE_V: DeepSeek's.

    >>> ScheduleName("1f1b").value
    '1f1b'
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

FLUSHED = frozenset({ScheduleName.ONE_F_ONE_B, ScheduleName.GPIPE})
"""Schedules with one stage on each rank and a pipeline that drains after each batch."""

V_SHAPED = frozenset({ScheduleName.ZB_V, ScheduleName.DUALPIPE_V})
"""Schedules with two chunks on each rank: rank r of p holds stages r and 2p - 1 - r."""

CHUNKED = frozenset({ScheduleName.INTERLEAVED, ScheduleName.LOOPED_BFS, ScheduleName.ZB_H1}) | V_SHAPED
"""Schedules that can hold several chunks of the model on a rank."""

UNEVEN = ASYNCHRONOUS | {ScheduleName.GPIPE, ScheduleName.ONE_F_ONE_B}
"""Schedules whose stages may differ in their data-parallel degree: replicas take microbatches in turn."""

_OPEN_CHUNKS = frozenset({ScheduleName.INTERLEAVED, ScheduleName.LOOPED_BFS})
"""Schedules for which a search may choose the number of chunks, if none is given."""


@dataclass(frozen=True)
class Schedule:
    """A schedule's name and its settings. Raises UsageError for settings that make no sense.

    chunks: v, stages of the plan on each rank. None: 2 for interleaved, looped-bfs and the V-shaped, 1 for the others;
    searches under interleaved and looped-bfs then try other numbers too.

    group: microbatches that interleaved and zb-h1 run through one chunk before the next, at least the number of ranks;
    None: the least that the number of microbatches allows. ahead: forward passes of interleaved's warm-up on each rank
    in addition to the usual ones: 1 in Megatron where exchanges of experts overlap with passes of other microbatches.

    >>> Schedule(ScheduleName("interleaved"), chunks=4).v
    4
    """

    name: ScheduleName
    chunks: int | None = None
    group: int | None = None
    ahead: int = 0
    chunks_are_open: bool = field(default=False, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        name = arguments.choice("schedule", self.name, ScheduleName)
        usual = 2 if name in _OPEN_CHUNKS | V_SHAPED else 1
        chunks = usual if self.chunks is None else arguments.positive("chunks", self.chunks)
        if name in V_SHAPED and chunks != 2:
            raise UsageError(f"schedule {name.value} has two chunks on each rank, not {chunks}")
        if name not in CHUNKED and chunks != 1:
            able = ", ".join(sorted(other.value for other in CHUNKED))
            raise UsageError(f"schedule {name.value} has one stage on each rank; several chunks are for {able}")
        group = None if self.group is None else arguments.positive("group", self.group)
        if group is not None and name not in (ScheduleName.INTERLEAVED, ScheduleName.ZB_H1):
            raise UsageError(f"schedule {name.value} has no groups of microbatches; interleaved and zb-h1 have")
        (ahead,) = arguments.whole_numbers("ahead", [self.ahead])
        if ahead < 0 or (ahead and name is not ScheduleName.INTERLEAVED):
            raise UsageError(f"ahead must be 0, or more for interleaved, not {ahead} for {name.value}")
        are_open = self.chunks is None and name in _OPEN_CHUNKS
        for of, value in (
            ("name", name),
            ("chunks", chunks),
            ("group", group),
            ("ahead", ahead),
            ("chunks_are_open", are_open),
        ):
            object.__setattr__(self, of, value)

    @property
    def settled(self) -> Schedule:
        """The schedule with its usual number of chunks, if the number was open."""
        return Schedule(self.name, self.chunks, self.group, self.ahead) if self.chunks_are_open else self

    @property
    def v(self) -> int:
        """Chunks on each rank."""
        assert self.chunks is not None
        return self.chunks

    def stages_of_rank(self, rank: int, ranks: int) -> tuple[int, ...]:
        """The stages that rank ``rank`` of ``ranks`` holds, counted from 0, starting with the chunk nearest the
        input."""
        if self.name in V_SHAPED:
            return rank, 2 * ranks - 1 - rank
        return tuple(range(rank, self.v * ranks, ranks))

    @property
    def asynchronous(self) -> bool:
        """Whether the pipeline never drains: batches follow each other without a flush."""
        return self.name in ASYNCHRONOUS

    @property
    def text(self) -> str:
        """The schedule's name, and the number of chunks if a rank has several."""
        return self.name.value + (f", {self.v} chunks a rank" if self.v > 1 else "")

    @property
    def assumption(self) -> str:
        """The assumptions behind a plan's time, in one line for the reader of a plan."""
        return _ASSUMPTIONS[self.name]

    def to_dict(self) -> dict[str, object]:
        """The schedule in documents: ``schedule`` and ``chunks``, and ``group`` and ``ahead`` where they are not the
        usual ones."""
        group: dict[str, object] = {} if self.group is None else {"group": self.group}
        ahead = {"ahead": self.ahead} if self.ahead else {}
        return {"schedule": self.name.value, "chunks": self.v, **group, **ahead}

    @classmethod
    def first_of(cls, *given: Schedule | ScheduleName | str | None) -> Schedule:
        """The first of ``given`` that is not None, such as the caller's, the plan's, the instance's; Piper's if all
        are."""
        return cls.of(next((one for one in given if one is not None), PAPERS_SCHEDULE))

    @classmethod
    def of(cls, given: object) -> Schedule:
        """A schedule from a Schedule or a name, with the name's usual chunks. Raises UsageError for any other value."""
        if isinstance(given, Schedule):
            return given
        if not isinstance(given, str):
            raise UsageError(f"schedule must be a Schedule or the name of one, not {arguments.shown(given)}")
        return cls(ScheduleName(arguments.choice("schedule", given, ScheduleName)))


_ASSUMPTIONS: Mapping[ScheduleName, str] = {
    ScheduleName.TWO_BW: "the paper's model: 1F1B never drained, gradients a batch late",
    ScheduleName.PIPEDREAM: "asynchronous 1F1B with stashed weights",
    ScheduleName.GPIPE: "GPipe, drained after each batch; one d and one t",
    ScheduleName.ONE_F_ONE_B: "1F1B, drained after each batch; one d and one t",
    ScheduleName.INTERLEAVED: "interleaved 1F1B, drained after each batch; one d and one t",
    ScheduleName.LOOPED_BFS: "looped breadth-first, drained after each batch; one d and one t",
    ScheduleName.ZB_H1: "zero bubble, drained after each batch; one d and one t",
    ScheduleName.ZB_V: "zero bubble in a V, drained after each batch; one d and one t",
    ScheduleName.DUALPIPE_V: "DualPipe in a V, drained after each batch; one d and one t",
}

PAPERS_SCHEDULE = Schedule(ScheduleName.TWO_BW)
"""Piper's schedule, the default."""

TRAINED_TODAY = Schedule(ScheduleName.ONE_F_ONE_B)
"""The schedule of today's training, which estimated and measured workloads name."""


class AllReduce(str, Enum):
    """How gradients are summed over d replicas.

    Per byte of weights, 4 (d-1)/d bytes go through Piper's parameter servers, and 2 (d-1)/d around a ring.

    >>> StepTerms(all_reduce="ring").all_reduce
    <AllReduce.RING: 'ring'>
    """

    PARAMETER_SERVER = "parameter-server"
    RING = "ring"

    @property
    def factor(self) -> float:
        """The bytes that each of d replicas moves are this factor times (d - 1) / d times the bytes of gradients."""
        return 2.0 if self is AllReduce.RING else 4.0


@dataclass(frozen=True)
class StepTerms:
    """Terms of a step under a schedule that flushes. Raises UsageError for figures that make no sense.

    >>> StepTerms(all_reduce="ring", optimizer_s=0.02).all_reduce
    <AllReduce.RING: 'ring'>
    """

    all_reduce: AllReduce = AllReduce.PARAMETER_SERVER
    """How gradients are summed, after the last backward pass of each stage."""
    all_reduce_overlap: float = 0.0
    """The share of that time, from 0 to 1, that overlaps with backward passes."""
    optimizer_s: float = 0.0
    """The time of each rank's optimizer step, once a batch."""

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
    """A finite number of at least 0. Raises UsageError."""
    return arguments.number_from(name, value, 0.0, "a number of seconds, at least 0")
