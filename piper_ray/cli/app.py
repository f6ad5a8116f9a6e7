"""The commands put together: help and complaints as users read them, and how errors leave a command, by a message on
stderr and an exit code, never a traceback.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from piper_ray.cli.help import Command, FlagsAsFlags
from piper_ray.cli.interrupts import listening
from piper_ray.model.arguments import did_you_mean
from piper_ray.model.errors import EXIT_INTERRUPTED, LimitError, PiperRayError, UsageError, advice
from piper_ray.report.folding import folded, screen_columns
from piper_ray.version import __version__

UsageComplaint: type[Any] = typer.BadParameter.__mro__[1]
"""What typer raises for arguments that it does not understand; it prints them itself and gives them exit code 2."""

PLAIN: dict[str, Any] = {"rich_markup_mode": None, "pretty_exceptions_enable": False}
"""Settings for ``typer.Typer``: help and complaints are plain text, which is drawn without loading rich."""

FORMER_NAMES: Mapping[str, Mapping[str, str]] = {
    "solve": {"resume": "checkpoint"},
    "plan": {"batch": "global-batch"},
    "estimate": {"batch": "global-batch", "microbatch": "microbatch-size"},
    "profile": {"batch": "global-batch", "microbatch": "microbatch-size"},
    "simulate": {"samples-per-microbatch": "microbatch-size", "tokens-per-sample": "tokens"},
}
"""Options that had another name, without their dashes: still understood, and in no help."""

_RUNTIMES_NAMES: Mapping[str, tuple[str, ...]] = {
    "--tokens": ("seq-length", "seq-len", "sequence-length", "max-seq-len", "max-length"),
    "--global-batch": ("global-batch-size", "gbs", "batch-size", "train-batch-size"),
    "--microbatch-size": ("micro-batch-size", "micro-batch", "mbs", "local-batch-size"),
    "--nodes": ("num-nodes", "nnodes"),
    "--gpus-per-node": ("nproc-per-node", "n-gpus-per-node"),
    "--tensor-parallel": ("tensor-model-parallel-size", "tensor-parallel-degree", "tp"),
    "--stages": ("pipeline-model-parallel-size", "pipeline-parallel-degree", "pipeline-parallel", "pp"),
    "--context-parallel": ("context-parallel-size", "context-parallel-degree", "cp"),
    "--expert-parallel": ("expert-model-parallel-size", "expert-parallel-degree", "ep"),
    "--precision": ("bf16", "fp16", "fp8", "fp8-format", "dtype"),
    "--zero": ("use-distributed-optimizer", "zero-1"),
}
"""Our options by the names that runtimes have for them, without dashes: complaints of unknown options name ours."""

_CHOSEN = {"--tensor-parallel": "the tensor-parallel degrees", "--stages": "the number of pipeline stages"}

_BOUND = re.compile(r"Input should be (greater|less) than or equal to (\S+)")
_OPTIONS: Mapping[str, str] = {"samples_per_microbatch": "--microbatch-size", "tokens_per_sample": "--tokens"}
_PARAMETER = re.compile(
    r"\b(memory_bytes|bandwidth_bytes_per_s|samples_per_microbatch|tokens_per_sample|all_reduce_overlap)\b"
    r"|^(devices|microbatches|stages|threads|gap|chunks|group)(?= must be | \S+ is out of range)",
    re.MULTILINE,
)
_NO_CHOICE = re.compile(r"(?:Value error, )?(?P<given>'[^']*' is not one of) (?P<known>.*)\.", re.DOTALL)


def understood(command: str) -> Callable[[str], str]:
    """For ``token_normalize_func``: replaces an option's earlier name by its present name."""
    former = FORMER_NAMES.get(command, {})
    return lambda name: former.get(name, name)


def as_options(text: str) -> str:
    """A complaint of a function that users of Python call, too, with the names of options in place of parameters'."""
    from piper_ray.cli.options import option_name

    return _PARAMETER.sub(lambda found: _OPTIONS.get(found[0]) or option_name(found[0]), text)


def reword(complaint: Any) -> None:
    """Adds what was probably meant to an unknown option or choice, and says bounds in words."""
    complaint.message = _BOUND.sub(
        lambda found: f"must be at {'least' if found[1] == 'greater' else 'most'} {found[2]}", str(complaint.message)
    )
    possibilities = getattr(complaint, "possibilities", None)
    if meant := _option_meant(complaint):
        complaint.possibilities = None
        complaint.message += meant
    elif possibilities:
        complaint.possibilities = None
        known = [f"--{name.lstrip('-')}" for name in possibilities]
        complaint.message = f"{complaint.message}{did_you_mean(complaint.option_name, known) or f' ({known[0]}?)'}"
    elif match := _NO_CHOICE.fullmatch(str(complaint.message)):
        known = re.findall(r"'([^']*)'", match["known"])
        given = re.findall(r"'([^']*)'", match["given"])[0]
        complaint.message = f"{match['given']} {', '.join(known)}{did_you_mean(given, known)}"


def _option_meant(complaint: Any) -> str:
    """What the command has for an option of a runtime's; "" for all else."""
    given, command = getattr(complaint, "option_name", None), getattr(complaint.ctx, "command", None)
    if given is None or command is None:
        return ""
    name = str(given).lstrip("-").replace("_", "-")
    meant = next((option for option, names in _RUNTIMES_NAMES.items() if name in names), None)
    if any(meant in parameter.opts for parameter in command.params):
        return f"; did you mean {meant}?"
    return f"; `piper-ray solve WORKLOAD {meant} ...` restricts {_CHOSEN[meant]}" if meant in _CHOSEN else ""


TRACEBACK_VARIABLE = "PIPER_RAY_TRACEBACK"


_DOES: Mapping[str, str] = {
    "plan": "Plan the training of MODEL on a cluster, and write its launch files.",
    "solve": "Find the fastest plan for INPUT, and prove it.",
    "frontier": "Find the least time per microbatch for INPUT on every number of devices, and prove each.",
    "verify": "Check PLAN against INPUT and show what it costs, under the schedule that PLAN is for.",
    "simulate": "Run PLAN for INPUT event by event under a schedule: step time, each rank's time and memory, what "
    "bounds it.",
    "compare": "Simulate PLANs for INPUT, each under the schedule that it is for, and say what separates the first "
    "from the best.",
    "report": "Write one HTML page about PLAN for INPUT: where stages run, timeline, memory, what binds, other "
    "planners' plans.",
    "info": "Show what INPUT holds, and what solving it will take in memory and time.",
    "export": "Write PLAN for INPUT as launch arguments or configuration of a runtime, with the command that "
    "starts it.",
    "import-plan": "Turn a layout that you run into a plan for INPUT, to verify, simulate and compare it.",
    "run": "Train a PyTorch model by PLAN with torch, and compare its step with what PLAN promises.",
    "convert": "Write INPUT in another form, with the figures given here in place of its own.",
    "estimate": "Estimate the workload of training MODEL on a cluster: layers, times, memory and communication.",
    "schemes": "Find how the layers of MODEL may run on t devices: what is sharded where, kept, and computed again.",
    "memory": "Show what each rank of a LAYOUT of MODEL will hold, by term: weights, gradients, optimizer state, "
    "activations of the microbatches in flight, loss, buffers, and what is reserved.",
    "profile": "Measure a PyTorch model on this machine: its layers, their times, memory and communication.",
    "sweep": "Solve every point of SWEEP, each once, and keep plans, bounds and errors in a Parquet dataset.",
    "sweep-report": "Show what a sweep found: planners compared, best plans, throughput by devices, errors.",
    "warm": "Compile the kernels of all commands beforehand, in several processes side by side.",
}
"""The commands by name, with what each does in a line: a command's module is loaded when more is asked of it."""

_MODULES = {
    **dict.fromkeys(("verify", "simulate", "compare", "report"), "finished_plans"),
    **dict.fromkeys(("import-plan", "convert"), "export"),
    **dict.fromkeys(("profile", "run"), "torch_models"),
    "sweep-report": "sweep",
}
"""The modules in piper_ray.cli of the commands whose module has another name."""


class _Listed(Command):
    """A command that is loaded once it is to run, to show its help, or to complete its options."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """The context of the command itself."""
        assert self.name is not None
        return _load(self.name).make_context(info_name, args, parent, **extra)


class Commands(FlagsAsFlags, TyperGroup):
    """Turns what a command raises into words and an exit code, in one place for all."""

    def __init__(self, *, commands: Mapping[str, Any], **settings: Any) -> None:
        listed = {name: _Listed(name=name, short_help=does) for name, does in _DOES.items()}
        super().__init__(commands=listed | dict(commands), **settings)

    def invoke(self, ctx: typer.Context) -> object:  # type: ignore[override]
        try:
            with listening() as interrupts:
                return super().invoke(ctx)
        except PiperRayError as error:
            _complain(as_options(str(error)) if isinstance(error, UsageError) else str(error), ctx)
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt as interrupt:
            interrupts.tell(*interrupt.args)
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except UsageComplaint as complaint:
            reword(complaint)
            raise
        except (typer.Exit, typer.Abort):
            raise
        except MemoryError as error:
            _complain(f"there is not enough memory: {str(error) or 'the system gives no more'}", ctx)
            raise typer.Exit(LimitError.exit_code) from None
        except Exception as error:  # noqa: BLE001 - whatever it is, the user gets a message and not a traceback
            missing = advice(error) if isinstance(error, ModuleNotFoundError) else None
            if missing is not None:
                _complain(str(missing), ctx)
                raise typer.Exit(missing.exit_code) from None
            _complain(f"unexpected {type(error).__name__}: {error}", ctx)
            if not ctx.params.get("show_traceback"):
                typer.echo(
                    f"This is a fault of piper-ray. To see where: piper-ray --traceback ..., or {TRACEBACK_VARIABLE}=1",
                    err=True,
                )
            raise typer.Exit(PiperRayError.exit_code) from None


def _complain(message: str, ctx: typer.Context) -> None:
    if ctx.params.get("show_traceback"):
        traceback.print_exc(file=sys.stderr)
    typer.echo("\n".join(folded(f"piper-ray: {message}", screen_columns(sys.stderr))), err=True)


def _load(name: str) -> Any:
    from piper_ray.cli.options import flat

    module = import_module(f"piper_ray.cli.{_MODULES.get(name, name)}")
    alone = typer.Typer(add_completion=False, **PLAIN)
    of_today = {"token_normalize_func": understood(name), "max_content_width": 100}
    alone.command(name, cls=Command, context_settings=of_today)(flat(getattr(module, name.replace("-", "_"))))
    return typer.main.get_command(alone)


app = typer.Typer(
    name="piper-ray",
    cls=Commands,
    no_args_is_help=True,
    epilog=(
        "Exit codes: 0 solved, 1 a fault of piper-ray, 2 usage, 3 bad input, 4 infeasible, 5 over a limit, "
        "6 a plan that is not valid, 7 cluster, 8 a certificate that proves nothing; ended by a signal 128 and its "
        "number: 130 Ctrl-C, 143 SIGTERM, 129 SIGHUP, 141 when the output is no longer read."
    ),
    **PLAIN,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


@app.command("help", cls=Command)
def _help(
    context: typer.Context,
    name: Annotated[
        str | None,
        typer.Argument(metavar="COMMAND", show_default=False, help="The command; all of them if not given."),
    ] = None,
) -> None:
    """Show what a command does, as COMMAND --help does."""
    above = context.find_root()
    if name is None:
        typer.echo(above.get_help())
        return
    group = above.command
    assert isinstance(group, TyperGroup)
    _, command, _ = group.resolve_command(above, [name])
    assert command is not None
    command.make_context(name, ["--help"], parent=above)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"piper-ray {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    show_traceback: Annotated[
        bool,
        typer.Option("--traceback", envvar=TRACEBACK_VARIABLE, help="Show where in the code an error came from."),
    ] = False,
    version: Annotated[
        bool,
        typer.Option("-V", "--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Plan DNN training: the fastest split over pipeline stages, data and tensor parallelism, with proof."""
