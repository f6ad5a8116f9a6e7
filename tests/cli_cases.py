"""Running the command line: in this process where only words and codes matter, as a process where streams do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from piper_ray import dump
from tests.report_cases import small_instance

ROOT = Path(__file__).resolve().parents[1]


def run(
    *arguments: object, env: dict[str, str] | None = None, timeout_s: float | None = None
) -> subprocess.CompletedProcess[str]:
    """``piper-ray ARGUMENTS`` as a process of its own, in a pipe and in no particular folder; ended after a time."""
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "FORCE_COLOR")}
    return subprocess.run(
        [sys.executable, "-m", "piper_ray", *(str(argument) for argument in arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
        env={**environment, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8", **(env or {})},
    )


def without_notes(errors: str) -> str:
    """What else a command wrote to stderr: small instances have figures that look like forgotten units."""
    lines = errors.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith(("piper-ray: note: ", "note ")))


def write_small(folder: Path) -> Path:
    """The hand-made instance as a file."""
    path = folder / "small.json"
    dump(small_instance(), path)
    return path
