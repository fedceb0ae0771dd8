"""Mutated headers: a typed refusal or a valid file, never a crash, a traceback, or more than 300 MB of memory.

``NINFER_MUTATIONS=10000`` sets how many are drawn; ``python -m tests.property.header_mutations`` does it by hand.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = int(os.environ.get("NINFER_MUTATIONS", "300"))


@pytest.mark.timeout(120 + EXAMPLES // 10)
def test_mutated_headers_end_in_typed_refusals_within_300_mb(fresh_seed: int) -> None:
    command = [sys.executable, "-m", "tests.property.header_mutations", "--examples", str(EXAMPLES)]
    ran = subprocess.run([*command, "--seed", str(fresh_seed)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-6000:]
    print(ran.stdout)
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["examples"] >= EXAMPLES // 2
    assert found["peak_mib"] < 300
    assert {"accepted", "DirectoryError"} <= set(found["outcomes"])
