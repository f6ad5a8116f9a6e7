"""Models to profile: a small GPT (the example of ``inputs/pytorch``), a small ResNet, two towers, and awkward ones."""

from __future__ import annotations

from collections import namedtuple

import torch
from torch import nn
from torch.nn import functional

# With small models threads mostly wait for each other, the more so on a busy machine.
torch.set_num_threads(1)

GPT = "inputs/pytorch/small_gpt.py:small_gpt"
HERE = "tests.profile_models"


class Bottle(nn.Module):
    """A residual block: two convolutions and a path around them."""

    def __init__(self, channels: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.around: nn.Module = nn.Identity()
        if stride > 1 or channels != outputs:
            self.around = nn.Sequential(nn.Conv2d(channels, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        result: torch.Tensor = self.relu(y + self.around(x))
        return result


class SmallResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, 1, 1)
        self.norm = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.stage1 = nn.Sequential(Bottle(8, 8, 1), Bottle(8, 8, 1))
        self.stage2 = nn.Sequential(Bottle(8, 16, 2), Bottle(16, 16, 1))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.norm(self.conv(x)))
        x = self.pool(self.stage2(self.stage1(x)))
        result: torch.Tensor = self.head(torch.flatten(x, 1))
        return result


def small_resnet() -> tuple[nn.Module, torch.Tensor]:
    return SmallResNet(), torch.randn(1, 3, 16, 16)


Features = namedtuple("Features", ["pooled", "all"])  # noqa: PYI024 - plain is what users have


class Encoder(nn.Module):
    """Mixes its input with what came first, so that the tower has edges that jump."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor, first: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return {"x": functional.gelu(self.mix(torch.cat([x, x if first is None else first], dim=-1)))}


class Tower(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.enter = nn.Linear(width, width)
        self.encoders = nn.ModuleList(Encoder(width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> Features:
        first = x = self.enter(x)
        for encoder in self.encoders:
            x = encoder(x, first=first)["x"]
        return Features(pooled=x.mean(dim=1), all=x)


class TwoTowers(nn.Module):
    """Inputs by keyword, tuples and dicts between modules, a parameter of its own, a dict as the result."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.towers = nn.ModuleDict({"image": Tower(width, 3), "text": Tower(width, 2)})
        self.scale = nn.Parameter(torch.zeros(()))
        self.join = nn.Bilinear(width, width, 1)

    def forward(self, *, image: torch.Tensor, text: torch.Tensor, normalise: bool = False) -> dict[str, torch.Tensor]:
        of_image, of_text = self.towers["image"](image), self.towers["text"](text)
        left, right = of_image.pooled, of_text.pooled
        if normalise:
            left, right = functional.normalize(left), functional.normalize(right)
        return {"score": self.join(left, right) * self.scale.exp(), "image": of_image.all}


def two_towers(width: int = 16) -> tuple[nn.Module, dict[str, object]]:
    inputs = {"image": torch.randn(2, 6, width), "text": torch.randn(2, 4, width), "normalise": True}
    return TwoTowers(width), inputs


def only_a_module(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))


class Branching(nn.Module):
    """Its way depends on numbers in its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.inner = InnerBranch()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(self.first(x))
        return result


class InnerBranch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([only_a_module(4), Encoder(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            x = -x
        result: torch.Tensor = self.blocks[1](x)["x"]
        return result


def branching() -> tuple[nn.Module, torch.Tensor]:
    return Branching(), torch.randn(2, 4)


class Holder:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Wrapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Holder:
        return Holder(self.inner(x))


class Unwrapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, held: Holder) -> torch.Tensor:
        result: torch.Tensor = self.inner(held.x)
        return result


def wrapping() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(Wrapping(), Unwrapping()), torch.randn(2, 4)


def returning_an_object() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(Wrapping()), torch.randn(2, 4)


def of_wrong_shape() -> tuple[nn.Module, torch.Tensor]:
    return only_a_module(8), torch.randn(2, 5)


def of_sides_that_differ() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return TwoTowers(4), {"image": torch.randn(2, 6, 4), "text": torch.randn(3, 4, 4)}


def without_parameters() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.ReLU()), torch.randn(2, 4)


def without_layers() -> tuple[nn.Module, torch.Tensor]:
    return nn.Linear(4, 4), torch.randn(2, 4)


def raising(sides: int = 3) -> nn.Module:
    raise ValueError(f"cannot make\n{sides} sides")


def returning_text() -> str:
    return "a model"


def needing(sides: int) -> nn.Module:
    return only_a_module(sides)


def uneven_shards(tensor_parallel: int) -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(tensor_parallel))), torch.randn(2, 4)
