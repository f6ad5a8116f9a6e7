"""Certificates in files: there and back, and what is refused by name."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from piper_ray.certificate.certificate import Certificate, read_certificate, write_certificate
from piper_ray.certificate.check import verify_certificate
from piper_ray.model.constraints import KeepOrder, Restrictions, SameDegrees, TensorParallelDegrees
from piper_ray.model.errors import CertificateRefused, LimitError, UsageError
from tests.certificate_support import certificate_of, with_state, with_tails
from tests.formats_support import named_pipe
from tests.instances import named_instances, two_towers

TOWERS = two_towers(3, devices=5, memory_bytes=40.0)


@pytest.fixture(scope="module")
def certificate() -> Certificate:
    return certificate_of(TOWERS)


@pytest.fixture
def path(tmp_path: Path, certificate: Certificate) -> Path:
    path = tmp_path / "towers.certificate"
    write_certificate(certificate, path)
    return path


def assert_equal(one: Certificate, other: Certificate) -> None:
    assert (one.digest, one.name, one.restrictions) == (other.digest, other.name, other.restrictions)
    assert one.bound_s == other.bound_s
    for mine, theirs in zip(one.tails, other.tails, strict=True):
        assert (mine.devices, mine.layers, dict(mine.joined)) == (theirs.devices, theirs.layers, dict(theirs.joined))
        for name in ("members", "used_devices", "data_parallel_sum"):
            assert np.array_equal(getattr(mine, name), getattr(theirs, name))


def test_there_and_back(path: Path, certificate: Certificate) -> None:
    assert_equal(read_certificate(path), certificate)
    assert verify_certificate(TOWERS, path, threads=1).bound_s == certificate.bound_s


@pytest.mark.parametrize("name", ["does not fit", "no cost at all", "free source", "one layer"])
def test_bounds_without_end_and_of_nothing(name: str, tmp_path: Path) -> None:
    instance = named_instances()[name]
    certificate = certificate_of(instance)
    write_certificate(certificate, tmp_path / "file")
    assert_equal(read_certificate(tmp_path / "file"), certificate)
    assert verify_certificate(instance, tmp_path / "file").bound_s == certificate.bound_s


def test_restrictions_are_part_of_the_claim(tmp_path: Path) -> None:
    rules = Restrictions(
        data_parallelism=False, recompute="never", constraints=[TensorParallelDegrees((1, 2)), KeepOrder()]
    )
    certificate = certificate_of(TOWERS, rules)
    write_certificate(certificate, tmp_path / "file")
    assert verify_certificate(TOWERS, tmp_path / "file").restrictions == rules
    free = replace(certificate, restrictions=Restrictions())
    with pytest.raises(CertificateRefused, match="does not prove its bound"):
        verify_certificate(TOWERS, free)


def test_the_metadata_says_what_it_is_about(path: Path, certificate: Certificate) -> None:
    table = pq.read_table(path)
    header = json.loads(table.schema.metadata[b"piper_ray"])
    assert header["form"] == "certificate"
    assert header["schedule"] == "2bw"
    assert header["workload"] == {"name": TOWERS.name, "digest": TOWERS.digest}
    assert header["bound_s"] == certificate.bound_s
    assert table.num_rows == certificate.tails[0].used_devices.size


def test_cut_off_anywhere(path: Path) -> None:
    content = path.read_bytes()
    for length in range(0, len(content), 97):
        path.write_bytes(content[:length])
        with pytest.raises(CertificateRefused, match="cut off or damaged"):
            read_certificate(path)


def test_any_byte_changed(path: Path, certificate: Certificate) -> None:
    content = path.read_bytes()
    rng = random.Random("flipped")
    refused = 0
    for _ in range(150):
        at = rng.randrange(len(content))
        path.write_bytes(content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :])
        try:
            found = read_certificate(path)
        except CertificateRefused:
            refused += 1
        else:
            assert_equal(found, certificate)  # some bytes say nothing
    assert refused > 75


@pytest.mark.parametrize("content", [b"", b"PAR1", b"{}", b"not a certificate at all", b"PAR1" * 100])
def test_other_files(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(CertificateRefused, match="is no certificate"):
        verify_certificate(TOWERS, path)


def test_a_table_of_something_else(path: Path) -> None:
    pq.write_table(pa.table({"level": [1, 2]}), path)
    with pytest.raises(CertificateRefused, match="is no certificate"):
        read_certificate(path)


def test_a_named_pipe_is_not_waited_for(tmp_path: Path) -> None:
    with (
        named_pipe(tmp_path / "pipe") as pipe,
        pytest.raises(UsageError, match=r"pipe: is a named pipe \(FIFO\): reading it could wait for ever"),
    ):
        read_certificate(pipe)


def many_rows(path: Path, rows: int) -> None:
    """The file with its first row repeated, and its header as it was."""
    table = pq.read_table(path)
    pq.write_table(table.take(pa.array(np.zeros(rows, np.int64))), path, compression="zstd")


def test_more_rows_than_there_can_be_are_not_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many_rows(path, 300_000)
    assert path.stat().st_size < 100_000
    read: list[int] = []
    real = pq.ParquetFile.read

    def noted(file: pq.ParquetFile) -> pa.Table:
        read.append(1)
        return real(file)

    monkeypatch.setattr(pq.ParquetFile, "read", noted)
    with pytest.raises(CertificateRefused, match=r"has 300,000 rows; for this workload there are \d+ at the most"):
        verify_certificate(TOWERS, path, threads=1)
    assert not read


def test_more_rows_than_there_is_memory_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("piper_ray.certificate.certificate.free_bytes", lambda: 10.0)
    with pytest.raises(LimitError, match="rows, which take more memory than is free"):
        read_certificate(path)


def test_columns_larger_than_their_rows_are_not_read(path: Path) -> None:
    table = pq.read_table(path)
    large = pa.array([b"\0" * 2_000_000] * table.num_rows, pa.binary())
    at = table.schema.get_field_index("members")
    pq.write_table(table.set_column(at, table.schema.field("members"), large), path, use_dictionary=False)
    with pytest.raises(CertificateRefused, match=r"its \d+ rows are said to take [\d,]+ bytes"):
        read_certificate(path)


def test_members_are_of_one_width(path: Path) -> None:
    table = pq.read_table(path)
    at = table.schema.get_field_index("members")
    uneven = pa.array([b"\0" * (2 + row % 2) for row in range(table.num_rows)], pa.binary())
    pq.write_table(table.set_column(at, table.schema.field("members"), uneven), path)
    with pytest.raises(CertificateRefused, match="a row's members are to be"):
        read_certificate(path)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_certificate(tmp_path / "nothing")
    with pytest.raises(UsageError, match="cannot be written"):
        write_certificate(certificate_of(named_instances()["one layer"]), tmp_path / "no" / "folder")


def _with_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    table = pq.read_table(path)
    header = json.loads(table.schema.metadata[b"piper_ray"])
    change(header)
    pq.write_table(table.replace_schema_metadata({b"piper_ray": json.dumps(header)}), path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x: x.update(schema_version=3), "version 3; this piper_ray reads 2"),
        (lambda x: x.update(form="plan"), "is no certificate"),
        (lambda x: x.update(bound_s=x["bound_s"] * 2), "changed after it was written"),
        (lambda x: x.update(bound_s=-1.0), "its bound is -1.0 s"),
        (lambda x: x.update(bound_s=math.nan), "its bound is nan s"),
        (lambda x: x.update(bound_s="soon"), "not in the form"),
        (lambda x: x.update(schedule="pipedream"), "pipedream have no certificate"),
        (lambda x: x.pop("levels"), "not in the form"),
        (lambda x: x.update(levels=[]), "a row is of a level that is not there"),
        (lambda x: x["levels"][0]["layers"].append(99), "not in the form|changed"),
        (lambda x: x["levels"][0].update(devices=5.0), "5.0 is no whole number"),
        (lambda x: x["levels"][0].update(joined=[[0, 1, 2]]), "not in the form"),
        (lambda x: x.update(restrictions={}), "not in the form"),
        (lambda x: x.update(restrictions=None), "not in the form"),
        (lambda x: x["restrictions"].update(constraints=[{"kind": "SameDegrees"}]), "SameDegrees"),
        (lambda x: x["restrictions"].update(constraints=[{"kind": "KeepOrder", "how": 1}]), "not in the form"),
        (lambda x: x["restrictions"].update(recompute="one-for-all"), "one-for-all"),
        (lambda x: x["workload"].update(digest="0" * 64), "changed after it was written"),
    ],
)
def test_altered_metadata(path: Path, change: Callable[[dict[str, Any]], object], said: str) -> None:
    _with_header(path, change)
    with pytest.raises(CertificateRefused, match=said):
        read_certificate(path)


@pytest.mark.parametrize("column", ["level", "members", "devices", "data_parallel_sum"])
def test_altered_rows(path: Path, column: str) -> None:
    table = pq.read_table(path)
    values = table[column].to_pylist()
    values[3] = {"level": 1, "members": b"\xff\xff\xff", "devices": -2, "data_parallel_sum": 2**60}[column]
    changed = table.set_column(
        table.column_names.index(column), table.schema.field(column), pa.array(values, table.schema.field(column).type)
    )
    pq.write_table(changed, path)
    with pytest.raises(CertificateRefused, match=r"level that is not there|members are to be|more than there can be"):
        read_certificate(path)


def test_rows_left_out(path: Path) -> None:
    table = pq.read_table(path)
    pq.write_table(table.slice(0, table.num_rows - 1), path)
    with pytest.raises(CertificateRefused, match="changed after it was written"):
        read_certificate(path)


@pytest.mark.parametrize("figures", [{"devices": 6}, {"microbatches": 8}, {"memory_bytes": 41.0}])
def test_other_clusters(certificate: Certificate, figures: dict[str, Any]) -> None:
    with pytest.raises(CertificateRefused, match="another workload or cluster"):
        verify_certificate(TOWERS.replace(**figures), certificate)


def test_of_another_workload_with_its_name_on_it(certificate: Certificate) -> None:
    other = two_towers(4, devices=5, memory_bytes=40.0)
    with pytest.raises(CertificateRefused, match="another workload"):
        verify_certificate(other, certificate)
    with pytest.raises(CertificateRefused, match="layers are not those of the workload"):
        verify_certificate(other, replace(certificate, digest=other.digest))


def test_a_bound_too_high(certificate: Certificate) -> None:
    with pytest.raises(
        CertificateRefused, match=r"a stage of layers .* is faster, and what it leads to is not ruled out"
    ):
        verify_certificate(TOWERS, replace(certificate, bound_s=certificate.bound_s * (1.0 + 1e-8)))


def test_tails_that_admit_a_plan(certificate: Certificate) -> None:
    (tails,) = certificate.tails
    whole = np.full((1, tails.members.shape[1]), 0, np.uint8)
    for v in range(len(tails.layers)):
        whole[0, v // 8] |= 1 << v % 8
    more = replace(
        tails,
        members=np.concatenate([tails.members, whole]),
        used_devices=np.append(tails.used_devices, 4),
        data_parallel_sum=np.append(tails.data_parallel_sum, 4),
    )
    with pytest.raises(CertificateRefused, match="itself leaves room for a plan within its bound, on 4 devices"):
        verify_certificate(TOWERS, with_tails(certificate, more))


def test_the_empty_tail_takes_nothing(certificate: Certificate) -> None:
    (tails,) = certificate.tails
    assert not tails.members[0].any()
    with pytest.raises(CertificateRefused, match="does not list the empty tail"):
        verify_certificate(TOWERS, with_tails(certificate, with_state(tails, 0, 1, 0)))


def test_layers_that_are_no_tail(certificate: Certificate) -> None:
    (tails,) = certificate.tails
    members = tails.members.copy()
    members[2] = 0x40  # without what comes behind it
    with pytest.raises(CertificateRefused, match="can be no tail"):
        verify_certificate(TOWERS, with_tails(certificate, replace(tails, members=members)))


def test_layers_in_no_order(certificate: Certificate) -> None:
    (tails,) = certificate.tails
    with pytest.raises(CertificateRefused, match="in front of"):
        verify_certificate(TOWERS, with_tails(certificate, replace(tails, layers=tails.layers[::-1])))


@pytest.mark.parametrize("joined", [{0: 1}, {1: 0}, {8: 7}])
def test_layers_that_cost_something_join_nobody(certificate: Certificate, joined: dict[int, int]) -> None:
    """One device more or less would hide it: the whole's tails are as they were."""
    (tails,) = certificate.tails
    assert not tails.joined
    kept = tuple(layer for layer in tails.layers if layer not in joined)
    with pytest.raises(CertificateRefused, match=r"cost something|cannot"):
        verify_certificate(TOWERS, with_tails(certificate, replace(tails, layers=kept, joined=joined)))


def test_what_is_certified_by_nobody(certificate: Certificate) -> None:
    rules = Restrictions(constraints=[SameDegrees()])
    with pytest.raises(UsageError, match=r"bounds under SameDegrees\(\) have no certificate"):
        verify_certificate(TOWERS, replace(certificate, restrictions=rules))


def test_instances_are_looked_through_first() -> None:
    with pytest.raises(UsageError, match="instance"):
        verify_certificate(3, "file")  # type: ignore[arg-type]
