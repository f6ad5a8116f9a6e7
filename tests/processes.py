"""Tests in several processes, each a copy of the one that has collected them, so that nothing is imported or collected
twice. For Linux, as what a program has loaded may not survive a fork elsewhere."""

from __future__ import annotations

import atexit
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.sharedctypes import Synchronized
from typing import Any

import pytest

_FORK = get_context("fork")

Group = Sequence[pytest.Item]


def run(session: pytest.Session, groups: Sequence[Group], processes: int) -> None:
    """Each process takes the next group when it has run the last one. What a process that dies leaves has failed."""
    hook = session.config.hook
    unfinished = {item.nodeid: item for group in groups for item in group}
    taken = _FORK.Value("i", 0)
    running = {}
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    for number in range(min(processes, len(groups))):
        ours, theirs = _FORK.Pipe(duplex=False)
        with theirs, warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of numpy's threads, which are prepared for it
            running[ours] = _FORK.Process(target=_work, args=(session, groups, taken, theirs, number))
            running[ours].start()
    try:
        while running:
            for channel in wait([*running]):
                assert isinstance(channel, Connection)
                try:
                    said = channel.recv()
                except EOFError:
                    said = None
                if said is None:
                    running.pop(channel).join()
                    continue
                report = hook.pytest_report_from_serializable(config=session.config, data=said)
                hook.pytest_runtest_logreport(report=report)
                if report.when == "teardown":
                    unfinished.pop(report.nodeid, None)
                    hook.pytest_runtest_logfinish(nodeid=report.nodeid, location=report.location)
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
        for nodeid, item in unfinished.items():
            died = pytest.TestReport(nodeid, item.location, {}, "failed", "its process ended before it did", "call")
            hook.pytest_runtest_logreport(report=died)
    finally:
        for process in running.values():
            process.terminate()
            process.join()


@dataclass(eq=False)  # pytest keeps plugins in sets
class _Reporter:
    config: pytest.Config
    channel: Connection

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.channel.send(self.config.hook.pytest_report_to_serializable(config=self.config, report=report))


def _work(
    session: pytest.Session, groups: Sequence[Group], taken: Synchronized[int], channel: Connection, number: int
) -> None:
    plugins: Any = session.config.pluginmanager
    plugins.unregister(name="terminalreporter")
    capture = plugins.get_plugin("capturemanager")
    capture.stop_global_capturing()  # its files are the other processes' too
    capture.start_global_capturing()
    capture.suspend_global_capture()
    folders = session.config._tmp_path_factory  # type: ignore[attr-defined]
    folders._basetemp = folders.mktemp(f"process-{number}", numbered=False)
    plugins.register(_Reporter(session.config, channel))
    try:
        items = _taken(groups, taken)
        item = next(items, None)
        while item is not None:
            following = next(items, None)
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            item = following
    finally:
        session._setupstate.teardown_exact(None)
        atexit._run_exitfuncs()  # which multiprocessing leaves out
    channel.send(None)


def _taken(groups: Sequence[Group], taken: Synchronized[int]) -> Iterator[pytest.Item]:
    while True:
        with taken.get_lock():
            number = taken.value
            taken.value += 1
        if number >= len(groups):
            return
        yield from groups[number]
