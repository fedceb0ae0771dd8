"""The bound model's tensors in device memory: packed matrices, the raw embedding, small vectors.

``plan_weights`` says what goes where; nothing here computes. Matrices of one input that are multiplied in one launch
stay apart, each in its own format: ``InputMatrices`` lists them in launch order and says which rows are whose.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from ninfer_format.activation_stats import site_of
from ninfer_format.directory import TensorEntry
from ninfer_format.errors import ArtifactError, UnsupportedError
from ninfer_format.geometry import up
from ninfer_format.model_geometry import TextGeometry
from ninfer_runtime.backends.cuda.arena import ALIGNMENT, ArenaPlan, Taker
from ninfer_runtime.backends.cuda.loader import Piece, Upload
from ninfer_runtime.backends.cuda.packing import TILE_FORMATS, PackedMatrix
from ninfer_runtime.backends.cuda.ring import RingLayout, StreamedHalf, StreamedLayer
from ninfer_runtime.config import ON_DEVICE, Residency
from ninfer_runtime.models.binder import BoundModel
from ninfer_runtime.models.moe import MoeWeights
from ninfer_runtime.models.qwen3_5 import AttentionWeights, GdnWeights, MlpWeights
from ninfer_runtime.models.registry import LayerWeights
from ninfer_runtime.models.views import View

GDN_PARTS = ("query", "key", "value", "z", "a", "b")
ATTENTION_PARTS = ("query", "key", "gate", "value")


@dataclass(frozen=True, slots=True)
class Rows:
    """Where a part's rows are: index of the matrix in its launch, and the first row there."""

    matrix: int
    begin: int


@dataclass(frozen=True, slots=True)
class InputMatrices:
    """Matrices of one launch, and the parts their outputs consist of."""

    matrices: tuple[PackedMatrix, ...]
    parts: Mapping[str, Rows]

    def at(self, part: str) -> Rows:
        """Place of a part's rows."""
        return self.parts[part]


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor stored as in the file, at a device address."""

    name: str
    format: str
    shape: tuple[int, ...]
    pointer: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class GdnTensors:
    """A DeltaNet layer: inputs (query, key, value, z, a, b), output, convolution taps, decay, norm."""

    inputs: InputMatrices
    output: PackedMatrix
    convolution: RawTensor
    a_log: RawTensor
    dt_bias: RawTensor
    norm: RawTensor


@dataclass(frozen=True, slots=True)
class AttentionTensors:
    """An attention layer: inputs (query, key, gate, value), output, query and key norms."""

    inputs: InputMatrices
    output: PackedMatrix
    query_norm: RawTensor
    key_norm: RawTensor


@dataclass(frozen=True, slots=True)
class MlpTensors:
    """A dense feed-forward network: interleaved gate and up, and down."""

    gate_up: PackedMatrix
    down: PackedMatrix

    @property
    def matrices(self) -> tuple[PackedMatrix, ...]:
        """In the order a token meets them."""
        return (self.gate_up, self.down)


@dataclass(frozen=True, slots=True)
class MoeTensors:
    """A mixture of experts with one shared expert.

    ``router`` [experts + 1, hidden], in its last row the gate of the shared expert; ``routed_gate_up`` and
    ``routed_down`` are banks of all experts; gate and up are interleaved (in the bank per expert).
    """

    router: PackedMatrix
    routed_gate_up: PackedMatrix
    routed_down: PackedMatrix
    shared: MlpTensors
    experts_per_token: int

    @property
    def n_experts(self) -> int:
        """Routed experts."""
        return self.routed_gate_up.n_experts

    @property
    def matrices(self) -> tuple[PackedMatrix, ...]:
        """In the order a token meets them."""
        return (self.router, *self.shared.matrices, self.routed_gate_up, self.routed_down)


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """One decoder block."""

    input_norm: RawTensor
    mixer: GdnTensors | AttentionTensors
    post_attention_norm: RawTensor
    ffn: MlpTensors | MoeTensors


@dataclass(frozen=True, slots=True)
class DraftTensors:
    """The draft layer: norms of its two inputs, their projection [hidden, 2 · hidden], one block, its last norm.

    ``head`` over frequent ids; None: the decoder's head over all of them.
    """

    embedding_norm: RawTensor
    hidden_norm: RawTensor
    input_projection: PackedMatrix
    layer: LayerTensors
    final_norm: RawTensor
    head: PackedMatrix | None


@dataclass(frozen=True, slots=True)
class DeviceWeights:
    """All tensors of the text model, and of the layer that drafts for it. ``ring``: layers whose networks are copied to
    where their matrices are said to be."""

    embedding: RawTensor
    layers: tuple[LayerTensors, ...]
    final_norm: RawTensor
    head: PackedMatrix
    draft: DraftTensors | None = None
    ring: RingLayout | None = None

    @property
    def blocks(self) -> tuple[LayerTensors, ...]:
        """The decoder's blocks, then that of the draft layer."""
        return self.layers if self.draft is None else (*self.layers, self.draft.layer)

    @property
    def matrices(self) -> Sequence[PackedMatrix]:
        """Every packed matrix, in the order a token meets them."""
        out: list[PackedMatrix] = []
        for layer in self.blocks:
            out += [*layer.mixer.inputs.matrices, layer.mixer.output, *layer.ffn.matrices]
        out.append(self.head)
        if self.draft is not None:
            out += [self.draft.input_projection]
            out += [] if self.draft.head is None else [self.draft.head]
        return out

    @property
    def raw(self) -> Sequence[RawTensor]:
        """Every tensor that stays as it is in the file."""
        out = [self.embedding, self.final_norm]
        if self.draft is not None:
            out += [self.draft.embedding_norm, self.draft.hidden_norm, self.draft.final_norm]
        for layer in self.blocks:
            mixer = layer.mixer
            out += [layer.input_norm, layer.post_attention_norm]
            if isinstance(mixer, GdnTensors):
                out += [mixer.convolution, mixer.a_log, mixer.dt_bias, mixer.norm]
            else:
                out += [mixer.query_norm, mixer.key_norm]
        return out


class _Placer:
    """Takes memory for tensors by name, each once."""

    def __init__(self, model: BoundModel, taker: Taker) -> None:
        self._artifact = model.artifact
        self._objects = model.artifact.objects
        self._path = model.artifact.path
        self._taker = taker

    def entry(self, name: str) -> TensorEntry:
        entry = self._objects[name]
        if not isinstance(entry, TensorEntry):
            raise ArtifactError(f"{self._path}: object {name!r} is a resource, expected a tensor")
        return entry

    def packed(self, view: View, *, interleaved: bool = False, n_experts: int = 1) -> PackedMatrix:
        """The whole matrix that ``view`` is on."""
        entry = self.entry(view.name)
        if entry.format not in TILE_FORMATS:
            raise UnsupportedError(
                f"{self._path}: {view.name} is stored in {entry.format}, the cuda backend runs "
                f"{', '.join(TILE_FORMATS)}; use --backend reference"
            )
        divisor = 1.0 if entry.format != "NVFP4" else self._last_word(view.name)
        site = site_of(view.name) if entry.format == "NVFP4" else None
        of_inputs = self._last_word(site) if site is not None and site in self._objects.names() else None
        n_rows, k = entry.shape
        matrix = PackedMatrix(view.name, entry.format, n_rows, k, 0, interleaved, n_experts, divisor, of_inputs)
        return matrix.at(self._taker.take(f"weights/{view.name}", matrix.n_bytes))

    def _last_word(self, name: str) -> float:
        """The float32 that a payload ends with: the divisor of an NVFP4 matrix, or of what it multiplies."""
        return float(np.frombuffer(self._artifact.payload(name)[-4:], "<f4")[0])

    def raw(self, view: View) -> RawTensor:
        """A tensor as it is in the file."""
        entry = self.entry(view.name)
        pointer = self._taker.take(f"weights/{view.name}", entry.n_bytes)
        return RawTensor(view.name, entry.format, entry.shape, pointer, entry.n_bytes)

    def inputs(self, weights: GdnWeights | AttentionWeights, parts: Sequence[str]) -> InputMatrices:
        """The distinct matrices that hold ``parts``, in order of first use."""
        views: Mapping[str, View] = {part: getattr(weights, part) for part in parts}
        names = list(dict.fromkeys(view.name for view in views.values()))
        firsts = {name: next(view for view in views.values() if view.name == name) for name in names}
        places = {part: Rows(names.index(view.name), view.begin) for part, view in views.items()}
        return InputMatrices(tuple(self.packed(firsts[name]) for name in names), MappingProxyType(places))


def plan_weights(
    model: BoundModel,
    taker: Taker,
    *,
    drafts: bool = False,
    draft_head: bool = False,
    residency: Residency = ON_DEVICE,
    host: Taker | None = None,
) -> DeviceWeights:
    """Take memory for every tensor, with ``drafts`` also for the draft layer's, and with ``draft_head`` for its own
    head; UnsupportedError for formats and blocks that have no kernels. What ``residency`` keeps in host memory is taken
    from ``host``."""
    place, host = _Placer(model, taker), ArenaPlan() if host is None else host
    embedding = (_Placer(model, host) if residency.host_embedding else place).raw(model.token_embedding)
    ring, networks = _ring(model, taker, host, residency)
    layers = tuple(_block(model, w, place, networks.get(i)) for i, w in enumerate(model.layers))
    final_norm, head = place.raw(model.final_norm), place.packed(model.output_head)
    draft = None
    if drafts and model.mtp is not None:
        own_head = model.draft_head if draft_head else None
        draft = DraftTensors(
            embedding_norm=place.raw(model.mtp.embedding_norm),
            hidden_norm=place.raw(model.mtp.hidden_norm),
            input_projection=place.packed(model.mtp.input_projection),
            layer=_block(model, model.mtp.layer, place),
            final_norm=place.raw(model.mtp.final_norm),
            head=None if own_head is None else place.packed(own_head.rows),
        )
    return DeviceWeights(embedding, layers, final_norm, head, draft, ring)


def _ring(
    model: BoundModel, taker: Taker, host: Taker, residency: Residency
) -> tuple[RingLayout | None, Mapping[int, MlpTensors]]:
    """Slots for the streamed networks, as large as the largest of them; the networks, each in its slot."""
    if not (streamed := residency.streamed):
        return None, {}
    found, counted = {}, _Placer(model, ArenaPlan())
    for i in streamed:
        network = model.layers[i].ffn
        assert isinstance(network, MlpWeights)
        found[i] = _mlp(network, counted)
    sizes = [up(max(tensors.matrices[half].n_bytes for tensors in found.values()), ALIGNMENT) for half in (0, 1)]
    base = taker.take("weights/ring", residency.n_slots * sum(sizes))
    layers = []
    for k, (i, tensors) in enumerate(found.items()):
        at = base + k % residency.n_slots * sum(sizes)
        found[i] = MlpTensors(tensors.gate_up.at(at), tensors.down.at(at + sizes[0]))
        halves = [
            StreamedHalf(m.name, host.take(f"host/{m.name}", m.n_bytes), m.pointer, m.n_bytes)
            for m in found[i].matrices
        ]
        layers.append(StreamedLayer(i, (halves[0], halves[1])))
    on_cpu = frozenset(k for k, i in enumerate(found) if i in residency.on_cpu)
    return RingLayout(tuple(layers), residency.n_slots, on_cpu), found


def _mlp(w: MlpWeights, place: _Placer) -> MlpTensors:
    return MlpTensors(gate_up=place.packed(w.gate, interleaved=True), down=place.packed(w.down))


def _moe(w: MoeWeights, text: TextGeometry, place: _Placer) -> MoeTensors:
    assert w.router.name == w.shared_gate.name  # the architecture has no other naming
    return MoeTensors(
        router=place.packed(w.router),
        shared=_mlp(w.shared, place),
        routed_gate_up=place.packed(w.routed_gate_up, interleaved=True, n_experts=text.n_experts),
        routed_down=place.packed(w.routed_down, n_experts=text.n_experts),
        experts_per_token=text.experts_per_token,
    )


def _ffn(model: BoundModel, w: MlpWeights | MoeWeights, place: _Placer) -> MlpTensors | MoeTensors:
    return _mlp(w, place) if isinstance(w, MlpWeights) else _moe(w, model.spec.text, place)


def _block(model: BoundModel, w: LayerWeights, place: _Placer, network: MlpTensors | None = None) -> LayerTensors:
    """``network``: one that has its place already."""
    mixer: GdnTensors | AttentionTensors
    if isinstance(w.mixer, GdnWeights):
        mixer = GdnTensors(
            inputs=place.inputs(w.mixer, GDN_PARTS),
            output=place.packed(w.mixer.output),
            convolution=place.raw(w.mixer.convolution),
            a_log=place.raw(w.mixer.a_log),
            dt_bias=place.raw(w.mixer.dt_bias),
            norm=place.raw(w.mixer.norm),
        )
    else:
        mixer = AttentionTensors(
            inputs=place.inputs(w.mixer, ATTENTION_PARTS),
            output=place.packed(w.mixer.output),
            query_norm=place.raw(w.mixer.query_norm),
            key_norm=place.raw(w.mixer.key_norm),
        )
    return LayerTensors(
        input_norm=place.raw(w.input_norm),
        mixer=mixer,
        post_attention_norm=place.raw(w.post_attention_norm),
        ffn=_ffn(model, w.ffn, place) if network is None else network,
    )


def raw_upload(model: BoundModel, tensor: RawTensor) -> Upload:
    """The upload of a tensor that stays as it is."""
    artifact = model.artifact
    entry = artifact.objects[tensor.name]
    return Upload(tensor.name, (Piece(artifact.payload_offset + entry.offset, entry.n_bytes, tensor.pointer),))
