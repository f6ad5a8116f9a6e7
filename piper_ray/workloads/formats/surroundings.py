"""The parts of inputs other than the graph: K, N, M and B, which every input states or leaves to the caller; and what
files may state about the cluster, the batch, the schedule and the trained model.

The table of the trained model (``model.instance``):

    [model]
    precision = "bf16"               # of matrix products: bf16, fp16 or fp8
    software = "megatron-core"       # the generation of training software whose speed the times assume
    gpu = "H100-SXM"                 # the device of estimated times; left out: these times are no estimates
    lora_rank = 16                   # of adapters that are trained while the model is frozen; left out: no adapters
    fused_attention = true           # attention is one kernel; the default
    context_exchange = "ring"        # of context parallelism
    dispatcher = "all-to-all"        # how tokens reach experts, all-gather, or once-per-node; left out: the usual way
    expert_overlap = false           # whether that overlaps with passes
    weight_bytes = 2                 # kept for each parameter, with gradient_bytes and optimizer_bytes
    optimizer_on_host = false        # whether the optimizer's state is in host memory, where parameters are updated
    calibrated = { least = 0.97, most = 1.04, runs = 5 }  # of measured over estimated steps of this cluster, if any
    config = { model_type = "llama", hidden_size = 4096 }  # of Hugging Face, the keys that matter here
    null = ["sliding_window"]        # keys of the config that are null

In JSON it is an object of the same keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from pydantic import Field, TypeAdapter

from piper_ray.model import arguments
from piper_ray.model.cluster import Cluster, DeviceKind, Link
from piper_ray.model.errors import UsageError
from piper_ray.model.figures import plural
from piper_ray.model.instance import Batch, Instance, TrainedModel
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.model.units import doubtful
from piper_ray.workloads.formats.documents import package_table
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
    """K, N, M and B that replace those of a file, or None."""

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

_OF_CLUSTER = ("devices", "memory_bytes", "bandwidth_bytes_per_s")
_OF_KIND = (*_OF_CLUSTER, "links", "node_devices")
_OF_BATCH = ("microbatches",)
_PER_SECOND = {"memory_bytes": "", "bandwidth_bytes_per_s": "/s"}
_COUNT: TypeAdapter[int] = TypeAdapter(Count)
_COUNTS = ("samples_per_microbatch", "tokens_per_sample", "measured_threads")
_LINKS_WORDS = "a list of objects with devices, bandwidth and maybe uplink, the smallest groups first"


class InnerLink(Closed):
    """A link that joins groups of ``devices`` devices; B is the rate of the link that joins all."""

    devices: Degree
    bandwidth: PositiveRate = Field(description="a finite rate > 0 in bytes per second, such as 900GB/s")
    uplink: PositiveRate | None = Field(
        default=None, description="a finite rate > 0 in bytes per second, such as 50GB/s, of all devices of a group"
    )


def paths_in(form: str) -> dict[str, str]:
    """The path of each figure in documents of a form (``paths.toml``)."""
    rows = package_table("piper_ray.workloads.formats", "paths.toml").items()
    return {what: paths[form] for what, paths in rows if form in paths}


def read_surroundings(
    document: Mapping[str, object],
    paths: Mapping[str, str],
    overrides: Quantities,
    name: str,
    faults: Faults,
    *,
    units: bool = False,
) -> dict[str, Any]:
    """The fields of an Instance other than its graph, by name. They are only valid if there are no faults.

    paths: the paths of these fields in documents of this form, which cannot state a field without a path. An overridden
    quantity is not read; one that is neither given nor overridden is a fault. A size that most likely lacks its unit is
    noted. units: texts such as "80GB" are sizes. name: used for a document without a name.
    """
    given = {what: value for what, path in paths.items() if (value := _at(document, path)) is not _NOTHING}
    has_kinds = given.get("kinds") is not None
    wanted = _OF_BATCH if has_kinds else tuple(CLUSTER_RULES)
    quantities = _read_quantities(given, paths, overrides, faults, wanted, units=units)
    said = {what: value for what, value in given.items() if value is not None}
    counts = {what: _read_count(said, paths, what, faults) for what in _COUNTS}
    title = given.get("name", name)
    if not isinstance(title, str):
        faults.at("name", f"not a text ({shown(title)}); expected a text")
    if has_kinds:
        cluster = _read_kinds(given, paths, overrides, faults, units=units)
    else:
        if given.get("between") is not None and given.get("sites") is None:
            expected = " or ".join(paths[what] for what in ("kinds", "sites") if what in paths)
            faults.at(paths["between"], f"a rate between kinds of devices or sites; expected {expected} too")
        inner = None if overrides.bandwidth_bytes_per_s is not None else given.get("links")
        cluster = _cluster_of(quantities, inner, said, paths, faults)
        if given.get("sites") is not None:
            cluster = _read_sites(cluster, given, paths, faults, units=units)
    schedule, chunks, group = map(said.get, ("schedule", "chunks", "group"))
    return {
        "name": title,
        "cluster": cluster,
        "batch": Batch(quantities["microbatches"], *map(counts.get, _COUNTS[:2])),
        "schedule": read_schedule(schedule, chunks, group, paths.get("schedule", ""), faults),
        "model": read_trained_model(said.get("model"), "model", faults),
        "measured_threads": counts.get("measured_threads"),
        "schemes": read_schemes(said.get("schemes"), faults),
    }


def read_schemes(value: object, faults: Faults) -> Mapping[str, Mapping[str, object]]:
    """Schemes in full, by the words of TMPCs' ids."""
    if value is not None and (
        not isinstance(value, Mapping)
        or not all(
            isinstance(word, str) and isinstance(x, Mapping) and _is_plain(x, _DEEPEST) for word, x in value.items()
        )
    ):
        faults.at("schemes", f"{shown(value)}; expected a table of schemes as piper-ray schemes writes them")
        return {}
    return {} if value is None else value


def surroundings_of(instance: Instance) -> dict[str, object]:
    """The values that ``read_surroundings`` reads, by the names in ``paths``, without empty ones.

    Kinds are left out: each has keys of its own, which ``kinds_of`` writes.
    """
    cluster = instance.cluster
    found: dict[str, object] = {
        "name": instance.name,
        **{
            quantity: getattr(instance, quantity)
            for quantity in CLUSTER_RULES
            if quantity in _OF_BATCH or not cluster.kinds
        },
        **({} if cluster.kinds else {"bandwidth_bytes_per_s": cluster.links[-1].bandwidth_bytes_per_s}),
        "samples_per_microbatch": instance.batch.samples_per_microbatch,
        "tokens_per_sample": instance.batch.tokens_per_sample,
        **({} if instance.schedule is None else instance.schedule.to_dict()),
        "model": None if instance.model is None else trained_model_table(instance.model),
        "measured_threads": instance.measured_threads,
        "links": _inner_links(cluster) or None,
        "node_devices": None if cluster.kinds else cluster.node_devices,
        "between": cluster.between_bytes_per_s,
        "sites": list(cluster.sites) or None,
        "schemes": instance.schemes or None,
    }
    return {what: value for what, value in found.items() if value is not None}


def kind_names(listed: object) -> tuple[list[str], bool]:
    """The valid names of a document's kinds, and whether all are valid; none if it has no kinds."""
    if listed is None:
        return [], True
    found = (
        [x.get("name") if isinstance(x, Mapping) else None for x in listed] if isinstance(listed, (list, tuple)) else []
    )
    names = list(dict.fromkeys(name for name in found if isinstance(name, str) and name))
    return names, 1 < len(names) == len(found)


def kinds_of(cluster: Cluster, paths: Mapping[str, str]) -> list[dict[str, object]]:
    """For each kind of device the table that ``read_surroundings`` reads, with the last parts of ``paths`` as keys."""
    found = []
    for kind in cluster.kinds:
        own = kind.cluster
        given = {quantity: getattr(own, quantity) for quantity in _OF_CLUSTER}
        given["bandwidth_bytes_per_s"] = own.links[-1].bandwidth_bytes_per_s
        given |= {"links": _inner_links(own) or None, "node_devices": own.node_devices}
        said = {_key(paths, what): value for what, value in given.items() if value is not None}
        found.append({"name": kind.name, **said})
    return found


def _inner_links(cluster: Cluster) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    for link in cluster.links[:-1]:
        shared = {} if link.uplink_bytes_per_s is None else {"uplink": link.uplink_bytes_per_s}
        found.append({"devices": link.devices, "bandwidth": link.bandwidth_bytes_per_s, **shared})
    return found


def _key(paths: Mapping[str, str], what: str) -> str:
    return paths[what].rpartition(".")[2]


def _cluster_of(
    quantities: Mapping[str, Any], inner: object, said: Mapping[str, object], paths: Mapping[str, str], faults: Faults
) -> Cluster:
    """A cluster of equal devices. inner: the links within groups; None if there are none."""
    links = () if inner is None else _read_links(paths["links"], inner, faults)
    last = Link(quantities["bandwidth_bytes_per_s"])
    node_devices = _read_count(said, paths, "node_devices", faults)
    check_node_devices(node_devices, links, paths.get("node_devices", ""), faults)
    return Cluster(quantities["devices"], quantities["memory_bytes"], (*links, last), node_devices)


def check_node_devices(node_devices: int | None, links: Sequence[Link], path: str, faults: Faults) -> None:
    """Notes a fault if the groups of the first link do not consist of whole nodes. links: at least those within
    groups."""
    domain = links[0].devices if links else None
    if node_devices is not None and domain is not None and domain % node_devices:
        faults.at(path, f"{node_devices}; expected a divisor of {domain}, the devices that the first link joins")


def _read_kinds(
    given: Mapping[str, object], paths: Mapping[str, str], overrides: Quantities, faults: Faults, *, units: bool
) -> Cluster:
    for what in _OF_KIND:
        if getattr(overrides, what, None) is not None:
            *_, option = CLUSTER_RULES[what]
            counts = " (frontier: NAME=NUMBERS of each kind)" if what == "devices" else ""
            faults.at(paths["kinds"], f"each kind has its own figure; expected no {option}{counts}")
        elif given.get(what) is not None:
            faults.at(
                paths[what], f"not for a cluster of several kinds of devices; expected it in each of {paths['kinds']}"
            )
    listed, path = given["kinds"], paths["kinds"]
    if not isinstance(listed, (list, tuple)) or len(listed) < 2:
        given_words = plural(len(listed), "kind") if isinstance(listed, (list, tuple)) else shown(listed)
        faults.at(path, f"{given_words}; expected a list of at least two kinds of devices")
        listed = ()
    keys = {what: _key(paths, what) for what in _OF_KIND}
    found: list[DeviceKind] = []
    for index, item in enumerate(listed):
        where = f"{path}[{index}]"
        if not isinstance(item, Mapping):
            faults.at(where, f"{shown(item)}; expected a table with a name, {', '.join(keys.values())}")
            continue
        for key in item.keys() - {"name", *keys.values()}:
            faults.at(path_of(where, str(key)), "unknown key; expected name, " + ", ".join(keys.values()))
        name = item.get("name")
        if not isinstance(name, str) or not name or name in [kind.name for kind in found]:
            found_words = "missing" if name is None else shown(name)
            faults.at(f"{where}.name", f"{found_words}; expected a text that no other kind has")
            name = ""
        own = {what: item[key] for what, key in keys.items() if key in item}
        at = {what: f"{where}.{key}" for what, key in keys.items()}
        quantities = _read_quantities(own, at, None, faults, _OF_CLUSTER, units=units)
        found.append(DeviceKind(name, _cluster_of(quantities, own.get("links"), own, at, faults)))
    between = _read_between(given, paths, faults, units=units)
    if given.get("sites") is not None:
        faults.at(paths["sites"], f"sites of several kinds of devices; expected either this or {path}")
    if faults:  # nobody looks at it
        return Cluster(None, None, (Link(None),))  # type: ignore[arg-type]
    return Cluster.of_kinds(found, between or 0.0)


def _read_sites(
    cluster: Cluster, given: Mapping[str, object], paths: Mapping[str, str], faults: Faults, *, units: bool
) -> Cluster:
    """The cluster at the sites of a document."""
    between, sites = _read_between(given, paths, faults, units=units), given["sites"]
    found = check_sites(cluster.devices, sites, paths["sites"], faults)
    return cluster if faults else replace(cluster, sites=found, between_bytes_per_s=between)


def check_sites(devices: object, given: object, path: str, faults: Faults) -> tuple[Any, ...]:
    """The sites. Notes a fault of their names, or of devices that cannot be shared out to them equally."""
    sites = tuple(given) if isinstance(given, (list, tuple)) else (given,)
    if len(set(map(str, sites))) < 2 or not all(isinstance(x, str) and x for x in sites):
        faults.at(path, f"{', '.join(map(shown, sites)) or 'none'}; expected a list of at least two names")
    elif isinstance(devices, int) and devices % len(sites):
        faults.at(path, f"{plural(len(sites), 'site')}; expected as many at each of the {devices:,} devices")
    return sites


def _read_between(
    given: Mapping[str, object], paths: Mapping[str, str], faults: Faults, *, units: bool
) -> float | None:
    rate = "bandwidth_bytes_per_s"
    of_rate = {rate: given["between"]} if "between" in given else {}
    found: float | None = _read_quantities(of_rate, {rate: paths["between"]}, None, faults, (rate,), units=units)[rate]
    return found


_NOTHING = object()


def _at(document: Mapping[str, object], path: str) -> object:
    """The value at a path such as ``cluster.devices``; ``_NOTHING`` if the document has no such entry."""
    found: object = document
    for key in path.split("."):
        found = found.get(key, _NOTHING) if isinstance(found, Mapping) else _NOTHING
    return found


def _read_count(said: Mapping[str, object], paths: Mapping[str, str], what: str, faults: Faults) -> int | None:
    return faults.value(_COUNT, said[what], paths[what], COUNT_WORDS) if said.get(what) is not None else None


def _read_quantities(
    given: Mapping[str, object],
    paths: Mapping[str, str],
    overrides: Quantities | None,
    faults: Faults,
    quantities: Sequence[str],
    *,
    units: bool,
) -> dict[str, Any]:
    """The requested figures of K, N, M and B, None for each with a fault. overrides: None if no option can give
    them."""
    found = {quantity: getattr(overrides, quantity, None) for quantity in quantities}
    for quantity in quantities:
        plain, with_units, expected, option = CLUSTER_RULES[quantity]
        path = paths[quantity]
        if found[quantity] is not None:
            continue
        if quantity not in given:
            instead = "" if overrides is None else f" (or give {option})"
            faults.at(path, f"missing; expected {expected}{instead}")
            continue
        found[quantity] = read = faults.value(with_units if units else plain, given[quantity], path, expected)
        if read is not None and quantity in _PER_SECOND:
            doubt = doubtful(read, _PER_SECOND[quantity], with_units=units)
            if doubt is not None:
                faults.note(path, doubt)
    return found


def read_schedule(
    name: object, chunks: object, group: object, path: str, faults: Faults, ahead: object = None
) -> Schedule | None:
    """The schedule that a document names; None if it names none. path: the path of the name."""
    if name is None and chunks is None and group is None:
        return None
    try:
        arguments.of_kind("schedule", name, str, f"one of {', '.join(x.value for x in ScheduleName)}")
        return Schedule(name, chunks, group, ahead or 0)  # type: ignore[arg-type]  # it checks all of them
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
        links.append(Link(link.bandwidth, link.devices, link.uplink))
    return links


class CalibratedTable(Closed):
    """Measured over estimated steps of a cluster: 9 in 10 further ones, and how many were measured."""

    least: Figure = Field(description="a number >= 0")
    most: Figure = Field(description="a number >= 0")
    runs: int = Field(ge=1, description="a whole number >= 1")


class TrainedModelTable(Closed):
    """The table in the file. ``null`` lists keys of ``config`` whose value is null, because TOML has no null."""

    config: dict[str, Any] = Field(default={}, description="a table of plain values")
    null: list[str] = Field(default=[], description="a list of keys")
    precision: str = Field(default=TrainedModel.precision, description=_TEXT)
    software: str = Field(default=TrainedModel.software, description=_TEXT)
    gpu: str = Field(default=TrainedModel.gpu, description=_TEXT)
    lora_rank: int = Field(default=TrainedModel.lora_rank, ge=0, le=2**20, description="a whole number >= 0")
    fused_attention: bool = Field(default=TrainedModel.fused_attention, description="true or false")
    context_exchange: str = Field(default=TrainedModel.context_exchange, description=_TEXT)
    expert_overlap: bool = Field(default=TrainedModel.expert_overlap, description="true or false")
    dispatcher: str = Field(default=TrainedModel.dispatcher, description=_TEXT)
    weight_bytes: Figure = Field(default=TrainedModel.weight_bytes, description=_BYTES)
    gradient_bytes: Figure = Field(default=TrainedModel.gradient_bytes, description=_BYTES)
    optimizer_bytes: Figure = Field(default=TrainedModel.optimizer_bytes, description=_BYTES)
    optimizer_on_host: bool = Field(default=TrainedModel.optimizer_on_host, description="true or false")
    calibrated: CalibratedTable | None = Field(default=None, description="a table")


def read_trained_model(value: object, path: str, faults: Faults) -> TrainedModel | None:
    """The model that the table describes; None if there is no table, and None with the faults noted if it is not
    valid."""
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
    """The table that ``read_trained_model`` reads, without default values."""
    found: dict[str, object] = {
        field.name: getattr(model, field.name)
        for field in fields(model)
        if field.name != "config" and getattr(model, field.name) != field.default
    }
    found["config"] = {key: value for key, value in model.config.items() if value is not None}
    null = [key for key, value in model.config.items() if value is None]
    return found | ({"null": null} if null else {})
