"""Texts that stand in template files, next to the modules that fill them in."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from piper_ray.model import figures


@cache
def template(package: str, name: str) -> Template:
    """The template file of a package, as its ``__package__`` names it. Texts are escaped in HTML alone.

    Filters: what writes a figure, by its name in ``model/figures.py``; ``breakable``: places after each + where a name
    of several parts may go on in another line.
    """
    environment = Environment(
        autoescape=name.endswith("html.jinja"), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    writers = (
        figures.given_size_text,
        figures.held_text,
        figures.memory_text,
        figures.percent_text,
        figures.plural,
        figures.rounded,
        figures.share_text,
        figures.size_text,
        figures.time_text,
    )
    environment.filters.update({writer.__name__: writer for writer in writers})
    environment.filters["breakable"] = lambda text: Markup("+<wbr>").join(text.split("+"))
    return environment.from_string(files(package).joinpath(name).read_text(encoding="utf-8"))
