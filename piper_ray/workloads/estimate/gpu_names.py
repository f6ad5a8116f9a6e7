"""Finding a GPU by what people and drivers call it.

A name is a model and details: "NVIDIA A100-SXM4-80GB" is an A100, of the form SXM, with 80 GB. It means the GPU of that
model that has all the details it gives; of several the one that is usual, else the first of the table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Protocol

_WITHOUT_MEANING = {
    "nvidia", "amd", "instinct", "geforce", "tesla", "gpu", "gpus", "dgx", "hgx", "generation", "one", "half",
}  # fmt: skip
_FORM = re.compile(r"(sxm\d?|pcie?|nvl\d*|hbm\d?e?)")
_MEMORY = re.compile(r"(\d+)\s*gi?b\b")


class Named(Protocol):
    """What of a GPU takes part: its whole name, and whether it is meant where its model's name stands alone."""

    @property
    def name(self) -> str: ...
    @property
    def usual(self) -> bool: ...


def find_gpu(asked: str, gpus: Mapping[str, Named]) -> str | None:
    """The key of the GPU that is meant, in any spelling; None if there is none of that model with those details."""
    return next(iter(meant_gpus(asked, gpus)), None)


def meant_gpus(asked: str, gpus: Mapping[str, Named]) -> list[str]:
    """The keys of all GPUs that may be meant, the one that is taken first."""
    for key, gpu in gpus.items():
        if _squeezed(asked) in (_squeezed(key), _squeezed(gpu.name)):
            return [key]
    model, details = _parts(asked)
    found = []
    for key, gpu in gpus.items():
        own, own_details = _parts(key)
        if model and own in (model, f"rtx{model}") and details <= own_details | _parts(gpu.name)[1]:
            found.append(key)
    return sorted(found, key=lambda key: not gpus[key].usual)


def near_gpus(asked: str, gpus: Mapping[str, Named]) -> list[str]:
    """Keys that look like what was asked for, the nearest first."""
    spelt: dict[str, str] = {}
    for key in gpus:
        for text in (_parts(key)[0], _squeezed(key)):
            spelt.setdefault(text, key)
    near = [text for words in (_parts(asked)[0], _squeezed(asked)) for text in get_close_matches(words, spelt, n=3)]
    return list(dict.fromkeys(spelt[text] for text in near))[:3]


def _squeezed(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _parts(name: str) -> tuple[str, frozenset[str]]:
    """The model, squeezed, and the details: the form and the memory."""
    model: list[str] = []
    details: set[str] = set()
    for word in re.split(r"[^a-z0-9]+", _MEMORY.sub(r"\1gb", name.lower())):
        if word in _WITHOUT_MEANING:
            continue
        for part in filter(None, _FORM.split(word)):
            memory = re.fullmatch(r"(\d+)gb|(\d\d\d?)", part) if model else None
            if _FORM.fullmatch(part):
                details.add(part[:3])  # of whatever generation
            elif memory:
                details.add(memory[1] or memory[2])
            else:
                model.append(part)
    details.discard("hbm")
    return "".join(model), frozenset(details)
