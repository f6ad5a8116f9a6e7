"""Reads users' launches by file name: what they state about a workload, and the plan that they run."""

from __future__ import annotations

import csv
import errno
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from piper_ray.export.files import RANKS
from piper_ray.export.import_plan import Imported, import_plan
from piper_ray.export.left_aside import notes_of_the_rest
from piper_ray.export.megatron_arguments import (
    dispatcher_of_settings,
    figures_of,
    named_settings,
    read_names,
    recomputation_of_settings,
)
from piper_ray.export.run_as import AS_IT_SAYS, RunAs
from piper_ray.export.torchtitan import batch_of, dispatcher_of_config, recomputation_of_config
from piper_ray.launches.launch import THE_ONE, Asked, Dialect, Launch, Source
from piper_ray.launches.read import read_launch
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import Instance
from piper_ray.model.mode import Recomputation
from piper_ray.workloads.estimate.software import TokenDispatcher


@dataclass(frozen=True)
class LaunchFacts:
    """What a launch states about its workload; None or absent if it states nothing. figures: of the model and its
    division, by Megatron's or torchtitan's names, as whole numbers, texts and switches. ranks: the number that it
    starts. dispatcher: how tokens reach experts. recomputation: what is recomputed."""

    dialect: Dialect
    model: str | None
    microbatch_samples: int | None
    global_batch_samples: int | None
    tokens_per_sample: int | None
    ranks: int | None
    dispatcher: TokenDispatcher | None
    recomputation: Recomputation
    figures: Mapping[str, object]
    notes: tuple[str, ...]


def facts_of(layout: str, asked: Asked = THE_ONE) -> LaunchFacts | None:
    """The facts of a launch, read before there is a workload to compare them with; None for a layout that is not a
    launch.

    layout: as in ``import_launched``. Raises UsageError for a launch that cannot become a plan.
    """
    launch = read_launch(source_of(layout)[0], asked)
    if launch is None:
        return None
    if launch.dialect is Dialect.TORCHTITAN:
        batch, figures, notes = batch_of(launch.settings), _of_titan(launch), launch.notes
        dispatcher, again = dispatcher_of_config(launch.settings), recomputation_of_config(launch.settings)
    else:
        figures, dispatcher = figures_of(launch.settings), dispatcher_of_settings(launch)
        again = recomputation_of_settings(launch.settings)
        batch = {
            "microbatch_samples": figures.get("micro_batch_size"),
            "global_batch_samples": figures.get("global_batch_size"),
            "tokens_per_sample": figures.get("seq_length"),
        }
        named = named_settings(launch.settings)
        notes = (*launch.notes, *notes_of_the_rest(named, read_names(named) | launch.usual))
    samples, whole, tokens = (
        value if isinstance(value := batch.get(name), int) and not isinstance(value, bool) else None
        for name in ("microbatch_samples", "global_batch_samples", "tokens_per_sample")
    )
    return LaunchFacts(
        launch.dialect, launch.model, samples, whole, tokens, launch.ranks, dispatcher, again, figures, notes
    )


def _of_titan(launch: Launch) -> Mapping[str, object]:
    found = launch.settings.get("parallelism")
    return found if isinstance(found, Mapping) else {}


def import_launched(instance: Instance, layout: str, run_as: RunAs = AS_IT_SAYS, asked: Asked = THE_ONE) -> Imported:
    """The plan of a layout. layout: the name of a file or of an exported folder, or the text of one.

    Raises UsageError or InputError that states where it is wrong, or what is missing.
    """
    source, of_folder = source_of(layout)
    return import_plan(instance, source, run_as.over(of_folder), asked)


_PATH_LIKE = re.compile(r"[\w./\\~-]*[./\\_a-ln-su-zA-DF-KM-Z][\w./\\~-]*")
"""Matches texts that look like a path, which no layout does."""

_LAYOUT_FILES = ("megatron.args", "torchtitan.json", "system.yaml", "plan.yaml", "stages.json", "piper_plan.py")
"""One of these files of an exported folder states the plan."""

_TITAN_FILES = ["torchtitan.json", "piper_plan.py"]
"""Both belong to one export; the first one states the plan."""


def source_of(layout: str) -> tuple[Source, RunAs]:
    """The text itself, or the content of a file with this name or of an exported folder; and the folder's number of
    ranks, with the kinds of their devices.

    A text that is a command is read as if typed in this folder. Raises UsageError.
    """
    path, of_folder = Path(layout), AS_IT_SAYS
    if not layout.strip() or not _can_be_path(layout):
        return _typed_here(layout), of_folder
    if path.is_dir():
        found = [name for name in _LAYOUT_FILES if (path / name).is_file()]
        if not found:
            raise UsageError(f"{layout}: a folder without {', '.join(_LAYOUT_FILES[:-1])} or {_LAYOUT_FILES[-1]}")
        if len(found) > 1 and found != _TITAN_FILES:
            names = f"{', '.join(found[:-1])} and {found[-1]}"
            raise UsageError(f"{layout}: a folder with {names}, of several exports; expected one of these files")
        if (path / RANKS).is_file():
            rows = list(csv.DictReader(_text_of(path / RANKS).splitlines()))
            of_rank = {row.get("pipeline_rank", ""): row["kind"] for row in rows if row.get("kind")}
            of_folder = RunAs(world=len(rows), kinds=tuple(of_rank.values()) or None)
        path /= found[0]
    if not path.is_file():
        if _PATH_LIKE.fullmatch(layout):
            raise UsageError(f"{layout}: there is no such file or folder here ({Path.cwd()})")
        return _typed_here(layout), of_folder
    return Source(_text_of(path), path), of_folder


def _typed_here(layout: str) -> Source:
    return Source(layout, Path.cwd() / "a command")


def _can_be_path(layout: str) -> bool:
    """Whether the system accepts it as a path: not too long, and without characters that are not allowed."""
    try:
        Path(layout).stat()
    except FileNotFoundError:
        return True
    except OSError as error:
        return error.errno not in (errno.ENAMETOOLONG, errno.EINVAL)
    except ValueError:
        return False
    return True


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError(f"{path}: is no text") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error}") from None
