"""The optimizer of a run: AdamW, with full-precision weights and moments for parameters of half precision, as profiles
count them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.adamw import adamw

_LR = 1e-4
_FULL_BYTES = 4


def optimizer_of(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """torch's AdamW if all parameters have full precision, else ``MasterAdamW``."""
    trained = list(parameters)
    is_full = all(one.element_size() >= _FULL_BYTES for one in trained)
    return (torch.optim.AdamW if is_full else MasterAdamW)(trained, lr=_LR)


class MasterAdamW(torch.optim.AdamW):
    """AdamW whose state holds, for a parameter of half precision, an fp32 copy in addition to its two moments: 12
    bytes. Without the copy, an update smaller than a 256th of a bf16 weight is lost."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Updates parameter by parameter, so that only one gradient exists in fp32 at a time. closure: must be None."""
        assert closure is None
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    weights = parameter.detach().float()
                    moments = torch.zeros_like(weights), torch.zeros_like(weights)
                    state["step"] = torch.tensor(0.0)
                    state["weights"], state["exp_avg"], state["exp_avg_sq"] = weights, *moments
                adamw(
                    [state["weights"]],
                    [parameter.grad.float()],
                    [state["exp_avg"]],
                    [state["exp_avg_sq"]],
                    [],
                    [state["step"]],
                    foreach=False,
                    amsgrad=False,
                    beta1=beta1,
                    beta2=beta2,
                    lr=group["lr"],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    maximize=False,
                )
                parameter.copy_(state["weights"])
