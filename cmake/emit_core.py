"""Writes the C source of bagua_ext._core. usage: emit_core.py common/c_api.h OUTPUT.c"""

from __future__ import annotations

import re
import sys
from pathlib import Path

# Called by bagua_init while it waits; bagua_ext.basics defines it.
_CALLBACKS = 'extern "Python" int bagua_interrupted(void);\n'


def declarations(header: str) -> str:
    """Returns the declarations of the C API without what only a compiler understands."""
    joined = header.replace("\\\n", " ")
    plain_c = re.sub(r"^#ifdef __cplusplus$.*?^#endif.*?$", "", joined, flags=re.M | re.S)
    no_directives = re.sub(r"^\s*#.*$", "", plain_c, flags=re.M)
    return no_directives.replace("BAGUA_EXPORT ", "")


def emit(header: Path, output: Path) -> None:
    """Writes ``output`` from the text of ``header``."""
    from cffi import FFI

    ffi = FFI()
    ffi.cdef(declarations(header.read_text()) + _CALLBACKS)
    ffi.set_source("bagua_ext._core", '#include "common/c_api.h"\n', py_limited_api=True)
    ffi.emit_c_code(str(output))


if __name__ == "__main__":
    emit(Path(sys.argv[1]), Path(sys.argv[2]))
