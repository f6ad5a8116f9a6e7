"""``frontier``: the least time for every number of devices. Only finds the way that the schedule asks for."""

from __future__ import annotations

from collections.abc import Sequence

from piper_ray.engine.chunks.counts import chunk_schedules
from piper_ray.engine.chunks.frontier import frontier_with_chunks
from piper_ray.engine.flush.frontier import frontier_by_degrees
from piper_ray.engine.frontier.along_curves import CurveFrontier
from piper_ray.engine.frontier.curve_events import FrontierListener, silent
from piper_ray.engine.frontier.on_levels import frontier_on_levels
from piper_ray.engine.frontier.result import Frontier as Frontier
from piper_ray.engine.frontier.result import Numbers as Numbers
from piper_ray.engine.frontier.result import rising
from piper_ray.engine.request import is_by_degrees
from piper_ray.model import arguments
from piper_ray.model.errors import UsageError
from piper_ray.model.events import Note
from piper_ray.model.instance import Instance
from piper_ray.model.options import Contract, SolveOptions
from piper_ray.model.restrictions import Restrictions
from piper_ray.model.schedule import CHUNKED, Schedule, ScheduleName
from piper_ray.model.stop import Stop
from piper_ray.workloads.formats.load import Source, on_cluster


def frontier(
    instance: Instance | Source,
    *,
    devices: Numbers | None = None,
    microbatches: int | None = None,
    memory_bytes: float | str | None = None,
    bandwidth_bytes_per_s: float | str | None = None,
    gap: float | None = None,
    time_limit: float | str | None = None,
    threads: int | None = None,
    memory_limit: float | str | None = None,
    restrictions: Restrictions = Restrictions(),
    options: SolveOptions = SolveOptions(),
    listener: FrontierListener = silent,
    stop: Stop[Frontier] | None = None,
    schedule: Schedule | ScheduleName | str | None = None,
) -> Frontier:
    """The optimum for every number of devices: 1 .. ``instance.devices``, or the rising numbers ``devices``.

    instance: may be what ``load`` takes, such as a path. devices: may be a text as on the command line, "8..64" or
    "8..64:8". microbatches, memory_bytes, bandwidth_bytes_per_s, gap, time_limit, threads, memory_limit: as ``solve``
    takes them. A limit or an interrupt ends it with what is known until then. stop: ends it as an interrupt does, and
    is offered the frontier so far. schedule: as ``solve`` takes it.

    Raises LimitError if the lattice does not fit, InputError with all faults of an instance that is not sound,
    UsageError for arguments that make no sense, and for ``options.resume`` and ``contract=OPERATORS``, which a frontier
    does not know, and StopSearch if ``stop`` asks before the search began.

    >>> import piper_ray
    >>> found = piper_ray.frontier(piper_ray.estimate("bert-large", "A100-80"), devices="1..8", threads=1)
    >>> sorted(found.by_devices()) == list(range(1, 9))
    True
    """
    arguments.of_kind("restrictions", restrictions, Restrictions, "Restrictions")
    arguments.of_kind("options", options, SolveOptions, "SolveOptions")
    options = options.changed(gap=gap, time_limit=time_limit, threads=threads, memory_limit=memory_limit)
    arguments.function("listener", listener)
    if options.resume is not None:
        raise UsageError("a frontier cannot be resumed: leave out options.resume")
    if options.contract is not Contract.SAFE:
        raise UsageError(
            f"a frontier plans single layers: leave out contract={options.contract.value!r}, or solve with it for each "
            "number of devices"
        )
    given, instance = instance, on_cluster(instance, None, microbatches, memory_bytes, bandwidth_bytes_per_s)
    if not isinstance(given, Instance):
        for note in instance.notes:
            listener(Note(note))
    wanted = rising(range(1, instance.devices + 1) if devices is None else devices, "devices", "a number of devices")
    asked = schedule or instance.schedule
    planned_for = Schedule.first_of(asked)
    most = instance.replace(devices=wanted[-1])
    with_chunks = asked is not None and planned_for.name in CHUNKED
    by_degrees = not with_chunks and is_by_degrees(planned_for, restrictions)
    if not with_chunks and not by_degrees:
        restrictions.require_stages_alone("frontier")

    def find(on: Instance, numbers: Sequence[int], within: SolveOptions, part: Stop[Frontier]) -> Frontier:
        if asked is not None and with_chunks:
            return frontier_with_chunks(on, numbers, restrictions, within, chunk_schedules(asked), listener, part)
        if by_degrees:
            return frontier_by_degrees(on, numbers, restrictions, within, planned_for, listener, part)
        return CurveFrontier(on, numbers, restrictions, within, listener, part)

    return frontier_on_levels(most, wanted, restrictions, options, planned_for, find, stop or Stop())
