"""Keeps torch.compile out of functions that cannot be part of a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def keep_out(function: F) -> F:
    """Makes a compiled function call ``function`` as it is, between two graphs.

    As ``torch.compiler.disable``, which would import the compiler now and wrap every call.
    """
    marked: Any = function
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = "it communicates with other ranks outside of graphs"
    try:
        from torch._C._dynamo import eval_frame

        skip = eval_frame._FrameAction.SKIP
        strategy = eval_frame._FrameExecStrategy(skip, skip)
        eval_frame.set_code_exec_strategy(marked.__code__, strategy)
    except (ImportError, AttributeError):
        # Another torch: what the function calls is compiled piece by piece, which is slower only.
        return function
    return function
