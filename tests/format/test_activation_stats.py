"""Activation statistics read back exactly, and what is not such a document is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ninfer_format.activation_stats import (
    HEAD_SITE,
    SCHEMA,
    ActivationStats,
    SiteStats,
    dump_activation_stats,
    read_activation_stats,
    site_of,
)
from ninfer_format.errors import UsageError
from ninfer_format.roles import ROLES

ATTENTION = "text/layers/3/attention/input_projection/input_scale_divisor"
SITE = "text/layers/3/mlp/down_projection/input_scale_divisor"
SMALL: dict[str, Any] = {
    "schema": SCHEMA,
    "model": "tiny/bf16",
    "dtype": "float32",
    "tokens": 7,
    "context": 2048,
    "texts": [{"sha256": "00" * 32, "tokens": 7}],
    "sites": {SITE: {"amax": 1.5, "rows": 7, "mean_square": [0.25, 1]}},
}


def test_float32_values_read_back_exactly(tmp_path: Path, fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    squares = np.abs(rng.standard_normal(300, np.float32)) * np.float32(10.0) ** rng.integers(-38, 38, 300)
    squares = np.append(squares, [0, np.float32(1e-45), np.finfo(np.float32).max]).astype(np.float32)
    sites = {SITE: SiteStats(float(np.float32(0.1)), 9, squares), HEAD_SITE: SiteStats(0.0, 0)}
    stats = ActivationStats("tiny/w8", "bfloat16", 9, 128, (("ab" * 32, 9),), sites)
    path = tmp_path / "stats.json"
    path.write_bytes(dump_activation_stats(stats))
    read = read_activation_stats(path)
    again = read.sites[SITE].mean_square
    assert again is not None
    assert np.array_equal(again, squares)
    assert np.float32(read.sites[SITE].amax) == np.float32(0.1)
    assert read.sites[HEAD_SITE].mean_square is None
    assert (read.model, read.dtype, read.n_tokens, read.context, read.texts) == (
        "tiny/w8", "bfloat16", 9, 128, (("ab" * 32, 9),),
    )  # fmt: skip
    assert dump_activation_stats(read) == path.read_bytes()


@pytest.mark.parametrize(
    ("matrix", "site"),
    [
        ("text/layers/3/attention/query_key", ATTENTION),
        ("text/layers/3/attention/gate_value", ATTENTION),
        ("text/layers/3/attention/query_key_gate_value", ATTENTION),
        ("text/layers/11/attention/output", "text/layers/11/attention/output_projection/input_scale_divisor"),
        ("text/layers/0/gdn/value_z", "text/layers/0/gdn/input_projection/input_scale_divisor"),
        ("text/layers/0/moe/routed_down", "text/layers/0/moe/routed_down_projection/input_scale_divisor"),
        ("text/draft_head", HEAD_SITE),
        ("text/output_head", HEAD_SITE),
        ("text/token_embedding", None),
        ("text/layers/0/input_norm", None),
        ("mtp/layer/mlp/down", None),
        ("vision/layers/0/mlp/fc1", None),
    ],
)  # fmt: skip
def test_site_of_a_matrix(matrix: str, site: str | None) -> None:
    assert site_of(matrix) == site


def test_every_matrix_that_may_be_nvfp4_has_the_site_of_its_divisor() -> None:
    divisors = {role.divisor_of: role.name for role in ROLES.values() if role.divisor_of}
    assert len(divisors) > 8
    for matrix, divisor in divisors.items():
        assert site_of(matrix.replace("*", "5")) == divisor.replace("*", "5")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"schema": "ninfer.activation-stats/2"}, "schema"),
        ({"tokens": -1}, "tokens"),
        ({"tokens": True}, "tokens"),
        ({"texts": {}}, "texts"),
        ({"texts": [3]}, "sha256"),
        ({"model": None}, "model"),
        ({"sites": {}}, "no sites"),
        ({"sites": {"text/layers/3/mlp/down": {"amax": 1, "rows": 1}}}, "'text/layers/3/mlp/down' is not a site"),
        ({"sites": {"text/layers/*/mlp/down_projection/input_scale_divisor": {"amax": 1, "rows": 1}}}, "not a site"),
        ({"sites": {SITE: {"amax": -0.5, "rows": 1}}}, "amax"),
        ({"sites": {SITE: {"amax": "1", "rows": 1}}}, "amax"),
        ({"sites": {SITE: {"amax": 1}}}, "rows"),
        ({"sites": {SITE: {"amax": 1, "rows": 1, "mean_square": [-1.0]}}}, "mean_square"),
        ({"sites": {SITE: {"amax": 1, "rows": 1, "mean_square": [1e39]}}}, "mean_square"),
        ({"sites": {SITE: {"amax": 1, "rows": 1, "mean_square": []}}}, "mean_square"),
        ({"sites": {SITE: {"amax": 1, "rows": 1, "mean_square": [True]}}}, "mean_square"),
        ({"sites": {SITE: 5}}, "rows"),
    ],
)
def test_wrong_member_is_named(change: dict[str, Any], word: str, tmp_path: Path) -> None:
    path = tmp_path / "stats.json"
    path.write_text(json.dumps(SMALL))
    assert read_activation_stats(path).sites[SITE].n_rows == 7
    path.write_text(json.dumps(SMALL | change))
    with pytest.raises(UsageError, match="not activation statistics") as refused:
        read_activation_stats(path)
    assert word in str(refused.value)


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{", b'{"schema": NaN}', b"\xff", b'{"schema": 1, "schema": 2}', b"[" * 10**6]
)
def test_no_such_document_is_refused(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "stats.json"
    path.write_bytes(text)
    with pytest.raises(UsageError, match="calibrate"):
        read_activation_stats(path)
