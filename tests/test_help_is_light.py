"""`--help` answers at once: no (sub)command loads torch, CuPy or pydantic for it or takes over 4 × `import numpy`."""

from __future__ import annotations

import importlib
import statistics
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = {
    "ninfer-verify": "ninfer_format.cli",
    "ninfer-convert": "ninfer_convert.cli",
    "ninfer-run": "ninfer_runtime.cli",
}
HEAVY = ("torch", "cupy", "pydantic")
ROUNDS = 5
TIMES_NUMPY = 4.0
MARK = "modules loaded: "

# What the entry point does, then one line on stderr naming the heavy modules it had loaded.
PROGRAM = """\
import atexit, sys
def say():
    sys.stderr.write("\\n{mark}" + " ".join(m for m in {heavy!r} if m in sys.modules) + "\\n")
atexit.register(say)
sys.argv = {argv!r}
from {module} import main
sys.exit(main())
"""


@cache
def subcommands(command: str) -> tuple[tuple[str, ...], ...]:
    """Every path of subcommand names below one command, the empty path (the command itself) first."""
    typer_main = importlib.import_module("typer.main")
    app = importlib.import_module(COMMANDS[command]).app

    def walk(node: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        yield path
        for name, child in getattr(node, "commands", {}).items():
            yield from walk(child, (*path, name))

    return tuple(walk(typer_main.get_command(app), ()))


def help_run(command: str, path: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    program = PROGRAM.format(mark=MARK, heavy=HEAVY, argv=[command, *path, "--help"], module=COMMANDS[command])
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)


def seconds(arguments: list[str]) -> float:
    """Wall-clock seconds of one process from start to end."""
    started = time.perf_counter()
    subprocess.run(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT, check=True)
    return time.perf_counter() - started


@pytest.mark.parametrize("command", COMMANDS)
def test_no_help_text_loads_torch_cupy_or_pydantic(command: str) -> None:
    paths = subcommands(command)
    assert len(paths) > 1, f"{command} has no subcommands"
    for path in paths:
        run = help_run(command, path)
        line = " ".join((command, *path, "--help"))
        assert run.returncode == 0, f"{line} ended with {run.returncode}: {run.stderr}"
        assert "Usage" in run.stdout, f"{line} printed {run.stdout!r}"
        loaded = run.stderr.rpartition(MARK)[2].split()
        assert loaded == [], f"{line} loaded {loaded}"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_takes_at_most_four_times_import_numpy(command: str) -> None:
    script = Path(sys.executable).with_name(command)
    assert script.exists(), f"{script} is missing: install the project into this environment first (make setup)"
    for path in subcommands(command):
        arguments = [sys.executable, str(script), *path, "--help"]
        pairs = [(seconds(arguments), seconds([sys.executable, "-c", "import numpy"])) for _ in range(ROUNDS)]
        ours, numpy = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(f"{' '.join((command, *path, '--help'))}: {ours:.2f} s, import numpy {numpy:.2f} s, {ours / numpy:.2f}×")
        assert ours <= TIMES_NUMPY * numpy, f"{arguments[1:]} took {ours:.2f} s, import numpy {numpy:.2f} s"


def test_the_three_commands_are_the_ones_the_package_installs() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {command: f"{module}:main" for command, module in COMMANDS.items()}
