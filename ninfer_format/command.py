"""What the three commands share: error and signal handling, missing extras, byte progress on a terminal."""

import importlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NoReturn

from ninfer_format.errors import MissingExtraError, NinferError, StorageError

INTERRUPTED = 130
BROKEN_PIPE = 128 + signal.SIGPIPE


def require_extra(module: str, extra: str) -> ModuleType:
    """Import ``module`` or raise MissingExtraError naming the extra that brings it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != module.partition(".")[0]:
            raise
        raise MissingExtraError(f"this needs {module}; install it with: pip install 'ninfer[{extra}]'") from None


def fail(error: NinferError) -> int:
    """Print one ``error:`` line on stderr and return the exit code of ``error``."""
    sys.stderr.write(f"error: {error}\n")
    return error.exit_code


def _discard_stdout() -> None:
    """Point stdout at /dev/null so that the interpreter's last flush cannot fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run_cli(app: Callable[..., Any]) -> NoReturn:
    """Run a typer app so that no traceback reaches a user; exits with the codes of the design.

    0 good, 1 checked and bad, 2 usage or missing extra, 3 I/O, 4 unsupported, 130 interrupted.
    """
    for stream in (sys.stdout, sys.stderr):  # file names need not be UTF-8, and the locale need not be either
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()
    except NinferError as error:
        code = fail(error)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        code = INTERRUPTED
    except BrokenPipeError:
        _discard_stdout()
        code = BROKEN_PIPE
    except SystemExit as ended:  # click ends with 1 on a broken pipe, which would mean "checked and bad"
        code = BROKEN_PIPE if type(sys.stdout).__name__ == "PacifyFlushWrapper" else ended.code
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        code = fail(StorageError(f"{where}{error.strerror or error}"))
    except MemoryError:
        code = fail(StorageError("out of memory"))
    except Exception as error:
        code = _click_exit(error)
    sys.exit(code if isinstance(code, int) else 0)


def _click_exit(error: Exception) -> int:
    """Exit code of a click exception (usage errors are shown by click itself); anything else is re-raised."""
    show, exit_code = getattr(error, "show", None), getattr(error, "exit_code", None)
    if type(error).__name__ == "Abort":
        sys.stderr.write("interrupted\n")
        return INTERRUPTED
    if show is not None:
        show()
    if exit_code is None:
        raise error
    return int(exit_code)


@contextmanager
def progress_bytes(total: int, description: str, *, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """A byte progress bar on stderr while the block runs; yields ``advance(n_bytes)``.

    Shown only when stderr is a terminal; otherwise ``advance`` does nothing and rich is not imported.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda n_bytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    numbers = (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    bar = Progress(TextColumn("{task.description}"), BarColumn(), *numbers, console=console, transient=True)
    with bar as progress:
        task = progress.add_task(description, total=total)
        yield lambda n_bytes: progress.advance(task, n_bytes)
