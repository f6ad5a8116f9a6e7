"""Who may write: dead drivers are succeeded at once, silent ones after the lease, living ones never."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from piper_ray.model.errors import CheckpointLost, CheckpointRefused, ClusterError
from piper_ray.storage.folder import CLAIM, LEASE, DriverFile, Folder, LocalFolder, StateFile
from piper_ray.storage.lease import LEASE_S, Lease, Owner, acquire
from tests.checkpoint_support import Clock, ObjectStore, ignored, open_folder_in, unexpected

HERE = Owner.current()
ELSEWHERE = replace(HERE, host="elsewhere", boot_id="another machine", pid=4321)
DRIVER = "a" * 32

tells_of_processes = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing tells when a process began")


@pytest.fixture(params=["local", "store"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    return LocalFolder(str(tmp_path)) if request.param == "local" else open_folder_in(ObjectStore())


def leave(folder: Folder, owner: Owner, epoch: int = 7, kind: str = LEASE) -> DriverFile:
    """The file of a driver that gives no sign of life."""
    file = DriverFile(kind, epoch, DRIVER)
    folder.put(file.name, owner.encode(1), durable=False)
    return file


def finished_process() -> Owner:
    """Of this machine, gone by now."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        owner = process(child.pid)
        assert not owner.is_gone()
    return owner


def process(pid: int) -> Owner:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return replace(HERE, pid=pid, start_time=fields[19])


@tells_of_processes
def test_an_owner_is_written_and_read() -> None:
    content = HERE.encode(3)
    assert Owner.decode(content) == HERE
    assert content != HERE.encode(4)
    assert str(HERE) == f"{HERE.host}, pid {os.getpid()}"
    assert all(value for value in vars(HERE).values())


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"1", HERE.encode(1)[:-9], json.dumps({"host": "x"}).encode()])
def test_half_a_lease_has_no_owner(content: bytes) -> None:
    assert Owner.decode(content) is None


@tells_of_processes
def test_which_processes_are_gone() -> None:
    assert not HERE.is_gone()
    assert finished_process().is_gone()
    assert replace(HERE, start_time="1").is_gone()  # another process has the pid now
    assert not replace(finished_process(), boot_id="another machine").is_gone()
    assert not replace(finished_process(), pid_namespace="another container").is_gone()


@tells_of_processes
def test_a_process_that_its_parent_has_not_taken_note_of_is_gone() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        owner = process(child.pid)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert Path(f"/proc/{child.pid}").exists()
        assert owner.is_gone()


def test_machines_that_tell_nothing_of_their_processes_are_not_guessed_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("piper_ray.storage.lease._text", lambda path: "")  # noqa: ARG005
    monkeypatch.setattr("piper_ray.storage.lease._link", lambda path: "")  # noqa: ARG005
    assert not replace(Owner.current(), pid=2**30).is_gone()


def test_the_first_driver_waits_for_nobody(folder: Folder) -> None:
    clock = Clock()
    lease = acquire(folder, clock, unexpected)
    assert lease.epoch == 1
    assert len(folder.names()) == 1
    lease.check(folder.names())
    lease.release()
    assert folder.names() == []
    assert clock.slept_s == 0.0


def test_epochs_go_on_from_the_files_there_are(folder: Folder) -> None:
    folder.put(StateFile("outcomes", 41, 1, "0" * 32).name, b"", durable=True)
    lease = acquire(folder, Clock(), unexpected)
    assert lease.epoch == 42
    lease.release()


@tells_of_processes
@pytest.mark.parametrize("kind", [LEASE, CLAIM])
def test_a_dead_process_is_succeeded_at_once(folder: Folder, kind: str) -> None:
    left = leave(folder, finished_process(), kind=kind)
    clock = Clock()
    lease = acquire(folder, clock, unexpected)
    assert clock.slept_s == 0.0
    assert lease.epoch == left.epoch + 1
    assert left.name not in folder.names()
    lease.release()
    assert folder.names() == []


@tells_of_processes
def test_half_written_files_of_earlier_drivers_are_removed(tmp_path: Path) -> None:
    folder = LocalFolder(str(tmp_path))
    left = leave(folder, finished_process())
    (tmp_path / (left.name + ".tmp")).touch()
    (tmp_path / (StateFile("levels", 3, 5, "0" * 32).name + ".tmp")).touch()
    others = [StateFile("levels", 9, 5, "0" * 32).name + ".tmp", "notes.tmp"]
    for name in others:
        (tmp_path / name).touch()
    acquire(folder, Clock(), unexpected).release()
    assert sorted(folder.names()) == sorted(others)


@pytest.mark.parametrize("kind", [LEASE, CLAIM])
@pytest.mark.parametrize("owner", [ELSEWHERE, HERE, None])
def test_a_silent_driver_is_succeeded_after_the_lease(folder: Folder, owner: Owner | None, kind: str) -> None:
    left = leave(folder, owner or HERE, kind=kind)
    if owner is None:
        folder.put(left.name, b"torn", durable=False)
    clock, told = Clock(), list[str]()
    lease = acquire(folder, clock, told.append)
    assert LEASE_S <= clock.slept_s < LEASE_S + 1.0
    assert lease.epoch == left.epoch + 1
    assert left.name not in folder.names()
    who = "another solve" if owner is None else str(owner)
    assert told == [f"{who} may still be working on this checkpoint; waiting up to 10 s for a sign of life"]
    lease.release()


@pytest.mark.parametrize("owner", [ELSEWHERE, HERE])
def test_a_living_driver_is_left_alone(folder: Folder, owner: Owner) -> None:
    lease = Lease(folder, DriverFile(LEASE, 7, DRIVER), owner)
    lease.beat()
    before = folder.names()
    clock = Clock()
    clock.on_sleep = lambda: lease.beat() if clock.now_s > 6.0 else None
    with pytest.raises(CheckpointRefused, match=f"{owner.host}, pid {owner.pid}"):
        acquire(folder, clock, ignored)
    assert clock.slept_s < LEASE_S
    assert folder.names() == before
    lease.check(before)


def test_a_driver_that_ends_meanwhile_is_succeeded_then(folder: Folder) -> None:
    left = leave(folder, ELSEWHERE)
    clock = Clock(on_sleep=lambda: folder.delete(left.name))
    lease = acquire(folder, clock, ignored)
    assert clock.slept_s < 1.0
    assert lease.epoch == 1
    lease.release()


@tells_of_processes
def test_a_driver_that_dies_meanwhile_is_succeeded_then(folder: Folder) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        leave(folder, process(child.pid))

        def die() -> None:
            child.kill()
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)

        clock = Clock(on_sleep=die)
        lease = acquire(folder, clock, ignored)
    assert clock.slept_s < 1.0
    assert lease.epoch == 8
    lease.release()


def claiming_meanwhile(store: ObjectStore, rival: DriverFile, owner: Owner) -> None:
    """Another driver, which saw nobody either, puts its file just before the one under test puts its claim."""

    def before(operation: str, key: str) -> None:
        if operation == "put" and CLAIM in key:
            store.before = ObjectStore.before
            store.objects[f"bucket/{rival.name}"] = owner.encode(0)

    store.before = before


def test_of_two_claims_of_an_epoch_the_larger_withdraws() -> None:
    store = ObjectStore()
    first = DriverFile(CLAIM, 1, "0" * 32)
    claiming_meanwhile(store, first, ELSEWHERE)
    folder = open_folder_in(store)
    with pytest.raises(CheckpointRefused, match=r"another solve \(elsewhere, pid 4321\) works on this"):
        acquire(folder, Clock(), unexpected)
    assert folder.names() == [first.name]


@pytest.mark.parametrize("withdraws", [True, False])
def test_of_two_claims_of_an_epoch_the_smaller_waits_for_the_other(withdraws: bool) -> None:
    store = ObjectStore()
    second = DriverFile(CLAIM, 1, "f" * 32)
    claiming_meanwhile(store, second, ELSEWHERE)
    folder = open_folder_in(store)

    def decide() -> None:
        if not withdraws:
            folder.put(second._replace(kind=LEASE).name, ELSEWHERE.encode(1), durable=False)
        folder.delete(second.name)

    clock = Clock(on_sleep=decide)
    if withdraws:
        lease = acquire(folder, clock, ignored)
        lease.check(folder.names())
        lease.release()
        assert folder.names() == []
    else:
        with pytest.raises(CheckpointRefused, match="elsewhere, pid 4321"):
            acquire(folder, clock, ignored)
        assert folder.names() == [second._replace(kind=LEASE).name]


def test_a_lease_beside_the_claim_decides() -> None:
    store = ObjectStore()
    owner = DriverFile(LEASE, 1, "f" * 32)
    claiming_meanwhile(store, owner, ELSEWHERE)
    folder = open_folder_in(store)
    with pytest.raises(CheckpointRefused, match="elsewhere, pid 4321"):
        acquire(folder, Clock(), unexpected)
    assert folder.names() == [owner.name]


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        (DriverFile(LEASE, 2, "f" * 32).name, True),
        (DriverFile(LEASE, 1, "0" * 32).name, True),
        (StateFile("outcomes", 2, 1, "0" * 32).name, True),
        (DriverFile(LEASE, 1, "f" * 32).name, False),
        (DriverFile(CLAIM, 2, "0" * 32).name, False),
        (StateFile("outcomes", 1, 99, "0" * 32).name, False),
        (DriverFile(LEASE, 2, "f" * 32).name + ".tmp", False),
        ("lease.000002.txt", False),
    ],
)
def test_who_takes_over(folder: Folder, name: str, lost: bool) -> None:
    lease = Lease(folder, DriverFile(LEASE, 1, DRIVER), HERE)
    folder.put(name, ELSEWHERE.encode(1), durable=False)
    expected = pytest.raises(CheckpointLost, match=r"another solve .*has taken over this checkpoint")
    with expected if lost else contextlib.nullcontext() as error:
        lease.check(folder.names())
    if error is not None:
        assert error.value.exit_code == ClusterError.exit_code
        assert (str(ELSEWHERE) in str(error.value)) == (LEASE in name)


def test_a_lease_that_cannot_be_had_leaves_nothing() -> None:
    def fail(operation: str, key: str) -> None:
        if operation == "put" and LEASE in key:
            raise KeyboardInterrupt

    store = ObjectStore(before=fail)
    with pytest.raises(KeyboardInterrupt):
        acquire(open_folder_in(store), Clock(), unexpected)
    assert store.objects == {}


def test_a_store_that_fails_for_a_while_ends_no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("piper_ray.storage.lease.BEAT_S", 0.001)
    store = ObjectStore()
    folder = open_folder_in(store)
    lease = acquire(folder, Clock(), unexpected)
    failures: list[str] = []
    recovered = threading.Event()

    def fail(operation: str, key: str) -> None:
        if operation == "put":
            failures.append(key)
            if len(failures) <= 5:
                raise OSError("the network is down")
            recovered.set()

    store.before = fail
    assert recovered.wait(60.0)
    lease.check(folder.names())
    lease.release()
    assert store.objects == {}
