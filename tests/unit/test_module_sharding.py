"""Found schemes of modules as torchtitan's sharding by module path."""

from __future__ import annotations

from pathlib import Path

import pytest

from piper_ray.export.torchtitan_model import sharding_text
from piper_ray.model.errors import UsageError
from piper_ray.workloads.measure.module_sharding import ModuleSharding, module_shardings
from piper_ray.workloads.measure.operators import traced_programs
from piper_ray.workloads.schemes.layers import BORDERS
from piper_ray.workloads.schemes.names import known_divisions
from piper_ray.workloads.schemes.program import SchemeProgram
from piper_ray.workloads.schemes.scheme import Scheme
from tests.run_support import results_of_ranks
from tests.scheme_runs import FILE
from tests.scheme_support import RandomPrices

_NAMES = ("tensor parallelism", "tensor and sequence parallelism", "context parallelism, all-to-all")


def _known(family: str, name: str) -> Scheme:
    (program,) = traced_programs(f"{FILE}:{family}", 2)
    border, only = known_divisions(program.traced.graph, 2)[name]
    found = SchemeProgram(program.traced.graph, 2, RandomPrices(0), border, only, again=False).fastest(1.0)
    assert found is not None
    return found


def _shardings(family: str, scheme: Scheme) -> dict[str, ModuleSharding]:
    (program,) = traced_programs(f"{FILE}:{family}", 2)
    return module_shardings(f"{FILE}:{family}", program, scheme)


def test_sequence_parallelism_is_torchtitans_own() -> None:
    """Norms give on all tokens, the first products are divided by columns, the second by rows and scattered."""
    found = _shardings("separate", _known("separate", _NAMES[1]))
    assert found[""] == ModuleSharding(arriving={"x": "S(1)"}, leaving="S(1)")
    assert found["before"] == ModuleSharding({"weight": "R"}, made="S(1)", leaving="R")
    assert found["k"] == ModuleSharding({"weight": "S(0)", "bias": "S(0)"})
    assert found["out"] == ModuleSharding({"weight": "S(1)", "bias": "R"}, made="P", leaving="S(1)")
    of_heads = dict.fromkeys("qkv", "S(1)")
    assert found["core"] == ModuleSharding({}, of_heads, of_heads, made="S(1)", gradients=("S(1)",) * 3)


def test_what_shardings_cannot_say_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"qkv\.weight packs several parts"):
        _shardings("gpt", _known("gpt", _NAMES[0]))
    with pytest.raises(UsageError, match="lies q and is brought together for each pass"):
        _shardings("separate", _known("separate", _NAMES[2]))
    (program,) = traced_programs(f"{FILE}:separate", 2)
    least = SchemeProgram(program.traced.graph, 2, RandomPrices(1), BORDERS[0])
    scheme = least.fastest(1.0, least.least_held_bytes(1.0) * 1.0001)
    assert scheme is not None
    with pytest.raises(UsageError, match=r"is computed again, which a sharding cannot say[\s\S]*goes back by"):
        _shardings("separate", scheme)


@pytest.mark.long
def test_torchtitan_trains_as_one_process_does(tmp_path: Path) -> None:
    file = tmp_path / "sharding.py"
    file.write_text(sharding_text(f"{FILE}:separate", 2, _NAMES[1], _known("separate", _NAMES[1])))
    assert max(results_of_ranks("sharding_ranks", tmp_path, 2, {"file": str(file)}, strict=False)) < 1e-12
