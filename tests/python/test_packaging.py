"""What is built and packaged: contents, exports, library paths, and nothing of an earlier build."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

import bagua_ext
from bagua_ext._core import ffi, lib

ROOT = Path(__file__).resolve().parent.parent.parent
PROBE = ROOT / "cmake" / "probe_torch.py"
PROBE_TENSORFLOW = ROOT / "cmake" / "probe_tensorflow.py"
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv", "build", "dist", "shared", "__pycache__", "*.so", "*.egg-info"
)
BUILD_SECONDS = 600.0


def output_of(*command: str | Path, **variables: str) -> str:
    result = subprocess.run(
        list(map(str, command)),
        env={**os.environ, **variables},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


# ---- What is installed here ---------------------------------------------------------------------


def test_python_sees_every_function_of_the_c_api() -> None:
    header = (ROOT / "common" / "c_api.h").read_text()
    names = re.findall(r"^BAGUA_EXPORT [^(]*?(\w+)\(", header, flags=re.M)
    assert len(names) > 30
    assert [name for name in names if not hasattr(lib, name)] == []
    assert (lib.BAGUA_OK, lib.BAGUA_INTERNAL, lib.BAGUA_FLOAT64) == (0, 8, 8)


def test_the_core_bears_the_version_of_the_package() -> None:
    assert ffi.string(lib.bagua_version()).decode() == bagua_ext.__version__


def test_a_folder_named_torch_is_not_taken_for_an_installed_torch(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    found = output_of(sys.executable, "-S", PROBE, PYTHONPATH=str(tmp_path))
    assert found == '{"reason": "torch is not installed"}\n'


def test_a_torch_without_what_the_operations_need_is_named_with_its_version(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.9.1+cpu'\n")
    found = output_of(sys.executable, "-S", PROBE, PYTHONPATH=str(tmp_path))
    assert found == '{"reason": "torch 2.9.1+cpu is too old, 2.10 is needed"}\n'


def test_a_folder_named_tensorflow_is_not_taken_for_an_installed_one(tmp_path: Path) -> None:
    (tmp_path / "tensorflow").mkdir()
    found = output_of(sys.executable, "-S", PROBE_TENSORFLOW, PYTHONPATH=str(tmp_path))
    assert found == '{"reason": "tensorflow is not installed"}\n'


def test_a_tensorflow_before_keras_3_is_named_with_its_version(tmp_path: Path) -> None:
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow" / "__init__.py").touch()
    metadata = tmp_path / "tensorflow_cpu-2.15.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: tensorflow-cpu\nVersion: 2.15.1\n"
    )
    (metadata / "RECORD").write_text("tensorflow/__init__.py,sha256=x,0\n")
    found = output_of(sys.executable, "-S", PROBE_TENSORFLOW, PYTHONPATH=str(tmp_path))
    assert found == '{"reason": "tensorflow 2.15.1 is too old, 2.16 is needed"}\n'


def test_a_tensorflow_without_headers_is_a_reason_not_to_build(tmp_path: Path) -> None:
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow" / "__init__.py").touch()
    metadata = tmp_path / "tf_nightly-2.99.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: tf-nightly\nVersion: 2.99.0\n")
    (metadata / "RECORD").write_text("tensorflow/__init__.py,sha256=x,0\n")
    found = output_of(sys.executable, "-S", PROBE_TENSORFLOW, PYTHONPATH=str(tmp_path))
    assert "tensorflow 2.99.0 came without its headers" in found


# ---- What is built from a copy of the sources ---------------------------------------------------


def build_wheel(sources: Path, folder: Path, variables: Mapping[str, str]) -> str:
    """Builds into ``folder`` without a network; returns pip's output, successful or not."""
    command = [sys.executable, "-m", "pip", "wheel", "--no-index", "--no-deps"]
    command += ["--no-build-isolation", "--wheel-dir", str(folder), str(sources)]
    outer = {k: v for k, v in os.environ.items() if not k.startswith("BAGUA_")}
    return subprocess.run(
        command,
        env={**outer, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=BUILD_SECONDS,
    ).stdout


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources in which an earlier build for frameworks left its libraries."""
    copy = tmp_path_factory.mktemp("sources") / "bagua_ext"
    shutil.copytree(ROOT, copy, ignore=LEFT_OUT)
    for folder in ("bagua_ext", "build/lib.linux-x86_64-cpython-311/bagua_ext"):
        (copy / folder).mkdir(parents=True, exist_ok=True)
        (copy / folder / "libbagua_torch.so").write_text("stale")
        (copy / folder / "libbagua_tensorflow.so").write_text("stale")
        (copy / folder / "_core.cpython-311-x86_64-linux-gnu.so").write_text("stale")
    return copy


@pytest.fixture(scope="module")
def wheel(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the core alone."""
    folder = tmp_path_factory.mktemp("wheel")
    alone = {"BAGUA_WITHOUT_TORCH": "1", "BAGUA_WITHOUT_TENSORFLOW": "1"}
    output = build_wheel(sources, folder, alone)
    wheels = list(folder.glob("*.whl"))
    assert len(wheels) == 1, output
    return wheels[0]


@pytest.fixture(scope="module")
def moved(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder far from the build that holds the wheel's content."""
    folder = tmp_path_factory.mktemp("moved")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.mark.slow
def test_the_wheel_holds_the_package_alone(wheel: Path) -> None:
    version = bagua_ext.__version__
    assert wheel.name.startswith(f"bagua_ext-{version}-cp310-abi3-linux_")
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.partition("/")[0] for name in archive.namelist()}
        scripts = archive.read(f"bagua_ext-{version}.dist-info/entry_points.txt").decode()
    assert tops == {"bagua_ext", f"bagua_ext-{version}.dist-info"}
    assert "bagua-run = bagua_ext.runner:main_entry\n" in scripts
    assert "bagua-bench = bagua_ext.bench:main_entry\n" in scripts


@pytest.mark.slow
def test_libraries_of_an_earlier_build_are_gone(sources: Path, moved: Path) -> None:
    built = sorted(path.relative_to(moved).as_posix() for path in moved.rglob("*.so"))
    assert built == ["bagua_ext/_core.abi3.so", "bagua_ext/libbagua_core.so"]
    assert list((sources / "bagua_ext").rglob("*.so")) == []


@pytest.mark.slow
def test_libraries_find_each_other_wherever_they_are_moved(moved: Path) -> None:
    code = "import bagua_ext._core as c; print(c.__file__, c.lib.bagua_is_initialized())"
    printed = output_of(sys.executable, "-c", code, PYTHONPATH=str(moved))
    assert printed == f"{moved}/bagua_ext/_core.abi3.so 0\n"
    for path in moved.rglob("*.so"):
        dynamic = output_of("readelf", "--dynamic", path)
        assert re.findall(r"R(?:UN)?PATH\).*\[(.*)\]", dynamic) == ["$ORIGIN"], path


@pytest.mark.slow
def test_the_core_exports_the_c_api_alone(moved: Path) -> None:
    core = moved / "bagua_ext" / "libbagua_core.so"
    symbols = output_of("nm", "--dynamic", "--defined-only", core).splitlines()
    names = [line.split()[-1] for line in symbols]
    assert "bagua_init" in names
    assert [name for name in names if not name.startswith("bagua_")] == []


@pytest.mark.slow
def test_without_torch_the_operations_say_how_to_get_them(moved: Path) -> None:
    code = """
try:
    from bagua_ext.torch import _library
    _library.load_operations()
except ImportError as error:
    print(error)
"""
    printed = output_of(sys.executable, "-c", code, PYTHONPATH=str(moved))
    assert "built without PyTorch" in printed and "pip install" in printed


@pytest.mark.slow
def test_without_tensorflow_the_operations_say_how_to_get_them(moved: Path) -> None:
    code = """
try:
    from bagua_ext.tensorflow import _library
    _library.load_operations()
except ImportError as error:
    print(error)
"""
    hidden = {"PYTHONPATH": str(moved), "TF_CPP_MIN_LOG_LEVEL": "2"}
    printed = output_of(sys.executable, "-c", code, **hidden)
    assert "built without TensorFlow" in printed and "pip install" in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "text"),
    (
        ({"BAGUA_WITH_TENSORFLOW": "1", "BAGUA_WITHOUT_TENSORFLOW": "1"}, "are both set: unset"),
        ({"BAGUA_WITH_TORCH": "1", "BAGUA_WITHOUT_TORCH": "1"}, "are both set: unset one"),
        ({"BAGUA_WITH_TORCH": "yes"}, "BAGUA_WITH_TORCH is 'yes': use 1 or 0"),
        ({"BAGUA_PYTHON": "/nowhere/python"}, "cannot run /nowhere/python to look for torch"),
    ),
)
def test_a_wrong_variable_ends_the_build_with_its_name(
    variables: dict[str, str], text: str, sources: Path, tmp_path: Path
) -> None:
    assert text in build_wheel(sources, tmp_path, variables)
    assert list(tmp_path.iterdir()) == []
