"""Tests in several processes: none is lost, whatever becomes of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.documentation.build import ROOT


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere all tests run in one process")
def test_what_a_process_that_dies_leaves_has_failed(tmp_path: Path) -> None:
    (tmp_path / "test_lives.py").write_text("def test_one(): pass\n\n\ndef test_two(): assert 0\n")
    (tmp_path / "test_dies.py").write_text(
        "import os\n\n\ndef test_one(): pass\n\n\ndef test_two(): os._exit(0)\n\n\ndef test_three(): pass\n"
    )
    options = ["-p", "tests.conftest", "-p", "no:cacheprovider", "--processes=2", f"--rootdir={tmp_path}"]
    command = [sys.executable, "-m", "pytest", *options, str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 1, ended.stdout
    assert ended.stdout.count("its process ended before it did") == 2
    assert "3 failed, 2 passed" in ended.stdout
