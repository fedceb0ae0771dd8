"""Every field of every request, in one table: read, or refused with 400 and its name. None is ignored.

A row is ``offered`` with the kind of its values, or ``refused`` with the reason; a refused field may still name values
that ask for nothing (``n: 1``), and those pass. ``null`` is a field that was not given. Names that are in no row are
refused as ``unknown_parameter``. The OpenAPI document's request schemas are made from the same rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ninfer_runtime.config import MAX_SEED, MAX_TOP_K
from ninfer_runtime.engine.sequence import MAX_TOP_LOGPROBS
from ninfer_runtime.serve.errors import ApiError, unsupported
from ninfer_runtime.serve.kinds import (
    ANYTHING,
    Array,
    Boolean,
    Free,
    Integer,
    Kind,
    Number,
    OneOf,
    String,
    StringMap,
    Strings,
    wrong,
)

Api = Literal["chat", "completions", "responses", "input_tokens", "messages", "count_tokens"]
Values = dict[str, Any]
"""Given fields that are not null, by name; an object with rows of its own is again ``Values``."""

MAX_TOKENS = 2**31 - 1
MAX_CHOICES = 128
MAX_STOPS = 16
MAX_TOOLS = 1024


@dataclass(frozen=True, slots=True)
class Field:
    """One row. ``why`` None: offered. Otherwise refused unless the value is one of ``only``."""

    name: str
    kind: Kind = ANYTHING
    required: bool = False
    why: str | None = None
    only: tuple[Any, ...] = ()
    code: str = "unsupported_parameter"
    about: str = ""

    @property
    def schema(self) -> dict[str, Any]:
        """JSON schema of the values that pass."""
        if self.why is not None:
            return {"enum": [*self.only, None], "description": f"Not supported: {self.why}."}
        shape = self.kind.schema
        if not self.required:
            shape = {"anyOf": [shape, {"type": "null"}]} if shape else shape
        return {**shape, "description": self.about} if self.about else shape


@dataclass(frozen=True, slots=True)
class Members:
    """An object whose members have rows."""

    rows: tuple[Field, ...]

    def read(self, value: Any, place: str) -> Values:
        """The members that are set."""
        if not isinstance(value, dict):
            raise wrong(place, value, "an object")
        return read_rows(self.rows, value, place)

    @property
    def schema(self) -> dict[str, Any]:
        """JSON schema."""
        return schema_of_rows(self.rows)


def offered(name: str, kind: Kind, about: str = "", *, required: bool = False) -> Field:
    """A field that does what it says."""
    return Field(name, kind, required, about=about)


def refused(name: str, why: str, *only: Any, code: str = "unsupported_parameter") -> Field:
    """A field that is answered with 400, except for the values ``only``, which ask for nothing."""
    return Field(name, why=why, only=only, code=code)


def read_rows(rows: tuple[Field, ...], body: Mapping[str, Any], place: str = "") -> Values:
    """The fields of ``body`` that are set; ApiError for one that is unknown, refused, missing or wrong."""
    by_name = {row.name: row for row in rows}
    values: Values = {}
    for name, value in body.items():
        path = f"{place}.{name}" if place else name
        row = by_name.get(name)
        if row is None:
            raise ApiError(f"the parameter {path!r} is unknown", code="unknown_parameter", param=path)
        if value is None:
            continue
        if row.why is not None:
            if not any(value == other and type(value) is type(other) for other in row.only):
                raise unsupported(path, row.why, row.code)
            continue
        values[name] = row.kind.read(value, path)
    for row in rows:
        if row.required and row.name not in values:
            path = f"{place}.{row.name}" if place else row.name
            raise ApiError(f"the parameter {path!r} is missing", code="missing_parameter", param=path)
    return values


def read(api: Api, body: Any) -> Values:
    """The fields of one request's decoded body; ApiError with status 400 and the field's path as ``param``."""
    if not isinstance(body, dict):
        raise ApiError("the body is not a JSON object", code="invalid_body")
    return read_rows(FIELDS[api], body)


def schema_of_rows(rows: tuple[Field, ...]) -> dict[str, Any]:
    """JSON schema of an object with these fields."""
    return {
        "type": "object",
        "properties": {row.name: row.schema for row in rows},
        "required": [row.name for row in rows if row.required],
        "additionalProperties": False,
    }


# ---- the rows ------------------------------------------------------------------------------------
_TEXT_ONLY = "this server writes text only"
_NO_WEB = "this server has no web search"
_BY_PRESET = "the server chooses it"
_TOKENS = Integer(1, MAX_TOKENS)
_TOP_LOGPROBS = Integer(0, MAX_TOP_LOGPROBS)
_SEED = offered("seed", Integer(0, MAX_SEED), "Repeats an answer, whatever else the server does.")
_MODEL = offered("model", String(1), "The model's id, as GET /v1/models lists it.", required=True)
_STREAM = offered("stream", Boolean(), "Send the answer as server-sent events while it grows.")
_TOOLS = offered("tools", Array(0, MAX_TOOLS, "functions"), "Functions the model may call.")
_EFFORT = OneOf(("none", "minimal", "low", "medium", "high", "xhigh", "max"))
_KEPT_FOR_THE_LOG = (
    offered("user", String(), "Written into the request log."),
    offered("metadata", StringMap(), "Written into the request log."),
    offered("safety_identifier", String(), "Written into the request log."),
    offered("prompt_cache_key", String(), "Names a session for routers; written into the request log."),
)
_LIKE_OPENAI = (
    refused("service_tier", "there is one tier", "auto", "default"),
    refused("moderation", "this server does not moderate"),
    refused("prompt_cache_options", _BY_PRESET),
    refused("prompt_cache_retention", _BY_PRESET, "in_memory", "in-memory"),
)
_DRAWING = (
    offered("temperature", Number(0, 2), "0 always takes the most likely token."),
    offered("top_p", Number(0, 1)),
    offered("top_k", Integer(-1, MAX_TOP_K), "0 and -1 switch it off."),
)
_SAMPLING = (
    *_DRAWING,
    offered("min_p", Number(0, 1)),
    offered("presence_penalty", Number(-2, 2)),
    offered("frequency_penalty", Number(-2, 2)),
    refused("repetition_penalty", "use presence_penalty or frequency_penalty", 1, 1.0),
    _SEED,
    offered(
        "logit_bias", Free({"type": "object", "additionalProperties": {"type": "number"}}), "Token id → -100..100."
    ),
)
_STREAM_OPTIONS = Members(
    (
        offered("include_usage", Boolean(), "A last chunk with token counts and no choices."),
        offered("continuous_usage_stats", Boolean(), "Token counts so far in every chunk."),
        refused("include_obfuscation", "nothing is obfuscated", False),
    )
)
_STRUCTURED = (
    offered(
        "structured_outputs",
        Members(
            (
                offered("json", ANYTHING, "A JSON schema, or the text of one."),
                offered("json_object", Boolean(), "Any JSON object."),
                offered("regex", String(1)),
                offered("choice", Strings(1024, single=False)),
                offered("grammar", String(1), "A grammar in llguidance's Lark dialect."),
            )
        ),
        "What the answer must look like; exactly one member.",
    ),
    offered("guided_json", ANYTHING, "As structured_outputs.json."),
    offered("guided_regex", String(1), "As structured_outputs.regex."),
    offered("guided_choice", Strings(1024, single=False), "As structured_outputs.choice."),
    offered("guided_grammar", String(1), "As structured_outputs.grammar."),
    refused("grammar", "give a Lark grammar in structured_outputs.grammar"),
    refused("guided_decoding_backend", "there is one implementation"),
    refused("guided_whitespace_pattern", "put it into the grammar"),
)
_OF_OTHER_SERVERS = (
    offered("ignore_eos", Boolean(), "Run on past the end of the turn."),
    offered(
        "stop_token_ids", Free({"type": "array", "items": {"type": "integer"}}), "Further ids that end the answer."
    ),
    offered("include_stop_str_in_output", Boolean(), "The stop string stays in the text."),
    offered("cache_salt", String(1), "Only requests with the same salt share a prefix cache."),
    offered("min_tokens", Integer(0, MAX_TOKENS), "No end token before so many; not with a prescribed form."),
    refused("skip_special_tokens", "control tokens are never shown", True),
    refused("spaces_between_special_tokens", "control tokens are never shown", True, False),
    refused("use_beam_search", "answers are sampled", False),
    refused("length_penalty", "answers are sampled", 1, 1.0),
    refused("early_stopping", "answers are sampled", False),
    refused("prompt_logprobs", "use ninfer-run logits"),
    refused("truncate_prompt_tokens", "a prompt that is too long is refused"),
    refused("allowed_token_ids", "use structured_outputs"),
    refused("bad_words", "use logit_bias"),
    refused("logits_processors", "use logit_bias or structured_outputs"),
    refused("priority", "requests are served in order", 0),
    refused("request_id", "the server draws it; it is in the header x-request-id"),
    refused("return_tokens_as_token_ids", "use /tokenize", False),
    refused("return_token_ids", "use /tokenize", False),
    refused("echo_logprobs", "use ninfer-run logits", False),
)
_THINKING = (
    offered("enable_thinking", Boolean(), "Think before answering, where the template has the switch."),
    offered("preserve_thinking", Boolean(), "Keep the thinking of earlier turns in the prompt."),
)
_THINKING_BUDGET = offered("thinking_budget", Integer(0, MAX_TOKENS), "Most tokens of thinking; then it is closed.")

CHAT: tuple[Field, ...] = (
    _MODEL,
    offered("messages", Array(1, items="messages"), "The conversation.", required=True),
    _STREAM,
    offered("stream_options", _STREAM_OPTIONS, "Only with stream."),
    offered("max_completion_tokens", _TOKENS, "Most tokens of the answer, thinking included."),
    offered("max_tokens", _TOKENS, "The old name of max_completion_tokens, which wins."),
    *_SAMPLING,
    offered(
        "stop", Strings(MAX_STOPS), "The answer ends before the first of these; thinking and calls are not searched."
    ),
    offered("n", Integer(1, MAX_CHOICES), "Answers to draw."),
    offered("logprobs", Boolean(), "Log probabilities of the answer's tokens."),
    offered("top_logprobs", _TOP_LOGPROBS, "Also of the most likely other tokens; needs logprobs."),
    _TOOLS,
    offered("tool_choice", ANYTHING, '"none", "auto", "required", or the name of one function.'),
    offered("parallel_tool_calls", Boolean(), "false ends the answer after its first call."),
    offered("response_format", ANYTHING, 'Type "text", "json_object" or "json_schema".'),
    *_STRUCTURED,
    offered("reasoning_effort", _EFFORT, "A level of the chat template; none switches thinking off."),
    *_THINKING,
    _THINKING_BUDGET,
    offered("chat_template_kwargs", Members((*_THINKING, offered("reasoning_effort", _EFFORT)))),
    *_KEPT_FOR_THE_LOG,
    *_LIKE_OPENAI,
    refused("functions", "use tools", code="tools_not_supported"),
    refused("function_call", "use tool_choice", code="tools_not_supported"),
    refused("modalities", _TEXT_ONLY, ["text"], code="modality_not_supported"),
    refused("audio", _TEXT_ONLY, code="modality_not_supported"),
    refused("prediction", "drafts come from the model itself"),
    refused("store", "chat completions are not stored; use /v1/responses", False),
    refused("verbosity", "the model has no such setting", "medium"),
    refused("web_search_options", _NO_WEB),
    *_OF_OTHER_SERVERS,
    refused("include_reasoning", "thinking is always returned", True),
    refused("add_generation_prompt", "use /apply-template", True),
    refused("continue_final_message", "use /v1/completions with the text of /apply-template", False),
    refused("add_special_tokens", "the template places them", False),
    refused("echo", "use /v1/completions", False),
    refused("best_of", "use n", 1),
    refused("documents", "put them into the messages"),
    refused("chat_template", "start the server with --chat-template"),
    refused("mm_processor_kwargs", _TEXT_ONLY),
)

COMPLETIONS: tuple[Field, ...] = (
    _MODEL,
    offered(
        "prompt",
        Free({"anyOf": [{"type": "string"}, {"type": "array", "items": {}}]}),
        "A text, token ids, or an array of either.",
        required=True,
    ),
    _STREAM,
    offered("stream_options", _STREAM_OPTIONS, "Only with stream."),
    offered("max_tokens", _TOKENS, "Most tokens of each text; 16 if not given."),
    *_SAMPLING,
    offered("stop", Strings(MAX_STOPS), "The text ends before the first of these."),
    offered("n", Integer(1, MAX_CHOICES), "Texts to draw for each prompt."),
    offered("logprobs", _TOP_LOGPROBS, "Log probabilities of the tokens and of so many other ones."),
    offered("echo", Boolean(), "The text begins with the prompt; not with logprobs."),
    offered("response_format", ANYTHING, 'Type "text", "json_object" or "json_schema".'),
    *_STRUCTURED,
    *_KEPT_FOR_THE_LOG,
    *_LIKE_OPENAI,
    refused("best_of", "use n", 1),
    refused("suffix", "the model continues texts, it does not fill gaps", ""),
    *_OF_OTHER_SERVERS,
    refused("add_special_tokens", "prompts are taken as they are", True, False),
)

_REASONING = Members(
    (
        offered("effort", _EFFORT, "A level of the chat template; none switches thinking off."),
        refused("summary", "thinking is returned whole", code="reasoning_option_not_supported"),
        refused("generate_summary", "thinking is returned whole", code="reasoning_option_not_supported"),
        refused("context", "use preserve_thinking", "auto", code="reasoning_option_not_supported"),
        refused("mode", "there is one mode", "standard", code="reasoning_option_not_supported"),
    )
)
_RESPONSES_PROMPT = (
    _MODEL,
    offered("input", Free({"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1}]}), "A text, or items."),
    offered("instructions", String(), "A system text in front, for this request only."),
    offered("previous_response_id", String(1), "Goes on from a stored response."),
    _TOOLS,
    offered("tool_choice", ANYTHING, '"none", "auto", "required", or one function.'),
    offered("parallel_tool_calls", Boolean(), "false ends the answer after its first call."),
    offered("reasoning", _REASONING),
    offered(
        "text",
        Members(
            (
                offered("format", ANYTHING, 'Type "text", "json_object" or "json_schema".'),
                refused("verbosity", "the model has no such setting", "medium", code="text_option_not_supported"),
            )
        ),
    ),
    refused("conversation", "use previous_response_id"),
    refused("truncation", "a prompt that is too long is refused", "disabled", code="truncation_not_supported"),
    *_THINKING,
    offered("chat_template_kwargs", Members(_THINKING)),
)
RESPONSES: tuple[Field, ...] = (
    *_RESPONSES_PROMPT,
    _STREAM,
    offered("stream_options", Members((refused("include_obfuscation", "nothing is obfuscated", False),))),
    offered("max_output_tokens", Integer(16, MAX_TOKENS), "Most tokens of the answer, thinking included."),
    *_DRAWING,
    _SEED,
    _THINKING_BUDGET,
    offered("store", Boolean(), "Keep the response so that it can be fetched and continued.  [true]"),
    offered("top_logprobs", _TOP_LOGPROBS, "With include message.output_text.logprobs."),
    offered("include", Array(items="names"), 'Only "message.output_text.logprobs".'),
    *_KEPT_FOR_THE_LOG,
    *_LIKE_OPENAI,
    refused("background", "requests run while their client waits", False, code="background_not_supported"),
    refused("background_options", "requests run while their client waits", code="background_not_supported"),
    refused("context_management", "a prompt that is too long is refused"),
    refused("max_tool_calls", "the server calls no tools by itself"),
    refused("prompt", "there are no stored prompts"),
    refused("image", _TEXT_ONLY),
    refused("access_programs", "the server has none"),
)
INPUT_TOKENS: tuple[Field, ...] = (
    *_RESPONSES_PROMPT,
    refused("personality", "put it into the instructions"),
)

_CACHE_MARK = Members((offered("type", OneOf(("ephemeral",)), required=True), offered("ttl", OneOf(("5m", "1h")))))
_THINKING_CONFIG = Members(
    (
        offered("type", OneOf(("enabled", "adaptive", "disabled")), required=True),
        offered("budget_tokens", _TOKENS, "Most tokens of thinking; then it is closed. Needs the type enabled."),
        offered("display", OneOf(("summarized", "omitted")), "omitted leaves the text of thinking out."),
    )
)
_OUTPUT_CONFIG = Members(
    (
        offered("effort", OneOf(("low", "medium", "high", "xhigh", "max")), "A level of the chat template."),
        offered(
            "format",
            Members(
                (offered("type", OneOf(("json_schema",)), required=True), offered("schema", ANYTHING, required=True))
            ),
            "A JSON schema the answer follows.",
        ),
        refused("task_budget", "use max_tokens", code="output_config_option_not_supported"),
    )
)
_TOOL_CHOICE = Members(
    (
        offered("type", OneOf(("auto", "any", "tool", "none")), required=True),
        offered("name", String(1), "Of the tool, with the type tool."),
        offered("disable_parallel_tool_use", Boolean(), "true ends the answer after its first call."),
    )
)
_ANTHROPIC_PROMPT = (
    offered("model", String(1), "Any name; it is echoed.", required=True),
    offered("messages", Array(1, items="messages"), "The conversation.", required=True),
    offered("system", Free({"anyOf": [{"type": "string"}, {"type": "array", "items": {}}]}), "A text, or text blocks."),
    _TOOLS,
    offered("tool_choice", _TOOL_CHOICE, "auto, any, none or one tool."),
    offered("thinking", _THINKING_CONFIG, "enabled (with budget_tokens), adaptive or disabled."),
    offered("output_config", _OUTPUT_CONFIG, "effort, and format with a JSON schema."),
    offered("cache_control", _CACHE_MARK, "Prefixes are always cached."),
    offered("preserve_thinking", Boolean(), "Keep the thinking of earlier turns in the prompt."),
    refused("speed", "there is one speed", "standard"),
    refused("user_profile_id", "there are no profiles"),
    refused("workspace_id", "there are no workspaces"),
    refused("mcp_servers", "the server calls no tools by itself", []),
    refused("context_management", "a prompt that is too long is refused"),
    refused("betas", "there are none", []),
    # The client's tool runner knows this code, and goes on without a thread.
    refused("thread", "send the whole conversation", code="thread_unsupported_request"),
)
MESSAGES: tuple[Field, ...] = (
    *_ANTHROPIC_PROMPT,
    offered("max_tokens", _TOKENS, "Most tokens of the answer, thinking included."),
    _STREAM,
    *_DRAWING,
    _SEED,
    offered("stop_sequences", Strings(MAX_STOPS, single=False), "The answer ends before the first of these."),
    offered("metadata", Members((offered("user_id", String(), "Written into the request log."),))),
    refused("service_tier", "there is one tier", "auto", "standard_only"),
    refused("container", "the server runs no code"),
    refused("diagnostics", "see the request log"),
    refused("inference_geo", "it runs where it runs"),
    refused("billing_policy", "there is none"),
    refused("compaction", "a prompt that is too long is refused"),
    refused("fallback_credit_token", "there is none"),
    refused("fallbacks", "there is one model"),
)
COUNT_TOKENS: tuple[Field, ...] = _ANTHROPIC_PROMPT

FIELDS: Mapping[Api, tuple[Field, ...]] = {
    "chat": CHAT,
    "completions": COMPLETIONS,
    "responses": RESPONSES,
    "input_tokens": INPUT_TOKENS,
    "messages": MESSAGES,
    "count_tokens": COUNT_TOKENS,
}


def request_schema(api: Api) -> dict[str, Any]:
    """JSON schema of one API's request body, for the OpenAPI document."""
    return schema_of_rows(FIELDS[api])
