"""A rank that dies gives every other TensorFlow rank a named error; a signal ends a wait."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RunRanks = Callable[..., Any]

PLACES = (
    "allreduce",
    "small",
    "grouped",
    "allgather",
    "broadcast",
    "variables",
    "reducescatter",
    "alltoall",
    "barrier",
    "step",
)
RESULT = re.compile(r"RESULT (\w+): (.*) after (-?[0-9.]+)$", re.M)
# The promise is 1 s. A loaded machine may schedule the survivors later than that.
BOUND_SECONDS = 5.0


@pytest.mark.parametrize(
    ("place", "how"),
    [(place, how) for place in PLACES for how in ("eager", "graph")] + [("session", "eager")],
)
def test_a_rank_killed_inside_an_operation(
    run_tf_ranks: RunRanks, tmp_path: Path, place: str, how: str
) -> None:
    ranks = 3
    moment = str(tmp_path / "moment")
    job = run_tf_ranks(
        "tensorflow_failures.py", ranks, place, how, ok=False, BAGUA_TEST_MOMENT=moment
    )
    got = RESULT.findall(job.output)
    assert len(got) == ranks - 1, job.output
    for kind, text, seconds in got:
        assert kind == "PeerLostError" and f"rank {ranks - 1}" in text, job.output
        assert float(seconds) < BOUND_SECONDS, job.output
    assert job.codes == [0] * (ranks - 1) + [-signal.SIGKILL], job.output


@pytest.mark.parametrize("ranks", (2, 3))
def test_a_signal_ends_a_wait_and_the_job_goes_on(run_tf_ranks: RunRanks, ranks: int) -> None:
    run_tf_ranks("tensorflow_interrupts.py", ranks)
