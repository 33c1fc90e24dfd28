"""Builds the C++ parts with CMake and puts them into the package; the rest is in pyproject.toml.

Variables:
    BAGUA_PYTHON        interpreter whose torch the operations are built for, if the one that runs
                        this file does not see it (uv's isolated builds)
    BAGUA_WITH_TORCH    1: fail if no usable torch is found; without it the core is built alone
    BAGUA_WITHOUT_TORCH 1: do not look for torch
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import SetupError

ROOT = Path(__file__).resolve().parent
PACKAGE = "bagua_ext"
LIBRARIES = ("_core*.so", "lib*.so")
# What pip's isolation sets to hide packages from the interpreter that it runs.
ISOLATION = ("PYTHONPATH", "PYTHONHOME", "PYTHONNOUSERSITE")


def environment_without_isolation() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ISOLATION}


def flag(name: str) -> bool:
    value = os.environ.get(name, "")
    if value not in ("", "0", "1"):
        raise SetupError(f"{name} is '{value}': use 1 or 0")
    return value == "1"


def find_torch() -> dict[str, str]:
    """The outer interpreter's torch ("folder", "version"), or the "reason" why there is none."""
    wanted = flag("BAGUA_WITH_TORCH")
    if flag("BAGUA_WITHOUT_TORCH"):
        if wanted:
            raise SetupError("BAGUA_WITH_TORCH=1 and BAGUA_WITHOUT_TORCH=1 are both set: unset one")
        return {"reason": "BAGUA_WITHOUT_TORCH is set"}
    python = os.environ.get("BAGUA_PYTHON") or sys.executable
    found = probe(python)
    if wanted and "folder" not in found:
        raise SetupError(
            f"BAGUA_WITH_TORCH=1, but for {python}: {found['reason']}. Install torch there, "
            "or name the interpreter that has it with BAGUA_PYTHON"
        )
    return found


def probe(python: str) -> dict[str, str]:
    script = (ROOT / "cmake" / "probe_torch.py").read_text()
    try:
        answer = subprocess.run(
            [python, "-c", script],
            env=environment_without_isolation(),
            cwd="/",
            check=True,
            capture_output=True,
            text=True,
        )
        return json.loads(answer.stdout)
    except OSError as error:
        raise SetupError(
            f"cannot run {python} to look for torch: {error}. Correct BAGUA_PYTHON"
        ) from error
    except (subprocess.CalledProcessError, json.JSONDecodeError) as error:
        said = getattr(error, "stderr", "") or str(error)
        raise SetupError(f"{python} failed to look for torch: {said.strip()}") from error


def program(module: str, name: str, folder_attribute: str) -> str | None:
    """A build tool: from its Python package, whose script dies under isolation, or from PATH.

    A folder of the module's name can be imported without being the package; it has no attribute.
    """
    if importlib.util.find_spec(module) is not None:
        folder = getattr(importlib.import_module(module), folder_attribute, None)
        if folder is not None:
            return str(Path(folder) / name)
    return shutil.which(name)


def delete_built_libraries(*folders: Path) -> None:
    """Libraries of an earlier build may fit another torch, or be of a part that is off now."""
    for folder in folders:
        for pattern in LIBRARIES:
            for path in folder.rglob(pattern):
                path.unlink()


class BuildLibraries(build_ext):
    """Runs CMake once for all libraries; setuptools knows of ``_core`` alone."""

    def run(self) -> None:
        delete_built_libraries(
            ROOT / PACKAGE, *ROOT.glob(f"build/lib*/{PACKAGE}"), Path(self.build_lib) / PACKAGE
        )
        super().run()

    def build_extension(self, ext: Extension) -> None:
        torch = find_torch()
        if "folder" in torch:
            print(f"bagua_ext: with PyTorch's operations for torch {torch['version']}")
        else:
            print(f"bagua_ext: without PyTorch's operations: {torch['reason']}")
        self.run_cmake(torch.get("folder", ""))

    def run_cmake(self, torch_folder: str) -> None:
        cmake = program("cmake", "cmake", "CMAKE_BIN_DIR")
        if cmake is None:
            raise SetupError("CMake is missing: pip install cmake")
        ninja = program("ninja", "ninja", "BIN_DIR")
        build = ROOT / "build" / f"cmake-{build_key(torch_folder, ninja is not None)}"
        # Every option is given each time: the cache keeps those of an earlier configuration.
        options = {
            "CMAKE_BUILD_TYPE": "Release",
            "Python3_EXECUTABLE": sys.executable,
            "BAGUA_PYTHONPATH": folder_of("cffi"),
            "BAGUA_WITH_PYTHON": "ON",
            "BAGUA_WITH_TORCH": "ON" if torch_folder else "OFF",
            "BAGUA_TORCH_DIR": torch_folder,
            "BAGUA_SANITIZE": "",
            "BAGUA_WERROR": "OFF",
            "BAGUA_BUILD_TESTS": "OFF",
        }
        generator = "Unix Makefiles"
        if ninja is not None:
            generator = "Ninja"
            options["CMAKE_MAKE_PROGRAM"] = ninja
        configure = [cmake, "-S", str(ROOT), "-B", str(build), "-G", generator]
        configure += [f"-D{name}={value}" for name, value in options.items()]
        install = [cmake, "--install", str(build), "--component", "package"]
        run(configure)
        run([cmake, "--build", str(build), "--parallel", jobs()])
        run([*install, "--prefix", str(Path(self.build_lib).resolve())])

    def built_libraries(self) -> list[Path]:
        folder = Path(self.build_lib) / PACKAGE
        return sorted(path for pattern in LIBRARIES for path in folder.glob(pattern))

    def copy_extensions_to_source(self) -> None:
        for path in self.built_libraries():
            shutil.copy2(path, ROOT / PACKAGE / path.name)

    def get_outputs(self) -> list[str]:
        return [str(path) for path in self.built_libraries()]

    def get_output_mapping(self) -> dict[str, str]:
        if not self.inplace:
            return {}
        return {str(path): str(Path(PACKAGE) / path.name) for path in self.built_libraries()}


def build_key(torch_folder: str, has_ninja: bool) -> str:
    """Names the build folder by all that a CMake cache must not mix."""
    version = Path(torch_folder, "version.py").read_text() if torch_folder else ""
    parts = [str(ROOT), sys.base_prefix, sys.version, torch_folder, version, str(has_ninja)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def folder_of(module: str) -> str:
    """The folder to put on PYTHONPATH so that another interpreter process finds ``module``."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise SetupError(f"{module} is missing: pip install {module}")
    return str(Path(spec.origin).parent.parent)


def jobs() -> str:
    return os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(len(os.sched_getaffinity(0)))


def run(command: list[str]) -> None:
    print("+", " ".join(command), flush=True)
    code = subprocess.run(command, env=environment_without_isolation()).returncode
    if code != 0:
        raise SetupError(f"{command[0]} ended with code {code}; its messages stand above")


setup(
    # In pyproject.toml releases of setuptools before 77 refuse this, and later ones any other form.
    license="Apache-2.0",
    ext_modules=[Extension(f"{PACKAGE}._core", sources=[], py_limited_api=True)],
    cmdclass={"build_ext": BuildLibraries},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
