"""What to expect of a card that was not measured, from a record of one that was.

A matrix launch takes a fixed time and then streams: seconds = launch + bytes / (efficiency × bandwidth). Both numbers
are fitted to the ``matrix/`` results of a record. On another card streaming takes its own bandwidth, or the issue of
the main loop's instructions if that is slower; everything that is no matrix launch keeps its ratio to its own bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ninfer_format.errors import UsageError


@dataclass(frozen=True, slots=True)
class Target:
    """A card: SMs, read bandwidth that others measured, and warp instructions it can issue per byte at that rate."""

    name: str
    n_sms: int
    read_gbps: float
    instructions_per_byte: float


TARGETS = (Target("RTX 5090", 170, 1674.5, 1.0), Target("RTX 5060 Ti", 36, 412.0, 0.9))
MEASURED_BUDGET = 0.24
"""Warp instructions per byte that an H200 can issue at its bandwidth."""


@dataclass(frozen=True, slots=True)
class Streaming:
    """The two numbers of the model, as fitted on one card."""

    launch_seconds: float
    efficiency: float

    def seconds(self, n_bytes: float, instructions_per_byte: float, target: Target) -> float:
        """Of a launch that reads ``n_bytes`` on ``target``."""
        slower = max(1 / self.efficiency, instructions_per_byte / target.instructions_per_byte)
        return self.launch_seconds + n_bytes * slower / (target.read_gbps * 1e9)


@dataclass(frozen=True, slots=True)
class MatrixLaunch:
    """A kind of launch as measured: how often per round, bytes of each, seconds of each."""

    kind: str
    count: int
    n_bytes: float
    seconds: float


def matrix_launches(record: Mapping[str, Any], identity: str) -> list[MatrixLaunch]:
    """The ``matrix/`` results of a record. UsageError when there are none."""
    prefix = f"matrix/{identity}/"
    found = [
        MatrixLaunch(
            row["id"].removeprefix(prefix),
            row["details"]["launches"],
            row["details"]["mb_per_launch"] * 1e6,
            row["value"] / 1e6,
        )
        for row in record["results"]
        if row["id"].startswith(prefix)
    ]
    if not found:
        raise UsageError(f"the record has no {prefix} results; write one with bench all")
    return found


def fit(launches: Sequence[MatrixLaunch], read_gbps: float) -> Streaming:
    """Least squares over the kinds; the head, which weighs most and says little about launches, counts as one."""
    n_bytes = np.array([launch.n_bytes for launch in launches])
    seconds = np.array([launch.seconds for launch in launches])
    slope, launch_seconds = np.polyfit(n_bytes, seconds, 1)
    return Streaming(max(0.0, float(launch_seconds)), min(1.0, float(1 / (slope * read_gbps * 1e9))))


def predicted_share(launch: MatrixLaunch, instructions_per_byte: float, model: Streaming, target: Target) -> float:
    """Share of the target's bandwidth that launches of this kind should reach."""
    return launch.n_bytes / (target.read_gbps * 1e9) / model.seconds(launch.n_bytes, instructions_per_byte, target)


def predicted_round(
    record: Mapping[str, Any],
    identity: str,
    context: int,
    model: Streaming,
    target: Target,
    per_byte: Mapping[str, float],
) -> float:
    """Share of the target's bandwidth of a whole one-column round at ``context``. UsageError without that result."""
    name = f"decode/{identity}/c1/ctx{context}"
    row = next((row for row in record["results"] if row["id"] == name), None)
    if row is None:
        raise UsageError(f"the record has no {name}")
    launches = matrix_launches(record, identity)
    measured = sum(launch.count * launch.seconds for launch in launches)
    matrix_bytes = sum(launch.count * launch.n_bytes for launch in launches)
    other_bytes = row["details"]["bytes"] - matrix_bytes
    other_seconds = max(0.0, row["details"]["seconds"] - measured)
    scaled = other_seconds * record["limits"]["read_gbps"] / target.read_gbps
    expected = scaled + sum(
        launch.count * model.seconds(launch.n_bytes, per_byte.get(launch.kind, 0.0), target) for launch in launches
    )
    return float((matrix_bytes + other_bytes) / (target.read_gbps * 1e9) / expected)
