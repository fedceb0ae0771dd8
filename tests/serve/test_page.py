"""The page's files as the server gives them, what they may hold, and the fields the server promises the page."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ninfer_format import Artifact
from ninfer_runtime.engine.engine import Engine
from ninfer_runtime.serve.auth import Gate
from ninfer_runtime.serve.errors import ApiError
from ninfer_runtime.serve.page import MEDIA_TYPES, PAGE_HEADERS, WEB, page_files, page_response
from ninfer_runtime.serve.settings import ServeSettings
from ninfer_runtime.text.frontend import Frontend
from tests.runtime.conftest import ArtifactOf
from tests.serve.live import CONFIG, LiveServer, served, service_of, serving
from tests.serve.page.answers import SHORT
from tests.serve.page.scripted import ScriptedEngine

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(path for path in WEB.iterdir() if path.is_file())
SCRIPTS = [path for path in SOURCES if path.suffix == ".js"]

MARKUP_FROM_TEXT = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|createContextualFragment|setHTML|\beval\b|"
    r"new Function|\bFunction\(|srcdoc|setTimeout\([\"'`]"
)
"""Ways of a string into markup or code."""


# ---- what the files hold -----------------------------------------------------------------------
def test_every_file_of_the_folder_is_served_under_one_path() -> None:
    assert {path.suffix for path in SOURCES} <= set(MEDIA_TYPES)
    paths = {"/" if path.name == "index.html" else f"/page/{path.name}" for path in SOURCES}
    assert set(page_files()) == paths
    assert len({file.etag for file in page_files().values()}) == len(paths)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_no_script_makes_markup_or_code_of_text(script: Path) -> None:
    assert not MARKUP_FROM_TEXT.search(script.read_text())


def test_everything_the_page_loads_is_a_file_of_its_own() -> None:
    html = (WEB / "index.html").read_text()
    named = set(re.findall(r'(?:src|href)="page/([^"]+)"', html))
    assert set(re.findall(r'(?:src|href)="([^"]+)"', html)) == {f"page/{name}" for name in named} | {"#prompt"}
    modules = {"main.js"}
    for name in (waiting := ["main.js"]):
        found = set(re.findall(r'^import [^;]*?from "\./([^"]+)";', (WEB / name).read_text(), re.MULTILINE | re.DOTALL))
        waiting += sorted(found - modules)
        modules |= found
    assert named | modules | {"index.html"} == {path.name for path in SOURCES}, "a file is missing, or nobody loads it"
    for path in SOURCES:
        outside = re.findall(r"\b(?:import\(|url\(|@import|fetch\(\s*[\"'`]http)", path.read_text())
        assert not outside, f"{path.name} loads from elsewhere"


def test_the_document_has_no_inline_script_style_or_handler() -> None:
    html = (WEB / "index.html").read_text()
    assert re.findall(r"<script(?![^>]*\bsrc=)[^>]*>|<style|\sstyle=|\son[a-z]+=", html) == []


# ---- what the server makes of them -------------------------------------------------------------
@pytest.mark.parametrize("path", ["/", "/page/main.js", "/page/base.css", "/page/icon.svg"])
def test_a_file_comes_with_strict_headers_and_once(server: LiveServer, path: str) -> None:
    file = page_files()[path]
    answered = server.ask("GET", path)
    assert (answered.status, answered.body) == (200, file.body)
    assert answered.headers["content-type"] == file.media_type
    assert answered.headers["x-content-type-options"] == "nosniff"
    assert {name: answered.headers[name.lower()] for name in PAGE_HEADERS} == dict(PAGE_HEADERS)
    assert "unsafe" not in answered.headers["content-security-policy"]
    again = server.ask("GET", path, headers={"If-None-Match": f'"other", W/{file.etag}'})
    assert (again.status, again.body, again.headers["etag"]) == (304, b"", file.etag)
    head = server.ask("HEAD", path)
    assert (head.status, head.body, head.headers["content-length"]) == (200, b"", str(len(file.body)))


def test_another_tag_gets_the_file_again() -> None:
    response = page_response("/", '"00000000000000000000"')
    assert response is not None
    assert response.status == 200


@pytest.mark.parametrize(
    "path", ["/page/", "/page/index.html", "/page/nothing.js", "/page/../page.py", "/page/%2e%2e/page.py"]
)
def test_nothing_else_is_served(server: LiveServer, path: str) -> None:
    answered = server.ask("GET", path)
    assert answered.status == 404
    assert answered.json["error"]["code"] == "not_found"


def test_a_file_is_only_read(server: LiveServer) -> None:
    assert server.post("/page/main.js", {}).status == 405


def test_the_files_need_no_key_and_the_numbers_do() -> None:
    gate = Gate(ServeSettings(api_keys=("a-key-of-the-test",)))
    for path in page_files():
        gate.check("GET", path, [])
    for path in ("/props", "/stats", "/v1/chat/completions"):
        with pytest.raises(ApiError, match="API key"):
            gate.check("GET", path, [])


# ---- what the page asks for --------------------------------------------------------------------
def documents() -> dict[str, Any]:
    """Route → the example of the page's spec."""
    text = (ROOT / "specs" / "serving-page.md").read_text()
    found = re.findall(r"^### `GET (/\w+)`\n\n```json\n(.*?)```", text, re.MULTILINE | re.DOTALL)
    return {path: json.loads(body) for path, body in found}


def lacking(documented: Any, found: Any, place: str) -> list[str]:
    """Members of an example that the server's answer has not, or has with another kind of value."""
    if isinstance(documented, dict):
        if not isinstance(found, dict):
            return [place]
        return [
            lack
            for name, value in documented.items()
            for lack in lacking(value, found.get(name, ...), f"{place}.{name}")
        ]
    if isinstance(documented, list):
        if not isinstance(found, list):
            return [place]
        return [lack for one in found for lack in lacking(documented[0], one, f"{place}[]")] if documented else []
    numbers = isinstance(documented, int | float) and isinstance(found, int | float)
    return [] if numbers or found is None or type(documented) is type(found) else [place]


@pytest.mark.parametrize("path", ["/props", "/stats"])
def test_the_page_finds_what_its_spec_promises(server: LiveServer, path: str) -> None:
    example = documents()[path]
    example.pop("requests_finished", None)
    assert lacking(example, server.ask("GET", path).json, path) == []


def test_a_request_of_the_page_passes(server: LiveServer) -> None:
    body = {
        "model": server.service.facts.model_id,
        "messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "Hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "top_p": 0.9,
        "max_completion_tokens": 3,
        "enable_thinking": True,
        "thinking_budget": 2,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}],
    }
    answered = server.post("/v1/chat/completions", body)
    assert answered.status == 200, answered.body
    assert answered.events[-1]["usage"]["completion_tokens"] == 3


def test_a_server_can_do_without_the_page(artifact_of: ArtifactOf) -> None:
    with served(artifact_of("dense", "bf16"), settings=ServeSettings(with_page=False)) as running:
        assert running.ask("GET", "/").status == 404


# ---- what the browser check stands on ----------------------------------------------------------
def test_the_scripted_server_says_its_script(artifact_of: ArtifactOf) -> None:
    with Artifact.open(artifact_of("dense", "bf16")) as artifact, Engine(artifact, CONFIG) as engine:
        scripted = ScriptedEngine(engine, Frontend.open(artifact), 0.0)
        with serving(service_of(artifact, engine, None, scripted)) as running:
            said = [running.chat("Hello", enable_thinking=mode).json["choices"][0]["message"] for mode in (True, False)]
    reasoning, _, content = SHORT.removesuffix("<|im_end|>").partition("\n</think>\n\n")
    assert [message.get("reasoning_content", "").strip() for message in said] == [reasoning, ""]
    assert [message["content"] for message in said] == [content, content]


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_modules_that_need_no_browser() -> None:
    command = ["node", "--test", str(ROOT / "tests" / "serve" / "page" / "modules.test.mjs")]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]
