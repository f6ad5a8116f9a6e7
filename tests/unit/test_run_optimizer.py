"""Parameters of half precision are trained in full: by torch's own AdamW on a copy in fp32."""

from __future__ import annotations

import torch

from piper_ray.run.rank import MasterAdamW, optimizer_of


def test_half_precision_is_trained_on_full_precision_weights() -> None:
    torch.manual_seed(0)
    weights = torch.randn(5, 3)
    half = torch.nn.Parameter(weights.bfloat16())
    idle = torch.nn.Parameter(weights.bfloat16())
    twin = torch.nn.Parameter(half.detach().float())
    ours, theirs = optimizer_of([half, idle]), torch.optim.AdamW([twin], lr=1e-4)
    assert isinstance(ours, MasterAdamW)
    for _ in range(30):
        half.grad = torch.randn(5, 3).bfloat16()
        twin.grad = half.grad.float()
        ours.step()
        theirs.step()
    assert torch.equal(half, twin.bfloat16())
    assert torch.equal(ours.state[half]["weights"], twin)
    held = sum(one.nbytes for name, one in ours.state[half].items() if name != "step")
    assert held == 12 * half.numel()
    assert not ours.state[idle]


def test_full_precision_is_torchs_own() -> None:
    assert type(optimizer_of([torch.nn.Parameter(torch.zeros(2))])) is torch.optim.AdamW
