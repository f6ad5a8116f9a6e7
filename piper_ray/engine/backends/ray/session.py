"""The connection to Ray. An existing one is used and left alone; one made here ends with its session. Also Ray's own
processes on which a connection depends: when they end, Ray ends the connected process from outside Python.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from piper_ray.engine.backends.ray import keeper
from piper_ray.model.errors import ClusterError, require

LOCAL = "local"

_REACHABLE_WITHIN_S = 10.0
_ENDS_WITHIN_S = 15.0
_LOOPBACK = "127.0.0.1"
_WORKER, _CONSTANTS = "ray._private.worker", "ray._private.ray_constants"
_NO_HANDLER = "RAY_DISABLE_FAILURE_SIGNAL_HANDLER"
"""An environment variable read when Ray is imported, and from then on a constant of its own by this name."""

_NO_UNHANDLED = "RAY_IGNORE_UNHANDLED_ERRORS"
"""Read if the error of a failed task was not fetched: tasks that fail because of another loss are reported as that."""


@dataclass(frozen=True)
class Session:
    """A connection. node: id of the driver's own node. ours: what ends with it, in reverse; None if it existed
    before."""

    node: str
    ours: contextlib.ExitStack | None

    def close(self) -> None:
        """Leaves Ray and this process as they were before."""
        if self.ours is not None:
            self.ours.close()


def connect(address: str | None, cpus: int | None) -> Session:
    """Uses the Ray of this process if there is one; else connects to ``address``, or starts one here ("local").

    cpus: of a Ray started here; None: all of the machine. Raises ClusterError if the cluster cannot be reached.
    """
    with contextlib.ExitStack() as opened, _as_it_was():
        if address == LOCAL and not _is_connected():
            opened.enter_context(_for_a_local_ray())
        import ray

        if ray.is_initialized():
            return Session(ray.get_runtime_context().get_node_id(), None)
        # Warnings of Ray go to its log files: piper_ray reports to the user itself.
        options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
        try:
            if address == LOCAL:
                address = opened.enter_context(_local_ray(cpus))
                options["_node_ip_address"] = _LOOPBACK
            else:
                address = address or "auto"
                _check_reachable(_given(address))
            # Ray prints on stdout that a machine is gone, in the middle of other output; piper_ray reports that itself.
            # If a version prints otherwise, tests/faults finds it.
            opened.enter_context(_as(_WORKER, "print_to_stdstream", lambda *_, **__: None))
            opened.enter_context(_environment({_NO_UNHANDLED: "1"}))
            opened.callback(ray.shutdown)
            with _without_warnings(logging.getLogger("ray")):
                ray.init(address, **options)
            connected(sys.modules[_WORKER])
            node = ray.get_runtime_context().get_node_id()
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            raise _unreachable(address, error) from error
        return Session(node, opened.pop_all())


def may_wait(address: str | None) -> bool:
    """Whether ``connect`` will almost surely succeed, because the address answers, and can wait until a cluster is
    needed.

    Does not import Ray. Raises ClusterError if the address does not answer, UsageError if Ray is not installed.
    """
    require("ray", "--address")
    if address == LOCAL or _is_connected():
        return True
    try:
        if _given(address):
            return _check_reachable(_given(address))
    except OSError as error:
        raise _unreachable(address, error) from error
    # The file may be left by a Ray that has ended: Ray knows where else to look.
    with contextlib.suppress(OSError):
        return _check_reachable(_last_started().read_text().strip())
    return False


def _given(address: str | None) -> str:
    """Returns the given address; empty if Ray is to choose."""
    return os.environ.get("RAY_ADDRESS", "") if address in (None, "auto") else address


def _last_started() -> Path:
    """Returns the file in which Ray writes the address of what `ray start` has started on this machine."""
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    return Path(folder) / "ray" / "ray_current_cluster"


def _unreachable(address: str | None, error: BaseException) -> ClusterError:
    first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return ClusterError(
        f"no Ray cluster could be reached at {address or 'auto'}: {first_line}\n"
        "Check the address (host:port of the head node), that `ray status` works from here, and that both "
        "sides have the same RAY_AUTH_MODE; or start a Ray on this machine with --address local"
    )


@contextlib.contextmanager
def _without_warnings(logger: logging.Logger) -> Iterator[None]:
    """Suppresses warnings, e.g. that Ray's handler of SIGTERM is not set if another thread than the main one starts it.

    Ray sets its logger's level when it is imported.
    """
    level = logger.level
    logger.setLevel(max(level, logging.ERROR))
    try:
        yield
    finally:
        logger.setLevel(level)


def _is_connected() -> bool:
    ray: Any = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


@contextlib.contextmanager
def _local_ray(cpus: int | None) -> Iterator[str]:
    """Starts a Ray and yields its address. It ends with the context, or at the latest with this process."""
    command = [sys.executable, "-I", "-S", str(Path(keeper.__file__)), *([] if cpus is None else [str(cpus)])]
    environment = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", _NO_HANDLER)}
    keeps = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        errors="replace",
        env={
            **environment,
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_prestart_worker_first_driver": "false",  # one for each core, before it is known how many there will be
        },
        start_new_session=True,
    )
    with keeps:
        assert keeps.stdin is not None
        assert keeps.stdout is not None
        try:
            address = keeps.stdout.readline().strip()
            if not address:
                raise OSError(keeps.stdout.read().strip().rpartition("\n")[2] or "Ray did not start")
            yield address
        finally:
            keeps.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                keeps.wait(_ENDS_WITHIN_S)
            if keeps.returncode != 0:  # it was killed
                keeps.kill()
                keeper.end_session(keeps.pid)


@contextlib.contextmanager
def _as_it_was() -> Iterator[None]:
    """Restores SIGTERM, which Ray takes over, in Python and by a handler below it."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with _environment({_NO_HANDLER: "1"}), _as(_CONSTANTS, _NO_HANDLER, True):
            yield
    finally:
        if in_main_thread and handler is not None:
            signal.signal(signal.SIGTERM, handler)


@contextlib.contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Sets those of these variables that are not set, within the context."""
    ours = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name, value in ours.items():
            if os.environ.get(name) == value:
                del os.environ[name]


@contextlib.contextmanager
def _as(module: str, name: str, value: object) -> Iterator[None]:
    """Replaces an attribute of a module of Ray within the context, if the module is loaded and has it."""
    found: Any = sys.modules.get(module)
    if not hasattr(found, name):
        yield
        return
    before = getattr(found, name)
    setattr(found, name, value)
    try:
        yield
    finally:
        setattr(found, name, before)


@contextlib.contextmanager
def _for_a_local_ray() -> Iterator[None]:
    """Makes a local Ray listen on loopback and still require a token, since other users share the machine."""
    if "ray" in sys.modules:
        from ray._private import ray_constants

        ray_constants.ENABLE_RAY_CLUSTER = False
    # Otherwise Ray replaces 127.0.0.1 by the machine's own address, and listens on all interfaces.
    settings = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    if "RAY_AUTH_MODE" not in os.environ:
        settings |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    try:
        with _environment(settings):
            _read_environment()
            yield
    finally:
        _read_environment()


def _read_environment() -> None:
    """Makes Ray read the environment again, which it does at import and when a token is first needed; before, nothing
    is done."""
    raylet: Any = sys.modules.get("ray._raylet")
    if raylet is not None:
        raylet.Config.initialize("")
        if hasattr(raylet, "AuthenticationTokenLoader"):  # not in old versions, which need no token
            raylet.AuthenticationTokenLoader.instance().reset_cache()


def _check_reachable(address: str) -> bool:
    """Whether an address is of a kind that can be tested. Ray itself tries for a quarter of an hour. Raises OSError."""
    host, separator, port = address.rpartition(":")
    if not separator or "/" in host or not port.isdigit():
        return False
    socket.create_connection((host.strip("[]"), int(port)), timeout=_REACHABLE_WITHIN_S).close()
    return True


RAYLET, GCS = "raylet", "GCS"
_PROGRAMS = {RAYLET: "raylet", GCS: "gcs_server"}


class Services(NamedTuple):
    """gcs: where it listens, host:port. pids: of the processes on this machine, by name; none without /proc."""

    gcs: str
    pids: dict[str, int]

    @classmethod
    def of(cls, node: Any) -> Services:
        """node: the driver's, by Ray's own record."""
        session = os.fsencode(node.session_name)
        pids = {}
        for pid in keeper.processes():
            arguments = keeper.read(pid, "cmdline").split(b"\0")
            program = Path(os.fsdecode(arguments[0])).name
            for name, known in _PROGRAMS.items():
                if program == known and b"--session-name=" + session in arguments:
                    pids[name] = pid
        return cls(str(node.gcs_address), pids)


_observers: list[Callable[[Services], object]] = []


def observe(observer: Callable[[Services], object]) -> None:
    """Calls the observer with each connection that is made from now on."""
    _observers.append(observer)


def connected(worker: Any) -> None:
    """Reports a new connection to the observers. worker: the module of Ray that keeps it."""
    node = getattr(worker, "_global_node", None)
    if _observers and node is not None:
        services = Services.of(node)
        for observer in _observers:
            observer(services)
