"""What importing does, and what it says when something is missing."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

LaunchRanks = Callable[..., "subprocess.CompletedProcess[str]"]

ROOT = Path(__file__).resolve().parent.parent.parent


def python(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=60
    )


def test_the_package_alone_imports_no_framework(tmp_path: Path) -> None:
    code = """
import sys, bagua_ext, bagua_ext.basics
bagua_ext.basics.init()
print({"torch", "numpy", "tensorflow"} & sys.modules.keys() or "none")
"""
    result = python(code, tmp_path)
    assert result.stdout.strip() == "none", result.stderr


@pytest.mark.parametrize("framework", ("torch", "tensorflow"))
@pytest.mark.parametrize("folder", (False, True))
def test_without_a_framework_the_error_says_what_to_install(
    tmp_path: Path, framework: str, folder: bool
) -> None:
    """A folder named as the framework on the path can be imported, but it is not the framework."""
    if folder:
        (tmp_path / framework).mkdir()
    code = (
        f"""
folder, framework = {folder}, "{framework}"
"""
        + """
import importlib, importlib.util, importlib.machinery
found = importlib.util.find_spec
def without_it(name, package=None):
    if name == framework:
        return importlib.machinery.ModuleSpec(name, None, is_package=True) if folder else None
    return found(name, package)
importlib.util.find_spec = without_it
importlib.import_module("bagua_ext." + framework)
"""
    )
    result = python(code, tmp_path)
    assert result.returncode == 1
    assert "ImportError" in result.stderr and f"pip install {framework}" in result.stderr


@pytest.mark.parametrize("name", ("SyncBatchNorm", "elastic", "start_timeline"))
def test_names_of_horovod_that_are_missing_say_so(name: str) -> None:
    import bagua_ext.torch as bagua

    assert not hasattr(bagua, name)
    with pytest.raises(AttributeError, match=f"{name}.*not there yet"):
        getattr(bagua, name)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        getattr(bagua, "nonsense")  # noqa: B009


def test_fixed_folders_hold_no_package() -> None:
    for folder in ("torch", "tensorflow", "tests/torch", "tests/tensorflow"):
        assert not (ROOT / folder / "__init__.py").exists()


def test_everything_exported_exists(tmp_path: Path) -> None:
    code = "import bagua_ext.torch as m; print([n for n in m.__all__ if not hasattr(m, n)])"
    result = python(code, tmp_path)
    assert result.stdout.strip() == "[]", result.stderr


def test_use_before_init_says_what_to_do(tmp_path: Path) -> None:
    code = """
import torch, bagua_ext.torch as hvd
for call in (hvd.rank, hvd.size, lambda: hvd.allreduce(torch.ones(1)), hvd.barrier):
    try:
        call()
    except hvd.NotInitializedError as error:
        print("init" in str(error), isinstance(error, ValueError))
"""
    assert python(code, tmp_path).stdout.split() == ["True"] * 8


def test_importing_and_starting_adds_little_to_torch(launch_ranks: LaunchRanks) -> None:
    job = launch_ranks("start_cost.py", 2)
    added = [float(text) for text in re.findall(r"added ([0-9.]+) s", job.stdout)]
    print(job.stdout)
    assert len(added) == 2 and max(added) < 0.3, job.stdout
