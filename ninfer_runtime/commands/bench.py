"""``ninfer-run bench``: synthetic artifacts and benchmarks (specs/benchmarks.md)."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ninfer_runtime.commands.flags import FfnCpuLayers, Nvfp4ActivationsName, PrefillActivationsName, PrefillChunk
from ninfer_runtime.commands.parsing import ffn_cpu as read_cpu
from ninfer_runtime.commands.parsing import ffn_layers, link_rate, memory_size, positive, unsigned
from ninfer_runtime.config import Dtype, KvDtype

if TYPE_CHECKING:
    from ninfer_runtime.bench.running import BenchOptions
    from ninfer_runtime.bench.suite import Output

bench = typer.Typer(
    name="bench",
    help="Measure speed against what the machine can do; write synthetic artifacts.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

File = Annotated[Path, typer.Argument(metavar="FILE", show_default=False, help="The .ninfer file.")]
Backend = Annotated[str, typer.Option("--backend", metavar="NAME", help="Implementation to run on: cuda or reference.")]
Device = Annotated[
    str | None,
    typer.Option("--device", metavar="cpu|cuda", help="Where to run; cuda:1 is the second card.  [the backend's own]"),
]
DtypeName = Annotated[Dtype, typer.Option("--dtype", help="Precision of the arithmetic.")]
KvDtypeName = Annotated[
    KvDtype | None,
    typer.Option("--kv-dtype", help="Storage of keys and values.  [int8; reference: auto]"),
]
Context = Annotated[
    list[int] | None,
    typer.Option("--context", parser=positive, metavar="N", help="Tokens before the rounds; repeatable.  [7680]"),
]
Rounds = Annotated[int, typer.Option("--rounds", parser=positive, metavar="N", help="Rounds to time.")]
Seed = Annotated[int, typer.Option("--seed", parser=unsigned, metavar="N", help="Of the random tokens.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")]
Plot = Annotated[Path | None, typer.Option("--plot", metavar="PNG", help="Also draw the roofline.")]


def _options(
    file: Path, backend: str, device: str | None, dtype: Dtype, kv_dtype: KvDtype | None, chunk: int | None, seed: int
) -> "BenchOptions":
    from ninfer_runtime.backends import default_device
    from ninfer_runtime.bench.running import BenchOptions

    chosen: KvDtype = kv_dtype or ("auto" if backend == "reference" else "int8")
    return BenchOptions(file, backend, device or default_device(backend), dtype, chosen, chunk, seed)


def _output(as_json: bool, plot: Path | None, folder: Path | None = None) -> "Output":
    from ninfer_runtime.bench.suite import Output

    return Output(as_json, plot, folder)


@bench.command()
def synth(
    identity: Annotated[str, typer.Argument(metavar="MODEL/RECIPE", show_default=False, help="What to imitate.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", show_default=False, help="File to write.")],
    layers: Annotated[
        int | None, typer.Option("--layers", parser=positive, metavar="N", help="Only the first N decoder layers.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="JSON", help="Sizes of a model that is not published.")
    ] = None,
    seed: Seed = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it exists.")] = False,
    as_json: Json = False,
) -> int:
    """Write an artifact of exact structure with random weights."""
    from ninfer_runtime.bench.synthetic import plan_synthetic, write_synthetic

    plan = plan_synthetic(identity, n_layers=layers, config=config)
    report = write_synthetic(plan, out, seed=seed, overwrite=overwrite)
    sys.stdout.write(report.to_text(as_json=as_json))
    return 0


@bench.command()
def decode(
    file: File,
    context: Context = None,
    rows: Annotated[int, typer.Option("--rows", parser=positive, metavar="B", help="Sequences side by side.")] = 1,
    columns: Annotated[int, typer.Option("--columns", parser=positive, metavar="Q", help="Columns of each row.")] = 1,
    rounds: Rounds = 64,
    backend: Backend = "cuda",
    device: Device = None,
    dtype: DtypeName = "bfloat16",
    kv_dtype: KvDtypeName = None,
    prefill_chunk: PrefillChunk = None,
    seed: Seed = 0,
    plot: Plot = None,
    as_json: Json = False,
) -> int:
    """Time decode rounds at given contexts."""
    from ninfer_runtime.bench.decode import Shape
    from ninfer_runtime.bench.suite import CONTEXT, bench_decode

    shapes = [Shape(tokens, rows, columns, rounds) for tokens in context or [CONTEXT]]
    options = _options(file, backend, device, dtype, kv_dtype, prefill_chunk, seed)
    return bench_decode(options, shapes, _output(as_json, plot))


@bench.command()
def prefill(
    file: File,
    tokens: Annotated[
        list[int] | None,
        typer.Option("--tokens", parser=positive, metavar="N", help="Length of the prompt; repeatable.  [7680]"),
    ] = None,
    late: Annotated[
        int | None,
        typer.Option("--late", parser=positive, metavar="N", help="Also time attention of a chunk behind N tokens."),
    ] = None,
    backend: Backend = "cuda",
    device: Device = None,
    dtype: DtypeName = "bfloat16",
    kv_dtype: KvDtypeName = None,
    prefill_chunk: PrefillChunk = None,
    nvfp4_activations: Nvfp4ActivationsName = "auto",
    prefill_activations: PrefillActivationsName = "bf16",
    seed: Seed = 0,
    plot: Plot = None,
    as_json: Json = False,
) -> int:
    """Time prompts, and the attention of a late chunk."""
    from ninfer_runtime.bench.prefill import LateChunk, Prompt
    from ninfer_runtime.bench.suite import CONTEXT, LATE_CHUNK, bench_prefill

    prompts = [Prompt(n_tokens) for n_tokens in tokens or [CONTEXT]]
    options = _options(file, backend, device, dtype, kv_dtype, prefill_chunk, seed)
    options = replace(options, nvfp4_activations=nvfp4_activations, prefill_activations=prefill_activations)
    chunk = None if late is None else LateChunk(late, prefill_chunk or LATE_CHUNK.n_tokens)
    return bench_prefill(options, prompts, chunk, _output(as_json, plot))


@bench.command()
def load(
    file: File,
    backend: Backend = "cuda",
    device: Device = None,
    dtype: DtypeName = "bfloat16",
    kv_dtype: KvDtypeName = None,
    as_json: Json = False,
) -> int:
    """Time the start: page cache to device."""
    from ninfer_runtime.bench.suite import bench_load

    return bench_load(_options(file, backend, device, dtype, kv_dtype, 1024, 0), _output(as_json, None))


@bench.command()
def ops(
    file: File,
    context: Annotated[
        int, typer.Option("--context", parser=positive, metavar="N", help="Of the column rounds.")
    ] = 7680,
    rounds: Rounds = 64,
    backend: Backend = "cuda",
    device: Device = None,
    dtype: DtypeName = "bfloat16",
    kv_dtype: KvDtypeName = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> int:
    """Time matrix launches by kind, and rounds of 4 to 32 columns against one."""
    from ninfer_runtime.bench.suite import bench_ops

    options = _options(file, backend, device, dtype, kv_dtype, 1024, seed)
    return bench_ops(options, context, rounds, _output(as_json, None))


@bench.command()
def drafts(
    file: File,
    context: Annotated[int, typer.Option("--context", parser=positive, metavar="N", help="Of every row.")] = 7680,
    rounds: Rounds = 64,
    backend: Backend = "cuda",
    device: Device = None,
    dtype: DtypeName = "bfloat16",
    kv_dtype: KvDtypeName = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> int:
    """Time rounds of 1 to 8 rows, the recurrent layers alone, and rounds that draft, at a forced acceptance."""
    from ninfer_runtime.bench.suite import bench_drafts

    options = _options(file, backend, device, dtype, kv_dtype, 1024, seed)
    return bench_drafts(options, context, rounds, _output(as_json, None))


@bench.command()
def offload(
    file: File,
    n_ffn_layers: Annotated[
        list[str] | None,
        typer.Option("--n-ffn-layers", metavar="N|auto", help="Layers that stay; repeatable.  [auto and 41]"),
    ] = None,
    ffn_cpu: FfnCpuLayers = None,
    memory_limit: Annotated[
        int, typer.Option("--memory-limit", parser=memory_size, metavar="SIZE", help="Of the card that is meant.")
    ] = 16 << 30,
    host_link_limit: Annotated[
        float, typer.Option("--host-link-limit", parser=link_rate, metavar="RATE", help="Of its link.")
    ] = 27e9,
    context: Annotated[int, typer.Option("--context", parser=positive, metavar="N", help="Of the row.")] = 7680,
    rounds: Rounds = 64,
    backend: Backend = "cuda",
    device: Device = None,
    dtype: DtypeName = "bfloat16",
    kv_dtype: KvDtypeName = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> int:
    """Time rounds with feed-forward networks in host memory, as on a card with less memory and a slower link."""
    from ninfer_runtime.bench.offload import OffloadCase, offload_cases
    from ninfer_runtime.bench.suite import bench_offload

    counts = [case.n_layers for case in offload_cases(context, rounds)]
    if n_ffn_layers:
        counts = [ffn_layers(text) for text in n_ffn_layers]
    n_cpu = None if (on_cpu := read_cpu(ffn_cpu)) == "auto" else on_cpu
    cases = [OffloadCase(context, rounds, n, memory_limit, host_link_limit, n_cpu) for n in counts]
    options = _options(file, backend, device, dtype, kv_dtype, 1024, seed)
    return bench_offload(options, cases, _output(as_json, None))


@bench.command(name="all")
def everything(
    files: Annotated[list[Path], typer.Argument(metavar="FILE…", show_default=False, help="The .ninfer files.")],
    context: Context = None,
    rounds: Rounds = 64,
    record: Annotated[
        Path | None, typer.Option("--record", metavar="FOLDER", help="Write <date>-<device>.json there.")
    ] = None,
    backend: Backend = "cuda",
    device: Device = None,
    dtype: DtypeName = "bfloat16",
    kv_dtype: KvDtypeName = None,
    prefill_chunk: PrefillChunk = None,
    seed: Seed = 0,
    plot: Plot = None,
    as_json: Json = False,
) -> int:
    """Measure everything, by default at 7,680, 65,536 and 250,000 tokens of context."""
    from ninfer_runtime.bench.suite import CONTEXTS, bench_all

    every = [_options(file, backend, device, dtype, kv_dtype, prefill_chunk, seed) for file in files]
    return bench_all(every, tuple(context or CONTEXTS), rounds, _output(as_json, plot, record))
