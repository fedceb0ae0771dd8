"""``ninfer-convert set-id``: a copy of an artifact under another identity."""

from typing import Annotated

import typer

from ninfer_convert.commands.set_template import Force, In, Json, Out, Quiet, write_edit

IdentityText = Annotated[
    str, typer.Argument(metavar="M/W", show_default=False, help="The identity, e.g. my-model/groupwise-int.")
]


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command(name="set-id")(set_id)


def set_id(
    source: In, out: Out, identity: IdentityText, force: Force = False, as_json: Json = False, quiet: Quiet = False
) -> int:
    """Write OUT: the artifact IN under the identity M/W; a published one only if IN has exactly its objects."""
    from ninfer_convert.edit import plan_identity
    from ninfer_format import Artifact, Identity

    with Artifact.open(source) as artifact:
        edit = plan_identity(artifact, Identity.parse(identity))
        return write_edit(edit, out, force=force, as_json=as_json, quiet=quiet)
