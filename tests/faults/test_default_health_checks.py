"""With Ray's own settings a silent machine is missed only after a minute: the solve does not wait for that."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.driver import driving
from tests.faults.machines import machines

_DEFAULTS = {
    "RAY_health_check_initial_delay_ms": "5000",
    "RAY_health_check_period_ms": "3000",
    "RAY_health_check_timeout_ms": "10000",
    "RAY_health_check_failure_threshold": "5",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "60",
}


@pytest.mark.long
def test_cut_off_and_killed(local_plan: bytes, tmp_path: Path) -> None:
    with machines(2, _DEFAULTS) as cluster, driving(cluster, tmp_path, "--workers", "2") as driver:
        driver.until_all_join(2)
        cluster.cut(1)
        driver.until_level(200, evaluation=3)
        cluster.kill(2)
        assert driver.finish() == local_plan
