"""A found scheme of a PyTorch module as torchtitan's sharding by module path: a Python file."""

from __future__ import annotations

from piper_ray.export.files import rendered
from piper_ray.workloads.schemes.document import digest_of
from piper_ray.workloads.schemes.scheme import Scheme

__all__ = ["sharding_text"]


def sharding_text(spec: str, samples: int, name: str, scheme: Scheme) -> str:
    """The file's text. spec, samples: what the scheme was found with. name: the scheme's. Raises UsageError with all
    that torchtitan's shardings cannot say of it."""
    from piper_ray.workloads.measure.module_sharding import module_shardings
    from piper_ray.workloads.measure.operators import traced_programs

    program = next(one for one in traced_programs(spec, samples) if one.traced.graph.name == scheme.kind)
    return rendered(
        "torchtitan_sharding.py.jinja",
        layer=f"{scheme.kind} of {spec}",
        degree=scheme.degree,
        id=digest_of(scheme),
        name=name,
        modules=module_shardings(spec, program, scheme),
    )
