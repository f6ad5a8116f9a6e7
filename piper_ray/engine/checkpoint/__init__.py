"""Checkpoints of a solve: what is found is kept where a later solve of the same input takes it up."""

from piper_ray.engine.checkpoint.checkpoint import Checkpoint
from piper_ray.engine.checkpoint.identity import Identity

__all__ = ["Checkpoint", "Identity"]
