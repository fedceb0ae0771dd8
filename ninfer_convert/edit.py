"""``set-template`` and ``set-id``: a new artifact that differs from another one in its template or its identity.

Weights are copied byte for byte. A published identity is given only to what has exactly its objects and its config.
Specification: ``specs/convert-cli.md``.
"""

import hashlib
import importlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ninfer_convert.checkpoint_view import checked_model
from ninfer_convert.config_check import config_differences, dflash_differences
from ninfer_convert.hf_config import checkpoint_config
from ninfer_convert.json_member import replace_member
from ninfer_convert.problems import Problem
from ninfer_convert.resources import PREFIX, token_ids
from ninfer_convert.rewrite import Changes, changed_directory, rewrite
from ninfer_convert.safetensors_header import LFS_POINTER
from ninfer_format import (
    Artifact,
    ArtifactError,
    Directory,
    Identity,
    InventoryError,
    ModelConfig,
    UsageError,
    compare_inventory,
)
from ninfer_format.inventory import expected_inventory
from ninfer_format.model_config import published_config
from ninfer_format.published import CONFIG_RESOURCE, PUBLISHED, TOKENIZER_IDS, published
from ninfer_format.reader import open_regular
from ninfer_format.recipes import RECIPE_NAMES, Recipe, published_recipe, recipe_for

SCHEMA = "ninfer.edit/1"
TEMPLATE = PREFIX + "chat_template.jinja"
TOKENIZER, TOKENIZER_CONFIG = PREFIX + "tokenizer.json", PREFIX + "tokenizer_config.json"
MAX_TEMPLATE_BYTES = 1 << 20
_ID = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Edit:
    """A checked edit: nothing is written yet."""

    artifact: Artifact
    identity: Identity
    changes: Changes
    notes: tuple[str, ...]

    @property
    def directory(self) -> Directory:
        """Directory of the new artifact."""
        return changed_directory(self.artifact, self.identity, self.changes)

    @property
    def payload_bytes(self) -> int:
        """Bytes of all its objects."""
        return sum(entry.n_bytes for entry in self.directory.objects)


def plan_template(artifact: Artifact, file: Path) -> Edit:
    """``artifact`` with ``file`` as its chat template, in both places where it is stored.

    UsageError if ``file`` is no template, ArtifactError if the artifact has no place for one.
    """
    content = _read_template(file)
    text = content.decode()
    if TEMPLATE not in artifact.objects.names():
        raise ArtifactError(f"{artifact.path}: has no {TEMPLATE} to replace; it is no model artifact")
    notes = [_syntax_note(text, file)]
    changes: dict[str, bytes | None] = {TEMPLATE: content}
    if TOKENIZER_CONFIG in artifact.objects.names():
        config, repeated = _repeated(artifact, text)
        if config is not None:
            changes[TOKENIZER_CONFIG] = config
        notes.append(repeated)
    notes.extend(_digest_notes(artifact.identity, artifact, changes))
    return Edit(artifact, artifact.identity, changes, tuple(notes))


def _read_template(file: Path) -> bytes:
    with open_regular(file) as stream:
        content = stream.read(MAX_TEMPLATE_BYTES + 1)
    if len(content) > MAX_TEMPLATE_BYTES:
        raise UsageError(f"{file}: has more than {MAX_TEMPLATE_BYTES} bytes, which no chat template needs")
    if not content.strip():
        raise UsageError(f"{file}: is empty; give the file of a Jinja chat template")
    if content.startswith(LFS_POINTER):
        raise UsageError(f"{file}: is a Git LFS pointer, not the file itself; fetch it with `git lfs pull`")
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{file}: is not UTF-8 text: {error.reason} at byte {error.start}") from None
    return content


def _syntax_note(text: str, file: Path) -> str:
    """A note on the syntax check; UsageError for a template that Jinja does not read."""
    try:
        jinja2 = importlib.import_module("jinja2")
    except ModuleNotFoundError:
        return "the template's syntax was not checked: jinja2 is not installed"
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        environment.parse(text)
    except jinja2.TemplateSyntaxError as error:
        raise UsageError(f"{file}: line {error.lineno} is no Jinja: {error.message}") from None
    return "the template's syntax is Jinja's; what it renders is for `ninfer-run generate` to show"


def _repeated(artifact: Artifact, template: str) -> tuple[bytes | None, str]:
    """``tokenizer_config.json`` with the template in it, and a note; None if it has no text to replace."""
    document = _document(artifact, TOKENIZER_CONFIG)
    member = document.get("chat_template")
    if member is None:
        return None, "tokenizer_config.json has no chat_template member and stays as it is"
    if not isinstance(member, str):
        return None, "tokenizer_config.json has a chat_template member that is no text; it stays as it is"
    text = bytes(artifact.payload(TOKENIZER_CONFIG)).decode()
    changed = replace_member(text, "chat_template", template)
    if json.loads(changed) != {**document, "chat_template": template}:
        raise ArtifactError(f"{artifact.path}: {TOKENIZER_CONFIG} names a member twice; convert the checkpoint again")
    return changed.encode(), "the chat_template member of tokenizer_config.json is replaced too"


def _document(artifact: Artifact, name: str) -> dict[str, Any]:
    try:
        document = json.loads(bytes(artifact.payload(name)).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{artifact.path}: {name} is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise ArtifactError(f"{artifact.path}: {name} does not hold a JSON object")
    return document


def plan_identity(artifact: Artifact, identity: Identity) -> Edit:
    """``artifact`` under ``identity``.

    To a published one: objects, config and tokenizer must be those of the contract, and the config resource goes. From
    a published one: the built-in config becomes a resource. UsageError for ids that cannot be given, InventoryError
    for a published identity that the artifact is not.
    """
    for part, text in (("model id", identity.model_id), ("weights id", identity.weights_id)):
        if not _ID.fullmatch(text):
            raise UsageError(f"{part} {text!r:.80} has characters other than letters, digits, '.', '_' and '-'")
    changes: dict[str, bytes | None] = {}
    if identity in PUBLISHED:
        if reasons := list(_against(artifact, identity)):
            more = f"; and {len(reasons) - 5} more" if len(reasons) > 5 else ""
            raise InventoryError(f"{artifact.path} is not {identity}: {'; '.join(reasons[:5])}{more}")
        if CONFIG_RESOURCE in artifact.objects.names():
            changes[CONFIG_RESOURCE] = None
        notes = ["objects, config and tokenizer size are those of the published identity; weights were not compared"]
        notes.extend(_digest_notes(identity, artifact, {}))
        return Edit(artifact, identity, changes, tuple(notes))
    config, _ = checked_model(artifact)
    _check_weights_id(config, identity)
    notes = []
    if artifact.identity in PUBLISHED:
        changes[CONFIG_RESOURCE] = published_config(artifact.identity).to_json()
        notes.append(f"the built-in config of {artifact.identity} is stored as {CONFIG_RESOURCE}")
    return Edit(artifact, identity, changes, tuple(notes))


def _check_weights_id(config: ModelConfig, identity: Identity) -> None:
    """A weights id that is a recipe's name must be this artifact's recipe."""
    if identity.weights_id not in RECIPE_NAMES:
        return
    built_in = [recipe_for(config.geometry, identity.weights_id)]
    built_in += [published_recipe(other) for other in PUBLISHED if other.weights_id == identity.weights_id]
    if not any(_same(config.recipe, recipe) for recipe in built_in):
        formats = dict(built_in[0].formats)
        role, found = next(
            ((role, format) for role, format in config.recipe.formats if formats.get(role) != format),
            ("the list of exceptions", "another one"),
        )
        raise UsageError(
            f"weights id {identity.weights_id!r} names a recipe that this artifact does not have: {role} is {found} "
            f"instead of {formats.get(role, 'absent')}; choose another name"
        )


def _same(ours: Recipe, theirs: Recipe) -> bool:
    return ours.formats == theirs.formats and dict(ours.exceptions) == dict(theirs.exceptions)


def _against(artifact: Artifact, identity: Identity) -> Iterator[str]:
    """Everything that keeps the artifact from being the published ``identity``."""
    objects = tuple(entry for entry in artifact.objects if entry.name != CONFIG_RESOURCE)
    directory = Directory(identity, objects)
    expected = expected_inventory(directory, published_config(identity))
    yield from compare_inventory(expected, directory, packed=False)
    if CONFIG_RESOURCE in artifact.objects.names():
        model = ModelConfig.from_json(artifact.payload(CONFIG_RESOURCE), name=artifact.identity.weights_id)
        tied = model.text_config.get("tie_word_embeddings") is True
        found = [*config_differences(identity, checkpoint_config(model, dtype="bfloat16", tied=tied))]
        found += dflash_differences(identity, model.dflash or {})
        yield from (problem.message for problem in found)
    if {TOKENIZER, TOKENIZER_CONFIG} <= set(artifact.objects.names()):
        problems: list[Problem] = []
        n_ids, _ = token_ids(_document(artifact, TOKENIZER), _document(artifact, TOKENIZER_CONFIG), problems)
        yield from (problem.message for problem in problems)
        if n_ids != TOKENIZER_IDS and not problems:
            yield f"the tokenizer has {n_ids} ids, {identity} requires {TOKENIZER_IDS}"


def _digest_notes(identity: Identity, artifact: Artifact, changes: Changes) -> Iterator[str]:
    """Which frontend files of a published identity are not the published ones; reported, never refused."""
    if identity not in PUBLISHED:
        return
    resources, held = published(identity).resources, artifact.objects.names()
    differing = []
    for name, resource in resources.items():
        content = changes.get(name) or (artifact.payload(name) if name in held else b"")
        if hashlib.sha256(content).hexdigest() != resource.sha256:
            differing.append(name.removeprefix(PREFIX))
    same = len(resources) - len(differing)
    names = f"; not {', '.join(differing)}" if differing else ""
    yield f"{same} of {len(resources)} frontend files have the digests of {identity}{names}"


def apply(edit: Edit, out: Path, *, force: bool = False, progress: Callable[[int], None] = lambda n_bytes: None) -> int:
    """Write the edited artifact to ``out``, atomically, and return its size in bytes; errors as ``rewrite``."""
    return rewrite(edit.artifact, out, edit.directory, edit.changes, force=force, progress=progress)


def report_of(edit: Edit, out: Path, file_bytes: int) -> dict[str, Any]:
    """What was changed, as ``--json`` says it."""
    changed = [
        {"name": name, "bytes": None, "sha256": None}
        if content is None
        else {"name": name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in edit.changes.items()
    ]
    return {
        "schema": SCHEMA,
        "path": str(out),
        "bytes": file_bytes,
        "identity": str(edit.identity),
        "former_identity": str(edit.artifact.identity),
        "changed": changed,
        "notes": list(edit.notes),
    }
