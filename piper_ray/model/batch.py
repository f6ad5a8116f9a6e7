"""What one step of training works on, so that speeds can be said in samples and tokens.

The planner's own unit is what one pass works on: the paper's sample, a microbatch. All times "per sample" are of one.
"""

from __future__ import annotations

from dataclasses import dataclass

from piper_ray.model.plain import convert_fields, count


@dataclass(frozen=True)
class Batch:
    """What a step trains on.

    microbatches: N. samples_per_microbatch, tokens_per_sample: of the training data; None where nobody says.

    >>> Batch(512, samples_per_microbatch=2).samples
    1024
    """

    microbatches: int
    samples_per_microbatch: int | None = None
    tokens_per_sample: int | None = None

    def __post_init__(self) -> None:
        convert_fields(self, count, "microbatches", "samples_per_microbatch", "tokens_per_sample")

    def step_s(self, time_per_sample_s: float) -> float:
        """What the whole batch takes, in s."""
        return self.microbatches * time_per_sample_s

    @property
    def samples(self) -> int | None:
        """Of the whole batch; None where nobody says."""
        return None if self.samples_per_microbatch is None else self.microbatches * self.samples_per_microbatch

    @property
    def tokens_per_microbatch(self) -> int | None:
        """None where nobody says, and where samples have none."""
        if self.samples_per_microbatch is None or self.tokens_per_sample is None:
            return None
        return self.samples_per_microbatch * self.tokens_per_sample
