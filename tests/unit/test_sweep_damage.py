"""A dataset whose files are altered, lost or exchanged: no row is ever wrong or missing without a word."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import settings

from piper_ray import DatasetDamaged, UsageError
from piper_ray.model.errors import CheckpointRefused
from piper_ray.sweep.dataset import Dataset, read_dataset, read_whole_parts
from piper_ray.sweep.parts import CONTROL
from piper_ray.sweep.run import run_sweep
from tests.lengths import long_after
from tests.sweep_support import content, dataset_row, write_small

Rows = list[dict[str, Any]]

FLIPS = 5 * settings().max_examples
FLIPS_IN_NAMES = 2 * settings().max_examples


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    """Two workloads, each with one merged part and two of a single write."""
    with Dataset.open(tmp_path / "d", "test", resume=False, on_warning=_never) as written:
        for number in range(4):
            written.add([dataset_row(number), dataset_row(number, "b")])
        written.compact()
        for number in range(4, 6):
            written.add([dataset_row(number), dataset_row(number, "b")])
    return tmp_path / "d"


def _never(text: str) -> None:
    raise AssertionError(text)


def rows_of(storage: Path) -> Rows:
    rows: Rows = read_whole_parts(storage)[0].to_pylist()
    return sorted(rows, key=lambda row: str(row["input_hash"]))


def files_of(storage: Path) -> list[Path]:
    return sorted(path for path in storage.rglob("*") if path.is_file())


def parts_of(storage: Path, label: str = "a") -> list[Path]:
    return sorted((storage / f"workload={label}").iterdir())


def assert_noticed(storage: Path, truth: Rows, what: object) -> list[str]:
    """What is whole is true, and of the rest there is word."""
    try:
        table, damage = read_whole_parts(storage)
    except UsageError as refused:
        return [str(refused)]
    assert damage, what
    assert all(row in truth for row in table.to_pylist()), what
    return damage


@pytest.mark.long
def test_every_flipped_bit_is_noticed(storage: Path) -> None:
    truth = rows_of(storage)
    files = files_of(storage)
    assert len(files) == 8, "six parts and two manifests"
    places = [(path, byte) for path in files for byte in range(path.stat().st_size)]
    rng = random.Random(1)
    for path, byte in rng.sample(places, FLIPS):
        before = path.read_bytes()
        flipped = bytearray(before)
        flipped[byte] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        (damage, *rest) = _damage_or_spare(storage, truth, path, byte)
        assert not rest
        assert path.name in damage
        path.write_bytes(before)
    assert read_dataset(storage).num_rows == len(truth)


def _damage_or_spare(storage: Path, truth: Rows, path: Path, byte: int) -> list[str]:
    """Of the two manifests the older is a spare, which nobody reads while the newer one is whole."""
    manifests = sorted((storage / CONTROL).iterdir())
    if path == manifests[0]:
        assert rows_of(storage) == truth
        return [path.name]
    return assert_noticed(storage, truth, (path, byte))


def test_every_flipped_bit_in_a_name_is_noticed(storage: Path) -> None:
    truth = rows_of(storage)
    spare = min((storage / CONTROL).iterdir())
    named = [path for path in storage.rglob("*") if path != spare]
    rng = random.Random(2)
    places = [(path, place, bit) for path in named for place in range(len(path.name)) for bit in range(7)]
    for path, place, bit in rng.sample(places, FLIPS_IN_NAMES):
        name = path.name[:place] + chr(ord(path.name[place]) ^ (1 << bit)) + path.name[place + 1 :]
        if "/" in name or "\0" in name:
            continue
        renamed = path.rename(path.with_name(name))
        if path.parent.name == CONTROL:  # the spare takes its place, and finds all parts
            assert rows_of(storage) == truth
        else:
            assert_noticed(storage, truth, renamed)
        renamed.rename(path)
    assert read_dataset(storage).num_rows == len(truth)


def _cut_short(storage: Path) -> None:
    part = parts_of(storage)[0]
    part.write_bytes(part.read_bytes()[:-1])


def _empty(storage: Path) -> None:
    parts_of(storage)[-1].write_bytes(b"")


def _longer(storage: Path) -> None:
    with parts_of(storage)[0].open("ab") as part:
        part.write(b"\0")


def _lost(storage: Path) -> None:
    parts_of(storage)[-1].unlink()


def _lost_merged(storage: Path) -> None:
    parts_of(storage)[0].unlink()


def _lost_folder(storage: Path) -> None:
    shutil.rmtree(storage / "workload=b")


def _exchanged(storage: Path) -> None:
    one, other = parts_of(storage)[-2:]
    contents = one.read_bytes(), other.read_bytes()
    other.write_bytes(contents[0])
    one.write_bytes(contents[1])


def _moved_to_another_workload(storage: Path) -> None:
    part = parts_of(storage)[-1]
    part.rename(storage / "workload=b" / part.name)


def _workloads_exchanged(storage: Path) -> None:
    (storage / "workload=a").rename(storage / "c")
    (storage / "workload=b").rename(storage / "workload=a")
    (storage / "c").rename(storage / "workload=b")


def _within_a_larger_one(storage: Path) -> None:
    """By its name a part could hide others."""
    part = parts_of(storage)[-1]
    part.rename(part.with_name(part.name.replace(part.name[:18], "part-000001-999999")))


def _lists_lost_too(storage: Path) -> None:
    for manifest in (storage / CONTROL).iterdir():
        manifest.unlink()
    _cut_short(storage)


def _list_damaged(storage: Path) -> None:
    manifest = max((storage / CONTROL).iterdir())
    manifest.write_bytes(manifest.read_bytes()[::-1])


DAMAGES = [
    *(_cut_short, _empty, _longer, _lost, _lost_merged, _lost_folder, _exchanged, _moved_to_another_workload),
    *(_workloads_exchanged, _within_a_larger_one, _lists_lost_too, _list_damaged),
]


@pytest.mark.parametrize("damaged", long_after(2, DAMAGES))
def test_other_damage_is_noticed_too(storage: Path, damaged: Callable[[Path], None]) -> None:
    truth = rows_of(storage)
    damaged(storage)
    damage = assert_noticed(storage, truth, damaged)
    with pytest.raises(DatasetDamaged) as raised:
        read_dataset(storage)
    assert list(raised.value.damage) == damage


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Rows]:
    """A sweep's file, its dataset in many parts, and what is in it."""
    folder = tmp_path_factory.mktemp("swept")
    text = """
[workloads]
a = "chain.json"
b = "towers.json"
[grid]
devices = "1..4"
microbatches = 4
memory = 40
bandwidth = 4
"""
    source = write_small(folder, text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("piper_ray.sweep.run._WRITE_EVERY_S", 0.0)
        patch.setattr(Dataset, "compact", lambda _self: None)
        run_sweep(source, folder / "d")
    return source, folder / "d", content(folder / "d")


@pytest.mark.parametrize("damaged", long_after(2, DAMAGES), ids=lambda damage: damage.__name__)
def test_what_is_lost_is_told_and_solved_again(
    swept: tuple[Path, Path, Rows], tmp_path: Path, damaged: Callable[[Path], None]
) -> None:
    source, dataset, truth = swept
    shutil.copytree(dataset, tmp_path / "d")
    damaged(tmp_path / "d")
    with pytest.raises(CheckpointRefused, match="add --resume"):
        run_sweep(source, tmp_path / "d")
    told: list[str] = []
    progress = run_sweep(source, tmp_path / "d", resume=True, on_warning=told.append)
    assert told
    assert (progress.done > 0) == (damaged is not _list_damaged)
    assert content(tmp_path / "d") == truth
    assert pq.read_table(tmp_path / "d").num_rows == len(truth), "nothing is left in the way of other readers"


def test_a_part_altered_while_the_sweep_goes_on_is_not_merged(storage: Path) -> None:
    """It would have a new checksum then."""
    told: list[str] = []
    with Dataset.open(storage, "test", resume=True, on_warning=told.append) as dataset:
        altered = parts_of(storage)[0]
        flipped = bytearray(altered.read_bytes())
        flipped[len(flipped) // 2] ^= 1
        altered.write_bytes(flipped)
        with pytest.raises(DatasetDamaged, match=rf"{altered.name} was altered .*(\n.*)*--resume"):
            dataset.compact()
    _, damage = read_whole_parts(storage)
    assert [altered.name in text for text in damage] == [True]
    assert not told


def test_the_report_shows_what_is_whole_and_names_what_is_not(storage: Path) -> None:
    from tests.cli_cases import run

    (damaged, *_) = parts_of(storage)
    damaged.write_bytes(damaged.read_bytes()[:-5])
    shown = run("sweep-report", storage)
    assert shown.returncode == 2
    assert "Best plans" in shown.stdout
    assert f"workload=a/{damaged.name} is damaged (4 points)" in shown.stderr
    assert "--resume solves their points again" in shown.stderr


FOREIGN = [
    *("NOTES.txt", "backup.parquet", "part-1-1.E1.parquet", "part-000001-000001.E0001.parquet", ".hidden", "x.tmp"),
    f"PART-000001-000001.E0001.{'0' * 32}.parquet",
    f"part-000001-000001.e0001.{'0' * 32}.parquet",
    f"part-000001-000001.E0001.{'F' * 32}.parquet",
    f"part-000001-000001.E0001.{'0' * 31}.parquet",
    f"part-0000001-000001.E0001.{'0' * 32}.parquet",
    f"part-00000\u0661-000001.E0001.{'0' * 32}.parquet",
    f"part-000001-000001.E0001.{'0' * 32}.parquet.bak",
    f" part-000001-000001.E0001.{'0' * 32}.parquet",
    f"part-000001-000001.E0001.{'0' * 32}.parquet\n",
    f"part-000001-000001.E0001.{'0' * 32}.parquet.bak.tmp",
    f"part-000001-000001.E9999.{'0' * 32}.parquet.tmp",  # of a driver that is yet to come
]
FOREIGN_CONTROL = [
    *("NOTES.txt", "sweep.json.bak", "lease.txt", "lease.1.json", f"lease.1.{'0' * 32}.json", "parts.json"),
    *(f"parts.1.1.{'0' * 32}.json", f"parts.000001.000001.{'0' * 32}.arrow", f"claim.0000001.{'0' * 32}.json.tmp"),
    *("old.tmp", f"PARTS.000001.000001.{'0' * 32}.json", f"lease.000001.{'0' * 32}.json.bak"),
]


def test_only_files_of_its_own_are_deleted(storage: Path, tmp_path: Path) -> None:
    """Leftovers of a killed driver go, the neighbours of its files stay, whatever they are."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(b"p")
    folders = {
        storage: ["NOTES.txt", "backup.parquet"],
        storage / "workload=a": FOREIGN,
        storage / CONTROL: FOREIGN_CONTROL,
    }
    for folder, names in folders.items():
        for name in names:
            (folder / name).write_bytes(name.encode())
        (folder / "link").symlink_to(outside / "precious")
        (folder / "broken link").symlink_to(outside / "nothing")
        (folder / "folder.tmp").mkdir()
        (folder / "folder.tmp" / "inside").write_bytes(b"i")
    inner = storage / "workload=a" / f"part-000009-000009.E0001.{'0' * 32}.parquet"
    inner.mkdir()
    (inner / "inside").write_bytes(b"i")
    unfinished = storage / "workload=a" / f"part-000009-000009.E0001.{'1' * 32}.parquet.tmp"
    unfinished.write_bytes(b"half")
    before = {path: path.read_bytes() for path in _foreign_files(storage)}
    assert len(before) > len(FOREIGN) + len(FOREIGN_CONTROL)
    with Dataset.open(storage, "test", resume=True, on_warning=_never) as dataset:
        dataset.add([dataset_row(7)])
        dataset.compact()
    assert {path: path.read_bytes() for path in _foreign_files(storage)} == before
    assert (storage / "link").is_symlink()
    assert not unfinished.exists()
    assert len(list((storage / "workload=b").iterdir())) == 1, "its own are merged"
    assert len(rows_of(storage)) == 13


def _foreign_files(storage: Path) -> Iterator[Path]:
    names = {"NOTES.txt", "backup.parquet", "link", "inside", *FOREIGN, *FOREIGN_CONTROL}
    yield from (path for path in storage.rglob("*") if path.name in names and path.is_file())


def test_a_part_that_is_a_link_is_read_and_what_it_points_to_stays(storage: Path, tmp_path: Path) -> None:
    part = parts_of(storage)[0]
    moved = shutil.move(part, tmp_path / "elsewhere.parquet")
    part.symlink_to(moved)
    truth = rows_of(storage)
    with Dataset.open(storage, "test", resume=True, on_warning=_never) as dataset:
        dataset.compact()
    assert rows_of(storage) == truth
    assert not part.is_symlink()
    assert pq.read_metadata(moved).num_rows == 4
