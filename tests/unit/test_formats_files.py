"""Files as such: missing, truncated, huge, wrongly encoded, of an unknown kind; arguments; writing."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from piper_ray.model import limits
from piper_ray.model.errors import InputError, UsageError
from piper_ray.workloads.formats.load import dump, load
from tests.lengths import long_after

DOCUMENT = {
    "maxMemoryPerDevice": 1.0,
    "maxDevices": 2,
    "bandwidth": 3.0,
    "mbsInBatch": 4,
    "nodes": [
        {
            "id": 1,
            "name": "ünï",
            "TMPCs": {
                "1": [{"id": "x", "timePerSample": 1, "parameterSize": 2, "memoryUsageA": 3, "memoryUsageB": 4}],
            },
        }
    ],
}
TEXT = json.dumps(DOCUMENT, ensure_ascii=False, indent=1)


def write(tmp_path: Path, data: bytes | str, name: str = "in.json") -> Path:
    path = tmp_path / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def refused(path: str | Path, words: str) -> None:
    with pytest.raises(InputError) as caught:
        load(path)
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"{path}: ")


def test_with_and_without_a_byte_order_mark(tmp_path: Path) -> None:
    plain = load(write(tmp_path, TEXT))
    assert plain.layers[0].name == "ünï"
    assert load(write(tmp_path, TEXT.encode("utf-8-sig"))) == plain


def test_a_path_is_told_from_its_content_where_its_name_does_not_say(tmp_path: Path) -> None:
    toml = '[cluster]\n[types.a]\ntmpcs = [{ t = 1, id = "x", time_s = 1 }]\n[layers]\nl = { type = "a" }\n'
    assert load(write(tmp_path, "\n " + TEXT, "in")).devices == 2
    instance = load(
        write(tmp_path, toml, "in.workload"), devices=5, microbatches=1, memory_bytes=1, bandwidth_bytes_per_s=1
    )
    assert instance.devices == 5


def test_a_path_may_be_text_or_bytes_too(tmp_path: Path) -> None:
    path = write(tmp_path, TEXT)
    assert load(str(path)) == load(path)
    assert load(os.fsencode(path)) == load(path)  # type: ignore[arg-type]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere.json", "No such file")
    refused(tmp_path, "Is a directory")
    refused("in\0.json", "cannot be read")
    refused(write(tmp_path, TEXT) / "below.json", "Not a directory")


def test_a_file_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    path = write(tmp_path, TEXT)
    monkeypatch.setattr(Path, "open", denied)  # a file mode would not stop the superuser
    refused(path, "cannot be read: Permission denied")


_LOAD = """
import sys
from piper_ray.model.errors import InputError
from piper_ray.workloads.formats.load import load
try:
    load(sys.argv[1])
except InputError as error:
    print(error)
"""


def loaded_apart(path: str | Path, **streams: Any) -> str:
    """What loading says, in a process that is ended if it waits."""
    command = [sys.executable, "-c", _LOAD, str(path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=60, **streams)
    return str(done.stdout)


@pytest.mark.parametrize("name", long_after(1, ["pipe.json", "pipe.toml", "pipe.txt", "pipe"]))
def test_a_named_pipe_is_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    assert "a named pipe (FIFO): reading it could wait for ever; expected a file" in loaded_apart(tmp_path / name)
    (tmp_path / "link").symlink_to(name)
    assert "a named pipe (FIFO)" in loaded_apart(tmp_path / "link")


def test_a_base_that_is_a_named_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    assert "base: " in loaded_apart(write(tmp_path, 'base = "pipe.toml"', "in.toml"))


def test_sockets_and_devices_are_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    with socket.socket(socket.AF_UNIX) as end:
        end.bind("socket.json")
        refused("socket.json", "is a socket")
    for device in ("/dev/zero", "/dev/null", "/dev/urandom"):
        refused(device, "is a device")
        assert "is a device" in loaded_apart(device)


def test_a_pipe_that_a_program_writes_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, TEXT)
    with subprocess.Popen(["cat", path], stdout=subprocess.PIPE) as writer:
        assert loaded_apart("/dev/stdin", stdin=writer.stdout) == ""


@pytest.mark.parametrize("name", ["in.json", "in.toml", "in.txt", "in"])
def test_an_empty_file(tmp_path: Path, name: str) -> None:
    refused(write(tmp_path, b"", name), "empty")
    refused(write(tmp_path, b" \n\t\n", name), "empty")


def test_a_huge_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "FILE_BYTES", 2**20)
    refused(write(tmp_path, b" " * 2**20 + b"{}"), "larger than 1 MiB")


def test_too_many_layers_and_edges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LAYERS", 0)
    refused(write(tmp_path, TEXT), "nodes: 1 layers; expected at most 0")
    monkeypatch.setattr(limits, "LAYERS", 1)
    monkeypatch.setattr(limits, "EDGES", 0)
    refused(write(tmp_path, json.dumps({**DOCUMENT, "edges": [{}]})), "edges: 1 edges; expected at most 0")


def test_not_utf_8(tmp_path: Path) -> None:
    refused(write(tmp_path, TEXT.encode("latin-1")), "not UTF-8")
    refused(write(tmp_path, TEXT.encode("utf-16")), "byte 0: not UTF-8")


@pytest.mark.parametrize("cut", [1, 50, len(TEXT) // 2, len(TEXT) - 1])
def test_a_truncated_file(tmp_path: Path, cut: int) -> None:
    refused(write(tmp_path, TEXT[:cut]), "not JSON")


def test_where_the_text_ends_too_early_is_said(tmp_path: Path) -> None:
    refused(write(tmp_path, TEXT[: TEXT.index('"nodes"')]), "is the file truncated?")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1, 2]", "holds a list; expected an object"),
        ("null", "holds null; expected an object"),
        ('{"nodes": [}', "line 1, column 12: not JSON"),
        ('{"nodes": [{"id": 1, "id": 2}], "nodes": []}', "nodes: duplicate key"),
        ('{"nodes": [{"id": 1, "id": 2}]}', "nodes[0].id: duplicate key; expected each key once"),
        ('{"nodes": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
        ('{"nodes": ' + "[" * 200 + "]" * 200 + "}", "nested too deeply"),
        ('{"nodes": ' + '{"a":' * 100_000, "nested too deeply"),
        ('{"maxDevices": ' + "9" * 5000 + ', "nodes": []}', "maxDevices: not a whole number (inf)"),
        ('{"maxDevices": 1e400, "nodes": []}', "maxDevices: not a whole number (inf)"),
        ('{"bandwidth": NaN, "nodes": []}', "bandwidth: not finite (nan)"),
        ('{"bandwidth": -Infinity, "nodes": []}', "bandwidth: not finite (-inf)"),
        ('{"nodes": [], "name": "\\ud834"}', "half a surrogate pair"),
        ('{"nodes": [], "\\udead": 1}', "is no printable text"),
        ("answer = 42", "not JSON"),
    ],
)
def test_json_that_is_no_workload(tmp_path: Path, text: str, words: str) -> None:
    path = write(tmp_path, text)
    refused(path, words)
    with pytest.raises(InputError) as caught:
        load(path)
    str(caught.value).encode()  # whatever was in the file, the report can be printed


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[layers", "not TOML"),
        ("[layers]\n[layers]", "not TOML"),
        ("layers = " + "[" * 100_000, "nested too deeply"),
        ("layers." + "a." * 500 + "a = 1", "nested too deeply"),
        (".".join("a" * 50_000) + " = 1", "line 1: nested too deeply: a key of more than 100 levels"),
        ("[" + ".".join(["'a b'"] * 20_000) + "]", "line 1: nested too deeply: a key of more than 100 levels"),
        ("x = 1\ny = { " + " . ".join('"a"' for _ in range(20_000)) + " = 1 }", "line 2: nested too deeply: a key"),
        ("cluster.devices = " + "9" * 5000, "not TOML"),
        ("when = 1979-05-27", "not a workload"),
        ("layers = 1979-05-27", "layers: not a table (a date)"),
        (TEXT, "not TOML"),
    ],
)
def test_toml_that_is_no_workload(tmp_path: Path, text: str, words: str) -> None:
    refused(write(tmp_path, text, "in.toml"), words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"devices": 0}, "devices 0 is out of range; expected a whole number from 1 to 100000"),
        ({"devices": 100_001}, "devices 100001"),
        ({"devices": True}, "devices must be a whole number from 1 to 100000, not True"),
        ({"devices": 2.5}, "not 2.5"),
        ({"microbatches": -1}, "microbatches -1"),
        ({"memory_bytes": 0}, "memory_bytes 0 is out of range; expected a finite number > 0"),
        ({"memory_bytes": float("nan")}, "memory_bytes nan"),
        ({"bandwidth_bytes_per_s": float("inf")}, "bandwidth_bytes_per_s inf"),
        ({"bandwidth_bytes_per_s": "25 apples"}, "bandwidth_bytes_per_s: '25 apples' has an unknown unit"),
    ],
)
def test_arguments_out_of_range(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        load(DOCUMENT, **arguments)  # type: ignore[arg-type]
    assert words in str(caught.value)


CHAIN = (
    '[types.a]\ntmpcs = [{ t = 1, id = "x", time_s = 1 }]\n[layers]\nl = { type = "a" }\n'
    "[cluster]\ndevices = 2\nmicrobatches = 2\n"
)


@pytest.mark.parametrize(
    ("cluster", "notes"),
    [
        ('memory = "8GB"\nbandwidth = 25e9', []),
        ('memory = "1MB"\nbandwidth = 1e6', []),
        ("memory = 8\nbandwidth = 25", ["memory: 8 bytes, less than 1 MB; was 8GB meant?",
                                       "bandwidth: 25 bytes per second, less than 1 MB/s; was 25GB/s meant?"]),
        ('memory = "80"\nbandwidth = "25GB/s"', ["memory: 80 bytes, less than 1 MB; was 80GB meant?"]),
        ('memory = 81559\nbandwidth = "25GB/s"', ["memory: 81559 bytes, less than 1 MB; was 81559MB meant?"]),
        ('memory = "1GB"\nbandwidth = "25kB/s"',
         ["bandwidth: 25000 bytes per second, less than 1 MB/s; was 25GB/s meant?"]),
    ],
)  # fmt: skip
def test_a_figure_that_most_likely_lacks_its_unit_is_noted(tmp_path: Path, cluster: str, notes: list[str]) -> None:
    instance = load(write(tmp_path, CHAIN + cluster, "in.toml"))
    assert instance.notes == tuple(f"cluster.{note}" for note in notes)


def test_what_is_overridden_is_not_noted(tmp_path: Path) -> None:
    path = write(tmp_path, CHAIN + "memory = 8\nbandwidth = 25", "in.toml")
    assert load(path, memory_bytes=8, bandwidth_bytes_per_s=25).notes == ()


def test_in_json_the_number_that_was_meant_is_named(tmp_path: Path) -> None:
    assert load(write(tmp_path, TEXT)).notes == (
        "maxMemoryPerDevice: 1 byte, less than 1 MB; was 1000000000, 1GB, meant?",
        "bandwidth: 3 bytes per second, less than 1 MB/s; was 3000000000, 3GB/s, meant?",
    )
    assert load(DOCUMENT).notes == ()  # who writes a program means its figures


def test_what_is_neither_path_nor_document() -> None:
    with pytest.raises(UsageError, match="int is no input; expected a path or a dict"):
        load(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["out.json", "out.toml"])
def test_written_files_read_back(tmp_path: Path, name: str) -> None:
    instance = load(write(tmp_path, TEXT))
    dump(instance, tmp_path / name)
    assert load(tmp_path / name) == instance


def test_writing_where_or_what_cannot_be_written(tmp_path: Path) -> None:
    instance = load(DOCUMENT)
    with pytest.raises(UsageError, match=r"expected a path that ends in \.json, \.toml, \.txt, or a form"):
        dump(instance, tmp_path / "out.yaml")
    with pytest.raises(UsageError, match="cannot be written"):
        dump(instance, tmp_path / "nowhere" / "out.json")


def test_importing_what_commands_need_of_formats_brings_neither_numpy_nor_pydantic() -> None:
    program = "import sys, piper_ray.cli.shared; print(sorted({'numpy', 'pydantic', 'numba'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
