"""TensorFlow's module: its names, use before init, and a library built for another release."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import bagua_ext

LIBRARY = Path(bagua_ext.__file__).parent / "libbagua_tensorflow.so"


def test_a_library_for_another_release_is_refused_with_both_versions() -> None:
    path = Path(bagua_ext.__file__).parent / "tensorflow" / "_library.py"
    spec = importlib.util.spec_from_file_location("_library_alone", path)
    library = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(library)  # without its package, which imports TensorFlow
    marked = b"\0ELF BAGUA_BUILT_FOR_TENSORFLOW=2.20.1\n\0"
    library.check_version(marked, "2.20.0")
    with pytest.raises(
        ImportError, match=r"TensorFlow 2\.20\.1, but TensorFlow 2\.21\.0.*Reinstall"
    ):
        library.check_version(marked, "2.21.0")
    with pytest.raises(ImportError, match="an unknown version"):
        library.check_version(b"nothing", "2.21.0")
    if LIBRARY.exists():
        with pytest.raises(ImportError, match=r"built for TensorFlow [0-9.]+, but TensorFlow 1\.0"):
            library.check_version(LIBRARY.read_bytes(), "1.0")


def test_names_and_use_before_init(run_tf_ranks: Callable[..., Any]) -> None:
    run_tf_ranks("tensorflow_names.py", 1)
