"""A card that is not there: what a program would take on it, by the backend's own planner, for any model.

Models and options that have no kernels yet are planned all the same: weights from the inventory, keys and values from
their formats, state and workspace from the nearest model that runs. ``refusal`` says so.
"""

import re
from dataclasses import replace

from ninfer_format.errors import UnsupportedError, UsageError
from ninfer_format.inventory import expected_inventory, resident_bytes
from ninfer_runtime.backends.base import MemoryPlan, Program, ProgramLimits, ProgramOptions
from ninfer_runtime.backends.cuda.backend import CudaBackend
from ninfer_runtime.backends.cuda.planned import CARDS, UNKNOWN_CARD, USUAL_RATES, Card, dense_twin
from ninfer_runtime.backends.cuda.planning import Forecast, planned_forecast
from ninfer_runtime.backends.kv_numeric import token_bytes
from ninfer_runtime.config import KvStorage
from ninfer_runtime.models.binder import BoundModel
from ninfer_runtime.models.qwen3_5 import MlpWeights

_BYTES = re.compile(r"([1-9][0-9]{0,15})(MiB|GiB)?")
_UNITS = {None: 1, "MiB": 1 << 20, "GiB": 1 << 30}


def card_key(card: Card) -> str:
    """The card's name as an option spells it."""
    return card.name.lower().replace(" ", "")


def card_named(name: str) -> Card:
    """One of ``CARDS`` (``rtx5090``), or a card of so much memory (``25769803776``, ``24GiB``). UsageError."""
    for card in CARDS:
        if name.lower() == card_key(card):
            return card
    found = _BYTES.fullmatch(name)
    if found is None:
        known = ", ".join(card_key(card) for card in CARDS)
        raise UsageError(f"--gpu is {name!r}, expected {known}, or bytes of memory as in 25769803776 or 24GiB")
    n_bytes = int(found[1]) * _UNITS[found[2]]
    return replace(UNKNOWN_CARD, name=name, total_bytes=n_bytes)


class CardBackend:
    """``backends.base.Backend`` for planning only."""

    name = "cuda"

    def __init__(self, card: Card) -> None:
        self.card = card
        self._backend = CudaBackend(card.as_device(), rates=card.rates or USUAL_RATES)
        self._twins: dict[int, BoundModel] = {}
        self._weight_bytes: dict[tuple[int, tuple[str, ...]], int] = {}

    def free_memory(self, options: ProgramOptions) -> int:
        """What the card has for a program when nothing else runs on it."""
        return self._backend.free_memory(options)

    def refusal(self, model: BoundModel, limits: ProgramLimits, options: ProgramOptions) -> str | None:
        """Why the backend does not run this today; None when it does."""
        try:
            self._backend.plan_memory(model, limits, options)
        except (UnsupportedError, UsageError) as error:
            return str(error)
        return None

    def plan_memory(self, model: BoundModel, limits: ProgramLimits, options: ProgramOptions) -> MemoryPlan:
        """The backend's plan, or an estimate where it refuses."""
        try:
            return self._backend.plan_memory(model, limits, options)
        except UnsupportedError:
            if options.residency.weights == "ffn":
                raise
            return self._estimate(model, limits, options)

    def forecast(self, model: BoundModel, plan: MemoryPlan) -> Forecast | None:
        """Rounds of a plan; None for a card whose rates are not known, and for a mixture of experts."""
        if self.card.rates is None or not isinstance(model.layers[0].ffn, MlpWeights):
            return None
        return planned_forecast(model, plan, self.card.as_device(), self.card.rates)

    def create(self, model: BoundModel, plan: MemoryPlan) -> Program:
        """UsageError: there is no such device here."""
        raise UsageError(f"{self.card.name} is planned for, not present")

    def _estimate(self, model: BoundModel, limits: ProgramLimits, options: ProgramOptions) -> MemoryPlan:
        if id(model) not in self._twins:
            self._twins[id(model)] = dense_twin(model)
        kv_dtype = "int8" if options.kv_dtype == "fp6" else options.kv_dtype
        runnable = replace(options, kv_dtype=kv_dtype, proposer="none", draft_head=False)
        plan = self._backend.plan_memory(self._twins[id(model)], replace(limits, max_drafts=0), runnable)
        drafts = options.proposer != "none"
        components = ("text", *("mtp",) * drafts, *("draft_head",) * options.draft_head)
        if (known := (id(model), components)) not in self._weight_bytes:
            inventory = expected_inventory(model.artifact.directory, model.config)
            self._weight_bytes[known] = resident_bytes(inventory, components)
        text, storage = model.spec.text, _storage(options)
        token = token_bytes(storage, len(model.spec.attention_layers) + drafts, text.n_kv_heads, text.head_dim)
        return replace(
            plan,
            limits=limits,
            options=options,
            weight_bytes=self._weight_bytes[known] - plan.host_weight_bytes,
            kv_bytes=limits.n_pages * limits.page_tokens * token,
        )


def _storage(options: ProgramOptions) -> KvStorage:
    return "bf16" if options.kv_dtype == "auto" else options.kv_dtype
