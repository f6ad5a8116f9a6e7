"""Schedules with a flush: in which order a stage works through the microbatches of a batch."""

from __future__ import annotations

from enum import Enum


class FlushSchedule(str, Enum):
    """GPIPE: all forward passes, then all backward passes. ONE_F_ONE_B: 1F1B, PipeDream-Flush: a warm-up of forward
    passes, then a backward and a forward pass by turns, then the backward passes that are left.
    """

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"

    def in_flight_microbatches(self, microbatches: int, stages_behind: int) -> int:
        """y: of how many of a replica's microbatches a stage holds the activations at once."""
        return microbatches if self is FlushSchedule.GPIPE else min(microbatches, stages_behind + 1)
