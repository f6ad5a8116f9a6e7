"""Checkpoints of a solve: what it finds is stored, so that a later solve of the same input can continue from it."""

from piper_ray.engine.checkpoint.checkpoint import Checkpoint
from piper_ray.engine.checkpoint.identity import Identity

__all__ = ["Checkpoint", "Identity"]
