"""The architecture's rules hold in this repository, and each of them notices a breach."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = ROOT / "tests" / "lint" / "check_layers.py"


def check(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), str(root)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def tree(root: Path, files: dict[str, str]) -> Path:
    (root / "common").mkdir()
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def long_function(lines: int) -> str:
    body = "".join(f"  Call({line});\n" for line in range(lines - 2))
    return f"void Long() {{\n{body}}}\n"


def test_this_repository_keeps_the_rules() -> None:
    result = check(ROOT)
    assert result.returncode == 0, result.stdout


GOOD = {
    "common/base/config.cc": '#include "common/base/config.h"\nauto* v = std::getenv("BAGUA_X");\n',
    "common/transport/tcp.cc": '#include <vector>\n#include "common/base/status.h"\n',
    "common/device/cuda/memory.cc": "#include <cuda_runtime.h>\n",
    "common/codec/note.cc": '// No sleep_for.\nauto t = "getenv(sleep_for)"; int n = 1\'000;\n',
    "common/runtime/engine.cc": '#include "common/collective/backend.h"\n' + long_function(80),
    "common/c_api.cc": '#include "common/c_text.h"\n#include "common/runtime/engine.h"\n',
    "common/base/short.cc": "".join(f"void F{n}() {{\n}}\n" for n in range(200)),
    "common/base/table.cc": "constexpr int kTable[] = {\n" + "  1,\n" * 90 + "};\n",
    "torch/ops.cc": '#include <torch/csrc/stable/library.h>\n#include "common/c_api.h"\n',
}


def test_a_tree_that_keeps_all_rules_passes(tmp_path: Path) -> None:
    result = check(tree(tmp_path, GOOD))
    assert (result.returncode, result.stdout) == (0, "layers ok\n")


BREACHES = {
    "a layer to its right": (
        {"common/base/wire.cc": '#include "common/transport/mesh.h"\n'},
        "common/base/wire.cc:1: 'base' may not include 'common/transport/mesh.h'",
    ),
    "a layer beside it": (
        {"common/codec/fp16.cc": '#include <span>\n#include "common/device/memory.h"\n'},
        "common/codec/fp16.cc:2: 'codec' may not include",
    ),
    "the border from inside": (
        {"common/runtime/engine.cc": '#include "common/c_api.h"\n'},
        "'runtime' may not include 'common/c_api.h'",
    ),
    "the core from a binding": (
        {"torch/ops.cc": '#include "common/base/status.h"\n'},
        "'torch' may not include 'common/base/status.h'",
    ),
    "the border's own files from a binding": (
        {"tensorflow/ops.cc": '#include "common/c_text.h"\n'},
        "'tensorflow' may not include 'common/c_text.h'; common/c_api.h is the whole border",
    ),
    "a path that hides the layer": (
        {"common/base/wire.cc": '#include "../transport/mesh.h"\n'},
        "write '../transport/mesh.h' from the repository's root",
    ),
    "a folder that is no layer": ({"common/util/text.h": "\n"}, "'util' is no layer"),
    "a framework in the core": (
        {"common/base/types.h": "#include <torch/csrc/stable/tensor.h>\n"},
        "is a framework's",
    ),
    "CUDA outside a cuda folder": (
        {"common/device/memory.cc": "#include <cuda_runtime.h>\n"},
        "belongs into files under a cuda/ folder",
    ),
    "the environment read elsewhere": (
        {"common/transport/socket.cc": 'auto* v = std::getenv("HOME");\n'},
        "getenv occurs in common/base/config.cc alone",
    ),
    "a sleep": (
        {"common/runtime/loop.cc": "\nvoid F() { std::this_thread::sleep_for(d); }\n"},
        "common/runtime/loop.cc:2: common/ waits for events",
    ),
    "a package in torch/": ({"torch/__init__.py": ""}, "torch/__init__.py:1: makes torch/ hide"),
    "a package in tests/tensorflow": (
        {"tests/tensorflow/__init__.py": ""},
        "tests/tensorflow/__init__.py:1: makes tests/tensorflow/ hide",
    ),
    "a header that hides PyTorch's": ({"torch/library.h": ""}, "hides PyTorch's own library.h"),
    "a long header": ({"common/base/a.h": "\n" * 201}, "201 lines, 200 is the limit"),
    "a long source": ({"common/base/a.cc": "\n" * 501}, "501 lines, 500 is the limit"),
    "a long function": (
        {"common/base/a.cc": "namespace bagua {\n\n" + long_function(81) + "\n}\n"},
        "common/base/a.cc:3: a function of 81 lines, 80 is the limit",
    ),
    "a long method": (
        {"common/base/a.cc": "struct alignas(8) S {\n public:\n" + long_function(81) + "};\n"},
        "a function of 81 lines",
    ),
}


@pytest.mark.parametrize(("files", "text"), BREACHES.values(), ids=BREACHES.keys())
def test_a_breach_is_named(files: dict[str, str], text: str, tmp_path: Path) -> None:
    result = check(tree(tmp_path, files))
    assert result.returncode == 1
    assert text in result.stdout and len(result.stdout.splitlines()) == 1


def test_a_folder_without_sources_is_refused(tmp_path: Path) -> None:
    result = check(tmp_path)
    assert result.returncode == 2 and "name the repository's root" in result.stdout
