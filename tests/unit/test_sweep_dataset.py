"""The dataset: what is in it, who may write it, and that merging its files loses and doubles nothing."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from pyarrow import fs

from piper_ray import CheckpointRefused, UsageError, __version__
from piper_ray.storage.folder import PARTS, StateFile, checksum, open_folder
from piper_ray.sweep import columns, dataset
from piper_ray.sweep.columns import ORDER, SCHEMA
from piper_ray.sweep.dataset import Dataset, read_dataset
from tests.checkpoint_support import Clock, ObjectStore, ignored, unexpected
from tests.lengths import long_after
from tests.sweep_support import RUN_COLUMNS
from tests.sweep_support import dataset_row as row

ROOT = Path(__file__).resolve().parents[2]


def opened(location: Path | str, *, resume: bool = False, on_warning: Callable[[str], None] = unexpected) -> Dataset:
    return Dataset.open(location, "test", resume=resume, on_warning=on_warning)


def hashes(location: Path | str) -> list[str]:
    found: list[str] = read_dataset(location, ["input_hash"]).column("input_hash").to_pylist()
    return sorted(found)


def parts(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("workload=*/*"))


def test_rows_come_back_as_they_were_given(tmp_path: Path) -> None:
    given = [row(1), row(0), row(0, "b")]
    with opened(tmp_path / "d") as written:
        written.add(given)
        assert written.finished == {"a 0", "a 1", "b 0"}
    found = read_dataset(tmp_path / "d").to_pylist()
    assert [r["input_hash"] for r in found] == ["a 0", "a 1", "b 0"]
    for one in found:
        (same,) = [g for g in given if g["input_hash"] == one["input_hash"]]
        assert {key: value for key, value in one.items() if value is not None} == same


def test_any_reader_of_partitioned_parquet_takes_it(tmp_path: Path) -> None:
    with opened(tmp_path) as written:
        written.add([row(0), row(1), row(0, "b")])
        table = pq.read_table(tmp_path)  # while a sweep has it open: control files are passed over
        assert table.num_rows == 3
    found = ds.dataset(tmp_path, partitioning="hive").to_table(filter=ds.field("workload") == "b")
    assert found.column("input_hash").to_pylist() == ["b 0"]


def test_the_schema_is_the_documented_one(tmp_path: Path) -> None:
    """A change here is one of the format: raise columns.SCHEMA_VERSION unless a column is only added."""
    with opened(tmp_path) as written:
        written.add([row(0)])
    (part,) = (tmp_path / "workload=a").iterdir()
    schema = pq.read_schema(part)
    assert schema.metadata[b"piper_ray.sweep.schema_version"] == str(columns.SCHEMA_VERSION).encode() == b"2"
    types = {field.name: str(field.type) for field in schema}
    text = ["input_hash", "graph_hash", "planner", "recompute", "status", "plan", "stopped_by", "note"]
    text += ["error_kind", "error", "version", "kernels", "host", "runtime", "schedule"]
    text += ["gpu", "precision", "trained_by", "asked_schedule", "layout", "devices_of_kinds", "kinds_of_stages"]
    count = ["devices", "microbatches", "devices_used", "stages", "layers", "downsets", "levels", "pairs"]
    count += ["evaluations", "tried", "attempts", "chunks"]
    count += ["nodes", "batch", "tokens", "microbatch_samples", "combinations", "combinations_closed"]
    real = ["memory_bytes", "bandwidth_bytes_per_s", "gap_limit", "time_limit_s", "time_per_sample_s", "lower_bound_s"]
    real += ["gap", "least_memory_bytes", "seconds", "lattice_s", "stage_costs_s", "search_s"]
    real += ["cpu_s", "step_s", "step_lower_bound_s", "tokens_per_s", "tokens_per_s_per_device", "mfu"]
    real += ["peak_memory_bytes"]
    assert types == {
        **dict.fromkeys(text, "string"),
        **dict.fromkeys(count, "int64"),
        **dict.fromkeys(real, "double"),
        **dict.fromkeys(("tensor_parallelism", "data_parallelism", "spread"), "bool"),
        "finished_at": "timestamp[ms, tz=UTC]",
    }
    assert all(said["meaning"] for said in columns.COLUMNS.values())
    assert set(RUN_COLUMNS) | set(ORDER) <= set(types)


@pytest.mark.long
def test_merging_and_compacting_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "MERGE_AT", 4)
    monkeypatch.setattr(dataset, "FILE_ROWS", 10)
    given = []
    with opened(tmp_path) as written:
        for number in range(37):
            written.add([row(number), row(number, "b")])
            given += [f"a {number}", f"b {number}"]
            assert hashes(tmp_path) == sorted(given)
            assert len(parts(tmp_path)) <= 2 * (3 + 10)
        written.compact()
    assert hashes(tmp_path) == sorted(given)
    sizes = [pq.read_metadata(path).num_rows for path in sorted((tmp_path / "workload=a").iterdir())]
    assert sum(sizes) == 37
    assert max(sizes) <= 10
    assert len(sizes) <= 8
    for path in tmp_path.glob("workload=*/*"):
        devices = pq.read_table(path, partitioning=None).column("devices").to_pylist()
        assert devices == sorted(devices)


class Killed(BaseException):
    """As by SIGKILL at an operation on the storage."""


@pytest.mark.parametrize("every", long_after(1, [5, 2]))
def test_killed_at_any_operation_it_keeps_what_was_added(every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deaths between the writes and deletes of merging, too; on storage without renames."""
    monkeypatch.setattr(dataset, "MERGE_AT", 3)
    monkeypatch.setattr(dataset, "time", Clock())  # a dead driver's lease runs out at once
    for left in range(0, 200, every):
        store = _Store()
        monkeypatch.setattr(dataset, "_resolve", lambda location, store=store: (store.filesystem, location))
        confirmed: list[str] = []
        store.left = left
        survived = _add_until_killed(confirmed)
        store.left = None
        with opened("bucket", resume=True, on_warning=ignored) as written:
            assert written.finished >= set(confirmed)
            written.add(row(number) for number in range(8) if f"a {number}" not in written.finished)
            written.compact()
        assert hashes("bucket") == [f"a {number}" for number in range(8)]
        assert len([key for key in store.objects if key.endswith(".parquet")]) == 1
        if survived:
            assert left > 20
            return
    raise AssertionError("it never ended")


def _add_until_killed(confirmed: list[str]) -> bool:
    written = None
    try:
        written = opened("bucket", on_warning=ignored)
        for number in range(8):
            written.add([row(number)])
            confirmed.append(f"a {number}")
        written.compact()
        written.close()
    except Killed:
        if written is not None:
            with contextlib.suppress(Killed):
                written.close()  # its thread ends
        return False
    return True


class _Store(ObjectStore):
    """Allows a number of writes and deletes."""

    def __init__(self) -> None:
        super().__init__(before=self._count)
        self.left: int | None = None

    def _count(self, operation: str, _key: str) -> None:
        if operation not in ("put", "delete") or self.left is None:
            return
        if self.left <= 0:
            raise Killed
        self.left -= 1

    def get_file_info_selector(self, selector: fs.FileSelector) -> list[fs.FileInfo]:
        """Folders too, as pyarrow shows common prefixes."""
        start = selector.base_dir + "/"
        folders = {key[len(start) :].split("/")[0] for key in self.objects if key.startswith(start)}
        inner = [f"{start}{name}" for name in sorted(folders)]
        return self.get_file_info(inner)


def test_a_file_within_another_is_obsolete(tmp_path: Path) -> None:
    with opened(tmp_path) as written:
        for number in range(3):
            written.add([row(number)])
        old = {path.name: path.read_bytes() for path in (tmp_path / "workload=a").iterdir()}
        written.compact()
    for name, data in old.items():  # as if the driver had died before it deleted them
        (tmp_path / "workload=a" / name).write_bytes(data)
    assert len(parts(tmp_path)) == 4
    assert hashes(tmp_path) == ["a 0", "a 1", "a 2"]
    with opened(tmp_path, resume=True) as written:
        assert len(written.finished) == 3
    assert len(parts(tmp_path)) == 1


def test_a_point_written_twice_counts_once(tmp_path: Path) -> None:
    with opened(tmp_path) as written:
        written.add([row(0), row(1)])
        written.add([row(1), row(2)])
        assert hashes(tmp_path) == ["a 0", "a 1", "a 2"]
        written.compact()
    (part,) = (tmp_path / "workload=a").iterdir()
    assert pq.read_metadata(part).num_rows == 3


def test_finished_points_are_not_overwritten_by_accident(tmp_path: Path) -> None:
    with opened(tmp_path) as written:
        written.add([row(0)])
    with pytest.raises(CheckpointRefused, match="add --resume to go on with it, or give another storage"):
        opened(tmp_path)
    with opened(tmp_path, resume=True) as written:
        assert written.finished == {"a 0"}


def test_of_another_version_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(tmp_path).close()
    monkeypatch.setattr("piper_ray.sweep.dataset.__version__", "99")
    with pytest.raises(
        CheckpointRefused, match=rf"was made by piper_ray {re.escape(__version__)}, this is 99: give another storage"
    ):
        opened(tmp_path, resume=True)


def test_of_another_format_it_is_refused_in_words(tmp_path: Path) -> None:
    """Format 1 had no checksums: nothing in it can be trusted to be what was written."""
    control = open_folder(str(tmp_path / "later" / "_sweep"))
    content = b'{"format": 7, "piper_ray": "9"}'
    control.put(StateFile(PARTS, 1, 1, checksum(content)).name, content, durable=True)
    (tmp_path / "earlier" / "_sweep").mkdir(parents=True)
    (tmp_path / "earlier" / "_sweep" / "sweep.json").write_text('{"format": 1, "piper_ray": "0.1.0", "name": "s"}')
    words = {
        "later": "a dataset of format 7; this piper_ray knows 2",
        "earlier": "of format 1, whose files have no check",
    }
    for name, text in words.items():
        with pytest.raises(UsageError, match=text):
            read_dataset(tmp_path / name)
        with pytest.raises(UsageError, match=text):
            opened(tmp_path / name, resume=True)


_OWNER = """
import sys
from tests.unit.test_sweep_dataset import opened
dataset = opened(sys.argv[1])
print("open", flush=True)
sys.stdin.read()
"""


@pytest.mark.long
def test_two_sweeps_on_one_storage_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("piper_ray.storage.lease._POLL_S", 0.05)
    command = [sys.executable, "-c", _OWNER, str(tmp_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdin=pipe, stdout=pipe, text=True
    ) as owner:
        try:
            assert owner.stdout is not None
            assert owner.stdout.readline() == "open\n"
            with pytest.raises(CheckpointRefused, match=rf"in use: another .*pid {owner.pid}"):
                opened(tmp_path, resume=True, on_warning=ignored)
        finally:
            owner.kill()
    opened(tmp_path, resume=True).close()


@pytest.mark.parametrize("location", ["", "/", "nothing://at/all"])
def test_no_storage(location: str) -> None:
    with pytest.raises(CheckpointRefused, match="cannot be used"):
        opened(location)


def test_nothing_to_read(tmp_path: Path) -> None:
    for location in (tmp_path, tmp_path / "gone"):
        with pytest.raises(UsageError, match="there is no dataset of a sweep"):
            read_dataset(location)


def test_an_empty_dataset_has_the_schema(tmp_path: Path) -> None:
    opened(tmp_path).close()
    table: Any = read_dataset(tmp_path)
    assert table.num_rows == 0
    assert table.schema.names == ["workload", *SCHEMA.names]
    assert isinstance(table, pa.Table)


_READER = """
import os, sys, time
import pyarrow as pa
from piper_ray.sweep.dataset import Dataset, read_dataset

def threads():
    return len(os.listdir("/proc/self/task"))

pa.array(range(10)).sum()
before = threads()
for _ in range(5):
    read_dataset(sys.argv[1])
Dataset.open(sys.argv[1], "test", resume=True, on_warning=print).close()
deadline = time.monotonic() + 10.0
while threads() > before and time.monotonic() < deadline:  # one that is ending is none that is left
    time.sleep(0.01)
print(threads() - before)
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="threads of any kind are counted in /proc")
def test_reading_leaves_no_thread_behind(tmp_path: Path) -> None:
    """One of Arrow's that lets go of Python's memory while the interpreter ends takes the process down (exit 134)."""
    with opened(tmp_path) as written:
        for number in range(3):
            written.add([row(number), row(number, "b")])
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", _READER, str(tmp_path)]
    read = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert read.stdout == "0\n"


def test_a_dataset_without_schedules_is_of_pipers(tmp_path: Path) -> None:
    """As those of schema version 1 are: they are read, merged and resumed."""
    before = columns.SCHEMA
    with pytest.MonkeyPatch.context() as patch:
        version_1 = pa.schema([field for field in before if field.name not in columns.BEFORE], before.metadata)
        patch.setattr(columns, "SCHEMA", version_1)
        patch.setattr(dataset, "ORDER", [name for name in ORDER if name not in columns.BEFORE])
        with opened(tmp_path) as written:
            written.add([row(0), row(1)])
    (part,) = (tmp_path / "workload=a").iterdir()
    assert "schedule" not in pq.read_schema(part).names
    assert read_dataset(tmp_path).column("schedule").to_pylist() == ["2bw", "2bw"]
    assert read_dataset(tmp_path, columns=["chunks"]).column("chunks").to_pylist() == [1, 1]
    with opened(tmp_path, resume=True) as written:
        written.add([row(2) | {"schedule": "1f1b"}])
        written.compact()
    found = dict(zip(*read_dataset(tmp_path).select(["input_hash", "schedule"]).to_pydict().values(), strict=True))
    assert found == {"a 0": "2bw", "a 1": "2bw", "a 2": "1f1b"}
