"""Inner loops under TorchScript: without Python's interpreter lock, so that worker threads scale with the cores."""

import sys
import threading
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from ninfer_convert.quantize.block import scripted_block

_COMPILING = threading.Lock()


def scripted(loop: Callable[..., Any]) -> Callable[..., Any]:
    """``loop`` under TorchScript, or as it is where that cannot be had. Any thread may ask first."""
    # It also takes care of the first use of MKL.
    scripted_block()
    with _COMPILING:
        return _compiled(loop)


@cache
def _compiled(loop: Callable[..., Any]) -> Callable[..., Any]:
    script = getattr(torch.jit, "script", None)
    if script is None or sys.version_info >= (3, 14):
        return loop
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            compiled: Callable[..., Any] = script(loop)
        except (RuntimeError, NotImplementedError):
            return loop
    return compiled
