"""Keeps a Ray for one process: starts it, and ends it with that process, however that one ends.

This program and all that Ray starts are in a session of their own. stdin is a pipe to which nothing is written: when
its other end is gone, every process of the session is killed and Ray's folder is removed. Signals that ask a whole
terminal or job to end do not end these processes: the process that uses Ray gets them too, and needs Ray to end well.

It is run by its path and imports no other module of piper_ray, so that it starts at once. It prints Ray's address, or
an empty line and then the reason why there is none.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PREFIX = "piper-ray-"
"""Prefix of the folders' names. Each has a lock in it, which is held while the folder is in use."""

_LOCK = "lock"
_LONGEST_FOLDER = 41
"""The most bytes. Ray appends up to 66, and the path of a socket has at most 107."""

_RAY = "import sys; del sys.path[0]; from ray.scripts.scripts import main; main()"
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.05
_PATIENCE_S = 5.0


def main() -> None:
    """cpus: all of the machine if not given."""
    # All processes started here inherit it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    _adopt()
    try:
        base = _base()
        remove_abandoned(base)
        with _folder(base) as folder:
            try:
                address = _start(folder, sys.argv[1:])
                if address is not None:
                    print(address, flush=True)  # noqa: T201 - to whoever started it
                    sys.stdin.read()
            finally:
                end_session(os.getsid(0))
    except OSError as error:
        print(f"\n{error}", flush=True)  # noqa: T201


def _adopt() -> None:
    """Makes orphaned processes children of this one, which then reaps them. On Linux."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))


def _base() -> Path:
    """Returns where to put the folder: where Ray would have its own, if that path is short enough for sockets."""
    wanted = [os.environ.get("RAY_TMPDIR"), tempfile.gettempdir()]
    longest = _LONGEST_FOLDER - len(PREFIX) - 9
    return next((Path(base) for base in wanted if base and len(os.fsencode(base)) <= longest), Path("/tmp"))


@contextlib.contextmanager
def _folder(base: Path) -> Iterator[Path]:
    base.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=base))
    with (made / _LOCK).open("w") as lock:
        with contextlib.suppress(OSError):  # without locks no other process removes what is left
            fcntl.flock(lock, fcntl.LOCK_EX)
        folder = made.rename(base / made.name[1:])  # from now on others see it, and that it is in use
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _start(folder: Path, cpus: list[str]) -> str | None:
    """Returns Ray's address; None if it is no longer needed, or does not start, which is reported."""
    command = [
        *(sys.executable, "-c", _RAY, "start", "--head", "--port=0", "--node-ip-address=127.0.0.1"),
        *("--include-dashboard=false", "--disable-usage-stats", f"--temp-dir={folder}"),
        *("--include-log-monitor=false", "--no-monitor"),  # nobody reads workers' logs, and no machines are added
        *(f"--num-cpus={count}" for count in cpus),
    ]
    log = folder / "start.log"
    with log.open("wb") as output:
        started = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
    while started.poll() is None:
        if select.select([sys.stdin], [], [], _POLL_S)[0]:
            return None
    if started.returncode == 0:
        return (folder / "ray_current_cluster").read_text().strip()
    print(f"\n{log.read_text(errors='replace')}", flush=True)  # noqa: T201 - to whoever started it
    return None


def end_session(session: int) -> None:
    """Kills every process of a session except this one. 0 stands for no session."""
    end = time.monotonic() + _PATIENCE_S
    while session and (others := _members(session) - {os.getpid()}) and time.monotonic() < end:
        for pid in others:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        for pid in others:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(_POLL_S / 5)


def remove_abandoned(base: Path) -> None:
    """Removes processes and folders of others whose keeper was killed."""
    for folder in base.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_uid != os.getuid():
                continue
            with (folder / _LOCK).open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for pid in processes():
                    if b"=" + os.fsencode(folder) in read(pid, "cmdline"):  # a daemon of that Ray
                        end_session(_session(pid))
                shutil.rmtree(folder, ignore_errors=True)


def _members(session: int) -> set[int]:
    """Returns the processes of a session that live or are not reaped.

    Without /proc, those of its first group: workers have groups of their own, and end with it.
    """
    if not Path("/proc/self/stat").exists():
        listed = subprocess.run(["ps", "-axo", "pgid=,pid="], capture_output=True, text=True, check=False)
        pairs = (map(int, line.split()) for line in listed.stdout.splitlines())
        return {pid for group, pid in pairs if group == session}
    return {pid for pid in processes() if _session(pid) == session}


def _session(pid: int) -> int:
    """Returns the session of a process; 0 if there is no such process."""
    # The name, in parentheses, may have any characters. Fields after it: state, parent, group, session.
    fields = read(pid, "stat").rpartition(b")")[2].split()
    return int(fields[3]) if len(fields) > 3 else 0


def processes() -> list[int]:
    """Returns the pids of this machine; none without /proc."""
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def read(pid: int, name: str) -> bytes:
    """Returns a file of /proc about a process; empty if the process is gone."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


if __name__ == "__main__":
    main()
