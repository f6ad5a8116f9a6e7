"""PipeDream's published profiles on the clusters of its paper, and plans for them.

The profiles are of one minibatch of 64 samples. Rates within a server are not in the paper: those here are assumptions.
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from piper_ray.model.instance import Instance
from piper_ray.model.plan import Plan, Stage
from piper_ray.planners import Level, PipeDream, Recurrence
from piper_ray.planners.pipedream.optimum import TailTables, build_states
from piper_ray.planners.pipedream.planner import States
from piper_ray.workloads.formats.load import load
from tests.data import PROFILES, Record, profile_text

STATES = States.SINGLE_SOURCE
"""Those that PipeDream's own program grows: of GNMT-16 all downsets are 16,886."""
TITLES = {"vgg16": "VGG-16", "resnet50": "ResNet-50", "alexnet": "AlexNet", "gnmt_large": "GNMT-16", "gnmt": "GNMT-8"}


@dataclass(frozen=True)
class Servers:
    """Machines of a cluster. within_bytes_per_s: between GPUs of a server, assumed; between_bytes_per_s: of its
    network, as in the paper."""

    gpu: str
    within_bytes_per_s: float
    between_bytes_per_s: float


CLUSTERS = {
    "A": Servers("V100, PCIe", 11e9, 10e9 / 8),
    "B": Servers("V100, NVLink", 25e9, 25e9 / 8),
    "C": Servers("Titan X", 11e9, 40e9 / 8),
}


@dataclass(frozen=True)
class Setup:
    """A row of the paper's table 1."""

    model: str
    cluster: str
    servers: int
    gpus_per_server: int
    configuration: str
    epoch_speedup: float

    @classmethod
    def of(cls, record: Record) -> Setup:
        """One of ``goldens("pipedream_paper")``."""
        return cls(**{name: record[name] for name in cls.__dataclass_fields__})

    @property
    def devices(self) -> int:
        return self.servers * self.gpus_per_server

    @property
    def name(self) -> str:
        return f"{TITLES.get(self.model, self.model)}, {self.servers}x{self.gpus_per_server} ({self.cluster})"

    @property
    def flat(self) -> tuple[Level, ...]:
        """All GPUs on one link: the slowest that joins them."""
        rates = CLUSTERS[self.cluster]
        return (Level(self.devices, rates.within_bytes_per_s if self.servers == 1 else rates.between_bytes_per_s),)

    @property
    def levels(self) -> tuple[Level, ...]:
        """Servers on the network, and GPUs within each."""
        rates = CLUSTERS[self.cluster]
        inner = Level(self.gpus_per_server, rates.within_bytes_per_s)
        return (inner, Level(self.servers, rates.between_bytes_per_s)) if self.servers > 1 else (inner,)

    @property
    def replication(self) -> tuple[int, ...] | None:
        """Of the paper's configuration; None: a straight pipeline, of as many stages as are best."""
        return None if self.configuration == "straight" else tuple(map(int, self.configuration.split("-")))


def profile(name: str, devices: int, microbatches: int = 1, bandwidth_bytes_per_s: float = 1e9) -> Instance:
    """A published profile on a number of devices without a memory limit."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.graph.txt"
        path.write_text(profile_text(name), encoding="utf-8")
        return load(
            path,
            devices=devices,
            microbatches=microbatches,
            memory_bytes=2.0**60,
            bandwidth_bytes_per_s=bandwidth_bytes_per_s,
        )


def is_public(model: str) -> bool:
    """Whether there is a profile of it."""
    return model in PROFILES


def states_of(instance: Instance) -> TailTables:
    """Where a partition may cut."""
    return build_states(instance, {x.id: x.tmpcs[1][0] for x in instance.layers}, STATES)


def best_of_shape_s(states: TailTables, level: Level, replication: tuple[int, ...], recurrence: Recurrence) -> float:
    """What the recurrence says of the best partition with these replications on one level; inf: there is none.

    By definition: a table over states for each stage, of the least bottleneck of what lies in front of it.
    """
    pairs = states.pairs
    front, rest = np.repeat(np.arange(states.size), np.diff(pairs.pair_start)), pairs.rest
    passes_s = states.time_s[front] - states.time_s[rest]
    weights_bytes = pairs.weights_bytes[front] - pairs.weights_bytes[rest]
    transfer_s = (
        2.0 * np.maximum(states.entering_bytes[front], states.entering_bytes[rest]) / level.bandwidth_bytes_per_s
    )
    reached_s = np.full(states.size, math.inf)
    reached_s[-1] = 0.0
    for number, m in enumerate(replication):
        sent_s = (m - 1) / m * weights_bytes / level.bandwidth_bytes_per_s  # by each replica, of its gradients
        if recurrence is Recurrence.PAPER:
            links, stage_s = 1, np.maximum(passes_s, 2.0 * sent_s) / m
        else:
            links, stage_s = m, (passes_s + 4.0 * sent_s) / m
        if number:
            stage_s = np.maximum(stage_s, transfer_s / links)
        next_s = np.full(states.size, math.inf)
        np.minimum.at(next_s, rest, np.maximum(reached_s[front], stage_s))
        reached_s = next_s
    return float(reached_s[0])


def configuration_s(
    instance: Instance, states: TailTables, setup: Setup, level: Level, recurrence: Recurrence
) -> float:
    """What the recurrence says of the paper's configuration on one level."""
    if setup.replication is not None:
        return best_of_shape_s(states, level, setup.replication, recurrence)
    return PipeDream((level,), STATES, recurrence=recurrence, straight=True).partition(instance).time_per_stage_s


def plan_of(instance: Instance, stages: tuple[tuple[int, ...], ...], replication: tuple[int, ...]) -> Plan:
    """A partition as a plan."""
    tmpc_ids = {x.id: x.tmpcs[1][0].id for x in instance.layers}
    return Plan(
        tuple(
            Stage(layers, d, 1, {layer: tmpc_ids[layer] for layer in layers})
            for layers, d in zip(stages, replication, strict=True)
        )
    )


def words(replication: tuple[int, ...]) -> str:
    """``15-1``; a pipeline without replicas as ``straight, 4``."""
    if len(replication) > 1 and set(replication) == {1}:
        return f"straight, {len(replication)}"
    return "-".join(map(str, replication))
