"""The table of hardware (``hardware.toml``). A user's own file can add to it or correct it.

A GPU is found by the names that people and drivers use. A name has a model and details: "NVIDIA A100-SXM4-80GB" is an
A100, of the form SXM, with 80 GB. It means the GPU of this model that has all given details; if there are several, the
usual one, else the first of the table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Annotated

from pydantic import Field

from piper_ray.model.errors import InputError, UsageError
from piper_ray.model.units import OnNote, doubtful
from piper_ray.workloads.formats.documents import merged, package_table, parse_toml, read_text
from piper_ray.workloads.formats.faults import Faults, path_of
from piper_ray.workloads.formats.fields import Closed, Degree, Figure, Positive, PositiveRate, PositiveSize

_WITHOUT_MEANING = {
    "nvidia", "amd", "instinct", "geforce", "tesla", "gpu", "gpus", "dgx", "hgx", "generation", "one", "half",
}  # fmt: skip
_FORM = re.compile(r"(sxm\d?|pcie?|nvl\d*|hbm\d?e?)")
_MEMORY = re.compile(r"(\d+)\s*gi?b\b")


def find_gpu(asked: str, gpus: Mapping[str, Gpu]) -> str | None:
    """The key of the GPU with this name, in any spelling; None if no GPU of that model has these details."""
    return next(iter(meant_gpus(asked, gpus)), None)


def meant_gpus(asked: str, gpus: Mapping[str, Gpu]) -> list[str]:
    """The keys of all GPUs that the name may mean, the chosen one first."""
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


def near_gpus(asked: str, gpus: Mapping[str, Gpu]) -> list[str]:
    """Keys that resemble the name, the nearest first."""
    spelt: dict[str, str] = {}
    for key in gpus:
        for text in (_parts(key)[0], _squeezed(key)):
            spelt.setdefault(text, key)
    near = [text for words in (_parts(asked)[0], _squeezed(asked)) for text in get_close_matches(words, spelt, n=3)]
    return list(dict.fromkeys(spelt[text] for text in near))[:3]


def _squeezed(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _parts(name: str) -> tuple[str, frozenset[str]]:
    """The model without separators, and the details: form and memory."""
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


_RATE = "a rate > 0, such as 300GB/s"
_FRACTION_WORDS = "a share > 0 and at most 1"
_Fraction = Annotated[float, Field(strict=True, gt=0.0, le=1.0, description=_FRACTION_WORDS)]

_SIZES = {
    "memory_bytes": "",
    "memory_bytes_per_s": "/s",
    "link_bytes_per_s": "/s",
    "network_bytes_per_s": "/s",
    "host_bytes_per_s": "/s",
    "host_memory_bytes": "",
}
"""Fields of a GPU, and how their unit ends."""


class Training(Closed):
    """Bytes that training keeps for each parameter, without activations."""

    weight_bytes: Figure = Field(description="bytes >= 0")
    gradient_bytes: Figure = Field(description="bytes >= 0")
    optimizer_bytes: Figure = Field(description="bytes >= 0")


class Gpu(Closed):
    """One kind of GPU in its node; hardware.toml explains each constant. Rates are in one direction.

    matrix_flop_per_s: in bf16; the rates of other precisions are 0 if the GPU has no units for them.
    """

    name: str = Field(description="a text")
    memory_bytes: PositiveSize = Field(alias="memory", description="a size > 0, such as 80GB")
    memory_found: _Fraction
    usual: bool = Field(default=False, description="true or false")
    matrix_flop_per_s: Positive = Field(alias="matrix", description="FLOP/s > 0")
    matrix_tf32_flop_per_s: Figure = Field(default=0.0, alias="matrix_tf32", description="FLOP/s >= 0")
    matrix_fp8_flop_per_s: Figure = Field(default=0.0, alias="matrix_fp8", description="FLOP/s >= 0")
    matrix_fp4_flop_per_s: Figure = Field(default=0.0, alias="matrix_fp4", description="FLOP/s >= 0")
    matrix_fraction: _Fraction
    edge: Figure = Field(description="a number >= 0")
    depth_edge: Figure = Field(description="a number >= 0")
    memory_bytes_per_s: PositiveRate = Field(alias="memory_bandwidth", description=_RATE)
    memory_fraction: _Fraction
    link: str = Field(description="a text")
    link_bytes_per_s: PositiveRate = Field(alias="link_bandwidth", description=_RATE)
    link_fraction: _Fraction
    link_latency_s: Figure = Field(alias="link_latency", description="seconds >= 0")
    mesh: bool = Field(default=False, description="true or false")
    network_bytes_per_s: PositiveRate = Field(alias="network_bandwidth", description=_RATE)
    network_fraction: _Fraction
    network_latency_s: Figure = Field(default=5e-6, alias="network_latency", description="seconds >= 0")
    attention_fraction: _Fraction = 0.8
    ampere_attention: _Fraction = 1.0
    fp8_gain: Positive = Field(default=1.0, description="a number > 0")
    kernel_s: Figure = Field(default=0.0, alias="kernel", description="seconds >= 0")
    sorting_s: Figure = Field(default=0.0, alias="sorting", description="seconds >= 0")
    scan_flop_per_s: Positive = Field(default=27e12, alias="scan", description="FLOP/s > 0")
    host_bytes_per_s: PositiveRate = Field(alias="host_bandwidth", description=_RATE)
    host_fraction: _Fraction
    host_updates_per_s: Positive = Field(default=1.4e8, alias="host_updates", description="parameters/s > 0")
    host_memory_bytes: PositiveSize = Field(default=128e9, alias="host_memory", description="a size > 0, such as 128GB")
    gpus_per_node: Degree = Field(description="a whole number >= 1")
    domain: Degree | None = Field(default=None, description="a whole number >= 1")

    @property
    def device_bytes(self) -> float:
        """The memory that programs find: makers write GB for GiB, and the driver takes a part."""
        return self.memory_found * self.memory_bytes * 2.0**30 / 1e9

    def domain_of(self, gpus_per_node: int | None) -> int:
        """The number of GPUs that share the fast link: those of a node, or of several nodes if the link joins them.
        gpus_per_node: None: as it is sold."""
        node = gpus_per_node or self.gpus_per_node
        return self.domain if self.domain is not None and self.domain % node == 0 else node

    def ring_bytes_per_s(self, degree: int) -> float:
        """The rate of a ring of ``degree`` GPUs of a node, in one direction."""
        return self.link_bytes_per_s * self.link_fraction * (max(1, degree - 1) if self.mesh else 1)


@dataclass(frozen=True)
class Hardware:
    """The whole table. ``key`` of a GPU is what ``--gpu`` takes."""

    gpus: Mapping[str, Gpu]
    training: Training

    def gpu(self, key: str) -> Gpu:
        """The GPU with this key or name: "h100", "NVIDIA A100-SXM4-80GB". Raises UsageError."""
        return self.gpus[self.key(key)]

    def key(self, key: str) -> str:
        """The key of the GPU with this name. Raises UsageError."""
        found = find_gpu(key, self.gpus)
        if found is not None:
            return found
        near = near_gpus(key, self.gpus)
        guess = f"; did you mean {' or '.join(near)}?" if near else ""
        raise UsageError(
            f"--gpu {key}: unknown; expected one of {', '.join(self.gpus)} (--hardware FILE adds others){guess}"
        )

    def choice_note(self, key: str) -> str | None:
        """A note if several GPUs have the name and one was chosen; None if the name is clear."""
        taken, *others = meant_gpus(key, self.gpus) or [key]
        if not others:
            return None
        are = "is" if len(others) == 1 else "are"
        return f"GPU {key}: {taken} is assumed; {' and '.join(others)} {are} also called {key}"


def load_hardware(path: str | Path | None = None, on_note: OnNote = lambda text: None) -> Hardware:  # noqa: ARG005
    """The built-in table, overlaid by that of ``path``. on_note: receives notes on sizes and rates that probably lack
    their unit. Raises InputError with all faults."""
    if path is None:
        return _built_in()
    hardware = _read(str(path), merged(_built_in_table(), parse_toml(str(path), read_text(str(path)))))
    for key, gpu in hardware.gpus.items():
        for name, per_second in _SIZES.items():
            doubt = doubtful(getattr(gpu, name), per_second, with_units=True)
            if doubt is not None:
                on_note(f"{path}: {path_of('gpus', key, str(Gpu.model_fields[name].alias))}: {doubt}")
    return hardware


def _built_in_table() -> Mapping[str, object]:
    return package_table("piper_ray.workloads.estimate", "hardware.toml")


@cache
def _built_in() -> Hardware:
    return _read("hardware.toml", _built_in_table())


def _read(source: str, table: Mapping[str, object]) -> Hardware:
    faults = Faults()
    for key in table.keys() - {"gpus", "training"}:
        faults.at(path_of("", key), "unknown key; expected gpus or training")
    training = faults.model(Training, table.get("training"), "training")
    listed = table.get("gpus")
    if not isinstance(listed, Mapping):
        faults.at("gpus", "not a table; expected a table of GPUs")
        listed = {}
    read = {key: _gpu(key, listed, faults) for key in listed}
    if faults or training is None:
        raise InputError(source, faults.found)
    return Hardware({key: gpu for key, gpu in read.items() if gpu is not None}, training)


def _gpu(key: str, listed: Mapping[str, object], faults: Faults) -> Gpu | None:
    """The GPU of this key; None if its own figures have faults, which are noted. Faults that it inherits are noted at
    its base."""
    entry, path, found = listed[key], path_of("gpus", key), Faults()
    gpu = found.model(Gpu, _based(key, listed, faults), path)
    if isinstance(entry, Mapping) and "base" in entry:
        found = Faults(one for one in found.found if one.path in {path_of(path, name) for name in entry})
    faults.found += found.found
    return gpu


def _based(key: str, listed: Mapping[str, object], faults: Faults) -> object:
    """The entry, with the missing fields taken from its base."""
    entry, seen = listed[key], {key}
    while isinstance(entry, Mapping) and "base" in entry:
        base = entry["base"]
        if not isinstance(base, str) or base not in listed or base in seen:
            faults.at(path_of("gpus", key, "base"), f"expected another GPU of the table: {', '.join(listed)}")
            return {name: value for name, value in entry.items() if name != "base"}
        seen.add(base)
        below = listed[base]
        own = {name: value for name, value in entry.items() if name != "base"}
        entry = {**below, **own} if isinstance(below, Mapping) else own
    return entry
