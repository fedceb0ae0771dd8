"""How much of an agent's prompts is computed again: 20 turns through the engine, its scheduler and the prefix cache.

    python scripts/prefix_trace.py [SOURCE] [--turns 20] [--seed 1] [--json]

A turn is a question, up to four rounds of tool calls with their results, and an answer; every call to the model is a
request with the whole history. Between them come small requests that have nothing to do with the agent. All text is
synthetic, rendered by the template of SOURCE (a checkpoint folder or a .ninfer file; default: the tiny dense one).
What is counted does not depend on arithmetic, so the program behind the engine only remembers tokens, says what the
trace prescribes, and fails where a page or a state holds another text.

Thinking of earlier turns is dropped by the template, kept (``preserve_thinking``), or never sent back by the client.
Policies: "anchors" is what the engine does; "frontiers" keeps the same number of states, but only ends of sequences;
"last frontier" keeps one state, that of the sequence that ended last.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ninfer_format.reader import Artifact
from ninfer_runtime.backends.base import (
    Int32s,
    PrefillChunk,
    PrefillResult,
    ProgramLimits,
    Round,
    RoundResult,
    RowStatus,
    Ticket,
)
from ninfer_runtime.config import PAGE_TOKENS, EngineConfig, SamplingParams
from ninfer_runtime.engine.engine import Engine
from ninfer_runtime.engine.sequence import Anchors, FinishReason, Request
from ninfer_runtime.models.binder import BoundModel
from ninfer_runtime.text.frontend import Frontend, Prompt, special_names
from ninfer_runtime.text.generation_config import GenerationDefaults
from ninfer_runtime.text.messages import Conversation, Message, ToolCall
from ninfer_runtime.text.template import ChatTemplate, TemplateOptions
from ninfer_runtime.text.tokenizer import Tokenizer
from tests.runtime.history import HistoryProgram, as_program

ROOT = Path(__file__).resolve().parents[1]
SCHEMA = "ninfer.prefix-trace/1"
SOURCE = ROOT / "examples" / "tiny" / "dense"
Thinking = Literal["dropped", "preserved", "not sent back"]
Policy = Literal["anchors", "frontiers", "last frontier"]
THINKING: tuple[Thinking, ...] = ("dropped", "preserved", "not sent back")
POLICIES: tuple[Policy, ...] = ("anchors", "frontiers", "last frontier")
# What ``ninfer-run serve`` takes without flags.
DEVICE_STATES, HOST_STATES = 4, 12
MAX_CONTEXT = 65536
N_TOOLS = 20
# fmt: off
WORDS = (
    "river", "cloud", "stone", "garden", "window", "yellow", "silver", "monkey", "planet", "bridge", "candle", "forest",
    "rocket", "winter", "summer", "button", "read", "write", "open", "close", "list", "find", "count", "move", "build",
    "test", "check", "error", "value", "index", "start", "end", "file", "line", "path", "name",
)
# fmt: on


# ---- the text ----------------------------------------------------------------------------------
def words(rng: random.Random, low: int, high: int) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(low, high)))


def tool(rng: random.Random, i: int) -> dict[str, Any]:
    """A function with two to four described parameters."""
    names = rng.sample(WORDS, rng.randint(2, 4))
    properties = {name: {"type": "string", "description": words(rng, 3, 8)} for name in names}
    parameters = {"type": "object", "properties": properties, "required": names[:1]}
    about = {"name": f"{rng.choice(WORDS)}_{i}", "description": words(rng, 10, 25), "parameters": parameters}
    return {"type": "function", "function": about}


@dataclass(frozen=True, slots=True)
class Step:
    """One request: the conversation it sends, and what the model says to it."""

    turn: int
    conversation: Conversation
    answer: Message


def agent_steps(rng: random.Random, n_turns: int) -> Iterator[Step]:
    """The agent's requests. Their histories hold all thinking; what becomes of it is the rendering's business."""
    tools = tuple(tool(rng, i) for i in range(N_TOOLS))
    history = [Message("system", words(rng, 200, 250))]
    for turn in range(1, n_turns + 1):
        history.append(Message("user", words(rng, 8, 40)))
        for _ in range(rng.randint(0, 4)):
            function = rng.choice(tools)["function"]
            arguments = {name: words(rng, 1, 6) for name in function["parameters"]["properties"]}
            answer = Message("assistant", "", words(rng, 10, 60), (ToolCall(function["name"], arguments),))
            yield Step(turn, Conversation(tuple(history), tools), answer)
            history += [answer, Message("tool", words(rng, 10, 150))]
        answer = Message("assistant", words(rng, 10, 75), words(rng, 10, 75))
        yield Step(turn, Conversation(tuple(history), tools), answer)
        history.append(answer)


def small_step(rng: random.Random) -> Step:
    """A title, a summary or a question of somebody else: one message, with or without a system message."""
    system = [Message("system", words(random.Random(rng.randint(0, 2)), 20, 40))] if rng.random() < 0.7 else []
    asked = Message("user", words(rng, 8, 60))
    return Step(0, Conversation((*system, asked)), Message("assistant", words(rng, 4, 20), words(rng, 4, 15)))


def trace(seed: int, n_turns: int) -> list[Step]:
    """All requests in order: zero to two small ones behind each of the agent's."""
    rng = random.Random(seed)
    steps = []
    for step in agent_steps(rng, n_turns):
        steps += [step, *(small_step(rng) for _ in range(rng.randint(0, 2)))]
    return steps


def without_thinking(conversation: Conversation) -> Conversation:
    """The history of a client that sends no thinking back."""
    return replace(conversation, messages=tuple(replace(m, reasoning_content=None) for m in conversation.messages))


# ---- the model ---------------------------------------------------------------------------------
class SpeakingProgram(HistoryProgram):
    """Says what is prescribed: ``scripts[seed]`` is the length of the prompt and the token ids that follow it."""

    name = "speaking"
    notes: tuple[tuple[str, str], ...] = ()
    runs_ahead = False

    def __init__(self, limits: ProgramLimits, n_ids: int) -> None:
        super().__init__(limits)
        text = SimpleNamespace(vocab_rows=n_ids)
        spec = SimpleNamespace(text=text, n_addressable=n_ids, max_position=None)
        self.model = cast(BoundModel, SimpleNamespace(spec=spec, artifact=None))
        self.scripts: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._open: Round | None = None

    def prefill(self, chunk: PrefillChunk) -> PrefillResult:  # type: ignore[override]
        super().prefill(chunk)
        token_id = None if chunk.sampling is None else self._next_of(chunk.slot, chunk.sampling)
        return PrefillResult(token_id, np.zeros((0, 0), np.float32), None, None, True)

    def launch(self, round_: Round) -> Ticket:
        for b in range(round_.n_rows):
            pages, start = round_.pages[b], int(round_.starts[b])
            self._write(PrefillChunk(int(round_.slots[b]), round_.token_ids[b, :1], start, pages))
        self._open = round_
        return Ticket(start)

    def read(self, ticket: Ticket) -> RoundResult:
        round_, one = cast(Round, self._open), np.ones(len(cast(Round, self._open).slots), np.int32)
        drawn = [self._next_of(int(s), p) for s, p in zip(round_.slots, round_.sampling, strict=True)]
        ended = [token in stops for token, stops in zip(drawn, round_.stop_ids, strict=True)]
        status = tuple(RowStatus.STOP_ID if is_last else RowStatus.RUNNING for is_last in ended)
        return RoundResult(np.array(drawn, np.int32)[:, None], 0 * one, one, one, status, round_.starts)

    def commit(self, ticket: Ticket, columns: Int32s | None = None) -> None:
        assert columns is None or bool(np.all(columns == 1)), "only whole rounds are committed here"

    def close(self) -> None:
        self.scripts.clear()

    def _next_of(self, slot: int, sampling: SamplingParams) -> int:
        n_prompt, script = self.scripts[sampling.seed or 0]
        return script[self.length(slot) - n_prompt]


def frontend_of(source: Path) -> Frontend:
    """Tokenizer and template of an artifact, or of a checkpoint folder."""
    if source.is_file():
        with Artifact.open(source) as artifact:
            return Frontend.open(artifact)
    config = (source / "tokenizer_config.json").read_bytes()
    tokenizer = Tokenizer.from_files((source / "tokenizer.json").read_bytes(), config)
    template = (source / "chat_template.jinja").read_text(encoding="utf-8")
    names = special_names(config)
    generation = GenerationDefaults.from_file((source / "generation_config.json").read_bytes(), tokenizer.n_addressable)
    return Frontend(tokenizer, ChatTemplate(template, tuple(tokenizer.added), names), generation, names["eos_token"])


def spoken(frontend: Frontend, answer: Message) -> tuple[int, ...]:
    """What the model says where the template writes the answer behind the prompt, with the end of the turn."""
    messages = [message.for_template() for message in (Message("user", "?"), answer)]
    begun, ended = (TemplateOptions(add_generation_prompt=more) for more in (True, False))
    text = frontend.template.render(messages, (), ended).text.rstrip("\n")
    before = frontend.template.render(messages[:1], (), begun).text
    assert text.startswith(before), "the template writes the last answer otherwise than it was begun"
    said = text[len(before) :]
    return tuple(frontend.tokenizer.encode_segments(frontend.tokenizer.split(said)))


# ---- the count ---------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Count:
    """Tokens of some requests: of their prompts, those computed, and those of them that had been computed before."""

    n_requests: int = 0
    prompt: int = 0
    computed: int = 0
    again: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


@dataclass(frozen=True, slots=True)
class Outcome:
    """The agent's requests after turn 1, and the small ones; ``longest`` prompt."""

    thinking: Thinking
    policy: Policy
    agent: Count
    small: Count
    longest: int

    @property
    def share(self) -> float:
        """Of the agent's prompt tokens after turn 1, those that were computed: new ones and others."""
        return self.agent.computed / self.agent.prompt


def engine_of(frontend: Frontend, policy: Policy, n_pages: int) -> tuple[Engine, SpeakingProgram]:
    """An engine as ``serve`` starts it, but for the policy."""
    places = (1, 0) if policy == "last frontier" else (DEVICE_STATES, HOST_STATES)
    limits = ProgramLimits(
        max_context=MAX_CONTEXT, n_pages=n_pages, prefill_chunk=1024, device_snapshots=places[0],
        host_snapshots=places[1],
    )  # fmt: skip
    program = SpeakingProgram(limits, frontend.tokenizer.n_addressable)
    return Engine.of_program(as_program(program), EngineConfig(max_context=MAX_CONTEXT, prefix_reuse=True)), program


@dataclass(frozen=True, slots=True)
class Line:
    """A request as the engine gets it, what the model says, and the turn (0: a small request)."""

    turn: int
    prompt: Prompt
    script: tuple[int, ...]


def lines_of(frontend: Frontend, steps: Sequence[Step], thinking: Thinking) -> Iterator[Line]:
    """The trace as token ids."""
    for step in steps:
        sent = without_thinking(step.conversation) if thinking == "not sent back" else step.conversation
        prompt = frontend.prompt(sent, preserve_thinking=True if thinking == "preserved" else None)
        yield Line(step.turn, prompt, spoken(frontend, step.answer))


def run(frontend: Frontend, lines: Sequence[Line], thinking: Thinking, policy: Policy, n_pages: int) -> Outcome:
    """Every request of the trace, one after the other."""
    engine, program = engine_of(frontend, policy, n_pages)
    seen: list[Int32s] = []
    agent, small, longest = Count(), Count(), 0
    for i, line in enumerate(lines):
        ids = np.array(line.prompt.token_ids, np.int32)
        program.scripts[i] = (len(ids), line.script)
        anchors = line.prompt.anchors if policy == "anchors" else Anchors(line.prompt.anchors.key)
        stops = frozenset(line.script[-1:])
        handle = engine.generate(
            Request(line.prompt.token_ids, SamplingParams(seed=i), len(line.script), stops, anchors=anchors)
        )
        said = tuple(event.token_id for event in handle)
        finish = handle.finish
        assert finish is not None, "the handle was read to its end"
        assert (said, finish.reason) == (line.script, FinishReason.STOP_TOKEN), "the model did not say its lines"
        known = min(max((agreement(ids, text) for text in seen), default=0), len(ids) - 1)
        n_reused = finish.reuse.n_tokens
        counted = Count(1, len(ids), len(ids) - n_reused, known - n_reused)
        agent, small = (agent + counted if line.turn > 1 else agent), (small if line.turn else small + counted)
        longest = max(longest, len(ids))
        seen.append(np.concatenate((ids, np.array(said[:-1], np.int32))))
    engine.close()
    return Outcome(thinking, policy, agent, small, longest)


def agreement(first: Int32s, second: Int32s) -> int:
    """Tokens in which two texts agree from their beginning on."""
    n = min(len(first), len(second))
    different = np.flatnonzero(first[:n] != second[:n])
    return int(different[0]) if different.size else n


def pool_of(frontend: Frontend, steps: Sequence[Step]) -> int:
    """Pages that hold the longest sequence one and a half times."""
    last = steps[max(i for i, step in enumerate(steps) if step.turn)]
    n_tokens = len(frontend.prompt(last.conversation, preserve_thinking=True).token_ids) + 2048
    return n_tokens * 3 // 2 // PAGE_TOKENS


def outcomes(
    frontend: Frontend, seed: int, n_turns: int, thinking: Sequence[Thinking], policies: Sequence[Policy]
) -> list[Outcome]:
    """Every way to treat thinking with every policy, on the same trace and pool."""
    steps = trace(seed, n_turns)
    n_pages = pool_of(frontend, steps)
    lines = {mode: list(lines_of(frontend, steps, mode)) for mode in thinking}
    return [run(frontend, lines[mode], mode, policy, n_pages) for mode in thinking for policy in policies]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="?", type=Path, metavar="SOURCE", default=SOURCE)
    parser.add_argument("--turns", type=int, default=20, help="turns of the agent (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the text (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    given = parser.parse_args()
    if given.turns < 2:
        parser.error(f"--turns is {given.turns}, expected at least 2: what is counted comes after the first")
    found = outcomes(frontend_of(given.source), given.seed, given.turns, THINKING, POLICIES)
    if given.json:
        rows = [{**asdict(outcome), "share": outcome.share} for outcome in found]
        print(json.dumps({"schema": SCHEMA, "turns": given.turns, "seed": given.seed, "rows": rows}, indent=2))
        return
    print(f"{'thinking':<15}{'policy':<15}{'requests':>9}{'prompt':>10}{'computed':>10}{'share':>8}{'again':>10}")
    for outcome in found:
        agent = outcome.agent
        print(
            f"{outcome.thinking:<15}{outcome.policy:<15}{agent.n_requests:>9}{agent.prompt:>10,}{agent.computed:>10,}"
            f"{outcome.share:>8.1%}{agent.again:>10,}"
        )
    small, longest = found[0].small, max(outcome.longest for outcome in found)
    print(
        f"after turn 1 of {given.turns}; longest prompt {longest:,} tokens; {small.n_requests} small requests between"
    )


if __name__ == "__main__":
    main()
