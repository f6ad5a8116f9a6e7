"""Running the command line as a process, and its inputs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from piper_ray import dump
from tests.forking import Original
from tests.report_cases import small_instance

ROOT = Path(__file__).resolve().parents[1]


_originals: list[Original] = []
"""Of copies that ``run`` starts; at most one."""

_READ_LATE = {"COLUMNS", "NO_COLOR"}
"""Variables that decide nothing when the program is loaded."""


def run(
    *arguments: object,
    env: dict[str, str] | None = None,
    stdout: int | None = None,
    timeout_s: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """``piper-ray ARGUMENTS`` as a process of its own, in no particular folder; ended after a time.

    It is started in full where its environment is another than at the first call, as that may decide what is loaded.
    env: variables of its own. stdout: a descriptor; None: it is captured, as stderr is.
    """
    own = env or {}
    asked = [str(argument) for argument in arguments]
    environment = environment_of_commands()
    original = original_of(environment) if own.keys() <= _READ_LATE else None
    if original is not None:
        return original.run(asked, own, stdout, timeout_s)
    return subprocess.run(
        [sys.executable, "-m", "piper_ray", *asked],
        stdout=subprocess.PIPE if stdout is None else stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=timeout_s,
        env={**environment, **own},
    )


def environment_of_commands() -> dict[str, str]:
    inherited = {
        key: value for key, value in os.environ.items() if key not in ("COLUMNS", "FORCE_COLOR", "PYTEST_CURRENT_TEST")
    }
    return {**inherited, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}


def original_of(environment: dict[str, str]) -> Original | None:
    """What copies in this environment are made of: one that was loaded in it, as that may decide what is loaded."""
    if sys.platform != "linux":
        return None
    if not _originals:
        _originals.append(Original(environment))
    return _originals[0] if _originals[0].environment == environment else None


def without_notes(errors: str) -> str:
    """What else a command wrote to stderr: small instances have figures that look like forgotten units."""
    lines = errors.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith(("piper-ray: note: ", "note ")))


def write_small(folder: Path) -> Path:
    """The hand-made instance as a file."""
    path = folder / "small.json"
    dump(small_instance(), path)
    return path
