"""The text of a layout that somebody runs: what it says beside its stages, the words of a launch command, script or
configuration, and whether each option that divides a model was understood: one that was not would be taken for 1, or
for not there, in silence.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any

from piper_ray.model.errors import UsageError
from piper_ray.model.figures import printable
from piper_ray.model.instance import Instance
from piper_ray.model.mode import Recomputation
from piper_ray.model.schedule import ScheduleName


@dataclass(frozen=True)
class RunAs:
    """How a layout is run. None: as the layout says, or else 1, or what ranks are left for the data-parallel degree.

    expert_parallel, expert_tensor: ranks that experts are spread over, and those that share one. recomputed_layers:
    with full recomputation, of each stage so many first blocks, or of stage i recomputed_layers[i]; None: all.
    gathered: what sequence parallelism gathers is kept, where nothing is recomputed. optimizer_shards: replicas that
    share the optimizer's state, or ALL_REPLICAS. weights_sharded: whether they share weights and gradients, too. group:
    microbatches that pass through a chunk before the next. world: ranks in all; None: as many as the workload has
    devices.
    """

    pipeline_ranks: int | None = None
    tensor_parallel: int | None = None
    context_parallel: int | None = None
    expert_parallel: int | None = None
    expert_tensor: int | None = None
    data_parallel: int | None = None
    schedule: ScheduleName | None = None
    recomputation: Recomputation | None = None
    recomputed_layers: int | tuple[int, ...] | None = None
    sequence_parallel: bool | None = None
    gathered: bool | None = None
    optimizer_shards: int | None = None
    weights_sharded: bool | None = None
    group: int | None = None
    world: int | None = None

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> RunAs:
        """What the figures say by their names here; further ones are no part of it."""
        return cls(**{one.name: said[one.name] for one in fields(cls) if one.name in said})

    def over(self, other: RunAs) -> RunAs:
        """These, and the other's where nothing is said here."""
        own = {name: value for name, value in vars(self).items() if value is not None}
        return replace(other, **own)


@dataclass(frozen=True)
class ReadLayout:
    """Pieces of each stage, what is said beside, and what is not held by a plan, a sentence each.

    names: the names of all options that were read, as they stand in the layout, in Python
    (``tensor_model_parallel_size``). source: what the layout is, in words. batch: what it is run with:
    ``microbatch_samples``, ``global_batch_samples`` and ``tokens_per_sample``, where it says them.
    """

    stages: tuple[tuple[int, ...], ...]
    run_as: RunAs
    notes: tuple[str, ...] = ()
    names: frozenset[str] = frozenset()
    source: str = ""
    batch: Mapping[str, object] = field(default_factory=dict)


def check_batch(instance: Instance, source: str, said: Mapping[str, object]) -> None:
    """Raises UsageError where the samples that the layout is run with are not the workload's.

    said: as ``ReadLayout.batch``.
    """
    samples, length = instance.batch.samples_per_microbatch, instance.batch.tokens_per_sample
    microbatch, batch, tokens = map(said.get, ("microbatch_samples", "global_batch_samples", "tokens_per_sample"))
    if isinstance(microbatch, int) and samples is not None and microbatch != samples:
        raise UsageError(
            f"{source}: microbatches of {microbatch} samples; the workload's have {samples}, and its times are of these"
        )
    if isinstance(tokens, int) and length is not None and tokens != length:
        raise UsageError(f"{source}: samples of {tokens} tokens; the workload's have {length}, and its times are so")
    of_each = microbatch if isinstance(microbatch, int) else samples
    if isinstance(batch, int) and of_each and batch != instance.microbatches * of_each:
        fitting = f" (--microbatches {batch // of_each})" if batch % of_each == 0 < batch else ""
        raise UsageError(
            f"{source}: a batch of {batch} samples; the workload's has {instance.microbatches * of_each}{fitting}"
        )


def positive(name: str, value: int) -> int:
    """Raises UsageError for a number below 1. name: as the user gave it."""
    if value < 1:
        raise UsageError(f"{name} {value}: expected a positive number")
    return value


_EXPANSION = re.compile(r"(\$(?P<plain>\w+)|\$\{(?P<braced>\w+)[^}]*\}|\$[@*]|\$\(.*|`.*)")
"""A word that stands for other words."""

_ASSIGNED = re.compile(r"(?:^|[\s;])(\w+)\+?=")
_LIST = re.compile(r"^\w+\+?=\(")
_OF_OPTIONS = re.compile(r"ARG|OPT|FLAG|PARAM|CONF|EXTRA|OVERRIDE", re.IGNORECASE)
_SEPARATORS = frozenset({"|", "||", "|&", "&&", "&", ";"})
_OTHER_FILES = ("--yaml-cfg", "--use-mp-args-from-checkpoint-args")
_STARTED = re.compile(r"--(?P<name>nproc[_-]per[_-]node|nnodes)(?:=|\s+)['\"]?(?P<count>\d+)(?![\w:.])")

_COMMENT = re.compile(r"(^|\s)#.*$", re.MULTILINE)
_KEY = re.compile(
    r"(?<![\w./$-])(?P<dashes>[-\u2013\u2014]{0,2})(?P<name>[A-Za-z][\w.-]*)"
    r"(?=(?P<between>['\"]?\s*[:=,]\s*|['\"]?[\s;|&()<>`]+|['\"]?$)['\"]?(?P<value>[^\s'\",;)\]}]*))"
)
"""An option and what follows it, in a command, YAML, TOML, JSON or Python."""

_DEGREES = frozenset({
    "parallel", "parallelism", "pipeline", "degree", "stages",
    "tp", "pp", "cp", "ep", "dp", "etp", "edp", "vp", "vpp", "mp",
})  # fmt: skip
"""Parts of a name that says how something is divided, where a number follows."""

_OLDER_RECOMPUTATION = ("activations_checkpoint", "checkpoint_activations", "checkpoint_num_layers")

_LONG = ("parallel", "pipeline")
_ALIKE = 0.85
"""The ratio of difflib from which on a name is a known one misspelt."""


def command_words(text: str, source: str, switches: Collection[str]) -> list[str]:
    """Raises UsageError where quotes do not close, and where options are elsewhere: in a variable that the text does
    not set, in what a command prints, in another file.

    source: what the text is, in words. switches: options that no value follows.
    """
    try:
        words = list(_of_training(shlex.split(text, comments=True)))
    except ValueError as error:
        raise UsageError(f"{source}: {error}") from None
    hidden = next(_hidden(words, frozenset(_ASSIGNED.findall(text)), switches), None)
    if hidden is not None:
        raise UsageError(
            f"{source}: what stands behind {printable(hidden)} cannot be seen here; expected the options themselves"
        )
    return [bare for word in words if (bare := _bare(word))]


def ranks_started(text: str) -> int | None:
    """The number of ranks that torchrun is told to start; None where it is not told, or not with numbers."""
    said = {match["name"][:5]: int(match["count"]) for match in _STARTED.finditer(text)}
    return said["nproc"] * said["nnode"] if len(said) == len({"nproc", "nnode"}) else None


def _of_training(words: Sequence[str]) -> Iterator[str]:
    """The training's own words, without commands that stand beside or behind it."""
    beside = False
    for word in words:
        if word in _SEPARATORS or word.startswith((">", "2>", "&>")):
            beside = True
        elif word.endswith(".py") or "=(" in word:
            beside = False
        if not beside:
            yield word
        beside = beside or word.endswith(";")


def _bare(word: str) -> str:
    """The word without what begins or ends a list, or ends a command."""
    word = _LIST.sub("", word)
    return word if "(" in word else word.rstrip(";)")


def _hidden(words: Sequence[str], assigned: Collection[str], switches: Collection[str]) -> Iterator[str]:
    """Words of the training script, and of lists that are set for it, that stand for others which are not there."""
    of_script = not any(word.endswith(".py") for word in words)
    before = ""
    for word in words:
        of_script = of_script or word.endswith(".py") or "=(" in word
        expansion = _EXPANSION.fullmatch(_bare(word))
        if of_script and word.startswith(_OTHER_FILES):
            yield word
        elif of_script and expansion is not None:
            name = expansion["plain"] or expansion["braced"]
            is_value = before.startswith("--") and "=" not in before and before not in switches
            named_value = name is not None and not _OF_OPTIONS.search(name)
            if name not in assigned and not (is_value and named_value):
                yield _bare(word)
        before = word


def require_understood(text: str, read: Collection[str], known: Collection[str], harmless: Collection[str]) -> None:
    """Raises UsageError where the text has an option that says how a model is divided and that was not read.

    read: the names of options that were read. known: those of all that can be read. harmless: further ones that decide
    nothing of a plan. All are names in Python (``tensor_model_parallel_size``).
    """
    values: dict[str, set[str]] = {}
    for shown, name, value in _options(_COMMENT.sub("", text)):
        if name in known:
            if name not in read:
                raise UsageError(f"layout: {shown} stands in a place where it is not read; {_EXPECTED}")
            values.setdefault(name, set()).add(value)
        elif name not in harmless and name not in read:
            if (meant := _misspelt(name, known)) is not None:
                written = meant if shown[0].isalpha() else "--" + meant.replace("_", "-")
                raise UsageError(f"layout: {shown} is not understood; did you mean {written}?")
            if _is_degree(name, value) or _recomputes(name, value):
                raise UsageError(f"layout: {shown} is not understood; {_EXPECTED}")
    for name, said in values.items():
        if len(said) > 1:
            raise UsageError(f"layout: {name} is said as {' and as '.join(sorted(said))}; expected one")


_EXPECTED = (
    "expected Megatron's arguments as one text or command, with nothing in quotes or variables, or torchtitan's, "
    "FlagScale's or Megatron-Bridge's configuration"
)


def _options(text: str) -> Iterator[tuple[str, str, str]]:
    """Each option as it stands, its name in Python without what it is a field of, and the first word that follows."""
    for match in _KEY.finditer(text):
        dashes, name, between, value = match["dashes"], match["name"], match["between"], match["value"]
        is_word = not dashes and not between.strip("'\" \t\n;|&()<>`")
        is_variable = not dashes and name.isupper()  # of the shell: where it is used, no number is found
        if not is_word and not is_variable:
            follows = value if value[:1].isalnum() else ""  # not the next option
            yield printable(dashes + name), name.rpartition(".")[2].strip("-").replace("-", "_"), follows


def _misspelt(name: str, known: Collection[str]) -> str | None:
    return next(iter(get_close_matches(name, known, 1, _ALIKE)), None)


def _recomputes(name: str, value: str) -> bool:
    """Whether it is one of the ways to ask for recomputation that Megatron and NeMo had before."""
    return name.startswith(_OLDER_RECOMPUTATION) and value.lower() not in ("null", "none", "false")


def _is_degree(name: str, value: str) -> bool:
    if not value[:1].isdigit():
        return False
    parts = name.lower().split("_")
    return any(part in _DEGREES or get_close_matches(part, _LONG, 1, _ALIKE) for part in parts)
