"""Schedules whose plans have one d and one t for all stages, and how many microbatches a stage holds under each."""

from __future__ import annotations

from enum import Enum


class FlushSchedule(str, Enum):
    """GPIPE: all forward passes, then all backward passes. ONE_F_ONE_B: 1F1B, PipeDream-Flush: a warm-up of forward
    passes, then a backward and a forward pass by turns, then the backward passes that are left. TWO_BW: Piper's own
    schedule, which never flushes; its plans may have one d and one t, too.
    """

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    TWO_BW = "2bw"

    @classmethod
    def flushed(cls) -> tuple[FlushSchedule, ...]:
        """Those that drain the pipeline after each batch."""
        return cls.GPIPE, cls.ONE_F_ONE_B

    def in_flight_microbatches(self, microbatches: int, stages_behind: int) -> int:
        """y: of how many of a replica's microbatches a stage holds the activations at once."""
        if self is FlushSchedule.TWO_BW:
            return stages_behind + 1
        return microbatches if self is FlushSchedule.GPIPE else min(microbatches, stages_behind + 1)
