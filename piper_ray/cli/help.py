"""What a command shows for ``--help``: the options that are asked for most, under headings; all, for ``--help-all``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import copy
from functools import partial
from typing import Any

import typer
from typer.core import TyperCommand, TyperOption

TAKES_OPTIONS_AS_TEXT = frozenset({"import-plan", "memory"})
"""Commands with an argument that may be another program's options, quoted."""

_OPTIONS_IN_A_TEXT = re.compile(r"--[^\s=]+\s")
_BRACED = re.compile(r"\{([^{}]*)\}(\.\.\.)?")

COMMON: Mapping[str, frozenset[str]] = {
    name: frozenset(options.split())
    for name, options in {
        "plan": "gpu nodes tokens out dry-run against runtime global-batch precision",
        "solve": "devices microbatches memory out json schedule gap time-limit address",
        "estimate": "gpu nodes tokens out explain global-batch microbatch-size precision recompute calibrate",
        "frontier": "devices microbatches memory out plot json schedule gap time-limit",
        "schemes": "gpu nodes tokens tensor-parallel show out json",
        "simulate": "devices microbatches memory schedule trace plot transfers json",
        "verify": "devices microbatches memory schedule simulate certificate json",
        "compare": "devices microbatches memory recipe launch set json",
        "export": "devices microbatches memory to out gpus-per-node",
        "import-plan": "devices microbatches memory out pipeline-parallel tensor-parallel data-parallel recipe launch",
        "profile": "device arg input microbatch-size out gpu devices global-batch tensor-parallel",
        "run": "device workload schemes steps schedule microbatches trace json",
    }.items()
}
"""For commands with many options, the options that ``--help`` shows, without their dashes; for others it shows all."""

_WHOLE = "piper_ray.whole_help"


def _show_whole(ctx: Any, _: Any, asked: bool) -> None:
    if asked and not ctx.resilient_parsing:
        ctx.meta[_WHOLE] = True
        typer.echo(ctx.get_help())
        ctx.exit()


class FlagsAsFlags:
    """A command, or a group of commands, whose help gives flags no type."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The arguments and options, as typer asks for them."""
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            parameter.process_value = partial(_processed, parameter)
            if isinstance(parameter, TyperOption) and parameter.is_flag:
                parameter.metavar = parameter.metavar or ""
        return parameters


def _processed(parameter: Any, ctx: Any, value: object) -> object:
    """The value as typer processes it, but what is not given is not looked at, and nothing in completion: typer would
    load pydantic for it, and make an adapter of each option."""
    if ctx.resilient_parsing or (value is None and not parameter.required):
        return value
    return type(parameter).process_value(parameter, ctx, value)


class Command(FlagsAsFlags, TyperCommand):
    """A command of piper-ray."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        # Where a line of the source ends is no matter of the terminal's.
        self.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in (self.help or "").split("\n\n"))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """``INPUT PLAN...``, where typer has ``{INPUT} {PLAN...}...``."""
        return [_BRACED.sub(r"\1", piece) for piece in super().collect_usage_pieces(ctx)]

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters, with ``--help-all`` where ``--help`` leaves options out."""
        parameters = super().get_params(ctx)
        if self.name not in COMMON:
            return parameters
        *own, usual = parameters
        whole = copy(usual)
        whole.name, whole.opts, whole.help = "help_all", ["--help-all"], "Show all options and exit."
        whole.callback, whole.process_value = _show_whole, partial(_processed, whole)
        return [*own, usual, whole]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Under a heading for each group of options, where there are any."""
        common = None if ctx.meta.get(_WHOLE) else COMMON.get(self.name or "")
        shown = [
            (one, record)
            for one in self.get_params(ctx)
            if (record := one.get_help_record(ctx)) is not None and (common is None or _is_common(one, common))
        ]
        headings = dict.fromkeys(_heading(one) for one, _ in shown)
        for heading in sorted(headings, key=lambda name: (name != "Arguments", name == "Options")):
            with formatter.section(heading):
                rows = [record for one, record in shown if heading == _heading(one)]
                formatter.write_dl([(names.replace("<list[Path]>", "<path>"), text) for names, text in rows])

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses as click does, but for texts of several options that are one argument: with a blank in front they are
        none of ours."""
        if self.name in TAKES_OPTIONS_AS_TEXT:
            args = [f" {word}" if _OPTIONS_IN_A_TEXT.match(word) else word for word in args]
        return super().parse_args(ctx, args)


def _is_common(parameter: Any, common: frozenset[str]) -> bool:
    always = parameter.param_type_name == "argument" or parameter.required or not parameter.expose_value
    return always or any(name.lstrip("-") in common for name in parameter.opts)


def _heading(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return "Arguments"
    return getattr(parameter, "rich_help_panel", None) or "Options"
