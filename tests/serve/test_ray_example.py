"""What of the Ray example needs no Ray: which session a request belongs to, and what a lost replica is called."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_ray_example_passes_its_own_tests_as_far_as_they_go_here() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "NINFER_ARTIFACT"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(ROOT / "examples" / "ray")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 passed" in done.stdout
