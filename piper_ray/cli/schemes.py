"""``piper-ray schemes``: ways to run the layers of a model on t devices, found from their operators."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from piper_ray import Stop
from piper_ray.cli.estimate import ModelOptions, RunningOptions, TrainingOptions
from piper_ray.cli.interrupts import current
from piper_ray.cli.options import Without, of_options, option
from piper_ray.cli.shared import JsonOption
from piper_ray.cli.telling import note, refuse_unwritable, working
from piper_ray.cli.values import parse_degrees
from piper_ray.model.errors import EXIT_INTERRUPTED, UsageError
from piper_ray.storage.files import write_atomically
from piper_ray.version import __version__

if TYPE_CHECKING:
    from piper_ray.workloads.estimate.build import Estimate
    from piper_ray.workloads.schemes.frontier import KindSchemes

_MOST_DEGREE = 64


@dataclass(frozen=True)
class SchemeOptions:
    """What is searched, and what is shown of it."""

    degrees: str | None = option(
        "DEGREES",
        "Tensor-parallel degrees, as 2,4,8; if not given, those that divide the GPUs of a node.",
        "-t",
        "--tensor-parallel",
    )
    in_flight: str = option(
        "COUNTS",
        "Microbatches in flight, as 8 or 1,8,32, at which a scheme's memory is weighed against its time.",
        default="8",
    )
    show: str | None = option("ID", "Show a scheme operator by operator; ID: the beginning of its id.")
    out: Path | None = option(
        "FILE",
        "Write all schemes in full (.json), or the model's workload with each scheme as a further TMPC and in full, "
        "which solve takes (.toml).",
        "-o",
        "--out",
    )
    zero: str | None = option(
        "REPLICAS", "Offer sharing the optimizer's state among all replicas of a stage, too (.toml): all."
    )


def schemes(
    modelled: Annotated[ModelOptions, Without("site", "between_bytes_per_s")],
    asked: SchemeOptions,
    trained: TrainingOptions,
    running: RunningOptions,
    told_as: JsonOption,
) -> None:
    """Find how the layers of MODEL may run on t devices: what is sharded where, kept, and computed again.

    An integer program over a table of rules gives the schemes that no other beats in time and memory, and the names of
    those that runtimes have. Only layers that the estimator knows: no module of PyTorch is traced, and no runtime here
    takes a scheme that is called new.
    """
    from piper_ray.report.schemes import print_scheme, print_schemes
    from piper_ray.report.terminal import console
    from piper_ray.workloads.schemes.document import digest_of, schemes_document
    from piper_ray.workloads.schemes.frontier import find_schemes

    in_flight = _numbers("--in-flight", asked.in_flight, 4096)
    _refuse_mistakes(modelled, asked, running)
    estimate, degrees = _estimated(modelled, asked, trained, running)
    kinds = estimate.architecture.kinds
    pairs = [(kind, degree) for kind in kinds for degree in degrees]
    known: list[KindSchemes] = []

    def find(stop: Stop[list[KindSchemes]]) -> list[KindSchemes]:
        stop.offer(lambda: known or None)

        def tell(text: str) -> None:
            line(len(known), len(pairs), text)
            stop.check()

        for kind, degree in pairs:
            known.append(find_schemes(estimate, kind, degree, in_flight, tell))
        return known

    with working("finding schemes") as line:
        found = current().run(find)
    interrupted = current().number is not None
    if not interrupted and not any(one.found for one in found):
        raise UsageError("\n".join(f"{one.kind.name}, t = {one.degree}: {one.refused}" for one in found))
    if asked.out is not None:
        _write(asked, estimate, found, complete=not interrupted)
    if told_as.json:
        from piper_ray.report.document import to_text

        typer.echo(to_text(schemes_document(estimate, found, __version__, not interrupted)), nl=False)
    elif asked.show is not None:
        shown = [one for of in found for one in of.found if digest_of(one.scheme).startswith(asked.show)]
        if not shown:
            raise UsageError(f"--show {asked.show}: no such scheme; expected the beginning of an id in the table")
        for one in shown:
            print_scheme(console(), one)
    else:
        print_schemes(console(), estimate, found)
    if interrupted:
        current().tell("these are the schemes of the layers that were done")
        raise typer.Exit(EXIT_INTERRUPTED)


def _numbers(option: str, text: str, most: int) -> tuple[int, ...]:
    found = parse_degrees(option, text)
    if not found or found[0] < 1 or found[-1] > most:
        raise UsageError(f"{option} {text}: expected numbers from 1 to {most}, such as 1,8")
    return found


def _refuse_mistakes(modelled: ModelOptions, asked: SchemeOptions, running: RunningOptions) -> None:
    """Raises UsageError, before any work."""
    if len(modelled.gpus) > 1 or ":" in modelled.gpus[0]:
        raise UsageError(f"--gpu {','.join(modelled.gpus)}: schemes are of one kind of GPU; expected one name")
    if asked.out is not None:
        if asked.out.suffix.lower() not in (".toml", ".json"):
            raise UsageError(f"--out {asked.out}: unknown kind of file; expected a path that ends in .json or .toml")
        refuse_unwritable("--out", asked.out)
        if asked.out.suffix.lower() == ".toml" and modelled.nodes is None:
            raise UsageError(f"--out {asked.out}: a workload is for a cluster; expected --nodes COUNT, too")
    if asked.zero not in (None, "all"):
        raise UsageError(f"--zero {asked.zero}: expected all")
    if running.precision == "fp8":
        raise UsageError("--precision fp8: what is kept in 8 bits has no rules yet; expected bf16 or fp16")
    if modelled.model.endswith(".py") or ":" in modelled.model:
        raise UsageError(
            f"{modelled.model}: modules of PyTorch are not traced for schemes yet; expected a config.json or the name "
            "of a known model"
        )


def _estimated(
    modelled: ModelOptions, asked: SchemeOptions, trained: TrainingOptions, running: RunningOptions
) -> tuple[Estimate, tuple[int, ...]]:
    from piper_ray.workloads.estimate.build import EstimateRequest, estimate
    from piper_ray.workloads.estimate.modes import Offer

    model, hardware = modelled.read()
    gpu = modelled.gpus[0]
    request = of_options(
        EstimateRequest,
        modelled,
        trained,
        running,
        nodes=modelled.nodes or 1,
        fused=not trained.unfused_attention,
        offer=Offer(zero=0 if asked.zero else 1),
    )
    found = estimate(model, hardware, gpu, modelled.calibrated_on(gpu, model, hardware, request))
    for text in found.instance.notes:
        note(text)
    domain = found.setting.stack.domain
    usual = tuple(t for t in range(2, domain + 1) if domain % t == 0 and t <= _MOST_DEGREE)
    degrees = usual if asked.degrees is None else _numbers("-t", asked.degrees, _MOST_DEGREE)
    if wrong := [t for t in degrees if t < 2 or domain % t]:
        raise UsageError(f"-t {wrong[0]}: no part of the {domain} GPUs that share a link; expected some of {usual}")
    return found, degrees


def _write(asked: SchemeOptions, estimate: Estimate, found: list[Any], *, complete: bool) -> None:
    from piper_ray.report.document import to_text, workload_text
    from piper_ray.workloads.schemes.document import schemes_document
    from piper_ray.workloads.schemes.tmpcs import with_schemes

    assert asked.out is not None
    if asked.out.suffix.lower() == ".json":
        write_atomically(asked.out, to_text(schemes_document(estimate, found, __version__, complete)))
        return
    instance = with_schemes(estimate, found, zero=asked.zero is not None)
    lines = ["TMPCs whose ids have a word scheme-... were found from operators; [schemes] has them in full."]
    write_atomically(
        asked.out, workload_text(instance, lines if complete else [*lines, "Interrupted: not all layers."])
    )
