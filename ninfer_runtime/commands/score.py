"""``ninfer-run score``: perplexity of a text."""

import json
import math
import sys
import time

from ninfer_format.errors import UsageError
from ninfer_runtime.commands import parsing
from ninfer_runtime.commands.options import EngineOptions
from ninfer_runtime.commands.report import say_rows, start_rows
from ninfer_runtime.commands.session import open_session
from ninfer_runtime.engine.teacher import SHORTEST_TEXT


def score(engine_options: EngineOptions, text_file: str, *, as_json: bool) -> int:
    """Print perplexity, nats per token and counts; the exit code. The text is encoded without special tokens."""
    text = parsing.read_text(text_file)
    with open_session(engine_options) as session:
        token_ids = session.frontend.tokenizer.encode_text(text)
        if len(token_ids) < SHORTEST_TEXT:
            raise UsageError(f"the text has {len(token_ids)} tokens, expected at least {SHORTEST_TEXT}")
        config = session.engine_config()
        with session.engine(config) as engine:
            say_rows(start_rows(session, config, engine))
            started = time.perf_counter()
            result = engine.score(token_ids)
            seconds = time.perf_counter() - started
    nats = result.mean_negative_log_likelihood
    perplexity = math.exp(nats) if nats < math.log(sys.float_info.max) else math.inf
    if as_json:
        document = {
            "schema": "ninfer.score/1",
            "model": str(session.artifact.identity),
            "perplexity": perplexity if math.isfinite(perplexity) else None,
            "nats_per_token": nats,
            "tokens": result.n_tokens,
            "scored_tokens": result.n_scored,
            "context": config.max_context,
            "dtype": config.dtype,
            "seconds": seconds,
        }
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    else:
        sys.stdout.write(
            f"perplexity {perplexity:.4f}, {nats:.6f} nats per token, {result.n_scored} of {result.n_tokens} tokens "
            f"scored\n"
        )
    return 0
