"""piper_ray: exact planning of pipeline, data and tensor parallelism (Piper, NeurIPS 2021).

    instance = piper_ray.estimate("llama3-70b", gpu="H100-SXM", nodes=64)  # or load("workload.toml")
    solution = piper_ray.solve(instance, time_limit="10m")
    piper_ray.evaluate(instance, solution.plan)

Importing this package loads next to nothing: data types, the readers and the solver load when first used.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType


def _homes() -> dict[str, str]:
    """The module of each public name, as the stub ``__init__.pyi`` declares them, in its order."""
    homes = {}
    for line in __loader__.get_data(f"{__file__}i").decode().splitlines():
        match line.split():
            case "from", module, "import", name, "as", _:
                homes[name] = module
            case name, "=", module:  # a module under another name
                homes[name] = f"piper_ray.{module}"
    return homes


_HOMES = _homes()
__all__ = list(_HOMES)


def __getattr__(name: str) -> object:
    """The public name, from where it lives, when it is first asked for (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(_HOMES[name])
    except ModuleNotFoundError as error:
        from piper_ray.model.errors import advice

        raise advice(error) or error from None
    value: object = getattr(module, name, module)
    globals()[name] = value
    return value


_SHOWN = (
    "Batch", "Cluster", "Edge", "Instance", "Layer", "PiperRayError", "Plan", "Restrictions", "Schedule",
    "SimulationOptions", "Solution", "SolveOptions", "Stage", "StepTerms", "Tmpc", "TrainedModel", "UsageError",
)  # fmt: skip
"""What users make themselves, or ask for, or catch."""


def __dir__() -> list[str]:
    """What completion offers: all functions and the few types above. All names would begin with a rare constraint."""
    return sorted({*(name for name in __all__ if name.islower()), *_SHOWN})


class _Package(ModuleType):
    """``evaluate``, ``run`` and ``simulate`` are functions here, and modules too: loading one of these, which Python
    would put in the function's place, hides nothing."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
