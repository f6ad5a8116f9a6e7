"""Every error a user can meet, each with the exit code the command line gives for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

EXIT_SOLVED = 0
EXIT_INTERRUPTED = 130


class PiperRayError(Exception):
    """Base of all errors of piper_ray. What reaches the user is ``str(error)``, never a traceback."""

    exit_code: ClassVar[int] = 1


class UsageError(PiperRayError):
    """An option or argument that makes no sense: unknown unit, negative limit, two that contradict."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong with an input: where it is, and what was expected there.

    ``path`` is written as a reader would look it up: ``nodes[3].TMPCs["2"][0].timePerSample`` in a file,
    ``layers[3].tmpcs[2][0].time_per_sample_s`` in an object.
    """

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class InputError(PiperRayError):
    """A file, dict or object that is no valid instance or plan; ``faults`` lists all that was found."""

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


class InfeasibleError(PiperRayError):
    """No plan exists under the given devices, memory and restrictions."""

    exit_code = 4


class LimitError(PiperRayError):
    """The solve would need more than a limit allows; the message names the figures and the option that raises it."""

    exit_code = 5


class ChoiceTooHard(LimitError):
    """A stage whose best TMPCs cannot be told from others exactly: too many partial choices are as good."""

    def __init__(self) -> None:
        super().__init__(
            "the exact TMPC choice of a stage has more than a million partial choices to compare: its layers all "
            "differ and all save memory at about the same rate. Give the layers fewer TMPCs, or let each stage "
            "recompute as a whole (--recompute all-or-none)"
        )


class InvalidPlan(PiperRayError):
    """A plan that breaks a rule of the problem; ``violations`` says which, stage by stage."""

    exit_code = 6

    def __init__(self, violations: Iterable[str]) -> None:
        self.violations: Sequence[str] = tuple(violations)
        super().__init__("the plan is not valid:\n" + "\n".join(f"  {text}" for text in self.violations))


class CertificateRefused(PiperRayError):
    """A certificate that is damaged, of another workload, or does not prove its bound."""

    exit_code = 8


class ClusterError(PiperRayError):
    """A cluster that cannot be reached or that lost too much to go on."""

    exit_code = 7


class CheckpointRefused(UsageError):
    """A checkpoint that cannot be opened: of another input or other options, in use, or not to be read or written."""


class DatasetDamaged(UsageError):
    """Parts of a sweep's dataset are not as they were written, or are missing; ``damage`` says which, in words."""

    def __init__(self, location: str, damage: Iterable[str]) -> None:
        self.damage: Sequence[str] = tuple(damage)
        super().__init__(
            f"the dataset at {location} is damaged:\n"
            + "\n".join(f"  {text}" for text in self.damage)
            + "\nRows of these are left out; the same `piper-ray sweep` with --resume solves their points again"
        )


class CheckpointLost(ClusterError):
    """Another solve has taken over the checkpoint: this one must not write any more."""
