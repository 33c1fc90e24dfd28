"""The side of ``bagua_ext.run`` that runs in a rank: ``python -m bagua_ext.runner.callee DIR``."""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from pathlib import Path
from typing import Any

from bagua_ext.runner.api import CALL_FILE, RESULT_FILE


def main() -> int:
    """Calls the function that DIR holds and leaves its result, or its error, there."""
    directory = Path(sys.argv[1])
    path = directory / f"{RESULT_FILE}.{os.environ['BAGUA_RANK']}"
    # From the user's own parent process, in a folder that nobody else can write to.
    search_path, call = pickle.loads((directory / CALL_FILE).read_bytes())
    sys.path[:] = search_path
    try:
        func, args, kwargs = pickle.loads(call)
        _leave(path, True, func(*args, **kwargs))
    except Exception:
        text = traceback.format_exc()
        sys.stderr.write(text)
        _leave(path, False, text)
        return 1
    return 0


def _leave(path: Path, succeeded: bool, value: Any) -> None:
    try:
        from cloudpickle import dumps
    except ImportError:
        from pickle import dumps
    content = dumps((succeeded, value))
    unfinished = path.with_suffix(path.suffix + ".part")
    unfinished.write_bytes(content)
    unfinished.replace(path)


if __name__ == "__main__":
    sys.exit(main())
