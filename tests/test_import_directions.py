"""Who may import whom: format knows nobody, the runtime never the converter; importing a package starts no backend."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("ninfer_format", "ninfer_convert", "ninfer_runtime")

# package -> top-level modules that none of its files may name, at module level or inside a function
FORBIDDEN = {
    "ninfer_format": {
        "ninfer_convert", "ninfer_runtime", "torch", "cupy", "cuda", "safetensors", "huggingface_hub",
        "tokenizers", "transformers", "jinja2", "pydantic",
    },
    "ninfer_convert": {"ninfer_runtime", "cupy", "cuda", "tokenizers", "transformers", "pydantic"},
    "ninfer_runtime": {"ninfer_convert", "safetensors", "transformers"},
}  # fmt: skip

# third-party module -> the only files of ninfer_format that may name it
RESERVED = {
    "msgpack": {"digests.py"},
    "zstandard": {"digests.py"},
    "typer": {"cli.py", "command.py"},
    "click": {"cli.py", "command.py"},
    "rich": {"cli.py", "command.py"},
}

# what `import package` must leave alone
HEAVY = (
    "torch", "cupy", "cuda", "pydantic", "transformers", "tokenizers", "huggingface_hub", "safetensors", "llguidance",
)  # fmt: skip


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imported_roots(path: Path) -> Iterator[tuple[str, int]]:
    """(top-level module, line) of every import statement and every `import_module("…")` literal in a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from ((alias.name.partition(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0], node.lineno
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.args[0].value.partition(".")[0], node.lineno


def top_level_roots(path: Path) -> Iterator[tuple[str, int]]:
    """Imports that run when the module is imported: function bodies and TYPE_CHECKING blocks are left out."""

    def visit(body: list[ast.stmt]) -> Iterator[tuple[str, int]]:
        for node in body:
            if isinstance(node, ast.Import):
                yield from ((alias.name.partition(".")[0], node.lineno) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                yield node.module.partition(".")[0], node.lineno
            elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
                yield from visit(node.body)
                yield from visit(node.orelse)
            elif isinstance(node, ast.Try):
                yield from visit(node.body)
                yield from visit(node.orelse)
                yield from visit(node.finalbody)
                for handler in node.handlers:
                    yield from visit(handler.body)
            elif isinstance(node, ast.ClassDef | ast.With):
                yield from visit(node.body)

    yield from visit(ast.parse(path.read_text(encoding="utf-8"), str(path)).body)


@pytest.mark.parametrize("package", PACKAGES)
def test_package_names_no_forbidden_module(package: str) -> None:
    assert sources(package), f"no source files under {package}/"
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in sources(package)
        for module, line in imported_roots(path)
        if module in FORBIDDEN[package]
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("module", sorted(RESERVED))
def test_reserved_module_stays_in_its_files(module: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}, which belongs in {', '.join(sorted(RESERVED[module]))}"
        for path in sources("ninfer_format")
        for name, line in imported_roots(path)
        if name == module and path.name not in RESERVED[module]
    ]
    assert not wrong, "\n".join(wrong)


def test_format_needs_only_the_standard_library_and_numpy() -> None:
    allowed = set(sys.stdlib_module_names) | {"numpy", "ninfer_format"} | set(RESERVED)
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in sources("ninfer_format")
        for module, line in imported_roots(path)
        if module not in allowed
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", PACKAGES)
def test_package_and_command_modules_start_no_backend_at_import(package: str) -> None:
    entry = [ROOT / package / "__init__.py", ROOT / package / "cli.py"]
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module} at module level"
        for path in entry
        for module, line in top_level_roots(path)
        if module in HEAVY
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", PACKAGES)
def test_importing_the_package_loads_neither_torch_nor_cupy(package: str) -> None:
    program = f"import sys, {package}; print(' '.join(m for m in {HEAVY!r} if m in sys.modules))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [], f"import {package} loaded {run.stdout.strip()}"


def test_importing_the_format_loads_no_command_line_or_index_library() -> None:
    program = f"import sys, ninfer_format; print(' '.join(m for m in {sorted(RESERVED)!r} if m in sys.modules))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert run.stdout.split() == [], f"import ninfer_format loaded {run.stdout.strip()}"
