"""Planners to compare with: simpler ways to plan, all valued by the same ``evaluate``.

result = piper_ray.baselines.plan(instance, "pipedream-2bw", restrictions=restrictions)
result.plan, result.time_per_sample, result.note
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from piper_ray.baselines.data_parallel import DataParallel
from piper_ray.baselines.equal_runs import EqualRuns
from piper_ray.baselines.gpipe import GPipe
from piper_ray.baselines.megatron import Megatron
from piper_ray.baselines.pipedream import Level, Partition, PipeDream, States
from piper_ray.baselines.pipedream_2bw import PipeDream2BW
from piper_ray.baselines.piper_published import PiperPublished
from piper_ray.baselines.planner import BaselineResult, Planner, Proposal
from piper_ray.baselines.tensor_parallel import TensorParallel
from piper_ray.errors import UsageError
from piper_ray.evaluate import evaluate
from piper_ray.model import Instance
from piper_ray.restrictions import Restrictions

__all__ = [
    "plan",
    "PLANNERS",
    "BaselineResult",
    "Planner",
    "Proposal",
    # the planners and their parameters
    "PipeDream2BW",
    "DataParallel",
    "TensorParallel",
    "GPipe",
    "Megatron",
    "EqualRuns",
    "PipeDream",
    "Level",
    "States",
    "Partition",
    "PiperPublished",
]

PLANNERS: Mapping[str, Callable[[], Planner]] = MappingProxyType(
    {
        "pipedream-2bw": PipeDream2BW,
        "data-parallel": DataParallel,
        "tensor-parallel": TensorParallel,
        "gpipe": GPipe,
        "megatron": Megatron,
        "pipedream": PipeDream,
        "piper-published": PiperPublished,
    }
)
"""By name, with default parameters."""


def plan(instance: Instance, planner: str | Planner, *, restrictions: Restrictions = Restrictions()) -> BaselineResult:
    """What a planner proposes, valued by ``evaluate``. planner: a name in ``PLANNERS``, or one with its parameters.

    Raises UsageError for an unknown name, and LimitError where a planner's tables would be too large.
    """
    if isinstance(planner, str):
        if planner not in PLANNERS:
            raise UsageError(f"planner {planner!r} is unknown; expected one of {', '.join(PLANNERS)}")
        name, planner = planner, PLANNERS[planner]()
    else:
        name = repr(planner)
    proposal = planner.propose(instance, restrictions)
    evaluation = None if proposal.plan is None else evaluate(instance, proposal.plan)
    return BaselineResult(name, proposal.plan, evaluation, proposal.tried, proposal.note)
