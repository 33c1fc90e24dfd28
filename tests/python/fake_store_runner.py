"""bagua-run with a store that only writes down what it is told, for tests of the launcher alone.

The lines go to the file that BAGUA_TEST_STORE_LOG names.
"""

from __future__ import annotations

import os
import sys

from bagua_ext.runner.cli import main


class RecordingStore:
    address = "127.0.0.1:1"

    def __init__(self, size: int, secret: bytes) -> None:
        self._path = os.environ.get("BAGUA_TEST_STORE_LOG", os.devnull)
        self._write(f"start {size} {secret.hex()}")

    def report_lost(self, rank: int, why: str) -> None:
        self._write(f"lost {rank} {why}")

    def stop(self) -> None:
        self._write("stop")

    def _write(self, line: str) -> None:
        with open(self._path, "a") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main(store_factory=RecordingStore))
