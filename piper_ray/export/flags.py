"""The launch arguments of runtimes that a plan determines; the table ``flags.toml`` is used to write and to read
them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from piper_ray.model.schedule import ScheduleName
from piper_ray.workloads.estimate.software import TokenDispatcher
from piper_ray.workloads.formats.documents import package_table
from piper_ray.workloads.formats.fields import Closed

Value = bool | int | float | str | tuple[str, ...]
Settings = dict[str, Value]
"""Arguments by their names in Python (``tensor_model_parallel_size``). A switch is present and true, or absent."""


class PlanFlag(Closed):
    """A flag in ``flags.toml``."""

    name: str
    says: str = ""
    kind: Literal["number", "text", "switch", "words"] = "number"
    fields: list[str] = Field(default=[])


class _RuntimeFlags(Closed):
    written: list[PlanFlag]
    older: list[PlanFlag]
    harmless: list[str]


class _MegatronFlags(_RuntimeFlags):
    compared: list[str]
    mesh: list[str]
    model: list[str]
    model_switches: list[str]
    model_details: list[str]
    costly: list[str]
    saving: list[str]
    harmless_beginnings: list[str]


class _TitanFlags(_RuntimeFlags):
    training: list[PlanFlag]
    costly: list[str]
    harmless_tables: list[str]
    tables: list[str]
    training_fields: list[str]


class _TorchFlags(Closed):
    written: list[PlanFlag]
    schedules: dict[str, str]


class _Tables(Closed):
    megatron: _MegatronFlags
    torchtitan: _TitanFlags
    torch: _TorchFlags


_TABLES = _Tables.model_validate(package_table("piper_ray.export", "flags.toml"))
MEGATRON, TITAN, TORCH = _TABLES.megatron, _TABLES.torchtitan, _TABLES.torch

READ_FLAGS = {flag.name: flag for flag in (*MEGATRON.written, *MEGATRON.older)}
"""Megatron's flags by name."""

RENAMED_FIELDS = {
    field.rpartition(".")[2]: flag.name
    for flag in READ_FLAGS.values()
    for field in flag.fields
    if field.rpartition(".")[2] != flag.name
}
"""Names of Megatron's arguments by the names of fields that differ from them."""

READ_FIELDS = frozenset(flag.name for flag in (*TITAN.written, *TITAN.older))
"""The fields of torchtitan's table ``parallelism``."""


DISPATCHERS = {
    TokenDispatcher.ALL_TO_ALL: "alltoall",
    TokenDispatcher.ONCE_PER_NODE: "flex",
    TokenDispatcher.ALL_GATHER: "allgather",
}
"""Megatron's ways to send tokens to experts."""

TORCH_NAMES = {ScheduleName(name): torchs for name, torchs in TORCH.schedules.items()}
"""torch's names of schedules."""


def flag_of(name: str) -> str:
    """The command-line flag of an argument's name in Python."""
    return "--" + name.replace("_", "-")


def true_ones(settings: Settings) -> Settings:
    """The settings without switches that are off."""
    return {name: value for name, value in settings.items() if value is not False}
