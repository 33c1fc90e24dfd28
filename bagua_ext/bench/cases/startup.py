"""What the library adds to the start of a job: its import and the meeting of the ranks."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bagua_ext.bench.external import clean_environment
from bagua_ext.bench.options import Options
from bagua_ext.bench.report import Report, Row

_TIMEOUT_SECONDS = 120
_OURS = "import bagua_ext.torch as bagua"
_JOIN_OURS = "bagua.init()"
_JOIN_GLOO = "import torch.distributed; torch.distributed.init_process_group('gloo')"
# Times of one clock, which all processes of a host share.
_PROBE = """
import json, os, pathlib, sys, time
times = [time.monotonic()]
for line in json.loads(sys.argv[2]):
    exec(line)
    times.append(time.monotonic())
place = pathlib.Path(sys.argv[1], os.environ["RANK"])
place.write_text(json.dumps(times))
"""


def _start(np: int, lines: list[str]) -> list[list[float]]:
    """Of each rank of a job: when it began and when each of ``lines`` had been executed."""
    with tempfile.TemporaryDirectory(prefix="bagua-bench-") as folder:
        command = [sys.executable, "-m", "bagua_ext.runner", "-np", str(np)]
        command += [sys.executable, "-c", _PROBE, folder, json.dumps(lines)]
        done = subprocess.run(
            command,
            env=clean_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
        )
        if done.returncode:
            raise RuntimeError(f"a job of {np} ranks failed: {done.stdout}{done.stderr}")
        return [json.loads(Path(folder, str(rank)).read_text()) for rank in range(np)]


def _ends(ranks: list[list[float]]) -> list[float]:
    """When the last rank had done each line."""
    return [max(times) for times in zip(*ranks, strict=True)]


def measure(options: Options) -> Report:
    """Seconds that each stage ends later than the one before, each on the rank that is last."""
    samples: dict[str, list[float]] = {}

    def add(name: str, seconds: float) -> None:
        samples.setdefault(name, []).append(seconds)

    for _ in range(5 if options.rounds is None else options.rounds):
        begin, torch, imported, joined = _ends(
            _start(options.np, ["import torch", _OURS, _JOIN_OURS])
        )
        add("import torch", torch - begin)
        add("import bagua_ext.torch", imported - torch)
        add("bagua.init", joined - imported)
        add("bagua, both", joined - torch)
        if "gloo" in options.compare:
            _, torch, joined = _ends(_start(options.np, ["import torch", _JOIN_GLOO]))
            add("gloo", joined - torch)
    rows = [Row(f"{options.np} ranks", name, seconds) for name, seconds in samples.items()]
    references: tuple[Any, ...] = ("gloo",) if "gloo" in options.compare else ()
    notes = ["Beyond import torch; each stage timed to the end of the slowest rank."]
    return Report("startup", options.np, references, rows, notes)
