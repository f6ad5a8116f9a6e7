"""``piper-ray schemes``: ways to run the layers of a model on t devices, found from their operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from piper_ray import Stop
from piper_ray.cli.estimate import ModelOptions, RunningOptions, TrainingOptions
from piper_ray.cli.interrupts import current
from piper_ray.cli.options import Without, flag, of_options, option
from piper_ray.cli.shared import JsonOption
from piper_ray.cli.telling import note, refuse_unwritable, show_document, working, write_document
from piper_ray.cli.values import parse_degrees
from piper_ray.model.errors import EXIT_INTERRUPTED, UsageError
from piper_ray.model.figures import plural
from piper_ray.storage.files import write_atomically
from piper_ray.version import __version__

if TYPE_CHECKING:
    from piper_ray.workloads.estimate.build import Estimate
    from piper_ray.workloads.schemes.document import SchemesSubject
    from piper_ray.workloads.schemes.frontier import KindSchemes

    _Find = Callable[[Callable[[str], None]], KindSchemes]

_MOST_DEGREE = 64
_USUAL_MICROBATCHES = 8


@dataclass(frozen=True)
class SchemeOptions:
    """What is searched, and what is shown of it."""

    degrees: str | None = option(
        "DEGREES",
        "Tensor-parallel degrees, such as 2,4,8; if not given, those that divide the GPUs of a node.",
        "-t",
        "--tensor-parallel",
    )
    in_flight: str = option(
        "COUNTS",
        "Microbatches in flight, such as 8 or 1,8,32, at which a scheme's memory is weighed against its time.",
        default="8",
    )
    show: str | None = option("ID", "Show a scheme operator by operator; ID: the beginning of its id.")
    picture: Path | None = option(
        "FILE", "With --show, draw the scheme's operators with placements, as FILE.svg, .png or .pdf."
    )
    out: Path | None = option(
        "FILE",
        "Write all schemes in full (.json), or the model's workload with each scheme as a further TMPC and in full, "
        "which solve takes (.toml); with --show, the sharding of a PyTorch module by module path, which torchtitan "
        "takes (.py).",
        "-o",
        "--out",
    )
    strict: bool = flag("Refuse a module of PyTorch that has an operator without a rule, in place of a note.")
    plan: Path | None = option(
        "FILE",
        "Also find the schemes that are cheaper at the prices of memory of a plan: FILE is what solve wrote for the "
        "workload of the same command, under 1f1b or gpipe. Says how much of the slowest stage others could save.",
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
    those that runtimes have. MODEL may be a module of PyTorch, as model.py:factory, which is traced: its layers are
    found as profile finds them. Megatron takes no scheme that is called new; torchtitan takes those of modules that a
    sharding by module path can say.
    """
    from piper_ray.report.schemes import draw_scheme, print_scheme, print_schemes
    from piper_ray.report.terminal import console, print_lines
    from piper_ray.workloads.schemes.document import SchemesSubject, digest_of, saved_text, schemes_document
    from piper_ray.workloads.schemes.frontier import find_schemes

    in_flight = _numbers("--in-flight", asked.in_flight, 4096)
    _refuse_mistakes(modelled, asked, running)
    estimate: Estimate | None = None
    finds: list[tuple[str, _Find]]
    if _is_module(modelled.model):
        subject, finds = _of_module(modelled, asked, trained, running, in_flight)
    else:
        estimate, degrees = _estimated(modelled, asked, trained, running)
        subject = SchemesSubject(estimate.architecture.name, estimate.architecture.sample, estimate.setting.gpu.name)
        pairs = [(kind, degree) for kind in estimate.architecture.kinds for degree in degrees]
        finds = [(kind.name, partial(find_schemes, estimate, kind, degree, in_flight)) for kind, degree in pairs]
    known: list[KindSchemes] = []

    def find(stop: Stop[list[KindSchemes]]) -> list[KindSchemes]:
        stop.offer(lambda: known or None)

        def tell(text: str) -> None:
            line(len(known), len(finds), text)
            stop.check()

        for _, find_one in finds:
            known.append(find_one(tell))
        if asked.plan is None or estimate is None:
            return known
        from piper_ray.proposal.scheme_prices import asked_by_plan

        asked_for.append(asked_by_plan(asked.plan, estimate, known, asked.zero is not None, stop.check, note))
        return asked_for[0][0]

    asked_for: list[tuple[list[KindSchemes], float]] = []
    with working("finding schemes") as line:
        found = current().run(find)
    interrupted = current().number is not None
    if not interrupted and not any(one.found for one in found):
        raise UsageError("\n".join(f"{one.name}, t = {one.degree}: {one.refused}" for one in found))
    if asked.out is not None and asked.out.suffix.lower() != ".py":
        _write(asked, subject, estimate, found, complete=not interrupted)
    if told_as.json:
        save = asked_for[0][1] if asked_for else None
        show_document(schemes_document(subject, found, __version__, not interrupted, save))
    elif asked.show is not None:
        shown = [one for of in found for one in of.found if digest_of(one.scheme).startswith(asked.show)]
        if not shown:
            raise UsageError(f"--show {asked.show}: no such scheme; expected the beginning of an id in the table")
        for one in shown:
            print_scheme(console(), one)
        if asked.picture is not None:
            (of,) = (one.priced for one in found if shown[0] in one.found)
            assert of is not None
            draw_scheme(shown[0], of, asked.picture)
        if asked.out is not None and asked.out.suffix.lower() == ".py":
            from piper_ray.export.torchtitan_model import sharding_text

            samples = trained.samples or 1
            write_atomically(asked.out, sharding_text(modelled.model, samples, shown[0].name, shown[0].scheme))
    else:
        print_schemes(console(), subject, found)
        if asked_for:
            print_lines(console(), ["", f"{asked.plan}: {saved_text(asked_for[0][1])}"])
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
        kind = asked.out.suffix.lower()
        if kind not in (".toml", ".json", ".py"):
            raise UsageError(
                f"--out {asked.out}: unknown kind of file; expected a path that ends in .json, .toml or .py"
            )
        if kind == ".py" and (asked.show is None or not _is_module(modelled.model)):
            raise UsageError(f"--out {asked.out}: expected a PyTorch module, such as model.py:factory, and --show ID")
        refuse_unwritable("--out", asked.out)
        if asked.out.suffix.lower() == ".toml" and modelled.nodes is None:
            raise UsageError(f"--out {asked.out}: a workload is for a cluster; expected --nodes COUNT, too")
    if asked.picture is not None:
        if asked.show is None or asked.picture.suffix.lower() not in (".svg", ".png", ".pdf"):
            raise UsageError(
                f"--picture {asked.picture}: expected --show ID, and a path that ends in .svg, .png or .pdf"
            )
        refuse_unwritable("--picture", asked.picture)
    if asked.zero not in (None, "all"):
        raise UsageError(f"--zero {asked.zero}: expected all")
    if running.precision == "fp8":
        raise UsageError("--precision fp8: schemes have no rules for 8-bit tensors yet; expected bf16 or fp16")
    if _is_module(modelled.model) and asked.out is not None and asked.out.suffix.lower() == ".toml":
        raise UsageError(f"--out {asked.out}: profile writes a module's workload; expected a path that ends in .json")
    if asked.plan is not None and (_is_module(modelled.model) or modelled.nodes is None):
        raise UsageError(f"--plan {asked.plan}: expected a model that estimate knows, and a cluster (--nodes COUNT)")
    if asked.strict and not _is_module(modelled.model):
        raise UsageError("--strict is for modules of PyTorch, such as model.py:factory")


def _is_module(model: str) -> bool:
    return ":" in model


def _of_module(
    modelled: ModelOptions,
    asked: SchemeOptions,
    trained: TrainingOptions,
    running: RunningOptions,
    in_flight: tuple[int, ...],
) -> tuple[SchemesSubject, list[tuple[str, _Find]]]:
    """The layers of a traced module. Raises UsageError."""
    from piper_ray.workloads.estimate.build import EstimateRequest
    from piper_ray.workloads.estimate.costs import Setting
    from piper_ray.workloads.estimate.hardware import load_hardware
    from piper_ray.workloads.measure.operators import traced_layers
    from piper_ray.workloads.schemes.document import SchemesSubject
    from piper_ray.workloads.schemes.frontier import find_traced

    hardware = load_hardware(modelled.hardware, note)
    gpu = hardware.gpu(modelled.gpus[0])
    stack = of_options(EstimateRequest, modelled, trained, running, nodes=modelled.nodes or 1).stack(gpu)
    samples = trained.samples or 1
    batches = max(1, trained.batch // samples) if trained.batch else _USUAL_MICROBATCHES
    setting = Setting(stack, hardware.training, batches, 0.0, 0.0, 1)
    degrees = _degrees(asked, stack.domain)
    layers = traced_layers(modelled.model, samples)
    for layer in layers:
        unruled = [*layer.unruled(setting)]
        if unruled and asked.strict:
            raise UsageError("\n".join(f"--strict: {text}" for text in unruled))
        for text in unruled:
            note(text)
    pairs = [(layer, degree) for layer in layers for degree in degrees]
    finds: list[tuple[str, _Find]] = [
        (x.graph.name, partial(find_traced, x, setting, degree, in_flight)) for x, degree in pairs
    ]
    return SchemesSubject(modelled.model, f"microbatches of {plural(samples, 'sample')}", gpu.name), finds


def _degrees(asked: SchemeOptions, domain: int) -> tuple[int, ...]:
    """Raises UsageError."""
    usual = tuple(t for t in range(2, domain + 1) if domain % t == 0 and t <= _MOST_DEGREE)
    degrees = usual if asked.degrees is None else _numbers("-t", asked.degrees, _MOST_DEGREE)
    if wrong := [t for t in degrees if t < 2 or domain % t]:
        raise UsageError(
            f"-t {wrong[0]}: does not divide the {domain} GPUs that share a link; expected some of {usual}"
        )
    return degrees


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
    return found, _degrees(asked, found.setting.stack.domain)


def _write(
    asked: SchemeOptions, subject: SchemesSubject, estimate: Estimate | None, found: list[Any], *, complete: bool
) -> None:
    from piper_ray.report.document import workload_text
    from piper_ray.workloads.schemes.document import schemes_document
    from piper_ray.workloads.schemes.tmpcs import with_schemes

    assert asked.out is not None
    if asked.out.suffix.lower() == ".json":
        write_document(asked.out, schemes_document(subject, found, __version__, complete))
        return
    assert estimate is not None
    instance = with_schemes(estimate, found, zero=asked.zero is not None)
    lines = ["TMPCs whose ids have a word scheme-... were found from operators; [schemes] has them in full."]
    write_atomically(
        asked.out, workload_text(instance, lines if complete else [*lines, "Interrupted: not all layers."])
    )
