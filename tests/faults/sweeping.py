"""A sweep on the head of a cluster that goes on only as the test lets it. Run as a program it is that sweep.

It says how many points are done each time that is more, then waits for an empty line on stdin; and each warning.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from piper_ray.engine.backends.calls import Call
from piper_ray.engine.backends.ray.calls import ClusterWorkers
from piper_ray.model.instance import Instance
from piper_ray.model.options import SolveOptions
from piper_ray.sweep import run
from piper_ray.sweep.answer import Report, solve_points
from piper_ray.sweep.plan_point import PlannedModel
from piper_ray.sweep.point import AnyPoint, Progress
from tests.faults.machines import HEAD, LONG_S, Machines

Word = dict[str, Any]

_HOLD = "hold"


@dataclass
class Sweep:
    """One under way. hold: while there is such a file, workers begin no points. warnings: all that it has told."""

    process: subprocess.Popen[str]
    hold: Path
    waits: bool = False
    warnings: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    words: queue.SimpleQueue[Word | None] = field(default_factory=queue.SimpleQueue)

    def until_done(self, points: int) -> None:
        """Lets it go on until this number of points is done, and holds it; workers go on with the points they have."""
        while True:
            done = self._next()
            assert done is not None, self.text
            if done >= points:
                return

    def until_warning(self, text: str) -> None:
        """Lets it go on until it has told something with the text in it, if need be; workers begin none."""
        self.hold.touch()
        while not any(text in warning for warning in self.warnings):
            assert self._word() is not None, self.text
        self.hold.unlink()

    def finish(self) -> None:
        """Lets it go on to its end, which must be a success."""
        assert self.end() == 0, self.text

    def end(self) -> int:
        """Lets it go on to its end. Returns the exit status."""
        while self._next() is not None:
            pass
        return self.process.wait(LONG_S)

    def kill(self) -> None:
        """It is the one child of the program that entered the machine."""
        parent = self.process.pid
        with suppress(OSError):
            for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
                os.kill(int(child), signal.SIGKILL)

    @property
    def text(self) -> str:
        return "\n".join([*self.log, *self.warnings])

    def listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with suppress(ValueError):  # Ray's own
                self.words.put(json.loads(line))
        self.words.put(None)

    def listen_to_log(self) -> None:
        assert self.process.stderr is not None
        self.log.extend(line.rstrip() for line in self.process.stderr)

    def _next(self) -> int | None:
        """How many points are done when that is more; None at the end."""
        while (word := self._word()) is not None:
            if "done" in word:
                return int(word["done"])
        return None

    def _word(self) -> Word | None:
        """The next that it has to say; None at the end."""
        self._go_on()
        try:
            word = self.words.get(timeout=2 * LONG_S)
        except queue.Empty:
            raise AssertionError("the sweep hangs:\n" + self.text) from None
        if word is not None:
            self.waits = "done" in word
            self.warnings += [word["warning"]] if "warning" in word else []
        return word

    def _go_on(self) -> None:
        if self.waits:
            self.waits = False
            assert self.process.stdin is not None
            with suppress(BrokenPipeError):  # it was killed
                self.process.stdin.write("\n")
                self.process.stdin.flush()


@contextmanager
def sweeping(cluster: Machines, source: Path, storage: Path, hanging: int = 0, joined: int = 1) -> Iterator[Sweep]:
    """The sweep of ``source`` on the cluster, which begins once so many workers have ``joined``. hanging: so many stop
    amid points of 4 devices or more."""
    arguments = (str(source), str(storage), cluster.address, str(hanging), str(joined))
    command = [sys.executable, "-m", "tests.faults.sweeping", *arguments]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with cluster.popen(HEAD, command, **pipes) as process:
        sweep = Sweep(process, source.parent / _HOLD)
        listeners = [threading.Thread(target=listen) for listen in (sweep.listen, sweep.listen_to_log)]
        for listener in listeners:
            listener.start()
        try:
            yield sweep
        finally:
            sweep.kill()
            for listener in listeners:
                listener.join(LONG_S)


def _say(**word: object) -> None:
    sys.stdout.write(json.dumps(word) + "\n")
    sys.stdout.flush()


def _slow_down(folder: Path, hanging: int) -> None:
    """Makes workers wait for the test, and a number of them hang as Ctrl-Z would."""

    # Local, so that Ray ships it whole.
    def solve(
        subject: Instance | PlannedModel, points: tuple[AnyPoint, ...], options: SolveOptions, control: object
    ) -> Report:
        while (folder / _HOLD).exists():
            time.sleep(0.05)
        if any(point.devices >= 4 for point in points):
            for number in range(hanging):
                with suppress(FileExistsError):
                    (folder / str(number)).touch(exist_ok=False)
                    os.kill(os.getpid(), signal.SIGSTOP)
        return solve_points(subject, points, options, control)

    run.solve_points = solve  # type: ignore[attr-defined]


def _wait_for_workers(joined: int) -> None:
    """No point is handed out before this number of workers is there."""
    give = ClusterWorkers.give

    def patient(workers: ClusterWorkers, call: Call) -> None:
        while workers.workers < joined:
            time.sleep(0.05)
        ClusterWorkers.give = give  # type: ignore[method-assign]
        give(workers, call)

    ClusterWorkers.give = patient  # type: ignore[assignment,method-assign]


def _run(source: str, storage: str, address: str, hanging: str, joined: str) -> None:
    done = -1

    def listen(progress: Progress) -> None:
        nonlocal done
        if progress.done > done:
            done = progress.done
            _say(done=done)
            sys.stdin.readline()

    _slow_down(Path(source).parent, int(hanging))
    _wait_for_workers(int(joined))
    run._LEAST_EXPECTED_S = 0.5
    run.run_sweep(source, storage, address=address, listener=listen, on_warning=lambda text: _say(warning=text))


if __name__ == "__main__":
    _run(*sys.argv[1:])
