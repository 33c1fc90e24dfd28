"""A rank that dies, leaves or never comes gives every other rank a named error in bounded time."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

RunRanks = Callable[..., subprocess.CompletedProcess[str]]

COLLECTIVES = (
    "allreduce",
    "small",
    "grouped",
    "allgather",
    "broadcast",
    "reducescatter",
    "alltoall",
    "barrier",
)
RESULT = re.compile(r"RESULT (\w+): (.*) after ([0-9.]+)$", re.M)


def results(job: subprocess.CompletedProcess[str]) -> list[tuple[str, str, float]]:
    return [(kind, text, float(seconds)) for kind, text, seconds in RESULT.findall(job.stdout)]


def expect_peer_lost(job: subprocess.CompletedProcess[str], ranks: int, within: float) -> None:
    got = results(job)
    assert len(got) == ranks - 1, job.stdout
    for kind, text, seconds in got:
        assert kind == "PeerLostError", job.stdout
        assert f"rank {ranks - 1}" in text, job.stdout
        assert seconds < within, job.stdout


@pytest.mark.parametrize("place", COLLECTIVES)
def test_a_rank_killed_inside_a_collective(run_ranks: RunRanks, place: str) -> None:
    job = run_ranks("failures.py", 3, place, ok=False)
    # The kill comes 0.3 s after the first round.
    expect_peer_lost(job, 3, within=6.0)
    assert job.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL), job.stdout


@pytest.mark.parametrize("how", ("kill", "exit"))
@pytest.mark.parametrize("place", ("init", "backward", "workers"))
def test_a_rank_that_ends_elsewhere(run_ranks: RunRanks, place: str, how: str) -> None:
    job = run_ranks("failures.py", 2, place, how, ok=False)
    expect_peer_lost(job, 2, within=6.0)


def test_a_rank_that_leaves_by_an_exception(run_ranks: RunRanks) -> None:
    job = run_ranks("failures.py", 3, "exception", ok=False)
    expect_peer_lost(job, 3, within=3.0)
    assert job.returncode == 1
    assert "KeyError" in job.stdout


def test_a_rank_that_never_submits(run_ranks: RunRanks) -> None:
    limits = {"BAGUA_STALL_WARNING_SECONDS": "1", "BAGUA_TIMEOUT_SECONDS": "2"}
    job = run_ranks("failures.py", 2, "never", ok=False, **limits)
    got = results(job)
    assert any(kind == "CollectiveTimeoutError" and "lonely" in text for kind, text, _ in got)
    assert all(seconds < 10 for _, _, seconds in got)
    warning = [
        line for line in job.stdout.splitlines() if "RESULT" not in line and "lonely" in line
    ]
    assert warning and "1" in warning[0], job.stdout


def test_nothing_is_left_in_shared_memory(run_ranks: RunRanks) -> None:
    before = set(Path("/dev/shm").iterdir())
    run_ranks("failures.py", 2, "allreduce", ok=False)
    assert set(Path("/dev/shm").iterdir()) <= before
