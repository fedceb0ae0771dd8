"""``ninfer-run logits``: what the model says after every token of a given sequence, as an .npz file."""

import os
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ninfer_format.errors import UsageError
from ninfer_runtime.commands.options import EngineOptions
from ninfer_runtime.commands.report import say, say_rows, start_rows
from ninfer_runtime.commands.session import open_session
from ninfer_runtime.engine.sequence import check_tokens


def logits(engine_options: EngineOptions, token_ids: tuple[int, ...], out: Path) -> int:
    """Write ``logits`` float32 [T, head rows, padding included] and ``ids`` int32 [T]; the exit code."""
    if out.is_dir() or not out.parent.is_dir():
        raise UsageError(f"{out}: cannot be written; expected a file name in a folder that exists")
    with open_session(engine_options) as session:
        check_tokens(token_ids, session.vocab_rows)
        config = session.engine_config(context=len(token_ids))
        with session.engine(config) as engine:
            say_rows(start_rows(session, config, engine))
            shape = (len(token_ids), session.vocab_rows)
            write_npz(out, np.array(token_ids, np.int32), shape, engine.teacher_forced_chunks(token_ids))
    say(f"{out}: logits of {shape[0]} tokens × {shape[1]} rows")
    return 0


def write_npz(out: Path, ids: NDArray[np.int32], shape: tuple[int, int], rows: Iterable[NDArray[np.float32]]) -> None:
    """The arrays ``ids`` and ``logits`` in numpy's format, a chunk of rows at a time; complete or not there at all."""
    temporary = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive:
            with archive.open("ids.npy", "w") as member:
                np.lib.format.write_array(member, ids)
            with archive.open("logits.npy", "w", force_zip64=True) as member:
                header: dict[str, Any] = {"descr": "<f4", "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(member, header)
                for chunk in rows:
                    member.write(np.ascontiguousarray(chunk, "<f4").data)
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, out)
    finally:
        temporary.unlink(missing_ok=True)
