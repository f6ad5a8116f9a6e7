"""Schedules with a flush whose ranks hold several chunks of the model, or split the backward pass, and their shapes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class ChunkSchedule(str, Enum):
    """INTERLEAVED: v chunks on each rank in groups of microbatches (Megatron-LM). LOOPED_BFS: breadth-first
    (Lamy-Poirier, 2023). ZB_H1, ZB_V: zero bubble (Qi et al., ICLR 2024), the latter with two chunks placed as a V.
    DUALPIPE_V: DeepSeek's, in a V.
    """

    INTERLEAVED = "interleaved"
    LOOPED_BFS = "looped-bfs"
    ZB_H1 = "zb-h1"
    ZB_V = "zb-v"
    DUALPIPE_V = "dualpipe-v"

    @property
    def code(self) -> int:
        """As kernels know it."""
        return tuple(ChunkSchedule).index(self)

    @property
    def v_shaped(self) -> bool:
        """Rank r of p holds chunks r and 2p - 1 - r; otherwise r, r + p, r + 2p and so on."""
        return self in (ChunkSchedule.ZB_V, ChunkSchedule.DUALPIPE_V)

    @property
    def grouped(self) -> bool:
        """Whether groups of microbatches go through one chunk of a rank before the next."""
        return self in (ChunkSchedule.INTERLEAVED, ChunkSchedule.ZB_H1)


@dataclass(frozen=True)
class PipelineShape:
    """All that the order of passes depends on. ranks: p. chunks: v, on each rank. microbatches: m, of a replica.

    group: microbatches that go through one chunk of a rank before the next; 0 where the schedule has none.
    """

    schedule: ChunkSchedule
    ranks: int
    chunks: int
    microbatches: int
    group: int

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks

    @property
    def passes(self) -> int:
        """About how many a batch has, with the backward pass in two."""
        return 3 * self.stages * self.microbatches


def pipeline_shape(
    schedule: ChunkSchedule, ranks: int, chunks: int, microbatches: int, group: int | None = None
) -> PipelineShape | None:
    """None if the schedule cannot run so. group: None for the least that suits."""
    if schedule is ChunkSchedule.DUALPIPE_V and microbatches < 2 * ranks:
        return None
    if not schedule.grouped:
        return None if group is not None else PipelineShape(schedule, ranks, chunks, microbatches, 0)
    found = _least_group(ranks, microbatches) if group is None else group
    if not _suits(found, ranks, microbatches):
        return None
    return PipelineShape(schedule, ranks, chunks, microbatches, min(found, microbatches))


def _least_group(ranks: int, microbatches: int) -> int:
    sizes = range(min(ranks, microbatches), microbatches + 1)
    return next(group for group in sizes if _suits(group, ranks, microbatches))


def _suits(group: int, ranks: int, microbatches: int) -> bool:
    """Megatron's rule: a group has at least as many microbatches as ranks, and so has the last, or none is left."""
    if group >= microbatches:
        return True
    return group >= ranks and (microbatches % group == 0 or microbatches % group >= ranks)
