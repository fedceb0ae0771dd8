"""Golden vectors byte for byte: encoder, packing, rows, direct words, NVFP4, sizes, refused signatures and edits."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ninfer_format.codec import (
    decode_rows,
    decode_tensor,
    encode_tensor,
    gather_rows,
    pack_tensor,
    slice_rows,
    unpack_tensor,
)
from ninfer_format.errors import EncodeError, RegistryError, SignatureError
from ninfer_format.formats import check_signature, encoded_size
from ninfer_format.numeric import nvfp4
from ninfer_format.numeric.direct import widen_bf16
from ninfer_format.payload_rules import scan_payload

GOLDEN = Path(__file__).parents[1] / "golden"
INDEX: dict[str, Any] = json.loads((GOLDEN / "index.json").read_text(encoding="utf-8"))
VECTORS: dict[str, dict[str, Any]] = {vector["id"]: vector for vector in INDEX["vectors"]}
TINY = (GOLDEN / "tiny_v2.ninfer").read_bytes()
TINY_OBJECTS: list[dict[str, Any]] = json.loads(TINY[16 : 16 + int.from_bytes(TINY[8:16], "little")])["objects"]
TINY_PAYLOAD = 4096


def of_kind(*kinds: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("vector", [pytest.param(v, id=i) for i, v in VECTORS.items() if v["kind"] in kinds])


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def stored(file: str, digest: str) -> bytes:
    content = (GOLDEN / file).read_bytes()
    assert sha256(content) == digest, f"{file} is not the golden file the index describes"
    return content


def array(vector: dict[str, Any], member: str) -> np.ndarray[Any, np.dtype[Any]]:
    """The .npy file a vector names in ``member``, its own bytes checked against the index."""
    content = stored(vector[member], vector[f"{member}_sha256"])
    loaded: np.ndarray[Any, np.dtype[Any]] = np.load(io.BytesIO(content))
    return loaded


def source_values(vector: dict[str, Any]) -> np.ndarray[Any, np.dtype[np.float32]]:
    source = array(vector, "source")
    return widen_bf16(source) if source.dtype == np.uint16 else source


def test_every_vector_kind_is_covered() -> None:
    covered = ["quantize", "quantize-reject", "pack", "row-slice", "row-gather", "direct", "nvfp4", "nvfp4-reject"]
    assert sorted({v["kind"] for v in VECTORS.values()}) == sorted(covered)


@of_kind("quantize")
def test_canonical_encoder_gives_the_golden_bytes_and_decodes_to_the_golden_values(vector: dict[str, Any]) -> None:
    format, layout, shape = vector["format"], vector["layout"], vector["shape"]
    payload = encode_tensor(source_values(vector), format, layout)
    assert payload == stored(vector["payload"], vector["payload_sha256"])
    assert len(payload) == vector["payload_bytes"] == encoded_size(format, layout, shape)
    decoded = decode_tensor(payload, format, layout, shape)
    assert sha256(decoded.astype("<f4").tobytes()) == vector["dequant_f32_le_sha256"]
    assert pack_tensor(*unpack_tensor(payload, format, layout, shape), format, layout) == payload
    assert scan_payload("golden", format, layout, shape, payload) == []


@of_kind("quantize-reject")
def test_values_no_scale_can_hold_are_refused_and_the_last_one_below_is_not(vector: dict[str, Any]) -> None:
    values = np.zeros(vector["shape"], np.float32)
    assert vector["recipe"]["all_lanes"] == 0.0
    lane = vector["recipe"]["lane"]
    values.view(np.uint32)[0, lane] = int(vector["recipe"]["f32_bits"], 16)
    with pytest.raises(EncodeError, match="row 0"):
        encode_tensor(values, vector["format"], vector["layout"])
    if "last_accepted_f32_bits" in vector:
        values.view(np.uint32)[0, lane] = int(vector["last_accepted_f32_bits"], 16)
        payload = encode_tensor(values, vector["format"], vector["layout"])
        words = unpack_tensor(payload, vector["format"], vector["layout"], vector["shape"])
        assert words.scales is not None
        assert words.scales[0, 0] == 0x7BFF


@of_kind("pack")
def test_given_words_are_packed_to_the_golden_bytes(vector: dict[str, Any]) -> None:
    codes, scales = array(vector, "codes"), array(vector, "scales")
    payload = pack_tensor(codes, scales, None, vector["format"], vector["layout"])
    assert payload == stored(vector["payload"], vector["payload_sha256"])
    assert len(payload) == vector["payload_bytes"]
    words = unpack_tensor(payload, vector["format"], vector["layout"], vector["shape"])
    k = vector["shape"][1]
    assert words.scales is not None
    assert (words.codes == codes[:, :k]).all()
    assert (words.scales == scales[:, : words.scales.shape[1]]).all()
    logical = pack_tensor(words.codes, words.scales, None, vector["format"], vector["layout"])
    assert logical == payload, "unpadded codes and scales give other bytes than padded ones"


@of_kind("row-slice", "row-gather")
def test_chosen_rows_become_the_golden_matrix_of_their_own(vector: dict[str, Any]) -> None:
    parent = VECTORS[vector["parent"]]
    payload = stored(parent["payload"], parent["payload_sha256"])
    format, layout, shape = vector["format"], vector["layout"], parent["shape"]
    if vector["kind"] == "row-slice":
        rows: Any = slice(*vector["rows"])
        picked = slice_rows(payload, format, shape, rows)
    else:
        rows = vector["row_list"]
        picked = gather_rows(payload, format, shape, rows)
    assert picked == stored(vector["payload"], vector["payload_sha256"])
    decoded = decode_tensor(picked, format, layout, vector["shape"])
    assert (decode_rows(payload, format, layout, shape, rows) == decoded).all()


@of_kind("direct")
def test_direct_words_are_stored_bit_for_bit(vector: dict[str, Any]) -> None:
    words = array(vector, "source")
    payload = pack_tensor(words, None, None, vector["format"], vector["layout"])
    assert payload == stored(vector["payload"], vector["payload_sha256"])
    assert len(payload) == vector["payload_bytes"]
    back = unpack_tensor(payload, vector["format"], vector["layout"], vector["shape"])
    assert back.codes.shape == tuple(vector["shape"])
    assert (back.codes.view(words.dtype) == words).all()
    values = decode_tensor(payload, vector["format"], vector["layout"], vector["shape"])
    assert encode_tensor(values, vector["format"], vector["layout"]) == payload


@of_kind("nvfp4")
def test_nvfp4_words_give_the_golden_bytes_and_values(vector: dict[str, Any]) -> None:
    format, layout, shape = vector["format"], vector["layout"], vector["shape"]
    codes, scales = array(vector, "codes"), array(vector, "scales")
    divisor = np.frombuffer(bytes.fromhex(vector["divisor_f32_hex_le"]), "<f4")[0]
    payload = pack_tensor(codes, scales, divisor, format, layout)
    assert payload == stored(vector["payload"], vector["payload_sha256"])
    assert len(payload) == vector["payload_bytes"]
    assert pack_tensor(nvfp4.split_nibbles(codes), scales, divisor, format, layout) == payload
    words = unpack_tensor(payload, format, layout, shape)
    assert words.scales is not None
    assert words.divisor == divisor
    assert (words.codes == codes).all()
    assert (words.scales == scales).all()
    decoded = np.empty(shape, np.float64)
    nvfp4.dequantize(words.codes, words.scales, divisor, decoded)
    assert sha256(decoded.astype("<f8").tobytes()) == vector["decoded_f64_le_sha256"]
    assert (decode_tensor(payload, format, layout, shape) == decoded.astype(np.float32)).all()
    assert scan_payload("golden", format, layout, shape, payload) == []


@of_kind("nvfp4-reject")
def test_illegal_nvfp4_words_are_refused(vector: dict[str, Any]) -> None:
    n, k = vector["shape"]
    codes = np.full((n, k // 2), vector["recipe"]["codes"], np.uint8)
    scales = np.full((n, k // 16), int(vector["recipe"]["all_scale_words"], 16), np.uint8)
    divisor = np.array([int(vector["recipe"]["divisor_f32_bits"], 16)], np.uint32).view(np.float32)[0]
    with pytest.raises(EncodeError):
        pack_tensor(codes, scales, divisor, vector["format"], vector["layout"])


@pytest.mark.parametrize("layout, format, shape, size", INDEX["encoded_sizes"])
def test_encoded_size(layout: str, format: str, shape: list[int], size: int) -> None:
    assert encoded_size(format, layout, shape) == size


@pytest.mark.parametrize("layout, format, shape", INDEX["rejected_signatures"])
def test_signature_outside_the_registry_is_refused(layout: str, format: str, shape: list[int]) -> None:
    unknown = format == "FP16" or layout == "tiled-v1"
    with pytest.raises(RegistryError if unknown else SignatureError):
        check_signature(format, layout, shape)
    with pytest.raises(RegistryError if unknown else SignatureError):
        encoded_size(format, layout, shape)
    with pytest.raises(RegistryError if unknown else SignatureError):
        decode_tensor(b"", format, layout, shape)


def scan_container(content: bytes) -> list[str]:
    messages: list[str] = []
    for entry in TINY_OBJECTS:
        if entry["kind"] == "tensor":
            begin = TINY_PAYLOAD + entry["offset"]
            payload = content[begin : begin + entry["bytes"]]
            messages += scan_payload(entry["name"], entry["format"], entry["layout"], entry["shape"], payload)
    return messages


def test_untouched_container_has_no_payload_findings() -> None:
    assert scan_container(TINY) == []


@pytest.mark.parametrize("edit", [pytest.param(e, id=e["id"]) for e in INDEX["payload_level"]])
def test_payload_edit_is_found_in_exactly_its_object_at_its_byte(edit: dict[str, Any]) -> None:
    content = bytearray(TINY)
    assert edit["recipe"]["base"] == "tiny_v2.ninfer"
    for offset, text in edit["recipe"]["set_bytes"]:
        changed = bytes.fromhex(text)
        content[offset : offset + len(changed)] = changed
    assert sha256(bytes(content)) == edit["result_sha256"]
    messages = scan_container(bytes(content))
    assert len(messages) == 1
    assert messages[0].startswith(edit["object"] + ": ")
    entry = next(e for e in TINY_OBJECTS if e["name"] == edit["object"])
    word = 4 if entry["format"] in ("FP32", "I32") or "divisor" in edit["id"] else 2 if "scale-n" in edit["id"] else 1
    byte = edit["recipe"]["set_bytes"][0][0] - TINY_PAYLOAD - entry["offset"]
    expected = 0 if edit["id"] == "pay-zero-scale-nonzero-codes" else byte // word * word
    assert f"byte {expected}" in messages[0]
