"""On a CUDA device the encoder and a whole build give the CPU's bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ninfer_convert.pipeline import build
from ninfer_convert.plan import ConversionPlan
from ninfer_convert.quantize.groupwise import encode_matrix
from ninfer_convert.quantize.scales import scale_table
from ninfer_format.formats import NUMERIC_FORMATS
from tests.convert.tiny import TinyCheckpoint

pytestmark = pytest.mark.gpu

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
FORMATS = ("Q4G64_F16S", "Q5G64_F16S", "Q6G64_F16S", "W8G32_F16S")


@pytest.mark.parametrize("format", FORMATS)
def test_golden_vectors_are_reproduced_on_cuda(format: str) -> None:
    vectors = [v for v in json.loads((GOLDEN / "index.json").read_text())["vectors"] if v.get("format") == format]
    for vector in (v for v in vectors if "source" in v):
        source = np.load(GOLDEN / vector["source"])
        payload, _ = encode_matrix(source, format, device="cuda")
        assert payload == (GOLDEN / vector["payload"]).read_bytes(), vector["source"]


@pytest.mark.parametrize("format", FORMATS)
def test_cuda_bytes_equal_cpu_bytes_for_every_magnitude(format: str, fresh_seed: int) -> None:
    fmt = NUMERIC_FORMATS[format]
    top = int(np.float32(scale_table(fmt).first_refused).view(np.uint32)) >> 16
    rng = np.random.default_rng(fresh_seed)
    rows = rng.integers(0, 1 << 16, (top, 130), dtype=np.uint16)
    rows[:, 0] = np.arange(top)
    rows = np.where((rows & 0x7FFF) > rows[:, :1], rows[:, :1] ^ 1, rows).astype(np.uint16)
    rows[(rows & 0x7FFF) >= top] = 0
    (cpu, cpu_sums), (gpu, gpu_sums) = (encode_matrix(rows, format, device=d) for d in ("cpu", "cuda"))
    assert gpu == cpu
    assert gpu_sums == pytest.approx(cpu_sums, rel=1e-3)


def test_build_on_cuda_equals_build_on_cpu(
    tiny: TinyCheckpoint, plan_of: Callable[..., ConversionPlan], tmp_path: Path
) -> None:
    outputs = []
    for device in ("cpu", "cuda"):
        out = tmp_path / f"{device}.ninfer"
        build(plan_of(tiny, out=out, device=device, model_id="same"))
        outputs.append(out.read_bytes())
    assert outputs[0] == outputs[1]
