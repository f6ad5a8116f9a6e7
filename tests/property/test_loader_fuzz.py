"""Whatever a file holds, loading it gives a consistent instance or a report of its faults, never anything else."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from piper_ray.model.errors import InputError
from piper_ray.model.instance import Instance
from piper_ray.workloads.formats.load import load, to_toml, to_upstream
from tests.formats_support import assert_consistent, chained_instance, mutated_files, random_instance, repeated_layer
from tests.lengths import long_after

FILES_PER_SEED = 500


@pytest.mark.parametrize("seed", long_after(1, range(2)))
def test_mutated_files_give_a_clear_error_or_a_consistent_instance(seed: int, tmp_path: Path, few: bool) -> None:
    files = 200 if few else FILES_PER_SEED
    outcomes: Counter[str] = Counter()
    for path in mutated_files(seed, files, tmp_path):
        data = path.read_bytes()
        read = load_or_report(path)
        if isinstance(read, InputError):
            assert_clear(read, path, data)
            outcomes["refused"] += 1
        else:
            assert_consistent(read)
            assert load(to_upstream(read)) == read, data
            outcomes["loaded"] += 1
    # The mutations are neither all fatal nor all harmless, so that both sides are put to the test.
    assert outcomes["refused"] > files // 4
    assert outcomes["loaded"] > files // 10


def load_or_report(path: Path) -> Instance | InputError:
    try:
        if path.suffix == ".txt":
            return load(path, devices=3, microbatches=4, memory_bytes=1e4, bandwidth_bytes_per_s=10.0)
        return load(path)
    except InputError as error:
        return error


def assert_clear(error: InputError, path: Path, data: bytes) -> None:
    text = str(error)
    assert error.faults, data
    assert all(fault.message for fault in error.faults), data
    assert text.startswith(f"{path}: "), data
    assert len(text.splitlines()) == 1 + len(error.faults), data
    assert all(len(line) < 600 for line in text.splitlines()), data
    assert all(character.isprintable() or character == "\n" for character in text), data


@pytest.mark.long
@pytest.mark.parametrize("seed", long_after(1, range(2)))
def test_both_forms_read_back_as_the_same_instance(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    path = tmp_path / "written.toml"
    for number in range(100):
        instance = random_instance(rng) if number % 2 else chained_instance(rng)
        assert_consistent(instance)
        assert load(to_upstream(instance)) == instance
        path.write_text(to_toml(instance), encoding="utf-8")
        again = load(path)
        assert again == instance
        assert again.digest == instance.digest


def test_chains_are_written_as_chains() -> None:
    rng = random.Random(0)
    instances = [repeated_layer(rng) for _ in range(50)]
    # The first and the last layer of a chain differ from the others in their edges; so four are left of six.
    long = [instance for instance in instances if len(instance.layers) >= 7]
    assert len(long) > 10
    assert all("continues = " in to_toml(instance) for instance in long)
