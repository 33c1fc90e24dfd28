"""Loads the library of TensorFlow operations, or says what is missing."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from pathlib import Path
from typing import Any

import bagua_ext

_NAME = "libbagua_tensorflow.so"
_MARK = rb"BAGUA_BUILT_FOR_TENSORFLOW=([0-9A-Za-z.+-]+)"


class PlanTensor(ctypes.Structure):
    """bagua_tensorflow_tensor_t of tensorflow/python_border.h."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("dtype", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
    ]


def require_tensorflow() -> None:
    """Raises ImportError if TensorFlow is not installed.

    A folder named ``tensorflow`` on the path can be imported without being TensorFlow, so the
    package's file is looked for instead of trying the import.
    """
    spec = importlib.util.find_spec("tensorflow")
    if spec is None or spec.origin is None:
        raise ImportError(
            "bagua_ext.tensorflow needs TensorFlow, which is not installed here. "
            "Install it (pip install tensorflow), then reinstall bagua_ext so that it finds it."
        )


def _library_path() -> Path:
    path = Path(bagua_ext.__file__).parent / _NAME
    if not path.exists():
        raise ImportError(
            f"bagua_ext was built without TensorFlow ({path} is missing). "
            "Reinstall it beside TensorFlow, from its sources: pip install --force-reinstall "
            "--no-deps . ; or, if this is the source folder itself, run the script elsewhere."
        )
    return path


def check_version(library: bytes, version: str) -> None:
    """Raises ImportError unless ``library``, a file's contents, was built for ``version``.

    Releases of TensorFlow share no binary interface for operations: loading would end in missing
    symbols at best. Corrections of a release (2.21.0, 2.21.1) do.
    """
    found = re.search(_MARK, library)
    built_for = found.group(1).decode() if found else "an unknown version"
    if built_for.split(".")[:2] != version.split(".")[:2]:
        raise ImportError(
            f"bagua_ext's operations were built for TensorFlow {built_for}, but TensorFlow "
            f"{version} is installed. Reinstall bagua_ext beside it, from its sources: "
            "pip install --force-reinstall --no-deps ."
        )


def load_operations() -> Any:
    """Returns the module of generated operations (``bagua_allreduce`` and so on).

    Raises:
        ImportError: bagua_ext was built without TensorFlow or for another one.
    """
    import tensorflow as tf

    path = _library_path()
    check_version(path.read_bytes(), tf.__version__)
    try:
        return tf.load_op_library(str(path))
    except (tf.errors.NotFoundError, OSError) as error:
        raise ImportError(
            f"bagua_ext's operations do not fit TensorFlow {tf.__version__}: {error}. "
            "Reinstall bagua_ext beside this TensorFlow."
        ) from error


def load_border() -> ctypes.CDLL:
    """Returns the library's functions of tensorflow/python_border.h. It is loaded already."""
    border = ctypes.CDLL(str(_library_path()))
    border.bagua_tensorflow_fill_slot.argtypes = [
        ctypes.c_int64,
        ctypes.c_uint64,
        ctypes.c_int32,
        ctypes.POINTER(PlanTensor),
    ]
    border.bagua_tensorflow_empty_slot.argtypes = [ctypes.c_int64]
    border.bagua_tensorflow_empty_slot.restype = None
    border.bagua_tensorflow_last_error.restype = ctypes.c_char_p
    border.bagua_tensorflow_watch_interrupts.argtypes = [ctypes.c_void_p]
    border.bagua_tensorflow_watch_interrupts.restype = None
    return border
