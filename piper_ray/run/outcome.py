"""What a rank's process hands its launcher: the run, or what went wrong, as JSON."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from piper_ray.model.errors import ClusterError, Fault, InputError, LimitError, PiperRayError, UsageError
from piper_ray.run.job import Job
from piper_ray.run.result import RankRun, Run, Stretch

_KINDS: dict[str, type[PiperRayError]] = {
    kind.__name__: kind for kind in (UsageError, InputError, LimitError, ClusterError, PiperRayError)
}


@dataclass(frozen=True)
class Failure:
    """kind: name of an error's class. own: the rank's own fault; False: it lost the others, who may have one."""

    kind: str
    message: str
    source: str
    faults: tuple[tuple[str, str], ...]
    own: bool

    @classmethod
    def of(cls, error: PiperRayError) -> Failure:
        """An error that is told as it is."""
        kind = next(name for name, known in _KINDS.items() if isinstance(error, known))
        if isinstance(error, InputError):
            return cls(kind, "", error.source, tuple((fault.path, fault.message) for fault in error.faults), own=True)
        return cls(kind, str(error), "", (), own=True)

    @classmethod
    def lost(cls, message: str) -> Failure:
        """The rank could not go on: as a rule since another one did not."""
        return cls(ClusterError.__name__, message, "", (), own=False)

    def error(self) -> PiperRayError:
        """What the launcher raises."""
        if self.kind == InputError.__name__:
            return InputError(self.source, [Fault(*fault) for fault in self.faults])
        return _KINDS[self.kind](self.message)

    def to_dict(self) -> dict[str, object]:
        """Ready for ``json.dumps``."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, read: dict[str, Any]) -> Failure:
        """What ``to_dict`` gave."""
        return cls(**read | {"faults": tuple(map(tuple, read["faults"]))})


def run_to_json(run: Run) -> str:
    """What ``run_from_json`` reads."""
    fields = {field.name: getattr(run, field.name) for field in dataclasses.fields(run) if field.name != "simulation"}
    fields["job"] = json.loads(run.job.to_json())
    fields["ranks"] = [dataclasses.asdict(rank) for rank in run.ranks]
    return json.dumps(fields)


def run_from_json(text: str) -> Run:
    """What ``run_to_json`` wrote."""
    read: dict[str, Any] = json.loads(text)
    ranks = []
    for rank in read["ranks"]:
        stretches = tuple(Stretch(**stretch) for stretch in rank["stretches"])
        ranks.append(RankRun(**rank | {"stages": tuple(rank["stages"]), "stretches": stretches}))
    return Run(
        **read
        | {
            "job": Job.from_json(json.dumps(read["job"])),
            "ranks": tuple(ranks),
            "steps_s": tuple(read["steps_s"]),
            "losses": tuple(read["losses"]),
        }
    )
