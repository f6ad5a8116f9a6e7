"""Every error a user can meet, each with its exit code on the command line; and the packages that only some commands
need, with the extras that install them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import ClassVar

EXIT_SOLVED = 0
EXIT_INTERRUPTED = 130


class PiperRayError(Exception):
    """Base of all errors of piper_ray. Users see ``str(error)``, never a traceback.

    >>> import piper_ray
    >>> try:
    ...     piper_ray.load("nowhere.toml")
    ... except piper_ray.PiperRayError as error:
    ...     print(error.exit_code)
    3
    """

    exit_code: ClassVar[int] = 1


class UsageError(PiperRayError):
    """An option or argument that makes no sense: an unknown unit, a negative limit, two options that contradict.

    >>> import piper_ray
    >>> try:
    ...     piper_ray.solve(3)
    ... except piper_ray.UsageError as error:
    ...     print(error)
    instance must be an Instance, or the path of an input, not 3
    """

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong with an input: where it is, and what was expected there.

    path: as a reader would look it up: ``nodes[3].TMPCs["2"][0].timePerSample`` in a file,
    ``layers[3].tmpcs[2][0].time_per_sample_s`` in an object.

    >>> print(Fault("layers[3].id", "given twice"))
    layers[3].id: given twice
    """

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class InputError(PiperRayError):
    """A file, dict or object that is not a valid instance or plan; ``faults`` lists everything that was found.

    >>> import piper_ray
    >>> try:
    ...     piper_ray.load("nowhere.toml")
    ... except piper_ray.InputError as error:
    ...     print(error.faults[0].message)
    cannot be read: No such file or directory; expected a readable file
    """

    exit_code = 3

    SHOWN: ClassVar[int] = 50

    def __init__(self, source: str, faults: Iterable[Fault]) -> None:
        self.source = source
        self.faults: Sequence[Fault] = tuple(faults)
        count = len(self.faults)
        lines = [f"{source}: {count} fault{'s' if count != 1 else ''} found"]
        lines += [f"  {fault}" for fault in self.faults[: self.SHOWN]]
        if count > self.SHOWN:
            lines.append(f"  ... and {count - self.SHOWN} more")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[type[InputError], tuple[str, Sequence[Fault]]]:
        return type(self), (self.source, self.faults)


class InfeasibleError(PiperRayError):
    """No plan exists under the given devices, memory and restrictions.

    >>> InfeasibleError.exit_code
    4
    """

    exit_code = 4


class LimitError(PiperRayError):
    """The solve would exceed a limit; the message names the figures and the option that raises the limit.

    >>> LimitError.exit_code
    5
    """

    exit_code = 5


class ChoiceTooHard(LimitError):
    """The best TMPCs of a stage cannot be chosen exactly, because too many partial choices are equally good.

    >>> issubclass(ChoiceTooHard, LimitError)
    True
    """

    def __init__(self) -> None:
        super().__init__(
            "the exact TMPC choice of a stage has more than a million partial choices to compare: its layers all "
            "differ and all save memory at about the same rate. Give the layers fewer TMPCs, or let each stage "
            "recompute as a whole (--recompute all-or-none)"
        )


class InvalidPlan(PiperRayError):
    """A plan that breaks a rule of the problem; ``violations`` says which, stage by stage.

    >>> InvalidPlan(["layer 3 is in no stage"]).violations
    ('layer 3 is in no stage',)
    """

    exit_code = 6

    HEADING: ClassVar[str] = "the plan is not valid"

    def __init__(self, violations: Iterable[str], heading: str = HEADING) -> None:
        self.violations: Sequence[str] = tuple(violations)
        self.heading = heading
        super().__init__(f"{heading}:\n" + "\n".join(f"  {text}" for text in self.violations))


class UnsupportedPlan(InvalidPlan):
    """A plan that is valid, but that a runtime cannot run; ``violations`` says why."""

    def __init__(self, runtime: str, violations: Iterable[str]) -> None:
        super().__init__(violations, f"{runtime} cannot run this plan")


class CertificateRefused(PiperRayError):
    """A certificate that is damaged, belongs to another workload, or does not prove its bound.

    >>> issubclass(CertificateRefused, PiperRayError)
    True
    """

    exit_code = 8


class ClusterError(PiperRayError):
    """A cluster that cannot be reached or that lost too much to go on.

    >>> ClusterError.exit_code
    7
    """

    exit_code = 7


class CheckpointRefused(UsageError):
    """A checkpoint that belongs to another input or other options, is in use, or cannot be read or written.

    >>> issubclass(CheckpointRefused, PiperRayError)
    True
    """


class DatasetDamaged(UsageError):
    """Parts of a sweep's dataset are not as they were written, or are missing; ``damage`` says which, in words.

    >>> issubclass(DatasetDamaged, PiperRayError)
    True
    """

    def __init__(self, location: str, damage: Iterable[str]) -> None:
        self.damage: Sequence[str] = tuple(damage)
        super().__init__(
            f"the dataset at {location} is damaged:\n"
            + "\n".join(f"  {text}" for text in self.damage)
            + "\nRows of these are left out; the same `piper-ray sweep` with --resume solves their points again"
        )


class CheckpointLost(ClusterError):
    """Another solve has taken over the checkpoint: this one must not write any more.

    >>> issubclass(CheckpointLost, PiperRayError)
    True
    """


EXTRAS = {"ray": "ray", "matplotlib": "plot", "pygraphviz": "plot", "torch": "torch"}
"""The extra of piper-ray that installs a package, by the package's module."""


def require(module: str, what: str) -> None:
    """Raises UsageError if the package is not installed. what: what needs the package, in words."""
    if find_spec(module) is None:
        raise UsageError(f"{what} needs {module}, which is not installed: {_how(module)}")


def advice(error: ModuleNotFoundError) -> UsageError | None:
    """The error that tells the user which extra to install; None if no extra brings the missing module."""
    module = (error.name or "").partition(".")[0]
    if module not in EXTRAS or find_spec(module) is not None:
        return None
    return UsageError(f"this needs {module}, which is not installed: {_how(module)}")


def _how(module: str) -> str:
    return f"pip install 'piper-ray[{EXTRAS[module]}]'"
