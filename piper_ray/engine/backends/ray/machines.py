"""The machines of the cluster, and, from Ray's messages, what became of a worker or a task there.

Each machine is asked for its software before it is used, and left out if that differs.

A worker placed by Ray may start on a machine that has not answered yet, so workers report their software too. It must
be the driver's versions and sources, or answers might differ.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol, final

import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError, WorkerCrashedError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from piper_ray.model.errors import ClusterError

_LOOK_EVERY_S = 2.0

_ATTEMPTS = 3
"""Number of attempts to ask a machine whose processes die before they answer, and to use one on which work fails."""

_ASK_AGAIN_S = 30.0
"""Pause after that many attempts: the cause may be temporary."""


class RayNode(NamedTuple):
    """A machine as Ray reports it. id: new each time that its Ray starts."""

    id: str
    host: str
    address: str
    cpus: float
    memory_bytes: float

    @property
    def name(self) -> str:
        """The name by which a person would look for it."""
        return self.host if self.host == self.address else f"{self.host} ({self.address})"


class Overview(NamedTuple):
    """What is known of the usable machines: their cores, the largest memory of one with cores, and whether other
    machines have yet to answer.
    """

    cpus: int
    memory_bytes: float
    asking: bool


class View(Protocol):
    """What can be seen of a cluster. No method waits."""

    def nodes(self) -> list[RayNode]:
        """Returns the nodes that are alive."""
        ...

    def ask(self, node: str) -> None:
        """Asks a node for its software. A node is asked again only after its answer."""
        ...

    def answers(self) -> dict[str, Software | RayError]:
        """Returns the answers since the last call, by node."""
        ...

    def free_cpus(self) -> dict[str, float]:
        """Returns the cores that are not reserved, by node, as of a moment ago."""
        ...


@final
class RayView:
    """The cluster to which this process is connected."""

    def __init__(self) -> None:
        self._question: Any = ray.remote(num_cpus=0, max_retries=0)(question())
        self._asked: dict[Any, str] = {}

    def nodes(self) -> list[RayNode]:
        found: Callable[[], list[dict[str, Any]]] = ray.nodes
        return [
            RayNode(
                node["NodeID"],
                node["NodeManagerHostname"],
                node["NodeManagerAddress"],
                float(node["Resources"].get("CPU", 0.0)),
                float(node["Resources"].get("memory", 0.0)),
            )
            for node in found()
            if node["Alive"]
        ]

    def ask(self, node: str) -> None:
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        self._asked[self._question.options(scheduling_strategy=there).remote()] = node

    def free_cpus(self) -> dict[str, float]:
        found: Callable[[], dict[str, dict[str, float]]] = available_resources_per_node
        return {node: resources.get("CPU", 0.0) for node, resources in found().items()}

    def answers(self) -> dict[str, Software | RayError]:
        if not self._asked:
            return {}
        done, _ = ray.wait([*self._asked], num_returns=len(self._asked), timeout=0)
        return {self._asked.pop(ref): _outcome(ref) for ref in done}


def _outcome(ref: Any) -> Software | RayError:
    try:
        software: Software = ray.get(ref)
    except RayError as error:
        return error
    return software


@dataclass
class _Machine:
    """good: it runs the same software as this process. fault: why it is left out. Neither: it has not answered yet."""

    node: RayNode
    good: bool = False
    fault: str | None = None
    attempts: int = 0  # number of failed attempts to ask it
    doubts: int = 0
    ask_at: float = float("-inf")


class Machines:
    """tell: called once with each machine that is left out. here: the driver's own node, which is always asked; others
    only if they have cores. trusted: whether the driver's node is known to run the same software.

    Not for several threads.
    """

    def __init__(self, view: View, tell: Callable[[str], None], here: str, *, trusted: bool = False) -> None:
        self._view = view
        self._tell = tell
        self.here = here
        self._trusted = trusted
        self._machines: dict[str, _Machine] = {}
        self._names: dict[str, str] = {}  # of all nodes that ever were
        self._told: set[tuple[str, str]] = set()
        self._looked_at = float("-inf")

    @property
    def overview(self) -> Overview:
        nodes = self.nodes
        memory_bytes = max((node.memory_bytes for node in nodes), default=0.0)
        asking = any(not machine.good and machine.fault is None for machine in self._of_interest())
        return Overview(int(sum(node.cpus for node in nodes)), memory_bytes, asking)

    @property
    def nodes(self) -> list[RayNode]:
        """Returns the usable machines with cores."""
        return [node for node in self._good() if node.cpus > 0]

    @property
    def have_cores(self) -> bool:
        """Whether any machine, usable or not, has cores."""
        return any(machine.node.cpus > 0 for machine in self._machines.values())

    @property
    def left_out(self) -> dict[str, str]:
        """The reasons why machines are left out, by node."""
        return {node: machine.fault for node, machine in self._machines.items() if machine.fault is not None}

    def memory_here_bytes(self) -> float:
        """The memory of the driver's own machine; 0 if that may not work."""
        return next((node.memory_bytes for node in self._good() if node.id == self.here), 0.0)

    def free_cpus(self, node: str) -> int:
        """Returns the cores of a machine that are not reserved."""
        return int(self._view.free_cpus().get(node, 0.0))

    def name(self, node: str) -> str:
        return self._names.get(node, "an unknown machine")

    def name_at(self, address: str | None) -> str:
        """Returns the name of the machine with this IP address, or of the only one."""
        found = [node for node, machine in self._machines.items() if machine.node.address == address]
        node = next(iter(found or (self._machines if len(self._machines) == 1 else ())), None)
        return self.name(node) if node is not None else address or "an unknown machine"

    def leave_out(self, node: str, fault: str) -> None:
        """Leaves a machine out from now on, whether or not it has answered."""
        machine = self._machines.get(node)
        if machine is not None:
            self._fault(machine, fault)

    def doubt(self, node: str, fault: str, now: float) -> None:
        """Work has failed there without a reason of its own: the machine is not used until it answers again, a few
        times at most."""
        machine = self._machines.get(node)
        if machine is not None:
            machine.doubts += 1
            if machine.doubts < _ATTEMPTS and machine.ask_at == float("inf"):
                machine.ask_at = now
            self._fault(machine, fault)

    def check(self) -> None:
        """Raises ClusterError if no machine can work and none has yet to answer."""
        out = [(machine.node.name, machine.fault) for machine in self._of_interest() if machine.node.cpus > 0]
        if out and all(fault is not None for _, fault in out):
            faults = "\n".join(f"  {name}: {fault}" for name, fault in sorted(set(out)))
            raise ClusterError(
                f"no machine of the cluster can work:\n{faults}\nAll machines need what is installed on this one"
            )

    def look(self, now: float, *, at_once: bool = False) -> None:
        """Updates the machines; to be called often. at_once: something has happened to a machine."""
        if at_once or now - self._looked_at >= _LOOK_EVERY_S:
            self._looked_at = now
            self._update()
        for node, answer in self._view.answers().items():
            machine = self._machines.get(node)
            if machine is not None:
                self._answered(machine, answer, now)
        for machine in self._of_interest():
            if not machine.good and now >= machine.ask_at:
                machine.ask_at = float("inf")  # until it has answered
                self._view.ask(machine.node.id)

    def check_here(self) -> None:
        """Raises ClusterError once the driver's own node has ended: no call is answered from then on.

        Ray ends most drivers with their node, but not one that has not used a worker yet.
        """
        if self.here in self._names and self.here not in self._machines:
            raise ClusterError("Ray on this machine has ended, and with it the connection to the cluster")

    def is_alive(self, node: str, now: float) -> bool:
        """Whether Ray now reports the node as alive."""
        self.look(now, at_once=True)
        return node in self._machines

    def _good(self) -> Iterator[RayNode]:
        return (machine.node for machine in self._machines.values() if machine.good)

    def _of_interest(self) -> Iterator[_Machine]:
        return (m for m in self._machines.values() if m.node.cpus > 0 or m.node.id == self.here)

    def _update(self) -> None:
        alive = {node.id: node for node in self._view.nodes()}
        for gone in self._machines.keys() - alive.keys():
            del self._machines[gone]
        for node in alive.values():
            self._names[node.id] = node.name
            machine = self._machines.setdefault(node.id, _Machine(node))
            machine.node = node
            machine.good |= self._trusted and node.id == self.here

    def _answered(self, machine: _Machine, answer: Software | RayError, now: float) -> None:
        if isinstance(answer, RayError):
            machine.attempts += 1
            machine.ask_at = now
            if machine.attempts >= _ATTEMPTS or not is_loss(answer):
                machine.ask_at = now + _ASK_AGAIN_S
                self._fault(machine, f"it cannot be asked what it runs: {cause_of(answer, machine.node.host, 0.0)}")
            return
        fault = difference(answer)
        if fault is not None:
            self._fault(machine, fault)
        else:
            machine.good, machine.fault, machine.attempts = True, None, 0

    def _fault(self, machine: _Machine, fault: str) -> None:
        machine.good, machine.fault = False, fault
        if machine.node.cpus > 0 and (machine.node.host, fault) not in self._told:
            self._told.add((machine.node.host, fault))
            self._tell(f"{machine.node.name} is left out: {fault}")


Software = Mapping[str, str]
"""Version by name; ``SOURCES`` is a hash of all of piper_ray's Python files. Empty: piper_ray cannot be imported."""

SOURCES = "sources"
_NAMES = ("piper_ray", "numpy", "numba", "pyarrow", "ray")


def question() -> Callable[[], dict[str, str]]:
    """Returns a function that reports the software of the process that calls it. It is a local function, which Ray
    sends by value, so it requires only Python and Ray.
    """
    names, sources = _NAMES, SOURCES

    def software() -> dict[str, str]:
        import hashlib
        import importlib
        import pathlib
        import platform

        found = {"Python": platform.python_version()}
        for name in names:
            try:
                module = importlib.import_module(name)
            except Exception:  # noqa: BLE001 - a broken one may raise whatever it likes
                found[name] = ""
                continue
            # A folder of that name that is not a package can be imported too.
            found[name] = str(getattr(module, "__version__", "")) if module.__file__ else ""
            if name == "piper_ray" and module.__file__:
                digest = hashlib.sha256()
                folder = pathlib.Path(module.__file__).parent
                for path in sorted(folder.rglob("*.py")):
                    digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
                found[sources] = digest.hexdigest()[:16]
        return found

    return software


@cache
def software() -> Software:
    """Returns the software of this process."""
    return question()()


def difference(theirs: Software) -> str | None:
    """Describes how another process's software differs from this one's; None if it does not."""
    ours = software()
    missing = [name for name in ours if name != SOURCES and not theirs.get(name)]
    if missing:
        return f"{_listed(missing)} cannot be imported there"
    other = [name for name in ours if name != SOURCES and theirs[name] != ours[name]]
    if other:
        return f"it has {_listed([f'{name} {theirs[name]} ({ours[name]} here)' for name in other])}"
    if theirs.get(SOURCES) != ours[SOURCES]:
        return "its piper_ray has other sources than the one here, which has its version too"
    return None


def _listed(parts: list[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


_ADDRESS = re.compile(r"\bip(?: address)?[=:] ?([0-9a-f.:]*[0-9a-f])", re.IGNORECASE)
_IN_USE = re.compile(r"was ([0-9.]+) ?([KMGT]?i?B)(?: used)? / ([0-9.]+) ?([KMGT]?i?B)")
_USED = re.compile(r"actual memory used=([0-9.]+) ?([KMGT]?i?B)")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def is_loss(error: BaseException) -> bool:
    """Whether the process is gone; otherwise it lives, and only the task failed."""
    return isinstance(error, (RayActorError, WorkerCrashedError)) or (
        isinstance(error, RayError) and not isinstance(error, RayTaskError)
    )


def address_of(error: BaseException) -> str | None:
    """Returns the IP address of the machine where it happened, if Ray reports it."""
    match = _ADDRESS.search(str(error))
    return None if match is None else match[1]


def cause_of(error: BaseException, host: str, asked_bytes: float, *, machine_gone: bool = False) -> str:
    """Returns the cause in one line. asked_bytes: the memory that the process had requested from Ray."""
    text = _COLOUR.sub("", str(error).strip())
    asked = f"{asked_bytes / 1e9:.2f} GB"
    if isinstance(error, OutOfMemoryError):
        in_use, used = _IN_USE.search(text), _USED.search(text)
        of_machine = " ({} {} of {} {} in use)".format(*in_use.groups()) if in_use else ""
        of_process = "it used {} {} and had asked for ".format(*used.groups()) if used else "it had asked for "
        return f"{host} ran out of memory{of_machine}, so Ray killed it; {of_process}{asked}"
    if machine_gone:
        return f"{host} is gone"
    if isinstance(error, RayTaskError):
        return f"{_last_line(text)} on {host}"
    if isinstance(error, RayActorError) and error.actor_init_failed:
        return f"it could not start on {host}: {_last_line(text)}"
    if isinstance(error, (RayActorError, WorkerCrashedError)):
        return (
            f"its process on {host} was killed or crashed without a word, perhaps by the system for lack of memory; "
            f"it had asked for {asked}"
        )
    return f"{text.splitlines()[0] if text else type(error).__name__} ({host})"


def _last_line(text: str) -> str:
    return text.splitlines()[-1] if text else "an error without a message"
