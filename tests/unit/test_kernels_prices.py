"""What a stage takes at least with a price on its memory, against trying all choices."""

from __future__ import annotations

from fractions import Fraction
from random import Random

import pytest

from piper_ray.engine.kernels.scan import is_too_long
from tests.kernel_support import least_work_s, random_case
from tests.lengths import long_after


@pytest.mark.parametrize("factor", long_after(1, [0.0, 0.3, 1.0, 5.0]))
def test_no_stage_that_fits_is_too_long(factor: float, few: bool) -> None:
    """At the time of its fastest choice that fits, whatever the price; and many that do not fit are, though their work
    alone would do.
    """
    fitting = ruled_out = 0
    for seed in range(25 if few else 60):
        made, rng = random_case(seed, most_tmpcs=4), Random(seed)
        tables, options = made.problem.tables, made.problem.workload.options
        for i, j in made.pairs():
            layers = made.layers(i, j)
            vertices = sorted(made.sets[i] - made.sets[j])
            for r in made.variants(layers):
                price_s = factor * float(tables.options.price_s[r])
                work_s = least_work_s(made, i, j, r)
                resync_s = max(0.0, float(tables.costs.resync_s[i, r] - tables.costs.resync_s[j, r]))
                # From their definition; at the price itself they are what the tables have.
                many_s, one_s = (
                    work_s
                    + sum(
                        min(
                            x.time_per_sample_s + price_s * (x.activation_bytes + share * x.fixed_bytes)
                            for x in options.tmpcs[r][v]
                        )
                        - min(x.time_per_sample_s for x in options.tmpcs[r][v])
                        for v in vertices
                    )
                    for share in (0.0, 1.0)
                )
                if factor == 1.0:
                    for held_s, expected in ((tables.costs.many_s, many_s), (tables.costs.one_s, one_s)):
                        assert work_s + held_s[i, r] - held_s[j, r] == pytest.approx(expected)
                one_s -= price_s * tables.cluster.memory_bytes
                for _, d in made.degrees(r):
                    y = rng.randint(1, 6)
                    time = made.time_s(layers, r, d, y)
                    if time is not None:
                        longest_s = float(time) * (1 + 1e-9) + 1e-9
                        assert not is_too_long(many_s, one_s, resync_s, y, d, longest_s)
                        fitting += 1
                    threshold_s = work_s / d + resync_s + 1e-3
                    too_long = is_too_long(many_s, one_s, resync_s, y, d, threshold_s)
                    assert not too_long or time is None or time > Fraction(threshold_s)
                    ruled_out += too_long
    assert fitting > 300
    assert (ruled_out > 100) == (factor > 0.0)
