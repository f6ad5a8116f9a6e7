"""The commands by name, with what each does in a line: a command's module is loaded when more is asked of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from importlib import import_module
from types import MappingProxyType
from typing import Any, NamedTuple

import typer

from piper_ray.cli.wording import Command, understood


class Listed(NamedTuple):
    """module: of piper_ray.cli, with a function of the command's name. does: the first line of what that says."""

    module: str
    does: str


LISTED: Mapping[str, Listed] = MappingProxyType(
    {
        "plan": Listed(
            "plan",
            "Plan the training of MODEL on a cluster: workload, plan, report and launch files, and the figures people "
            "ask for.",
        ),
        "solve": Listed("solve", "Find the fastest plan for INPUT, and prove it."),
        "frontier": Listed(
            "frontier", "Find the least time per microbatch for INPUT on every number of devices, and prove each."
        ),
        "verify": Listed(
            "verify", "Check PLAN against INPUT and show what it costs, under the schedule that PLAN is for."
        ),
        "simulate": Listed(
            "simulate",
            "Run PLAN for INPUT event by event under a schedule: step time, each rank's time and memory, what bounds "
            "it.",
        ),
        "compare": Listed(
            "compare",
            "Simulate PLANs for INPUT, each under the schedule that it is for, and say what separates the first from "
            "the best.",
        ),
        "report": Listed(
            "report",
            "Write one HTML page about PLAN for INPUT: where stages run, timeline, memory, what binds, other planners' "
            "plans.",
        ),
        "info": Listed("info", "Show what INPUT holds, and what solving it will take in memory and time."),
        "export": Listed(
            "export",
            "Write PLAN for INPUT as launch arguments or configuration of a runtime, with the command that starts it.",
        ),
        "import-plan": Listed(
            "export", "Read a layout that somebody runs as a plan for INPUT, to verify, simulate and compare it."
        ),
        "run": Listed(
            "run", "Train a PyTorch model by PLAN with torch's pipelines, and measure what the plan has promised."
        ),
        "convert": Listed("convert", "Write INPUT in another form, with the figures given here in place of its own."),
        "estimate": Listed(
            "estimate",
            "Estimate the workload of training MODEL on a cluster: layers, times, memory and communication.",
        ),
        "profile": Listed(
            "profile", "Measure a PyTorch model on this machine: its layers, their times, memory and communication."
        ),
        "sweep": Listed(
            "sweep", "Solve every point of SWEEP, each once, and keep plans, bounds and errors in a Parquet dataset."
        ),
        "sweep-report": Listed(
            "sweep", "Show what a sweep found: planners compared, best plans, throughput by devices, errors."
        ),
        "warm": Listed("warm", "Compile the kernels of all commands beforehand, in several processes side by side."),
    }
)


class OnDemand(MutableMapping[str, Any]):
    """The listed commands, each loaded when it is asked for, and then those ``at_hand``."""

    def __init__(self, at_hand: Mapping[str, Any]) -> None:
        self._loaded = dict(at_hand)
        self._names = dict.fromkeys([*LISTED, *at_hand])

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded and name in self._names:
            self._loaded[name] = _load(name)
        return self._loaded[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._loaded[name] = command
        self._names[name] = None

    def __delitem__(self, name: str) -> None:
        del self._names[name]
        self._loaded.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def in_a_line(self) -> dict[str, Any]:
        """All of them as a list of commands shows them; those that are listed are not loaded for it."""
        return {name: Command(name=name, help=LISTED[name].does) if name in LISTED else self[name] for name in self}


def _load(name: str) -> Any:
    function = getattr(import_module(f"piper_ray.cli.{LISTED[name].module}"), name.replace("-", "_"))
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    alone.command(name, cls=Command, context_settings={"token_normalize_func": understood(name)})(function)
    return typer.main.get_command(alone)
