"""Metrics, the request log, and the documents about the server: true numbers under known names."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ninfer_format.errors import StorageError, UsageError
from ninfer_runtime.serve.metrics import HISTOGRAMS, Histogram
from ninfer_runtime.serve.request_log import SCHEMA, RequestLog, check_path
from ninfer_runtime.serve.settings import ServeSettings
from ninfer_runtime.text.messages import parse_conversation
from tests.runtime.conftest import ArtifactOf
from tests.serve.live import MODEL, LiveServer
from tests.serve.programmed import programmed

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
WORDS = ("river", "cloud", "stone", "garden", "window", "yellow", "silver", "monkey", "bridge", "candle", "forest")
VLLM = (
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens", "generation_tokens",
    "request_success", "time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds",
    "request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
    "request_inference_time_seconds", "request_prompt_tokens", "request_generation_tokens", "request_params_n",
    "request_params_max_tokens", "request_time_per_output_token_seconds", "prefix_cache_queries", "prefix_cache_hits",
    "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens", "spec_decode_num_accepted_tokens_per_pos",
)  # fmt: skip
"""Families that dashboards made for vLLM look for."""


@pytest.fixture(scope="module")
def observed(artifact_of: ArtifactOf, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    log = tmp_path_factory.mktemp("observed") / "log.jsonl"
    settings = ServeSettings(request_log=log, metrics_prefix="vllm", log_stats_seconds=0.3)
    with programmed(artifact_of("dense", "bf16"), settings=settings) as (server, program):
        program.round_seconds = 0.002
        yield server


def scrape(server: LiveServer) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """(sample, labels but the model's) → value."""
    answer = server.ask("GET", "/metrics")
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/plain")
    out = {}
    for family in text_string_to_metric_families(answer.body.decode()):
        for sample in family.samples:
            assert sample.labels["model_name"] == MODEL
            labels = tuple(sorted(pair for pair in sample.labels.items() if pair[0] != "model_name"))
            out[sample.name.removeprefix("vllm:"), labels] = float(sample.value)
    return out


def events(server: LiveServer, kind: str) -> list[dict[str, Any]]:
    log = server.service.settings.request_log
    assert log is not None
    found = [json.loads(line) for line in log.read_text().splitlines()]
    assert all(event["schema"] == SCHEMA for event in found)
    assert {event["server_instance_id"] for event in found} <= {server.service.instance}
    return [event for event in found if event["event"] == kind]


def test_families_have_the_names_that_dashboards_know(observed: LiveServer) -> None:
    names = {name for name, _ in scrape(observed)}
    for family in VLLM:
        samples = (family, f"{family}_total", f"{family}_bucket")
        if family.endswith("per_pos"):
            # Without a proposer there are no positions, and so no samples.
            assert f"vllm:{family}_total" in observed.ask("GET", "/metrics").body.decode()
            continue
        assert any(name in names for name in samples), family


def test_numbers_are_those_of_the_requests(observed: LiveServer) -> None:
    observed.wait_until_idle()
    before = scrape(observed)
    usage = [observed.chat(f"Hi {i}", max_tokens=10 + i, stream=False).json["usage"] for i in range(3)]
    assert observed.chat("Hi", n=2, max_tokens=4).status == 200
    assert observed.chat("Hi", temperature=7).status == 400
    observed.wait_until_idle()
    after = scrape(observed)

    def grown(name: str, **labels: str) -> float:
        key = (name, tuple(sorted(labels.items())))
        return after[key] - before.get(key, 0)

    n_generated = sum(one["completion_tokens"] for one in usage) + 8
    assert grown("generation_tokens_total") == n_generated
    assert grown("request_success_total", finished_reason="length") == 5
    assert grown("request_success_total", finished_reason="error") == 0
    assert grown("answers_total", api="chat", reason="output-limit") == 5
    assert grown("http_problems_total", status="400", code="invalid_value") == 1
    assert grown("request_generation_tokens_count") == 5
    assert grown("request_generation_tokens_sum") == n_generated
    assert grown("request_prompt_tokens_count") == 4
    assert grown("e2e_request_latency_seconds_count") == 4
    assert grown("time_to_first_token_seconds_count") == 5
    assert grown("inter_token_latency_seconds_count") == n_generated - 5
    assert grown("request_queue_time_seconds_count") == 5
    computed, reused = grown("prompt_tokens_computed_total"), grown("prefix_cache_hits_total")
    assert computed + reused == grown("prefix_cache_queries_total") == grown("prompt_tokens_total")
    assert after["num_requests_running", ()] == after["num_requests_waiting", ()] == 0
    assert after["healthy", ()] == 1
    for name in HISTOGRAMS:
        bounds = [value for (sample, labels), value in after.items() if sample == f"{name}_bucket"]
        assert bounds == sorted(bounds), name
        assert bounds[-1] == after[f"{name}_count", ()]


def test_histograms_count_their_bounds_inclusively() -> None:
    histogram = Histogram((1, 2))
    for value in (0.5, 1, 1.5, 2, 3):
        histogram.observe(value)
    histogram.observe(2, times=2)
    assert histogram.buckets() == [("1.0", 2.0), ("2.0", 6.0), ("+Inf", 7.0)]
    assert histogram.total == 12.0


def test_the_dashboard_asks_for_samples_that_are_there(observed: LiveServer) -> None:
    observed.chat("Hi", max_tokens=3)
    observed.chat("Hi", temperature=9)
    names = {name for name, _ in scrape(observed)}
    dashboard = json.loads((EXAMPLES / "grafana" / "ninfer.json").read_text())
    asked = set(re.findall(r"\$\{prefix\}:([a-z0-9_]+)", json.dumps(dashboard)))
    assert len(asked) > 20
    assert asked <= names, asked - names
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


# ---- the request log -------------------------------------------------------------------------------
def test_a_request_leaves_its_lines(observed: LiveServer) -> None:
    answer = observed.chat("Hi", max_tokens=5, seed=7, user="ann", metadata={"k": "v"}, temperature=0.5)
    observed.wait_until_idle()
    request_id = answer.headers["x-request-id"]
    (start,) = [event for event in events(observed, "request_start") if event["request_id"] == request_id]
    (done,) = [event for event in events(observed, "request_done") if event["request_id"] == request_id]
    assert (start["protocol"], start["stream"], start["messages"]) == ("chat", False, 1)
    assert (start["user"], start["metadata"]) == ("ann", {"k": "v"})
    assert (start["sampling"]["seed"], start["sampling"]["temperature"]) == (7, 0.5)
    (result,) = done["results"]
    assert (result["finish_reason"], result["completion_tokens"], result["seed"]) == ("output-limit", 5, 7)
    assert result["prefix_miss_reason"]
    assert done["timings_seconds"]["ttft"] <= done["timings_seconds"]["total"]
    assert "prompts" not in start
    assert "content" not in result


def test_f9_answer_and_log_say_what_was_cached_and_where_the_prompt_differs(observed: LiveServer) -> None:
    asked = [{"role": "user", "content": "Spell these words one after the other: " + ", ".join(WORDS)}]
    again = [*asked, {"role": "assistant", "content": "r-i-v-e-r"}, {"role": "user", "content": "And the next one?"}]
    other = [{"role": "user", "content": str(asked[0]["content"]).replace("stone", "planet")}]
    found = []
    for messages in (asked, again, other):
        answer = observed.chat(messages=messages, max_tokens=2, cache_salt="f9")
        observed.wait_until_idle()
        (done,) = [e for e in events(observed, "request_done") if e["request_id"] == answer.headers["x-request-id"]]
        details, (logged,) = answer.json["usage"]["prompt_tokens_details"], done["results"]
        found.append((details["cached_tokens"], details["miss_reason"], details["first_difference"]))
        names = ("prefix_cache_hit_tokens", "prefix_miss_reason", "prefix_first_difference")
        assert tuple(logged[name] for name in names) == found[-1]
    ids = [observed.service.frontend.prompt(parse_conversation(messages)).token_ids for messages in (asked, other)]
    at = next(i for i, (first, second) in enumerate(zip(*ids, strict=False)) if first != second)
    assert found[0] == (0, "empty", None)
    assert found[1][0] > 32
    assert found[2] == (0, "differs", at)


def test_refusals_and_throughput_leave_lines_too(observed: LiveServer) -> None:
    answer = observed.chat("Hi", made_up=1)
    (event,) = [e for e in events(observed, "request_error") if e["request_id"] == answer.headers["x-request-id"]]
    assert (event["status"], event["code"], event["param"]) == (400, "unknown_parameter", "made_up")
    observed.chat("Hi", max_tokens=400)
    observed.wait_until_idle()
    assert any(event["generated_tokens_per_second"] > 0 for event in events(observed, "throughput"))


def test_content_is_logged_only_if_asked(artifact_of: ArtifactOf, tmp_path: Path) -> None:
    settings = ServeSettings(request_log=tmp_path / "log", log_content=True)
    with programmed(artifact_of("dense", "bf16"), "yes ", settings=settings) as (server, _):
        server.chat("my words", max_tokens=6, enable_thinking=False)
        server.wait_until_idle()
        (start,), (done,) = events(server, "request_start"), events(server, "request_done")
    assert "my words" in start["prompts"][0]
    assert "yes" in done["results"][0]["content"]


def test_a_log_that_cannot_be_written_is_refused_or_given_up(tmp_path: Path) -> None:
    artifact = tmp_path / "model.ninfer"
    artifact.write_bytes(b"x")
    (tmp_path / "link").symlink_to(artifact)
    for path in (artifact, tmp_path / "link", tmp_path / "nothing" / "log"):
        with pytest.raises(UsageError, match="--request-log"):
            check_path(path, artifact)
    with pytest.raises(StorageError):
        RequestLog(ServeSettings(request_log=tmp_path), "x")
    full = RequestLog(ServeSettings(request_log=Path("/dev/full")), "x")
    full.server_started({})
    full.server_started({})
    full.close()


# ---- documents -------------------------------------------------------------------------------------
def test_props_and_stats_and_the_page_agree(server: LiveServer) -> None:
    props, stats = server.ask("GET", "/props").json, server.ask("GET", "/stats").json
    assert props["instance"] == stats["instance"] == server.service.instance
    assert props["limits"]["max_context"] == props["default_generation_settings"]["n_ctx"] == 512
    assert props["total_slots"] == props["limits"]["max_rows"] == stats["max_rows"] == 4
    assert props["memory_plan"]["device_bytes"] == sum(
        row["bytes"] for row in props["memory_plan"]["rows"] if row["place"] == "device"
    )
    assert props["vision"] is False
    assert stats["state"] == "ready"
    assert stats["is_healthy"] is True


@pytest.mark.parametrize("text", ["Hello", "naïve 日本語 🙂", "<|im_start|>user", " \n", "a" * 3000])
def test_tokenize_and_detokenize_are_inverse(server: LiveServer, text: str) -> None:
    for trusted in (True, False):
        answer = server.post("/tokenize", {"content": text, "parse_special": trusted, "with_pieces": True}).json
        assert answer["count"] == len(answer["tokens"])
        assert b"".join(bytes(piece["bytes"]) for piece in answer["pieces"]).decode() == text
        assert server.post("/detokenize", {"tokens": answer["tokens"]}).json["content"] == text
    assert (
        server.post("/tokenize", {"prompt": text}).json["tokens"]
        == (server.post("/tokenize", {"content": text}).json["tokens"])
    )


def test_d22_control_tokens_are_read_only_where_texts_are_trusted(server: LiveServer) -> None:
    text = "<|im_start|>"
    counts = [server.post("/tokenize", {"content": text, "parse_special": on}).json["count"] for on in (True, False)]
    assert counts[0] == 1 < counts[1]


def test_c3_ids_that_end_within_a_character_do_not_break_anything(server: LiveServer) -> None:
    ids = server.post("/tokenize", {"content": "🙂"}).json["tokens"]
    assert len(ids) > 1
    assert server.post("/detokenize", {"tokens": ids[:-1]}).json["content"] == "\ufffd"
    assert server.post("/detokenize", {"tokens": []}).json["content"] == ""
    answer = server.post("/v1/completions", {"model": MODEL, "prompt": ids[:-1], "max_tokens": 2, "echo": True})
    assert answer.status == 200
    for wrong in ([-1], [10**6], ["a"], [True], "a", None, [1.0]):
        assert server.post("/detokenize", {"tokens": wrong}).status == 400


def test_apply_template_is_the_prompt_that_is_counted(server: LiveServer) -> None:
    fields = {"messages": [{"role": "user", "content": "Hi"}], "enable_thinking": False}
    shown = server.post("/apply-template", fields).json
    assert shown["prompt"].startswith("<|im_start|>user\nHi<|im_end|>")
    assert shown["thinking"] is False
    usage = server.post("/v1/chat/completions", {"model": MODEL, **fields, "max_tokens": 1}).json["usage"]
    assert usage["prompt_tokens"] == shown["count"] == len(shown["tokens"])
    assert server.post("/apply-template", {"messages": []}).status == 400
    assert server.post("/apply-template", {**fields, "model": "other"}).status == 404


def test_the_openapi_document_is_valid_and_names_every_route(server: LiveServer) -> None:
    document = server.ask("GET", "/openapi.json").json
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/metrics", "/health"):
        assert path in document["paths"]
    schema = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert schema["additionalProperties"] is False
    assert "messages" in schema["required"]


# ---- examples --------------------------------------------------------------------------------------
def test_the_compose_file_fits_its_schema() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec",
         str(EXAMPLES / "docker" / "compose.yaml")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr


def test_the_container_starts_the_server_with_options_it_has() -> None:
    from typer.main import get_command

    from ninfer_runtime.cli import app

    command = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    known = {name for parameter in command.params for name in parameter.opts}
    for file in ("Dockerfile", "compose.yaml"):
        text = (EXAMPLES / "docker" / file).read_text()
        lines = [line for line in text.splitlines() if "CMD" in line or line.strip().startswith("- --")]
        asked = set(re.findall(r"--[a-z-]+", "\n".join(line for line in lines if "urllib" not in line)))
        assert asked
        assert asked <= known, asked - known


def test_a_short_drain_and_a_long_patience_fit_the_container() -> None:
    text = (EXAMPLES / "docker" / "compose.yaml").read_text()
    drain = float(re.findall(r"--drain-seconds=(\d+)", text)[0])
    grace = float(re.findall(r"stop_grace_period: (\d+)s", text)[0])
    assert grace > drain
    assert replace(ServeSettings(), drain_seconds=drain).drain_seconds == drain


# ---- settings that change prompts ------------------------------------------------------------------
LEVELS = """
{%- if reasoning_effort is defined and reasoning_effort not in ('low', 'medium', 'xhigh') %}
{{- raise_exception('no such effort') }}{%- endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% else %}<think>
{{ {'low': 'Be quick.', 'medium': '', 'xhigh': 'Take your time.'}[reasoning_effort | default('xhigh')] }}{% endif %}
"""


def test_levels_of_effort_are_those_of_the_template(artifact_of: ArtifactOf, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(LEVELS)
    settings = ServeSettings(chat_template=template, default_max_tokens=3, thinking=False)
    with programmed(artifact_of("dense", "bf16"), settings=settings) as (server, _):
        thinking = server.ask("GET", "/props").json["thinking"]
        assert (thinking["effort_levels"], thinking["default_effort"]) == (["low", "medium", "xhigh"], "xhigh")
        assert thinking["is_default"] is False

        def prompt(**fields: Any) -> str:
            turn = [{"role": "user", "content": "Hi"}]
            return str(server.post("/apply-template", {"messages": turn, **fields}).json["prompt"])

        assert "</think>" in prompt()
        assert prompt(enable_thinking=True).rstrip().endswith("Take your time.")
        assert prompt(reasoning_effort="low").rstrip().endswith("Be quick.")
        assert prompt(chat_template_kwargs={"reasoning_effort": "low"}) == prompt(reasoning_effort="low")
        assert prompt(reasoning_effort="none") == prompt()
        refused = server.chat("Hi", reasoning_effort="high")
        assert (refused.status, refused.json["error"]["code"]) == (400, "reasoning_effort_not_supported")
        assert "low, medium, xhigh" in refused.json["error"]["message"]
        # The server's default limit holds where a request names none.
        assert server.chat("Hi").json["usage"]["completion_tokens"] == 3
