"""Pipelines of one kind of devices each, for people and as a document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from piper_ray.model.fields import plain_fields
from piper_ray.model.figures import least_text, plural, printable, time_text
from piper_ray.model.instance import Instance
from piper_ray.model.solution import Solution

if TYPE_CHECKING:
    from piper_ray.planners.apart import KindsApart

_SAME = 5e-4
"""Relative: a smaller difference is shown as none."""


def apart_lines(instance: Instance, apart: KindsApart | None, solution: Solution) -> Iterator[str]:
    """Each kind's share of the microbatches, the step, and how it compares with the plan's."""
    each = "pipelines at each site" if instance.kind_word == "site" else "pipelines of one kind each"
    if apart is None:
        yield f"{each}: none fit"
        return
    if not apart.parts:
        yield f"{each}: none take less than {least_text(apart.least_s)} a step"
        return
    microbatches = instance.microbatches
    own_s = None if solution.time_per_sample_s is None else microbatches * solution.time_per_sample_s
    less = "" if own_s is None else f", {_beside(apart.batch_s, own_s)}"
    is_proved = apart.batch_s <= apart.least_s * (1.0 + _SAME)
    bound = "" if is_proved else f"; none take less than {least_text(apart.least_s)}"
    yield f"{each}: {time_text(apart.batch_s)} a step{less}{bound}"
    for part in apart.parts:
        stages = plural(len(part.plan.stages), "stage")
        yield (
            f"  {printable(part.kind)}: {part.microbatches:,} of {microbatches:,} microbatches in "
            f"{time_text(part.batch_s)}, {stages}, d x t: {part.plan.degrees_text}"
        )


def _beside(apart_s: float, own_s: float) -> str:
    ratio = apart_s / own_s - 1.0
    if abs(ratio) <= _SAME:
        return "as fast as the plan"
    return f"{100.0 * abs(ratio):.1f} % {'slower' if ratio > 0.0 else 'faster'} than the plan"


def apart_document(apart: KindsApart | None) -> dict[str, object] | None:
    """The document; None where no pipelines fit."""
    if apart is None:
        return None
    parts = [
        {
            **plain_fields(part, ("kind", "microbatches", "batch_s")),
            "stages": len(part.plan.stages),
            **plain_fields(part.plan.stages[0], ("data_parallel_degree", "tensor_parallel_degree")),
        }
        for part in apart.parts
    ]
    return {"batch_s": apart.batch_s if parts else None, "lower_bound_s": apart.least_s, "kinds": parts}
