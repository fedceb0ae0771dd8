"""The options of ``ninfer-run plan``."""

from typing import Annotated

import typer

from ninfer_runtime.commands import flags
from ninfer_runtime.commands.parsing import positive, unsigned


def plan(
    source: Annotated[
        str, typer.Argument(metavar="FILE", show_default=False, help="The .ninfer file, or a published identity.")
    ],
    gpu: Annotated[
        list[str] | None,
        typer.Option("--gpu", metavar="NAME|BYTES", help="rtx5090, rtx5060ti, h200, or its memory; repeatable.  [all]"),
    ] = None,
    kv_dtype: flags.KvDtypeName = "auto",
    kv_capacity: flags.KvCapacity = None,
    max_context: Annotated[
        int | None, typer.Option("--max-context", parser=positive, metavar="N", help="Tokens of a sequence.  [8192]")
    ] = None,
    max_concurrency: flags.MaxConcurrency = 1,
    prefill_chunk: flags.PrefillChunk = None,
    snapshots: Annotated[
        int, typer.Option("--snapshots", parser=unsigned, metavar="N", help="States kept for prefix reuse.")
    ] = 0,
    spec: flags.Spec = "none",
    draft_tokens: flags.DraftTokens = 0,
    lm_head_draft: flags.LmHeadDraft = False,
    weight_residency: flags.WeightResidencyName = "device",
    n_ffn_layers: flags.FfnLayers = None,
    host_embedding: flags.HostEmbedding = False,
    as_json: flags.Json = False,
) -> int:
    """Print what the model takes of a card's memory, without the card: what fits, and the flag that would help."""
    from ninfer_runtime.commands.options import PlanOptions
    from ninfer_runtime.commands.parsing import ffn_layers
    from ninfer_runtime.commands.parsing import kv_capacity as read_capacity
    from ninfer_runtime.commands.plan import plan as run

    capacity = None if kv_capacity is None else read_capacity(kv_capacity)
    options = PlanOptions(
        max_context,
        kv_dtype,
        capacity,
        max_concurrency,
        prefill_chunk,
        snapshots,
        spec,
        draft_tokens,
        lm_head_draft,
        weight_residency,
        ffn_layers(n_ffn_layers),
        host_embedding,
    )
    return run(source, gpu or (), options, as_json=as_json)
