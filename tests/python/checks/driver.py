"""Runs the ``check_*`` functions of a script on every rank of a job."""

from __future__ import annotations

import sys
import time
import traceback
from typing import Any


def run_checks(namespace: dict[str, Any]) -> None:
    """Calls the checks in order; arguments select by name. The first failure ends the rank.

    ``namespace`` holds the script's globals, among them ``hvd``, the module whose ranks it tests.
    """
    hvd = namespace["hvd"]
    wanted = sys.argv[1:]
    hvd.init()
    for name, check in list(namespace.items()):
        if not name.startswith("check_") or (wanted and name not in wanted):
            continue
        start = time.perf_counter()
        try:
            check()
        except BaseException:
            traceback.print_exc()
            print(f"FAILED {name} on rank {hvd.rank()} of {hvd.size()}", flush=True)
            sys.exit(1)
        if hvd.rank() == 0:
            print(f"ok {name} {1e3 * (time.perf_counter() - start):.0f} ms", flush=True)
    hvd.shutdown()


def raised(kind: type[BaseException], call: Any, *words: str) -> BaseException:
    """Returns what ``call()`` raises, which must be a ``kind`` whose text holds all ``words``."""
    try:
        call()
    except kind as error:
        missing = [word for word in words if word not in str(error)]
        if missing:
            raise AssertionError(f"{missing} not in: {error}") from error
        return error
    raise AssertionError(f"{kind.__name__} was not raised")
