"""Loads the library of PyTorch operations, or says what is missing."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import bagua_ext

_NAME = "libbagua_torch.so"


def require_torch() -> None:
    """Raises ImportError if PyTorch is not installed.

    A folder named ``torch`` on the path can be imported without being PyTorch, so the package's
    file is looked for instead of trying the import.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise ImportError(
            "bagua_ext.torch needs PyTorch, which is not installed here. "
            "Install it (pip install torch), then reinstall bagua_ext so that it finds it."
        )


def load_operations() -> None:
    """Loads the operations into torch.ops.bagua_ext.

    Raises:
        ImportError: bagua_ext was built without PyTorch or for another one.
    """
    import torch

    path = Path(bagua_ext.__file__).parent / _NAME
    if not path.exists():
        raise ImportError(
            f"bagua_ext was built without PyTorch ({path} is missing). "
            "Reinstall it beside PyTorch, from its sources: pip install --force-reinstall "
            "--no-deps . ; or, if this is the source folder itself, run the script elsewhere."
        )
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise ImportError(
            f"bagua_ext's operations do not fit torch {torch.__version__}: {error}. "
            "Reinstall bagua_ext beside this torch."
        ) from error
