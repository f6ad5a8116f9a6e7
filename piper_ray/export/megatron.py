"""Launch files for Megatron-LM: a plan's arguments, the model's, and the script that starts ``pretrain_gpt.py``."""

from __future__ import annotations

from collections.abc import Iterator

from piper_ray.export.files import Export, shell_lines
from piper_ray.export.job import Job
from piper_ray.export.megatron_flags import words_of
from piper_ray.export.megatron_model import model_settings, require_divided, require_megatron_model, unsaid
from piper_ray.export.megatron_settings import (
    overlap_settings,
    plan_settings,
    precision_settings,
)
from piper_ray.export.overlaps import hides_tensor_exchanges
from piper_ray.model.errors import UsageError
from piper_ray.model.trained_model import TrainedModel
from piper_ray.workloads.estimate.decoder_shape import DecoderShape

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"

_TRAINING = """--tokenizer-type NullTokenizer
--split 99,1,0
--train-iters 1000
--eval-iters 0
--lr 3e-4
--min-lr 3e-5
--lr-decay-style cosine
--lr-warmup-iters 10
--weight-decay 0.1
--clip-grad 1.0
--adam-beta1 0.9
--adam-beta2 0.95
--log-interval 1
--log-throughput
"""

_PRETRAIN = '"${MEGATRON:?a checkout of Megatron-LM}/pretrain_gpt.py"'

_DATA = """data="${1:?give the prefix of a Megatron dataset, or mock}"
shift
case "$data" in
mock) set -- --mock-data "$@" ;;
*) set -- --data-path "$data" "$@" ;;
esac
"""


def export_megatron(job: Job) -> Export:
    """``megatron.args``, ``training.args`` and ``launch.sh``; without the model's arguments where nobody knows it.

    Raises UsageError for a plan or a model that Megatron has no arguments for.
    """
    settings = dict(plan_settings(job)) | dict(overlap_settings(job))
    model, notes = job.instance.model, list(megatron_notes(job))
    known = model is not None
    if model is not None:
        shape = require_pretrained(model)
        require_divided(shape, job.tensor_parallel_degree, job.setting.expert_tensor)
        settings |= dict(model_settings(shape)) | dict(precision_settings(job, model))
        notes += unsaid(shape)
        notes.append("training.args has usual figures of the optimizer and the length of the training: change them")
    else:
        notes.append(
            "the workload does not say which model it is: give launch.sh the model's own arguments and its precision"
        )
    files = {
        "megatron.args": "".join(" ".join(words) + "\n" for words in words_of(settings)),
        **({"training.args": _TRAINING} if known else {}),
        "launch.sh": _script(job, known),
    }
    command = f"bash launch.sh {'DATA [ARGUMENTS...]' if known else 'MODEL-ARGUMENTS...'}"
    return Export(files, command, (*notes, *job.sharing_notes, *job.notes))


def require_pretrained(model: TrainedModel) -> DecoderShape:
    """The decoder that ``pretrain_gpt.py`` trains. Raises UsageError with the reasons why it does not."""
    if model.lora_rank:
        raise UsageError(
            "Megatron-LM trains no adapters (LoRA), and this plan does; Megatron-Bridge does (--to megatron-bridge)"
        )
    return require_megatron_model(model)


def _script(job: Job, known: bool) -> str:
    given = (
        "# the prefix of a Megatron dataset, or mock, as the first argument. Further ones go to Megatron, behind\n"
        "# those of the files beside this one.\n"
    )
    if not known:
        given = "# the model's own arguments: its shape, its data, the optimizer, the precision.\n"
    several = ", MASTER_ADDR (the address of node 0) and NODE_RANK" if job.nodes > 1 else ""
    names = ("megatron.args", "training.args") if known else ("megatron.args",)
    texts = {name: name.partition(".")[0] + "_arguments" for name in names}
    read = "".join(f'{variable}="$(cat "$(dirname "$0")/{name}")"\n' for name, variable in texts.items())
    files = [f"${variable}" for variable in texts.values()]
    return (
        "#!/usr/bin/env bash\n"
        f"# Run on each node with MEGATRON (a checkout of Megatron-LM){several} set, and\n{given}"
        "set -euo pipefail\nset -f\n"
        + _environment(job)
        + (_DATA if known else "")
        + read
        + shell_lines([f"exec {job.torchrun}", _PRETRAIN, *files, '"$@"'])
    )


def _environment(job: Job) -> str:
    """A line that sets what Megatron refuses to start without; empty where it asks for nothing."""
    if not asks_for_connections(job):
        return ""
    return (
        "# Megatron asks for it with tensor or context parallelism on GPUs up to Hopper.\n"
        f'export {CONNECTIONS}="${{{CONNECTIONS}:-1}}"\n'
    )


def asks_for_connections(job: Job) -> bool:
    """Whether Megatron asks for CUDA_DEVICE_MAX_CONNECTIONS=1."""
    return job.tensor_parallel_degree > 1 or job.setting.context > 1


def megatron_notes(job: Job) -> Iterator[str]:
    """What Megatron's arguments leave open, for all who hand a plan to Megatron."""
    d = job.data_parallel_degree
    divided = "t p c" if job.setting.context > 1 else "t p"
    yield f"data parallelism is what is left of the ranks: {d} = {job.ranks} / ({divided})"
    if hides_tensor_exchanges(job) and not job.setting.sequence_parallel:
        yield (
            "the plan's times count a part of tensor parallelism's exchanges as hidden, which Megatron hides with "
            "sequence parallelism alone"
        )
    if job.tied_over_ranks:
        yield (
            f"{job.tied_text}: Megatron sums their gradients over these, if it is not told to untie them "
            "(--untie-embeddings-and-output-weights, model.share_embeddings_and_output_weights)"
        )
    if job.pipeline_ranks == 1:
        yield "one pipeline rank holds the whole model: there is no layout"
