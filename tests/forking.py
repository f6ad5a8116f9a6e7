"""``piper-ray`` as a process that begins as a copy of one which has solved before.

It has its own arguments, folder, streams, signals and end, and none of the second that importing the program and
loading its kernels takes. For Linux: elsewhere what a program has loaded may not survive a fork.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TextIO

from piper_ray import dump, dump_plan
from tests.report_cases import small_instance

ROOT = Path(__file__).resolve().parents[1]

_MOST_BYTES = 2**20
"""Of the arguments."""


class Original:
    """The process that copies are made of. environment: that of the copies."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        self._channel, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.forking", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**environment, "OPENBLAS_NUM_THREADS": "1"},  # a copy has one thread only
                cwd=ROOT,
            )
        self._replies = self._channel.makefile("r")
        atexit.register(self.close)

    def run(
        self, arguments: Sequence[str], variables: dict[str, str], stdout: int | None, timeout_s: float | None
    ) -> subprocess.CompletedProcess[str]:
        """As ``subprocess.run``, its output in files.

        variables: besides those of the environment. stdout: a descriptor, where it is not to be captured.
        """
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            descriptors = [output.fileno() if stdout is None else stdout, errors.fileno()]
            process = self._copy(descriptors, arguments, variables, "")
            with _killed_after(timeout_s or threading.TIMEOUT_MAX, process) as timer:
                code = self.end_of(process)
                timed_out = timer.finished.is_set()
            for stream in (output, errors):
                stream.seek(0)
            said, complained = output.read().decode(), errors.read().decode()
        if timed_out:
            raise subprocess.TimeoutExpired(["piper-ray", *arguments], timeout_s or 0.0, said, complained)
        return subprocess.CompletedProcess(["piper-ray", *arguments], code, said, complained)

    @contextlib.contextmanager
    def start(self, arguments: Sequence[str], setup: str) -> Iterator[Copy]:
        """A copy in a session of its own, its output in pipes; killed in the end. setup: statements before the command,
        when all that commands load is there.
        """
        (said, output), (complained, errors) = os.pipe(), os.pipe()
        process = self._copy([output, errors], arguments, {}, setup)
        os.close(output)
        os.close(errors)
        with os.fdopen(said, encoding="utf-8") as stdout, os.fdopen(complained, encoding="utf-8") as stderr:
            copy = Copy(self, process, stdout, stderr)
            try:
                yield copy
            finally:
                copy.kill()
                copy.wait()

    def _copy(self, streams: list[int], arguments: Sequence[str], variables: dict[str, str], setup: str) -> int:
        """Its process, which the original waits for."""
        copy = {"arguments": arguments, "folder": str(Path.cwd()), "variables": variables, "setup": setup}
        self._send(copy, streams)
        return self._reply()

    def end_of(self, process: int) -> int:
        """The exit code of a copy, when it has ended."""
        self._send({"process": process}, [])
        return self._reply()

    def _send(self, request: dict[str, Any], descriptors: list[int]) -> None:
        line = json.dumps(request).encode() + b"\n"
        assert len(line) < _MOST_BYTES
        socket.send_fds(self._channel, [line], descriptors)

    def _reply(self) -> int:
        reply = self._replies.readline()
        assert reply, "the process that copies of piper-ray are made of has ended"
        return int(reply)

    def close(self) -> None:
        self._replies.close()
        self._channel.close()
        self._process.wait()


@dataclass
class Copy:
    """A copy at work, with what ``subprocess.Popen`` has of the same names."""

    original: Original
    pid: int
    stdout: TextIO
    stderr: TextIO
    returncode: int | None = None

    def send_signal(self, number: signal.Signals) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float = threading.TIMEOUT_MAX) -> int:
        """timeout: seconds, after which it is killed."""
        if self.returncode is None:
            with _killed_after(timeout, self.pid):
                self.returncode = self.original.end_of(self.pid)
        return self.returncode

    def communicate(self, timeout: float) -> tuple[str, str]:
        """What it writes to stdout and stderr, to the end of all who have them. timeout: as of ``wait``."""
        with _killed_after(timeout, self.pid), ThreadPoolExecutor(1) as reader:
            output = reader.submit(self.stdout.read)
            errors = self.stderr.read()
            self.wait()
            return output.result(), errors


@contextlib.contextmanager
def _killed_after(seconds: float, process: int) -> Iterator[threading.Timer]:
    timer = threading.Timer(seconds, os.kill, [process, signal.SIGKILL])
    timer.daemon = True
    timer.start()
    try:
        yield timer
    finally:
        timer.cancel()


def main(descriptor: int) -> None:
    with socket.socket(fileno=descriptor) as channel:
        _load()
        for thread in set(threading.enumerate()) - {threading.main_thread()}:
            thread.join(60.0)  # a solve's helpers end soon after it, not before
        assert threading.active_count() == 1, f"no copy would have the other threads: {threading.enumerate()}"
        while True:
            request, descriptors, _, _ = socket.recv_fds(channel, _MOST_BYTES, 2)
            if not request:
                return
            while not request.endswith(b"\n"):
                request += channel.recv(_MOST_BYTES)
            asked = json.loads(request)
            if "process" in asked:
                channel.sendall(b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(asked["process"], 0)[1]))
                continue
            process = os.fork()
            if process == 0:
                channel.close()
                _become(asked, descriptors)
            for copied in descriptors:
                os.close(copied)
            channel.sendall(b"%d\n" % process)


def _load() -> None:
    """What commands load and compile, by running some."""
    from piper_ray.cli import main
    from tests.export_support import llama, plan_of
    from tests.sweep_support import write_small
    from tests.unit.test_propose import CONFIG

    said = io.StringIO()
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        folder = Path(name)
        small, larger, plan, config = (folder / f"{what}.json" for what in ("small", "larger", "plan", "config"))
        dump(small_instance(), small)
        dump(llama(), larger)
        dump_plan(plan_of(llama(), [7, 7]), plan, llama())
        config.write_text(json.dumps(CONFIG))
        for command in (
            ("solve", small),
            ("solve", small, "--schedule", "1f1b"),
            ("frontier", small),
            ("export", larger, plan, "--to", "megatron", "-o", folder / "launch"),
            ("import-plan", larger, folder / "launch" / "megatron.args", "-o", folder / "again.json"),
            ("plan", config, "--gpu", "H100-SXM", "--nodes", 1, "--global-batch", 16, "-o", folder / "planned"),
            ("sweep", write_small(folder), "--storage", folder / "dataset", "--dry-run"),
        ):
            sys.argv = ["piper-ray", *map(str, command)]
            code = main()
            assert code == 0, (command, said.getvalue())
    gc.collect()
    gc.freeze()  # so that collections in copies leave the pages alone that they share


def _become(request: dict[str, Any], descriptors: list[int]) -> NoReturn:
    try:
        with Path(os.devnull).open() as nothing:
            os.dup2(nothing.fileno(), 0)
        for standard, descriptor in enumerate(descriptors, start=1):
            os.dup2(descriptor, standard)
            os.close(descriptor)
        os.chdir(request["folder"])
        os.environ.update(request["variables"])
        sys.argv = ["piper-ray", *request["arguments"]]

        from piper_ray.cli import program

        if request["setup"]:
            os.setsid()
            exec(request["setup"], {"sys": sys})
        program()
    except BaseException:  # noqa: BLE001 - nothing of it may go on as the original does
        traceback.print_exc()
    finally:
        os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]))
