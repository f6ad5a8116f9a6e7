"""Checkpoints of a solve: what is found is kept where a later solve of the same input takes it up."""

from piper_ray.engine.checkpoint.checkpoint import Checkpoint
from piper_ray.engine.checkpoint.encoding import EvaluationKey
from piper_ray.engine.checkpoint.identity import Identity
from piper_ray.model.errors import CheckpointLost, CheckpointRefused

__all__ = ["Checkpoint", "CheckpointLost", "CheckpointRefused", "EvaluationKey", "Identity"]
