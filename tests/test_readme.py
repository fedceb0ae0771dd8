"""The README's console examples are run in order and must print what it says; `...` stands for anything."""

from __future__ import annotations

import doctest
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def console_examples() -> list[tuple[str, str]]:
    """(command, expected stdout) in the order of the page."""
    blocks = re.findall(r"```console\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    examples = []
    for block in blocks:
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, expected = part.partition("\n")
            examples.append((command, expected))
    return examples


def test_console_examples_print_what_the_readme_says(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples", target_is_directory=True)
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    examples = console_examples()
    assert len(examples) >= 6
    checker = doctest.OutputChecker()
    for command, expected in examples:
        run = subprocess.run(
            shlex.split(command), cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert run.returncode == 0, f"{command}: {run.stderr}"
        assert checker.check_output(expected, run.stdout, doctest.ELLIPSIS), f"{command} printed\n{run.stdout}"
