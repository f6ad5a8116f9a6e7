"""Keeps a Ray of our own: a process that starts it, and ends it with whoever wanted it, however that one ends.

It is in a session of its own, and so is all that Ray starts. stdin is a pipe that nobody writes to: when its other end
is gone, every process of the session is killed and Ray's folder is removed. Signals that ask processes to end, to a
whole terminal or job, end none of them: whoever wanted Ray is asked too, and needs it to end well.

Run by its path, and knows no other module of ours, so that it is there at once. Prints Ray's address, or an empty line
and then why there is none.
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
"""Of our folders' names. Each has a lock in it, which is held as long as the folder is in use."""

_LOCK = "lock"
_LONGEST_FOLDER = 41
"""In bytes, with 66 for what Ray puts behind it: the path of a socket has at most 107."""

_RAY = "import sys; del sys.path[0]; from ray.scripts.scripts import main; main()"
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.05
_PATIENCE_S = 5.0


def main() -> None:
    """cpus: all of the machine if not given."""
    # All that is started here inherits it.
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
    """Processes whose parent ends become children of this one, which takes note of their end. On Linux."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))


def _base() -> Path:
    """For the folder: where Ray would have its own, if the path is short enough for sockets."""
    wanted = [os.environ.get("RAY_TMPDIR"), tempfile.gettempdir()]
    longest = _LONGEST_FOLDER - len(PREFIX) - 9
    return next((Path(base) for base in wanted if base and len(os.fsencode(base)) <= longest), Path("/tmp"))


@contextlib.contextmanager
def _folder(base: Path) -> Iterator[Path]:
    base.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=base))
    with (made / _LOCK).open("w") as lock:
        with contextlib.suppress(OSError):  # where there are no locks, nobody removes what others left
            fcntl.flock(lock, fcntl.LOCK_EX)
        folder = made.rename(base / made.name[1:])  # from now on others see it, and that it is in use
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _start(folder: Path, cpus: list[str]) -> str | None:
    """Ray's address; None if nobody wants it any more, or it does not start, which is told."""
    command = [
        *(sys.executable, "-c", _RAY, "start", "--head", "--port=0", "--node-ip-address=127.0.0.1"),
        *("--include-dashboard=false", "--disable-usage-stats", f"--temp-dir={folder}"),
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
    """Kills every process of a session but this one. 0 is none."""
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
    """What is left of others whose keeper was killed: processes, and folders."""
    for folder in base.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_uid != os.getuid():
                continue
            with (folder / _LOCK).open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for pid in processes():
                    if b"=" + os.fsencode(folder) in read(pid, "cmdline"):  # as Ray's daemons have it
                        end_session(_session(pid))
                shutil.rmtree(folder, ignore_errors=True)


def _members(session: int) -> set[int]:
    """Those that live, or whose end nobody has taken note of.

    Where there is no /proc, those of its first group: workers have groups of their own, and end with it.
    """
    if not Path("/proc/self/stat").exists():
        listed = subprocess.run(["ps", "-axo", "pgid=,pid="], capture_output=True, text=True, check=False)
        pairs = (map(int, line.split()) for line in listed.stdout.splitlines())
        return {pid for group, pid in pairs if group == session}
    return {pid for pid in processes() if _session(pid) == session}


def _session(pid: int) -> int:
    """0 if there is no such process."""
    # The name, in parentheses, may hold anything. Fields after it: state, parent, group, session.
    fields = read(pid, "stat").rpartition(b")")[2].split()
    return int(fields[3]) if len(fields) > 3 else 0


def processes() -> list[int]:
    """Of this machine, by pid; none where there is no /proc."""
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def read(pid: int, name: str) -> bytes:
    """What the system tells of a process; nothing if it is gone."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


if __name__ == "__main__":
    main()
