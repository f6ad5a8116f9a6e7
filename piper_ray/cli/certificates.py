"""``--certificate`` of ``solve`` and ``verify``: what proves a bound, written and checked."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import piper_ray
from piper_ray import (
    CertificateRefused,
    Instance,
    LimitError,
    Restrictions,
    Schedule,
    Solution,
    SolveOptions,
    UsageError,
)
from piper_ray.cli.interrupts import current
from piper_ray.cli.options import flag, option
from piper_ray.cli.telling import Unwritten, note, refuse_unwritable, working
from piper_ray.model.fields import plain_fields
from piper_ray.model.figures import PROOF_DIGITS, PROOF_TOLERANCE, percent_text, plural, time_text
from piper_ray.model.mode import found_schemes
from piper_ray.model.schedule import PAPERS_SCHEDULE
from piper_ray.storage.files import kind_unless_file

if TYPE_CHECKING:
    from piper_ray.certificate.check import CertifiedBound


@dataclass(frozen=True)
class CertificateOutput:
    """What proves the bound, written."""

    panel: ClassVar[str] = "Answer"

    certificate: Path | None = option(
        "FILE",
        "Write to FILE what proves the bound, for verify --certificate. Under 2bw it takes one more evaluation; "
        "under a flush it may prove less than the solve did, and says so.",
    )


@dataclass(frozen=True)
class CertificateInput:
    """What proves a bound, read."""

    panel: ClassVar[str] = "Certificate"

    certificate: Path | None = option(
        "FILE",
        "Also check that the certificate in FILE, which solve wrote, proves its bound. The check reads INPUT alone and "
        "shares no code with the solver.",
    )
    unrestricted: bool = flag(
        "With --certificate: require a proof for all plans, PLAN included, not only for those under restrictions.",
    )


def refuse_uncertifiable(
    path: Path, instance: Instance, schedule: Schedule, restrictions: Restrictions, options: SolveOptions
) -> None:
    """Raises UsageError for what has no certificate, and for a place where no file can be: before the work."""
    from piper_ray.certificate.certificate import require_certifiable
    from piper_ray.engine.certify import require_listable

    refuse_unwritable("--certificate", path)
    if (kind := kind_unless_file(path) if path.exists() else None) is not None:
        raise UsageError(
            f"--certificate {path}: is {kind}: writing it could wait for ever; expected the path of a file"
        )
    require_certifiable(restrictions, schedule, options.contract)
    if not schedule.asynchronous:
        return
    try:
        require_listable(instance, restrictions, options.memory_limit_bytes)
    except LimitError as error:
        raise UsageError(f"--certificate {path}: a certificate needs all downsets: {error}") from error


def write_own_certificate(
    path: Path,
    instance: Instance,
    solution: Solution,
    restrictions: Restrictions,
    options: SolveOptions,
    unwritten: Unwritten,
) -> Iterator[str]:
    """Makes it, writes it, and says so; after a signal, that there is none."""
    from piper_ray.certificate.certificate import write_certificate
    from piper_ray.engine.certify import certify

    if solution.stopped_by is not None and solution.stopped_by.in_haste:
        note(f"no certificate was written to {path}: the solve was interrupted")
        return
    began_s = time.perf_counter()
    with unwritten.noted():
        try:
            with working("the certificate"):
                certificate = current().run(
                    lambda stop: certify(
                        instance,
                        solution,
                        restrictions=restrictions,
                        threads=options.threads,
                        memory_limit=options.memory_limit_bytes,
                        stop=stop,
                    )
                )
        except KeyboardInterrupt:
            note(f"no certificate was written to {path}: interrupted")
            return
        except LimitError as error:
            raise UsageError(f"--certificate {path}: nothing is written: {error}") from error
        write_certificate(certificate, path)
        yield f"certificate: {path.stat().st_size:,} bytes in {path}, {time.perf_counter() - began_s:.2f} s"
        if certificate.bound_s < solution.lower_bound_s * (1.0 - 2.0 * PROOF_TOLERANCE):
            yield f"it proves less than the solve: {time_text(certificate.bound_s, PROOF_DIGITS)}/microbatch"


def checked_certificate(path: Path, instance: Instance, *, unrestricted: bool) -> CertifiedBound:
    """What the file proves. Raises CertificateRefused if that is nothing, or less than is demanded."""
    with working("checking the certificate"):
        found = current().run(lambda stop: piper_ray.verify_certificate(instance, path, stop=stop))
    if unrestricted and not found.is_unrestricted:
        raise CertificateRefused(f"{path}: holds only for plans under restrictions: {found.restrictions_text}")
    return found


def certified_text(found: CertifiedBound, silent_on: Sequence[str], time_s: float) -> list[str]:
    """What was certified in words, a line each. silent_on: why nothing is said of the plan."""
    under = "" if found.schedule == PAPERS_SCHEDULE else f" under {found.schedule.text}"
    kept = [] if found.is_unrestricted else [found.restrictions_text]
    if found.bound_s < float("inf"):
        which = "".join(f" that keeps {text}" for text in kept)
        text = f"no plan{which}{under} takes less than {time_text(found.bound_s, PROOF_DIGITS)}/microbatch"
    else:
        # Which plans are granted a billionth more memory is said by ``evaluate``; the check grants less.
        text = f"there is no plan{under} that keeps {' and '.join([*kept, 'the memory to the byte'])}"
    gap = found.gap(time_s)
    if silent_on or gap is None:
        text += "; of PLAN that says nothing"
    else:
        text += f"; gap {percent_text(gap)}"
    checked = f"{plural(found.stages, 'stage')} in front of {plural(found.tails, 'tail')}"
    if not found.schedule.asynchronous:
        by_tails = f"{found.pairs - found.by_prices} by {plural(found.tails, 'state')} of tails"
        checked = (
            f"{plural(found.pairs, 'pair')} of d and t, {found.by_prices} by prices or their work alone, {by_tails}"
        )
    return [f"certified: {text}", f"checked: {checked}"]


def certified_schemes(path: Path, instance: Instance) -> tuple[Mapping[str, object] | None, list[str]]:
    """The found schemes among the TMPCs that a bound is of, for ``--json`` and as lines; None and no line if there are
    none. path: of the workload. Raises UsageError if the rule table gives other figures for one."""
    if not found_schemes(tmpc.id for layer in instance.layers for row in layer.tmpcs.values() for tmpc in row):
        return None, []
    from piper_ray.workloads.schemes.check import require_schemes
    from piper_ray.workloads.schemes.document import claim_document, table_text
    from piper_ray.workloads.schemes.layers import BORDERS

    held = require_schemes(instance, None, instance.schemes, path)
    said = {instance.schemes[word]["border"] for word in held}
    borders = [border for border in BORDERS if border.text in said]
    told = {**claim_document(borders), "offered": held}
    text = f"the bound is of the workload's own TMPCs, of which {len(held)} are {table_text(borders)}; each holds by it"
    return told, [f"schemes: {text}"]


def certified_document(
    found: CertifiedBound, silent_on: Sequence[str], time_s: float, schemes: Mapping[str, object] | None
) -> Mapping[str, object]:
    """What was certified, for ``--json``. A bound of null: there is no plan. A gap of null: nothing is said of the
    plan, for these reasons. schemes: as of ``certified_schemes``."""
    return {
        "certificate": {
            "bound_s": found.bound_s if found.bound_s < float("inf") else None,
            "gap": None if silent_on else found.gap(time_s),
            "violations": list(silent_on),
            "restrictions": found.restrictions.to_dict(),
            "unrestricted": found.is_unrestricted,
            **found.schedule.to_dict(),
            **plain_fields(found, ("downsets", "tails", "stages", "choices", "pairs", "by_prices")),
            "schemes": schemes,
        }
    }
