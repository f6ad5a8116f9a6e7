"""From a path or a parsed document to an instance, and from an instance to a file."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from piper_ray.errors import Fault, InputError, UsageError
from piper_ray.files import write_atomically
from piper_ray.formats import limits
from piper_ray.formats.documents import as_document, parse_json, parse_toml, read_text, refuse, repeated_keys
from piper_ray.formats.forms import FORM_OF_SUFFIX, Form
from piper_ray.formats.inflight import InFlight
from piper_ray.model import Instance
from piper_ray.plan import Plan

if TYPE_CHECKING:
    from piper_ray.formats.faults import Faults
    from piper_ray.formats.fields import Cluster

# The readers, and pydantic with them, are imported when something is read: `import piper_ray` stays light.

Source = str | os.PathLike[str] | Mapping[str, object]

T = TypeVar("T")

_LONGEST_BASE_CHAIN = 8
_PROFILE_LINE = re.compile(r"\s*node[0-9]+ -- ")


def load(
    source: Source,
    *,
    devices: int | None = None,
    microbatches: int | None = None,
    memory_bytes: float | None = None,
    bandwidth_bytes_per_s: float | None = None,
    in_flight: InFlight | str | None = None,
) -> Instance:
    """The instance that a file or a parsed document describes.

    source: the path of Piper's or dnn-partitioning's JSON (.json; told apart by their keys), our compact workload
    (.toml; see ``formats/workload_schema.py``) or a PipeDream profile (.txt), told apart by content where the path ends
    otherwise; or a dict in the shape of one of the former. devices, microbatches, memory_bytes, bandwidth_bytes_per_s:
    K, N, M and B in place of the input's own, which then need not be there. in_flight: of a PipeDream profile only, see
    ``InFlight``.

    Raises InputError with every fault found and its path; UsageError for arguments that make no sense.
    """
    overrides = _overrides(devices, microbatches, memory_bytes, bandwidth_bytes_per_s)
    chosen = _in_flight(in_flight)
    if isinstance(source, Mapping):
        return _from_document("input", as_document("input", source), overrides, "", chosen, Path())
    path = _path_text(source)
    text = read_text(path)
    suffix, name = Path(path).suffix.lower(), Path(path).stem.removesuffix(".graph")
    if suffix not in (".json", ".toml", ".txt"):
        suffix = _sniff(text)
    if suffix != ".txt":
        parse = parse_json if suffix == ".json" else parse_toml
        return _from_document(path, parse(path, text), overrides, name, chosen, Path(path).parent)

    from piper_ray.formats.faults import Faults
    from piper_ray.formats.profile import read_profile

    faults = Faults()
    instance = read_profile(text, chosen or InFlight.TWO_VERSIONS, overrides, name, faults)
    return _checked(path, instance, faults)


def dump(instance: Instance, path: str | os.PathLike[str], form: Form | str | None = None) -> None:
    """Write ``instance`` in a ``Form``, or as the path ends: .json (Piper's), .toml (ours), .txt (PipeDream's).

    ``load`` gives an equal instance back: from the former two always; from PipeDream's with the same K, N, M, B, and
    from dnn-partitioning's, with times and sizes to within rounding. What would not come back is refused by name.

    Raises UsageError for such a refusal, for another extension and for a file that cannot be written.
    """
    target = _path_text(path)
    text = _text(instance, target, _form(target, form))
    try:
        write_atomically(Path(target), text)
    except ValueError as error:  # a path that cannot be one
        raise UsageError(f"{target}: cannot be written: {error}") from error


def _form(target: str, given: Form | str | None) -> Form:
    known = ", ".join(form.value for form in Form)
    try:
        form = FORM_OF_SUFFIX.get(Path(target).suffix.lower()) if given is None else Form(given)
    except ValueError:
        raise UsageError(f"{given!r} is no form; expected one of {known}") from None
    if form is None:
        raise UsageError(
            f"{target}: unknown kind of file; expected a path that ends in {', '.join(FORM_OF_SUFFIX)}, "
            f"or a form ({known})"
        )
    return form


def _text(instance: Instance, target: str, form: Form) -> str:
    if form is Form.TOML:
        from piper_ray.formats.workload_writer import to_toml

        return to_toml(instance)
    if form is Form.PIPEDREAM:
        from piper_ray.formats import profile_writer

        _refuse_losses(target, "a PipeDream profile", profile_writer.losses(instance))
        return profile_writer.to_profile(instance)
    if form is Form.DNN_PARTITIONING:
        from piper_ray.formats import dnn_partitioning

        _refuse_losses(target, "an input of dnn-partitioning", dnn_partitioning.losses(instance))
        document = dnn_partitioning.to_dnn_partitioning(instance)
    else:
        from piper_ray.formats.upstream import to_upstream

        document = to_upstream(instance)
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _refuse_losses(target: str, what: str, losses: Sequence[str]) -> None:
    if losses:
        raise UsageError("\n  ".join([f"{target}: not written; {what} would lose", *losses]))


def load_plan(source: Source, instance: Instance) -> Plan:
    """A plan for ``instance``, from a path or a parsed document: Piper's plan JSON or what ``solve --json`` prints.

    Checks the document's structure only, not whether the plan keeps the rules of the problem: that is
    ``evaluate``'s. Raises InputError with every fault found.
    """
    from piper_ray.formats.faults import Faults
    from piper_ray.formats.plans import read_plan

    if isinstance(source, Mapping):
        path, document = "plan", as_document("plan", source)
    else:
        path = _path_text(source)
        document = parse_json(path, read_text(path))
    faults = Faults(repeated_keys(document))
    return _checked(path, read_plan(document, instance, faults), faults)


def _from_document(
    source: str,
    document: Mapping[str, object],
    overrides: Cluster,
    name: str,
    in_flight: InFlight | None,
    folder: Path,
) -> Instance:
    from piper_ray.formats import dnn_partitioning, upstream, workload
    from piper_ray.formats.faults import Faults

    if in_flight is not None:
        raise UsageError(f"{source}: in_flight applies to PipeDream profiles only; this input says what it keeps")
    faults = Faults(repeated_keys(document))
    if workload.KEYS & document.keys():
        instance = workload.read_workload(_with_base(source, document, folder), overrides, name, faults)
    elif dnn_partitioning.KEYS & document.keys():
        instance = dnn_partitioning.read_dnn_partitioning(document, overrides, name, faults)
    elif upstream.KEYS & document.keys():
        instance = upstream.read_upstream(document, overrides, name, faults)
    else:
        refuse(source, "", "not a workload; expected nodes and edges (Piper's JSON) or types and layers (our TOML)")
    return _checked(source, instance, faults)


def _with_base(source: str, document: Mapping[str, object], folder: Path) -> Mapping[str, object]:
    """The document over its base, over the base's base and so on."""
    files = 0
    while "base" in document:
        base = document["base"]
        if not isinstance(base, str):
            refuse(source, "base", "not a text; expected the path of a .toml file")
        files += 1
        if files > _LONGEST_BASE_CHAIN:
            refuse(source, "base", f"over {_LONGEST_BASE_CHAIN} files deep; expected one that does not lead to itself")
        path = folder / base
        try:
            below = parse_toml(str(path), read_text(str(path)))
        except InputError as error:
            raise InputError(source, [Fault("base", f"{path}: {fault}") for fault in error.faults]) from None
        document = _merged(below, {key: value for key, value in document.items() if key != "base"})
        folder = path.parent
    return document


def _merged(below: Mapping[str, object], above: Mapping[str, object]) -> dict[str, object]:
    """``below`` with the entries of ``above`` in their place; tables are merged entry by entry."""
    merged = dict(below)
    for key, value in above.items():
        old = below.get(key)
        merged[key] = _merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def _checked(source: str, read: T | None, faults: Faults) -> T:
    if read is None or faults:
        raise InputError(source, faults.found)
    return read


def _sniff(text: str) -> str:
    """The extension that a text should have had."""
    if text.lstrip().startswith("{"):
        return ".json"
    return ".txt" if _PROFILE_LINE.match(text) else ".toml"


def _path_text(path: object) -> str:
    try:
        return os.fsdecode(path)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(f"{type(path).__name__} is no input; expected a path or a dict") from None


def _in_flight(given: InFlight | str | None) -> InFlight | None:
    try:
        return None if given is None else InFlight(given)
    except ValueError:
        known = ", ".join(choice.value for choice in InFlight)
        raise UsageError(f"in_flight {given!r} is unknown; expected one of {known}") from None


def _overrides(
    devices: int | None, microbatches: int | None, memory_bytes: float | None, bandwidth_bytes_per_s: float | None
) -> Cluster:
    """The arguments as a cluster. Raises UsageError for each that is out of range."""
    counts: list[tuple[str, object, int]] = [
        ("devices", devices, limits.DEVICES),
        ("microbatches", microbatches, limits.MICROBATCHES),
    ]
    sizes: list[tuple[str, object]] = [
        ("memory_bytes", memory_bytes),
        ("bandwidth_bytes_per_s", bandwidth_bytes_per_s),
    ]
    wrong = [
        f"{name} {value!r} is out of range; expected a whole number from 1 to {most}"
        for name, value, most in counts
        if value is not None and not (isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most)
    ]
    wrong += [
        f"{name} {value!r} is out of range; expected a finite number > 0"
        for name, value in sizes
        if value is not None and not (isinstance(value, (int, float)) and limits.LEAST_RATE <= value <= limits.FIGURE)
    ]
    if wrong:
        raise UsageError("; ".join(wrong))

    from piper_ray.formats.fields import Cluster

    return Cluster(
        devices=devices,
        microbatches=microbatches,
        memory_bytes=None if memory_bytes is None else float(memory_bytes),
        bandwidth_bytes_per_s=None if bandwidth_bytes_per_s is None else float(bandwidth_bytes_per_s),
    )
