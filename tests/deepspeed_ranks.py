"""Folders that were exported for DeepSpeed, run by its own engine: each rank a process that trains two steps of every
case, beside the model in one piece.

What ``results_of_ranks`` runs.

CASES.json: {"port": of rank 0, "ranks": all of every case, "results": folder, "cases": {name: {"folder", "tied",
"given"}}}. given: the layers as planned, or what is wrong with them. Writes RESULTS/RANK.json, for each case:
DeepSpeed's optimizer, the losses of the steps here and in one piece, how far weights moved and how far they differ in
the mean, and how often a microbatch ran each layer of this rank forward; of layers that are refused what was raised.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.torch import TorchBackend
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn
from torch.nn import functional

from tests.run_support import imported, loopback

WIDTH, HEADS, INNER, WORDS, TOKENS, BLOCKS = 16, 2, 24, 32, 4, 3
STEPS, RATE = 2, 0.02

RUNS: Counter[int] = Counter()


class Seeded(nn.Module):
    """Matrices of these shapes, the same wherever the layer of this number is made."""

    def __init__(self, number: int, *shapes: tuple[int, int]) -> None:
        super().__init__()
        self.number = number
        random = torch.Generator().manual_seed(number)
        self.matrices = nn.ParameterList(torch.randn(shape, generator=random) / shape[1] ** 0.5 for shape in shapes)


class Words(Seeded):
    def __init__(self) -> None:
        super().__init__(0, (WORDS, WIDTH))

    def forward(self, words: Tensor) -> Tensor:
        RUNS[0] += 1
        return functional.embedding(words, self.matrices[0])


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, (WIDTH,), self.weight)


class Block(Seeded):
    def __init__(self, number: int, inner: int = INNER) -> None:
        super().__init__(number, (3 * WIDTH, WIDTH), (WIDTH, WIDTH), (2 * inner, WIDTH), (WIDTH, inner))
        self.before, self.between = Norm(), Norm()

    def forward(self, x: Tensor) -> Tensor:
        RUNS[self.number] += 1
        mixed, out, enter, leave = self.matrices
        shape = (*x.shape[:2], HEADS, WIDTH // HEADS)
        parts = functional.linear(self.before(x), mixed).chunk(3, dim=-1)
        queries, keys, values = (part.view(shape).transpose(1, 2) for part in parts)
        attended = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + functional.linear(attended.transpose(1, 2).reshape(x.shape), out)
        gate, up = functional.linear(self.between(x), enter).chunk(2, dim=-1)
        return x + functional.linear(functional.silu(gate) * up, leave)


class Head(Seeded):
    def __init__(self) -> None:
        super().__init__(BLOCKS + 1, (WORDS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        RUNS[self.number] += 1
        return functional.linear(x, self.matrices[0])


def by_words(words: nn.Module, x: Tensor) -> Tensor:
    """The head, of an embedding's matrix."""
    RUNS[BLOCKS + 1] += 1
    return functional.linear(x, next(words.parameters()))


def loss_of(outputs: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.float().flatten(0, 1), labels.flatten())


def layers_of(case: dict[str, Any]) -> list[Any]:
    """As DeepSpeed takes them; what is wrong is wrong on all ranks."""
    inner = INNER + 1 if case["given"] == "wide" else INNER
    blocks = [LayerSpec(Block, number, inner) for number in range(1, BLOCKS + 1)]
    if case["given"] == "few":
        blocks.pop()
    tied = case["tied"] != (case["given"] == "otherwise tied")
    words, head = LayerSpec(Words), LayerSpec(Head)
    if tied:
        words = TiedLayerSpec("words", Words, tied_weight_attr="matrices.0")
        head = TiedLayerSpec("words", Words, tied_weight_attr="matrices.0", forward_fn=by_words)
    return [words, *blocks, [LayerSpec(Norm), head]]


def in_one_piece(
    case: dict[str, Any], settings: dict[str, Any], batch: list[tuple[Tensor, Tensor]]
) -> tuple[list[float], list[list[Tensor]], list[list[Tensor]]]:
    """Losses of all steps, and each layer's parameters before and after: fp32 gradients of weights in half precision,
    and fp32 weights that AdamW trains."""
    number_type = torch.float16 if "fp16" in settings else torch.bfloat16
    words, blocks, norm = Words(), [Block(number) for number in range(1, BLOCKS + 1)], Norm()
    head = words if case["tied"] else Head()
    layers: list[list[nn.Module]] = [[words], [norm, head]]
    layers[1:1] = [[block] for block in blocks]
    held: list[list[Tensor]] = [
        [one for module in modules for one in module.to(number_type).parameters()] for modules in layers
    ]
    before = [[one.detach().float() for one in parameters] for parameters in held]
    trained = list({id(one): one for parameters in held for one in parameters}.values())
    copies = [nn.Parameter(one.detach().float()) for one in trained]
    options = {**settings["optimizer"]["params"]}
    del options["torch_adam"]
    optimizer, losses = torch.optim.AdamW(copies, **options), []
    for _ in range(STEPS):
        total = 0.0
        for copy in copies:
            copy.grad = torch.zeros_like(copy)
        for inputs, labels in batch:
            x = words(inputs)
            for block in blocks:
                x = block(x)
            loss = loss_of(functional.linear(norm(x), head.matrices[0]), labels)
            total += loss.item() / len(batch)
            for copy, gradient in zip(copies, torch.autograd.grad(loss / len(batch), trained), strict=True):
                assert copy.grad is not None
                copy.grad += gradient
        nn.utils.clip_grad_norm_(copies, settings["gradient_clipping"])
        optimizer.step()
        with torch.no_grad():
            for one, copy in zip(trained, copies, strict=True):
                one.copy_(copy)
        losses.append(total)
    return losses, before, held


def compared(case: dict[str, Any]) -> dict[str, Any]:
    planned = imported(Path(case["folder"], "planned_module.py"))
    settings = json.loads(planned.CONFIG.read_text())
    settings["optimizer"]["params"] |= {"torch_adam": True, "lr": RATE}  # FusedAdam would be compiled
    planned.CONFIG = Path(case["folder"], f"config-of-{os.environ['RANK']}.json")
    planned.CONFIG.write_text(json.dumps(settings))
    try:
        engine = planned.engine(layers_of(case), loss_of)
    except ValueError as error:
        return {"raised": str(error)}
    random, microbatches = torch.Generator().manual_seed(1), engine.gradient_accumulation_steps()
    batch = [
        (torch.randint(WORDS, (1, TOKENS), generator=random), torch.randint(WORDS, (1, TOKENS), generator=random))
        for _ in range(microbatches * planned.DEGREES["num_dp"])
    ]
    replica = engine.grid.data_parallel_id
    own = batch[replica * microbatches : (replica + 1) * microbatches]
    RUNS.clear()
    losses = [float(engine.train_batch(iter(own))) for _ in range(STEPS)]
    runs = {number: count / microbatches / STEPS for number, count in sorted(RUNS.items())}
    expected, before, after = in_one_piece(case, settings, batch)
    moved, difference = [], []
    for number, places in engine.module._own_layers():
        modules = []
        for place in places:
            spec = engine.module._layer_specs[engine.module._local_start + place]
            tied = isinstance(spec, TiedLayerSpec)
            modules.append(engine.module.tied_modules[spec.key] if tied else engine.module.forward_funcs[place])
        found = [one.detach().float() for module in modules for one in module.parameters()]
        for one, start, end in zip(found, before[number], after[number], strict=True):
            moved.append((one - start).abs().flatten())
            difference.append((one - end.float()).abs().flatten())
    return {
        "optimizer": type(engine.optimizer).__name__,
        "losses": losses,
        "expected": expected,
        "moved": float(torch.cat(moved).mean()),
        "difference": float(torch.cat(difference).mean()),
        "runs": runs,
    }


def main(case_file: str, rank: int) -> None:
    read: dict[str, Any] = json.loads(Path(case_file).read_text())
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(read["ranks"]), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(read["port"]), "GLOO_SOCKET_IFNAME": loopback(),
    }  # fmt: skip
    torch.set_num_threads(1)
    # It would be compiled. The module is not reached by its name, which deepspeed.comm has for torch itself.
    vars(sys.modules[TorchBackend.__module__])["build_shm_op"] = lambda: None
    type(get_accelerator()).is_fp16_supported = lambda _: True  # enough of it, for these layers
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    found = {name: compared(case) for name, case in read["cases"].items()}
    Path(read["results"], f"{rank}.json").write_text(json.dumps(found))
