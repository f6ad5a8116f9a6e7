"""What keeps a solve from a checkpoint."""

from __future__ import annotations

from piper_ray.errors import ClusterError, UsageError


class CheckpointRefused(UsageError):
    """A checkpoint that cannot be opened: of another input or other options, in use, or not to be read or written."""


class CheckpointLost(ClusterError):
    """Another solve has taken over the checkpoint: this one must not write any more."""
