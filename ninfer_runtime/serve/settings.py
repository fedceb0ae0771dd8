"""How a server is started: addresses, keys, limits, defaults of requests. Validated once, frozen."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from ninfer_format.errors import UsageError
from ninfer_runtime.config import SamplingParams
from ninfer_runtime.media.policy import MediaPolicy

LogLevel = Literal["debug", "info", "warning", "error"]

MIB = 1 << 20
METRIC_PREFIX = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
MAX_KEEPALIVE_SECONDS = 75


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """What the command line says beside the engine's own configuration.

    host, port           where to listen; port 0 takes a free one
    api_keys             any of them opens every route; none: no key is asked for
    insecure             listen beyond loopback without a key
    allowed_hosts        further names the ``Host`` header may have on a loopback server without a key
    cors                 let pages of any origin call the APIs
    model_id             the name requests use; None: the artifact's
    default_max_tokens   output limit of a request that names none
    thinking             whether prompts ask for thinking unless the request says otherwise
    chat_template        a file in place of the artifact's own template
    max_thinking         thinking tokens of a request that sets no budget; None: no limit
    preserve_thinking    keep the thinking of earlier turns in prompts
    max_request_bytes    of a body, checked before it is parsed; ``max_depth``: of nested arrays and objects
    store_records, store_bytes   of the Responses store
    ready_file           written once the server listens (URL and process id), gone when it has ended
    drain_seconds        how long running requests may go on after the first signal
    request_log          JSON lines are appended here; ``log_content`` adds prompts and answers
    metrics_prefix       of the Prometheus families
    media                where pictures and videos of requests may come from, for models that see
    """

    host: str = "127.0.0.1"
    port: int = 8080
    api_keys: tuple[str, ...] = ()
    insecure: bool = False
    allowed_hosts: tuple[str, ...] = ()
    cors: bool = False
    model_id: str | None = None
    default_max_tokens: int = 8192
    thinking: bool = True
    max_thinking: int | None = None
    preserve_thinking: bool = False
    chat_template: Path | None = None
    tolerant_tool_calls: bool = False
    max_request_bytes: int = 384 * MIB
    max_depth: int = 128
    store_records: int = 1024
    store_bytes: int = 256 * MIB
    ready_file: Path | None = None
    drain_seconds: float = 30.0
    log_level: LogLevel = "info"
    log_stats_seconds: float = 5.0
    request_log: Path | None = None
    log_content: bool = False
    metrics_prefix: str = "ninfer"
    with_page: bool = True
    media: MediaPolicy = field(default_factory=MediaPolicy)

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise UsageError(f"--port is {self.port}, expected 0 to 65535")
        if self.log_level not in get_args(LogLevel):
            raise UsageError(f"--log-level is {self.log_level!r}, expected one of {', '.join(get_args(LogLevel))}")
        if not METRIC_PREFIX.fullmatch(self.metrics_prefix):
            raise UsageError(f"--metrics-prefix is {self.metrics_prefix!r}, expected letters, digits and '_'")
        if self.model_id == "":
            raise UsageError("--model-id is empty, expected a name")
        if any(not key for key in self.api_keys):
            raise UsageError("an API key is empty")


@dataclass(frozen=True, slots=True)
class Facts:
    """What is true of the loaded model until the process ends.

    model_id      the name requests use;  ``artifact_model_id``/``weights_id``: the artifact's own
    created       Unix time of the artifact file
    max_output    most tokens an answer can have: ``max_context`` less one token of prompt
    sampling      defaults by mode of the prompt: True thinking, False not
    memory_rows   (label, bytes, "device" | "host") of the memory plan
    """

    model_id: str
    artifact_model_id: str
    weights_id: str
    architecture: str
    created: int
    max_context: int
    max_rows: int
    max_pending: int
    n_addressable: int
    vocab_rows: int
    sampling: Mapping[bool, SamplingParams]
    is_greedy_forced: bool = False
    backend: str = "reference"
    device: str = "cpu"
    dtype: str = "bfloat16"
    kv_dtype: str = "auto"
    proposer: str = "none"
    draft_tokens: int = 0
    prefix_reuse: bool = False
    device_bytes: int = 0
    memory_rows: tuple[tuple[str, int, str], ...] = ()

    @property
    def max_output(self) -> int:
        """Most tokens of one answer."""
        return self.max_context - 1
