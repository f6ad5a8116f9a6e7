"""The reference of the command line, from the program itself."""

from __future__ import annotations

from collections.abc import Iterator

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

from piper_ray.cli.app import app
from piper_ray.model import errors

ENVIRONMENT = {
    "RAY_ADDRESS": "The Ray cluster that `solve` and `sweep` take where `--address` is not given.",
    "PIPER_RAY_TRACEBACK": "1: errors show where in the code they came from, as with `--traceback`.",
    "NUMBA_CACHE_DIR": "Where compiled kernels are kept. Otherwise in the sources' folders, or, where those cannot be "
    "written, in `~/.cache/piper_ray` (under `XDG_CACHE_HOME` if that is set).",
    "COLUMNS": "Width of tables and logs where stdout is no terminal; 120 if not set.",
    "NO_COLOR, FORCE_COLOR": "No colours at all, or colours in a pipe too.",
}
"""What is read, and what for."""


def commands() -> str:
    """Markdown: a section for each command with its arguments and options, as ``--help`` has them."""
    return "\n".join(_commands())


def exit_codes() -> str:
    """Markdown: a table."""
    rows = [(0, "solved: a plan within the limits asked for", "")]
    kinds: list[type[errors.PiperRayError]] = [errors.PiperRayError, *errors.PiperRayError.__subclasses__()]
    for kind in sorted(kinds, key=lambda kind: kind.exit_code):
        rows += [(kind.exit_code, (kind.__doc__ or "").partition("\n")[0], f"`{kind.__name__}`")]
    lines = ["| code | meaning | in Python |", "|---:|---|---|"]
    return "\n".join(lines + [f"| {code} | {_cell(text)} | {name} |" for code, text, name in rows])


def environment() -> str:
    """Markdown: a table of environment variables."""
    lines = ["| variable | meaning |", "|---|---|"]
    for names, text in ENVIRONMENT.items():
        lines.append(f"| {', '.join(f'`{name}`' for name in names.split(', '))} | {text} |")
    return "\n".join(lines)


def _commands() -> Iterator[str]:
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    with typer.Context(group, info_name="piper-ray") as above:
        for name in group.list_commands(above):
            command = group.commands[name].make_context(name, [], above, resilient_parsing=True).command
            if isinstance(command, TyperCommand) and not command.hidden:
                yield from _command(name, command, typer.Context(command, info_name=name, parent=above))


def _command(name: str, command: TyperCommand, context: typer.Context) -> Iterator[str]:
    usage = " ".join(command.collect_usage_pieces(context))
    yield f"\n## {name}\n"
    yield f"{_prose(command.help or '')}\n"
    yield f"```text\npiper-ray {name} {usage}\n```\n"
    heading: str | None = None
    panels = dict.fromkeys(map(_panel, command.params))
    order = sorted(panels, key=lambda panel: (panel != "", panel == _OTHERS))
    for parameter in sorted(command.params, key=lambda one: order.index(_panel(one))):
        own = _panel(parameter)
        if own and own != heading:
            yield f"\n{own}:\n"
        heading = own
        record = parameter.get_help_record(context)
        if record is None:
            continue
        names, text = record
        if isinstance(parameter, TyperArgument):
            names, text = parameter.metavar or names, parameter.help or ""
        yield f"- `{names}`: {_prose(text.strip())}" if text.strip() else f"- `{names}`"


_OTHERS = "Options"


def _panel(parameter: object) -> str:
    """The heading that ``--help`` shows a parameter under; empty for arguments."""
    return getattr(parameter, "rich_help_panel", None) or ("" if isinstance(parameter, TyperArgument) else _OTHERS)


def _prose(text: str) -> str:
    """Plain text as Markdown."""
    for character in "\\`*_[]<>$":
        text = text.replace(character, f"\\{character}")
    return text


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
