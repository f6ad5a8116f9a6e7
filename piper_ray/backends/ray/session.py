"""The connection to Ray: one that is there is used and left alone, one that we made ends with us."""

from __future__ import annotations

import os
import secrets
import socket
import sys
from dataclasses import dataclass
from typing import Any

from piper_ray.errors import ClusterError

LOCAL = "local"

_REACHABLE_WITHIN_S = 10.0


@dataclass(frozen=True)
class Session:
    """A connection. owned: made by us. node: id of the driver's own node."""

    owned: bool
    node: str

    def close(self) -> None:
        """Leaves Ray as it was found."""
        if self.owned:
            import ray

            ray.shutdown()


def connect(address: str | None, cpus: int | None) -> Session:
    """Uses the Ray of this process if there is one; else attaches to ``address``, or starts one here ("local").

    cpus: of a Ray started here; None: all of the machine. Raises ClusterError if the cluster cannot be reached.
    """
    if address == LOCAL:
        _set_environment()
    import ray

    owned = not ray.is_initialized()
    if owned:
        # Warnings of Ray's own go to its log files: the user hears from us.
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": False}
        try:
            _check_reachable(address or os.environ.get("RAY_ADDRESS", ""))
            if address == LOCAL:
                ray.init(address=LOCAL, num_cpus=cpus, include_dashboard=False, _node_ip_address="127.0.0.1", **quiet)
            else:
                ray.init(address=address or "auto", **quiet)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            raise ClusterError(
                f"no Ray cluster could be reached at {address or 'auto'}: {_first_line(error)}\n"
                "Check the address (host:port of the head node), that `ray status` works from here, and that both "
                "sides have the same RAY_AUTH_MODE; or start a Ray on this machine with --address local"
            ) from error
    return Session(owned, ray.get_runtime_context().get_node_id())


def _set_environment() -> None:
    """For a Ray of our own. It listens on loopback, and still asks for a token: other users share the machine.

    Ray reads these when it is imported. Where that has happened it is too late for a token.
    """
    if "ray" in sys.modules:
        from ray._private import ray_constants

        ray_constants.ENABLE_RAY_CLUSTER = False
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Else Ray puts the machine's own address in the place of 127.0.0.1, and listens on all interfaces.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


def _check_reachable(address: str) -> None:
    """Ray itself tries for a quarter of an hour. Raises OSError."""
    host, separator, port = address.rpartition(":")
    if separator and "/" not in host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACHABLE_WITHIN_S).close()


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
