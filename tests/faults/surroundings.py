"""What a machine may run other than the driver, and how full its memory may seem."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path

import piper_ray
from tests.faults.machines import Setup

_BARE = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "piper_ray":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
"""

_OTHER_PIPER_RAY = """
import importlib.util, sys

class Other:
    def find_spec(self, name, path=None, target=None):
        if name == "piper_ray":
            return importlib.util.spec_from_file_location(
                name, "{copy}/__init__.py", submodule_search_locations=["{copy}"]
            )

sys.meta_path.insert(0, Other())
"""

_OTHER_PYTHON = """
import platform
platform.python_version = lambda: "3.11.99"
"""

TO_WORKERS = """
from piper_ray.engine.backends.ray import pacing

pacing.Pacing.pays = pacing.Pacing.pays_ahead = lambda *_: True
"""
"""A ``sitecustomize`` with which workers get all levels, however fast this machine is."""


def without_piper_ray(folder: Path) -> Setup:
    """A machine on which nobody has installed it."""
    return _at_start(folder, _BARE)


def with_other_python(folder: Path) -> Setup:
    """One whose Python says that it is another."""
    return _at_start(folder, _OTHER_PYTHON)


def with_other_kernels(folder: Path) -> Setup:
    """One whose piper_ray has the same version, and a line more in a kernel."""
    copy = folder / "installed"
    shutil.copytree(Path(piper_ray.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    with (copy / "engine" / "kernels" / "level.py").open("a") as kernel:
        kernel.write("\n# another line\n")
    return _at_start(folder / "start", _OTHER_PIPER_RAY.format(copy=copy))


def _at_start(folder: Path, program: str) -> Setup:
    """Every Python runs the program first."""
    folder.mkdir(parents=True)
    (folder / "sitecustomize.py").write_text(program)
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return Setup(environment={"PYTHONPATH": path})


class Memory:
    """What a machine of this ``setup`` believes of its memory: it has 4 GB, most of it free at first."""

    _TOTAL_KB = 4_000_000

    def __init__(self, folder: Path) -> None:
        self._file = folder / "meminfo"
        self.setup = Setup(before=f"mount --bind {shlex.quote(str(self._file))} /proc/meminfo")
        self.free(0.9)

    def free(self, share: float) -> None:
        """In place: the file is mounted."""
        available_kb = round(share * self._TOTAL_KB)
        figures = {"MemTotal": self._TOTAL_KB, "MemFree": available_kb, "MemAvailable": available_kb}
        figures |= dict.fromkeys(("Buffers", "Cached", "SReclaimable", "Shmem", "SwapTotal", "SwapFree"), 0)
        text = "".join(f"{name + ':':<16}{kb:>8} kB\n" for name, kb in figures.items())
        with self._file.open("w") as file:
            file.write(text)
