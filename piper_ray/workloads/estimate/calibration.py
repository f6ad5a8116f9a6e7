"""What measurements change of the constants: factors on a few rates, applied to a stack in one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from piper_ray.workloads.estimate.software import Stack


class Constant(str, Enum):
    """A rate that measurements may correct; its value is what it is called. The first is fitted before all others."""

    WORK = "work on the GPU"
    MEMORY = "memory-bound work"
    LINKS = "links within a node"
    NETWORK = "the network"
    HOST = "the host's launches and messages"


@dataclass(frozen=True)
class Calibration:
    """factors: how many times as fast as the tables say; 1 where nothing is said. told: how it came about, in words.

    Memory-bound work is work on the GPU, too: both factors count.
    """

    factors: Mapping[Constant, float] = field(default_factory=dict)
    told: tuple[str, ...] = ()

    def factor(self, constant: Constant) -> float:
        """Above 1: faster."""
        return self.factors.get(constant, 1.0)

    def applied(self, stack: Stack) -> Stack:
        """The stack with its constants corrected. Shares of a data sheet's rate stay shares: at most 1."""
        if not self.factors:
            return stack
        gpu, software = stack.gpu, stack.software
        shares = {
            "memory_fraction": gpu.memory_fraction * self.factor(Constant.MEMORY),
            "link_fraction": gpu.link_fraction * self.factor(Constant.LINKS),
            "network_fraction": gpu.network_fraction * self.factor(Constant.NETWORK),
        }
        host = self.factor(Constant.HOST)
        changed = {
            "efficiency": software.efficiency * self.factor(Constant.WORK),
            "host_s": software.host_s / host,
            "message_s": software.message_s / host,
        }
        return replace(
            stack,
            gpu=gpu.model_copy(update={name: min(1.0, share) for name, share in shares.items()}),
            software=software.model_copy(update=changed),
        )


UNCALIBRATED = Calibration()
