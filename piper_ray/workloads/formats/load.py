"""From a path or a parsed document to an instance, and from an instance to a file."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from piper_ray.model import arguments
from piper_ray.model.errors import Fault, InputError, UsageError
from piper_ray.model.forms import FORM_OF_SUFFIX, Form, InFlight
from piper_ray.model.instance import Instance
from piper_ray.model.plan import Plan
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.model.solution import Solution
from piper_ray.storage.files import write_atomically
from piper_ray.workloads.formats import (
    dnn_partitioning,
    documents,
    objects,
    pipedream_profile,
    plans,
    upstream,
    workload,
    workload_schema,
    workload_writer,
)
from piper_ray.workloads.formats.faults import Faults
from piper_ray.workloads.formats.surroundings import Quantities

Reader = Callable[[Mapping[str, object], Quantities, str, Faults], Instance | None]

Source = str | os.PathLike[str] | Mapping[str, object]

T = TypeVar("T")

_LONGEST_BASE_CHAIN = 8
_PROFILE_LINE = re.compile(r"\s*node[0-9]+ -- ")


def load(
    source: Source,
    *,
    devices: int | None = None,
    microbatches: int | None = None,
    memory_bytes: float | str | None = None,
    bandwidth_bytes_per_s: float | str | None = None,
    in_flight: InFlight | str | None = None,
) -> Instance:
    """The instance that a file or a parsed document describes.

    source: the path of Piper's or dnn-partitioning's JSON (.json; distinguished by their keys), our compact workload
    (.toml; see ``formats/workload_schema.py``) or a PipeDream profile (.txt); with another extension the content
    decides. Or a dict with the content of a JSON or TOML file. devices, microbatches, memory_bytes,
    bandwidth_bytes_per_s: K, N, M and B in place of the input's own, which may then be absent; sizes as numbers of
    bytes or as texts such as "8GiB" and "25GB/s". in_flight: for a PipeDream profile only, see ``InFlight``.

    The instance's ``notes`` list the reader's assumptions, and a memory below 1 MB or a bandwidth below 1 MB/s in a
    file, which most likely lacks its unit.

    Raises InputError with every fault found and its path; UsageError for arguments that make no sense.

    >>> import piper_ray
    >>> layers = {"types": {"block": {"tmpcs": [{"t": 1, "id": "plain", "time_s": 0.01, "weights": "1GiB"}]}}}
    >>> layers |= {"layers": {"first": {"type": "block"}, "second": {"type": "block", "inputs": ["first"]}}}
    >>> piper_ray.load(layers, devices=2, microbatches=8, memory_bytes="8GiB", bandwidth_bytes_per_s="25GB/s").devices
    2
    """
    overrides = _overrides(devices, microbatches, memory_bytes, bandwidth_bytes_per_s)
    chosen = None if in_flight is None else arguments.choice("in_flight", in_flight, InFlight)
    if isinstance(source, Mapping):
        return _from_document("input", documents.as_document("input", source), overrides, "", chosen, None)
    path = _path_text(source)
    return _from_text(path, documents.read_text(path), overrides, chosen, Path(path).parent)


def load_text(
    text: str,
    *,
    name: str = "text",
    devices: int | None = None,
    microbatches: int | None = None,
    memory_bytes: float | str | None = None,
    bandwidth_bytes_per_s: float | str | None = None,
    in_flight: InFlight | str | None = None,
) -> Instance:
    """The same as ``load`` for a file's content, in any form. name: stands for the path in errors. Files that the
    content names are looked up in the working folder, which errors show.
    """
    overrides = _overrides(devices, microbatches, memory_bytes, bandwidth_bytes_per_s)
    chosen = None if in_flight is None else arguments.choice("in_flight", in_flight, InFlight)
    if not text.strip():
        documents.refuse(name, "", "empty; expected a workload")
    return _from_text(name, text, overrides, chosen, Path.cwd())


def _from_text(path: str, text: str, overrides: Quantities, chosen: InFlight | None, folder: Path) -> Instance:
    """folder: where files that the text names are looked up."""
    suffix, name = Path(path).suffix.lower(), Path(path).stem.removesuffix(".graph")
    if suffix not in (".json", ".toml", ".txt"):
        suffix = _sniff(text)
    if suffix != ".txt":
        parse = documents.parse_json if suffix == ".json" else documents.parse_toml
        return _from_document(path, parse(path, text), overrides, name, chosen, folder)

    faults = Faults()
    instance = pipedream_profile.read_profile(text, chosen or InFlight.TWO_VERSIONS, overrides, name, faults)
    return _checked_instance(path, instance, faults)


def instance_of(given: Instance | Source) -> Instance:
    """An instance that keeps all rules, from an instance or from what ``load`` accepts.

    Every public function that takes an instance begins with this. An instance is checked once; instances made from it
    with ``replace`` need no check. Raises InputError with every fault found, and UsageError for other values.
    """
    if isinstance(given, Instance):
        if not given.checked:
            objects.check_instance(given)
        return given
    arguments.of_kind("instance", given, (str, bytes, os.PathLike, Mapping), "an Instance, or the path of an input")
    return load(given)


def on_cluster(
    given: Instance | Source,
    devices: int | None,
    microbatches: int | None,
    memory_bytes: float | str | None,
    bandwidth_bytes_per_s: float | str | None,
) -> Instance:
    """``instance_of`` with new values of K, N, M and B; None keeps the old one. Raises the same errors, and
    UsageError."""
    figures = {
        "devices": devices,
        "microbatches": microbatches,
        "memory_bytes": memory_bytes,
        "bandwidth_bytes_per_s": bandwidth_bytes_per_s,
    }
    if isinstance(given, (str, bytes, os.PathLike, Mapping)):
        return load(given, **figures)  # type: ignore[arg-type]
    instance = instance_of(given)
    if all(value is None for value in figures.values()):
        return instance
    return instance.replace(**figures)  # type: ignore[arg-type]


def dump(instance: Instance | Source, path: str | os.PathLike[str], form: Form | str | None = None) -> None:
    """Writes ``instance`` in a ``Form``, or in the form of the path's extension: .json (Piper's), .toml (ours), .txt
    (PipeDream's).

    ``load`` returns an equal instance: from Piper's and our own form always; from PipeDream's with the same K, N, M, B;
    from dnn-partitioning's with times and sizes up to rounding. An instance that the form cannot hold is refused, with
    a list of what would be lost.

    Raises UsageError for such a refusal, for another extension and for a file that cannot be written; InputError for an
    invalid instance.

    >>> import piper_ray
    >>> bert = piper_ray.estimate("bert-large", "A100-80")
    >>> piper_ray.dump(bert, "bert.toml")
    >>> piper_ray.load("bert.toml") == bert
    True
    """
    target = arguments.location("path", path)
    text = _text(instance_of(instance), target, _form(target, form))
    try:
        write_atomically(Path(target), text)
    except ValueError as error:  # not a valid path
        raise UsageError(f"{target}: cannot be written: {error}") from error


def _form(target: str, given: Form | str | None) -> Form:
    if given is not None:
        return arguments.choice("form", given, Form)
    form = FORM_OF_SUFFIX.get(Path(target).suffix.lower())
    if form is None:
        known = ", ".join(form.value for form in Form)
        raise UsageError(
            f"{target}: unknown kind of file; expected a path that ends in {', '.join(FORM_OF_SUFFIX)}, "
            f"or a form ({known})"
        )
    return form


def _text(instance: Instance, target: str, form: Form) -> str:
    if form is Form.TOML:
        return workload_writer.to_toml(instance)
    if form is Form.PIPEDREAM:
        _refuse_losses(target, "a PipeDream profile", pipedream_profile.losses(instance))
        return pipedream_profile.to_profile(instance)
    if form is Form.DNN_PARTITIONING:
        _refuse_losses(target, "an input of dnn-partitioning", dnn_partitioning.losses(instance))
        document = dnn_partitioning.to_dnn_partitioning(instance)
    else:
        document = upstream.to_upstream(instance)
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _refuse_losses(target: str, what: str, losses: Sequence[str]) -> None:
    if losses:
        raise UsageError("\n  ".join([f"{target}: not written; {what} would lose", *losses]))


def load_plan(source: Source, instance: Instance | Source) -> Plan:
    """A plan for ``instance``, from a path or a parsed document: Piper's plan JSON or the output of ``solve --json``.

    Only checks the document's structure; ``evaluate`` checks whether the plan keeps the rules of the problem. Raises
    InputError with every fault found.

    >>> import piper_ray
    >>> bert = piper_ray.estimate("bert-large", "A100-80")
    >>> solution = piper_ray.solve(bert, threads=1)
    >>> piper_ray.dump_plan(solution.plan, "plan.json", bert)
    >>> piper_ray.load_plan("plan.json", bert) == solution.plan
    True
    """
    instance = instance_of(instance)
    path, document = _json_document(source, "plan")
    faults = Faults(documents.repeated_keys(document))
    read = plans.read_plan(document, instance, faults)
    if faults:
        if "stages" not in document and "plan" not in document and (kind := documents.advice(document)) is not None:
            documents.refuse(path, "", f"not a plan but {kind}")
        made_for = plans.made_for_another(document, instance)
        if made_for is not None and made_for.other_workload:
            documents.refuse(path, "", str(made_for))
    return _checked(path, read, faults)


def plan_claims(source: Source) -> plans.PlanClaims:
    """What a plan's document states in addition to the plan. Raises InputError."""
    path, document = _json_document(source, "plan")
    faults = Faults()
    return _checked(path, plans.read_claims(document, faults), faults)


def plan_made_for(source: Source, instance: Instance) -> plans.MadeFor | None:
    """What a plan's document was made for, if that is another instance; None if it is this one or unknown."""
    return plans.made_for_another(_json_document(source, "plan")[1], instance)


def planned(source: Source) -> plans.PlannedDocument:
    """A plan's stages with the modules that they run, as named in its document. Raises InputError."""
    path, document = _json_document(source, "plan")
    faults = Faults(documents.repeated_keys(document))
    return _checked(path, plans.read_planned(document, faults), faults)


def _json_document(source: Source, what: str) -> tuple[str, Mapping[str, object]]:
    """The document, and a text that names its source. what: the expected kind of document, as errors name it: a plan or
    a solution."""
    if isinstance(source, Mapping):
        return what, documents.as_document(what, source)
    path = _path_text(source)
    text = documents.read_text(path)
    kind = None
    if _sniff(text) == ".toml":
        with contextlib.suppress(InputError):
            kind = documents.advice(documents.parse_toml(path, text))
    if kind is not None:
        documents.refuse(path, "", f"not a {what} but {kind}")
    return path, documents.parse_json(path, text)


def dump_plan(
    plan: Plan,
    path: str | os.PathLike[str],
    instance: Instance | Source,
    schedule: Schedule | ScheduleName | str | None = None,
) -> None:
    """Writes ``plan`` of ``instance`` as a plan document (plan.schema.json), which ``load_plan`` reads.

    It holds the names, paths and ranks of each stage in addition to Piper's own fields, but no costs; ``evaluate``
    checks whether it keeps the rules of the problem. schedule: the schedule of the plan, which determines the stages
    that share ranks; None: the instance's own. Raises InputError for a plan of other layers, UsageError for a value
    that is not a plan or a schedule, and for a file that cannot be written.

    >>> import piper_ray
    >>> bert = piper_ray.estimate("bert-large", "A100-80")
    >>> layers = [layer.id for layer in bert.layers]
    >>> mine = piper_ray.Plan((piper_ray.Stage(layers, 8, 1, dict.fromkeys(layers, "plain")),))
    >>> piper_ray.dump_plan(mine, "mine.json", bert)
    """
    arguments.of_kind("plan", plan, Plan, "a Plan")
    target = arguments.location("path", path)
    instance = instance_of(instance)
    planned_for = instance.schedule if schedule is None else Schedule.of(schedule)
    objects.check_plan(plan)
    faults = Faults()
    unnamed = [
        f"stages[{number}].tmpc_ids[{layer}]"
        for number, stage in enumerate(plan.stages)
        for layer in stage.layers
        if layer not in stage.tmpc_ids
    ]
    for where in unnamed:
        faults.at(where, "missing; expected the TMPC id of that layer")
    if not faults:
        plans.read_plan(document := plans.plan_document(instance, plan, planned_for), instance, faults)
    if faults:
        raise InputError("Plan", faults.found)
    write_atomically(Path(target), json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def load_solution(source: Source, instance: Instance | Source) -> Solution:
    """The solution of a solve of ``instance``, from a path or a parsed document: the output of ``solve --json``.

    Raises InputError with every fault found, also for a solution of another instance.

    >>> import piper_ray
    >>> piper_ray.load_solution("solution.json", "workload.toml")  # of solve --json  # doctest: +SKIP
    Solution(optimal under 1f1b: 15.3 ms/microbatch, gap 0 %, 8 stages on 512 devices)
    """
    instance = instance_of(instance)
    path, document = _json_document(source, "solution")
    if document.get("schema") != "piper-ray/solution" and (kind := documents.advice(document)) is not None:
        documents.refuse(path, "", f"not what solve --json prints but {kind}")
    faults = Faults(documents.repeated_keys(document))
    return _checked(path, plans.read_solution(document, instance, faults), faults)


_READERS: tuple[tuple[frozenset[str], Reader], ...] = (
    (workload_schema.KEYS, workload.read_workload),
    (dnn_partitioning.KEYS, dnn_partitioning.read_dnn_partitioning),
    (upstream.KEYS, upstream.read_upstream),
)
"""Readers of documents by keys; the first reader with a key of the document is used."""


def _from_document(
    source: str,
    document: Mapping[str, object],
    overrides: Quantities,
    name: str,
    in_flight: InFlight | None,
    folder: Path | None,
) -> Instance:
    """folder: the folder of the file; None if the document does not come from a file."""
    if in_flight is not None:
        raise UsageError(f"{source}: in_flight applies to PipeDream profiles only; this input says what it keeps")
    faults = Faults(documents.repeated_keys(document))
    read = next((reader for keys, reader in _READERS if keys & document.keys()), None)
    if read is None:
        kind = documents.advice(document)
        problem = "not a workload" if kind is None else f"not a workload but {kind}"
        documents.refuse(
            source, "", f"{problem}; expected nodes and edges (Piper's JSON) or types and layers (our TOML)"
        )
    whole = _with_base(source, document, folder or Path()) if read is workload.read_workload else document
    instance = read(whole, overrides, name, faults)
    if folder is None:
        faults.notes.clear()  # figures in a program are intended
    return _checked_instance(source, instance, faults)


def _with_base(source: str, document: Mapping[str, object], folder: Path) -> Mapping[str, object]:
    """The document merged over its base, the base's own base and so on."""
    files = 0
    while "base" in document:
        base = document["base"]
        if not isinstance(base, str):
            documents.refuse(source, "base", "not a text; expected the path of a .toml file")
        files += 1
        if files > _LONGEST_BASE_CHAIN:
            documents.refuse(
                source, "base", f"over {_LONGEST_BASE_CHAIN} files deep; expected one that does not lead to itself"
            )
        path = folder / base
        try:
            below = documents.parse_toml(str(path), documents.read_text(str(path)))
        except InputError as error:
            raise InputError(source, [Fault("base", f"{path}: {fault}") for fault in error.faults]) from None
        document = documents.merged(below, {key: value for key, value in document.items() if key != "base"})
        folder = path.parent
    return document


def _checked(source: str, read: T | None, faults: Faults) -> T:
    if read is None or faults:
        raise InputError(source, faults.found)
    return read


def _checked_instance(source: str, read: Instance | None, faults: Faults) -> Instance:
    """The instance with its reader's notes, checked like any other instance, so that all rules are in one place."""
    instance = _checked(source, read, faults)
    return instance_of(replace(instance, notes=(*instance.notes, *map(str, faults.notes))))


def _sniff(text: str) -> str:
    """The extension that fits a text."""
    if text.lstrip().startswith("{"):
        return ".json"
    return ".txt" if _PROFILE_LINE.match(text) else ".toml"


def _path_text(path: object) -> str:
    try:
        return os.fsdecode(path)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(f"{type(path).__name__} is no input; expected a path or a dict") from None


def to_upstream(instance: Instance | Source) -> dict[str, object]:
    """The instance as Piper's JSON document, ready for ``json.dump``; loading it returns an equal instance."""
    return upstream.to_upstream(instance_of(instance))


def to_toml(instance: Instance | Source) -> str:
    """The instance as a compact workload (TOML): equal layers share a type, repeated ones a chain."""
    return workload_writer.to_toml(instance_of(instance))


def _overrides(
    devices: int | None,
    microbatches: int | None,
    memory_bytes: float | str | None,
    bandwidth_bytes_per_s: float | str | None,
) -> Quantities:
    """The arguments as figures of a cluster. Raises UsageError for each that is out of range."""
    figures = arguments.cluster_figures(devices, microbatches, memory_bytes, bandwidth_bytes_per_s)

    return Quantities(**figures)
