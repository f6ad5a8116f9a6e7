"""What inputs say beside the graph: K, N, M and B, which every input gives or leaves to the caller; and what else files
may say of a cluster, a batch, a schedule and the model that is trained.

The table of the model that is trained (``model.instance``):

    [model]
    precision = "bf16"               # of matrix products: bf16, fp16 or fp8
    software = "megatron-core"       # the generation of training software that the times are of
    gpu = "H100-SXM"                 # the device that they are of
    lora_rank = 16                   # of adapters that are trained in the model's place; left out: the model itself
    fused_attention = true           # one kernel, as if left out
    context_exchange = "ring"        # of context parallelism
    weight_bytes = 2                 # kept for each parameter, with gradient_bytes and optimizer_bytes
    config = { model_type = "llama", hidden_size = 4096 }  # of Hugging Face, the keys that count here
    null = ["sliding_window"]        # keys of the config that are null

In JSON it is an object of the same keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from pydantic import Field, TypeAdapter

from piper_ray.model import arguments
from piper_ray.model.cluster import Cluster, Link
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import Batch, Instance, TrainedModel
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.model.units import doubtful
from piper_ray.workloads.formats.faults import Faults, path_of, shown
from piper_ray.workloads.formats.fields import (
    COUNT_WORDS,
    DEGREE_WORDS,
    Closed,
    Count,
    Degree,
    Figure,
    Positive,
    PositiveRate,
    PositiveSize,
)

_DEEPEST = 5
_MOST_KEYS = 500
_TEXT = "a text"
_BYTES = "bytes >= 0"


@dataclass(frozen=True)
class Quantities:
    """K, N, M and B that the caller puts in place of a file's own, or None."""

    devices: int | None = None
    microbatches: int | None = None
    memory_bytes: float | None = None
    bandwidth_bytes_per_s: float | None = None


CLUSTER_RULES: Mapping[str, tuple[TypeAdapter[Any], TypeAdapter[Any], str, str]] = {
    # quantity: (a plain number, a number or text with a unit, what is expected, the option that gives it)
    "devices": (TypeAdapter(Degree), TypeAdapter(Degree), DEGREE_WORDS, "--devices"),
    "microbatches": (TypeAdapter(Count), TypeAdapter(Count), COUNT_WORDS, "--microbatches"),
    "memory_bytes": (TypeAdapter(Positive), TypeAdapter(PositiveSize), "a finite size > 0 in bytes", "--memory"),
    "bandwidth_bytes_per_s": (
        TypeAdapter(Positive),
        TypeAdapter(PositiveRate),
        "a finite rate > 0 in bytes per second",
        "--bandwidth",
    ),
}

_PER_SECOND = {"memory_bytes": "", "bandwidth_bytes_per_s": "/s"}
_COUNT: TypeAdapter[int] = TypeAdapter(Count)
_COUNTS = ("samples_per_microbatch", "tokens_per_sample", "measured_threads")
_LINKS_WORDS = "a list of objects with devices and bandwidth, the smallest groups first"


class InnerLink(Closed):
    """A link that joins groups of ``devices`` devices; B is the one that joins all."""

    devices: Degree
    bandwidth: PositiveRate = Field(description="a finite rate > 0 in bytes per second, such as 900GB/s")


def read_surroundings(
    document: Mapping[str, object],
    paths: Mapping[str, str],
    overrides: Quantities,
    name: str,
    faults: Faults,
    *,
    units: bool = False,
) -> dict[str, Any]:
    """What an Instance has beside its graph, by its fields' names, once there are no faults.

    paths: where a document of this form says what; what has no path it cannot say. A quantity that is overridden is not
    looked at, one that is neither given nor overridden is a fault. A size that most likely lacks its unit is noted.
    units: text such as "80GB" is a size. name: of a document without one.
    """
    given = {what: value for what, path in paths.items() if (value := _at(document, path)) is not _NOTHING}
    quantities = _read_quantities(given, paths, overrides, faults, units=units)
    said = {what: value for what, value in given.items() if value is not None}
    counts = {what: faults.value(_COUNT, said[what], paths[what], COUNT_WORDS) for what in _COUNTS if what in said}
    title = given.get("name", name)
    if not isinstance(title, str):
        faults.at("name", f"not a text ({shown(title)}); expected a text")
    links: Sequence[Link] = ()
    if "links" in said and overrides.bandwidth_bytes_per_s is None:
        links = _read_links(paths["links"], said["links"], faults)
    links = (*links, Link(quantities["bandwidth_bytes_per_s"]))
    schedule, chunks, group = map(said.get, ("schedule", "chunks", "group"))
    return {
        "name": title,
        "cluster": Cluster(quantities["devices"], quantities["memory_bytes"], links),
        "batch": Batch(quantities["microbatches"], *map(counts.get, _COUNTS[:2])),
        "schedule": read_schedule(schedule, chunks, group, paths.get("schedule", ""), faults),
        "model": read_trained_model(said.get("model"), "model", faults),
        "measured_threads": counts.get("measured_threads"),
    }


def surroundings_of(instance: Instance) -> dict[str, object]:
    """What ``read_surroundings`` reads, by the names that ``paths`` has, where there is something to say."""
    inner = instance.cluster.links[:-1]
    found: dict[str, object] = {
        "name": instance.name,
        **{quantity: getattr(instance, quantity) for quantity in CLUSTER_RULES},
        "samples_per_microbatch": instance.batch.samples_per_microbatch,
        "tokens_per_sample": instance.batch.tokens_per_sample,
        **({} if instance.schedule is None else instance.schedule.to_dict()),
        "model": None if instance.model is None else trained_model_table(instance.model),
        "measured_threads": instance.measured_threads,
        "links": [{"devices": x.devices, "bandwidth": x.bandwidth_bytes_per_s} for x in inner] or None,
    }
    return {what: value for what, value in found.items() if value is not None}


_NOTHING = object()


def _at(document: Mapping[str, object], path: str) -> object:
    """What stands at a path such as ``cluster.devices``; ``_NOTHING`` where the document has no such entry."""
    found: object = document
    for key in path.split("."):
        found = found.get(key, _NOTHING) if isinstance(found, Mapping) else _NOTHING
    return found


def _read_quantities(
    given: Mapping[str, object], paths: Mapping[str, str], overrides: Quantities, faults: Faults, *, units: bool
) -> dict[str, Any]:
    """K, N, M and B, None for each that is at fault."""
    found = {quantity: getattr(overrides, quantity) for quantity in CLUSTER_RULES}
    for quantity, (plain, with_units, expected, option) in CLUSTER_RULES.items():
        path = paths[quantity]
        if found[quantity] is not None:
            continue
        if quantity not in given:
            faults.at(path, f"missing; expected {expected} (or give {option})")
            continue
        found[quantity] = read = faults.value(with_units if units else plain, given[quantity], path, expected)
        if read is not None and quantity in _PER_SECOND:
            doubt = doubtful(read, _PER_SECOND[quantity], with_units=units)
            if doubt is not None:
                faults.note(path, doubt)
    return found


def read_schedule(name: object, chunks: object, group: object, path: str, faults: Faults) -> Schedule | None:
    """The schedule that a document names; None where it says nothing of one. path: where the name stands."""
    if name is None and chunks is None and group is None:
        return None
    try:
        arguments.of_kind("schedule", name, str, f"one of {', '.join(x.value for x in ScheduleName)}")
        return Schedule(name, chunks, group)  # type: ignore[arg-type]  # it looks at all three
    except UsageError as error:
        faults.at(path, str(error))
        return None


def _read_links(path: str, value: object, faults: Faults) -> Sequence[Link]:
    if not isinstance(value, (list, tuple)):
        faults.at(path, f"not a list ({shown(value)}); expected {_LINKS_WORDS}")
        return ()
    links: list[Link] = []
    for index, item in enumerate(value):
        link = faults.model(InnerLink, item, f"{path}[{index}]")
        if link is None:
            continue
        before = links[-1].devices if links and links[-1].devices is not None else 1
        if link.devices % before:
            faults.at(f"{path}[{index}].devices", f"{link.devices}; expected a multiple of {before}, the group before")
        links.append(Link(link.bandwidth, link.devices))
    return links


class TrainedModelTable(Closed):
    """The table as it stands; ``null`` lists keys of ``config``, as TOML has no null."""

    config: dict[str, Any] = Field(default={}, description="a table of plain values")
    null: list[str] = Field(default=[], description="a list of keys")
    precision: str = Field(default=TrainedModel.precision, description=_TEXT)
    software: str = Field(default=TrainedModel.software, description=_TEXT)
    gpu: str = Field(default=TrainedModel.gpu, description=_TEXT)
    lora_rank: int = Field(default=TrainedModel.lora_rank, ge=0, le=2**20, description="a whole number >= 0")
    fused_attention: bool = Field(default=TrainedModel.fused_attention, description="true or false")
    context_exchange: str = Field(default=TrainedModel.context_exchange, description=_TEXT)
    weight_bytes: Figure = Field(default=TrainedModel.weight_bytes, description=_BYTES)
    gradient_bytes: Figure = Field(default=TrainedModel.gradient_bytes, description=_BYTES)
    optimizer_bytes: Figure = Field(default=TrainedModel.optimizer_bytes, description=_BYTES)


def read_trained_model(value: object, path: str, faults: Faults) -> TrainedModel | None:
    """The model that the table describes; None where the file has no such table, and None with the faults noted."""
    table = None if value is None else faults.model(TrainedModelTable, value, path)
    if table is None:
        return None
    where = path_of(path, "config")
    if len(table.config) + len(table.null) > _MOST_KEYS:
        faults.at(where, f"{len(table.config)} keys; expected at most {_MOST_KEYS}")
    for key, entry in table.config.items():
        if not _is_plain(entry, _DEEPEST):
            faults.at(path_of(where, key), f"{shown(entry)}; expected a number, a text, true, false, a list or a table")
    given = table.model_dump(exclude={"null", "config"})
    return TrainedModel(config={**table.config, **dict.fromkeys(table.null)}, **given)


def _is_plain(value: object, depth: int) -> bool:
    if isinstance(value, Mapping):
        return depth > 0 and all(isinstance(key, str) and _is_plain(x, depth - 1) for key, x in value.items())
    if isinstance(value, list):
        return depth > 0 and all(_is_plain(x, depth - 1) for x in value)
    return value is None or isinstance(value, (bool, int, float, str))


def trained_model_table(model: TrainedModel) -> dict[str, object]:
    """What ``read_trained_model`` reads, without what is usual."""
    found: dict[str, object] = {
        field.name: getattr(model, field.name)
        for field in fields(model)
        if field.name != "config" and getattr(model, field.name) != field.default
    }
    found["config"] = {key: value for key, value in model.config.items() if value is not None}
    null = [key for key, value in model.config.items() if value is None]
    return found | ({"null": null} if null else {})
