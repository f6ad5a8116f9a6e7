"""What a simulation says in words: what bounds the step, what is lost, what memory is left."""

from __future__ import annotations

from piper_ray.simulate.result import Simulation


def findings(simulation: Simulation) -> tuple[str, ...]:
    return ()
