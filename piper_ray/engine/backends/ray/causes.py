"""Explains, from Ray's messages, what became of a worker or a task: what happened, where, and the memory it
requested."""

from __future__ import annotations

import re

from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError, WorkerCrashedError

_ADDRESS = re.compile(r"\bip(?: address)?[=:] ?([0-9a-f.:]*[0-9a-f])", re.IGNORECASE)
_IN_USE = re.compile(r"was ([0-9.]+) ?([KMGT]?i?B)(?: used)? / ([0-9.]+) ?([KMGT]?i?B)")
_USED = re.compile(r"actual memory used=([0-9.]+) ?([KMGT]?i?B)")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def is_loss(error: BaseException) -> bool:
    """Whether the process is gone; otherwise it lives, and only the task failed."""
    return isinstance(error, (RayActorError, WorkerCrashedError)) or (
        isinstance(error, RayError) and not isinstance(error, RayTaskError)
    )


def address_of(error: BaseException) -> str | None:
    """Returns the IP address of the machine where it happened, if Ray reports it."""
    match = _ADDRESS.search(str(error))
    return None if match is None else match[1]


def cause_of(error: BaseException, host: str, asked_bytes: float, *, machine_gone: bool = False) -> str:
    """Returns the cause in one line. asked_bytes: the memory that the process had requested from Ray."""
    text = _COLOUR.sub("", str(error).strip())
    asked = f"{asked_bytes / 1e9:.2f} GB"
    if isinstance(error, OutOfMemoryError):
        in_use, used = _IN_USE.search(text), _USED.search(text)
        of_machine = " ({} {} of {} {} in use)".format(*in_use.groups()) if in_use else ""
        of_process = "it used {} {} and had asked for ".format(*used.groups()) if used else "it had asked for "
        return f"{host} ran out of memory{of_machine}, so Ray killed it; {of_process}{asked}"
    if machine_gone:
        return f"{host} is gone"
    if isinstance(error, RayTaskError):
        return f"{_last_line(text)} on {host}"
    if isinstance(error, RayActorError) and error.actor_init_failed:
        return f"it could not start on {host}: {_last_line(text)}"
    if isinstance(error, (RayActorError, WorkerCrashedError)):
        return (
            f"its process on {host} was killed or crashed without a word, perhaps by the system for lack of memory; "
            f"it had asked for {asked}"
        )
    return f"{text.splitlines()[0] if text else type(error).__name__} ({host})"


def _last_line(text: str) -> str:
    return text.splitlines()[-1] if text else "an error without a message"
