"""Certificates as plain data; which claims can be certified: of Piper's own schedule, under constraints on single
stages; and the ways in which a stage may run.

In files certificates are Parquet, with a row for each state of a tail and the claim as JSON in the metadata. A file may
come from anybody. This module only checks that it is well-formed and undamaged; ``check`` decides whether it proves
anything.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from piper_ray.certificate.passes import PathSteps
from piper_ray.model import constraints
from piper_ray.model.constraints import KeepOrder, Recompute, Restrictions
from piper_ray.model.errors import CertificateRefused, LimitError, UsageError
from piper_ray.model.instance import Instance, Tmpc
from piper_ray.model.options import Contract
from piper_ray.model.plan_rules import in_order
from piper_ray.model.schedule import ASYNCHRONOUS, PAPERS_SCHEDULE, Schedule, ScheduleName, StepTerms
from piper_ray.storage.files import kind_unless_file, written_whole


@dataclass(frozen=True, eq=False)
class Tails:
    """The least that tails of the pipeline take, in plans on up to ``devices`` devices: one row for each pair.

    layers: the layers that distinguish downsets, each after its successors: bit v % 8 of byte v // 8 stands for
    layers[v]. joined: each of the other layers, with the one of these whose stage it shares.
    members: uint8[rows, bytes], the tail's layers. used_devices, data_parallel_sum: int64[rows]. kinds: in these
    plans such layers are on devices of a given kind.

    On g kinds of devices, of which there are K_1, .., K_g, used_devices is one number for the devices of each kind,
    n_1, .., n_g, the kind of the first stage, f, and that of the stage in front, h, both counted from 0:
    g g (.. (n_1 (K_2 + 1) + n_2) (K_3 + 1) + ..) + g f + h.

    >>> import piper_ray
    >>> bert = piper_ray.estimate("bert-large", "A100-80")
    >>> certificate = piper_ray.certify(bert, piper_ray.solve(bert, threads=1, schedule="2bw"))
    >>> certificate.tails[-1].devices
    8
    """

    devices: int
    layers: tuple[int, ...]
    joined: Mapping[int, int]
    members: npt.NDArray[np.uint8]
    used_devices: npt.NDArray[np.int64]
    data_parallel_sum: npt.NDArray[np.int64]
    kinds: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PassPrices:
    """Prices of passes and of memory under a flush, for plans of one d and one t on one group of devices.

    ranks: of the pipeline; under 1f1b and gpipe the largest possible number. chunks: of each rank. paths: through the
    passes, each with a weight. memory: prices of a byte, in seconds, each while a rank runs the pass at a place of its
    list: rank, place, price.
    """

    devices: int
    data_parallel_degree: int
    degree: int
    ranks: int
    chunks: int
    paths: tuple[tuple[float, PathSteps], ...]
    memory: tuple[tuple[int, int, float], ...]


@dataclass(frozen=True, eq=False)
class Certificate:
    """Claims that no plan of a workload that satisfies ``restrictions`` takes less than bound_s, seconds per sample,
    under its schedule.

    bound_s: inf if there is no plan at all. digest: the instance's. tails: under 2bw, for each size of group with a
    link of its own, the smallest first, and last for all devices; or for parts of the plans on several kinds of devices
    that are all of them together. prices: under a flush, with the terms of a ``step``.

    >>> import piper_ray
    >>> bert = piper_ray.estimate("bert-large", "A100-80")
    >>> solution = piper_ray.solve(bert, threads=1, schedule="2bw")
    >>> certificate = piper_ray.certify(bert, solution)
    >>> piper_ray.verify_certificate(bert, certificate).bound_s == certificate.bound_s
    True
    """

    digest: str
    name: str
    restrictions: Restrictions
    bound_s: float
    tails: tuple[Tails, ...] = ()
    schedule: Schedule = PAPERS_SCHEDULE
    step: StepTerms = StepTerms()
    prices: tuple[PassPrices, ...] = ()


@dataclass(frozen=True)
class StageWay:
    """A way to run a stage. degree: t. tmpcs: for each layer id those that it may run; empty if it cannot be in such a
    stage.

    data_parallel_degrees: those with exactly these TMPCs, ascending. kind: of the stage's devices.
    """

    degree: int
    data_parallel_degrees: tuple[int, ...]
    tmpcs: Mapping[int, tuple[Tmpc, ...]]
    kind: str = ""


def ways_of(instance: Instance, restrictions: Restrictions) -> tuple[StageWay, ...]:
    """Returns the ways in which stages of plans that satisfy the restrictions may run, by ``evaluate``'s rules."""
    found: list[StageWay] = []
    degrees = restrictions.data_parallel_degrees(instance)
    starts = [*instance.least_data_parallel_degrees, instance.data_parallel_limit + 1]
    for kind, t in product(instance.cluster.kind_names, instance.degrees):
        if t > instance.cluster.of_kind(kind).devices or not restrictions.admits_tensor_parallel_degree(t):
            continue
        of_kind = {layer.id: tuple(x for x in layer.tmpcs.get(t, ()) if x.kind == kind) for layer in instance.layers}
        for role in _ROLES.get(restrictions.recompute, (None,)):
            rows = {layer: _in_role(row, role) for layer, row in of_kind.items()}
            for least, beyond in pairwise(starts):
                inside = tuple(d for d in degrees if least <= d < beyond)
                if inside:
                    tmpcs = {
                        layer: tuple(x for x in row if x.least_data_parallel_degree <= least)
                        for layer, row in rows.items()
                    }
                    found.append(StageWay(t, inside, tmpcs, kind))
    return tuple(found)


_ROLES: Mapping[Recompute, tuple[bool | None, ...]] = {
    Recompute.ALWAYS: (True,),
    Recompute.NEVER: (False,),
    Recompute.ALL_OR_NONE: (False, True),
}
"""For each rule, what the layers of a stage that have the choice do: recompute or not; None: either."""


def _in_role(row: tuple[Tmpc, ...], role: bool | None) -> tuple[Tmpc, ...]:
    if role is None or {tmpc.recompute for tmpc in row} != {False, True}:
        return row
    return tuple(tmpc for tmpc in row if tmpc.recompute == role)


_CERTIFIED: Mapping[str, type[constraints.Constraint]] = {
    kind.__name__: kind
    for kind in (
        constraints.NoTensorParallelism,
        constraints.NoDataParallelism,
        constraints.RecomputeRule,
        constraints.TensorParallelDegrees,
        constraints.DataParallelDegrees,
        KeepOrder,
        constraints.Unplaced,
    )
}
_RULES = (Recompute.AUTO, Recompute.ALWAYS, Recompute.NEVER, Recompute.ALL_OR_NONE)


def require_certifiable(
    restrictions: Restrictions, schedule: Schedule = PAPERS_SCHEDULE, contract: Contract = Contract.SAFE
) -> None:
    """Raises UsageError, with the reason, if no certificate can be made."""
    if schedule.name in ASYNCHRONOUS and schedule != PAPERS_SCHEDULE:
        raise UsageError(f"bounds under {schedule.name.value} have no certificate: give schedule 2bw")
    if contract is not Contract.SAFE:
        raise UsageError("the bound of a plan of operators' blocks has no certificate: leave out contract")
    unknown = [repr(x) for x in restrictions.constraints if type(x).__name__ not in _CERTIFIED]
    if restrictions.recompute not in _RULES:
        unknown.append(f"recomputation {restrictions.recompute.value}")
    if unknown:
        raise UsageError(f"bounds under {', '.join(unknown)} have no certificate")


def charged(instance: Instance, restrictions: Restrictions) -> Instance:
    """Returns the instance that plans are charged for: the chain of its layers, if they must keep their order."""
    return in_order(instance) if restrictions.has(KeepOrder) else instance


def on_kinds(instance: Instance, kinds: Mapping[int, str]) -> Instance:
    """Returns the instance with these layers on devices of one kind alone."""
    layers = []
    for layer in instance.layers:
        only = kinds.get(layer.id)
        rows = {t: tuple(x for x in row if only in (None, x.kind)) for t, row in layer.tmpcs.items()}
        layers.append(replace(layer, tmpcs=rows))
    return replace(instance, layers=tuple(layers)).checked_as(instance) if kinds else instance


def levels_of(instance: Instance) -> list[Instance]:
    """Returns the instance on each group of devices with a link of its own, and on all devices."""
    if instance.cluster.kinds:
        return [instance]
    sites = max(1, len(instance.cluster.sites))
    sizes = [sites * link.devices for link in instance.cluster.links if link.devices is not None]
    smaller = [size for size in sizes if size < instance.devices]
    return [instance.replace(devices=size) for size in (*smaller, instance.devices)]


def restrictions_of(document: object) -> Restrictions:
    """Inverts ``Restrictions.to_dict``. Raises UsageError, or Python's errors for other documents."""
    if not isinstance(document, dict):
        raise UsageError("no restrictions")
    others = []
    for listed in document.get("constraints", []):
        fields = {name: tuple(x) if isinstance(x, list) else x for name, x in listed.items() if name != "kind"}
        if listed["kind"] not in _CERTIFIED:
            raise UsageError(f"{listed['kind']} is certified by nobody")
        others.append(_CERTIFIED[listed["kind"]](**fields))
    found = Restrictions(
        tensor_parallelism=document["tensor_parallelism"],
        data_parallelism=document["data_parallelism"],
        recompute=document["recompute"],
        constraints=others,
    )
    require_certifiable(found)
    return found


FORM, VERSION = "certificate", 2
_KEY = b"piper_ray"
_COLUMNS = {"level": pa.int32(), "members": pa.binary(), "devices": pa.int64(), "data_parallel_sum": pa.int64()}
_MOST = 2**53
"""Devices and sums must be less, so that they are exact in any number type."""

_LEAST_BYTES, _SPARE_BYTES = 64, 2**20
"""Bytes of a row apart from its members while it is read, and bytes of a file's own tables."""

_UNREADABLE = (pa.ArrowException, OSError, LookupError, ValueError, TypeError, MemoryError, RecursionError)
_DAMAGED = "is no certificate, or is cut off or damaged"
_MALFORMED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, UsageError, pa.ArrowException)


def write_certificate(certificate: Certificate, path: str | os.PathLike[str]) -> None:
    """Writes the whole file or none. Raises UsageError if the file cannot be written.

    >>> import piper_ray
    >>> bert = piper_ray.estimate("bert-large", "A100-80")
    >>> certificate = piper_ray.certify(bert, piper_ray.solve(bert, threads=1, schedule="2bw"))
    >>> piper_ray.write_certificate(certificate, "bert.certificate")
    >>> piper_ray.read_certificate("bert.certificate").bound_s == certificate.bound_s
    True
    """
    schema = pa.schema(
        [pa.field(name, kind, nullable=False) for name, kind in _COLUMNS.items()],
        metadata={_KEY: json.dumps(_header(certificate), allow_nan=False)},
    )
    batches = []
    for level, tails in enumerate(certificate.tails):
        members = [row.tobytes() for row in tails.members]
        rows = (np.full(tails.used_devices.size, level, np.int32), members, tails.used_devices, tails.data_parallel_sum)
        columns = [pa.array(values, kind) for values, kind in zip(rows, _COLUMNS.values(), strict=True)]
        batches.append(pa.record_batch(columns, schema))
    with written_whole(Path(path)) as file:
        pq.write_table(pa.Table.from_batches(batches, schema), file, compression="zstd")


def read_certificate(path: str | os.PathLike[str]) -> Certificate:
    """Reads what ``write_certificate`` wrote, and checks that it is well-formed; ``verify_certificate`` checks the
    proof.

    Raises CertificateRefused if it is not a certificate, of another version, or damaged, UsageError if the file cannot
    be read, and LimitError if there is not enough memory for its rows.

    >>> import piper_ray
    >>> bert = piper_ray.estimate("bert-large", "A100-80")
    >>> certificate = piper_ray.certify(bert, piper_ray.solve(bert, threads=1, schedule="2bw"))
    >>> piper_ray.write_certificate(certificate, "bert.certificate")
    >>> piper_ray.read_certificate("bert.certificate").digest == bert.digest
    True
    """
    return read_after(path, lambda _head, _rows: None)


def read_after(path: str | os.PathLike[str], look: Callable[[Certificate, int], object]) -> Certificate:
    """Reads like ``read_certificate``. look: called with the certificate without its rows and with their number, before
    they are read, since a small file can have any number. What it raises is passed on."""
    try:
        kind = kind_unless_file(path)
        if kind is not None:
            raise UsageError(f"{path}: is {kind}: reading it could wait for ever; expected a file")
        content = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from error
    with _refused(path, _UNREADABLE):
        file = pq.ParquetFile(pa.BufferReader(content))
        header = json.loads((file.schema_arrow.metadata or {})[_KEY])
        if not isinstance(header, dict) or header["form"] != FORM:
            raise ValueError
    if header.get("schema_version") != VERSION:
        raise CertificateRefused(
            f"{path}: is a certificate of version {header.get('schema_version')!r}; this piper_ray reads {VERSION}"
        )
    with _refused(path, _MALFORMED):
        head = _certificate(header, file.schema_arrow.empty_table())
        rows = _rows(file.metadata, head)
    look(head, rows)
    if rows * (_LEAST_BYTES + _width(head)) > free_bytes():
        raise LimitError(f"{path}: has {rows:,} rows, which take more memory than is free")
    with _refused(path, _UNREADABLE):
        table = file.read()
    with _refused(path, _MALFORMED):
        found = _certificate(header, table)
        written = header.get("sha256") == _digest(_header(found, checked=False), found)
    if not written:
        raise CertificateRefused(f"{path}: was changed after it was written: its checksum is another")
    return found


@contextmanager
def _refused(path: str | os.PathLike[str], kinds: tuple[type[Exception], ...]) -> Iterator[None]:
    """Raises CertificateRefused in place of errors of these kinds."""
    try:
        yield
    except kinds as error:
        form = f"is not in the form of a certificate: {error}" if kinds is _MALFORMED else _DAMAGED
        raise CertificateRefused(f"{path}: {form}") from error


def free_bytes() -> float:
    """Returns half of the free memory of this machine, in bytes."""
    try:
        return 0.5 * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # this system does not report it
        return 4e9


def _width(certificate: Certificate) -> int:
    """Returns the largest number of bytes of a row's members."""
    return max(((len(tails.layers) + 7) // 8 for tails in certificate.tails), default=0)


def _rows(metadata: pq.FileMetaData, head: Certificate) -> int:
    """Returns the number of rows by the file's metadata, before they are read. Their size must not exceed what this
    number of rows takes."""
    sizes_bytes = sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))
    if sizes_bytes > _SPARE_BYTES + metadata.num_rows * (_LEAST_BYTES + _width(head)):
        raise ValueError(f"its {metadata.num_rows:,} rows are said to take {sizes_bytes:,} bytes")
    return int(metadata.num_rows)


def _header(certificate: Certificate, *, checked: bool = True) -> dict[str, Any]:
    bound_s = certificate.bound_s
    header: dict[str, Any] = {
        "form": FORM,
        "schema_version": VERSION,
        "workload": {"name": certificate.name, "digest": certificate.digest},
        **certificate.schedule.to_dict(),
        "step": _step_document(certificate.step),
        "restrictions": certificate.restrictions.to_dict(),
        "bound_s": None if math.isinf(bound_s) else bound_s,
        "levels": [
            {
                "devices": tails.devices,
                "layers": list(tails.layers),
                "joined": [[layer, into] for layer, into in sorted(tails.joined.items())],
                **({"kinds": [[layer, kind] for layer, kind in sorted(tails.kinds.items())]} if tails.kinds else {}),
            }
            for tails in certificate.tails
        ],
        "prices": [_prices_document(prices) for prices in certificate.prices],
    }
    return header | {"sha256": _digest(header, certificate)} if checked else header


def _step_document(step: StepTerms) -> dict[str, object]:
    return {
        "all_reduce": step.all_reduce.value,
        "all_reduce_overlap": step.all_reduce_overlap,
        "optimizer_s": step.optimizer_s,
    }


def _prices_document(prices: PassPrices) -> dict[str, object]:
    return {
        "devices": prices.devices,
        "d": prices.data_parallel_degree,
        "t": prices.degree,
        "ranks": prices.ranks,
        "chunks": prices.chunks,
        "paths": [[weight, walk.rank, walk.place, list(walk.steps)] for weight, walk in prices.paths],
        "memory": [list(priced) for priced in prices.memory],
    }


def _prices(document: Mapping[str, Any]) -> PassPrices:
    return PassPrices(
        devices=_whole(document["devices"]),
        data_parallel_degree=_whole(document["d"]),
        degree=_whole(document["t"]),
        ranks=_whole(document["ranks"]),
        chunks=_whole(document["chunks"]),
        paths=tuple(
            (float(weight), PathSteps(_whole(rank), _whole(place), tuple(map(_whole, steps))))
            for weight, rank, place, steps in document["paths"]
        ),
        memory=tuple((_whole(rank), _whole(place), float(price)) for rank, place, price in document["memory"]),
    )


def _digest(header: Mapping[str, Any], certificate: Certificate) -> str:
    digest = hashlib.sha256(json.dumps(header, allow_nan=False, sort_keys=True).encode())
    for tails in certificate.tails:
        for column in (tails.members, tails.used_devices, tails.data_parallel_sum):
            digest.update(np.ascontiguousarray(column).tobytes())
    return digest.hexdigest()


def _certificate(header: Mapping[str, Any], table: pa.Table) -> Certificate:
    schedule = Schedule(ScheduleName(header["schedule"]), header["chunks"], header.get("group"))
    require_certifiable(Restrictions(), schedule)
    if table.column_names != list(_COLUMNS) or any(table[name].null_count for name in _COLUMNS):
        raise ValueError(f"its columns are to be {', '.join(_COLUMNS)}, without gaps")
    level = np.asarray(table["level"].to_numpy(), np.int64)
    devices, sums = (np.asarray(table[name].to_numpy(), np.int64) for name in ("devices", "data_parallel_sum"))
    if level.size and not 0 <= level.min() <= level.max() < len(header["levels"]):
        raise ValueError("a row is of a level that is not there")
    if devices.size and not (min(devices.min(), sums.min()) >= 0 and max(devices.max(), sums.max()) < _MOST):
        raise ValueError("a row has fewer devices than none, or more than there can be")
    bound_s = math.inf if header["bound_s"] is None else float(header["bound_s"])
    if not bound_s >= 0.0:
        raise ValueError(f"its bound is {bound_s} s")
    of_table = table["members"].combine_chunks()
    tails = []
    for number, described in enumerate(header["levels"]):
        rows = np.flatnonzero(level == number)
        layers = tuple(_whole(layer) for layer in described["layers"])
        tails.append(
            Tails(
                devices=_whole(described["devices"]),
                layers=layers,
                joined={_whole(layer): _whole(into) for layer, into in described["joined"]},
                members=_members(of_table.take(pa.array(rows)), (len(layers) + 7) // 8),
                used_devices=devices[rows],
                data_parallel_sum=sums[rows],
                kinds={_whole(layer): str(kind) for layer, kind in described.get("kinds", [])},
            )
        )
    return Certificate(
        digest=str(header["workload"]["digest"]),
        name=str(header["workload"]["name"]),
        restrictions=restrictions_of(header["restrictions"]),
        bound_s=bound_s,
        tails=tuple(tails),
        schedule=schedule,
        step=StepTerms(**header["step"]),
        prices=tuple(map(_prices, header["prices"])),
    )


def _members(column: pa.Array, width: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Returns uint8[rows, width]."""
    _, ends, data = column.buffers()
    if not len(column):
        return np.zeros((0, width), np.uint8)
    at = np.frombuffer(ends, np.int32)[column.offset : column.offset + len(column) + 1]
    if np.any(np.diff(at) != width):
        raise ValueError(f"a row's members are to be {width} bytes")
    if data is None or at[-1] == at[0]:
        return np.zeros((len(column), width), np.uint8)
    return np.frombuffer(data, np.uint8)[at[0] : at[-1]].reshape(len(column), width)


def _whole(number: object) -> int:
    if type(number) is not int or abs(number) >= _MOST:
        raise ValueError(f"{number!r} is no whole number")
    return number
