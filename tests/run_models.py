"""Models to train by plans: a small GPT with a loss and microbatches of its own, and ones that are awkward to cut."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from inputs.pytorch.small_gpt import SmallGpt

torch.set_num_threads(1)

HERE = "tests.run_models"
TOKENS, WORDS = 8, 32


def _words(microbatch: int) -> Iterator[torch.Tensor]:
    while True:
        yield torch.randint(WORDS, (microbatch, TOKENS))


def next_word_loss(scores: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(scores[:, :-1].flatten(0, 1), words[:, 1:].flatten())


def gpt(microbatch: int) -> tuple[nn.Module, Iterator[torch.Tensor], object]:
    return SmallGpt(4, 16, 2, TOKENS, WORDS, 1), _words(microbatch), next_word_loss


class Skipping(nn.Module):
    """What its first layer makes is read by all others, its second input by the last; it returns a dict."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))
        self.leave = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        first = x = self.enter(x)
        for layer in self.layers:
            x = torch.tanh(layer(x)) + first
        return {"out": self.leave(x) * scale, "first": first}


def _pairs(microbatch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    while True:
        yield torch.randn(microbatch, 4), torch.rand(microbatch, 1)


def _skipping_loss(found: dict[str, torch.Tensor], x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (found["out"] - x).square().mean() + (found["first"] * scale).square().mean()


def skipping(microbatch: int) -> tuple[nn.Module, Iterator[tuple[torch.Tensor, torch.Tensor]], object]:
    return Skipping(3), _pairs(microbatch), _skipping_loss


SKIPPING_PATHS = ("enter", "layers.0", "layers.1", "layers.2", "leave")


class Turned(nn.Module):
    """Sends a view, and gets a gradient that does not lie in one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned: torch.Tensor = self.linear(x.transpose(1, 2)).transpose(1, 2)
        return turned


class Idle(nn.Module):
    """Has a parameter that it does not use, and writes into what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.idle = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(0.5)
        result: torch.Tensor = self.linear(x)
        return result


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(x)
        return result


class Awkward(nn.Module):
    """Frozen, turned, idle and normalised layers; one module is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.again, self.turned, self.idle = Frozen(), nn.Linear(4, 4), Turned(), Idle()
        self.norm, self.last = nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.again(self.frozen(x))
        x = self.idle(self.turned(self.again(x)))
        result: torch.Tensor = self.last(self.norm(x.flatten(0, 1)))
        return result


def _cubes(microbatch: int) -> Iterator[torch.Tensor]:
    while True:
        yield torch.randn(microbatch, 4, 4)


def _cubed(found: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """What is normalised has a sum, and a sum of squares, without gradient."""
    return found.pow(3).mean()


def awkward(microbatch: int) -> tuple[nn.Module, Iterator[torch.Tensor], object]:
    return Awkward(), _cubes(microbatch), _cubed


AWKWARD_PATHS = ("frozen", "again", "again", "turned", "idle", "norm", "last")


class Dropping(nn.Module):
    """Writes down which numbers it drops, in each pass of a step."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = functional.dropout(torch.ones_like(x))
        rank = os.environ["RANK"]
        if (self.folder / f"begun-{rank}").exists():
            with (self.folder / f"kept-{rank}").open("a") as file:
                file.write("".join(str(int(number > 0)) for number in kept.flatten().tolist()) + "\n")
        result: torch.Tensor = self.linear(x * kept)
        return result


def dropping(folder: str) -> tuple[nn.Module, Iterator[torch.Tensor]]:
    """The same numbers again and again: only what is dropped differs."""

    def microbatches() -> Iterator[torch.Tensor]:
        yield torch.ones(2, 16)
        Path(folder, f"begun-{os.environ['RANK']}").touch()
        while True:
            yield torch.ones(2, 16)

    return nn.Sequential(Dropping(Path(folder)), nn.Linear(16, 16)), microbatches()


DROPPING_PATHS = ("0", "1")


def heavy(microbatch: int) -> tuple[nn.Module, torch.Tensor]:
    """With 2048 samples, each of three layers has a MiB of weights, and four that it keeps for its backward pass."""
    layers = [part for _ in range(3) for part in (nn.Linear(512, 512, bias=False), nn.Tanh())]
    return nn.Sequential(*layers), torch.ones(microbatch, 512)


HEAVY_PATHS = ("0", "2", "4")


class Trouble(nn.Module):
    """Passes on what it gets until its rank's file is there, and then does as that says."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        what = self.file.read_text() if self.file.exists() else ""
        if what == "raise":
            raise ValueError("no such number")
        if what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "leave":
            os._exit(3)
        if what == "hang":
            self.file.with_suffix(".pid").write_text(str(os.getpid()))
            time.sleep(600)
        result: torch.Tensor = self.linear(x)
        return result


class TroubledPipe(nn.Module):
    def __init__(self, file: Path) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), Trouble(file)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(self.first(x))
        return result


TROUBLED_PATHS = ("first", "second")


def troubled(folder: str, words: str) -> tuple[nn.Module, Iterator[torch.Tensor]]:
    """The trouble begins with the first step: until then all ranks have seen an example alone."""
    file = Path(folder) / f"rank-{os.environ['RANK']}"

    def microbatches() -> Iterator[torch.Tensor]:
        yield torch.randn(2, 4)
        file.write_text(words)
        while True:
            yield torch.randn(2, 4)

    return TroubledPipe(file), microbatches()
