"""Data-parallel training on N processes through one shared C++ core.

``import bagua_ext.torch as hvd`` gives PyTorch's operations and optimizer. This module holds what
needs no framework: the errors, the version and ``run``.
"""

from __future__ import annotations

from typing import Any

from bagua_ext.exceptions import (
    AbortedError,
    BaguaError,
    CollectiveTimeoutError,
    HorovodInternalError,
    MismatchError,
    NotInitializedError,
    PeerLostError,
)

__version__ = "0.1.0"

__all__ = [
    "AbortedError",
    "BaguaError",
    "CollectiveTimeoutError",
    "HorovodInternalError",
    "MismatchError",
    "NotInitializedError",
    "PeerLostError",
    "__version__",
    "run",
]


def __getattr__(name: str) -> Any:
    """Loads ``run`` on first use: the launcher is of no use inside a rank."""
    if name == "run":
        from bagua_ext.runner.api import run

        return run
    raise AttributeError(f"module 'bagua_ext' has no attribute '{name}'")
