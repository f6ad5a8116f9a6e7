"""Settings of a launch that a plan does not hold: refused if they divide the model, and noted if they cost time or
memory.

Also compares a launch that only names its model with the workload's model.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches

from piper_ray.export.flags import MEGATRON, READ_FIELDS, READ_FLAGS, RENAMED_FIELDS, flag_of
from piper_ray.launches.launch import readable
from piper_ray.model.errors import UsageError
from piper_ray.model.figures import printable
from piper_ray.model.instance import Instance
from piper_ray.workloads.estimate.config import model_of_config
from piper_ray.workloads.estimate.families import Microbatch

_DEGREES = frozenset({
    "parallel", "parallelism", "pipeline", "degree", "stages",
    "tp", "pp", "cp", "ep", "dp", "etp", "edp", "vp", "vpp", "mp",
})  # fmt: skip
"""Words in names of settings that divide something, if their value is a number."""

_OLDER_RECOMPUTATION = ("activations_checkpoint", "checkpoint_activations", "checkpoint_num_layers")
_LONG = ("parallel", "pipeline")
_ALIKE = 0.85
"""The ratio of difflib from which a name is taken for a misspelt known one."""

_NOTHING = (None, False, 0, "", "none", "null", "false", "no", "None", "False", "fp32", "torch.float32", "float32")
"""Values that request nothing: switches that are off, and the usual precision of what is kept."""


def notes_of_the_rest(settings: Mapping[str, object], read: Collection[str]) -> Iterator[str]:
    """Sentences on settings that are ignored. settings: by name in Python, Megatron's or similar names. read: names
    that were read or compared.

    Raises UsageError for a setting that divides the model, because ignoring it would mean 1 or none.
    """
    rest = {name: value for name, value in settings.items() if name not in read and not _is_harmless(name)}
    for name, value in rest.items():
        require_no_degree(name, value, READ_FLAGS.keys() | RENAMED_FIELDS.keys() | READ_FIELDS)
    said = [name for name, value in rest.items() if not _is_nothing(value)]
    costly = [name for name in said if name.startswith(tuple(MEGATRON.costly))]
    if costly:
        yield f"not counted in times and memory, as plans have no such setting: {_listed(costly)}"
    if saving := [name for name in costly if name.startswith(tuple(MEGATRON.saving))]:
        yield f"the launch may hold less memory than is counted, because of {_listed(saving)}"
    if unknown := [name for name in said if name not in costly]:
        yield f"unknown, and ignored: {_listed(unknown)}"


def require_no_degree(name: str, value: object, known: Collection[str]) -> None:
    """Raises UsageError for a name similar to a known one, and for one that divides or recomputes a model."""
    word = readable(value) if isinstance(value, str) else "" if value is None else str(value)
    meant = next(iter(get_close_matches(name, known, 1, _ALIKE)), None)
    if meant is not None and not _is_nothing(value):
        raise UsageError(f"layout: {_shown(name)} is not understood; did you mean {_shown(meant)}?")
    if _is_degree(name, word) or _recomputes(name, word):
        raise UsageError(f"layout: {_shown(name)} {printable(word[:40])} is not understood, and may divide the model")


def _is_harmless(name: str) -> bool:
    if name in MEGATRON.harmless or name in MEGATRON.model_details:
        return True
    return name.startswith(tuple(MEGATRON.harmless_beginnings)) and not _recomputes(name, "full")


def _is_nothing(value: object) -> bool:
    return isinstance(value, (bool, int, float, str, type(None))) and value in _NOTHING


def _shown(name: str) -> str:
    return printable(flag_of(name)) if name.islower() and "." not in name else printable(name)


def _listed(names: list[str]) -> str:
    return ", ".join(printable(flag_of(name)) for name in names)


def _recomputes(name: str, word: str) -> bool:
    """Whether it is one of the earlier ways of Megatron and NeMo to request recomputation."""
    return name.startswith(_OLDER_RECOMPUTATION) and word.lower() not in ("null", "none", "false", "0", "")


def _is_degree(name: str, word: str) -> bool:
    bare = word.strip("[]").replace(",", "").replace(" ", "")
    if not bare.isdigit() or bare in ("0", "1"):
        return False
    parts = name.lower().split("_")
    return any(part in _DEGREES or get_close_matches(part, _LONG, 1, _ALIKE) for part in parts)


_BILLIONS = re.compile(r"(?<![\dx.a-z])(\d+(?:\.\d+)?)b(?![a-z])", re.IGNORECASE)
_NAMED_ALIKE = 1.5
"""Names round the number of parameters, and only some count the embedding."""


def notes_of_model(name: str, instance: Instance) -> Iterator[str]:
    """A sentence on the name. Raises UsageError if it states another size than that of the workload's model."""
    yield f"the launch names its model, {name}, but not the sizes, so these are not compared with the workload's"
    said = _BILLIONS.search(name)
    if said is None or instance.model is None or not instance.model.config:
        return
    model = model_of_config("model", instance.model.config)
    tokens = None if instance.batch.tokens_per_sample is None else 1
    billions = model.architecture(Microbatch(1, tokens, fused=True)).parameters / 1e9
    if not 1 / _NAMED_ALIKE <= billions / float(said[1]) <= _NAMED_ALIKE:
        raise UsageError(f"layout: the model is {name} by its name, and the workload's has {billions:.3g}B parameters")
