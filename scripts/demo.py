"""From a checkpoint folder to text: plan, build, verify, index and generate on the tiny checkpoints of examples/tiny.

    python scripts/demo.py [--only dense|moe]

Prints every command before it runs it, and ends with 1 when a command fails or an answer is not the expected one.
Files go to build/demo/ and are made anew each time.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUT = Path("build/demo")
HEAD_LINES, TAIL_LINES, MAX_COLUMNS = 32, 4, 300


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, and what its answer must contain."""

    text: str
    expected: str
    thinks: bool = False


QUESTIONS = (
    Question("What is the capital of France?", "Paris"),
    Question("What is 17 + 15?", "32", thinks=True),
    Question("Tell me a story about a fox and a silver bell.", "they became friends"),
)


def run(*arguments: str, answer_only: bool = False) -> str:
    """Print a command, run it with its output shown, and return its stdout; SystemExit when it fails.

    ``answer_only`` leaves thinking and statistics out, which go to stderr.
    """
    print(f"\n$ {shlex.join(arguments)}{' 2>/dev/null' if answer_only else ''}", flush=True)
    stderr = subprocess.PIPE if answer_only else None
    finished = subprocess.run(arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True, check=False)
    print("\n".join(shortened(finished.stdout.splitlines())), flush=True)
    if finished.returncode:
        sys.exit(f"{finished.stderr or ''}demo: {arguments[0]} ended with {finished.returncode}")
    return finished.stdout


def shortened(lines: list[str]) -> list[str]:
    """Long listings keep their head and their end, long lines their first columns."""
    if len(lines) > HEAD_LINES + TAIL_LINES + 1:
        left_out = f"… {len(lines) - HEAD_LINES - TAIL_LINES} lines left out here"
        lines = [*lines[:HEAD_LINES], left_out, *lines[-TAIL_LINES:]]
    return [line if len(line) <= MAX_COLUMNS else line[: MAX_COLUMNS - 1] + "…" for line in lines]


def show(name: str) -> None:
    """The whole way for one checkpoint: folder, plan, file, checks, answers."""
    source, artifact = f"examples/tiny/{name}", str(OUT / f"{name}.ninfer")
    run("ninfer-convert", "plan", source)
    run("ninfer-convert", "build", source, artifact)
    run("ninfer-verify", "check", artifact)
    run("ninfer-verify", "index", artifact)
    run("ninfer-verify", "check", "--full", artifact)
    for question in QUESTIONS:
        mode = () if question.thinks else ("--no-thinking",)
        generate = ("ninfer-run", "generate", artifact, "--greedy", *mode, "--prompt", question.text)
        answer = run(*generate, answer_only=not question.thinks)
        if question.expected not in answer:
            sys.exit(f"demo: the answer to {question.text!r} lacks {question.expected!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("dense", "moe"), help="one of the two checkpoints")
    only = parser.parse_args().only
    # The commands of this interpreter's environment come first, whatever else the machine has.
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    # Matrices of 128 columns gain nothing from a second thread and lose much to one that waits for a busy core.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    shutil.rmtree(ROOT / OUT, ignore_errors=True)
    (ROOT / OUT).mkdir(parents=True)
    started = time.monotonic()
    for name in (only,) if only else ("dense", "moe"):
        show(name)
    print(f"\ndemo: done in {time.monotonic() - started:.0f} s; the files are in {OUT}/")


if __name__ == "__main__":
    main()
