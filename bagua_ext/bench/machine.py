"""Where and with what a bench was run: the first lines of every report."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import sys
import time
from pathlib import Path

import bagua_ext
from bagua_ext.bench.options import Options

_PACKAGES = ("torch", "tensorflow", "tensorflow_cpu", "mpi4py", "horovod", "numpy", "matplotlib")
_VARIABLES = ("BAGUA_", "HOROVOD_", "OMP_", "GLOO_", "TF_NUM_", "TF_ENABLE_")


def describe(options: Options, size: int) -> dict[str, str]:
    """Machine, build, versions, configuration and the command, each a line of text."""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "machine": _machine(),
        "load": " ".join(f"{load:.2f}" for load in os.getloadavg()) + " (1, 5, 15 minutes)",
        "build": _build(),
        "versions": _versions(),
        "configuration": _configuration(),
        "command": f"bagua-bench {' '.join(sys.argv[1:])}",
        "measured": _measured(options, size),
    }


def _measured(options: Options, size: int) -> str:
    ranks = f"{size} ranks, one thread each" + (", bound to cores" if options.bind else "")
    if options.case in ("idle", "startup"):
        return ranks
    return f"{ranks}, the candidates in turns, {options.warmup} rounds of warm-up"


def _machine() -> str:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30)
    cores = len(os.sched_getaffinity(0))
    return f"{_processor()}, {cores} cores, {memory:.0f} GiB, {platform.release()}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _build() -> str:
    """The core's version, and a digest that tells two builds of one version apart."""
    from bagua_ext._core import ffi, lib

    library = Path(bagua_ext.__file__).parent / "libbagua_core.so"
    digest = hashlib.sha256(library.read_bytes()).hexdigest()[:12]
    return f"bagua_ext core {ffi.string(lib.bagua_version()).decode()}, sha256 {digest}"


def _versions() -> str:
    found = [f"Python {platform.python_version()}"]
    for package in _PACKAGES:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def _configuration() -> str:
    """Variables that steer this library or the number of threads; never its secret."""
    chosen = [
        f"{key}={value}"
        for key, value in sorted(os.environ.items())
        if key.startswith(_VARIABLES) and "SECRET" not in key
    ]
    return " ".join(chosen) or "defaults"
