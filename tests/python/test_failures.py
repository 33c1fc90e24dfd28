"""A rank that dies, leaves or never comes gives every other rank a named error in bounded time."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RunRanks = Callable[..., Any]
LaunchRanks = Callable[..., "subprocess.CompletedProcess[str]"]

COLLECTIVES = (
    "allreduce",
    "small",
    "grouped",
    "allgather",
    "broadcast",
    "reducescatter",
    "alltoall",
    "barrier",
    "async",
)
# Before init, within it, while the optimizer's plan is agreed, within backward, at its end; while
# the others have joined, or work with it in a process set.
PLACES = ("init", "joining", "register", "backward", "finish", "workers", "joined", "set")
RESULT = re.compile(r"RESULT (\w+): (.*) after (-?[0-9.]+)$", re.M)
# The promise is 1 s. A loaded machine may schedule the survivors later than that.
BOUND_SECONDS = 5.0


def results(output: str) -> list[tuple[str, str, float]]:
    return [(kind, text, float(seconds)) for kind, text, seconds in RESULT.findall(output)]


def expect_peer_lost(output: str, ranks: int) -> None:
    got = results(output)
    assert len(got) == ranks - 1, output
    for kind, text, seconds in got:
        print(f"{kind} after {seconds:.2f} s: {text}")
        assert kind == "PeerLostError", output
        assert f"rank {ranks - 1}" in text, output
        assert seconds < BOUND_SECONDS, output


@pytest.mark.parametrize("ranks", (2, 3))
@pytest.mark.parametrize("place", COLLECTIVES)
def test_a_rank_killed_inside_a_collective(
    run_ranks: RunRanks, tmp_path: Path, place: str, ranks: int
) -> None:
    moment = str(tmp_path / "moment")
    job = run_ranks("failures.py", ranks, place, ok=False, BAGUA_TEST_MOMENT=moment)
    expect_peer_lost(job.output, ranks)
    assert job.codes == [0] * (ranks - 1) + [-signal.SIGKILL], job.output


@pytest.mark.parametrize("how", ("kill", "exit"))
@pytest.mark.parametrize("place", PLACES)
def test_a_rank_that_ends_elsewhere(
    run_ranks: RunRanks, tmp_path: Path, place: str, how: str
) -> None:
    moment = str(tmp_path / "moment")
    job = run_ranks("failures.py", 3, place, how, ok=False, BAGUA_TEST_MOMENT=moment)
    expect_peer_lost(job.output, 3)
    assert job.codes == [0, 0, -signal.SIGKILL if how == "kill" else 5], job.output


@pytest.mark.parametrize(("how", "code"), (("exit", 5), ("exception", 1), ("leave", 0)))
@pytest.mark.parametrize("place", ("alone", "finish"))
def test_a_rank_that_leaves_while_the_others_wait(
    run_ranks: RunRanks, tmp_path: Path, place: str, how: str, code: int
) -> None:
    moment = str(tmp_path / "moment")
    job = run_ranks("failures.py", 2, place, how, ok=False, BAGUA_TEST_MOMENT=moment)
    expect_peer_lost(job.output, 2)
    assert job.codes == [0, code], job.output


def test_an_operation_that_a_rank_never_submits(run_ranks: RunRanks, tmp_path: Path) -> None:
    limits = {"BAGUA_STALL_WARNING_SECONDS": "0.3", "BAGUA_TIMEOUT_SECONDS": "1"}
    limits["BAGUA_TEST_MOMENT"] = str(tmp_path / "moment")
    job = run_ranks("failures.py", 2, "never", ok=False, **limits)
    got = results(job.output)
    timeouts = [text for kind, text, _ in got if kind == "CollectiveTimeoutError"]
    assert any("lonely" in text and "rank 1" in text for text in timeouts), job.output
    assert job.codes == [0, 0] and all(seconds < 10 for _, _, seconds in got), job.output
    warnings = [line for line in job.output.splitlines() if "RESULT" not in line]
    assert any("lonely" in line and "rank 1" in line for line in warnings), job.output


def test_a_step_that_a_rank_never_makes(run_ranks: RunRanks, tmp_path: Path) -> None:
    limits = {"BAGUA_STALL_WARNING_SECONDS": "0.3", "BAGUA_TIMEOUT_SECONDS": "1"}
    limits["BAGUA_TEST_MOMENT"] = str(tmp_path / "moment")
    job = run_ranks("failures.py", 3, "idle", ok=False, **limits)
    got = results(job.output)
    assert len(got) >= 2, job.output
    for kind, text, seconds in got:
        assert kind == "CollectiveTimeoutError" and "rank 2" in text, job.output
        assert "DistributedOptimizer" in text and seconds < 10, job.output


def test_parameters_that_one_rank_alone_adds(run_ranks: RunRanks, tmp_path: Path) -> None:
    limits = {"BAGUA_STALL_WARNING_SECONDS": "0.3", "BAGUA_TIMEOUT_SECONDS": "1"}
    limits["BAGUA_TEST_MOMENT"] = str(tmp_path / "moment")
    job = run_ranks("failures.py", 3, "change", ok=False, **limits)
    got = results(job.output)
    assert len(got) == 3 and job.codes == [0, 0, 0], job.output
    assert all("DistributedOptimizer" in text for _, text, _ in got), job.output
    assert any("rank 2" in text for _, text, _ in got), job.output


def test_the_launcher_ends_a_job_that_lost_a_rank(
    launch_ranks: LaunchRanks, tmp_path: Path
) -> None:
    before = set(Path("/dev/shm").iterdir())
    moment = str(tmp_path / "moment")
    job = launch_ranks("failures.py", 3, "workers", ok=False, BAGUA_TEST_MOMENT=moment)
    expect_peer_lost(job.stdout, 3)
    assert job.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL), job.stdout
    assert set(Path("/dev/shm").iterdir()) <= before


@pytest.mark.parametrize("ranks", (2, 3))
def test_a_signal_ends_a_wait_and_the_job_goes_on(run_ranks: RunRanks, ranks: int) -> None:
    run_ranks("interrupts.py", ranks)


def test_the_launcher_ends_with_the_code_of_the_rank_that_left_first(
    launch_ranks: LaunchRanks, tmp_path: Path
) -> None:
    """Its process outlives those of the others, which print nothing themselves."""
    moment = str(tmp_path / "moment")
    job = launch_ranks("failures.py", 3, "slowly", ok=False, BAGUA_TEST_MOMENT=moment)
    assert job.returncode == 5, job.stdout
    assert "rank 2 exited with code 5" in job.stdout
