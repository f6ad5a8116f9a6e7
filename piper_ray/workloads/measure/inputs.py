"""Inputs given on the command line: ``--input SHAPE[:DTYPE[:LIMIT]]``."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from piper_ray.model.errors import UsageError

_SHAPE = re.compile(r"\d+(x\d+)*|scalar")
_WORDS = "SHAPE[:DTYPE[:LIMIT]] of one sample, such as 3x224x224 or 1024:int64:50257"
_FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_INTEGERS = {"int64": torch.int64, "int32": torch.int32, "bool": torch.bool}


@dataclass(frozen=True)
class Declared:
    """A random input. shape: of a sample; below: integers are less than that."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    below: int

    def tensor(self, microbatch: int) -> torch.Tensor:
        if self.dtype.is_floating_point:
            return torch.randn(microbatch, *self.shape).to(self.dtype)
        return torch.randint(self.below, (microbatch, *self.shape)).to(self.dtype)


def parse_input(text: str) -> Declared:
    """Raises UsageError."""
    shape, _, rest = text.partition(":")
    dtype, _, limit = rest.partition(":")
    dtypes = _FLOATS | _INTEGERS
    dtype = dtype or "float32"
    if not _SHAPE.fullmatch(shape) or dtype not in dtypes or (limit and not limit.isdigit()) or limit == "0":
        raise UsageError(f"--input {text}: expected {_WORDS}; DTYPE is one of {', '.join(dtypes)}")
    sides = () if shape == "scalar" else tuple(map(int, shape.split("x")))
    return Declared(sides, dtypes[dtype], int(limit) if limit else 2)
