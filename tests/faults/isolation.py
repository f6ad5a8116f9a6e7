"""Machines on this one: each has its own address, host name, /dev/shm, /tmp/ray and processes.

They are sets of Linux namespaces, joined by a bridge in a namespace of its own: the network of this machine stays as it
is. Needs root, iproute2 and util-linux. Nothing here knows what runs on them.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

_SUBNET = "10.199.7"
_SHM = "1g"
_END_S = 10.0
_numbers = count()


class Isolation:
    """Machines 0 to ``size`` - 1. They are off until launched, and die with the thread that launched them.

    environment: of all that runs on them.
    """

    def __init__(self, size: int, folder: Path, environment: Mapping[str, str]) -> None:
        self.size = size
        self._folder = folder
        self._environment = environment
        self._prefix = f"pr{os.getpid()}-{next(_numbers)}-"  # names of namespaces are shared by all of this machine
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def ip(self, machine: int) -> str:
        return f"{_SUBNET}.{10 + machine}"

    def host(self, machine: int) -> str:
        """Its host name."""
        return self._namespace(machine)

    def log(self, machine: int) -> Path:
        """What its script prints, from all launches."""
        return self._folder / f"{machine}.log"

    def launch(self, machine: int, script: str) -> None:
        """Switches a machine on, with ``script`` of bash as its first process: when that ends, all others do."""
        ray_files = self._folder / str(machine)
        ray_files.mkdir(exist_ok=True)
        prepared = (
            f"mount --make-rprivate /; mkdir -p /tmp/ray; mount --bind '{ray_files}' /tmp/ray; "
            f"mount -t tmpfs -o size={_SHM} tmpfs /dev/shm; hostname {self._namespace(machine)}; {script}"
        )
        unshare = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--uts", "--ipc", "--mount-proc")
        with self.log(machine).open("ab") as log:
            self._processes[machine] = subprocess.Popen(
                [
                    *("setpriv", "--pdeathsig", "KILL", "--"),
                    *("ip", "netns", "exec", self._namespace(machine), *unshare, "bash", "-c", prepared),
                ],
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def is_up(self, machine: int) -> bool:
        return machine in self._processes and self._processes[machine].poll() is None

    def first_pid(self, machine: int) -> int | None:
        """Pid, as this machine sees it, of its first process; None while there is none."""
        parent = self._processes[machine].pid
        try:
            children = Path(f"/proc/{parent}/task/{parent}/children").read_text(encoding="ascii").split()
        except OSError:
            return None
        return int(children[0]) if children else None

    def kill(self, machine: int) -> None:
        """Switches it off: all its processes end at once."""
        process = self._processes[machine]
        pid = self.first_pid(machine)
        with suppress(ProcessLookupError):
            os.kill(process.pid if pid is None else pid, signal.SIGKILL)
        process.wait(_END_S)

    def cut(self, machine: int) -> None:
        """The bridge drops all packets without notice."""
        self._in_bridge("link", "set", self._port(machine), "nomaster")

    def heal(self, machine: int) -> None:
        self._in_bridge("link", "set", self._port(machine), "master", "bridge")

    def popen(self, machine: int, arguments: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """A process on a machine that is up, in the working folder of this one. options: of Popen."""
        target = ("--target", str(self.first_pid(machine)))
        enter = ("nsenter", *target, "--net", "--mount", "--pid", "--uts", "--ipc", "--")
        in_folder = ("sh", "-c", 'cd "$0" && exec "$@"', str(Path.cwd()))
        return subprocess.Popen([*enter, *in_folder, *arguments], env=self._environment, **options)

    def _wire(self) -> None:
        _run("ip", "netns", "add", self._bridge)
        self._in_bridge("link", "add", "bridge", "type", "bridge", "stp_state", "0", "forward_delay", "0")
        self._in_bridge("link", "set", "bridge", "up")
        for machine in range(self.size):
            namespace, port = self._namespace(machine), self._port(machine)
            _run("ip", "netns", "add", namespace)
            self._in_bridge("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", namespace)
            self._in_bridge("link", "set", port, "master", "bridge", "up")
            _run("ip", "-n", namespace, "addr", "add", f"{self.ip(machine)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _run("ip", "-n", namespace, "link", "set", device, "up")

    def _unwire(self) -> None:
        for machine in self._processes:
            if self.is_up(machine):
                self.kill(machine)
        for namespace in (*map(self._namespace, range(self.size)), self._bridge):
            with suppress(subprocess.CalledProcessError):  # it may never have come to be
                _run("ip", "netns", "del", namespace)

    @property
    def _bridge(self) -> str:
        return f"{self._prefix}bridge"

    def _namespace(self, machine: int) -> str:
        return f"{self._prefix}{machine}"

    def _port(self, machine: int) -> str:
        """The bridge's end of a machine's cable."""
        return f"port{machine}"

    def _in_bridge(self, *arguments: str) -> None:
        _run("ip", "-n", self._bridge, *arguments)


@contextmanager
def isolated(size: int, environment: Mapping[str, str]) -> Iterator[Isolation]:
    """The machines, wired and off. At the end, or at SIGTERM, nothing of them is left."""
    with _unwound_at_sigterm(), TemporaryDirectory(prefix="machines.", ignore_cleanup_errors=True) as folder:
        isolation = Isolation(size, Path(folder), environment)
        try:
            isolation._wire()
            yield isolation
        finally:
            isolation._unwire()


@contextmanager
def _unwound_at_sigterm() -> Iterator[None]:
    def leave(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # `timeout` signals twice
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
