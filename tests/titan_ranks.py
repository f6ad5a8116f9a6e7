"""A folder that was exported for torchtitan, trained by torchtitan's own Trainer: each rank a process that runs a step
on CPUs, beside the model in one piece.

What ``results_of_ranks`` runs.

JOB.json: {"port": of rank 0, "ranks": all of them, "results": folder, "folder": what was exported}. Writes
RESULTS/RANK.json: the step's loss (null where the last stage is not), that of the model in one piece, how many
parameters the rank has and all have, and the largest difference of a gradient, relative to the largest gradient.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import types
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from tests import runtime_code
from tests.run_support import loopback

TOKENS, WORDS = 32, 64
"""Of a sample and of the vocabulary, as the test exports them."""


def main(job_file: str, rank: int) -> None:
    warnings.simplefilter("ignore")
    job: dict[str, Any] = json.loads(Path(job_file).read_text())
    ranks, port = job["ranks"], job["port"]
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in own.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": loopback()}
    torch.set_num_threads(1)
    torch._utils._get_available_device_type = lambda: "cpu"  # torchtitan takes GPUs for there where nothing is
    trainer = made(Path(job["folder"]))
    torch.manual_seed(5)
    reference = trainer.config.model_spec.model.build()
    with torch.no_grad():
        reference.init_weights()
    owned = load(trainer, reference)
    torch.manual_seed(7)
    words = torch.randint(WORDS, (trainer.config.training.local_batch_size, TOKENS + 1))
    samples = trainer.config.parallelism.pipeline_parallel_microbatch_size
    microbatches = [batch(one) for one in torch.split(words, samples)]
    tokens = torch.tensor(words.shape[0] * TOKENS)
    loss = trainer.forward_backward_step(
        input_dict=[inputs for inputs, _ in microbatches],
        labels=[labels for _, labels in microbatches],
        global_valid_tokens=tokens,
    )
    expected = 0.0
    for inputs, labels in microbatches:
        masks = reference.get_attention_masks(positions=inputs["positions"])
        said = reference(inputs["input"], positions=inputs["positions"], attention_masks=masks)
        value = functional.cross_entropy(said.flatten(0, 1), labels.flatten(), reduction="sum") / tokens
        torch.autograd.backward(value)
        expected += value.item()
    gradients = {name: one.grad for name, one in reference.named_parameters()}
    largest = max(float(one.abs().max()) for one in gradients.values())
    difference = max(float((local(one.grad) - gradients[name]).abs().max()) for name, one in owned.items()) / largest
    torch.distributed.destroy_process_group()
    found = loss.item() if trainer.pp_has_last_stage else None
    result = {"loss": found, "expected": expected, "parameters": len(owned), "difference": difference}
    Path(job["results"], f"{rank}.json").write_text(json.dumps(result | {"of": len(gradients)}))


def made(folder: Path) -> Any:
    """torchtitan's Trainer of the launch's config, in fp32 and without compiler, data and tokenizer."""
    arguments = ("--compile.no-enable", "--training.mixed_precision_param", "float32")
    config = runtime_code.titan_config(folder, None, *arguments, update=False)
    if isinstance(config, str):
        raise AssertionError(config)
    from torch.nn.attention.flex_attention import create_block_mask
    from torchtitan.components import metrics
    from torchtitan.models.common import attention
    from torchtitan.trainer import Trainer

    nothing = types.SimpleNamespace(max_reserved_gib=0.0, max_reserved_pct=0.0)
    monitor = types.SimpleNamespace(device_name="cpu", get_peak_stats=lambda: nothing, reset_peak_stats=lambda: None)
    metrics.build_device_memory_monitor = lambda: monitor
    attention.FlexAttention._compiled_flex_attn = staticmethod(attended)
    attention._compiled_create_block_mask = create_block_mask
    config.tokenizer = config.dataloader = types.SimpleNamespace(build=lambda **_: None)
    trainer = Trainer(config)
    if "arg_mbs" not in inspect.signature(type(trainer.pp_schedule).step).parameters:
        trainer.pp_schedule.step = functools.partial(stepped, trainer.pp_schedule)
    return trainer


def attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, block_mask: Any, scale: Any, enable_gqa: bool, **_: object
) -> tuple[torch.Tensor, Any]:
    """As flex_attention, which goes back on no CPU."""
    from torch.nn.attention.flex_attention import create_mask

    mask = create_mask(block_mask.mask_mod, len(q), None, TOKENS, TOKENS, device="cpu")
    found = functional.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa)
    return found, types.SimpleNamespace(lse=found.new_zeros(found.shape[:-1]))


def stepped(
    schedule: Any, arg_mbs: Any, kwarg_mbs: Any, target_mbs: Any, losses: Any, loss_kwargs: Any, return_outputs: bool
) -> None:
    """As ``step`` of later versions of PyTorch, which takes microbatches as they are."""
    for stage in getattr(schedule, "_stages", None) or [schedule._stage]:
        stage.has_backward = True
        stage.clear_runtime_states()
    schedule._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs=loss_kwargs)


def load(trainer: Any, reference: Any) -> dict[str, Any]:
    """The reference's weights into the rank's stages; their parameters by name."""
    values, found = dict(reference.named_parameters()), {}
    for part in trainer.model_parts:
        for name, parameter in part.named_parameters():
            plain = name.replace("_checkpoint_wrapped_module.", "")
            with torch.no_grad():
                local(parameter).copy_(values[plain])
            found[plain] = parameter
    return found


def local(tensor: Any) -> torch.Tensor:
    """What this rank has of it: all, as no one shares it."""
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


def batch(words: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    positions = torch.arange(TOKENS).expand(len(words), TOKENS)
    return {"input": words[:, :-1], "positions": positions}, words[:, 1:]
