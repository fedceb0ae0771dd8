"""Activation statistics: what ``ninfer-run calibrate`` measures and ``ninfer-convert`` reads, as one JSON document.

A site is one input that decoder matrices multiply. It has the name that the activation divisor of its matrix would
have, whether the artifact has that object or not: statistics of any recipe serve any other. Schema: ``specs/cli.md``.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ninfer_format.errors import DirectoryError, UsageError
from ninfer_format.reader import open_regular
from ninfer_format.roles import ROLES, object_name, role_of
from ninfer_format.strict_json import parse_strict

SCHEMA = "ninfer.activation-stats/1"
MAX_BYTES = 1 << 30
HEAD_SITE = "text/output_head"
"""The final hidden rows; the heads have no divisor, so the site has the name of the first of them."""


def _sites() -> Mapping[str, str]:
    sites = {r.divisor_of: r.name for r in ROLES.values() if r.divisor_of is not None}
    for block in ("attention", "gdn"):
        mixer = f"text/layers/*/{block}/"
        shared = f"{mixer}input_projection/input_scale_divisor"
        split = (r.name for r in ROLES.values() if r.is_matrix and r.name.startswith(mixer) and r.styles == ("split",))
        sites |= dict.fromkeys(split, shared)
    return MappingProxyType(sites | dict.fromkeys(("text/output_head", "text/draft_head"), HEAD_SITE))


_SITE_OF_ROLE = _sites()
_SITE_ROLES = frozenset(_SITE_OF_ROLE.values())


@dataclass(frozen=True, slots=True)
class SiteStats:
    """One site: largest magnitude of any element, number of input rows, mean of x² per input channel.

    ``mean_square`` is float32 [K] or None; a site that no row reached (an expert nothing was routed to) has 0 rows.
    """

    amax: float
    n_rows: int
    mean_square: NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class ActivationStats:
    """A whole document. ``texts`` are (SHA-256, tokens) of what was fed, ``model`` is the identity that was run."""

    model: str
    dtype: str
    n_tokens: int
    context: int
    texts: tuple[tuple[str, int], ...]
    sites: Mapping[str, SiteStats]


def site_of(matrix: str) -> str | None:
    """The site whose rows the stored matrix multiplies; None for matrices that calibration does not cover."""
    role, layer = role_of(matrix)
    site = _SITE_OF_ROLE.get(role)
    return None if site is None else object_name(site, layer)


def dump_activation_stats(stats: ActivationStats) -> bytes:
    """The document as UTF-8 JSON, one line per site; float32 values are written so that they read back exactly."""
    head = {
        "schema": SCHEMA,
        "model": stats.model,
        "dtype": stats.dtype,
        "tokens": stats.n_tokens,
        "context": stats.context,
        "texts": [{"sha256": sha256, "tokens": tokens} for sha256, tokens in stats.texts],
    }
    lines = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    sites = ",\n".join(f"    {json.dumps(name)}: {json.dumps(_site_json(site))}" for name, site in stats.sites.items())
    lines.append(f'  "sites": {{\n{sites}\n  }}')
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def _site_json(site: SiteStats) -> dict[str, Any]:
    document: dict[str, Any] = {"amax": _exact(np.float32(site.amax)), "rows": site.n_rows}
    if site.mean_square is not None:
        document["mean_square"] = [_exact(value) for value in site.mean_square]
    return document


def _exact(value: np.float32) -> float:
    """The shortest decimal that reads back as this float32."""
    return float(np.format_float_scientific(value, unique=True))


def read_activation_stats(path: str | os.PathLike[str]) -> ActivationStats:
    """Read and check a document. UsageError names the first member or site that is not as it must be."""
    with open_regular(path) as stream:
        text = stream.read(MAX_BYTES + 1)
    if len(text) > MAX_BYTES:
        raise UsageError(f"{path}: is larger than {MAX_BYTES} bytes; not activation statistics")
    try:
        return _stats(parse_strict(text, what="file", reals=True))
    except (DirectoryError, _WrongError) as error:
        advice = "write it with `ninfer-run calibrate`"
        raise UsageError(f"{path}: not activation statistics: {error}; {advice}") from None


class _WrongError(Exception):
    """What is wrong with the document."""


def _stats(document: Any) -> ActivationStats:
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        found = document.get("schema") if isinstance(document, dict) else type(document).__name__
        raise _WrongError(f"its schema is {found!r:.60}, expected {SCHEMA!r}")
    model, dtype = (_member(document, name, str) for name in ("model", "dtype"))
    n_tokens, context = (_count(document, name) for name in ("tokens", "context"))
    texts = tuple((_member(text, "sha256", str), _count(text, "tokens")) for text in _member(document, "texts", list))
    sites = _member(document, "sites", dict)
    if not sites:
        raise _WrongError("it has no sites")
    checked = {name: _site(name, site) for name, site in sites.items()}
    return ActivationStats(model, dtype, n_tokens, context, texts, MappingProxyType(checked))


def _member(document: Any, name: str, kind: type) -> Any:
    value = document.get(name) if isinstance(document, dict) else None
    if not isinstance(value, kind):
        raise _WrongError(f"{name} is {value!r:.60}, expected a {kind.__name__}")
    return value


def _count(document: Any, name: str) -> int:
    value = document.get(name) if isinstance(document, dict) else None
    if type(value) is not int or value < 0:
        raise _WrongError(f"{name} is {value!r:.60}, expected a whole number")
    return value


def _site(name: str, document: Any) -> SiteStats:
    if role_of(name)[0] not in _SITE_ROLES or "*" in name:
        raise _WrongError(f"{name[:120]!r} is not a site")
    try:
        rows, amax = _count(document, "rows"), document.get("amax")
        if type(amax) not in (int, float) or not 0 <= amax < math.inf:
            raise _WrongError(f"amax is {amax!r:.60}, expected a finite number that is not negative")
        return SiteStats(float(amax), rows, _channels(document.get("mean_square")))
    except _WrongError as error:
        raise _WrongError(f"site {name!r}: {error}") from None


def _channels(values: Any) -> NDArray[np.float32] | None:
    if values is None:
        return None
    if not isinstance(values, list) or not all(type(value) in (int, float) for value in values):
        raise _WrongError("mean_square is not a list of numbers")
    with np.errstate(over="ignore"):
        channels = np.array(values, np.float64).astype(np.float32)
    if not channels.size or not np.isfinite(channels).all() or (channels < 0).any():
        raise _WrongError("mean_square is empty, or has a value that is negative or no finite float32")
    return channels
