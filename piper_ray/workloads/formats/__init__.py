"""Inputs and outputs: Piper's JSON, our TOML workload, PipeDream's and dnn-partitioning's inputs, and plans."""

from __future__ import annotations

from piper_ray.workloads.formats.load import dump as dump
from piper_ray.workloads.formats.load import dump_plan as dump_plan
from piper_ray.workloads.formats.load import instance_of as instance_of
from piper_ray.workloads.formats.load import load as load
from piper_ray.workloads.formats.load import load_plan as load_plan
from piper_ray.workloads.formats.load import load_solution as load_solution
from piper_ray.workloads.formats.load import load_text as load_text
from piper_ray.workloads.formats.load import to_toml as to_toml
from piper_ray.workloads.formats.load import to_upstream as to_upstream
