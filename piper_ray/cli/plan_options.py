"""The options of ``piper-ray plan``, in the groups that its help has, and what they ask for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, ClassVar

from piper_ray import ScheduleName
from piper_ray.cli.estimate import EveryOfferOption, ModelOptions, RunningOptions, parse_replicas
from piper_ray.cli.options import REQUIRED, flag, of_options, option
from piper_ray.cli.shared import LaunchOptions, StepOptions
from piper_ray.cli.telling import note, once
from piper_ray.cli.values import Several, parse_degrees, parse_size, several
from piper_ray.export.files import Target
from piper_ray.model.errors import UsageError
from piper_ray.model.headroom import Headroom
from piper_ray.model.units import parse_count
from piper_ray.runtimes.runtime import RUNTIMES, RuntimeName

if TYPE_CHECKING:
    from piper_ray import TrainedModel
    from piper_ray.proposal.demand import PlanDemand
    from piper_ray.proposal.offers import PlanQuestion
    from piper_ray.workloads.estimate.config import ModelConfig
    from piper_ray.workloads.estimate.hardware import Hardware


def _ends(part: str, expected: str) -> tuple[int, int]:
    """The ends of ``8..64``; of ``8`` both are the same. Raises UsageError."""
    first, dots, last = part.partition(2 * ".")
    try:
        low, high = int(first), int(last) if dots else int(first)
    except ValueError:
        low = high = 0
    if low < 1 or high < low:
        raise UsageError(f"{part.strip()!r}: expected {expected}")
    return low, high


def parse_nodes(text: str) -> Several:
    """``8``, ``8,12``, or ``8..64``: 8, 16, 32 and 64. Raises UsageError."""
    found: list[int] = []
    for part in text.split(","):
        low, high = _ends(part, "numbers of nodes, such as 8 or 8,12, or 8..64 for 8,16,32,64")
        while low < high:
            found.append(low)
            low *= 2
        found.append(high)
    nodes = Several(sorted(set(found)))
    nodes.text = text.strip()
    return nodes


def parse_batches(text: str) -> Several:
    """``1024``, ``960,1024``, or ``960..1056``: ends of each part. Raises UsageError."""
    expected = "samples, such as 1024 or 960,1024, or 960..1056 for a curve"
    batches = Several(_ends(part, expected) for part in text.split(","))
    batches.text = text.strip()
    return batches


def parse_precision(text: str) -> str:
    """The name of a precision. Raises UsageError."""
    from piper_ray.workloads.estimate.software import precision_named

    return precision_named(text).value


def parse_money(text: str) -> float:
    """``2.5``. Raises UsageError."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0.0 <= found < math.inf:
        raise UsageError(f"{text}: expected an amount of money")
    return found


def parse_headroom(text: str) -> Headroom:
    """``4GiB``, ``8%`` or ``0.08``. Raises UsageError."""
    from piper_ray.proposal.offers import headroom_of

    return headroom_of(text)


@dataclass(frozen=True)
class PlanClusterOptions(ModelOptions):
    """MODEL and the cluster."""

    panel: ClassVar[str] = "Model and cluster"

    gpu: list[str] = option(
        "NAME",
        "The GPU, such as H100-SXM; H100-SXM,B200 shows a table of both. Several kinds in one cluster, each with its "
        "nodes: --gpu A100-80:32 --gpu H100-SXM:32.",
        default=REQUIRED,
    )
    nodes: Any = option(
        "COUNT",
        "Nodes of the cluster; 8,12 or 8..64 (8, 16, 32, 64) shows a table.",
        parse=parse_nodes,
    )

    def refuse_mistakes(self) -> None:
        """Raises UsageError for clusters that are not said or cannot be planned."""
        super().refuse_mistakes()
        if len(self.gpus) > 1 and self.calibrate is not None:
            raise UsageError("--calibrate: measurements are of one GPU, and several are asked about")

    @property
    def clusters(self) -> list[tuple[str, int]]:
        """Pairs of a GPU and a number of nodes: a row of a table each, or the kinds of one cluster."""
        kinds = [(self.gpu_of(kind), count) for kind, count in self.nodes_of_kinds.items()]
        return kinds or [(gpu, count) for gpu in self.gpus for count in self.nodes or ()]


@dataclass(frozen=True)
class WrittenOptions:
    """What is shown and written."""

    panel: ClassVar[str] = "Answer"

    out: Path | None = option("DIR", "The folder for plan, workload, report and launch files.", "-o", "--out")
    dry_run: bool = flag("Show the answer and write no files.")
    json: bool = flag("Print one JSON document on stdout and nothing else there.")
    verbose: bool = flag("Show on stderr what was tried, and how each combination was closed.")
    candidates: int = option(
        "K",
        "Write the best K plans whose launch files differ, as jobs to measure, to DIR/1 to DIR/K.",
        default=1,
        min=1,
        max=20,
    )
    against: str | None = option("FILE", "A launch file or exported folder to compare with the plan.")
    spare: int = option(
        "N", "Also plan for up to N nodes fewer, and say what moving from one plan to the next takes.", default=0, min=0
    )

    def refuse_mistakes(self, table: bool, kinds: bool) -> None:
        """Raises UsageError for what does not go together, before any work. table: of several clusters; kinds: of one
        cluster with several of GPUs."""
        there = next((one for one in (self.out, *self.out.parents) if one.exists()), None) if self.out else None
        if there is not None and not there.is_dir():
            is_file = "is a file" if there == self.out else f"{there} is a file"
            raise UsageError(f"--out {self.out}: {is_file}; expected a folder")
        if there is not None:
            try:  # before a search that may take minutes
                with TemporaryFile(dir=there):
                    pass
            except OSError as error:
                raise UsageError(f"--out {self.out}: no file can be made in {there}: {error.strerror}") from None
        if self.out is None and not (self.dry_run or self.json or table):
            raise UsageError("expected --out DIR for the files, or --dry-run or --json for the answer alone")
        if self.out is not None and self.dry_run:
            raise UsageError("--dry-run writes no files: leave out --out")
        if self.candidates > 1 and self.out is None:
            raise UsageError("--candidates needs --out DIR: each is a job in a folder there")
        others = {"--candidates": self.candidates > 1, "--against": self.against is not None, "--spare": self.spare > 0}
        if kinds and others["--candidates"]:
            raise UsageError(
                "--candidates is for one kind of GPU at one site: its jobs are to be measured for --calibrate, which "
                "corrects the constants of one"
            )
        if table and any(others.values()):
            name = next(name for name, given in others.items() if given)
            raise UsageError(f"{name} is for one GPU, number of nodes, batch and headroom, not for a table of several")
        if sum(others.values()) > 1:
            names = [name for name, given in others.items() if given]
            raise UsageError(f"{names[0]} and {names[1]}: give one of them")


@dataclass(frozen=True)
class TrainedOptions:
    """What is trained, by what."""

    panel: ClassVar[str] = "Training"

    runtime: RuntimeName = option(
        "NAME",
        f"The framework that trains: {', '.join(name.value for name in RuntimeName)}. Plans keep to what it can run.",
        default=RuntimeName.MEGATRON,
    )
    batches: Any = option(
        "SAMPLES",
        "Samples of a batch, over all replicas; 960,1024 or 960..1056 shows a table. If left out, a usual size "
        "divisible by the GPUs.",
        "--global-batch",
        parse=parse_batches,
    )
    samples: int | None = option(
        "SAMPLES",
        "Only this size; if left out, all that divide the batch: up to 16, then powers of two.",
        "--microbatch-size",
        min=1,
    )
    schedule: ScheduleName | None = option(
        "NAME", "Only this schedule; if left out, 1f1b, and interleaved if the runtime has it."
    )
    software: str | None = option(
        "NAME", "The generation of training software whose times count, in place of the runtime's own."
    )
    lora: int = option(
        "RANK",
        "Train adapters of this rank for every matrix of the layers (LoRA); 0 trains the model itself.",
        default=0,
        min=0,
    )
    unfused_attention: bool = flag("Attention that keeps its scores, as before FlashAttention.")
    train_tokens: int | None = option(
        "COUNT", "Tokens of the whole training, such as 15T, to show its days.", parse=parse_count
    )
    price: Any = option(
        "MONEY",
        "The price of one GPU for one hour, in any currency, such as 2.5; with --train-tokens the cost of the "
        "training is shown. For several GPUs one price each, such as 2.10,3.50.",
        parse=partial(several, parse_money),
    )

    def refuse_mistakes(self, gpus: int, table: bool) -> None:
        """Raises UsageError, before any work."""
        if self.train_tokens is not None and self.train_tokens < 1:
            raise UsageError(f"--train-tokens must be at least 1, not {self.train_tokens}")
        if self.price is None:
            return
        if not table and self.train_tokens is None:
            raise UsageError("--price needs --train-tokens, the length of the training whose cost is shown")
        if len(self.price) not in (1, gpus):
            raise UsageError(f"--price has {len(self.price)} prices for {gpus} GPUs; expected one each, or one for all")

    def prices(self, gpus: int) -> tuple[float | None, ...]:
        """The prices of each GPU; None where none is given."""
        if self.price is None:
            return (None,) * gpus
        return tuple(self.price) * (gpus if len(self.price) == 1 else 1)


@dataclass(frozen=True)
class MemoryRoomOptions:
    """What of a GPU's memory is left."""

    panel: ClassVar[str] = "Memory"

    headroom: Any = option(
        "SIZE|SHARE",
        "Memory of each GPU to leave free, such as 4GiB or 8%; 0,4%,8% shows a table. If left out, as much as 9 in 10 "
        "published peaks ask for.",
        parse=partial(several, parse_headroom),
    )
    reserve_bytes: float | None = option(
        "SIZE",
        "Leave this much of each GPU for CUDA's context, communicators and the allocator's fragments, such as 5GiB, in "
        "place of what is usual.",
        parse=parse_size,
    )
    host_memory_bytes: float | None = option(
        "SIZE",
        "How much of a node's own memory the optimizer's state may take, such as 1TB; if left out, all that such nodes "
        "usually have: 1.8 TB with 8 H100, 1 TB with 8 A100 (host_memory of --hardware).",
        parse=parse_size,
    )


@dataclass(frozen=True)
class PlanOfferOptions(EveryOfferOption):
    """The offered ways with the optimizer's state over all replicas, if nothing else is asked for."""

    panel: ClassVar[str] = "Parallelism"

    zero: int = option(
        "SHARDS",
        "Offer sharding the optimizer's state (ZeRO-1) over this many replicas, in stages that have as many; all: over "
        "all replicas of a stage; 1: no sharding.",
        default="all",  # read as an option's text is, and shown in the help
        parse=parse_replicas,
    )
    context_exchange: str | None = option(  # type: ignore[assignment]  # where none is given it is the runtime's own
        "NAME",
        "How groups that share a sequence attend to all its tokens: ring, all-gather (of keys and values) or "
        "all-to-all (of heads), where the runtime can; its own if left out.",
    )
    optimizer_on_host: bool | None = option(
        None,
        "Keep the optimizer's state in host memory, and update parameters there: in all plans, or in none. If left "
        "out, plans do so if the runtime can and they are faster so or do not fit otherwise.",
        "--optimizer-on-host/--no-optimizer-on-host",
    )
    tensor_parallel: Any = option(
        "T,T,...",
        "Only these tensor-parallel degrees, such as 2,4; without those of context parallelism.",
        parse=partial(parse_degrees, "--tensor-parallel"),
    )
    stages: int | None = option("P", "Only plans with P pipeline ranks.", min=1)
    schemes: bool = flag(
        "Also offer ways to divide layers that are found from their operators (the command schemes). Plans with such "
        "ways have no launch files."
    )


@dataclass(frozen=True)
class PlanRunningOptions(RunningOptions):
    """How software runs the model, in one precision or several."""

    panel: ClassVar[str] = "Software"

    precision: Any = option(
        "NAMES",
        "Precision of matrix products: bf16, fp16 or fp8; of bf16,fp8 the fastest is planned and all are listed.",
        default="bf16",
        parse=partial(several, parse_precision),
    )

    @property
    def precisions(self) -> tuple[str, ...]:
        """Each once."""
        return tuple(dict.fromkeys(self.precision))


@dataclass(frozen=True)
class PlanStepOptions(StepOptions):
    """What a step takes besides its passes."""

    panel: ClassVar[str] = "Step"


@dataclass(frozen=True)
class PlanAsked:
    """All options of one call. tell: says each note of its searches once."""

    modelled: PlanClusterOptions
    written: WrittenOptions
    trained: TrainedOptions
    room: MemoryRoomOptions
    offered: PlanOfferOptions
    running: PlanRunningOptions
    charged: PlanStepOptions
    launched: LaunchOptions
    tell: Callable[[str], None] = field(default_factory=lambda: once(note))

    @property
    def kinds(self) -> dict[str, int]:
        """The nodes of each kind of GPU, where the cluster has several; else none."""
        found = self.modelled.nodes_of_kinds
        return found if len(found) > 1 else {}

    @property
    def is_table(self) -> bool:
        """Whether several clusters, batches or rooms are asked about."""
        return any(self.tables.values())

    @property
    def tables(self) -> dict[str, bool]:
        """What may have several values, and whether it has."""
        batches = self.trained.batches or ()
        return {
            "--gpu and --nodes": not self.kinds and len(self.modelled.clusters) > 1,
            "--global-batch": len(batches) > 1 or any(low < high for low, high in batches),
            "--headroom": len(self.room.headroom or ()) > 1,
        }

    def refuse_mistakes(self) -> None:
        """Raises one UsageError, before any work, with all faults of the cluster, the output and the runtime."""
        faults: list[str] = []
        for refuse in (self.modelled.refuse_mistakes, self._refuse_written, self._refuse_runtime):
            try:
                refuse()
            except UsageError as error:  # noqa: PERF203 - a fault for each
                faults += str(error).splitlines()
        if faults:
            raise UsageError("\n".join(faults))
        self.trained.refuse_mistakes(len(dict(self.modelled.clusters)), self.is_table)
        if self.is_table and self.written.json:
            raise UsageError("--json is for one plan; the figures of a table are in --out DIR, in clusters.csv")
        several = [name for name, has in self.tables.items() if has]
        if self.kinds and several:
            raise UsageError(
                f"{several[0]}: a table is for one kind of GPU at one site, not for several; give one value"
            )
        if self.offered.schemes and "fp8" in self.running.precisions:
            raise UsageError("--schemes is for bf16 or fp16")
        if len(several) > 1:
            raise UsageError(f"{several[0]} and {several[1]}: give several of one of them")
        if self.is_table and len(self.running.precisions) > 1:
            raise UsageError("--precision: a table of several plans is in one precision; give one")

    def _refuse_written(self) -> None:
        self.written.refuse_mistakes(self.is_table, bool(self.kinds))

    def _refuse_runtime(self) -> None:
        if not self.modelled.site:
            RUNTIMES[self.trained.runtime].require_kinds([*self.kinds])

    def demand(self, model: ModelConfig, hardware: Hardware, gpu: str, nodes: int) -> PlanDemand:
        """The demand for one cluster, in the first precision. Raises UsageError."""
        from piper_ray.workloads.estimate.build import trained_model

        kinds = {name: (self.modelled.gpu_of(name), count) for name, count in self.kinds.items()}
        found = self.question(model, hardware).demand(kinds or {gpu: (gpu, nodes)})
        _require_training(trained_model(model, found.request, hardware.training), self.trained.runtime)
        found.refuse_layouts()
        return found

    def question(self, model: ModelConfig, hardware: Hardware) -> PlanQuestion:
        """What is asked, in the first precision. Raises UsageError."""
        from piper_ray.proposal.offers import PlanQuestion
        from piper_ray.workloads.estimate.build import EstimateRequest

        trained, offered, named = self.trained, self.offered, RUNTIMES[self.trained.runtime]
        asked = of_options(
            EstimateRequest,
            self.modelled,
            trained,
            self.running,
            nodes=1,  # of each kind its own
            optimizer_on_host=offered.optimizer_on_host,
            batch=None if trained.batches is None else trained.batches[0][0],
            precision=self.running.precisions[0],
            software=trained.software or named.software,
            fused=not trained.unfused_attention,
            reserve_bytes=self.room.reserve_bytes,
            host_memory_bytes=self.room.host_memory_bytes,
            offer=offered.offer(),
            recomputations=tuple(offered.recompute or ()),
        )
        return of_options(
            PlanQuestion,
            self.modelled,
            trained,
            offered,
            model=model,
            hardware=hardware,
            runtime=named,
            asked=asked,
            contexts=offered.contexts if offered.context_parallel else None,
            experts=offered.experts if offered.expert_parallel else None,
            headroom=None if self.room.headroom is None else self.room.headroom[0],
            step=self.charged.terms(),
        )

    def calibrated(self, demands: list[PlanDemand]) -> list[PlanDemand]:
        """The demands corrected by the file of measurements, whose findings on the GPU are printed once."""
        first = demands[0]
        found = self.modelled.calibrated_on(first.gpu, first.model, first.hardware, first.request)
        return [one.changed(lambda request: replace(request, calibration=found.calibration)) for one in demands]


def _require_training(trained: TrainedModel, runtime: RuntimeName) -> None:
    """Raises UsageError, before any search, where the runtime does not train as the options say."""
    from piper_ray.export.training import TRAINING

    if broken := [*TRAINING[Target(runtime.value)].broken_by(trained)]:
        able = runtimes_that(lambda target: not [*TRAINING[target].broken_by(trained)])
        raise UsageError("; ".join([*broken, *([f"{able} may do"] if able else [])]))


def runtimes_that(able: Callable[[Target], bool]) -> str:
    """Options of the runtimes that can."""
    names = [name.value for name in RuntimeName if able(Target(name.value))]
    return f"--runtime {' or '.join([', '.join(names[:-1]), names[-1]] if names[1:] else names)}" if names else ""
