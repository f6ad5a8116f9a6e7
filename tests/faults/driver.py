"""A solve on the head of the cluster that goes on only as the test lets it."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests import data
from tests.faults import stepped
from tests.faults.machines import HEAD, LONG_S, Machines, until

INCEPTION = [
    str(data.INCEPTION),
    *("--devices", "32", "--microbatches", "64", "--memory", "16GiB", "--bandwidth", "25GiB/s"),
]
"""326 levels of 221,565 downsets. The last two of four evaluations are the larger ones."""

Event = dict[str, Any]


def solve_here(arguments: Sequence[str], out: Path) -> bytes:
    """The plan of the same solve by the threads of one process."""
    command = [sys.executable, "-m", "piper_ray", "solve", *arguments, "--out", str(out)]
    subprocess.run(command, check=True, capture_output=True, timeout=10 * LONG_S)
    return out.read_bytes()


@dataclass
class Driver:
    """Each event holds the solve until the next call asks for another."""

    process: subprocess.Popen[str]
    out: Path
    waits: bool = False
    log: list[str] = field(default_factory=list)
    output: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    events: queue.SimpleQueue[Event | None] = field(default_factory=queue.SimpleQueue)

    def until(self, wanted: Callable[[Event], object]) -> Event:
        """Lets the solve go on to the first such event, and holds it there."""
        while True:
            event = self._next()
            assert event is not None, "the driver has ended:\n" + self.text
            if wanted(event):
                return event

    def until_level(self, level: int, evaluation: int = 1) -> Event:
        """The levels below are done."""
        return self.until(
            lambda event: (
                event["kind"] == "EvaluationAdvanced" and (event["index"], event["level"]) >= (evaluation, level)
            )
        )

    def until_all_join(self, count: int) -> None:
        """Holds the solve in its first large evaluation until it has this number of workers."""
        self.until_level(60, evaluation=3)
        self.until_workers(count)

    def until_workers(self, count: int) -> None:
        """Holds the solve where it is while they start, or end."""
        until(lambda: self._asked("workers") == count, f"{count} workers")

    def until_left_out(self, count: int) -> None:
        """Holds the solve while this number of machines is found to be unusable."""
        until(lambda: self._asked("left_out") == count, f"{count} machines left out")

    def until_note(self, text: str) -> Event:
        return self.until(lambda event: text in event.get("text", ""))

    def finish(self) -> bytes:
        """Lets it go on to its end, which must be a success. Returns the plan file."""
        assert self.end() == 0, self.text
        return self.out.read_bytes()

    def end(self) -> int:
        """Lets it go on to its end. Returns the exit status."""
        while self._next() is not None:
            pass
        return self.process.wait(LONG_S)

    def signal(self, number: signal.Signals) -> None:
        """To the driver itself, which is the one child of the program that entered the machine."""
        parent = self.process.pid
        (child,) = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        os.kill(int(child), number)

    def was_told(self, text: str) -> bool:
        return any(text in note for note in self.notes)

    def document(self) -> Any:
        """The JSON document on stdout."""
        return json.loads("".join(self.output))

    @property
    def text(self) -> str:
        return "\n".join(self.log)

    def listen(self) -> None:
        """Sorts what the driver says on stdout into events and output; returns at its end."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(stepped.EVENT):
                self.events.put(json.loads(line.removeprefix(stepped.EVENT)))
            else:
                self.output.append(line)
        self.events.put(None)

    def listen_to_log(self) -> None:
        """Likewise for stderr."""
        assert self.process.stderr is not None
        self.log.extend(line.rstrip() for line in self.process.stderr)

    def _asked(self, what: str) -> int:
        self._say("?")
        answer = self._heard()
        assert answer is not None, "the driver has ended:\n" + self.text
        return int(answer[what])

    def _next(self) -> Event | None:
        if self.waits:
            self.waits = False
            self._say("")
        event = self._heard()
        if event is not None:
            self.waits = True
            if event["kind"] == "Note":
                self.notes.append(event["text"])
        return event

    def _heard(self) -> Event | None:
        try:
            return self.events.get(timeout=2 * LONG_S)
        except queue.Empty:
            raise AssertionError("the driver hangs:\n" + self.text) from None

    def _say(self, text: str) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it was killed
            self.process.stdin.write(text + "\n")
            self.process.stdin.flush()


@contextmanager
def driving(cluster: Machines, folder: Path, *options: str, solve: Sequence[str] = INCEPTION) -> Iterator[Driver]:
    """A solve on the cluster, by the command line, with its plan and its state in ``folder``."""
    out = folder / "plan.json"
    out.unlink(missing_ok=True)
    arguments = [*solve, "--address", cluster.address, "--out", str(out), "--json", *options]
    command = [sys.executable, "-m", stepped.__name__, "solve", *arguments]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    driver = Driver(cluster.popen(HEAD, command, **pipes), out)
    process = driver.process
    listeners = [threading.Thread(target=listen) for listen in (driver.listen, driver.listen_to_log)]
    for listener in listeners:
        listener.start()
    try:
        yield driver
    finally:
        if process.poll() is None:
            driver.signal(signal.SIGKILL)
            process.wait(LONG_S)
        for listener in listeners:
            listener.join(LONG_S)
        for stream in (process.stdin, process.stdout, process.stderr):
            assert stream is not None
            with suppress(BrokenPipeError):
                stream.close()
