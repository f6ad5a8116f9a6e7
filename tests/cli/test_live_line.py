"""A live line on a terminal, one line of eighty columns, and nothing of it where stderr is none."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from rich.cells import cell_len

from tests.cli_cases import ROOT, run
from tests.lengths import long_after
from tests.unit.test_propose import CONFIG

_COLUMNS = 80


def in_terminal(answer: Path, *arguments: object) -> str:
    """What a successful command shows on a terminal as stderr, without what moves about in it. answer: its stdout."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, _COLUMNS, 0, 0))
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "FORCE_COLOR", "NO_COLOR")}
    with answer.open("w") as stdout:
        process = subprocess.Popen(
            [sys.executable, "-m", "piper_ray", *map(str, arguments)],
            stdin=theirs, stdout=stdout, stderr=theirs,
            env={**environment, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8", "TERM": "xterm"},
        )  # fmt: skip
    os.close(theirs)
    shown = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # Linux's word for the end
            break
        if not piece:
            break
        shown += piece
    os.close(ours)
    assert process.wait() == 0, shown.decode()
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode().replace("\x1b[2K", "\r"))


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A workload and a plan."""
    folder = tmp_path_factory.mktemp("planned")
    workload, plan = folder / "workload.toml", folder / "plan.json"
    assert run("estimate", "bert-large", "--gpu", "A100-80", "--nodes", "1", "-o", workload).returncode == 0
    assert run("solve", workload, "--gap", "0.2", "-o", plan).returncode == 0
    return workload, plan


def of_commands(folder: Path, workload: Path, plan: Path) -> dict[str, tuple[object, ...]]:
    """By what their lines say, as patterns."""
    return {
        "simulating, ": ("simulate", workload, plan),
        r"simulating, \d of 2, ": ("compare", workload, plan, plan),
        "simulating, [0-9]": ("export", workload, plan, "--to", "yaml", "-o", folder / "launch"),
        "checking the plan, ": ("verify", workload, plan, "--json"),
        "looking into the lattice, ": ("info", workload),
    }


@pytest.mark.parametrize("some", long_after(1, [slice(2), slice(2, None)]), ids=["first", "others"])
def test_commands_say_what_they_do_and_for_how_long(tmp_path: Path, planned: tuple[Path, Path], some: slice) -> None:
    for words, command in [*of_commands(tmp_path, *planned).items()][some]:
        shown = in_terminal(tmp_path / "answer", *command)
        assert re.search(words, shown)
        assert re.search(r", \d+\.\d s", shown)
        assert max(cell_len(line) for line in re.split(r"[\r\n]", shown)) <= _COLUMNS
        answer = (tmp_path / "answer").read_text()
        assert answer
        assert not re.search(words, answer)


@pytest.mark.long
def test_plan_says_which_of_its_solves_is_under_way(tmp_path: Path) -> None:
    config, out = tmp_path / "config.json", tmp_path / "out"
    config.write_text(json.dumps(CONFIG))
    command = (
        "plan", config, "--gpu", "a100-80", "--nodes", "1", "--gpus-per-node", "4", "--global-batch", "16",
        "--tokens", "512", "--schedule", "1f1b", "-o", out,
    )  # fmt: skip
    shown = in_terminal(tmp_path / "answer", *command)
    assert re.search(r"\d of \d+: microbatches of \d+, 1f1b, ", shown)
    assert "piper-ray: note: " in shown
    lines = [line for line in re.split(r"[\r\n]", shown) if not line.startswith("piper-ray: ")]
    assert max(map(cell_len, lines)) <= _COLUMNS
    assert "planning" not in (tmp_path / "answer").read_text()
    quiet = run(*command, env={"FORCE_COLOR": "1"})  # as in CI, where nothing takes a line back
    assert quiet.returncode == 0
    assert "\x1b[" not in quiet.stderr
    assert "planning" not in quiet.stderr
