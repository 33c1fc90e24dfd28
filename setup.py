"""Builds the C++ parts with CMake and puts them into the package; the rest is in pyproject.toml.

Variables, with TORCH or TENSORFLOW for FRAMEWORK:
    BAGUA_PYTHON              interpreter whose frameworks the operations are built for, if the one
                              that runs this file does not see them (uv's isolated builds)
    BAGUA_WITH_FRAMEWORK      1: fail if none that is usable is found; the core needs none
    BAGUA_WITHOUT_FRAMEWORK   1: do not look for it
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
FRAMEWORKS = ("torch", "tensorflow")
PLACE = ("folder", "version")
# What pip's isolation sets to hide packages from the interpreter that it runs.
ISOLATION = ("PYTHONPATH", "PYTHONHOME", "PYTHONNOUSERSITE")


def environment_without_isolation() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ISOLATION}


def flag(name: str) -> bool:
    value = os.environ.get(name, "")
    if value not in ("", "0", "1"):
        raise SetupError(f"{name} is '{value}': use 1 or 0")
    return value == "1"


def find(framework: str) -> dict[str, str]:
    """The outer interpreter's framework ("folder", "version"), or the "reason" for none."""
    upper = framework.upper()
    wanted = flag(f"BAGUA_WITH_{upper}")
    if flag(f"BAGUA_WITHOUT_{upper}"):
        if wanted:
            raise SetupError(
                f"BAGUA_WITH_{upper}=1 and BAGUA_WITHOUT_{upper}=1 are both set: unset one"
            )
        return {"reason": f"BAGUA_WITHOUT_{upper} is set"}
    python = os.environ.get("BAGUA_PYTHON") or sys.executable
    found = probe(python, framework)
    if wanted and "folder" not in found:
        raise SetupError(
            f"BAGUA_WITH_{upper}=1, but for {python}: {found['reason']}. Install {framework} "
            "there, or name the interpreter that has it with BAGUA_PYTHON"
        )
    return found


def probe(python: str, framework: str) -> dict[str, str]:
    script = (ROOT / "cmake" / f"probe_{framework}.py").read_text()
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
            f"cannot run {python} to look for {framework}: {error}. Correct BAGUA_PYTHON"
        ) from error
    except (subprocess.CalledProcessError, json.JSONDecodeError) as error:
        said = getattr(error, "stderr", "") or str(error)
        raise SetupError(f"{python} failed to look for {framework}: {said.strip()}") from error


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
    """Libraries of an earlier build may fit another framework, or be of a part that is off now."""
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
        found = {framework: find(framework) for framework in FRAMEWORKS}
        for framework, place in found.items():
            if "folder" in place:
                print(f"bagua_ext: with operations for {framework} {place['version']}")
            else:
                print(f"bagua_ext: without operations for {framework}: {place['reason']}")
        self.run_cmake(found)

    def run_cmake(self, found: dict[str, dict[str, str]]) -> None:
        cmake = program("cmake", "cmake", "CMAKE_BIN_DIR")
        if cmake is None:
            raise SetupError("CMake is missing: pip install cmake")
        ninja = program("ninja", "ninja", "BIN_DIR")
        build = ROOT / "build" / f"cmake-{build_key(found, ninja is not None)}"
        # Every option is given each time: the cache keeps those of an earlier configuration.
        options = {
            "CMAKE_BUILD_TYPE": "Release",
            "Python3_EXECUTABLE": sys.executable,
            "BAGUA_PYTHONPATH": folder_of("cffi"),
            "BAGUA_WITH_PYTHON": "ON",
            "BAGUA_SANITIZE": "",
            "BAGUA_WERROR": "OFF",
            "BAGUA_BUILD_TESTS": "OFF",
            "BAGUA_TENSORFLOW_VERSION": found["tensorflow"].get("version", ""),
        }
        for framework, place in found.items():
            options[f"BAGUA_WITH_{framework.upper()}"] = "ON" if "folder" in place else "OFF"
            options[f"BAGUA_{framework.upper()}_DIR"] = place.get("folder", "")
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


def build_key(found: dict[str, dict[str, str]], has_ninja: bool) -> str:
    """Names the build folder by all that a CMake cache must not mix."""
    places = [found[framework].get(key, "") for framework in FRAMEWORKS for key in PLACE]
    parts = [str(ROOT), sys.base_prefix, sys.version, *places, str(has_ninja)]
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
