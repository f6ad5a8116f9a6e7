"""Published training runs: layout, measured step, memory. Reads a file into typed runs, or reports its faults.

There are three forms: one run; a list of runs, or an object with ``runs``, where each run has all its figures; and an
object with ``models`` and ``sources``, where models and the figures that all runs of a source share are written once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from piper_ray.model.arguments import choice
from piper_ray.model.errors import InputError, UsageError
from piper_ray.workloads.estimate.runtimes import Loss
from piper_ray.workloads.estimate.software import (
    Overlap,
    context_exchange_named,
    dispatcher_named,
    graphs_named,
    overlaps_named,
    precision_named,
    software_named,
)
from piper_ray.workloads.formats.documents import parse_json, read_text, repeated_keys
from piper_ray.workloads.formats.faults import Faults, path_of, shown
from piper_ray.workloads.formats.fields import WHOLE, Open


def _text(value: object) -> object:
    return "" if value is None else value


def _words(value: object) -> str:
    return value if isinstance(value, str) else ""


_Whole = Annotated[int, WHOLE, Field(strict=True, ge=1, le=2**40)]
_Layers = Annotated[int, WHOLE, Field(strict=True, ge=0, le=2**40)]
_Part = Annotated[float, Field(ge=0.0, le=1.0)]
_Rate = Annotated[float, Field(gt=0.0, le=1e30, allow_inf_nan=False)]
_Count = Annotated[_Whole | None, Field(description="a whole number >= 1, or null")]
_Positive = Annotated[_Rate | None, Field(description="a number > 0, or null")]
_Share = Annotated[_Part | None, Field(description="a number from 0 to 1, or null")]
_Flag = Annotated[bool | None, Field(description="true, false or null")]
_Text = Annotated[str, BeforeValidator(_text), Field(description="a text, or null")]
_Names = Annotated[list[str] | None, Field(description="a list of names, or null")]
_Words = Annotated[str, BeforeValidator(_words)]
"""A text that is accepted whatever it is; other values become an empty text."""


class RunModel(Open):
    """The trained model. config: a Hugging Face config, or the name of a known model."""

    name: _Text = ""
    config: dict[str, Any] | str | None = Field(default=None, description="a config, or the name of a known model")


class PublishedRun(Open):
    """A published run; None stands for what it does not state. step_s: the time of a whole batch (``global_batch``
    sequences).

    tp, pp, dp, cp, ep, etp: degrees of tensor, pipeline, data, context and expert parallelism, and of tensor
    parallelism within experts. vpp: chunks of the model on each rank. group: microbatches that pass through a chunk
    before the next.
    stages: layers of each stage (or of each rank, if it has several chunks). precision, recompute, optimizer_sharding,
    schedule, software, context_exchange: as ``layouts`` reads them. optimizer_on_host: whether its state is in host
    memory.
    tensor_overlap, expert_overlap: shares of these exchanges that overlap with work; overlaps: names of exchanges that
    overlap if the software is set so; graphs: what CUDA graphs capture; overlapped: whether gradients and transfers are
    exchanged while passes run. figure: a benchmark, where routers are forced to be balanced, or a production average;
    expert_imbalance: if known. dispatcher: how tokens reach experts. gradients: the precision of their sum, fp32 or
    bf16;
    loss: fused or not.

    node_gbit_per_s, matrix_flop_per_s, memory_bytes_per_s, memory_gb: of a machine that differs from the standard one.
    """

    id: _Text = Field(default="", description="a text")
    source: _Words = ""
    citation: _Words = ""
    model: RunModel = RunModel()
    gpu: str | None = Field(default=None, description="the name of a GPU")
    gpus: _Count = None
    gpus_per_node: _Count = None
    tp: _Count = None
    pp: _Count = None
    vpp: _Count = None
    group: _Count = None
    dp: _Count = None
    cp: _Count = None
    ep: _Count = None
    etp: _Count = None
    microbatch: _Count = None
    global_batch: _Count = None
    seq: _Count = None
    precision: _Text = ""
    recompute: _Text = ""
    sequence_parallel: _Flag = None
    fused_attention: _Flag = None
    optimizer_sharding: _Text = ""
    optimizer_on_host: _Flag = None
    schedule: _Text = ""
    software: _Text = ""
    context_exchange: _Text = ""
    tensor_overlap: _Share = None
    expert_overlap: _Share = None
    overlapped: _Flag = None
    overlaps: _Names = None
    graphs: _Names = None
    figure: _Text = ""
    expert_imbalance: _Positive = None
    dispatcher: _Text = ""
    gradients: _Text = ""
    loss: _Text = ""
    node_gbit_per_s: _Positive = None
    matrix_flop_per_s: _Positive = None
    memory_bytes_per_s: _Positive = None
    memory_gb: _Positive = None
    stages: list[_Layers] | None = Field(default=None, description="a list of whole numbers")
    step_s: _Positive = None
    tokens_per_s_per_gpu: _Positive = None
    published_memory_gb: _Positive = None
    peak_allocated_gib: _Positive = None
    notes: _Words = ""

    @property
    def measured_step_s(self) -> float | None:
        """The step time as published, or computed from tokens per second; None if neither is known."""
        if self.step_s is not None:
            return self.step_s
        known = self.tokens_per_s_per_gpu and self.gpus and self.global_batch and self.seq
        if not known or self.tokens_per_s_per_gpu is None:
            return None
        return self.global_batch * self.seq / (self.tokens_per_s_per_gpu * self.gpus)  # type: ignore[operator]


def read_runs(path: str | Path) -> list[PublishedRun]:
    """The runs of a file, in its order. Raises InputError for a file without a list of runs, and with every fault in
    the runs."""
    source = str(path)
    text = read_text(source)
    document = parse_json(source, f'{{"runs": {text}}}' if text.lstrip().startswith("[") else text)
    faults, found, seen = Faults(repeated_keys(document)), list[PublishedRun](), set[str]()
    entries = list(_entries(document, faults))
    for where, entry in entries:
        if isinstance(entry, Mapping):
            for key in (key for key in entry if key not in PublishedRun.model_fields):
                for meant in get_close_matches(key, PublishedRun.model_fields, 1, _MISSPELT):
                    faults.at(path_of(where, key), f"unknown key; did you mean {meant}?")
        run = faults.model(PublishedRun, entry, where)
        if run is None:
            continue
        run = run if run.id else run.model_copy(update={"id": where})
        if run.id in seen:
            faults.at(f"{where}.id", "stands for an earlier run, too; expected another")
        seen.add(run.id)
        found.append(run)
    if faults:
        for where, entry in entries:
            if isinstance(entry, Mapping):
                note_words(entry, where, faults)
        raise InputError(source, faults.found)
    return found


def is_run(document: Mapping[str, object]) -> bool:
    """Whether the document has a key that only runs have."""
    return not document.keys().isdisjoint({"step_s", "tokens_per_s_per_gpu", "global_batch", "tp", "pp", "dp"})


_OVERLAPS = {"expert-all-to-all": Overlap.EXPERTS.value}
"""Other names of overlaps that runs use."""


def overlaps_of(names: Iterable[str]) -> tuple[Overlap, ...]:
    """The exchanges of these names. Raises UsageError."""
    return overlaps_named(_OVERLAPS.get(name, name) for name in names)


def _check_gradients(name: str) -> None:
    if name not in ("fp32", "bf16", "fp16"):
        raise UsageError(f"gradients {name} are unknown; expected fp32, bf16 or fp16")


WORDS: Mapping[str, Callable[..., object]] = {
    "software": software_named,
    "precision": precision_named,
    "overlaps": overlaps_of,
    "context_exchange": context_exchange_named,
    "dispatcher": dispatcher_named,
    "graphs": graphs_named,
    "gradients": _check_gradients,
    "loss": partial(choice, "loss", kind=Loss),
}
"""What the words in these fields of a run stand for. Each raises UsageError for a word that it does not know."""


def note_words(said: Mapping[str, object], where: str, faults: Faults) -> None:
    """Notes words that nobody knows, for a run that is refused for other faults before it is laid out."""
    read = Faults()
    for name, meaning in WORDS.items():
        run = read.model(PublishedRun, {name: said.get(name)}, where)
        if word := getattr(run, name, None):
            try:
                meaning(word)
            except UsageError as error:
                faults.at(path_of(where, name), str(error))


_MISSPELT = 0.85
"""Keys that are at least so much like a known one are no facts of their own."""


def _entries(document: object, faults: Faults) -> Iterator[tuple[str, object]]:
    if isinstance(document, Mapping) and "sources" in document:
        yield from _compact(document, faults)
        return
    if isinstance(document, Mapping) and "runs" not in document and is_run(document):
        yield "run", document
        return
    listed = document.get("runs") if isinstance(document, Mapping) else document
    if not isinstance(listed, list):
        faults.at("runs", f"{'missing' if listed is None else shown(listed)}; expected a list of runs")
        return
    for number, entry in enumerate(listed):
        yield f"runs[{number}]", entry


def _compact(document: Mapping[str, Any], faults: Faults) -> Iterator[tuple[str, object]]:
    models, sources = document.get("models"), document["sources"]
    if not isinstance(models, Mapping) or not isinstance(sources, list):
        faults.at("sources", "expected an object of models and a list of sources")
        return
    for place, origin in enumerate(sources):
        shared = origin.get("of_all", {}) if isinstance(origin, Mapping) else None
        listed = origin.get("runs") if isinstance(origin, Mapping) else None
        if not isinstance(shared, Mapping) or not isinstance(listed, list):
            faults.at(f"sources[{place}]", "expected an object with a list of runs")
            continue
        told = {key: origin[key] for key in ("source", "citation", "verified") if key in origin}
        for number, own in enumerate(listed):
            where = f"sources[{place}].runs[{number}]"
            if not isinstance(own, Mapping):
                yield where, own
                continue
            run = {**told, **shared, **own}
            name = run.get("model")
            if isinstance(name, str):
                run["model"] = {"name": name, **models[name]} if isinstance(models.get(name), Mapping) else name
            yield where, run
