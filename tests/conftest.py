"""What every test shares: one torch thread per worker, no network, and a seed drawn anew for each run."""

from __future__ import annotations

import os
import secrets

# Before any test imports torch: two workers on two cores gain nothing from more threads each.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes is the machine's affair: no test may fail for it.
settings.register_profile("ninfer", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ninfer")

_SEED_VARIABLE = "NINFER_TEST_SEED"


@pytest.fixture
def fresh_seed() -> int:
    """A 31-bit seed drawn for this run and printed, so a failing test shows it; NINFER_TEST_SEED repeats one."""
    seed = int(os.environ.get(_SEED_VARIABLE) or secrets.randbits(31))
    print(f"{_SEED_VARIABLE}={seed}")
    return seed
