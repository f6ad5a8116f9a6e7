"""A Ray cluster of isolated machines on this one, and what a test may ask about them."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from ast import literal_eval
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from select import select
from typing import Any

from tests.faults.isolation import Isolation, isolated

HEAD = 0
_PORT = 6379
_OBJECT_STORE_BYTES = 256 * 2**20
LONG_S = 60.0
"""No test waits longer than this for one thing to happen: where it does, the test has failed."""


@dataclass(frozen=True)
class Setup:
    """How a machine starts Ray. environment: over that of all machines. before: a shell command."""

    ray_options: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    before: str = "true"


USUAL = Setup()


class Machines:
    """Machine 0 is the head, without workers; 1 to ``count`` are workers' machines of one CPU each.

    A machine's Ray is started again when it ends, as an init system would.
    """

    def __init__(self, isolation: Isolation) -> None:
        self._isolation = isolation
        self.count = isolation.size - 1
        self.address = f"{isolation.ip(HEAD)}:{_PORT}"
        self._setups: dict[int, Setup] = {}
        self._asked: subprocess.Popen[str] | None = None

    def cut(self, machine: int) -> None:
        """Silently: no packet comes or goes."""
        self._isolation.cut(machine)

    def heal(self, machine: int) -> None:
        self._isolation.heal(machine)

    def kill(self, machine: int) -> None:
        """All its processes at once."""
        self._isolation.kill(machine)

    def start(self, machine: int, setup: Setup = USUAL) -> None:
        """Returns when Ray is there if it is the head, at once if not."""
        role = f"--head --port={_PORT} --num-cpus=0 --include-dashboard=false --no-monitor"
        if machine != HEAD:
            role = f"--address={self.address} --num-cpus=1"
        variables = " ".join(shlex.quote(f"{name}={value}") for name, value in setup.environment.items())
        ray = (
            f"env {variables} ray start {role} {setup.ray_options} --node-ip-address={self._isolation.ip(machine)} "
            f"--object-store-memory={_OBJECT_STORE_BYTES} --disable-usage-stats --include-log-monitor=false --block"
        )
        log_bytes = self._log_bytes() if machine == HEAD else 0
        self._setups[machine] = setup
        self._isolation.launch(machine, f"{setup.before}; while :; do {ray}; sleep 1; done")
        if machine == HEAD:
            self._wait_for_head(log_bytes)

    def repair(self) -> None:
        """All machines run as usual, and reach each other."""
        self.run(dict.fromkeys(range(1, self.count + 1), USUAL))

    def run(self, setups: Mapping[int, Setup]) -> None:
        """These machines and the head, and no others; they reach each other."""
        for machine in range(1, self.count + 1):
            self.heal(machine)
            if self.is_up(machine) and setups.get(machine) != self._setups[machine]:
                self.kill(machine)
            if machine in setups and not self.is_up(machine):
                self.start(machine, setups[machine])
        self.wait_for_machines(*setups)

    def popen(self, machine: int, arguments: list[str], **options: Any) -> subprocess.Popen[str]:
        return self._isolation.popen(machine, arguments, text=True, **options)

    def is_up(self, machine: int) -> bool:
        return self._isolation.is_up(machine)

    def processes(self, machine: int, name: str = "") -> dict[int, str]:
        """Pid, as this machine sees it, and command line of those with ``name`` in the latter."""
        root = self._isolation.first_pid(machine)
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
        folder = Path(f"/proc/{self._isolation.first_pid(machine)}/root/dev/shm")
        return {path.name for path in folder.iterdir()}

    def kill_process(self, machine: int, name: str) -> int:
        """SIGKILL to the one process with ``name`` in its command line; its pid."""
        return self.signal_process(machine, name, signal.SIGKILL)

    def kill_services_of_head(self) -> None:
        """SIGKILL to what holds the cluster together. Returns when it has been started again, with no memory of it."""
        self.forget()
        log_bytes = self._log_bytes()
        self.kill_process(HEAD, "/gcs_server ")
        self._wait_for_head(log_bytes)

    def signal_process(self, machine: int, name: str, number: signal.Signals) -> int:
        """To the one process with ``name`` in its command line; its pid."""
        (pid,) = self.processes(machine, name)
        os.kill(pid, number)
        return pid

    def with_worker(self) -> list[int]:
        """Machines that a worker of ours runs on."""
        return [m for m in range(1, self.count + 1) if self.is_up(m) and self.processes(m, ACTOR)]

    def assert_nothing_left(self) -> None:
        """Of solves that have ended: no process, actor or claim on a resource, and no file in shared memory."""
        up = [machine for machine in range(self.count + 1) if self.is_up(machine)]
        until(
            lambda: not any(self.processes(machine, name) for machine in up for name in _OURS),
            "all processes end",
        )
        assert {machine: self.shared_memory(machine) for machine in up} == {machine: set() for machine in up}
        left = (
            "from ray._private.state import actors\n"
            "print({name: count for name, count in ray.cluster_resources().items()"
            " if ray.available_resources().get(name) != count and name != 'object_store_memory'},"
            " [actor for actor in actors().values() if actor['State'] != 'DEAD'])"
        )
        # A machine that has just come back may be counted before what is free on it.
        until(lambda: self.ask(left) == "{} []", "no actor lives and all resources are free")

    def ask(self, program: str) -> str:
        """What a short Ray program prints. One process on the head runs them all, as long as its connection holds."""
        if self._asked is not None and self._asked.poll() is not None:
            self.forget()
        process = self._asked = self._asked or self._connected(_ANSWER)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{program!r}\n")
        process.stdin.flush()
        assert select([process.stdout], [], [], LONG_S)[0], f"no answer to {program}"
        return str(literal_eval(process.stdout.readline()))

    @contextmanager
    def program(self, program: str) -> Iterator[subprocess.Popen[str]]:
        """A Ray program on the head, with its connection made. It ends when its stdin does."""
        with self._connected(program) as process:
            yield process

    def forget(self) -> None:
        """Ends the connection of ``ask``; its process ends as its stdin does."""
        if self._asked is not None:
            with self._asked as process:
                process.kill()
            self._asked = None

    def _connected(self, program: str) -> subprocess.Popen[str]:
        source = f"import ray\nray.init('{self.address}', log_to_driver=False, logging_level='ERROR')\n{program}"
        pipe = subprocess.PIPE
        return self.popen(HEAD, [sys.executable, "-c", source], stdin=pipe, stdout=pipe)

    def name(self, machine: int) -> str:
        """As the user reads it."""
        return f"{self._isolation.host(machine)} ({self._isolation.ip(machine)})"

    def wait_for_machines(self, *machines: int) -> None:
        """Until exactly these and the head are in the cluster."""
        names = sorted(self._isolation.ip(machine) for machine in (HEAD, *machines))
        self.ask(
            "import time\n"
            f"while sorted(n['NodeManagerAddress'] for n in ray.nodes() if n['Alive']) != {names}: time.sleep(0.1)"
        )

    def _log_bytes(self) -> int:
        log = self._isolation.log(HEAD)
        return log.stat().st_size if log.exists() else 0

    def _wait_for_head(self, log_bytes: int) -> None:
        """Until its log, from ``log_bytes`` on, says that Ray has started."""
        log = self._isolation.log(HEAD)

        def started() -> bool:
            assert self.is_up(HEAD), log.read_text()
            return b"Ray runtime started" in log.read_bytes()[log_bytes:]

        until(started, f"the head starts; see {log}")


ACTOR = "ray::Worker"
"""The command line of a worker of ours, as Ray sets it."""

_OURS = (ACTOR, "piper_ray", "faults")


_RAY = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
    "RAY_prestart_worker_first_driver": "false",
}
"""A lost machine is missed within seconds; Ray's own settings are in test_default_health_checks.py. No process starts
before somebody needs it."""


_ANSWER = """
import sys
from ast import literal_eval
answers, sys.stdout = sys.stdout, sys.stderr  # Ray tells of nodes at any time
for line in sys.stdin:
    said = []
    exec(literal_eval(line), {'ray': ray, 'print': lambda *what: said.extend(map(str, what))})
    print(repr(' '.join(said)), file=answers, flush=True)
"""


@contextmanager
def machines(count: int, environment: Mapping[str, str] | None = None) -> Iterator[Machines]:
    """A head and ``count`` machines of workers, all joined. environment: over that of all machines."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    with isolated(1 + count, {**os.environ, **_RAY, "PATH": path, **(environment or {})}) as isolation:
        cluster = Machines(isolation)
        for machine in range(1 + count):
            cluster.start(machine)
        cluster.wait_for_machines(*range(1, count + 1))
        try:
            yield cluster
        finally:
            cluster.forget()


def until(holds: Callable[[], object], what: str, within_s: float = LONG_S) -> None:
    """Waits for a state that nobody announces."""
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {within_s:.0f} s: {what}"
        time.sleep(0.05)


def _link(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:
        return ""
