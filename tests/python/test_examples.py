"""The examples run alone, with bagua-run and with torchrun, and learn the same each way."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"
DEADLINE_SECONDS = 120.0
LAUNCHERS: dict[str, list[str]] = {
    "alone": [],
    "bagua-run": ["-m", "bagua_ext.runner", "-np", "2", sys.executable],
    "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node", "2"],
}
ONE_THREAD = {"OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1"}
OUTER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# Sums of float32 in another order; training carries the difference on.
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Learned:
    """What an example printed, and what it wrote to its --json file."""

    lines: list[str]
    json: dict[str, Any]


def run_example(folder: Path, launcher: str, script: str, *arguments: str) -> Learned:
    """Runs ``examples/SCRIPT`` in one of ``LAUNCHERS``; it must succeed."""
    curve = folder / f"{launcher}.json"
    command = [sys.executable, *LAUNCHERS[launcher], str(EXAMPLES / script), *arguments]
    kept = {k: v for k, v in os.environ.items() if k not in OUTER and not k.startswith("BAGUA_")}
    job = subprocess.run(
        [*command, "--json", str(curve)],
        env={**kept, **ONE_THREAD, "XDG_CONFIG_HOME": str(folder / "config")},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_SECONDS,
    )
    assert job.returncode == 0, job.stdout[-8000:]
    lines = [line.removeprefix("[0] ") for line in job.stdout.splitlines()]
    return Learned(lines, json.loads(curve.read_text()))


def run_side_by_side(
    folder: Path, launchers: Sequence[str], script: str, *arguments: str
) -> Iterator[Learned]:
    """``run_example`` with each of ``launchers``: most of the time goes into imports."""
    with ThreadPoolExecutor() as pool:
        yield from pool.map(lambda way: run_example(folder, way, script, *arguments), launchers)


def test_digits_reach_97_percent_with_the_curve_of_one_process(tmp_path: Path) -> None:
    alone, ours, torchs = run_side_by_side(tmp_path, list(LAUNCHERS), "torch_digits.py")
    assert ours.json["accuracy"] >= 0.97
    assert ours.json["loss"] == pytest.approx(alone.json["loss"], abs=TOLERANCE)
    assert torchs.json == ours.json
    accuracy = f"{100 * ours.json['accuracy']:.1f}"
    for lines in (ours.lines, torchs.lines):
        assert any(re.match(r"\[#+ *\] \d+/345  epoch \d+/15  loss \d", line) for line in lines)
        assert re.fullmatch(rf"test accuracy {accuracy} %, \d+ samples/s", lines[-1]), lines[-1]


def test_tensorflow_digits_reach_97_percent_with_the_curve_of_one_process(tmp_path: Path) -> None:
    ways = ["alone", "bagua-run"]
    alone, ours = run_side_by_side(tmp_path, ways, "tf_digits.py", "--epochs", "8")
    assert min(alone.json["accuracy"], ours.json["accuracy"]) >= 0.97
    assert ours.json["loss"][:40] == pytest.approx(alone.json["loss"][:40], abs=TOLERANCE)
    accuracy = f"{100 * ours.json['accuracy']:.1f}"
    assert re.fullmatch(rf"test accuracy {accuracy} %, \d+ samples/s", ours.lines[-1])


def test_text_is_learned_alike_by_one_process_and_by_two(tmp_path: Path) -> None:
    sizes = ["--width", "64", "--layers", "1", "--steps", "20", "--batch", "3"]
    ways = ["alone", "bagua-run"]
    alone, ours = run_side_by_side(tmp_path, ways, "torch_text.py", *sizes)
    assert ours.json["loss"] == pytest.approx(alone.json["loss"], abs=TOLERANCE)
    assert ours.json["test_loss"] == pytest.approx(alone.json["test_loss"], abs=TOLERANCE)
    assert ours.json["test_loss"] < 5.0 < ours.json["loss"][0]
    last = ours.lines[-1]
    assert re.fullmatch(r"test loss \d\.\d\d nats per byte, \d+ samples/s", last), last
