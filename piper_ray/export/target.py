"""The names of the forms that a plan can be written in, and of a file that all have."""

from __future__ import annotations

from enum import Enum


class Target(str, Enum):
    """As ``export --to`` knows them."""

    MEGATRON = "megatron"
    MEGATRON_BRIDGE = "megatron-bridge"
    TORCHTITAN = "torchtitan"
    TORCH = "torch"
    DEEPSPEED = "deepspeed"
    FLAGSCALE = "flagscale"
    YAML = "yaml"


RANKS = "ranks.csv"
"""Which rank is which, a line for each below the columns' names."""
