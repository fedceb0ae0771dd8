"""Feed-forward networks that the CPU computes in rounds, while the link brings those of other layers.

A round hands the residual stream over in pinned memory, a thread of the driver calls back, and the next launches read
what it left: the new residual stream, normed rows, sums of squares. Rounding points are those of the kernels. Nothing
may be raised in that thread: the first error is kept, rows of NaN go on, and ``check`` raises it.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ninfer_format import Artifact, TensorEntry
from ninfer_format.codec import decode_tensor
from ninfer_runtime.backends.cuda.cpu_matrices import CpuMatrix, cpu_matrix_bytes, random_matrix, read_matrix
from ninfer_runtime.backends.cuda.device import Device, DeviceError, DeviceMemoryError, Stream
from ninfer_runtime.backends.cuda.host_store import free_host_bytes
from ninfer_runtime.backends.cuda.memory import Activations
from ninfer_runtime.backends.cuda.packing import activation_stride
from ninfer_runtime.backends.cuda.residency import CpuSeconds
from ninfer_runtime.models.binder import BoundModel
from ninfer_runtime.models.qwen3_5 import MlpWeights

_FLOAT, _BF16, _MIB = 4, 2, 1 << 20
_BF16_NAN = 0x7FC0
_COPY_BYTES = 32 << 20
_SAMPLES = 5


@dataclass(frozen=True, slots=True)
class CpuNetwork:
    """The second half of a decoder block: norm, gate and up, SwiGLU, down, residual; and the norm behind it.

    gate_up     [2 width, hidden], gate rows first; down [hidden, width]
    norm, next_norm   float32 [hidden], 1 + w
    """

    gate_up: CpuMatrix
    down: CpuMatrix
    norm: Tensor
    next_norm: Tensor
    epsilon: float

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``x`` float32 [t, hidden] → the new one, bfloat16 of it times ``next_norm``, and its Σ x² [t]."""
        hidden = x.shape[1]
        rms = torch.rsqrt(x.square().sum(1, keepdim=True) / hidden + self.epsilon)
        halves = (self.gate_up(_padded((x * self.norm).bfloat16())) * rms).chunk(2, 1)
        # Row by row: where torch's vectors end depends on how many elements there are, and so does its exponential.
        inner = torch.stack([torch.nn.functional.silu(gate) * up for gate, up in zip(*halves, strict=True)]).bfloat16()
        x = x + self.down(_padded(inner))
        return x, (x * self.next_norm).bfloat16(), x.square().sum(1)


def _padded(rows: Tensor) -> Tensor:
    k = rows.shape[1]
    return rows if activation_stride(k) == k else torch.nn.functional.pad(rows, (0, activation_stride(k) - k))


class Handover:
    """Pinned buffers between a stream and the thread that computes, for rounds of up to ``n_columns``."""

    def __init__(self, device: Device, hidden: int, n_columns: int) -> None:
        self.device, self._hidden = device, hidden
        stride = activation_stride(hidden)
        self._memory = device.allocate_host(n_columns * (_FLOAT * hidden + _BF16 * stride + _FLOAT))
        self._memory[:] = 0
        begins = np.cumsum([0, n_columns * _FLOAT * hidden, n_columns * _BF16 * stride])
        parts = [self._memory[begin:] for begin in begins.tolist()]
        self._x = parts[0][: n_columns * _FLOAT * hidden].view(np.float32).reshape(n_columns, hidden)
        self._normed = parts[1][: n_columns * _BF16 * stride].view(np.uint16).reshape(n_columns, stride)
        self._ss = parts[2][: n_columns * _FLOAT].view(np.float32)
        self.error: BaseException | None = None

    def queue(self, stream: Stream, network: CpuNetwork, n_columns: int, a: Activations) -> None:
        """Put the network on ``stream``: ``a.x`` in place, ``a.normed`` and ``a.ss`` (one part)."""
        x, normed, ss = self._x[:n_columns], self._normed[:n_columns], self._ss[:n_columns]
        self.device.download(a.x, x, stream)
        self.device.call(stream, lambda: self._compute(network, x, normed, ss))
        self.device.upload(a.x, x, stream)
        self.device.upload(a.normed, normed, stream)
        self.device.upload(a.ss, ss, stream)

    def _compute(self, network: CpuNetwork, x: NDArray[Any], normed: NDArray[Any], ss: NDArray[Any]) -> None:
        try:
            with torch.inference_mode():
                found, rows, squares = network(torch.from_numpy(x))
            x[...], ss[...] = found.numpy(), squares.numpy()
            normed[:, : self._hidden] = rows.view(torch.int16).numpy().view(np.uint16)
        except BaseException as error:  # in a thread of the driver, which knows no exceptions
            self.error = self.error or error
            x[...] = ss[...] = np.nan
            normed[:, : self._hidden] = _BF16_NAN

    def check(self) -> None:
        """DeviceError if a network could not be computed; what the rounds since then gave is nothing."""
        if self.error is not None:
            raise DeviceError(f"the CPU's part of a round failed: {self.error!r}; start again without --ffn-cpu")

    def close(self) -> None:
        """Give the buffers back; no round may be running."""
        self.device.free_host(self._memory)


@dataclass(frozen=True, slots=True)
class CpuFfn:
    """A decoder layer's network in rounds, in the place of two launches."""

    handover: Handover
    network: CpuNetwork
    ss_parts: int = 1

    def launch(self, stream: Stream, n_columns: int, a: Activations) -> None:
        """``a.x`` → ``a.x``, ``a.normed``, ``a.ss``; what follows starts when all of it is there."""
        self.handover.queue(stream, self.network, n_columns, a)


class CpuRounds:
    """The networks that the CPU computes in a program's rounds, by decoder layer; given back with ``close``."""

    def __init__(self, device: Device, model: BoundModel, layers: Sequence[int], n_columns: int) -> None:
        """Read and convert them, for rounds of up to ``n_columns``. DeviceMemoryError when the host has too little
        memory free."""
        needed, free = sum(network_bytes(model, i) for i in layers), free_host_bytes()
        if free is not None and free < needed:
            raise DeviceMemoryError(
                f"{needed / _MIB:,.0f} MiB of host memory are needed for the networks on the CPU, "
                f"{free / _MIB:,.0f} MiB are free; lower --ffn-cpu"
            )
        networks = {i: _network(model, i) for i in layers}
        self._handover = Handover(device, model.spec.text.hidden, n_columns)
        self.of_layer: Mapping[int, CpuFfn] = {i: CpuFfn(self._handover, network) for i, network in networks.items()}

    def check(self) -> None:
        """See ``Handover``."""
        self._handover.check()

    def close(self) -> None:
        """See ``Handover``."""
        self._handover.close()


def _mlp(model: BoundModel, layer: int) -> MlpWeights:
    network = model.layers[layer].ffn
    assert isinstance(network, MlpWeights)
    return network


def network_bytes(model: BoundModel, layer: int) -> int:
    """Host memory of a layer's network in the forms that the CPU multiplies."""
    of = _mlp(model, layer)
    entries = [model.artifact.objects[view.name] for view in (of.gate, of.down)]
    return sum(cpu_matrix_bytes(entry) for entry in entries if isinstance(entry, TensorEntry))


def _network(model: BoundModel, layer: int) -> CpuNetwork:
    of, layers = _mlp(model, layer), model.layers
    following = layers[layer + 1].input_norm if layer + 1 < len(layers) else model.final_norm
    gate_up, down = (read_matrix(model.artifact, view.name) for view in (of.gate, of.down))
    norms = [_one_plus(model.artifact, view.name) for view in (layers[layer].post_attention_norm, following)]
    return CpuNetwork(gate_up, down, norms[0], norms[1], model.spec.norm_eps)


def _one_plus(artifact: Artifact, name: str) -> Tensor:
    entry = artifact.objects[name]
    assert isinstance(entry, TensorEntry)
    values = decode_tensor(artifact.payload(name), entry.format, entry.layout, entry.shape)
    return 1 + torch.from_numpy(values)


def random_network(model: BoundModel) -> CpuNetwork:
    """One of the first layer's shape and formats, with random weights."""
    of, rng, hidden = _mlp(model, 0), np.random.default_rng(0), model.spec.text.hidden
    matrices = []
    for view in (of.gate, of.down):
        entry = model.artifact.objects[view.name]
        assert isinstance(entry, TensorEntry)
        matrices.append(random_matrix(entry.format, entry.shape[0], entry.shape[1], rng))
    return CpuNetwork(matrices[0], matrices[1], torch.ones(hidden), torch.ones(hidden), model.spec.norm_eps)


def measured_seconds(model: BoundModel, device: Device) -> CpuSeconds | None:
    """What a network of the first layer's formats takes in rounds of one and of eight columns, with random weights and
    beside copies to the device, which read host memory too. None for a mixture of experts."""
    if not isinstance(model.layers[0].ffn, MlpWeights):
        return None
    network, hidden, rng = random_network(model), model.spec.text.hidden, np.random.default_rng(0)
    stream, source, target = device.stream(), device.allocate_host(_COPY_BYTES), 0
    try:
        target = device.allocate(_COPY_BYTES)
        of_columns = {n: torch.from_numpy(rng.standard_normal((n, hidden), np.float32)) for n in (1, 8)}
        return CpuSeconds(*(_beside_copies(device, stream, target, source, network, x) for x in of_columns.values()))
    finally:
        device.synchronize(stream)
        if target:
            device.free(target)
        device.free_host(source)


def _beside_copies(
    device: Device, stream: Stream, target: int, source: NDArray[np.uint8], network: CpuNetwork, x: Tensor
) -> float:
    """Seconds of a call, the median; copies are queued for longer than it takes."""
    began = time.perf_counter()
    device.upload(target, source, stream)
    device.synchronize(stream)
    copy = time.perf_counter() - began
    samples: list[float] = []
    for _ in range(1 + _SAMPLES):
        for _ in range(1 + int(2 * max(samples, default=0.0) / copy)):
            device.upload(target, source, stream)
        began = time.perf_counter()
        with torch.inference_mode():
            network(x)
        samples.append(time.perf_counter() - began)
        device.synchronize(stream)
    return float(np.median(samples[1:]))
