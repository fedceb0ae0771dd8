"""The options of ``ninfer-run serve``."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ninfer_runtime.commands import flags
from ninfer_runtime.commands.parsing import decimal, positive, unsigned
from ninfer_runtime.serve.settings import LogLevel

ApiKeyFile = Annotated[
    Path | None,
    typer.Option("--api-key-file", metavar="FILE", help="API keys, one a line; NINFER_API_KEY adds more."),
]
ServedContext = Annotated[
    int | None,
    typer.Option("--max-context", parser=positive, metavar="N", help="Most tokens of prompt and answer.  [8192]"),
]
PrefixReuse = Annotated[bool, typer.Option("--no-prefix-reuse", help="Compute every prompt from its first token.")]
Snapshots = Annotated[
    int, typer.Option("--snapshots", parser=unsigned, metavar="N", help="Saved states for prefix reuse on the device.")
]
HostSnapshots = Annotated[
    int, typer.Option("--host-snapshots", parser=unsigned, metavar="N", help="More of them in host memory.")
]
MaxPending = Annotated[
    int, typer.Option("--max-pending", parser=positive, metavar="N", help="Answers that may wait; then 429.")
]
PendingSeconds = Annotated[
    float, typer.Option("--pending-seconds", parser=decimal, metavar="F", help="How long one may wait; then 503.")
]
LogLevelName = Annotated[LogLevel, typer.Option("--log-level", help="Of the lines on stderr.")]


def serve(
    file: flags.File,
    host: Annotated[str, typer.Option("--host", metavar="H", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", parser=unsigned, metavar="N", help="0 takes a free one.")] = 8080,
    api_key_file: ApiKeyFile = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Let the network in without a key.")] = False,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option("--allowed-host", metavar="NAME", help="A further name for a loopback server; repeatable."),
    ] = None,
    cors: Annotated[bool, typer.Option("--cors", help="Let web pages of any origin call the APIs.")] = False,
    model_id: Annotated[
        str | None, typer.Option("--model-id", metavar="ID", help="The name requests use.  [the artifact's]")
    ] = None,
    default_max_tokens: Annotated[
        int, typer.Option("--default-max-tokens", parser=positive, metavar="N", help="Limit of answers without one.")
    ] = 8192,
    no_thinking: Annotated[bool, typer.Option("--no-thinking", help="Prompts ask for no thinking.")] = False,
    max_thinking: flags.MaxThinking = None,
    preserve_thinking: Annotated[
        bool, typer.Option("--preserve-thinking", help="Keep the thinking of earlier turns in prompts.")
    ] = False,
    chat_template: Annotated[
        Path | None, typer.Option("--chat-template", metavar="FILE", help="In place of the artifact's own.")
    ] = None,
    tolerant_tool_calls: Annotated[
        bool, typer.Option("--tolerant-tool-calls", help="Take complete calls whose outer tag is missing.")
    ] = False,
    max_request_mib: Annotated[
        int, typer.Option("--max-request-mib", parser=positive, metavar="N", help="Largest request body.")
    ] = 384,
    response_store_records: Annotated[
        int, typer.Option("--response-store-records", parser=positive, metavar="N", help="Responses kept.")
    ] = 1024,
    response_store_mib: Annotated[
        int, typer.Option("--response-store-mib", parser=positive, metavar="N", help="Room for them.")
    ] = 256,
    ready_file: Annotated[
        Path | None,
        typer.Option("--ready-file", metavar="FILE", help="Written once the server listens: its URL and process id."),
    ] = None,
    drain_seconds: Annotated[
        float, typer.Option("--drain-seconds", parser=decimal, metavar="F", help="For running answers after a signal.")
    ] = 30.0,
    log_level: LogLevelName = "info",
    log_stats_seconds: Annotated[
        float, typer.Option("--log-stats-seconds", parser=decimal, metavar="F", help="Between lines; 0: none.")
    ] = 5.0,
    request_log: Annotated[
        Path | None, typer.Option("--request-log", metavar="FILE", help="Append a JSON line per event.")
    ] = None,
    log_content: Annotated[
        bool, typer.Option("--log-content", help="Prompts and answers stand in the request log.")
    ] = False,
    metrics_prefix: Annotated[
        str, typer.Option("--metrics-prefix", metavar="NAME", help="vllm fits dashboards made for it.")
    ] = "ninfer",
    media_root: Annotated[
        list[Path] | None,
        typer.Option("--media-root", metavar="DIR", help="Requests may name files below it; repeatable."),
    ] = None,
    media_allow_net: Annotated[
        list[str] | None,
        typer.Option("--media-allow-net", metavar="NET", help="Media may come from this private network; repeatable."),
    ] = None,
    no_page: Annotated[bool, typer.Option("--no-page", help="No page at /.")] = False,
    max_context: ServedContext = None,
    prefill_chunk: flags.PrefillChunk = None,
    max_concurrency: flags.MaxConcurrency = 1,
    max_pending: MaxPending = 16,
    pending_seconds: PendingSeconds = 30.0,
    no_prefix_reuse: PrefixReuse = False,
    snapshots: Snapshots = 4,
    host_snapshots: HostSnapshots = 12,
    kv_dtype: flags.KvDtypeName = "auto",
    kv_capacity: flags.KvCapacity = None,
    kv_rotation: flags.KvRotation = "on",
    nvfp4_activations: flags.Nvfp4ActivationsName = "auto",
    prefill_activations: flags.PrefillActivationsName = "bf16",
    spec: flags.Spec = "none",
    draft_tokens: flags.DraftTokens = 0,
    lm_head_draft: flags.LmHeadDraft = False,
    draft_acceptance: flags.DraftAcceptance = "equal",
    no_draft_backoff: flags.NoDraftBackoff = False,
    weight_residency: flags.WeightResidencyName = "device",
    n_ffn_layers: flags.FfnLayers = None,
    ffn_cpu: flags.FfnCpuLayers = None,
    host_embedding: flags.HostEmbedding = False,
    memory_limit: flags.MemoryLimit = None,
    host_link_limit: flags.HostLinkLimit = None,
    greedy: flags.Greedy = False,
    temperature: flags.Temperature = None,
    top_p: flags.TopP = None,
    top_k: flags.TopK = None,
    min_p: flags.MinP = None,
    presence_penalty: flags.Presence = None,
    frequency_penalty: flags.Frequency = None,
    seed: flags.Seed = None,
    backend: flags.Backend = "reference",
    device: flags.Device = None,
    dtype: flags.DtypeName = "bfloat16",
) -> int:
    """Serve a model: OpenAI chat, completions and responses, Anthropic messages, a page at /."""
    from ninfer_runtime.commands.options import EngineOptions, SamplingOptions
    from ninfer_runtime.commands.parsing import ffn_cpu as read_cpu
    from ninfer_runtime.commands.parsing import ffn_layers
    from ninfer_runtime.commands.parsing import kv_capacity as read_capacity
    from ninfer_runtime.commands.serve import ServeEngineOptions
    from ninfer_runtime.commands.serve import serve as run
    from ninfer_runtime.media.policy import MediaPolicy, read_networks
    from ninfer_runtime.serve.auth import read_keys
    from ninfer_runtime.serve.settings import MIB, ServeSettings

    engine: dict[str, Any] = {
        "kv_rotation": kv_rotation == "on",
        "nvfp4_activations": nvfp4_activations,
        "prefill_activations": prefill_activations,
        "kv_capacity": None if kv_capacity is None else read_capacity(kv_capacity),
        "draft_backoff": not no_draft_backoff,
        "n_ffn_layers": ffn_layers(n_ffn_layers),
        "ffn_cpu": read_cpu(ffn_cpu),
    }
    return run(
        EngineOptions(
            file,
            backend=backend,
            device=device,
            dtype=dtype,
            kv_dtype=kv_dtype,
            max_context=max_context,
            prefill_chunk=prefill_chunk,
            max_concurrency=max_concurrency,
            spec=spec,
            draft_tokens=draft_tokens,
            lm_head_draft=lm_head_draft,
            draft_acceptance=draft_acceptance,
            weight_residency=weight_residency,
            host_embedding=host_embedding,
            memory_limit=memory_limit,
            host_link_limit=host_link_limit,
            **engine,
        ),
        ServeEngineOptions(not no_prefix_reuse, snapshots, host_snapshots, max_pending, pending_seconds or None),
        SamplingOptions(greedy, temperature, top_p, top_k, min_p, presence_penalty, frequency_penalty, seed),
        ServeSettings(
            host=host,
            port=port,
            api_keys=read_keys(api_key_file),
            insecure=insecure,
            allowed_hosts=tuple(allowed_host or ()),
            cors=cors,
            model_id=model_id,
            default_max_tokens=default_max_tokens,
            thinking=not no_thinking,
            max_thinking=max_thinking,
            preserve_thinking=preserve_thinking,
            chat_template=chat_template,
            tolerant_tool_calls=tolerant_tool_calls,
            max_request_bytes=max_request_mib * MIB,
            store_records=response_store_records,
            store_bytes=response_store_mib * MIB,
            ready_file=ready_file,
            drain_seconds=drain_seconds,
            log_level=log_level,
            log_stats_seconds=log_stats_seconds,
            request_log=request_log,
            log_content=log_content,
            metrics_prefix=metrics_prefix,
            with_page=not no_page,
            media=MediaPolicy(tuple(media_root or ()), read_networks(media_allow_net or ())),
        ),
    )
