"""The commands put together, and how errors leave them: a message on stderr and an exit code, never a traceback."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Mapping
from copy import copy
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from piper_ray.cli.commands import OnDemand
from piper_ray.cli.interrupts import listening
from piper_ray.cli.wording import Command, FlagsAsFlags, UsageComplaint, as_options, reword
from piper_ray.model.errors import EXIT_INTERRUPTED, LimitError, PiperRayError, UsageError
from piper_ray.model.extras import advice
from piper_ray.version import __version__

TRACEBACK_VARIABLE = "PIPER_RAY_TRACEBACK"


class _Commands(FlagsAsFlags, TyperGroup):
    """Turns what a command raises into words and an exit code, in one place for all. Loads the one that runs."""

    def __init__(self, *, commands: Mapping[str, Any], **settings: Any) -> None:
        super().__init__(commands=OnDemand(commands), **settings)  # type: ignore[arg-type]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Lists the commands without loading them."""
        super(_Commands, self._listing()).format_help(ctx, formatter)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Of their names, without loading them, and of options."""
        above = copy(ctx)
        above.command = self._listing()
        return super(_Commands, above.command).shell_complete(above, incomplete)

    def _listing(self) -> _Commands:
        listing = copy(self)
        assert isinstance(self.commands, OnDemand)
        listing.commands = self.commands.in_a_line()
        return listing

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
    typer.echo(f"piper-ray: {message}", err=True)


app = typer.Typer(
    name="piper-ray",
    cls=_Commands,
    no_args_is_help=True,
    epilog=(
        "Exit codes: 0 solved, 1 a fault of piper-ray, 2 usage, 3 bad input, 4 infeasible, 5 over a limit, "
        "6 a plan that is not valid, 7 cluster; ended by a signal 128 and its number: 130 Ctrl-C, 143 SIGTERM, "
        "129 SIGHUP, 141 as nobody reads the output any more."
    ),
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
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
