"""The model compared with real runs on 1, 2 and 3 machines, each a set of Linux namespaces. Needs root and iproute2."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from scripts.ray_benchmarks.sending import SendPairs
from scripts.ray_benchmarks.simulation import Constants, Lattice, Simulation
from scripts.ray_benchmarks.slowed import S_PER_BOUND
from tests.faults.machines import HEAD, machines

MOST = 3
_WITHIN_S = 180.0
LEVEL_S = 2e-4
"""Seconds of the solver for a level, besides its bounds."""


@dataclass(frozen=True)
class Checked:
    """A real run and the model's figure for it."""

    machines: int
    measured_s: float
    modelled_s: float
    constants: Constants

    @property
    def ratio(self) -> float:
        """Of the model's time to the real one."""
        return self.modelled_s / self.measured_s


def check(tell: Callable[[str], None]) -> list[Checked]:
    """Real runs of an evaluation on 1 to ``MOST`` machines of one core, whose work takes a given time."""
    found = []
    with machines(MOST) as cluster:
        for count in range(1, MOST + 1):
            command = [sys.executable, "-m", "scripts.ray_benchmarks.slowed", cluster.address, str(count)]
            with cluster.popen(HEAD, command, stdout=subprocess.PIPE) as process:
                output, _ = process.communicate(timeout=_WITHIN_S)
            if process.returncode != 0:
                raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
            found.append(_checked(count, json.loads(output.splitlines()[-1])))
            tell(f"{count} machines: {found[-1].measured_s:.2f} s, the model says {found[-1].modelled_s:.2f} s")
    return found


def _checked(count: int, measured: dict[str, object]) -> Checked:
    lattice = Lattice(
        np.array(measured["level_start"]), np.array(measured["buckets"]), S_PER_BOUND, _number(measured, "near_s")
    )
    call_s = _number(measured, "call_s")
    constants = Constants(call_s / 2, call_s / 2, _number(measured, "round_trip_s") / 2, 0.0, 0.0, LEVEL_S)
    modelled_s = Simulation(lattice, count, 1, 1, constants, SendPairs()).run()
    return Checked(count, _number(measured, "seconds"), modelled_s, constants)


def _number(measured: dict[str, object], name: str) -> float:
    value = measured[name]
    assert isinstance(value, float)
    return value
