"""Inputs and outputs: Piper's JSON, our TOML workload, PipeDream's and dnn-partitioning's inputs, and plans."""

from __future__ import annotations

from typing import TYPE_CHECKING

from piper_ray.model import limits
from piper_ray.model.units import parse_bytes, parse_bytes_per_s, parse_count, parse_seconds
from piper_ray.workloads.formats.forms import Form, InFlight
from piper_ray.workloads.formats.load import dump, dump_plan, instance_of, load, load_plan, load_solution, load_text

if TYPE_CHECKING:
    from piper_ray.model.instance import Instance
    from piper_ray.workloads.formats.load import Source

__all__ = [
    "Form",
    "InFlight",
    "dump",
    "dump_plan",
    "instance_of",
    "limits",
    "load",
    "load_plan",
    "load_solution",
    "load_text",
    "parse_bytes",
    "parse_bytes_per_s",
    "parse_count",
    "parse_seconds",
    "to_toml",
    "to_upstream",
]


def to_upstream(instance: Instance | Source) -> dict[str, object]:
    """The instance as Piper's JSON document, ready for ``json.dump``; loading it gives the instance again."""
    from piper_ray.workloads.formats import upstream

    return upstream.to_upstream(instance_of(instance))


def to_toml(instance: Instance | Source) -> str:
    """The instance as a compact workload (TOML): equal layers share a type, repeated ones a chain."""
    from piper_ray.workloads.formats import workload_writer

    return workload_writer.to_toml(instance_of(instance))
