"""Supervised solves: which ends are final, what is said in between, signals, and that nothing is left behind."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from piper_ray.cli.supervise import DEATHS, PAUSES_S, supervise, without_supervise
from piper_ray.model.errors import ClusterError
from piper_ray.storage.folder import OUTCOMES, StateFile, checksum
from tests.cli_cases import ROOT
from tests.interrupt_support import AS_IN_A_TERMINAL

_SOON = (0.001, 0.002, 0.003, 0.004)
_HANG_S = 60.0

# Each start appends its arguments to a file, and ends as the next line of another file says.
_STUB = """
import os, sys
from pathlib import Path
folder = Path(sys.argv[1])
with (folder / "starts").open("a") as starts:
    starts.write(" ".join(sys.argv[2:]) + "\\n")
count = len((folder / "starts").read_text().splitlines())
for act in (folder / "script").read_text().splitlines()[count - 1].split():
    if act.startswith("save:"):
        (folder / "saved" / act.removeprefix("save:")).touch()
    elif act.startswith("drop:"):
        (folder / "saved" / act.removeprefix("drop:")).unlink()
    elif act.startswith("kill:"):
        os.kill(os.getpid(), int(act.removeprefix("kill:")))
    else:
        os._exit(int(act))
"""

# Says each signal it gets. SIGTERM ends it; so does the end of stdin, lest a failed test leave it behind.
_LISTENER = """
import os, signal, sys
def say(text):
    os.write(1, text.encode() + b"\\n")
def end(*_):
    say("terminated")
    os._exit(int(sys.argv[1]))
signal.signal(signal.SIGINT, lambda *_: say("interrupted"))
signal.signal(signal.SIGTERM, end)
say(f"ready {os.getpid()}")
sys.stdin.read()
"""

# Ends as SIGTERM ends any program.
_PLAIN = "import os, sys; os.write(1, b'ready\\n'); sys.stdin.read()"


@pytest.fixture
def play(tmp_path: Path) -> Callable[..., int]:
    """Supervises a child whose starts end as the lines say."""
    (tmp_path / "saved").mkdir()

    def supervised(*lines: str, pauses_s: Sequence[float] = _SOON) -> int:
        (tmp_path / "script").write_text("\n".join(lines))
        return supervise(
            ["solve", "in.toml"],
            str(tmp_path / "saved"),
            command=[sys.executable, "-S", "-c", _STUB, str(tmp_path)],
            pauses_s=pauses_s,
        )

    return supervised


def _starts(folder: Path) -> list[str]:
    return (folder / "starts").read_text().splitlines()


def _state(epoch: int, content: bytes) -> str:
    return "save:" + StateFile(OUTCOMES, epoch, 1, checksum(content)).name


@pytest.mark.parametrize("code", [0, 2, 3, 4, 5, 6, 130])
def test_other_exit_codes_are_final(
    play: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str], code: int
) -> None:
    assert play(str(code)) == code
    assert _starts(tmp_path) == ["solve in.toml"]
    assert capfd.readouterr() == ("", "")


def test_a_child_that_dies_is_started_again(
    play: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert play("1", f"kill:{signal.SIGABRT.value}", "7", f"kill:{signal.SIGKILL.value}", "0") == 0
    assert _starts(tmp_path) == ["solve in.toml"] * 5
    out, err = capfd.readouterr()
    assert out == ""
    end = f"; it goes on from the checkpoint at {tmp_path / 'saved'} in"
    assert err.splitlines() == [
        f"piper-ray: the solve died with exit code 1{end} 0.001 s",
        f"piper-ray: the solve was killed by SIGABRT{end} 0.002 s",
        f"piper-ray: the solve lost its cluster (exit code 7){end} 0.003 s",
        f"piper-ray: the solve was killed by SIGKILL{end} 0.004 s",
    ]


def test_the_pauses_double() -> None:
    assert len(PAUSES_S) == DEATHS - 1
    assert PAUSES_S == (1.0, 2.0, 4.0, 8.0)


def test_deaths_without_progress_end_it(
    play: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ClusterError, match="SIGABRT: 5 deaths in a row with nothing new in the checkpoint") as raised:
        play(*["7"] * 4, f"kill:{signal.SIGABRT.value}", "0")
    assert raised.value.exit_code == 7
    assert len(_starts(tmp_path)) == 5
    assert len(capfd.readouterr().err.splitlines()) == 4


def test_progress_starts_the_count_anew(play: Callable[..., int], capfd: pytest.CaptureFixture[str]) -> None:
    lines = ["1", "1", f"{_state(1, b'some')} 1", "1", f"{_state(2, b'more')} 1", "1", "1", "5"]
    assert play(*lines, pauses_s=_SOON[:3]) == 5
    pauses = [line.rsplit(" ", 2)[1] for line in capfd.readouterr().err.splitlines()]
    assert pauses == ["0.001", "0.002", "0.001", "0.002", "0.001", "0.002", "0.003"]


def test_what_is_only_written_anew_is_no_progress(play: Callable[..., int], tmp_path: Path) -> None:
    driver = f"save:lease.000003.{0:032x}.json"
    with pytest.raises(ClusterError):
        play(f"{_state(1, b'same')} 1", f"{_state(2, b'same')} 1", f"{driver} 1", "0", pauses_s=_SOON[:2])
    assert len(_starts(tmp_path)) == 3


def test_what_is_only_deleted_is_no_progress(play: Callable[..., int], tmp_path: Path) -> None:
    old, new = _state(1, b"old"), _state(1, b"new")
    with pytest.raises(ClusterError):
        play(f"{old} {new} 1", f"{old.replace('save', 'drop')} 1", "0", pauses_s=_SOON[:1])
    assert len(_starts(tmp_path)) == 2


def test_a_checkpoint_that_cannot_be_listed_shows_no_progress(
    play: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "saved").rmdir()
    (tmp_path / "saved").write_text("no folder")
    with pytest.raises(ClusterError, match="2 deaths in a row"):
        play("1", "1", pauses_s=_SOON[:1])
    assert len(capfd.readouterr().err.splitlines()) == 1


def test_credentials_are_not_shown(capfd: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-S", "-c", "raise SystemExit(1)"]
    with pytest.raises(ClusterError) as raised:
        supervise([], "nosuch://user:secret@host/folder", command=command, pauses_s=[0.0])
    said = str(raised.value) + capfd.readouterr().err
    assert "nosuch://host/folder" in said
    assert "secret" not in said


def test_handlers_are_put_back(play: Callable[..., int]) -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
    before = [signal.getsignal(number) for number in numbers]
    play("0")
    assert [signal.getsignal(number) for number in numbers] == before


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["solve", "a.toml", "--supervise", "--json"], ["solve", "a.toml", "--json"]),
        (["--traceback", "solve", "--supervise", "--supervise"], ["--traceback", "solve"]),
        (["solve", "--supervise", "--", "--supervise"], ["solve", "--", "--supervise"]),
    ],
)
def test_the_childs_command_line(given: list[str], expected: list[str]) -> None:
    assert without_supervise(given) == expected


@contextmanager
def _supervisor(folder: Path, *command: str, pauses_s: Sequence[float] = ()) -> Iterator[subprocess.Popen[str]]:
    """A supervisor in a process group of its own, as a shell starts it."""
    program = AS_IN_A_TERMINAL + (
        "import sys; from piper_ray.cli.supervise import supervise; "
        f"sys.exit(supervise([], {str(folder)!r}, command={list(command)!r}, pauses_s={list(pauses_s)!r}))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().rstrip("\n")


@pytest.mark.parametrize("code", [0, 1, 130])
def test_signals_are_passed_on_once_and_the_end_is_the_childs(tmp_path: Path, code: int) -> None:
    with _supervisor(tmp_path, sys.executable, "-S", "-c", _LISTENER, str(code), pauses_s=[0.0]) as process:
        child = int(_line(process).removeprefix("ready "))
        assert os.getpgid(child) != process.pid
        os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C in a terminal does
        assert _line(process) == "interrupted"
        process.terminate()
        assert _line(process) == "terminated"
        assert process.communicate(timeout=_HANG_S) == ("", "")
        assert process.returncode == code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_child_that_the_signal_ends_is_not_started_again(tmp_path: Path, number: signal.Signals) -> None:
    with _supervisor(tmp_path, sys.executable, "-S", "-c", _PLAIN, pauses_s=[0.0]) as process:
        assert _line(process) == "ready"
        process.send_signal(number)
        assert process.wait(_HANG_S) == 128 + number
        assert process.communicate() == ("", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_pause(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-S", "-c", "raise SystemExit(7)"]
    with _supervisor(tmp_path, *command, pauses_s=[100 * _HANG_S]) as process:
        assert process.stderr is not None
        assert "lost its cluster" in process.stderr.readline()
        process.send_signal(number)
        assert process.communicate(timeout=_HANG_S) == ("", "")
        assert process.returncode == 128 + number


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no kernel call binds a child to its parent")
def test_the_child_does_not_outlive_a_killed_supervisor(tmp_path: Path) -> None:
    with _supervisor(tmp_path, sys.executable, "-S", "-c", _LISTENER, "0") as process:
        assert _line(process).startswith("ready")
        process.kill()
        assert process.wait(_HANG_S) == -signal.SIGKILL
        assert process.stdout is not None
        # The child held the other end, and its stdin is still open.
        assert select.select([process.stdout], [], [], _HANG_S)[0]
        assert process.stdout.read() == ""
