"""Options that several subcommands of ``ninfer-run`` share, as annotations."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from ninfer_runtime.commands.parsing import decimal, integer, link_rate, memory_size, positive, unsigned
from ninfer_runtime.config import (
    Acceptance,
    Dtype,
    KvDtype,
    Nvfp4Activations,
    PrefillActivations,
    Proposer,
    WeightResidency,
)

OnOff = Literal["on", "off"]

File = Annotated[Path, typer.Argument(metavar="FILE", show_default=False, help="The .ninfer file.")]
Backend = Annotated[str, typer.Option("--backend", metavar="NAME", help="Implementation to run on: reference or cuda.")]
Device = Annotated[
    str | None,
    typer.Option(
        "--device", metavar="cpu|cuda", help="Where to run; cuda:1 names one of several.  [the backend's own]"
    ),
]
DtypeName = Annotated[Dtype, typer.Option("--dtype", help="Precision of the arithmetic.")]
KvDtypeName = Annotated[
    KvDtype, typer.Option("--kv-dtype", help="Storage of keys and values; auto keeps them as they are computed.")
]
MaxContext = Annotated[
    int | None,
    typer.Option("--max-context", parser=positive, metavar="N", help="Most tokens of prompt and answer.  [2048]"),
]
PrefillChunk = Annotated[
    int | None,
    typer.Option(
        "--prefill-chunk",
        parser=positive,
        metavar="N",
        help="Prompt tokens at a time, a multiple of 128.  [1024; on a card 4096 with experts]",
    ),
]
KvRotation = Annotated[
    OnOff, typer.Option("--kv-rotation", help="Rotate each head before it is stored in int8 or fp6.")
]
Nvfp4ActivationsName = Annotated[
    Nvfp4Activations,
    typer.Option("--nvfp4-activations", help="Prompt rows that NVFP4 matrices multiply; auto: a4 on cards for it."),
]
PrefillActivationsName = Annotated[
    PrefillActivations,
    typer.Option("--prefill-activations", help="Prompt rows that matrices of integer codes multiply."),
]
KvCapacity = Annotated[
    str | None,
    typer.Option("--kv-capacity", metavar="N|auto", help="Tokens in the pool of all sequences; auto: what is free."),
]
WeightResidencyName = Annotated[
    WeightResidency,
    typer.Option("--weight-residency", help="ffn: feed-forward networks wait in host memory as far as they must."),
]
FfnLayers = Annotated[
    str | None,
    typer.Option("--n-ffn-layers", metavar="N|auto", help="Layers whose networks stay on the device.  [auto]"),
]
FfnCpuLayers = Annotated[
    str | None,
    typer.Option("--ffn-cpu", metavar="N|auto", help="Of the other layers, those the CPU computes in rounds.  [0]"),
]
HostEmbedding = Annotated[
    bool, typer.Option("--host-embedding", help="Keep the token embedding in host memory; its rows are read there.")
]
MemoryLimit = Annotated[
    int | None,
    typer.Option("--memory-limit", parser=memory_size, metavar="SIZE", help="Use a card as if it had no more memory."),
]
HostLinkLimit = Annotated[
    float | None,
    typer.Option("--host-link-limit", parser=link_rate, metavar="RATE", help="Copy networks no faster; for tests."),
]
MaxConcurrency = Annotated[
    int, typer.Option("--max-concurrency", parser=positive, metavar="N", help="Sequences at once, 1 to 8.")
]
Spec = Annotated[Proposer, typer.Option("--spec", help="What drafts tokens; mtp is the model's own draft layer.")]
DraftTokens = Annotated[
    int, typer.Option("--draft-tokens", parser=unsigned, metavar="N", help="Drafts per round, 1 to 5, with --spec.")
]
LmHeadDraft = Annotated[bool, typer.Option("--lm-head-draft", help="Draft with the head over frequent tokens.")]
DraftAcceptance = Annotated[
    Acceptance,
    typer.Option("--draft-acceptance", help="equal: the answer is that without drafts; ratio: only as likely."),
]
NoDraftBackoff = Annotated[bool, typer.Option("--no-draft-backoff", help="Draft also where it does not pay.")]
MaxNew = Annotated[int, typer.Option("--max-new", parser=positive, metavar="N", help="Most tokens of an answer.")]
Greedy = Annotated[bool, typer.Option("--greedy", help="Always the most likely token.")]
Temperature = Annotated[float | None, typer.Option("--temperature", parser=decimal, metavar="F", help="0 to 2.")]
TopP = Annotated[float | None, typer.Option("--top-p", parser=decimal, metavar="F", help="0 to 1.")]
TopK = Annotated[int | None, typer.Option("--top-k", parser=integer, metavar="N", help="0 or -1 switches it off.")]
MinP = Annotated[float | None, typer.Option("--min-p", parser=decimal, metavar="F", help="0 to 1.")]
Presence = Annotated[float | None, typer.Option("--presence-penalty", parser=decimal, metavar="F", help="-2 to 2.")]
Frequency = Annotated[float | None, typer.Option("--frequency-penalty", parser=decimal, metavar="F", help="-2 to 2.")]
Seed = Annotated[
    int | None, typer.Option("--seed", parser=unsigned, metavar="N", help="Repeats an answer; drawn if not given.")
]
Stop = Annotated[list[str] | None, typer.Option("--stop", metavar="TEXT", help="End the answer here; repeatable.")]
ReasoningStop = Annotated[
    list[str] | None, typer.Option("--reasoning-stop", metavar="TEXT", help="End in the thinking; repeatable.")
]
StopTokenId = Annotated[
    list[int] | None,
    typer.Option("--stop-token-id", parser=unsigned, metavar="N", help="A further id that ends it; repeatable."),
]
MaxThinking = Annotated[
    int | None,
    typer.Option("--max-thinking", parser=positive, metavar="N", help="Thinking tokens before it is closed.  [no end]"),
]
JsonSchemaFile = Annotated[
    str | None, typer.Option("--json-schema", metavar="FILE", help="The answer is JSON of this schema; - reads stdin.")
]
RegexPattern = Annotated[
    str | None, typer.Option("--regex", metavar="PATTERN", help="The whole answer matches this pattern.")
]
ChoiceTexts = Annotated[
    list[str] | None, typer.Option("--choice", metavar="TEXT", help="The answer is one of these; repeatable.")
]
GrammarFile = Annotated[
    str | None, typer.Option("--grammar", metavar="FILE", help="The answer follows this Lark grammar; - reads stdin.")
]
NoThinking = Annotated[bool, typer.Option("--no-thinking", help="Ask for the answer without thinking.")]
Effort = Annotated[
    str | None, typer.Option("--reasoning-effort", metavar="LEVEL", help="How much to think, if the template knows.")
]
RawOutput = Annotated[bool, typer.Option("--raw-output", help="Show tags and control tokens, all on stdout.")]
PrintTokenIds = Annotated[bool, typer.Option("--print-token-ids", help="List the generated ids on stderr.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Run on past the end of the turn.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
