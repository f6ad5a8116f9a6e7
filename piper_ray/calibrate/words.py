"""A layout written as one line of words: ``tp=4,pp=8,dp=2,vpp=2,mbs=1``."""

from __future__ import annotations

import re
from collections.abc import Mapping

from piper_ray.calibrate.runs import PublishedRun
from piper_ray.model.arguments import did_you_mean
from piper_ray.model.errors import Fault, InputError
from piper_ray.workloads.formats.faults import Faults

SOURCE = "layout"

_NAMES: Mapping[str, str] = {
    **{name: name for name in ("tp", "pp", "dp", "cp", "ep", "etp", "vpp", "gpus", "seq", "recompute", "schedule")},
    **{name: name for name in ("group", "stages", "gradients", "loss", "precision", "software")},
    "mbs": "microbatch",
    "gbs": "global_batch",
    "sp": "sequence_parallel",
    "zero": "optimizer_sharding",
    "fsdp": "optimizer_sharding",
    "optimizer_on_host": "optimizer_on_host",
}
"""The field of a run for each word."""

_WORD = re.compile(r"(?P<name>[A-Za-z]\w*)(?:=(?P<value>[\w.+-]+))?")
_SHARDED = {"0": "none", "1": "zero1", "2": "zero2", "3": "fsdp"}


def are_words(text: str) -> bool:
    """Whether the text consists of words with values only."""
    return "=" in text and all(_WORD.fullmatch(word) for word in _split(text))


def run_of_words(text: str) -> PublishedRun:
    """A run with this layout and nothing else. Raises InputError with all faults."""
    said: dict[str, object] = {}
    faults = Faults()
    for word in _split(text):
        match = _WORD.fullmatch(word)
        name, value = (match["name"].lower(), match["value"]) if match else (word, None)
        if name not in _NAMES:
            faults.at(name, f"is no word of a layout; expected {', '.join(_NAMES)}{did_you_mean(name, _NAMES)}")
        elif _NAMES[name] in said:
            faults.at(name, "is said twice")
        elif name == "fsdp" and value is not None:
            faults.at(name, f"takes no value, as all replicas share weights; say fsdp,dp={value}")
        else:
            said[_NAMES[name]] = _value(name, value)
    run = faults.model(PublishedRun, said, "")
    if run is None or faults:
        words = {field: word for word, field in _NAMES.items()}
        raise InputError(SOURCE, [Fault(words.get(fault.path, fault.path), fault.message) for fault in faults.found])
    return run


def _split(text: str) -> list[str]:
    return [word for word in re.split(r"[,\s]+", text) if word]


def _value(name: str, text: str | None) -> object:
    if text is None:
        return "fsdp" if name == "fsdp" else True
    if name == "zero":
        return _SHARDED.get(text, text)
    if name == "stages":
        return [int(size) if size.isdecimal() else size for size in text.split("+")]
    if text.isdecimal() and name != "precision":
        return int(text)
    return {"true": True, "false": False}.get(text.lower(), text.replace("+", ","))
