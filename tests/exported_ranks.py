"""Folders that were exported for torch, run: each rank a process that trains two steps of every case, compared with the
model in one piece.

What ``results_of_ranks`` runs.

CASES.json: {"rendezvous": path, "results": folder, "ranks": processes, "cases": {name: {"folder", "model", "ranks",
"microbatches", "replicas"}}}. A case of fewer ranks than there are runs on the first ones. Writes RESULTS/RANK.json:
for each of its cases the mean loss of its replica in each step (null where the last stage is not), that of the model in
one piece, how many parameters it has, and the largest difference of a gradient, relative to the largest gradient.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tests import export_models
from tests.run_support import imported, loopback

SAMPLES, STEPS, RATE = 2, 2, 0.1
"""Of a microbatch; of a case; of plain gradient descent."""


def main(case_file: str, rank: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = loopback()
    read: dict[str, Any] = json.loads(Path(case_file).read_text())
    world = read["ranks"]
    dist.init_process_group("gloo", init_method=Path(read["rendezvous"]).as_uri(), rank=rank, world_size=world)
    found = {}
    for name, case in read["cases"].items():
        pipeline = imported(Path(case["folder"], "pipeline.py"))
        if case["ranks"] == world:
            mesh = pipeline.mesh("cpu")
        else:  # the first ranks of more: a mesh of one's own
            ranks = torch.arange(case["ranks"]).view(-1, case["replicas"])
            mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("pp", "dp"))
        if rank < case["ranks"]:
            found[name] = compared(case, pipeline, mesh)
    dist.barrier()
    dist.destroy_process_group()
    Path(read["results"], f"{rank}.json").write_text(json.dumps(found))


def compared(case: dict[str, Any], pipeline: Any, mesh: DeviceMesh) -> dict[str, object]:
    replica, loss = mesh.get_local_rank("dp"), export_models.LOSSES[case["model"]]
    model, reference = made(case["model"], seed=replica), made(case["model"], seed=0)
    torch.manual_seed(7)
    inputs, target = export_models.batch(case["model"], SAMPLES)
    schedule, parts = pipeline.build(model, "cpu", mesh, loss, inputs, target)
    own = {id(one) for part in parts for one in part.parameters()}
    losses, expected, difference = [], [], 0.0
    for _ in range(STEPS):
        batch = export_models.batch(case["model"], SAMPLES * case["microbatches"])
        mine, targets = of_replica(batch, replica, case["replicas"])
        found: list[torch.Tensor] = []
        schedule.step(**mine, target=targets, losses=found)
        losses.append(sum(one.item() for one in found) / len(found) if found else None)
        expected.append(trained_whole(reference, loss, batch, case["microbatches"]))
        gradients = {name: one.grad for name, one in reference.named_parameters()}
        largest = max(float(gradient.abs().max()) for gradient in gradients.values() if gradient is not None)
        for name, parameter in model.named_parameters():
            expected_gradient: Any = gradients[name]
            if id(parameter) in own and expected_gradient is None:
                assert parameter.grad is None, name
            elif id(parameter) in own:
                assert parameter.grad is not None, name
                difference = max(difference, float((parameter.grad - expected_gradient).abs().max()) / largest)
        descend(one for part in parts for one in part.parameters())
        descend(reference.parameters())
    return {"losses": losses, "expected": expected, "parameters": len(own), "difference": difference}


def made(name: str, *, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model: nn.Module = getattr(export_models, name)(SAMPLES)[0]
    return model


def of_replica(batch: tuple[dict[str, Any], Any], replica: int, replicas: int) -> tuple[dict[str, Any], Any]:
    inputs, target = batch
    mine = {
        name: one.chunk(replicas)[replica] if isinstance(one, torch.Tensor) else one for name, one in inputs.items()
    }
    return mine, target.chunk(replicas)[replica]


def trained_whole(model: nn.Module, loss: Any, batch: tuple[dict[str, Any], Any], microbatches: int) -> float:
    """The mean loss; gradients are those of it."""
    total = 0.0
    for k in range(microbatches):
        inputs, target = of_replica(batch, k, microbatches)
        value = loss(model(**inputs), target) / microbatches
        value.backward()
        total += value.item()
    return total


def descend(parameters: Any) -> None:
    with torch.no_grad():
        for one in parameters:
            if one.grad is not None:
                one -= RATE * one.grad
                one.grad = None
