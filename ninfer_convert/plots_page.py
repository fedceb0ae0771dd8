"""The HTML page of a conversion's pictures: it holds them and the numbers behind them, and loads nothing."""

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from ninfer_convert.summaries import Report, RoleSummary, StoredTensor, total_bits_per_weight


@dataclass(frozen=True, slots=True)
class Picture:
    """A PNG file with its title."""

    file: str
    title: str
    png: bytes


_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2933; background: #fff; margin: 2rem auto; max-width: 72rem;
       padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.5rem; }
img { max-width: 100%; height: auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.86rem; }
th, td { padding: 0.2rem 0.8rem 0.2rem 0; text-align: right; border-bottom: 1px solid #e3e7eb; white-space: nowrap; }
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) { text-align: left; }
code { font: 0.95em ui-monospace, monospace; }
""".strip()


def page(
    report: Report, tensors: Sequence[StoredTensor], roles: Sequence[RoleSummary], pictures: Sequence[Picture]
) -> str:
    """The whole page; the pictures are part of its text."""
    title = escape(str(report["identity"]))
    source = report["source"].get("repository") or report["source"].get("name") or "a local folder"
    facts = (
        f"recipe <code>{escape(str(report['recipe']['name']))}</code>, made from <code>{escape(str(source))}</code>, "
        f"{report['output']['bytes']:,} bytes, {total_bits_per_weight(tensors):.2f} bits per weight"
    )
    blocks = [_block(picture) for picture in pictures]
    if not roles:
        blocks.insert(0, "<p>Every tensor is an exact copy of the source: there are no errors to show.</p>")
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title}</title>",
            f"<style>\n{_STYLE}\n</style></head><body>",
            f"<h1>{title}</h1>\n<p>{facts}</p>",
            *blocks,
            *_numbers(roles),
            "</body></html>\n",
        ]
    )


def _block(picture: Picture) -> str:
    title, text = escape(picture.title), base64.b64encode(picture.png).decode()
    return f'<h2>{title}</h2>\n<img alt="{title}" src="data:image/png;base64,{text}">'


def _numbers(roles: Sequence[RoleSummary]) -> Iterator[str]:
    if not roles:
        return
    head = (
        "role",
        "format",
        "tensors",
        "weights",
        "bits per weight",
        "relative error",
        "worst tensor",
        "largest error",
    )
    yield "<h2>Numbers</h2>\n<div class=scroll><table><thead><tr>"
    yield "".join(f"<th>{name}</th>" for name in head) + "</tr></thead><tbody>"
    for role in roles:
        worst = role.worst.error["relative"] if role.worst.error is not None else 0.0
        cells = (
            f"<code>{escape(role.role)}</code>",
            escape(", ".join(role.formats)),
            f"{role.n_objects:,}",
            f"{role.n_values:,}",
            f"{role.bits_per_weight:.2f}",
            f"{role.relative:.4g}",
            f"{worst:.4g}" + ("" if role.worst.layer is None else f" (layer {role.worst.layer})"),
            f"{role.largest:.4g}",
        )
        yield "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
    yield "</tbody></table></div>"
