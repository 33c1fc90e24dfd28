"""What is built and usable here, for ``bagua-run --check-build`` and ``--version``."""

from __future__ import annotations

import ctypes.util
import importlib.metadata
import importlib.util
import platform
from pathlib import Path

import bagua_ext


def version() -> str:
    """Name and version of the distribution, whether installed or run from its sources."""
    number = getattr(bagua_ext, "__version__", None)
    if number is None:
        try:
            number = importlib.metadata.version("bagua_ext")
        except importlib.metadata.PackageNotFoundError:
            number = "(not installed)"
    return f"bagua-run {number}"


def report() -> str:
    """One line a part: [x] if it is built and usable, [ ] and the reason if not."""
    parts = {
        "core": _core(),
        "PyTorch binding": _binding("torch"),
        "TensorFlow binding": _binding("tensorflow"),
        "CUDA plugin": _cuda_plugin(),
        "NVIDIA driver": _driver(),
    }
    lines = [f"{version()}, Python {platform.python_version()}, {platform.machine()}"]
    for name, (usable, text) in parts.items():
        lines.append(f"  [{'x' if usable else ' '}] {name}: {text}")
    return "\n".join(lines)


def _core() -> tuple[bool, str]:
    try:
        from bagua_ext._core import ffi, lib
    except ImportError as error:
        return False, f"not usable: {error}"
    return True, ffi.string(lib.bagua_version()).decode(errors="replace")


def _binding(framework: str) -> tuple[bool, str]:
    """Looks without importing the framework, which takes seconds."""
    spec = importlib.util.find_spec(framework)
    if spec is None or spec.origin is None:  # a folder of that name alone has no origin
        return False, f"{framework} is not installed"
    names = [framework, f"{framework}_cpu"]
    number = next((n for n in map(_installed_version, names) if n), "of unknown version")
    built = _libraries(framework)
    if not built:
        return False, f"{framework} {number} is installed, the binding is not built"
    return True, f"{', '.join(built)} beside {framework} {number}"


def _installed_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _libraries(word: str) -> list[str]:
    found = []
    for folder in map(Path, bagua_ext.__path__):
        for path in sorted(folder.rglob("*.so*")):
            if word in str(path.relative_to(folder)):
                found.append(path.name)
    return found


def _cuda_plugin() -> tuple[bool, str]:
    built = _libraries("cuda")
    return bool(built), ", ".join(built) or "not built"


def _driver() -> tuple[bool, str]:
    name = ctypes.util.find_library("cuda")
    return name is not None, name or "not found"
