"""A Ray cluster of isolated machines on this one, and what a test may ask about them."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.support import SHARED

HEAD = 0
LONG_S = 60.0
"""No test waits longer than this for one thing to happen: where it does, the test has failed."""


class Machines:
    """Machine 0 is the head, without workers; 1 to ``count`` are workers' machines of one CPU each.

    A machine's Ray is started again when it ends, as an init system would.
    """

    def __init__(self, harness: Any) -> None:
        self._harness = harness
        self.count: int = harness.n - 1
        self.address: str = harness.address

    def cut(self, machine: int) -> None:
        """Silently: no packet comes or goes."""
        self._harness.cut(machine)

    def heal(self, machine: int) -> None:
        self._harness.heal(machine)

    def kill(self, machine: int) -> None:
        """All its processes at once."""
        self._harness.kill(machine)

    def start(self, machine: int, *, ray_options: str = "") -> None:
        """ray_options: further ones of ``ray start``."""
        cpus = self._harness.cpus
        self._harness.cpus = f"{cpus} {ray_options}"
        try:
            with _files_left_open():
                self._harness.start(machine)
        finally:
            self._harness.cpus = cpus

    def repair(self) -> None:
        """All machines run and reach each other."""
        for machine in range(1, self.count + 1):
            self.heal(machine)
            if not self.is_up(machine):
                self.start(machine)
        self.wait_for_machines(*range(1, self.count + 1))

    def popen(self, machine: int, arguments: list[str], **options: Any) -> subprocess.Popen[str]:
        process: subprocess.Popen[str] = self._harness.popen(machine, arguments, text=True, **options)
        return process

    def is_up(self, machine: int) -> bool:
        return machine in self._harness.proc and self._harness.proc[machine].poll() is None

    def processes(self, machine: int, name: str = "") -> dict[int, str]:
        """Pid, as this machine sees it, and command line of those with ``name`` in the latter."""
        root = self._harness.init_pid(machine)
        found = {}
        namespace = _link(Path(f"/proc/{root}/ns/pid"))
        for folder in Path("/proc").glob("[0-9]*"):
            if namespace and _link(folder / "ns" / "pid") == namespace:
                with suppress(OSError):
                    line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                    if name in line and line:
                        found[int(folder.name)] = line
        return found

    def shared_memory(self, machine: int) -> set[str]:
        """Names of the files in its /dev/shm."""
        folder = Path(f"/proc/{self._harness.init_pid(machine)}/root/dev/shm")
        return {path.name for path in folder.iterdir()}

    def kill_process(self, machine: int, name: str) -> int:
        """SIGKILL to the one process with ``name`` in its command line; its pid."""
        (pid,) = self.processes(machine, name)
        os.kill(pid, signal.SIGKILL)
        return pid

    def kill_services_of_head(self) -> None:
        """SIGKILL to what holds the cluster together. Returns when it has been started again, with no memory of it."""
        log_bytes = (self._harness.dir / "n0.log").stat().st_size
        self.kill_process(HEAD, "/gcs_server ")
        self._harness._wait_head(log_bytes)

    def with_worker(self) -> list[int]:
        """Machines that a worker of ours runs on."""
        return [m for m in range(1, self.count + 1) if self.is_up(m) and self.processes(m, ACTOR)]

    def assert_nothing_left(self) -> None:
        """Of solves that have ended: no process, actor or claim on a resource, and no file in shared memory."""
        up = [machine for machine in range(self.count + 1) if self.is_up(machine)]
        until(
            lambda: not any(self.processes(machine, name) for machine in up for name in (ACTOR, "piper_ray", "faults")),
            "all processes end",
        )
        assert {machine: self.shared_memory(machine) for machine in up} == {machine: set() for machine in up}
        left = self.ask(
            "from ray._private.state import actors\n"
            "print({name: count for name, count in ray.cluster_resources().items()"
            " if ray.available_resources().get(name) != count and name != 'object_store_memory'},"
            " [actor for actor in actors().values() if actor['State'] != 'DEAD'])"
        )
        assert left == "{} []"

    def ask(self, program: str) -> str:
        """What a short Ray program prints, which is run on the head with its connection made."""
        with self.program(program) as process:
            out, errors = process.communicate(timeout=LONG_S)
        assert process.returncode == 0, errors
        return out.strip()

    @contextmanager
    def program(self, program: str) -> Iterator[subprocess.Popen[str]]:
        """The same, while it runs. It ends when its stdin does."""
        source = f"import ray\nray.init('{self.address}', log_to_driver=False, logging_level='ERROR')\n{program}"
        pipe = subprocess.PIPE
        with self.popen(HEAD, [sys.executable, "-c", source], stdin=pipe, stdout=pipe, stderr=pipe) as process:
            yield process

    def wait_for_machines(self, *machines: int) -> None:
        """Until exactly these have joined the cluster, beside the head."""
        names = sorted(self._harness.ip(machine) for machine in (HEAD, *machines))
        self.ask(
            "import time\n"
            f"while sorted(n['NodeManagerAddress'] for n in ray.nodes() if n['Alive']) != {names}: time.sleep(0.1)"
        )


_names = iter("abcdefgh")
"""Network namespaces have names that the whole machine shares."""

ACTOR = "ray::Worker"
"""The command line of a worker of ours, as Ray sets it."""


@contextmanager
def machines(count: int, **options: Any) -> Iterator[Machines]:
    """options: of the harness."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    environment = {"PATH": path, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1", **options.pop("env", {})}
    with ExitStack() as stack:
        prefix = f"pr{os.getpid()}{next(_names)}"
        with _files_left_open():
            harness = stack.enter_context(
                _harness().NetCluster(workers=count, respawn=True, prefix=prefix, env=environment, **options)
            )
        cluster = Machines(harness)
        cluster.wait_for_machines(*range(1, count + 1))
        yield cluster


def until(holds: Callable[[], object], what: str, within_s: float = LONG_S) -> None:
    """Waits for a state that nobody announces."""
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {within_s:.0f} s: {what}"
        time.sleep(0.05)


@contextmanager
def _files_left_open() -> Iterator[None]:
    """The harness never closes the logs that it hands to its machines: they close as it drops them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield


def _harness() -> ModuleType:
    spec = importlib.util.spec_from_file_location("netcluster", SHARED / "tools" / "netcluster.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _link(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:
        return ""
