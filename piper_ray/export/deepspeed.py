"""DeepSpeed's configuration, a PipelineModule that is divided as the plan says, and the script that starts it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from piper_ray.export.deepspeed_buffers import buffer_bytes, buffer_notes
from piper_ray.export.deepspeed_config import deepspeed_config, state_notes, trained_parameters
from piper_ray.export.deepspeed_script import MODULE, planned_module
from piper_ray.export.files import Export, json_text, shell_lines
from piper_ray.export.job import Job
from piper_ray.export.overlaps import hides_tensor_exchanges, software_of
from piper_ray.model.errors import UsageError
from piper_ray.model.recomputation import Recomputation

_LAUNCH = """#!/usr/bin/env bash
# Run on each node{several}.
# The first argument is your script; further ones are the script's own. It finds planned_module beside this file.
set -euo pipefail
script="${{1:?give your script, whose model is planned_module.engine(layers, loss_fn)}}"
shift
folder="$(cd "$(dirname "$0")" && pwd)"
export PYTHONPATH="$folder${{PYTHONPATH:+:$PYTHONPATH}}"
"""

_USAGE = """Your script, with the workload's {layers} layers in the order of `planned_module.LAYERS`:

```python
import planned_module

engine = planned_module.engine(layers, loss_fn)  # other layers, ties or ranks than the plan's: ValueError
for _ in range(steps):
    loss = engine.train_batch(batches)  # an iterator over (inputs, labels), one for each microbatch of a replica
```

A layer of the workload may be a list of several of DeepSpeed's: what happens between its modules (activations, norms,
residual sums) belongs to one of the two. FusedAdam compiles a kernel when it first runs.
"""


def export_deepspeed(job: Job) -> Export:
    """``ds_config.json``, ``planned_module.py`` and ``launch.sh``. Raises UsageError for what DeepSpeed has no setting
    for."""
    if job.recomputation not in (Recomputation.NONE, Recomputation.FULL):
        raise UsageError(
            "DeepSpeed recomputes all layers in full or none (activation_checkpoint_interval); this plan does otherwise"
        )
    order = job.in_order([layer for stage in job.plan.stages for layer in stage.layers])
    parts = [0, *accumulate(len(stage.layers) for stage in job.plan.stages)]
    parameters = trained_parameters(job)
    listed = None if parameters is None else [parameters[layer] for layer in order]
    several = " with MASTER_ADDR (the address of node 0) and NODE_RANK set" if job.nodes > 1 else ""
    files = {
        "ds_config.json": json_text(deepspeed_config(job)),
        MODULE: planned_module(job, order, parts, listed),
        "launch.sh": _LAUNCH.format(several=several) + shell_lines([f"exec {job.torchrun}", '"$script"', '"$@"']),
    }
    notes = (*_notes(job, order), *state_notes(job), *buffer_notes(job), *job.sharing_notes, *job.notes)
    usage = _USAGE.format(layers=len(order))
    return Export(files, "bash launch.sh SCRIPT [ARGUMENTS...]", notes, usage=usage, beyond_bytes=buffer_bytes(job))


def _notes(job: Job, order: tuple[int, ...]) -> Iterator[str]:
    """What is left to the layers that are given, and what the plan's times count otherwise."""
    if job.tensor_parallel_degree > 1:
        yield (
            f"tensor parallelism, t = {job.tensor_parallel_degree}, is the layers' own: DeepSpeed divides none, and "
            "planned_module checks how many parameters a rank has where the workload tells it"
        )
    for tied in job.tied_over_ranks:
        places = " and ".join(str(order.index(layer)) for layer in job.in_order(tied))
        yield (
            f"{job.tied_text}: give numbers {places} of layers as deepspeed.pipe.TiedLayerSpec with one key, whose "
            "gradients DeepSpeed sums; planned_module refuses others"
        )
    software = software_of(job)
    if software is not None and software.gradient_overlap and job.weight_replicas > 1:
        yield (
            "the plan's times hide the exchange of gradients and weights beside the last and first passes, as far as "
            "these last; DeepSpeed's pipelines exchange them after the flush, and have no overlap_comm (estimate "
            "--software deepspeed-2021 counts it so)"
        )
    if hides_tensor_exchanges(job):
        yield "the plan's times count a part of tensor parallelism's exchanges as hidden: that is the layers' own, too"
