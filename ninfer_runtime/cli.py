"""The command ``ninfer-run``: generate, chat, serve, logits, score, calibrate, plan (specs/cli.md).

Each function parses, calls one function of ``commands``, and returns its exit code.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from ninfer_format.command import run_cli
from ninfer_runtime.commands.bench import bench
from ninfer_runtime.commands.flags import (
    Backend,
    ChoiceTexts,
    Device,
    DraftAcceptance,
    DraftTokens,
    DtypeName,
    Effort,
    FfnCpuLayers,
    FfnLayers,
    File,
    Frequency,
    GrammarFile,
    Greedy,
    HostEmbedding,
    HostLinkLimit,
    IgnoreEos,
    Json,
    JsonSchemaFile,
    KvCapacity,
    KvDtypeName,
    KvRotation,
    LmHeadDraft,
    MaxConcurrency,
    MaxContext,
    MaxNew,
    MaxThinking,
    MemoryLimit,
    MinP,
    NoDraftBackoff,
    NoThinking,
    Nvfp4ActivationsName,
    OnOff,
    PrefillActivationsName,
    PrefillChunk,
    Presence,
    PrintTokenIds,
    RawOutput,
    ReasoningStop,
    RegexPattern,
    Seed,
    Spec,
    Stop,
    StopTokenId,
    Temperature,
    TopK,
    TopP,
    WeightResidencyName,
)
from ninfer_runtime.commands.parsing import positive
from ninfer_runtime.commands.plan_cli import plan
from ninfer_runtime.commands.serve_cli import serve

if TYPE_CHECKING:
    from ninfer_runtime.commands.options import AnswerOptions, EngineOptions, SamplingOptions

app = typer.Typer(
    name="ninfer-run",
    help="Run a .ninfer file: answers, conversations, logits, perplexity.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(bench)
app.command()(serve)
app.command()(plan)


def _engine_options(
    file: Path,
    *,
    kv_rotation: OnOff = "on",
    kv_capacity: str | None = None,
    no_draft_backoff: bool = False,
    n_ffn_layers: str | None = None,
    ffn_cpu: str | None = None,
    **fields: Any,
) -> "EngineOptions":
    """Fields that are spelled otherwise as options; the rest have the names of ``EngineOptions``."""
    from ninfer_runtime.commands.options import EngineOptions
    from ninfer_runtime.commands.parsing import ffn_cpu as read_cpu
    from ninfer_runtime.commands.parsing import ffn_layers
    from ninfer_runtime.commands.parsing import kv_capacity as read_capacity

    return EngineOptions(
        file,
        kv_rotation=kv_rotation == "on",
        kv_capacity=None if kv_capacity is None else read_capacity(kv_capacity),
        draft_backoff=not no_draft_backoff,
        n_ffn_layers=ffn_layers(n_ffn_layers),
        ffn_cpu=read_cpu(ffn_cpu),
        **fields,
    )


def _sampling_options(
    greedy: bool,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    min_p: float | None,
    presence_penalty: float | None,
    frequency_penalty: float | None,
    seed: int | None,
) -> "SamplingOptions":
    from ninfer_runtime.commands.options import SamplingOptions

    return SamplingOptions(greedy, temperature, top_p, top_k, min_p, presence_penalty, frequency_penalty, seed)


def _answer_options(
    *,
    stop: list[str] | None,
    reasoning_stop: list[str] | None,
    stop_token_id: list[int] | None,
    no_thinking: bool,
    json_schema: str | None,
    regex: str | None,
    choice: list[str] | None,
    grammar: str | None,
    stdin_is_free: bool = True,
    **fields: Any,
) -> "AnswerOptions":
    """Fields that are spelled otherwise as options; the rest have the names of ``AnswerOptions``."""
    from ninfer_runtime.commands.forms import read_form
    from ninfer_runtime.commands.options import AnswerOptions

    return AnswerOptions(
        stops=tuple(stop or ()),
        reasoning_stops=tuple(reasoning_stop or ()),
        stop_token_ids=tuple(stop_token_id or ()),
        thinking=not no_thinking,
        form=read_form(json_schema, regex, choice, grammar, stdin_is_free=stdin_is_free),
        **fields,
    )


@app.command()
def generate(
    file: File,
    prompt: Annotated[
        str | None, typer.Option("--prompt", metavar="TEXT", help="A user message; - reads stdin.")
    ] = None,
    messages: Annotated[str | None, typer.Option("--messages", metavar="FILE", help="A conversation in JSON.")] = None,
    ids: Annotated[str | None, typer.Option("--ids", metavar="1,2,3", help="Token ids as they are.")] = None,
    max_new: MaxNew = 128,
    max_context: MaxContext = None,
    prefill_chunk: PrefillChunk = None,
    greedy: Greedy = False,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    presence_penalty: Presence = None,
    frequency_penalty: Frequency = None,
    seed: Seed = None,
    stop: Stop = None,
    reasoning_stop: ReasoningStop = None,
    stop_token_id: StopTokenId = None,
    no_thinking: NoThinking = False,
    reasoning_effort: Effort = None,
    max_thinking: MaxThinking = None,
    json_schema: JsonSchemaFile = None,
    regex: RegexPattern = None,
    choice: ChoiceTexts = None,
    grammar: GrammarFile = None,
    raw_output: RawOutput = False,
    print_token_ids: PrintTokenIds = False,
    ignore_eos: IgnoreEos = False,
    backend: Backend = "reference",
    device: Device = None,
    dtype: DtypeName = "bfloat16",
    kv_dtype: KvDtypeName = "auto",
    kv_rotation: KvRotation = "on",
    nvfp4_activations: Nvfp4ActivationsName = "auto",
    prefill_activations: PrefillActivationsName = "bf16",
    kv_capacity: KvCapacity = None,
    max_concurrency: MaxConcurrency = 1,
    spec: Spec = "none",
    draft_tokens: DraftTokens = 0,
    lm_head_draft: LmHeadDraft = False,
    draft_acceptance: DraftAcceptance = "equal",
    no_draft_backoff: NoDraftBackoff = False,
    weight_residency: WeightResidencyName = "device",
    n_ffn_layers: FfnLayers = None,
    ffn_cpu: FfnCpuLayers = None,
    host_embedding: HostEmbedding = False,
    memory_limit: MemoryLimit = None,
    host_link_limit: HostLinkLimit = None,
    as_json: Json = False,
) -> int:
    """Answer one prompt: the answer on stdout, thinking and statistics on stderr."""
    from ninfer_runtime.commands.generate import PromptOptions
    from ninfer_runtime.commands.generate import generate as run

    return run(
        _engine_options(
            file,
            backend=backend,
            device=device,
            dtype=dtype,
            kv_dtype=kv_dtype,
            max_context=max_context,
            prefill_chunk=prefill_chunk,
            kv_rotation=kv_rotation,
            nvfp4_activations=nvfp4_activations,
            prefill_activations=prefill_activations,
            kv_capacity=kv_capacity,
            max_concurrency=max_concurrency,
            spec=spec,
            draft_tokens=draft_tokens,
            lm_head_draft=lm_head_draft,
            draft_acceptance=draft_acceptance,
            no_draft_backoff=no_draft_backoff,
            weight_residency=weight_residency,
            n_ffn_layers=n_ffn_layers,
            ffn_cpu=ffn_cpu,
            host_embedding=host_embedding,
            memory_limit=memory_limit,
            host_link_limit=host_link_limit,
        ),
        PromptOptions(prompt, messages, ids),
        _sampling_options(greedy, temperature, top_p, top_k, min_p, presence_penalty, frequency_penalty, seed),
        _answer_options(
            max_new=max_new,
            stop=stop,
            reasoning_stop=reasoning_stop,
            stop_token_id=stop_token_id,
            no_thinking=no_thinking,
            reasoning_effort=reasoning_effort,
            max_thinking=max_thinking,
            json_schema=json_schema,
            regex=regex,
            choice=choice,
            grammar=grammar,
            raw_output=raw_output,
            print_token_ids=print_token_ids,
            ignore_eos=ignore_eos,
        ),
        as_json=as_json,
    )


@app.command()
def chat(
    file: File,
    max_new: MaxNew = 1024,
    max_context: MaxContext = None,
    prefill_chunk: PrefillChunk = None,
    greedy: Greedy = False,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    presence_penalty: Presence = None,
    frequency_penalty: Frequency = None,
    seed: Seed = None,
    stop: Stop = None,
    reasoning_stop: ReasoningStop = None,
    stop_token_id: StopTokenId = None,
    no_thinking: NoThinking = False,
    reasoning_effort: Effort = None,
    max_thinking: MaxThinking = None,
    json_schema: JsonSchemaFile = None,
    regex: RegexPattern = None,
    choice: ChoiceTexts = None,
    grammar: GrammarFile = None,
    raw_output: RawOutput = False,
    print_token_ids: PrintTokenIds = False,
    backend: Backend = "reference",
    device: Device = None,
    dtype: DtypeName = "bfloat16",
    kv_dtype: KvDtypeName = "auto",
    kv_rotation: KvRotation = "on",
    nvfp4_activations: Nvfp4ActivationsName = "auto",
    prefill_activations: PrefillActivationsName = "bf16",
    kv_capacity: KvCapacity = None,
    max_concurrency: MaxConcurrency = 1,
    spec: Spec = "none",
    draft_tokens: DraftTokens = 0,
    lm_head_draft: LmHeadDraft = False,
    draft_acceptance: DraftAcceptance = "equal",
    no_draft_backoff: NoDraftBackoff = False,
    weight_residency: WeightResidencyName = "device",
    n_ffn_layers: FfnLayers = None,
    ffn_cpu: FfnCpuLayers = None,
    host_embedding: HostEmbedding = False,
    memory_limit: MemoryLimit = None,
    host_link_limit: HostLinkLimit = None,
    statistics: Annotated[bool, typer.Option("--statistics", help="Print times after every answer.")] = False,
) -> int:
    """Talk to the model: /reset forgets, /quit leaves, Ctrl-C stops an answer."""
    from ninfer_runtime.commands.chat import chat as run

    return run(
        _engine_options(
            file,
            backend=backend,
            device=device,
            dtype=dtype,
            kv_dtype=kv_dtype,
            max_context=max_context,
            prefill_chunk=prefill_chunk,
            kv_rotation=kv_rotation,
            nvfp4_activations=nvfp4_activations,
            prefill_activations=prefill_activations,
            kv_capacity=kv_capacity,
            max_concurrency=max_concurrency,
            spec=spec,
            draft_tokens=draft_tokens,
            lm_head_draft=lm_head_draft,
            draft_acceptance=draft_acceptance,
            no_draft_backoff=no_draft_backoff,
            weight_residency=weight_residency,
            n_ffn_layers=n_ffn_layers,
            ffn_cpu=ffn_cpu,
            host_embedding=host_embedding,
            memory_limit=memory_limit,
            host_link_limit=host_link_limit,
        ),
        _sampling_options(greedy, temperature, top_p, top_k, min_p, presence_penalty, frequency_penalty, seed),
        _answer_options(
            max_new=max_new,
            stop=stop,
            reasoning_stop=reasoning_stop,
            stop_token_id=stop_token_id,
            no_thinking=no_thinking,
            reasoning_effort=reasoning_effort,
            max_thinking=max_thinking,
            json_schema=json_schema,
            regex=regex,
            choice=choice,
            grammar=grammar,
            stdin_is_free=False,
            raw_output=raw_output,
            print_token_ids=print_token_ids,
        ),
        statistics=statistics,
    )


@app.command()
def logits(
    file: File,
    ids: Annotated[str, typer.Option("--ids", metavar="1,2,3", help="The tokens to feed; - reads stdin.")],
    out: Annotated[Path, typer.Option("--out", metavar="X.npz", help="File to write: logits and ids.")],
    prefill_chunk: PrefillChunk = None,
    backend: Backend = "reference",
    device: Device = None,
    dtype: DtypeName = "bfloat16",
    kv_dtype: KvDtypeName = "auto",
) -> int:
    """Write the logits after every given token, all rows of the head, as float32."""
    from ninfer_runtime.commands.logits import logits as run
    from ninfer_runtime.commands.parsing import token_ids

    return run(
        _engine_options(
            file,
            backend=backend,
            device=device,
            dtype=dtype,
            kv_dtype=kv_dtype,
            prefill_chunk=prefill_chunk,
        ),
        token_ids(ids),
        out,
    )


@app.command()
def score(
    file: File,
    text: Annotated[str, typer.Option("--text", metavar="FILE", help="The text in UTF-8; - reads stdin.")],
    max_context: MaxContext = None,
    prefill_chunk: PrefillChunk = None,
    backend: Backend = "reference",
    device: Device = None,
    dtype: DtypeName = "bfloat16",
    kv_dtype: KvDtypeName = "auto",
    kv_rotation: KvRotation = "on",
    nvfp4_activations: Nvfp4ActivationsName = "auto",
    prefill_activations: PrefillActivationsName = "bf16",
    kv_capacity: KvCapacity = None,
    max_concurrency: MaxConcurrency = 1,
    as_json: Json = False,
) -> int:
    """Print the perplexity of a text."""
    from ninfer_runtime.commands.score import score as run

    return run(
        _engine_options(
            file,
            backend=backend,
            device=device,
            dtype=dtype,
            kv_dtype=kv_dtype,
            max_context=max_context,
            prefill_chunk=prefill_chunk,
            kv_rotation=kv_rotation,
            nvfp4_activations=nvfp4_activations,
            prefill_activations=prefill_activations,
            kv_capacity=kv_capacity,
            max_concurrency=max_concurrency,
        ),
        text,
        as_json=as_json,
    )


@app.command()
def calibrate(
    file: File,
    out: Annotated[Path, typer.Option("--out", metavar="STATS.json", help="File to write.")],
    text: Annotated[
        list[str] | None, typer.Option("--text", metavar="FILE", help="A text in UTF-8; repeatable, - reads stdin.")
    ] = None,
    messages: Annotated[
        list[str] | None, typer.Option("--messages", metavar="FILE", help="A conversation in JSON; repeatable.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", parser=positive, metavar="N", help="Feed at most so many in all.")
    ] = None,
    amax_only: Annotated[bool, typer.Option("--amax-only", help="Leave the means per channel out.")] = False,
    max_context: MaxContext = None,
    prefill_chunk: PrefillChunk = None,
    backend: Backend = "reference",
    device: Device = None,
    dtype: DtypeName = "bfloat16",
    kv_dtype: KvDtypeName = "auto",
) -> int:
    """Measure what the matrices multiply, for `ninfer-convert build --activation-stats`."""
    from ninfer_runtime.commands.calibrate import CalibrationSources
    from ninfer_runtime.commands.calibrate import calibrate as run

    sources = CalibrationSources(text or (), messages or (), max_tokens)
    options = _engine_options(
        file,
        backend=backend,
        device=device,
        dtype=dtype,
        kv_dtype=kv_dtype,
        max_context=max_context,
        prefill_chunk=prefill_chunk,
    )
    return run(options, sources, out, channels=not amax_only)


@app.command()
def kernels(
    arch: Annotated[
        list[str] | None,
        typer.Option("--arch", metavar="sm_120a|sm_90a", help="Target to compile for; repeatable.  [both]"),
    ] = None,
    sass: Annotated[bool, typer.Option("--sass", help="Also count the main loop's instructions (nvdisasm).")] = False,
    jobs: Annotated[int | None, typer.Option("--jobs", parser=positive, metavar="N", help="Threads.  [cores]")] = None,
    as_json: Json = False,
) -> int:
    """Compile every CUDA kernel without a card and list what each takes: registers, spills, shared memory."""
    from ninfer_runtime.commands.kernels import kernels as run

    return run(arch, sass=sass, jobs=jobs, as_json=as_json)


def main() -> NoReturn:
    """Entry point of ``ninfer-run``."""
    run_cli(app)
