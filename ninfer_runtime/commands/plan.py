"""``ninfer-run plan``: what a model takes of a card's memory, without the card."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ninfer_format.errors import UsageError
from ninfer_format.published import PUBLISHED
from ninfer_format.reader import Artifact
from ninfer_runtime.backends.cuda.card import CardBackend, card_key, card_named
from ninfer_runtime.backends.cuda.planned import CARDS, DRIVER_BYTES, Card, planned_model
from ninfer_runtime.backends.cuda.planning import Forecast, forecast_text
from ninfer_runtime.backends.cuda.residency import ACCEPTANCE
from ninfer_runtime.commands.options import PlanOptions
from ninfer_runtime.config import EngineConfig
from ninfer_runtime.engine.memory_plan import GRID_SEQUENCES, Survey, mebibytes, survey
from ninfer_runtime.models.binder import BoundModel, bind

_SCHEMA = "ninfer.plan/1"


@dataclass(frozen=True, slots=True)
class CardSurvey:
    """What one card holds; ``refusal``: why the backend does not run it today; ``forecast``: what its rounds take."""

    card: Card
    survey: Survey
    refusal: str | None
    forecast: Forecast | None
    n_layers: int


def plan(source: str, gpus: Sequence[str], options: PlanOptions, *, as_json: bool) -> int:
    """Print the plan of ``source``, a file or a published identity, for the named cards (none: all known ones)."""
    cards = [card_named(name) for name in gpus] or list(CARDS)
    with planned_from(source) as model:
        config = options.config(model.spec.max_position)
        found = [_on_card(model, card, config) for card in cards]
        if as_json:
            print(json.dumps(_document(model, config, found), indent=2))
        else:
            print("\n".join(_lines(model, config, found)))
    return 0


@contextmanager
def planned_from(source: str) -> Iterator[BoundModel]:
    """The bound model of a file, or of a published identity whose file is not needed. UsageError for neither."""
    if Path(source).exists():
        with Artifact.open(Path(source)) as artifact:
            yield bind(artifact)
        return
    known = [str(identity) for identity in PUBLISHED]
    if source not in known:
        raise UsageError(f"{source}: no such file, and no published identity; those are {', '.join(known)}")
    yield planned_model(source)


def _on_card(model: BoundModel, card: Card, config: EngineConfig) -> CardSurvey:
    backend = CardBackend(card)
    found = survey(backend, model, config)
    refusal = backend.refusal(model, found.plan.limits, found.plan.options)
    forecast = None if refusal else backend.forecast(model, found.plan)
    return CardSurvey(card, found, refusal, forecast, len(model.layers))


def _networks(found: CardSurvey) -> str:
    residency = found.survey.plan.options.residency
    if residency.weights == "device":
        return "all"
    return f"{found.n_layers - len(residency.streamed or ())} of {found.n_layers}"


def _remedy(found: Survey) -> str:
    if found.fits:
        return "-"
    return found.remedy or "a smaller artifact"


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.1f}"


def _count(number: int | None) -> str:
    return "none" if number is None else f"{number:,}"


_ROWS: tuple[tuple[str, Callable[[CardSurvey], str]], ...] = (
    ("card", lambda found: found.card.name),
    ("memory", lambda found: mebibytes(found.card.total_bytes)),
    ("driver", lambda found: mebibytes(DRIVER_BYTES)),
    ("weights", lambda found: mebibytes(found.survey.plan.weight_bytes)),
    ("KV pages", lambda found: mebibytes(found.survey.plan.kv_bytes)),
    ("recurrent state", lambda found: mebibytes(found.survey.plan.state_bytes)),
    ("workspace", lambda found: mebibytes(found.survey.plan.workspace_bytes)),
    ("snapshots", lambda found: mebibytes(found.survey.plan.device_snapshot_bytes)),
    ("graphs", lambda found: mebibytes(found.survey.plan.graph_bytes)),
    ("host memory", lambda found: mebibytes(found.survey.plan.host_weight_bytes)),
    ("networks on the device", _networks),
    ("slots of the others", lambda found: str(found.survey.plan.options.residency.n_slots or "-")),
    ("free", lambda found: mebibytes(found.survey.left_bytes)),
    ("fits", lambda found: "yes" if found.survey.fits else "no"),
    ("KV pool, tokens", lambda found: _count(found.survey.plan.limits.n_pages * found.survey.plan.limits.page_tokens)),
    ("KV pool if auto", lambda found: _count(found.survey.auto_tokens)),
    ("largest context", lambda found: _count(found.survey.context)),
    ("most sequences", lambda found: _count(found.survey.concurrency)),
    ("what would fit", lambda found: _remedy(found.survey)),
    ("predicted tokens/s", lambda found: _rate(found.forecast.plain_rate if found.forecast else None)),
    ("predicted with drafts", lambda found: _rate(found.forecast.drafting_rate if found.forecast else None)),
)


_HOST_ROWS = ("host memory", "networks on the device", "slots of the others", "predicted with drafts")
"""Left out where they say nothing."""


def _chunk(cards: Sequence[CardSurvey]) -> int:
    """Prompt tokens per prefill call, the same on every card."""
    return cards[0].survey.plan.limits.prefill_chunk


def _lines(model: BoundModel, config: EngineConfig, cards: Sequence[CardSurvey]) -> Iterator[str]:
    drafts = f", {config.draft_tokens} drafts by {config.spec}" if config.spec != "none" else ""
    kv_dtype = "bf16" if config.kv_dtype == "auto" else config.kv_dtype
    yield (
        f"{model.artifact.identity}: context {config.max_context:,}, sequences {config.max_concurrency}, "
        f"keys and values {kv_dtype}, prefill chunk {_chunk(cards):,}{drafts}"
    )
    cells = [(label, *(of(found) for found in cards)) for label, of in _ROWS]
    cells = [row for row in cells if row[0] not in _HOST_ROWS or set(row[1:]) - {"-", "all", mebibytes(0)}]
    widths = [max(len(row[i]) for row in cells) for i in range(1 + len(cards))]
    for label, *texts in cells:
        columns = (text.rjust(width) for text, width in zip(texts, widths[1:], strict=True))
        yield f"{label:<{widths[0]}}  {'  '.join(columns)}"
    if any(found.forecast for found in cards):
        yield ""
        yield from _forecast_lines(config, cards)
    for found in cards:
        if not any(any(row) for row in found.survey.grid.values()):
            continue
        yield ""
        # Each sequence has its whole context in the pool.
        rows = [[f"longest context on {found.card.name}", *(f"{n} at once" for n in GRID_SEQUENCES)]]
        rows += [[f"--kv-dtype {kv_dtype}", *map(_count, row)] for kv_dtype, row in found.survey.grid.items()]
        wide = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        for label, *texts in rows:
            yield label.ljust(wide[0]) + "".join("  " + text.rjust(w) for text, w in zip(texts, wide[1:], strict=True))
    for refusal in dict.fromkeys(found.refusal for found in cards if found.refusal):
        yield f"estimated, since the backend refuses it today: {refusal}"


def _forecast_lines(config: EngineConfig, cards: Sequence[CardSurvey]) -> Iterator[str]:
    """What the predictions mean, and what the rounds of each card consist of."""
    drafts = f"; with drafts: {ACCEPTANCE:.0%} of them accepted" if config.spec != "none" else ""
    yield f"predicted, not measured on this card: one sequence, {config.max_context:,} tokens behind it{drafts}"
    for found in cards:
        if found.forecast is not None and (streamed := found.survey.plan.options.residency.streamed):
            layers = ", ".join(map(str, streamed))
            yield f"{found.card.name}: networks of layers {layers} are streamed; {forecast_text(found.forecast)}"


def _document(model: BoundModel, config: EngineConfig, cards: Sequence[CardSurvey]) -> dict[str, Any]:
    return {
        "schema": _SCHEMA,
        "model": str(model.artifact.identity),
        "context": config.max_context,
        "concurrency": config.max_concurrency,
        "kv_dtype": "bf16" if config.kv_dtype == "auto" else config.kv_dtype,
        "prefill_chunk": _chunk(cards),
        "draft_tokens": config.draft_tokens,
        "cards": [_card_document(found) for found in cards],
    }


def _card_document(found: CardSurvey) -> dict[str, Any]:
    plan_, survey_ = found.survey.plan, found.survey
    return {
        "gpu": card_key(found.card),
        "memory_bytes": found.card.total_bytes,
        "driver_bytes": DRIVER_BYTES,
        "weight_bytes": plan_.weight_bytes,
        "kv_bytes": plan_.kv_bytes,
        "kv_tokens": plan_.limits.n_pages * plan_.limits.page_tokens,
        "state_bytes": plan_.state_bytes,
        "workspace_bytes": plan_.workspace_bytes,
        "snapshot_bytes": plan_.device_snapshot_bytes,
        "graph_bytes": plan_.graph_bytes,
        "host_weight_bytes": plan_.host_weight_bytes,
        "streamed_layers": list(plan_.options.residency.streamed or ()),
        "slots": plan_.options.residency.n_slots,
        "free_bytes": survey_.left_bytes,
        "fits": survey_.fits,
        "largest_context": survey_.context,
        "largest_concurrency": survey_.concurrency,
        "auto_kv_tokens": survey_.auto_tokens,
        "context_by_kv_dtype": {
            kv_dtype: {str(n): tokens for n, tokens in zip(GRID_SEQUENCES, row, strict=True)}
            for kv_dtype, row in survey_.grid.items()
        },
        "remedy": survey_.remedy,
        "predicted_tokens_per_second": found.forecast and round(found.forecast.plain_rate, 2),
        "predicted_with_drafts": found.forecast
        and found.forecast.drafting_rate
        and round(found.forecast.drafting_rate, 2),
        "estimated": found.refusal,
    }
