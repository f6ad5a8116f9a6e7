"""How fast a plan is, in the user's own units: what a step takes, and samples and tokens a second where they are known.

The planner's sample is a microbatch, so its times are said as those of a microbatch.
"""

from __future__ import annotations

from dataclasses import dataclass

from piper_ray.model.figures import rate_text, time_text
from piper_ray.model.instance import Batch


@dataclass(frozen=True)
class Throughput:
    """A unit ("samples", or "microbatches" where nobody says how many samples one holds), and how many in each."""

    unit: str
    per_microbatch: int

    @classmethod
    def of(cls, batch: Batch) -> Throughput:
        samples = batch.samples_per_microbatch
        return cls("microbatches", 1) if samples is None else cls("samples", samples)

    def per_s(self, time_per_sample_s: float) -> float:
        return self.per_microbatch / time_per_sample_s


def speed_text(batch: Batch, time_per_sample_s: float) -> str:
    """``10,667 samples/s, 10,922,667 tokens/s, 3.07200 s/step``."""
    if time_per_sample_s <= 0:
        return "no time at all"
    return f"{rates_text(batch, time_per_sample_s)}, {time_text(batch.step_s(time_per_sample_s))}/step"


def rates_text(batch: Batch, time_per_sample_s: float) -> str:
    """``10,667 samples/s, 10,922,667 tokens/s``."""
    if time_per_sample_s <= 0:
        return "no time at all"
    throughput = Throughput.of(batch)
    parts = [f"{rate_text(throughput.per_s(time_per_sample_s))} {throughput.unit}/s"]
    if batch.tokens_per_microbatch is not None:
        parts.append(f"{rate_text(batch.tokens_per_microbatch / time_per_sample_s)} tokens/s")
    return ", ".join(parts)


def batch_text(batch: Batch) -> str:
    """``1,024 microbatches of 16 samples of 1,024 tokens``."""
    text = f"{batch.microbatches:,} microbatches"
    for count, unit in ((batch.samples_per_microbatch, "samples"), (batch.tokens_per_sample, "tokens")):
        text += "" if count is None else f" of {count:,} {unit if count != 1 else unit.removesuffix('s')}"
    return text


def speed_document(batch: Batch, time_per_sample_s: float) -> dict[str, object]:
    """The same as figures; null: not known, or without end."""

    def rate(count: int | None) -> float | None:
        return None if count is None or time_per_sample_s <= 0 else count / time_per_sample_s

    return {
        "step_s": batch.step_s(time_per_sample_s),
        "microbatches_per_s": rate(1),
        "samples_per_s": rate(batch.samples_per_microbatch),
        "tokens_per_s": rate(batch.tokens_per_microbatch),
    }
