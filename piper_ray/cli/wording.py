"""Typer's help and complaints as users read them here: flags as flags, former names, what was probably meant."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import typer
from typer.core import TyperCommand, TyperOption

from piper_ray.model.arguments import did_you_mean

UsageComplaint: type[Any] = typer.BadParameter.__mro__[1]
"""What typer raises for arguments that it does not understand; it prints them itself and gives them exit code 2."""

PLAIN: dict[str, Any] = {"rich_markup_mode": None, "pretty_exceptions_enable": False}
"""For ``typer.Typer``: help and complaints are plain text, which is drawn without loading rich."""

FORMER_NAMES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "solve": {"resume": "checkpoint"},
        "plan": {"batch": "global-batch"},
        "estimate": {"batch": "global-batch", "microbatch": "microbatch-size"},
        "profile": {"batch": "global-batch", "microbatch": "microbatch-size"},
        "simulate": {"samples-per-microbatch": "microbatch-size", "tokens-per-sample": "tokens"},
    }
)
"""Options that had another name, without their dashes: still understood, and in no help."""

TAKES_OPTIONS_AS_TEXT = frozenset({"import-plan"})
"""Commands with an argument that may be another program's options, quoted."""

_OPTIONS_IN_A_TEXT = re.compile(r"--[^\s=]+\s")
_BRACED = re.compile(r"\{([^{}]*)\}(\.\.\.)?")
_BOUND = re.compile(r"Input should be (greater|less) than or equal to (\S+)")
_OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "memory_bytes": "memory",
        "bandwidth_bytes_per_s": "bandwidth",
        "samples_per_microbatch": "microbatch-size",
        "tokens_per_sample": "tokens",
    }
)
_PARAMETER = re.compile(
    r"\b(memory_bytes|bandwidth_bytes_per_s|samples_per_microbatch|tokens_per_sample|all_reduce_overlap)\b"
    r"|^(devices|microbatches|stages|threads|gap|chunks|group)(?= must be | \S+ is out of range)",
    re.MULTILINE,
)
_NO_CHOICE = re.compile(r"(?:Value error, )?(?P<given>'[^']*' is not one of) (?P<known>.*)\.", re.DOTALL)


def understood(command: str) -> Callable[[str], str]:
    """For ``token_normalize_func``: an option's name of today for one of before."""
    former = FORMER_NAMES.get(command, {})
    return lambda name: former.get(name, name)


def _taken_as_it_is(_: Any, value: Any) -> Any:
    return value


class FlagsAsFlags:
    """Of a command or a group of them: the help gives flags no type."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Its arguments and options, as typer asks for them."""
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            if ctx.resilient_parsing:  # completion looks at no values, for which typer would load pydantic
                parameter.process_value = _taken_as_it_is
            if isinstance(parameter, TyperOption) and parameter.is_flag:
                parameter.metavar = parameter.metavar or ""
                if not parameter.expose_value:  # typer would load pydantic to see that it was not given
                    parameter.default = False
        return parameters


class Command(FlagsAsFlags, TyperCommand):
    """A command of piper-ray."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        # Where a line of the source ends is no matter of the terminal's.
        self.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in (self.help or "").split("\n\n"))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """``INPUT PLAN...``, where typer has ``{INPUT} {PLAN...}...``."""
        return [_BRACED.sub(r"\1", piece) for piece in super().collect_usage_pieces(ctx)]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As click does, but for texts of several options that are one argument: with a blank in front they are none of
        ours."""
        if self.name in TAKES_OPTIONS_AS_TEXT:
            args = [f" {word}" if _OPTIONS_IN_A_TEXT.match(word) else word for word in args]
        return super().parse_args(ctx, args)


def as_options(text: str) -> str:
    """A complaint of a function that users of Python call, too, with the names of options in place of parameters'."""
    return _PARAMETER.sub(lambda found: f"--{_OPTIONS.get(found[0], found[0].replace('_', '-'))}", text)


def reword(complaint: Any) -> None:
    """Adds what was probably meant to an unknown option or choice, and says bounds in words."""
    complaint.message = _BOUND.sub(
        lambda found: f"must be at {'least' if found[1] == 'greater' else 'most'} {found[2]}", str(complaint.message)
    )
    possibilities = getattr(complaint, "possibilities", None)
    if possibilities:
        complaint.possibilities = None
        known = [f"--{name.lstrip('-')}" for name in possibilities]
        complaint.message = f"{complaint.message}{did_you_mean(complaint.option_name, known) or f' ({known[0]}?)'}"
    elif match := _NO_CHOICE.fullmatch(str(complaint.message)):
        known = re.findall(r"'([^']*)'", match["known"])
        given = re.findall(r"'([^']*)'", match["given"])[0]
        complaint.message = f"{match['given']} {', '.join(known)}{did_you_mean(given, known)}"
