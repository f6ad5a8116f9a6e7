"""What a user may forbid the planner: tensor or data parallelism, or a free choice of recomputation."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Recompute(str, Enum):
    """Which recomputation choices a plan may make.

    AUTO: each layer as it is best. ALWAYS, NEVER: every layer that has the choice does, or does not.
    ALL_OR_NONE: within a stage, every layer that has the choice does, or none.
    """

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"
    ALL_OR_NONE = "all-or-none"


@dataclass(frozen=True)
class Restrictions:
    tensor_parallelism: bool = True
    data_parallelism: bool = True
    recompute: Recompute = Recompute.AUTO
