"""``piper-ray warm``: kernels compiled beforehand, so that nothing waits for it later."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from typing import TYPE_CHECKING

import typer

from piper_ray import Edge, Instance, Layer, Stop, Tensor, Tmpc
from piper_ray.cli.interrupts import current
from piper_ray.cli.options import option
from piper_ray.cli.telling import working

if TYPE_CHECKING:
    from piper_ray.report.terminal import Working


@dataclass(frozen=True)
class WarmOptions:
    """How many processes compile."""

    processes: int | None = option("COUNT", "Processes at the same time; one for each core if not given.", min=1)


def warm(asked: WarmOptions) -> None:
    """Compile the kernels of all commands beforehand, in several processes side by side.

    They are kept, so that no later command of this version waits for it: on this machine, and on those that get a copy
    of the folder, such as those of a container image.
    """
    from piper_ray.compiled.jit import cache_folders
    from piper_ray.model.cores import usable_cores

    began = time.perf_counter()

    def compiled(stop: Stop[float], line: Working) -> float:
        # Processes that begin anew: what this one has loaded is none of theirs.
        with ProcessPoolExecutor(asked.processes or usable_cores(), get_context("spawn"), _end_with_parent) as pool:
            parts = [pool.submit(compile_part, name) for name in PARTS]
            for done, part in enumerate(as_completed(parts), start=1):
                stop.check()
                part.result()
                line(done, len(parts))
        return time.perf_counter() - began

    with working("compiling") as line:
        seconds = current().run(lambda stop: compiled(stop, line))
    folder = next((folder for folder in cache_folders() if folder.is_dir()), cache_folders()[-1])
    typer.echo(f"kernels are ready in {folder}, in {seconds:.0f} s")


def _end_with_parent() -> None:
    """Lets this process end as soon as its parent has ended: a signal may have ended that alone."""
    parent = parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def compile_part(name: str) -> None:
    """Uses the kernels of one of ``PARTS``."""
    PARTS[name]()


def _layers() -> None:
    import piper_ray

    for tensors in (False, True):
        piper_ray.solve(_chain(40, tensors), threads=1, schedule="2bw")
    piper_ray.solve(_chain(40), threads=1, schedule="2bw", contract="operators")
    piper_ray.frontier(_chain(6), devices=[2, 4], schedule="2bw")


def _dual_prices() -> None:
    from piper_ray.engine.evaluation.dual_prices import StageCover
    from piper_ray.engine.preparation import prepare
    from piper_ray.engine.tables.problem import build_problem
    from piper_ray.model.constraints import Restrictions

    instance = _chain(8)
    workload = prepare(instance, Restrictions()).workload
    assert workload is not None
    cover = StageCover.of(build_problem(workload, instance, Restrictions().data_parallel_degrees(instance)))
    assert cover is not None
    cover.dual_prices(4.0)


def _flush() -> None:
    import piper_ray
    from piper_ray.model.schedule import FLUSHED

    for schedule in sorted(FLUSHED):
        solution = piper_ray.solve(_chain(8), threads=1, schedule=schedule)
        assert solution.plan is not None
        piper_ray.simulate(_chain(8), solution.plan, schedule)


def _wide_graphs() -> None:
    from dataclasses import replace

    import piper_ray
    from piper_ray.cost.variants import usable_variants
    from piper_ray.engine.flush.border_bound import border_labelling
    from piper_ray.engine.flush.mixes import BorderRates
    from piper_ray.engine.flush.tables import build_workload
    from piper_ray.engine.flush.tasks import list_tasks
    from piper_ray.engine.lattice.contraction import without_contraction
    from piper_ray.engine.lattice.downsets import build_lattice
    from piper_ray.engine.lattice.labelling import Labelling
    from piper_ray.engine.lattice.layer_graph import build_graph
    from piper_ray.model.constraints import Restrictions
    from piper_ray.model.schedule import Schedule, StepTerms

    piper_ray.solve(_chain(90, chains=2), threads=1, schedule="gpipe")
    instance, schedule, every = _chain(8, chains=2), Schedule.of("gpipe"), Restrictions()
    graph = build_graph(instance, without_contraction())
    rates = BorderRates.of(instance, graph, schedule)
    workload = build_workload(instance, build_lattice(graph, 100), usable_variants(instance, every), rates)
    workload = replace(workload, border_labelling=border_labelling(graph), stage_labelling=Labelling.of(graph))
    task = list_tasks(instance, workload, schedule, every, StepTerms())[0]
    bound = workload.borders(task.arrays.bounding)
    assert bound is not None
    assert bound.by_stages is not None
    bound.by_stages.least_s(workload.arrays, task.arrays, 0.0, 10.0 * task.lower_s, lambda: False)


def _chunks() -> None:
    import piper_ray

    for layers, chains in ((8, 1), (30, 1), (8, 2)):  # all plans are gone through, or some of them; and sets of layers
        piper_ray.solve(_chain(layers, chains=chains), threads=1, schedule="interleaved", time_limit=1.0)


def _certificates() -> None:
    import numpy as np

    import piper_ray
    from piper_ray.certificate.certificate import Certificate, Tails
    from piper_ray.certificate.check import verify_certificate
    from piper_ray.certificate.flush_check import FlushProblem
    from piper_ray.model.constraints import Restrictions
    from piper_ray.model.schedule import Schedule, StepTerms

    instance = _chain(8)
    nothing = np.zeros(1, np.int64)
    tails = Tails(instance.devices, tuple(range(8))[::-1], {}, np.zeros((1, 1), np.uint8), nothing, nothing)
    # Work alone takes longer: there is nothing to find out.
    verify_certificate(instance, Certificate(instance.digest, "", Restrictions(), 1e-9, (tails,)), threads=1)
    found = piper_ray.solve(instance, threads=1, schedule="1f1b")
    verify_certificate(instance, piper_ray.certify(instance, found, threads=1), threads=1)
    pair = FlushProblem(instance, Restrictions(), Schedule.of("1f1b"), StepTerms()).pairs()[0]
    FlushProblem(instance, Restrictions(), Schedule.of("1f1b"), StepTerms()).look(pair, None, 1e-9, np.zeros(1))


def _baselines() -> None:
    import piper_ray

    for planner in ("pipedream", "piper-published"):
        piper_ray.baselines.plan(_chain(8), planner)


PARTS: dict[str, Callable[[], None]] = {
    "layers": _layers,
    "flush": _flush,
    "chunks": _chunks,
    "dual prices": _dual_prices,
    "certificates": _certificates,
    "baselines": _baselines,
    "wide graphs": _wide_graphs,
}
"""The parts to warm, those that take longest first; the last one needs most kernels of the second."""


def _chain(size: int, with_tensor: bool = False, chains: int = 1) -> Instance:
    """A chain, or several side by side, of layers that may recompute, with too little memory for none to do so."""
    layers = []
    for layer in range(size):
        tmpcs = {
            t: (
                Tmpc("plain", (4.0 + layer % 3) / t, 1.0, 4.0 / t, 1.0),
                Tmpc("recompute", (5.0 + layer % 2) / t, 1.0, 1.0 / t, 1.0, recompute=True),
            )
            for t in (1, 2)
        }
        layers.append(Layer(layer, f"layer {layer}", tmpcs))
    edges = tuple(Edge(layer, layer + 1, 0.1) for layer in range(size - 1) if (layer + 1) % (size // chains))
    tensors = (Tensor((0, 1, 2), 0.1, 0.1),) if with_tensor else ()
    return Instance(tuple(layers), edges, 8, 8, 2.5 * size, 1.0, tensors=tensors)
