"""Picks the framework that Keras runs on; the rest of the package does not ask which it is."""

from __future__ import annotations

import importlib.util
from types import ModuleType


def require_keras() -> None:
    """Raises ImportError unless Keras 3 is installed."""
    spec = importlib.util.find_spec("keras")
    if spec is None or spec.origin is None:
        raise ImportError(
            "bagua_ext.keras needs Keras 3, which is not installed here. Install it (pip install "
            "keras) beside TensorFlow or PyTorch."
        )
    import keras

    if int(keras.__version__.split(".")[0]) < 3:
        raise ImportError(f"bagua_ext.keras needs Keras 3, this is Keras {keras.__version__}")


def load_framework() -> ModuleType:
    """Returns ``_tensorflow`` or ``_torch``, whichever Keras' backend is.

    Raises:
        ImportError: Keras has another backend, or the framework's binding is missing.
    """
    import keras

    backend = keras.config.backend()
    if backend == "tensorflow":
        from bagua_ext.keras import _tensorflow

        return _tensorflow
    if backend == "torch":
        from bagua_ext.keras import _torch

        return _torch
    raise ImportError(
        f"bagua_ext.keras needs Keras on TensorFlow or PyTorch; its backend here is '{backend}'. "
        "Set KERAS_BACKEND=tensorflow or KERAS_BACKEND=torch before the first import of keras."
    )
