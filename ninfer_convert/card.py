"""``MODEL_CARD.md``: an artifact described for people, with a metadata block that model hubs read.

Everything in it comes from the conversion report and the finished file. Text from elsewhere (names, licences, notes) is
escaped: it cannot add markup, links or metadata.
"""

import json
import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ninfer_convert.manifest import PATH_ARGUMENTS, SOURCE_ROLES, ArtifactFacts, lasting_notes
from ninfer_convert.summaries import Report, StoredTensor, role_summaries, stored_tensors, total_bits_per_weight
from ninfer_format.inventory import component_of
from ninfer_format.show import TITLES

FILE_NAME = "MODEL_CARD.md"
_SOURCE_TITLES = {
    "source": "checkpoint",
    "base": "base checkpoint",
    "dflash": "DFlash companion",
}
_ARCHITECTURES = {"qwen3_5": "dense", "qwen3_5_moe": "mixture of experts"}


def model_card(report: Report, facts: ArtifactFacts) -> str:
    """The card as Markdown."""
    tensors = stored_tensors(report)
    sections = [
        _front_matter(report),
        f"# {_text(report['identity'])}",
        _introduction(report),
        _facts_table(report, facts, tensors),
        _usage(report, facts),
        "## Sizes",
        _sizes(report, tensors),
        "## Recipe and errors",
        _recipe(report, tensors),
        "## Sources",
        _sources(report),
        *_licences(report),
        *_notes(report),
    ]
    return "\n\n".join(sections) + "\n"


# --- Markdown ---------------------------------------------------------------------------------------------------------


def _text(value: object) -> str:
    """Plain text on one line."""
    flat = " ".join(str(value).split())
    return re.sub(r"([\\`*_\[\]<>#|~&]|^[-+])", r"\\\1", flat)


def _code(value: object) -> str:
    """A code span on one line, also inside a table."""
    flat = " ".join(str(value).split()).replace("|", "\\|")
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", flat)), default=0))
    pad = " " if flat.startswith("`") or flat.endswith("`") or not flat else ""
    return f"{fence}{pad}{flat}{pad}{fence}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], align: str) -> str:
    """``align`` has ``<`` or ``>`` per column; cells are Markdown already."""
    rule = ["---:" if side == ">" else "---" for side in align]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows))


def _figure(value: float) -> str:
    """Three significant digits."""
    return f"{value:.3g}"


# --- sections ---------------------------------------------------------------------------------------------------------


def _front_matter(report: Report) -> str:
    """Metadata as YAML; JSON strings are YAML strings."""
    source = report["source"]
    licence = source.get("licence") or {}
    members: dict[str, Any] = {
        "license": licence.get("id"),
        "license_name": licence.get("name"),
        "license_link": licence.get("link"),
        "base_model": source.get("repository"),
        "base_model_relation": "quantized" if source.get("repository") else None,
        "library_name": "ninfer",
        "tags": ["ninfer", str(_model_type(report)), str(report["recipe"]["name"])],
    }
    lines = [f"{name}: {json.dumps(value)}" for name, value in members.items() if value]
    return "\n".join(["---", *lines, "---"])


def _model_type(report: Report) -> str:
    moe = report["config"]["text_config"].get("num_experts")
    return "qwen3_5_moe" if moe else "qwen3_5"


def _introduction(report: Report) -> str:
    source, recipe = report["source"], report["recipe"]
    origin = _code(source.get("repository") or source.get("name") or "a local folder")
    if source.get("revision"):
        origin += f" at revision {_code(source['revision'])}"
    text = f"One file in the `.ninfer` container, made from {origin} with the recipe {_code(recipe['name'])}."
    description = (recipe.get("file") or {}).get("description")
    return f"{text} {_text(description)}." if description else text


def _facts_table(report: Report, facts: ArtifactFacts, tensors: Sequence[StoredTensor]) -> str:
    text = report["config"]["text_config"]
    kind = _model_type(report)
    parts = sorted({t.component for t in tensors} & {"mtp", "vision", "dflash"})
    named = [{"mtp": "MTP draft layer", "vision": "vision tower", "dflash": "DFlash companion"}[part] for part in parts]
    weights = sum(t.n_values for t in tensors if t.format != "I32")
    rows = [
        ("file", f"{_code(facts.file)}, {facts.n_bytes:,} bytes"),
        ("SHA-256", _code(facts.sha256)),
        ("identity", _code(report["identity"])),
        ("architecture", f"{_code(kind)} ({_ARCHITECTURES[kind]}), {_shape(text)}"),
        ("parts", ", ".join(["text", *named])),
        ("weights", f"{weights:,} at {total_bits_per_weight(tensors):.2f} bits"),
        ("converter", f"ninfer {_text(report['environment'].get('ninfer') or 'unknown')}"),
    ]
    if facts.published_as:
        rows.insert(2, ("known as", _text(facts.published_as)))
    return _table(("", ""), rows, "<<")


def _shape(text: Mapping[str, Any]) -> str:
    parts = [f"{text.get('num_hidden_layers')} layers", f"hidden {text.get('hidden_size')}"]
    if text.get("num_experts"):
        parts.append(f"{text['num_experts']} experts")
    return _text(", ".join(parts))


def _usage(report: Report, facts: ArtifactFacts) -> str:
    name = shlex.quote(" ".join(facts.file.split()))
    commands = [
        "pip install 'ninfer[cpu]'",
        f"ninfer-verify check --sums SHA256SUMS {name}",
        f"ninfer-run generate {name} --prompt Hello",
    ]
    again = f"The same bytes come from\n\n{_shell([_build_command(report, name)])}"
    return f"## Use\n\n{_shell(commands)}\n\n{again}"


def _shell(commands: Sequence[str]) -> str:
    return "```sh\n" + "\n".join(commands) + "\n```"


def _build_command(report: Report, name: str) -> str:
    """The command that built it, with capital placeholders for files and folders that have no public name."""
    source, words = report["source"], ["ninfer-convert build"]
    public = source.get("repository")
    words.append(f"{public}@{source['revision']}" if public and source.get("revision") else "CHECKPOINT")
    words.append(name)
    for option, value in report["arguments"].items():
        flag = "--" + option.replace("_", "-")
        if option in ("source", "device") or value in (None, False):
            continue
        if value is True:
            words.append(flag)
        elif option == "recipe" and report["recipe"].get("file"):
            words.append(f"{flag} RECIPE.toml")
        elif option in PATH_ARGUMENTS:
            words.append(f"{flag} {option.upper()}")
        else:
            words.append(f"{flag} {shlex.quote(str(value))}")
    return " ".join(" ".join(word.split()) for word in words)


def _sizes(report: Report, tensors: Sequence[StoredTensor]) -> str:
    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for record in report["objects"]:
        total = totals[component_of(record["name"])]
        total[0], total[1] = total[0] + 1, total[1] + record["bytes"]
    for tensor in tensors:
        totals[tensor.component][2] += tensor.n_values
    rows = [
        (TITLES.get(name, name), f"{count:,}", f"{n_bytes:,}", f"{8 * n_bytes / n:.2f}" if n else "")
        for name, (count, n_bytes, n) in totals.items()
    ]
    by_component = _table(("component", "objects", "bytes", "bits per weight"), rows, "<>>>")
    formats = report["statistics"]["formats"]
    rows_by_format = [(_code(name), f"{f['objects']:,}", f"{f['bytes']:,}") for name, f in formats.items()]
    return by_component + "\n\n" + _table(("format", "tensors", "bytes"), rows_by_format, "<>>")


def _recipe(report: Report, tensors: Sequence[StoredTensor]) -> str:
    summaries = role_summaries(tensors)
    rows = [
        (
            _code(role.role),
            ", ".join(map(_code, role.formats)),
            f"{role.n_objects:,}",
            f"{role.bits_per_weight:.2f}",
            _figure(role.relative),
            f"{_figure(role.worst.error['relative'] if role.worst.error else 0.0)}{_on_layer(role.worst)}",
            _figure(role.largest),
            "" if role.removed is None else f"{role.removed:.1%}",
        )
        for role in summaries
    ]
    searched = any(role.removed is not None for role in summaries)
    exact = sum(1 for tensor in tensors if tensor.error is None)
    if not rows:
        return f"All {exact:,} tensors are exact copies of the source."
    head = ("role", "format", "tensors", "bits per weight", "error", "worst tensor", "largest error", "search")
    n_columns = len(head) if searched else len(head) - 1
    return (
        _table(head[:n_columns], [row[:n_columns] for row in rows], "<<>>>>>>"[:n_columns])
        + "\n\nerror: norm of (stored − source) over norm of source, for all tensors of the role and for the worst; "
        "largest error: of a single weight. "
        + ("search: share of the squared error that searching scales removed. " if searched else "")
        + f"{exact:,} other tensors are exact copies."
    )


def _on_layer(tensor: StoredTensor) -> str:
    return "" if tensor.layer is None else f" (layer {tensor.layer})"


def _sources(report: Report) -> str:
    blocks = []
    for role in SOURCE_ROLES:
        if not (source := report.get(role)):
            continue
        name = _code(source.get("repository") or source.get("name") or "a local folder")
        revision = f", revision {_code(source['revision'])}" if source.get("revision") else ""
        rows = [
            (
                _code(s["file"]),
                f"{s['bytes']:,}",
                _code(s["sha256"]) if s.get("sha256") else f"header {_code(s['header_sha256'])}",
            )
            for s in source.get("shards", ())
        ]
        kinds = {kind: count for kind, count in (source.get("kinds") or {}).items() if kind != "plain"}
        stored = "".join(f"; {count:,} tensors stored as {_text(kind)}" for kind, count in kinds.items())
        table = _table(("file", "bytes", "SHA-256"), rows, "<><")
        title = _SOURCE_TITLES[role]
        blocks.append(f"{title[0].upper()}{title[1:]}: {name}{revision}{stored}.\n\n{table}")
    if head := report.get("draft_head"):
        digest = f", SHA-256 {_code(head['ranking_sha256'])}" if head.get("ranking_sha256") else ""
        blocks.append(f"Draft head: {head['rows']:,} rows; ranking: {_text(head['ranking'])}{digest}.")
    return "\n\n".join(blocks)


def _licences(report: Report) -> list[str]:
    """The licence section; nothing where no source names one."""
    lines = []
    for role in SOURCE_ROLES:
        licence = (report.get(role) or {}).get("licence")
        if not licence:
            continue
        declared = [_code(licence[key]) for key in ("id", "name", "link") if licence.get(key)]
        files = [f"{_code(file['file'])} ({_text(file['title'])})" for file in licence.get("files", ())]
        lines.append(f"- {_SOURCE_TITLES[role]}: {', '.join([*declared, *files])}")
    return ["## Licence", "As the sources name it:\n\n" + "\n".join(lines)] if lines else []


def _notes(report: Report) -> list[str]:
    notes = lasting_notes(report["notes"])
    return ["## Notes", "\n".join(f"- {_text(note)}" for note in notes)] if notes else []
