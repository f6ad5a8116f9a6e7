"""A rank of torchtitan's own code on a layer that is sharded as an exported file says, held against one process."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.run_support import imported, loopback
from tests.scheme_modules import TOKENS, WIDTH, Separate


def main(job_file: str, rank: int) -> None:
    """Three steps of training, for tests.ranks; the result is the greatest difference of a loss or gradient."""
    read: dict[str, Any] = json.loads(Path(job_file).read_text())
    file = Path(read["file"])
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(read["port"]), "GLOO_SOCKET_IFNAME": loopback()}
    torch.set_num_threads(1)
    torch._utils._get_available_device_type = lambda: "cpu"  # torchtitan takes GPUs for there where nothing is
    dist.init_process_group("gloo", rank=rank, world_size=2)
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 - torchtitan's meshes of one rank are of it
    from torchtitan.distributed.parallel_dims import ParallelDims

    dims = ParallelDims(1, 1, 1, 2, 1, 1, world_size=2, spmd_backend="partial_dtensor")
    dims.build_mesh()
    torch.manual_seed(0)
    layer, x = Separate().double(), torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)
    one = copy.deepcopy(layer)
    imported(file).shard(layer)
    layer.parallelize(dims)
    tokens = "in_src_shardings={'x': S(1)}" in file.read_text().replace('"', "'")
    optimizers, worst = [torch.optim.SGD(of.parameters(), 0.1) for of in (one, layer)], 0.0
    for _ in range(3):
        found = layer(x.chunk(2, 1)[rank] if tokens else x).square().mean()
        assert isinstance(found, DTensor)
        expected = one(x).square().mean()
        loss, named = found.full_tensor(), dict(layer.named_parameters())
        torch.autograd.backward(loss)
        torch.autograd.backward(expected)
        worst = max(worst, abs(loss.item() - expected.item()))
        for name, weight in one.named_parameters():
            own = named[name]
            assert weight.grad is not None
            assert isinstance(own.grad, DTensor)
            worst = max(worst, float((own.grad.full_tensor() - weight.grad).abs().max()))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()
    Path(read["results"], f"{rank}.json").write_text(json.dumps(worst))
