"""The trained checkpoints, quantized to FP8 or to a GGUF file first: the artifact made of that still answers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ninfer_convert.pipeline import build
from ninfer_convert.plan import BuildOptions, make_plan
from ninfer_convert.sources.adapters import open_checkpoint
from ninfer_runtime.config import EngineConfig, SamplingParams
from ninfer_runtime.engine.engine import Engine
from ninfer_runtime.engine.sequence import Request
from ninfer_runtime.text.frontend import Frontend
from ninfer_runtime.text.messages import parse_conversation
from ninfer_runtime.text.stream import join
from tests.convert.fp8 import E4M3, Floats, spread
from tests.convert.gguf_files import gguf_tensors, metadata, token_list, write_gguf
from tests.convert.tiny import write_safetensors

TRAINED = Path(__file__).resolve().parents[2] / "examples" / "tiny"
QUESTIONS = (
    ("What is 12 + 7?", "12 + 7 = 19."),
    ("What is the capital of France?", "Paris"),
    ("Spell the word river.", "r-i-v-e-r."),
)


def answers(artifact: Path) -> list[str]:
    """Greedy answers to ``QUESTIONS``."""
    torch.set_num_threads(1)
    said = []
    with Engine.open(artifact, EngineConfig(max_context=256)) as engine:
        frontend = Frontend.open(engine.artifact)
        for question, _ in QUESTIONS:
            conversation = parse_conversation([{"role": "user", "content": question}], [])
            prompt = frontend.prompt(conversation, thinking=False)
            stops = frontend.generation.stop_ids
            request = Request(prompt.token_ids, SamplingParams.greedy(), max_new=60, stop_ids=stops)
            stream = frontend.stream(frontend.stream_options(prompt, conversation))
            events = [event for token in engine.generate(request) for event in stream.feed([token.token_id])]
            said.append(join(events + stream.flush()).content)
    return said


def check_answers(artifact: Path) -> None:
    found = answers(artifact)
    assert [answer in text for (_, answer), text in zip(QUESTIONS, found, strict=True)] == [True] * 3, found


def trained(model: str) -> tuple[dict[str, Any], dict[str, Floats]]:
    """Config and float32 tensors."""
    with open_checkpoint(TRAINED / model) as checkpoint:
        config: Any = checkpoint.config
        return config, {n: checkpoint.read_floats(n).reshape(t.shape) for n, t in checkpoint.tensors.items()}


def as_mixed_file(name: str, shape: tuple[int, ...]) -> str:
    """As a Q5_K_M file mixes them: K types where rows allow, Q8_0 for other matrices, F32 for vectors."""
    if len(shape) < 2 or "conv1d" in name:
        return "F32"
    if shape[-1] % 256:
        return "Q8_0"
    return "Q6_K" if "ffn_down" in name else "Q5_K"


@pytest.mark.parametrize(("model", "recipe"), [("dense", "groupwise-int"), ("moe", "w8")])
def test_gguf_file(tmp_path: Path, model: str, recipe: str) -> None:
    config, tensors = trained(model)
    frontend = {file: (TRAINED / model / file).read_bytes() for file in ("tokenizer.json", "tokenizer_config.json")}
    kinds = write_gguf(
        tmp_path / "m.gguf",
        gguf_tensors(config, tensors),
        metadata(config),
        architecture="qwen35moe" if model == "moe" else "qwen35",
        choose=as_mixed_file,
        tokens=token_list(frontend, config["text_config"]["vocab_size"]),
    )
    assert {kind for kind, _ in kinds.values()} >= {"Q5_K", "Q8_0", "F32"}
    options = BuildOptions(tmp_path / "m.gguf", tmp_path / "m.ninfer", frontend=TRAINED / model, recipe=recipe)
    check_answers(build(make_plan(options)).path)


@pytest.mark.parametrize(("model", "recipe"), [("dense", "w8"), ("moe", "groupwise-int")])
def test_block_fp8_folder(tmp_path: Path, model: str, recipe: str) -> None:
    """As the official FP8 checkpoints are: decoder matrices in blocks of 128 × 128, everything else BF16."""
    config, tensors = trained(model)
    stored: dict[str, Any] = {}
    for name, values in tensors.items():
        matrix = values.ndim > 1 and "conv1d" not in name and "embed" not in name and "lm_head" not in name
        if matrix and ".layers." in name and not name.startswith("mtp."):
            rows, width = values.shape[-2:]
            *lead, r, c = *values.shape[:-2], -(-rows // 128), -(-width // 128)
            padded = np.zeros((*lead, r * 128, c * 128), np.float32)
            padded[..., :rows, :width] = np.abs(values)
            scales = (padded.reshape(*lead, r, 128, c, 128).max((-3, -1)) / 448).astype(np.float32)
            stored[name] = (values / spread(scales, rows, width, (128, 128))).astype(E4M3)
            stored[name.replace(".weight", ".weight_scale_inv") if name.endswith("weight") else f"{name}_scale_inv"] = (
                scales
            )
        else:
            stored[name] = (values.view(np.uint32) >> 16).astype(np.uint16)
    source = tmp_path / model
    shutil.copytree(TRAINED / model, source, ignore=shutil.ignore_patterns("*.safetensors*"))
    write_safetensors(source / "model.safetensors", stored)
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    (source / "config.json").write_text(json.dumps(config))
    plan = make_plan(BuildOptions(source, tmp_path / "m.ninfer", recipe=recipe))
    assert any("FP8" in note for note in plan.notes)
    check_answers(build(plan).path)
