"""What a recipe costs in answers: the questions of tests/oracle/train_tiny.py, put to artifacts through the engine.

    python scripts/score_tasks.py SOURCE… [--recipes bf16,groupwise-int] [--transformers] [--json]

SOURCE is a checkpoint folder, which is built with every recipe into a temporary folder, or a finished .ninfer file.
Greedy answers, scored by exact match, with and without thinking; --transformers adds a column with the folder itself
run by transformers in float32.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from ninfer_convert.pipeline import build
from ninfer_convert.plan import BuildOptions, make_plan
from ninfer_runtime.backends import NAMES, default_device
from ninfer_runtime.config import Dtype, EngineConfig, SamplingParams
from ninfer_runtime.engine.engine import Engine
from ninfer_runtime.engine.sequence import Request
from ninfer_runtime.text.frontend import Frontend
from ninfer_runtime.text.messages import parse_conversation
from ninfer_runtime.text.stream import Reply, join

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "oracle"))
train_tiny = import_module("train_tiny")

SCHEMA = "ninfer.task-scores/1"
# That of train_tiny.evaluate, so that both put the same questions.
QUESTION_SEED = 12345
MAX_NEW = 120


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt and what counts as its answer. ``city`` is the argument that a tool question must pass."""

    row: str
    kind: str
    thinking: bool
    text: str
    answer: str
    tools: list[dict[str, Any]]
    city: str

    def is_answered(self, reply: Reply) -> bool:
        """Exact match; a story's place is free, a tool question needs the call."""
        said = reply.content.strip()
        if self.kind == "tool":
            return any(json.loads(call.arguments) == {"city": self.city} for call in reply.tool_calls)
        if self.kind == "story":
            return said.startswith("Once upon a time") and said.endswith(self.answer.split("gave back")[-1])
        return said == self.answer


def questions(per_kind: int) -> Iterator[Question]:
    """The questions of ``train_tiny.evaluate``, in its order."""
    rng = random.Random(QUESTION_SEED)
    for kind in train_tiny.TASKS:
        for thinking in (False, True):
            row = f"{kind} (thinking)" if thinking else kind
            for _ in range(per_kind):
                text, _, answer, tools, calls = train_tiny.example(kind, rng)
                city = calls[0]["function"]["arguments"]["city"] if calls else ""
                yield Question(row, kind, thinking, text, answer, tools or [], city)


def answer(engine: Engine, frontend: Frontend, question: Question) -> Reply:
    """The greedy reply to one question."""
    conversation = parse_conversation([{"role": "user", "content": question.text}], question.tools)
    prompt = frontend.prompt(conversation, thinking=question.thinking)
    request = Request(prompt.token_ids, SamplingParams.greedy(), max_new=MAX_NEW, stop_ids=frontend.generation.stop_ids)
    stream = frontend.stream(frontend.stream_options(prompt, conversation))
    events = [event for token in engine.generate(request) for event in stream.feed([token.token_id])]
    return join(events + stream.flush())


def score_artifact(path: Path, config: EngineConfig, per_kind: int) -> dict[str, int]:
    """Correct answers per task."""
    hits: dict[str, int] = {}
    with Engine.open(path, config) as engine:
        frontend = Frontend.open(engine.artifact)
        for question in questions(per_kind):
            hits.setdefault(question.row, 0)
            hits[question.row] += question.is_answered(answer(engine, frontend, question))
    return hits


def score_source(source: Path, recipes: list[str], config: EngineConfig, per_kind: int) -> dict[str, dict[str, int]]:
    """Column title → correct answers per task; a folder has one column for each recipe."""
    if source.is_file():
        return {source.name: score_artifact(source, config, per_kind)}
    columns = {}
    with tempfile.TemporaryDirectory() as folder:
        for recipe in recipes:
            out = Path(folder) / f"{recipe}.ninfer"
            build(make_plan(BuildOptions(source, out, recipe=recipe)))
            columns[recipe] = score_artifact(out, config, per_kind)
    return columns


def with_transformers(source: Path, per_kind: int) -> dict[str, int]:
    """The folder's own scores, by ``train_tiny.evaluate``."""
    exact = train_tiny.evaluate(source, per_kind)["exact"]
    return {row: int(score.partition("/")[0]) for row, score in exact.items()}


def table(source: str, columns: dict[str, dict[str, int]], per_kind: int) -> str:
    """One line per task, one column per artifact, the totals last."""
    rows = list(next(iter(columns.values())))
    lines = [[source, *columns]]
    lines += [[row, *(f"{hits[row]}/{per_kind}" for hits in columns.values())] for row in rows]
    lines += [["all", *(f"{sum(hits.values())}/{per_kind * len(rows)}" for hits in columns.values())]]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", type=Path, metavar="SOURCE")
    parser.add_argument("--recipes", default="bf16,groupwise-int", help="for folders (default: %(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the arithmetic")
    parser.add_argument("--backend", choices=NAMES, default="reference", help="where it runs; cuda means bfloat16")
    parser.add_argument("--per-kind", type=int, default=8, help="questions per task (default: %(default)s)")
    parser.add_argument("--transformers", action="store_true", help="add the folder's scores under transformers")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    given = parser.parse_args()
    dtype: Dtype = "bfloat16" if given.backend == "cuda" else given.dtype
    config = EngineConfig(backend=given.backend, device=default_device(given.backend), dtype=dtype)
    scores: dict[str, dict[str, dict[str, int]]] = {}
    for source in given.sources:
        columns = {"transformers": with_transformers(source, given.per_kind)} if given.transformers else {}
        columns |= score_source(source, given.recipes.split(","), config, given.per_kind)
        scores[str(source)] = columns
        if not given.json:
            print(table(str(source), columns, given.per_kind) + "\n", flush=True)
    if given.json:
        print(json.dumps({"schema": SCHEMA, "per_kind": given.per_kind, "dtype": dtype, "scores": scores}))


if __name__ == "__main__":
    main()
