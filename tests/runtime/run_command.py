"""Run ninfer-run in this process or as its own, and the words the tiny model knows."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ninfer_runtime import cli

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "import sys; from ninfer_runtime.cli import main; sys.exit(main())"
GREEDY = ("--greedy", "--dtype", "float32")
SUM = "What is 12 + 7?"


@dataclass(frozen=True)
class Run:
    """What one run of the command left behind."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """stdout as JSON."""
        return json.loads(self.out)


Ninfer = Callable[..., Run]


def in_this_process(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Ninfer:
    """``ninfer(argument, …, stdin=b"…")`` runs the command here."""

    def run(*arguments: object, stdin: bytes = b"") -> Run:
        monkeypatch.setattr(sys, "argv", ["ninfer-run", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        text = capsys.readouterr()
        code = ended.value.code
        assert isinstance(code, int)
        return Run(code, text.out, text.err)

    return run


def started(*arguments: object) -> subprocess.Popen[str]:
    """The command as its own process, with pipes."""
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
