"""Megatron-LM's launch arguments, and Megatron-Bridge's overrides of a recipe, for what a plan decides."""

from __future__ import annotations

from dataclasses import dataclass

from piper_ray.export.files import Export, shell_lines
from piper_ray.export.job import Job
from piper_ray.export.megatron_layout import layout_text, stage_letters
from piper_ray.model.errors import UsageError
from piper_ray.model.settings import Recomputation
from piper_ray.simulate.actions import group_size


@dataclass(frozen=True)
class MegatronSettings:
    """What Megatron is told of a plan. layout: None where one rank has the whole model.

    expert_ranks, expert_tensor: ranks that experts are spread over, and those that share one; None: there are none.
    group: microbatches that an interleaved schedule runs through one chunk before the next; None: p, Megatron's own.
    recompute_granularity, recompute_method, recompute_layers: as the flags of these names; None: not given.
    """

    blocks: int
    tensor_parallel: int
    context_parallel: int
    expert_ranks: int | None
    expert_tensor: int
    pipeline_parallel: int
    chunks: int
    layout: str | None
    group: int | None
    microbatch_samples: int
    global_batch_samples: int
    tokens: int | None
    sequence_parallel: bool
    distributed_optimizer: bool
    recompute_granularity: str | None
    recompute_method: str | None
    recompute_layers: int | None


def layout_of(job: Job) -> tuple[str, ...]:
    """The stages in Megatron's letters. Raises UsageError for a model or a stage that these cannot name."""
    return stage_letters(job.pieces, job.pieces_of_stages)


def settings_of(job: Job) -> MegatronSettings:
    """Raises UsageError for what Megatron has no flag for."""
    p, v = job.pipeline_ranks, job.schedule.v
    granularity, method, layers = _recomputation(job)
    group = group_size(p, job.microbatches, job.schedule.group) if v > 1 else p
    return MegatronSettings(
        blocks=job.pieces.blocks,
        tensor_parallel=job.tensor_parallel_degree,
        context_parallel=job.setting.context,
        expert_ranks=job.expert_ranks,
        expert_tensor=job.setting.expert_tensor,
        pipeline_parallel=p,
        chunks=v,
        layout=layout_text(layout_of(job)) if p > 1 else None,
        group=None if group == p else group,
        microbatch_samples=job.microbatch_samples,
        global_batch_samples=job.global_batch_samples,
        tokens=job.instance.batch.tokens_per_sample,
        sequence_parallel=job.setting.sequence_parallel,
        distributed_optimizer=job.setting.optimizer_shards > 1,
        recompute_granularity=granularity,
        recompute_method=method,
        recompute_layers=layers,
    )


def _recomputation(job: Job) -> tuple[str | None, str | None, int | None]:
    """Granularity, method, number of layers. One for all: the first k layers of each chunk, or each layer alike."""
    if job.recomputation is Recomputation.NONE:
        return None, None, None
    if job.recomputation is Recomputation.SELECTIVE:
        return "selective", None, None
    if job.recomputation is Recomputation.FULL:
        return "full", "uniform", 1
    counts = job.first_recomputed
    if counts is None:
        raise UsageError(
            "Megatron recomputes no layer, each one, or the first ones of each stage; in this plan stages do otherwise"
        )
    most = max(counts)
    for number, (count, kinds) in enumerate(zip(counts, job.recomputed, strict=True), start=1):
        if count != min(most, len(kinds)):
            raise UsageError(
                f"Megatron recomputes as many first layers in one stage as in another; stage {number} recomputes "
                f"{count} of {len(kinds)}, another one {most} (solve --runtime megatron keeps to that)"
            )
    return "full", "block", most


def arguments_of(settings: MegatronSettings) -> list[list[str]]:
    """The flags with their values."""
    found = [
        ["--num-layers", str(settings.blocks)],
        ["--tensor-model-parallel-size", str(settings.tensor_parallel)],
        ["--pipeline-model-parallel-size", str(settings.pipeline_parallel)],
        ["--context-parallel-size", str(settings.context_parallel)],
        ["--micro-batch-size", str(settings.microbatch_samples)],
        ["--global-batch-size", str(settings.global_batch_samples)],
    ]
    if settings.expert_ranks is not None:
        found.append(["--expert-model-parallel-size", str(settings.expert_ranks)])
        found.append(["--expert-tensor-parallel-size", str(settings.expert_tensor)])
    if settings.tokens is not None:
        found.append(["--seq-length", str(settings.tokens)])
    if settings.layout is not None:
        found.append(["--pipeline-model-parallel-layout", settings.layout])
    if settings.group is not None:
        found.append(["--microbatch-group-size-per-virtual-pipeline-stage", str(settings.group)])
    if settings.sequence_parallel:
        found.append(["--sequence-parallel"])
    if settings.distributed_optimizer:
        found.append(["--use-distributed-optimizer"])
    if settings.recompute_granularity is not None:
        found.append(["--recompute-granularity", settings.recompute_granularity])
    if settings.recompute_method is not None:
        found += [["--recompute-method", settings.recompute_method]]
        found += [["--recompute-num-layers", str(settings.recompute_layers)]]
    return found


def export_megatron(job: Job) -> Export:
    """``megatron.args``, which ``launch.sh`` hands to Megatron-LM's own script beside the model's arguments."""
    settings = settings_of(job)
    arguments = arguments_of(settings)
    launch = [
        job.torchrun,
        '--node-rank "${NODE_RANK:-0}" --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-29500}"',
        '"${MEGATRON:-.}/pretrain_gpt.py"',
        '$(cat "$(dirname "$0")/megatron.args")',
        '"$@"',
    ]
    script = (
        "#!/usr/bin/env bash\n"
        "# Run on each node, with MEGATRON (a checkout of Megatron-LM), MASTER_ADDR and NODE_RANK set. What follows\n"
        "# the command goes to Megatron: the model's shape, its data, the optimizer, the precision.\n"
        "set -euo pipefail\nset -f\n" + _environment(settings) + shell_lines(["exec " + launch[0], *launch[1:]])
    )
    files = {"megatron.args": "".join(" ".join(words) + "\n" for words in arguments), "launch.sh": script}
    return Export(files, "bash launch.sh MODEL-ARGUMENTS...", (*_notes(job, settings), *job.sharing_notes, *job.notes))


def _environment(settings: MegatronSettings) -> str:
    """A line that sets what Megatron refuses to start without; empty where it asks for nothing."""
    if settings.tensor_parallel == settings.context_parallel == 1:
        return ""
    return (
        "# Megatron asks for it with tensor or context parallelism on GPUs up to Hopper.\n"
        f'export {_CONNECTIONS}="${{{_CONNECTIONS}:-1}}"\n'
    )


_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


def _notes(job: Job, settings: MegatronSettings) -> list[str]:
    d = job.data_parallel_degree
    divided = "t p c" if settings.context_parallel > 1 else "t p"
    found = [f"data parallelism is what is left of the ranks: {d} = {job.ranks} / ({divided})"]
    if settings.recompute_granularity == "selective":
        found.append(
            "selective recomputation: Megatron recomputes what --recompute-modules names, core_attn by default; the "
            "plan's estimate takes norms and activation functions where attention is fused, else the attention core"
        )
    if job.tied_over_ranks:
        found.append(
            f"{job.tied_text}: Megatron sums their gradients over these, if it is not told to untie them "
            "(--untie-embeddings-and-output-weights, model.share_embeddings_and_output_weights)"
        )
    if settings.layout is None:
        found.append("one pipeline rank holds the whole model: there is no layout")
    return found


def export_bridge(job: Job) -> Export:
    """``piper_plan.py``, whose ``apply`` sets what the plan decides in a Megatron-Bridge ConfigContainer."""
    settings = settings_of(job)
    lines = [
        ("model.tensor_model_parallel_size", settings.tensor_parallel),
        ("model.pipeline_model_parallel_size", settings.pipeline_parallel),
        ("model.virtual_pipeline_model_parallel_size", settings.chunks if settings.chunks > 1 else None),
        ("model.pipeline_model_parallel_layout", settings.layout),
        ("model.context_parallel_size", settings.context_parallel),
        ("model.sequence_parallel", settings.sequence_parallel),
        ("model.recompute_granularity", settings.recompute_granularity),
        ("model.recompute_method", settings.recompute_method),
        ("model.recompute_num_layers", settings.recompute_layers),
        ("model.microbatch_group_size_per_vp_stage", settings.group or settings.pipeline_parallel),
        ("train.micro_batch_size", settings.microbatch_samples),
        ("train.global_batch_size", settings.global_batch_samples),
        ("ddp.use_distributed_optimizer", settings.distributed_optimizer),
        ("optimizer.use_distributed_optimizer", settings.distributed_optimizer),
    ]
    if settings.expert_ranks is not None:
        lines += [
            ("model.expert_model_parallel_size", settings.expert_ranks),
            ("model.expert_tensor_parallel_size", settings.expert_tensor),
        ]
    if settings.tokens is not None:
        lines += [("model.seq_length", settings.tokens), ("dataset.seq_length", settings.tokens)]
    body = "".join(f"    cfg.{name} = {_literal(value)}\n" for name, value in lines)
    script = (
        '"""What the plan decides, for a Megatron-Bridge recipe: apply(cfg) changes its ConfigContainer."""\n\n\n'
        'def apply(cfg):\n    """Sets parallelism, layout, batch and recomputation; returns the same object."""\n'
        f"    assert cfg.model.num_layers in (None, {settings.blocks}), "
        f'f"the plan is of {settings.blocks} layers, the recipe of {{cfg.model.num_layers}}"\n'
        + body
        + "    return cfg\n"
    )
    connections = f"{_CONNECTIONS}=1 " if _environment(settings) else ""
    command = (
        f"{connections}{job.torchrun} YOUR-SCRIPT.py  # which calls piper_plan.apply(cfg) before pretrain(cfg, ...)"
    )
    return Export({"piper_plan.py": script}, command, (*_notes(job, settings), *job.sharing_notes, *job.notes))


def _literal(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)
