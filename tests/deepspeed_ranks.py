"""Folders that were exported for DeepSpeed, run by its own engine: each rank a process that trains two steps of every
case, beside the model in one piece.

    python -m tests.deepspeed_ranks CASES.json RANK

CASES.json: {"port": of rank 0, "results": folder, "cases": {name: {"folder", "precision", "layers", "tied", "wrong"}}}.
A case of fewer ranks than there are would be another job: all cases have the same ranks. Writes RESULTS/RANK.json: for
each case what DeepSpeed's optimizer is, the mean loss of each step here and in one piece, the largest difference of a
weight after the steps, how far weights moved, and how often each layer of this rank ran forward for a microbatch in the
first step; of a case with other layers what was raised.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

WIDTH, INNER, WORDS, TOKENS, STEPS = 16, 24, 32, 4, 2


def main(case_file: str, rank: int) -> None:
    read: dict[str, Any] = json.loads(Path(case_file).read_text())
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(read["ranks"]), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(read["port"]), "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "DS_ACCELERATOR": "cpu",
    }  # fmt: skip
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator
    from deepspeed.comm import torch as messages

    torch.set_num_threads(1)
    messages.build_shm_op = lambda: None  # it would compile messages for CPUs
    type(get_accelerator()).is_fp16_supported = lambda _: True
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    found = {name: compared(case) for name, case in read["cases"].items()}
    Path(read["results"], f"{rank}.json").write_text(json.dumps(found))


def compared(case: dict[str, Any]) -> dict[str, Any]:
    import torch

    planned = imported(Path(case["folder"]))
    settings = json.loads(planned.CONFIG.read_text())
    settings["optimizer"]["params"] |= {"torch_adam": True, "lr": 0.02}  # FusedAdam would be compiled
    planned.CONFIG = Path(case["folder"], f"on-cpu-{os.environ['RANK']}.json")
    planned.CONFIG.write_text(json.dumps(settings))
    torch.manual_seed(0)
    whole = [Embedding(), *(Block() for _ in range(case["layers"])), Head()]
    if case["tied"]:
        whole[-1].weight = whole[0].weight
    calls: Counter[int] = Counter()
    for number, layer in enumerate(whole):
        layer.register_forward_pre_hook(lambda *_, number=number: calls.update([number]))
    try:
        engine = planned.engine(given(whole, case), mean_loss)
    except ValueError as error:
        return {"raised": str(error)}
    microbatches = engine.gradient_accumulation_steps()
    replicas, replica = planned.DEGREES["num_dp"], engine.grid.data_parallel_id
    torch.manual_seed(1)
    batch = [torch.randint(WORDS, (2, 1, TOKENS)).unbind() for _ in range(microbatches * replicas)]
    own = batch[replica * microbatches : (replica + 1) * microbatches]
    begin, end = planned.PARTS[engine.stage_id], planned.PARTS[engine.stage_id + 1]
    losses = [float(engine.train_batch(iter(own)))]
    runs = {number: calls[number] / microbatches for number in range(begin, end)}
    losses += [float(engine.train_batch(iter(own))) for _ in range(STEPS - 1)]
    torch.manual_seed(0)
    alone = [Embedding(), *(Block() for _ in range(case["layers"])), Head()]
    if case["tied"]:
        alone[-1].weight = alone[0].weight
    before = [parameter.detach().clone() for layer in alone[begin:end] for parameter in layer.parameters()]
    expected = in_one_piece(alone, batch, case["precision"], settings)
    # Where layers are tied, those that were given are specs: DeepSpeed made its own.
    trained = {id(parameter): parameter for parameter in engine.module.parameters()}.values()
    wanted = {id(parameter): parameter for layer in alone[begin:end] for parameter in layer.parameters()}.values()
    by_shape = list(zip(sorted_by_value(trained), sorted_by_value(wanted), strict=True))
    return {
        "optimizer": type(engine.optimizer).__name__,
        "losses": losses,
        "expected": expected,
        "difference": max(float((one.float() - other.float()).abs().max()) for one, other in by_shape),
        "moved": max(
            float((one.float() - other).abs().max())
            for one, other in zip((p for layer in alone[begin:end] for p in layer.parameters()), before, strict=True)
        ),
        "runs": runs,
    }
