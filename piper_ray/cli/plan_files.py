"""What a plan's document is for, told where the plan is found wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from piper_ray.model.errors import InvalidPlan, UnsupportedPlan
from piper_ray.model.instance import Instance
from piper_ray.workloads.formats.load import plan_made_for


@contextmanager
def judged(plan_file: Path, instance: Instance, heading: str | None = None) -> Iterator[None]:
    """Of a plan for another workload one line says so, in place of each rule that it breaks; one for another cluster or
    batch is told beside these. heading: of the complaint; None: as it is."""
    try:
        yield
    except InvalidPlan as error:
        made_for = plan_made_for(plan_file, instance)
        unsupported = isinstance(error, UnsupportedPlan)
        if made_for is not None and made_for.other_workload:
            raise InvalidPlan([str(made_for)], heading or InvalidPlan.HEADING) from None
        if heading is None and (made_for is None or unsupported):
            raise
        claims = [] if made_for is None or unsupported else [str(made_for)]
        raise InvalidPlan([*error.violations, *claims], heading or error.heading) from None
