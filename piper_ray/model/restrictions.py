"""What a user may forbid the planner: tensor or data parallelism, or a free choice of recomputation."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from piper_ray.model import arguments


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
    """recompute: a ``Recompute`` or its text, such as "never". Raises UsageError for what is neither."""

    tensor_parallelism: bool = True
    data_parallelism: bool = True
    recompute: Recompute = Recompute.AUTO

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensor_parallelism", arguments.flag("tensor_parallelism", self.tensor_parallelism))
        object.__setattr__(self, "data_parallelism", arguments.flag("data_parallelism", self.data_parallelism))
        object.__setattr__(self, "recompute", arguments.choice("recompute", self.recompute, Recompute))
