"""What Ray says of a loss, in one line for the user: what happened, where, and how much memory was wanted."""

from __future__ import annotations

from typing import Any

import pytest
from ray import exceptions
from ray.core.generated import common_pb2

from piper_ray.engine.backends.ray.machines import address_of, cause_of, is_loss

ray: Any = exceptions  # untyped
messages: Any = common_pb2

# As Ray 2.60 says it; earlier versions say "was 27.16GB / 30.00GB (0.905)".
OUT_OF_MEMORY = """1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 10.0.0.7, \
ID: 97914592) was 6.20GB used / 23.54GB limit (0.263259)
OOM kill reason: Memory usage 6654267392B exceeded threshold of 505530272B (2.0% of 25276514304B limit)
Selected to kill: (Task: job ID=01000000, task name=f, pid=143, actual memory used=0.04GB, worker ID=dc65)
The actor never ran - it was cancelled before it started running."""


def died(message: str, *, never_started: bool = False) -> Any:
    context = messages.ActorDiedErrorContext(
        error_message=message,
        class_name="Worker",
        actor_id=bytes(16),
        node_ip_address="10.0.0.7",
        pid=9,
        never_started=never_started,
    )
    return ray.ActorDiedError(context)


def test_out_of_memory() -> None:
    error = ray.OutOfMemoryError(OUT_OF_MEMORY)
    assert cause_of(error, "a", 1.26e9) == (
        "a ran out of memory (6.20 GB of 23.54 GB in use), so Ray killed it; it used 0.04 GB and had asked for 1.26 GB"
    )
    earlier = ray.OutOfMemoryError(
        "Memory on the node (IP: 10.0.0.7, ID: 9) was 27.16GB / 30.00GB (0.905), which exceeds"
    )
    assert cause_of(earlier, "a", 5e8) == (
        "a ran out of memory (27.16 GB of 30.00 GB in use), so Ray killed it; it had asked for 0.50 GB"
    )
    unknown = cause_of(ray.OutOfMemoryError("?"), "a", 5e8)
    assert unknown == "a ran out of memory, so Ray killed it; it had asked for 0.50 GB"
    assert address_of(error) == address_of(earlier) == "10.0.0.7"


@pytest.mark.parametrize(
    "error",
    [
        ray.WorkerCrashedError(),
        died("The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR"),
        died("The actor is dead because its worker process has died.", never_started=True),
    ],
)
def test_killed_without_a_word(error: Exception) -> None:
    """Never that an actor never ran, or was cancelled."""
    text = cause_of(error, "a", 2e9)
    assert text == (
        "its process on a was killed or crashed without a word, perhaps by the system for lack of memory; it had asked "
        "for 2.00 GB"
    )
    assert is_loss(error)


def test_the_machine_is_gone() -> None:
    assert cause_of(died("..."), "a", 2e9, machine_gone=True) == "a is gone"
    assert cause_of(ray.NodeDiedError("the node died"), "a", 2e9) == "the node died (a)"
    assert address_of(died("...")) == "10.0.0.7"
    assert is_loss(ray.ActorUnavailableError("no answer", None))


def failure(error: Exception) -> Any:
    text = f"Traceback (most recent call last):\n  File 'x'\n{type(error).__name__}: {error}"
    return ray.RayTaskError("f", text, error, "ray::f", 3, "10.0.0.7")


def test_what_fails_is_no_loss() -> None:
    for error in (failure(OSError("no room")), failure(OSError("no room")).as_instanceof_cause()):
        assert not is_loss(error)
        assert cause_of(error, "a", 1e9) == "OSError: no room on a"
        assert address_of(error) == "10.0.0.7"
    assert not is_loss(OSError())
    assert address_of(OSError("nowhere")) is None


def test_a_start_that_fails() -> None:
    error = ray.ActorDiedError(failure(ModuleNotFoundError("No module named 'piper_ray'")))
    assert is_loss(error)
    assert cause_of(error, "a", 1e9) == "it could not start on a: ModuleNotFoundError: No module named 'piper_ray'"
