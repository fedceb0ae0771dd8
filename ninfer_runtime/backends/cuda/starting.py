"""From a layout to memory with the weights in it: what a program does once, when it starts."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from ninfer_format.command import require_extra
from ninfer_format.geometry import up
from ninfer_format.hashing import Progress, available_cores
from ninfer_runtime.backends.cuda.device import Device, Stream
from ninfer_runtime.backends.cuda.file_reads import FileReads, Run
from ninfer_runtime.backends.cuda.loader import LoadReport, Upload, load
from ninfer_runtime.backends.cuda.memory import Regions
from ninfer_runtime.backends.cuda.ops import repack
from ninfer_runtime.backends.cuda.ops.attention import rope_table
from ninfer_runtime.backends.cuda.ring import StreamedHalf, bytes_at
from ninfer_runtime.backends.cuda.weights import raw_upload
from ninfer_runtime.config import Residency
from ninfer_runtime.models.binder import BoundModel

if TYPE_CHECKING:
    from ninfer_runtime.backends.cuda.cpu_networks import CpuFfn

_RUN_BYTES = 8 << 20
_READERS = 8


def clear(device: Device, stream: Stream, model: BoundModel, regions: Regions) -> None:
    """Zeros in everything but the weights (padding columns are never written), ones where sums change hands."""
    r = regions
    device.fill(r.work_begin, 0, r.work_end - r.work_begin, stream)
    r.linear_small_workspace.clear(device, stream)
    device.synchronize(stream)
    device.upload(r.rope, rope_table(model.spec))


def load_weights(device: Device, model: BoundModel, regions: Regions, progress: Progress) -> LoadReport:
    """Everything from the file to its place. Networks that are streamed are packed in their slot, one after the other,
    and taken back to host memory from there; the pool of keys and values, unused yet, lends memory for staging."""
    weights, artifact = regions.weights, model.artifact
    raw = weights.raw[1:] if regions.host_embedding else weights.raw
    uploads = [raw_upload(model, tensor) for tensor in raw]
    streamed = {} if weights.ring is None else {h.name: h for layer in weights.ring.layers for h in layer.halves}
    for matrix in weights.matrices:
        begin = artifact.payload_offset + artifact.objects[matrix.name].offset
        parts = repack.uploads(device, matrix, begin)
        if (half := streamed.get(matrix.name)) is not None:
            parts[-1] = _taken_back(device, parts[-1], half)
        uploads += parts
    report = load(device, artifact.path, uploads, progress=progress, lent=(regions.kv_pool, regions.kv.n_bytes))
    if regions.host_embedding:
        _read_embedding(model, regions)
    return report


class Networks(Protocol):
    """Networks that the CPU computes in rounds, by decoder layer."""

    of_layer: Mapping[int, "CpuFfn"]

    def check(self) -> None:
        """DeviceError if one of them could not be computed."""

    def close(self) -> None:
        """Give back what they hold; no round may be running."""


def networks_on_cpu(device: Device, model: BoundModel, residency: Residency, n_columns: int) -> Networks:
    """The networks that ``residency`` gives to the CPU, for rounds of up to ``n_columns``. MissingExtraError without
    torch, DeviceMemoryError when the host has too little memory free for them."""
    if not residency.on_cpu:
        return NoCpu()
    require_extra("torch", "cpu")
    from ninfer_runtime.backends.cuda.cpu_networks import CpuRounds

    return CpuRounds(device, model, residency.on_cpu, n_columns)


class NoCpu:
    """Rounds that the CPU computes nothing of."""

    of_layer: Mapping[int, "CpuFfn"] = MappingProxyType({})

    def check(self) -> None:
        """Nothing can have gone wrong."""

    def close(self) -> None:
        """Nothing is held."""


def _taken_back(device: Device, upload: Upload, half: StreamedHalf) -> Upload:
    """The last upload of a matrix, with the way back to the host behind it."""
    finish = upload.finish

    def finish_and_take(staging: int, stream: Stream) -> None:
        if finish is not None:
            finish(staging, stream)
        device.download(half.slot, bytes_at(half.payload, half.n_bytes), stream)

    return replace(upload, finish=finish_and_take)


def _read_embedding(model: BoundModel, regions: Regions) -> None:
    """The embedding as it is in the file, to pinned memory."""
    tensor, artifact = regions.weights.embedding, model.artifact
    begin = artifact.payload_offset + artifact.objects[tensor.name].offset
    with FileReads(artifact.path, max(1, min(_READERS, available_cores()))) as reads:
        for at in range(0, up(tensor.n_bytes, _RUN_BYTES), _RUN_BYTES):
            n_bytes = min(_RUN_BYTES, tensor.n_bytes - at)
            reads.start(at, [Run(begin + at, n_bytes, tensor.pointer + at)])
        for at in range(0, up(tensor.n_bytes, _RUN_BYTES), _RUN_BYTES):
            reads.wait(at)
