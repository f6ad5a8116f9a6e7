"""Shapes of pipelines with chunks: how many ranks, chunks and microbatches, and the event graph that follows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from piper_ray.engine.kernels.chunk_program import ChunkProgram, build_program
from piper_ray.engine.lattice.bits import offsets
from piper_ray.model.errors import UsageError
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.simulate.actions import check_shape, flush_lists, stage_of_chunk


@dataclass(frozen=True)
class PipelineShape:
    """All that the order of passes depends on. ranks: p. microbatches: m, of a replica."""

    schedule: Schedule
    ranks: int
    microbatches: int

    @property
    def chunks(self) -> int:
        """Of a rank: v."""
        return self.schedule.v

    @property
    def stages(self) -> int:
        """Of the plan: a stage is a chunk."""
        return self.ranks * self.chunks

    @property
    def runs(self) -> bool:
        """Whether the schedule can run so many microbatches on so many ranks."""
        try:
            check_shape(self.schedule, self.ranks, self.microbatches)
        except UsageError:
            return False
        return True

    @property
    def about_in_flight(self) -> float:
        """Microbatches whose activations the fullest rank holds, as of all its chunks together, if chunks are equal."""
        p, v, m = self.ranks, self.chunks, self.microbatches
        if self.schedule.name is ScheduleName.LOOPED_BFS:
            return m
        return min(m, p + (p - 1) / v if self.schedule.name is ScheduleName.INTERLEAVED else p)

    @property
    def about_fill(self) -> float:
        """Microbatches that could have run on a rank while the pipeline fills and drains, if chunks are equal."""
        return (self.ranks - 1) / self.chunks

    def program(self) -> ChunkProgram | None:
        """None if the ranks would wait for each other for ever."""
        lists = flush_lists(self.schedule, self.ranks, self.microbatches)
        stage_of = np.array(
            [
                [stage_of_chunk(self.schedule, self.ranks, rank, chunk) for chunk in range(self.chunks)]
                for rank in range(self.ranks)
            ],
            np.int64,
        )
        whole, program = build_program(
            self.microbatches, np.concatenate(lists).astype(np.int64), offsets(len(x) for x in lists), stage_of
        )
        return program if whole else None
