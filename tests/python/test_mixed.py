"""Jobs whose ranks run different frameworks, as bagua-run starts them. See ``checks/mixed.py``."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

LaunchMixed = Callable[..., "subprocess.CompletedProcess[str]"]

CHECKS = Path(__file__).resolve().parent / "checks"
# The promise is 1 s. A loaded machine may schedule the survivors later than that.
BOUND_SECONDS = 5.0


@pytest.mark.parametrize(
    ("programs", "end"),
    (
        (((1, "torch"), (1, "tensorflow")), "kill"),
        (((1, "tensorflow"), (1, "torch")), "kill"),
        (((2, "torch"), (1, "tensorflow")), "leave"),
    ),
)
def test_ranks_of_both_frameworks_are_one_job(
    launch_mixed: LaunchMixed, programs: tuple[tuple[int, str], ...], end: str
) -> None:
    job = launch_mixed("mixed.py", programs, end, ok=False, BAGUA_TIMEOUT_SECONDS="1")
    ranks = sum(count for count, _ in programs)
    checks = len(re.findall(r"^def check_", (CHECKS / "mixed.py").read_text(), re.M))
    assert len(re.findall(r"\] ok check_", job.stdout)) == ranks * checks, job.stdout
    survived = [float(seconds) for seconds in re.findall(r"survived ([0-9.]+)", job.stdout)]
    assert len(survived) == ranks - 1 and max(survived) < BOUND_SECONDS, job.stdout
    assert job.returncode == (128 + signal.SIGKILL if end == "kill" else 0), job.stdout


def test_one_process_uses_both_frameworks_in_either_order(launch_ranks: LaunchMixed) -> None:
    job = launch_ranks("both.py", 2, TF_CPP_MIN_LOG_LEVEL="2")
    assert job.stdout.count("used both") == 2, job.stdout
