"""The identity of a checkpoint: the input, the options that change evaluations, and the program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from piper_ray.model.constraints import Restrictions
from piper_ray.model.errors import CheckpointRefused
from piper_ray.model.instance import Instance
from piper_ray.model.schedule import PAPERS_SCHEDULE, Schedule, StepTerms
from piper_ray.version import __version__

FORMAT = 6
"""Version of the files. It is raised whenever an older program could misread them."""

_DIGEST = "digest"
_SCHEDULE = "schedule"
_STEP = "terms of a step"
_LINKS = "links"
_UNSAID = {_LINKS: "none within groups", _SCHEDULE: PAPERS_SCHEDULE.name.value, _STEP: "as usual"}
"""What the absence of a fact means."""

Facts = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class Identity:
    """facts: in words for the user, by what they belong to ("input", "options", "version"). Identities with the same
    texts are equal."""

    facts: Facts

    @classmethod
    def of(
        cls,
        instance: Instance,
        restrictions: Restrictions,
        schedules: Sequence[Schedule] = (PAPERS_SCHEDULE,),
        step: StepTerms = StepTerms(),
    ) -> Identity:
        """Makes the identity of an input and options. Every figure of the instance counts, to the last bit; its name
        and its own schedule do not. schedules: those under which plans may run, all of one name."""
        return cls(
            {
                "input": {
                    "devices": str(instance.devices),
                    "microbatches": str(instance.microbatches),
                    "memory": f"{_figure(instance.memory_bytes)} bytes",
                    "bandwidth": f"{_figure(instance.bandwidth_bytes_per_s)} bytes/s",
                    **_links(instance),
                    "layers": str(len(instance.layers)),
                    "edges": str(len(instance.edges)),
                    _DIGEST: instance.digest,
                },
                "options": {
                    "tensor parallelism": _allowed(restrictions.tensor_parallelism),
                    "data parallelism": _allowed(restrictions.data_parallelism),
                    "recompute": restrictions.recompute.value,
                    **({} if tuple(schedules) == (PAPERS_SCHEDULE,) else {_SCHEDULE: _schedule_text(schedules)}),
                    **({} if step == StepTerms() else {_STEP: _step_text(step)}),
                    **{type(constraint).__name__: repr(constraint) for constraint in restrictions.others},
                },
                "version": {"piper_ray": __version__, "format": str(FORMAT)},
            }
        )

    def require(self, found: Facts, location: str) -> None:
        """Raises CheckpointRefused unless ``found``, the facts of the checkpoint at ``location``, are the same."""
        if found == self.facts:
            return
        groups = [group for group in self.facts if found.get(group) != self.facts[group]]
        differences = [text for group in groups for text in _differences(found.get(group, {}), self.facts[group])]
        kinds = " and ".join(f"of {_ARTICLE[group]} {group}" for group in groups)
        raise CheckpointRefused(
            f"the checkpoint at {location} is {kinds}: {'; '.join(differences)}. "
            "Give what it was made with, or another folder"
        )


_ARTICLE = {"input": "another", "options": "other", "version": "another"}


def _differences(there: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    names = [name for name in {**here, **there} if there.get(name) != here.get(name)]
    both = [(name, *(facts.get(name, _UNSAID.get(name, "unknown")) for facts in (there, here))) for name in names]
    told = [f"{name} {of_there} there, {of_here} here" for name, of_there, of_here in both if name != _DIGEST]
    return told or ["as many layers and edges, but not the same"]


def _allowed(allowed: bool) -> str:
    return "allowed" if allowed else "forbidden"


def _figure(value: float) -> str:
    """Returns a text that differs if the value differs in the last bit."""
    return repr(value).removesuffix(".0")


def _links(instance: Instance) -> dict[str, str]:
    """Returns the links of smaller groups, if there are any."""
    inner = instance.cluster.links[:-1]
    texts = [f"{_figure(link.bandwidth_bytes_per_s)} bytes/s within {link.devices}" for link in inner]
    texts += [
        f"{_figure(x.uplink_bytes_per_s)} bytes/s out of {x.devices}" for x in inner if x.uplink_bytes_per_s is not None
    ]
    return {_LINKS: ", ".join(texts)} if texts else {}


def _schedule_text(schedules: Sequence[Schedule]) -> str:
    name, chunks = schedules[0].name.value, " or ".join(str(schedule.v) for schedule in schedules)
    return name if chunks == "1" else f"{name} with {chunks} chunks"


def _step_text(step: StepTerms) -> str:
    overlap, optimizer_s = _figure(step.all_reduce_overlap), _figure(step.optimizer_s)
    return f"{step.all_reduce.value}, overlap {overlap}, optimizer {optimizer_s} s"
