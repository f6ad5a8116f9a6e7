"""Drivers that start together, their operations on the storage in any order, some of them asleep for a while."""

from __future__ import annotations

import threading
from random import Random
from unittest.mock import patch
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from piper_ray.model.errors import CheckpointLost, CheckpointRefused
from piper_ray.storage.folder import CLAIM, LEASE, DriverFile
from piper_ray.storage.lease import BEAT_S, Lease, Owner, acquire
from tests.checkpoint_support import ignored


class Simulation:
    """Runs drivers one operation at a time. Time stands still while any of them has something to do."""

    def __init__(self, rng: Random, longest_nap_s: float) -> None:
        self._rng = rng
        self._longest_nap_s = longest_nap_s
        self._changed = threading.Condition()
        self._wakes_s: dict[str, float] = {}  # of the drivers that wait for their turn
        self._active: set[str] = set()
        self._turn = ""
        self.now_s = 0.0
        self.files: dict[str, bytes] = {}
        self.working: dict[str, Lease] = {}
        self.refused: set[str] = set()

    def run(self, drivers: list[str]) -> None:
        threads = [threading.Thread(target=self._drive, args=(driver,)) for driver in drivers]
        self._active = set(drivers)
        for thread in threads:
            thread.start()
        with self._changed:
            while True:
                self._changed.wait_for(lambda: not self._turn and self._wakes_s.keys() == self._active)
                if not self._active:
                    break
                first_s = min(self._wakes_s.values())
                self.now_s = max(self.now_s, first_s)
                self._turn = self._rng.choice([d for d in sorted(self._active) if self._wakes_s[d] <= self.now_s])
                self._changed.notify_all()
        for thread in threads:
            thread.join()

    def pause(self, driver: str, seconds: float = 0.0) -> None:
        """Until the driver's next turn, after so many seconds at the least, and now and then many more."""
        if not self._active:
            return  # a look at the files when all is over
        if self._longest_nap_s > 0.0 and self._rng.random() < 0.1:
            seconds += self._rng.uniform(0.0, self._longest_nap_s)
        with self._changed:
            if self._turn == driver:
                self._turn = ""
            self._wakes_s[driver] = self.now_s + seconds
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._turn == driver)
            del self._wakes_s[driver]

    def _drive(self, driver: str) -> None:
        self.pause(driver)
        view = View(self, driver)
        try:
            lease = acquire(view, view, ignored)
        except CheckpointRefused:
            self.refused.add(driver)
        else:
            self.working[driver] = lease
            while self._active - self.working.keys() - self.refused:
                self.pause(driver, BEAT_S)
                lease.beat()
        with self._changed:
            self._active.discard(driver)
            self._turn = ""
            self._changed.notify_all()


class View:
    """The storage and the clock, as one driver sees them."""

    def __init__(self, simulation: Simulation, driver: str) -> None:
        self._simulation = simulation
        self._driver = driver

    def monotonic(self) -> float:
        return self._simulation.now_s

    def sleep(self, seconds: float, /) -> None:
        self._simulation.pause(self._driver, seconds)

    def names(self) -> list[str]:
        self._simulation.pause(self._driver)
        return list(self._simulation.files)

    def read(self, name: str) -> bytes | None:
        self._simulation.pause(self._driver)
        return self._simulation.files.get(name)

    def put(self, name: str, content: bytes, *, durable: bool) -> None:
        del durable
        self._simulation.pause(self._driver)
        self._simulation.files[name] = content

    def delete(self, name: str) -> None:
        self._simulation.pause(self._driver)
        self._simulation.files.pop(name, None)


def simulate(seed: int, drivers: int, longest_nap_s: float = 0.0, left: bytes | None = None) -> Simulation:
    rng = Random(seed)
    simulation = Simulation(rng, longest_nap_s)
    if left is not None:
        simulation.files[DriverFile(rng.choice([LEASE, CLAIM]), 3, "7" * 32).name] = left
    with (
        patch("piper_ray.storage.lease.uuid4", lambda: UUID(int=rng.getrandbits(128))),
        patch("piper_ray.storage.lease.BEAT_S", 1e6),  # signs of life are part of the simulation
    ):
        simulation.run([f"driver {number}" for number in range(drivers)])
    for lease in simulation.working.values():
        lease._ended.set()  # its thread ends; its file stays, for a look at what it would do
    return simulation


def may_write(simulation: Simulation) -> list[str]:
    """The drivers that would write now. They look at the files first."""

    def may(lease: Lease) -> bool:
        try:
            lease.check(list(simulation.files))
        except CheckpointLost:
            return False
        return True

    return [driver for driver, lease in simulation.working.items() if may(lease)]


seeds = st.integers(0, 2**32)


@given(seeds, st.integers(2, 4))
def test_of_drivers_that_start_together_at_most_one_works_and_of_two_just_one(seed: int, drivers: int) -> None:
    simulation = simulate(seed, drivers)
    assert len(simulation.working) <= 1
    assert len(simulation.working) + len(simulation.refused) == drivers
    assert may_write(simulation) == list(simulation.working)
    if drivers == 2:
        assert len(simulation.working) == 1
    assert len(simulation.files) == len(simulation.working)


@given(seeds, st.integers(2, 4), st.sampled_from([2.0, 15.0, 60.0]))
def test_of_drivers_that_sleep_and_are_taken_for_dead_at_most_one_writes(seed: int, drivers: int, nap_s: float) -> None:
    simulation = simulate(seed, drivers, nap_s)
    assert len(simulation.working) + len(simulation.refused) == drivers
    assert len(may_write(simulation)) == min(1, len(simulation.working))


@given(seeds, st.integers(1, 3), st.sampled_from([b"torn", Owner("elsewhere", 1, "", "", "").encode(1)]))
def test_what_a_dead_driver_left_is_in_nobodys_way(seed: int, drivers: int, left: bytes) -> None:
    simulation = simulate(seed, drivers, left=left)
    assert len(simulation.working) <= 1
    assert simulation.working or drivers > 2
    assert may_write(simulation) == list(simulation.working)
